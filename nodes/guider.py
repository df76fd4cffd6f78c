"""Nodes for ComfyUI's own samplers: both experts as one GUIDER, and matching SIGMAS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..host import GuiderSettings, Models, current_host, io, search_aliases
from ..plan import AutoOffload
from ..sampling.cache import CacheSettings
from ..sampling.inputs import RequestOptions
from ..sampling.steps import Guidance, RequestError
from ..schema import OffloadPolicy
from ..schema.refs import ExpertsRef
from ..shapes import ContextWindows
from ..wan import GuidedStep
from . import inputs
from .sampler import for_experts, show_guidance_notices


def _guidance_input(name: str, default: float, tooltip: str) -> io.Input:
    # The range of ComfyUI's CFGGuider, with values below 1.
    return io.Float.Input(name, default=default, min=0.0, max=100.0, step=0.1, tooltip=tooltip)


GUIDER_INPUTS: tuple[io.Input, ...] = (
    inputs.EXPERTS_INPUT,
    io.Conditioning.Input(
        "positive",
        tooltip="From CLIPTextEncode, Wan Text Encode or, with an image, an image-to-video node.",
    ),
    inputs.NEGATIVE_INPUT,
    inputs.BOUNDARY_INPUT,
    _guidance_input(
        "guidance_high",
        4.0,
        "Strength of the prompt in the high-noise expert. Any value but 1 also computes the "
        "negative and doubles the compute of its calls; the bytes that are moved stay the same. A "
        "single model uses it in every call.",
    ),
    _guidance_input(
        "guidance_low",
        3.0,
        "The same for the low-noise expert. 1 halves the compute of its calls. Not used by a "
        "single model.",
    ),
    inputs.shift_input(
        "Some samplers use it in addition to the sigmas: set the value with which the sigmas were "
        "made."
    ),
    inputs.POLICY_INPUT,
    inputs.CACHE_INPUT,
    inputs.GUIDANCE_INPUT,
    inputs.WINDOWS_INPUT,
)


class WanStreamGuider(io.ComfyNode):
    """GUIDER over both streamed experts. Each call runs the expert for its noise level."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamGuider",
            display_name="Wan Guider (streamed)",
            category="WanStream/sampling",
            **search_aliases("ksampler, moe, cfg guider, custom sampler"),
            description="Runs both experts in SamplerCustomAdvanced with any of ComfyUI's "
            "samplers: no reload at the switch, and the sampler keeps its history across it. "
            "The defaults are those of Wan2.2 text-to-video; for image-to-video use flow_shift "
            "5, boundary_ratio 0.9 and guidance 3.5.",
            inputs=[*GUIDER_INPUTS],
            outputs=[io.Guider.Output(display_name="guider")],
        )

    @classmethod
    def execute(  # noqa: PLR0913 (one for each input)
        cls,
        experts: ExpertsRef,
        positive: Sequence[Any],
        negative: Sequence[Any],
        flow_shift: float,
        *,
        boundary_ratio: float,
        guidance_high: float,
        guidance_low: float,
        policy: OffloadPolicy | AutoOffload | None = None,
        cache: CacheSettings | None = None,
        guidance: Guidance | None = None,
        windows: ContextWindows | None = None,
    ) -> io.NodeOutput:
        boundary, high, low = for_experts(experts, boundary_ratio, guidance_high, guidance_low)
        if any(lora.steps for lora in experts.loras):
            raise RequestError(
                "a LoRA has strengths by steps (strength_steps), which Wan Guider does not apply: "
                "a sampler of ComfyUI may call the model several times in a step. Use Wan Sampler "
                "(streamed), or clear strength_steps"
            )
        chosen = replace(guidance or Guidance(), scales=(high, low))
        settings = GuiderSettings(
            boundary_ratio=boundary,
            guidance=chosen,
            options=RequestOptions(cache=cache, windows=windows),
        )
        policy = policy or OffloadPolicy.layerwise()
        host = current_host()
        guider = host.models.guider(
            experts, positive, negative, settings, flow_shift=flow_shift, policy=policy
        )
        scales = chosen.scales
        if chosen.steps is not None:
            # The noise levels determine the expert for each step, and only the sampler has them.
            scales = (min(chosen.steps), min(chosen.steps))
        steps = [GuidedStep(0, "high", scales[0]), GuidedStep(0, "low", scales[1])]
        shown = show_guidance_notices(host, experts, steps, chosen, high, low)
        return io.NodeOutput(guider, ui=shown or None)


class WanStreamSigmas(io.ComfyNode):
    """Noise levels for a run, computed without a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamSigmas",
            display_name="Wan Sigmas",
            category="WanStream/sampling",
            **search_aliases("scheduler, flow shift, shift"),
            description="Noise levels for SamplerCustomAdvanced or Wan Sampler: ComfyUI's "
            "schedules, and that of Wan2.2 and diffusers. Replaces ModelSamplingSD3 and "
            "BasicScheduler, and needs no model.",
            inputs=_schedule_inputs(current_host().models),
            outputs=[io.Sigmas.Output(display_name="sigmas")],
        )

    @classmethod
    def execute(cls, schedule: str, steps: int, flow_shift: float, denoise: float) -> io.NodeOutput:
        return io.NodeOutput(current_host().models.sigmas(schedule, steps, denoise, flow_shift))


def _schedule_inputs(models: Models) -> list[io.Input]:
    return [
        io.Combo.Input(
            "schedule",
            options=models.schedule_names(),
            default="simple",
            tooltip="Noise levels of the steps. simple: as in ComfyUI's Wan workflows. wan: as in "
            "Wan2.2 and diffusers. All cost the same.",
        ),
        io.Int.Input(
            "steps",
            default=20,
            **inputs.limits(1, 1000),
            tooltip="Time is proportional to it, and to the sampler's calls of the model per step: "
            "one for most, two for heun, dpm_2, dpmpp_2s, dpmpp_sde, exp_heun_2, seeds_2 and "
            "sa_solver_pece, three for heunpp2 and seeds_3.",
        ),
        inputs.SHIFT_INPUT,
        io.Float.Input(
            "denoise",
            default=1.0,
            **inputs.limits(0.0, 1.0, step=0.01),
            tooltip="Below 1: the last steps of a longer schedule (20 steps at 0.5 are the last 20 "
            "of 40), to change an existing latent. Costs the same: the number of steps does "
            "not change.",
        ),
    ]
