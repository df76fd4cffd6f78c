"""Node for guidance per step and for NAG."""

from __future__ import annotations

from ..host import io, search_aliases
from ..sampling import Guidance, parse_scales
from ..wan import Nag
from . import sockets

OFF = 1.0
"""NAG scale without an effect."""

GUIDANCE_INPUTS: tuple[io.Input, ...] = (
    io.String.Input(
        "guidance_steps",
        default="",
        tooltip="Guidance of each step from step 0 on, separated by commas; the last one is used for all later steps. "
        "Empty: the two of the sampler. Each step of 1 skips the negative prompt, half of its compute.",
    ),
    io.Float.Input(
        "nag_scale",
        default=OFF,
        min=1.0,
        max=100.0,
        step=0.1,
        tooltip="Distance of steps of guidance 1 from the negative prompt. 1: off; 11 is usual. Costs about 1 % "
        "more compute at 832x480x81 (an estimate); guidance would double it.",
    ),
    io.Float.Input(
        "nag_tau",
        default=2.5,
        min=0.1,
        max=10.0,
        step=0.1,
        tooltip="Largest ratio of the result to the one without NAG. Lower is safer. Costs nothing.",
    ),
    io.Float.Input(
        "nag_alpha",
        default=0.25,
        min=0.0,
        max=1.0,
        step=0.01,
        tooltip="Share of the result with NAG; the rest is without it. 0: no effect. Costs nothing.",
    ),
)


class WanStreamGuidance(io.ComfyNode):
    """Guidance scale per step, and a negative prompt for steps without guidance."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamGuidance",
            display_name="Wan Guidance",
            category="WanStream/sampling",
            **search_aliases("nag", "normalized attention guidance", "cfg", "cfg schedule"),
            description="Guidance for each step instead of each expert; and NAG, which applies the negative prompt in "
            "steps of guidance 1, as with distilled LoRAs, without the second pass of guidance.",
            inputs=[*GUIDANCE_INPUTS],
            outputs=[sockets.Guidance.Output(display_name="guidance")],
        )

    @classmethod
    def validate_inputs(cls, guidance_steps: str | None = None) -> bool:
        parse_scales(guidance_steps or "")
        return True

    @classmethod
    def execute(cls, guidance_steps: str, nag_scale: float, nag_tau: float, nag_alpha: float) -> io.NodeOutput:
        nag = None if nag_scale == OFF else Nag(scale=nag_scale, tau=nag_tau, alpha=nag_alpha)
        return io.NodeOutput(Guidance(steps=parse_scales(guidance_steps), nag=nag))
