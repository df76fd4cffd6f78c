"""Nodes that join two experts into one MODEL, and split it again."""

from __future__ import annotations

from ...host import current_host, io, search_aliases
from ..inputs import limits


class WanStreamJoinExperts(io.ComfyNode):
    """MODEL with a high-noise and a low-noise expert, for any sampler."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamJoinExperts",
            display_name="Join Experts",
            category="WanStream/loaders",
            **search_aliases("moe, wan 2.2, a14b, high noise, low noise, two models, ksampler"),
            description="Makes one MODEL of the two experts of Wan2.2, for one sampler of any "
            "kind: each call of the model runs the expert of its noise level. Both share one set "
            "of buffers, and at the switch the low-noise blocks are fetched while the last "
            "high-noise ones compute. LoRAs, patches and shifts in front of an input are for that "
            "expert, those behind this node for both.",
            inputs=[
                io.Model.Input(
                    "high_noise",
                    tooltip="The expert of the early, noisy steps, from Load Diffusion Model "
                    "(streamed) or Stream Model. Noise levels of schedulers are those of its "
                    "shift, or of one behind this node.",
                ),
                io.Model.Input(
                    "low_noise",
                    tooltip="The expert of the later steps: of the same model and with the same "
                    "policy. It may have another number format.",
                ),
                io.Float.Input(
                    "boundary_ratio",
                    default=0.875,
                    **limits(0.0, 1.0, step=0.001),
                    tooltip="The low-noise expert computes the calls below this noise level: 0.875 "
                    "for text-to-video, 0.9 for image-to-video. With shift 8 and the scheduler "
                    "simple, 0.9 switches after half of 20 steps, as ComfyUI's template does.",
                ),
            ],
            outputs=[io.Model.Output(display_name="model")],
        )

    @classmethod
    def execute(cls, high_noise: object, low_noise: object, boundary_ratio: float) -> io.NodeOutput:
        return io.NodeOutput(
            current_host().native.join_experts(high_noise, low_noise, boundary_ratio)
        )


class WanStreamSplitExperts(io.ComfyNode):
    """Both experts in a joined MODEL, as MODELs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamSplitExperts",
            display_name="Split Experts",
            category="WanStream/loaders",
            **search_aliases("moe, wan 2.2, a14b, high noise, low noise, lora"),
            description="Returns both experts of a joined MODEL, with the patches of both: to add "
            "a LoRA to one of them and join them again, or for two samplers. Costs nothing.",
            inputs=[io.Model.Input("model", tooltip="From Join Experts, with or without patches.")],
            outputs=[
                io.Model.Output("high_noise", display_name="high_noise"),
                io.Model.Output("low_noise", display_name="low_noise"),
            ],
        )

    @classmethod
    def execute(cls, model: object) -> io.NodeOutput:
        return io.NodeOutput(*current_host().native.split_experts(model))
