"""Nodes for ComfyUI's own samplers: both experts as one GUIDER, and matching SIGMAS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..host import GuiderSettings, current_host, io, search_aliases
from ..plan import AutoOffload
from ..sampling import Guidance, RequestError
from ..schema import ExpertsRef, OffloadPolicy
from ..wan import GuidedStep, guidance_mismatches
from .inputs import (
    BOUNDARY_INPUT,
    CACHE_INPUT,
    EXPERTS_INPUT,
    GUIDANCE_INPUT,
    POLICY_INPUT,
    SHIFT_INPUT,
    WINDOWS_INPUT,
    shift_input,
    show_notices,
)
from .sampler import settings_for


def _guidance_input(name: str, default: float, tooltip: str) -> io.Input:
    return io.Float.Input(name, default=default, min=0.0, max=100.0, step=0.1, tooltip=tooltip)


GUIDER_INPUTS: tuple[io.Input, ...] = (
    EXPERTS_INPUT,
    io.Conditioning.Input(
        "positive", tooltip="From CLIPTextEncode, Wan Text Encode or, with an image, an image-to-video node."
    ),
    io.Conditioning.Input("negative", tooltip="Like positive. Costs nothing if a guidance is 1."),
    BOUNDARY_INPUT,
    _guidance_input(
        "guidance_high",
        4.0,
        "Strength of the prompt in the high-noise expert. Any value but 1 also computes the negative and doubles "
        "the compute of its calls; the bytes that are moved stay the same. A single model uses it in every call.",
    ),
    _guidance_input(
        "guidance_low",
        3.0,
        "The same for the low-noise expert. 1 halves the compute of its calls. Not used by a single model.",
    ),
    shift_input("Some samplers use it in addition to the sigmas: set the value with which the sigmas were made."),
    POLICY_INPUT,
    CACHE_INPUT,
    GUIDANCE_INPUT,
    WINDOWS_INPUT,
)


class WanStreamGuider(io.ComfyNode):
    """GUIDER over both streamed experts; each call runs the expert of its noise level."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamGuider",
            display_name="Wan Guider (streamed)",
            category="WanStream/sampling",
            **search_aliases("ksampler", "moe", "cfg guider", "custom sampler"),
            description="Runs both experts in SamplerCustomAdvanced with any of ComfyUI's samplers: no reload at the "
            "switch, and the sampler keeps its history across it. The defaults are those of Wan2.2 text-to-video; "
            "for image-to-video use flow_shift 5, boundary_ratio 0.9 and guidance 3.5.",
            inputs=[*GUIDER_INPUTS],
            outputs=[io.Guider.Output(display_name="guider")],
        )

    @classmethod
    def execute(
        cls,
        experts: ExpertsRef,
        positive: Sequence[Any],
        negative: Sequence[Any],
        flow_shift: float,
        policy: OffloadPolicy | AutoOffload | None = None,
        guidance: Guidance | None = None,
        **settings: Any,
    ) -> io.NodeOutput:
        settings = settings_for(experts, settings)
        if any(lora.steps for lora in experts.loras):
            raise RequestError(
                "a LoRA has strengths by steps (strength_steps), which Wan Guider does not apply: a sampler of ComfyUI "
                "may call the model several times in a step. Use Wan Sampler (streamed), or clear strength_steps"
            )
        scales = settings.pop("guidance_high"), settings.pop("guidance_low")
        guider_settings = GuiderSettings(guidance=scales, more_guidance=guidance or Guidance(), **settings)
        policy = policy or OffloadPolicy.layerwise()
        guider = current_host().guider(
            experts, positive, negative, guider_settings, flow_shift=flow_shift, policy=policy
        )
        return io.NodeOutput(guider, ui=_guidance_notices(experts, scales, guidance) or None)


def _guidance_notices(experts: ExpertsRef, scales: tuple[float, float], guidance: Guidance | None) -> dict[str, Any]:
    """Show notices on a guidance that does not fit the experts or the LoRAs. See `show_notices`."""
    if guidance is None or guidance.steps is None:
        steps = [GuidedStep(0, "high", scales[0]), GuidedStep(0, "low", scales[1])]
        return show_notices(*guidance_mismatches(experts, steps), guidance_high=scales[0], guidance_low=scales[1])
    # The noise levels decide which expert runs a step, and are known only to the sampler.
    least = min(guidance.steps)
    return show_notices(*guidance_mismatches(experts, [GuidedStep(0, "high", least), GuidedStep(0, "low", least)]))


class WanStreamSigmas(io.ComfyNode):
    """Noise levels of a run, computed without a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamSigmas",
            display_name="Wan Sigmas",
            category="WanStream/sampling",
            **search_aliases("scheduler", "flow shift", "shift"),
            description="Noise levels for SamplerCustomAdvanced or Wan Sampler: ComfyUI's schedules, and that of "
            "Wan2.2 and diffusers. Replaces ModelSamplingSD3 and BasicScheduler, and needs no model.",
            inputs=_schedule_inputs(),
            outputs=[io.Sigmas.Output(display_name="sigmas")],
        )

    @classmethod
    def execute(cls, schedule: str, steps: int, flow_shift: float, denoise: float) -> io.NodeOutput:
        return io.NodeOutput(current_host().sigmas(schedule, steps, denoise, flow_shift))


def _schedule_inputs() -> list[io.Input]:
    return [
        io.Combo.Input(
            "schedule",
            options=current_host().schedule_names(),
            default="simple",
            tooltip="Noise levels of the steps. simple: as in ComfyUI's Wan workflows. wan: as in Wan2.2 and "
            "diffusers. All cost the same.",
        ),
        io.Int.Input(
            "steps",
            default=20,
            min=1,
            max=1000,
            tooltip="Time is proportional to it, and to the sampler's calls of the model per step: one for most, two "
            "for heun, dpm_2, dpmpp_2s, dpmpp_sde, exp_heun_2, seeds_2 and sa_solver_pece, three for heunpp2 and "
            "seeds_3.",
        ),
        SHIFT_INPUT,
        io.Float.Input(
            "denoise",
            default=1.0,
            min=0.0,
            max=1.0,
            step=0.01,
            tooltip="Below 1: the last steps of a longer schedule (20 steps at 0.5 are the last 20 of 40), to change "
            "an existing latent. Costs the same: the number of steps does not change.",
        ),
    ]
