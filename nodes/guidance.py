"""Node for guidance per step, NAG, and guidance on context tokens."""

from __future__ import annotations

from ..host import io, search_aliases
from ..sampling.steps import Guidance
from ..wan import Nag
from . import sockets
from .inputs import limits

OFF = 1.0
"""Scale without an effect, for NAG or the context."""

GUIDANCE_INPUTS: tuple[io.Input, ...] = (
    io.String.Input(
        "guidance_steps",
        default="",
        tooltip="Guidance of each step from step 0 on, separated by commas; the last one is used "
        "for all later steps. Empty: the two of the sampler. Each step of 1 skips the negative "
        "prompt, half of its compute.",
    ),
    io.Float.Input(
        "nag_scale",
        default=OFF,
        **limits(1.0, 100.0, step=0.1),
        tooltip="Distance of steps of guidance 1 from the negative prompt. 1: off; 11 is usual. "
        "Costs about 1 % more compute at 832x480x81 (an estimate); guidance would double it.",
    ),
    io.Float.Input(
        "nag_tau",
        default=2.5,
        **limits(0.1, 10.0, step=0.1),
        tooltip="Largest ratio of the result to the one without NAG. Lower is safer. Costs "
        "nothing.",
    ),
    io.Float.Input(
        "nag_alpha",
        default=0.25,
        **limits(0.0, 1.0, step=0.01),
        tooltip="Share of the result with NAG; the rest is without it. 0: no effect. Costs "
        "nothing.",
    ),
    io.Float.Input(
        "context_guidance",
        default=OFF,
        **limits(0.0, 100.0, step=0.1),
        optional=True,
        tooltip="Strength of the source and the references of Bernini. 1: off. Raise it where the "
        "video departs from them. Guided steps compute the negative prompt once more without "
        "them: 16 % more compute with a source video, 47 % with one image alone (832x480x81, "
        "counted operations).",
    ),
)


class WanStreamGuidance(io.ComfyNode):
    """Guidance scale per step, a negative prompt for steps without guidance, a context scale."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamGuidance",
            display_name="Wan Guidance",
            category="WanStream/sampling",
            **search_aliases(
                "nag, normalized attention guidance, cfg, cfg schedule, dual cfg, bernini guidance"
            ),
            description="Guidance for each step instead of each expert; and NAG, which applies the "
            "negative prompt in steps of guidance 1, as with distilled LoRAs, without the "
            "second pass of guidance. For Bernini also the strength of source and references.",
            inputs=[*GUIDANCE_INPUTS],
            outputs=[sockets.Guidance.Output(display_name="guidance")],
        )

    @classmethod
    def validate_inputs(cls, guidance_steps: str | None = None) -> bool:
        Guidance.parse_steps(guidance_steps or "")
        return True

    @classmethod
    def execute(
        cls,
        guidance_steps: str,
        nag_scale: float,
        nag_tau: float,
        nag_alpha: float,
        # ComfyUI passes only inputs in the workflow, so older workflows need this default.
        context_guidance: float = OFF,
    ) -> io.NodeOutput:
        # Scale 1 means off. NAG would still compute the negative attention and apply tau.
        nag = None if nag_scale == OFF else Nag(scale=nag_scale, tau=nag_tau, alpha=nag_alpha)
        return io.NodeOutput(
            Guidance(steps=Guidance.parse_steps(guidance_steps), nag=nag, context=context_guidance)
        )
