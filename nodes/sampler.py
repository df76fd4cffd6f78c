"""Sampler node: its inputs, their checks and the request made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from ..host import Host, current_host, io, search_aliases
from ..plan import AutoOffload
from ..plan.programs import TRAIN_TIMESTEPS
from ..sampling.cache import CacheSettings
from ..sampling.inputs import DenoiseRequest, RequestOptions, native_inputs, native_latent
from ..sampling.steps import SCHEDULES, SOLVERS, Guidance, RequestError, StepSettings
from ..schema import OffloadPolicy
from ..schema.refs import ExpertsRef, WorkersRef
from ..shapes import ContextWindows
from ..wan import GuidedStep, guidance_mismatches
from . import inputs, sockets
from .runs.notices import show_notices
from .runs.preview import PreviewSettings
from .runs.run_experts import SamplerInputs, SamplerRun, run_experts

if TYPE_CHECKING:
    from typing_extensions import Unpack  # `typing` has it from Python 3.11 on

FROM_BOUNDARY = -1
"""Value of `switch_step` with which `boundary_ratio` decides."""

MAX_GUIDANCE = 100.0

NO_END_STEP = 10000
"""Value of `end_step` past the end of any schedule; ComfyUI's samplers use the same."""

SEED_INPUT = io.Int.Input(
    "seed",
    default=0,
    # The seed range of ComfyUI's KSampler.
    **inputs.limits(0, 2**64 - 1),
    control_after_generate=True,
    tooltip="Draws the same noise as ComfyUI's own samplers. A new seed reloads nothing.",
)

SETTING_INPUTS: tuple[io.Input, ...] = (
    io.Int.Input(
        "steps",
        default=40,
        **inputs.limits(1, 1000),
        tooltip="Time is proportional to it: every step computes 40 blocks for each prompt in use. "
        "Wan2.2 was tuned for 40, 20 are usually enough, 4 need a distilled LoRA.",
    ),
    io.Combo.Input(
        "solver",
        options=list(SOLVERS),
        default="unipc",
        tooltip="Rule of a step. unipc and dpm++: second order, need fewer steps. euler: first "
        "order, for distilled LoRAs. lcm: draws new noise in every step, for LoRAs distilled "
        "that way. Their own time is negligible.",
    ),
    io.Combo.Input(
        "schedule",
        options=list(SCHEDULES),
        default="wan",
        **inputs.advanced(),
        tooltip="Noise levels of the steps. wan: as in Wan2.2 and diffusers. simple: as in "
        "ComfyUI.",
    ),
    inputs.SHIFT_INPUT,
    inputs.BOUNDARY_INPUT,
    io.Int.Input(
        "switch_step",
        default=FROM_BOUNDARY,
        **inputs.limits(FROM_BOUNDARY, 1000),
        **inputs.advanced(),
        tooltip="First step of the low-noise expert, counted from 0. -1: boundary_ratio decides.",
    ),
    io.Float.Input(
        "guidance_high",
        default=4.0,
        **inputs.limits(1.0, MAX_GUIDANCE, step=0.1),
        tooltip="Strength of the prompt in the high-noise expert. Any value but 1 also computes "
        "the negative and doubles the compute of its steps; the bytes that are moved stay the "
        "same. A single model uses it in every step.",
    ),
    io.Float.Input(
        "guidance_low",
        default=3.0,
        **inputs.limits(1.0, MAX_GUIDANCE, step=0.1),
        tooltip="The same for the low-noise expert. 1 halves the compute of its steps. Not used by "
        "a single model.",
    ),
    # The inputs for a part of the schedule have the same meaning as those of KSampler (Advanced).
    io.Int.Input(
        "start_step",
        default=0,
        **inputs.limits(0, 999),
        **inputs.advanced(),
        tooltip="Steps to skip at the start, which saves their time. The connected latent is mixed "
        "with noise of the level of that step; see add_noise.",
    ),
    io.Int.Input(
        "end_step",
        default=NO_END_STEP,
        **inputs.limits(1, NO_END_STEP),
        optional=True,
        **inputs.advanced(),
        tooltip="The run ends before this step; past the last step: it takes all steps. A "
        "following sampler continues with this number as its start_step.",
    ),
    io.Boolean.Input(
        "add_noise",
        default=True,
        optional=True,
        **inputs.advanced(),
        tooltip="Off: the latent already contains noise, from a sampler with leftover_noise on. "
        "Both samplers need the same steps, schedule and flow_shift.",
    ),
    io.Boolean.Input(
        "leftover_noise",
        default=False,
        optional=True,
        **inputs.advanced(),
        tooltip="On: a run that ends before the last step keeps its noise, for another sampler "
        "with add_noise off. Off: its last step removes all noise at once.",
    ),
    inputs.POLICY_INPUT,
    io.Sigmas.Input(
        "sigmas",
        optional=True,
        tooltip="Noise levels from another node, used as they are instead of steps, schedule and "
        "flow_shift. If they end above 0, that noise is left over.",
    ),
    inputs.WORKERS_INPUT,
    inputs.CACHE_INPUT,
    inputs.GUIDANCE_INPUT,
    inputs.WINDOWS_INPUT,
    inputs.PREVIEW_INPUT,
)
"""Inputs of a run except for its experts and for the texts, latent and seed of each video, in the
order that saved workflows depend on."""

NOT_CONNECTED = object()
"""Default for sigmas that are not linked; a linked input is None until the run."""


class SamplerWidgets(TypedDict, total=False):
    """Widgets of `SETTING_INPUTS`; those that older workflows lack may be missing."""

    steps: int
    solver: str
    schedule: str
    flow_shift: float
    boundary_ratio: float
    switch_step: int
    guidance_high: float
    guidance_low: float
    start_step: int
    end_step: int
    add_noise: bool
    leftover_noise: bool


class SamplerValues(SamplerWidgets, total=False):
    """Values of `SETTING_INPUTS`; those of links that are not connected are missing."""

    policy: OffloadPolicy | AutoOffload
    sigmas: torch.Tensor
    workers: WorkersRef
    cache: CacheSettings
    guidance: Guidance
    windows: ContextWindows
    preview: PreviewSettings


def for_experts(
    experts: ExpertsRef, boundary_ratio: float, high: float, low: float
) -> tuple[float, float, float]:
    """Return the boundary ratio and both guidances.

    A single model runs every step with that of the high expert.
    """
    # At boundary 0, every noise level belongs to the high-noise expert.
    return (0.0, high, high) if experts.single else (boundary_ratio, high, low)


# `eq=False`: a comparison of tensors has no single truth value.
@dataclass(frozen=True, kw_only=True, eq=False)
class SamplerSettings:
    """Settings of a sampler node, adapted to its experts."""

    steps: StepSettings
    guidance: Guidance
    options: RequestOptions
    add_noise: bool

    @classmethod
    def of(cls, experts: ExpertsRef, values: SamplerValues) -> SamplerSettings:
        """Return the settings of these values.

        Raises:
            RequestError: a value is out of range, or `switch_step` is set for a single model.
        """
        sigmas = values.get("sigmas")
        switch = values["switch_step"]
        if experts.single and switch != FROM_BOUNDARY:
            raise RequestError(
                f"switch_step is {switch}, but a single model runs every step: set it to "
                f"{FROM_BOUNDARY}"
            )
        boundary, high, low = for_experts(
            experts, values["boundary_ratio"], values["guidance_high"], values["guidance_low"]
        )
        steps = StepSettings(
            steps=values["steps"] if sigmas is None else None,
            solver=values["solver"],
            schedule=values["schedule"],
            sigmas=sigmas,
            flow_shift=values["flow_shift"],
            boundary_ratio=boundary,
            switch_step=None if switch == FROM_BOUNDARY else switch,
            start_step=values["start_step"],
            # With `get`, because older workflows lack this input, and ComfyUI fills in no defaults.
            end_step=values.get("end_step"),
            leftover_noise=values.get("leftover_noise", False),
        )
        return cls(
            steps=steps,
            guidance=replace(values.get("guidance") or Guidance(), scales=(high, low)),
            options=RequestOptions(cache=values.get("cache"), windows=values.get("windows")),
            # The default for older workflows, as in the schema.
            add_noise=values.get("add_noise", True),
        )

    def request(
        self, positive: Sequence[Any], negative: Sequence[Any], latent: Mapping[str, Any], seed: int
    ) -> DenoiseRequest:
        """Return the request for native CONDITIONING and LATENT values.

        Raises:
            RequestError: the experts cannot use an input, or settings do not fit together.
        """
        # A negative that no step reads is not checked: its keys must not refuse the run.
        read = negative if self.guidance.needs_negative else None
        # Without a seed, the noise is zeros: the latent has the noise of an earlier sampler.
        native = native_inputs(positive, read, latent, seed if self.add_noise else None)
        return DenoiseRequest.of(native, self.steps, self.guidance, self.options)


def show_guidance_notices(
    host: Host,
    experts: ExpertsRef,
    steps: Sequence[GuidedStep],
    guidance: Guidance,
    high: float,
    low: float,
) -> dict[str, Any]:
    """Show notices on a guidance that does not fit the experts or the LoRAs. See `show_notices`.

    The inputs `high` and `low` matter unless `guidance` has its own scale for each step.
    """
    notices = guidance_mismatches(experts, steps)
    if guidance.steps is not None:
        return show_notices(host, *notices)
    return show_notices(host, *notices, guidance_high=high, guidance_low=low)


def show_sampler_notices(
    host: Host, experts: ExpertsRef, request: DenoiseRequest, values: SamplerValues
) -> dict[str, Any]:
    """Show the notices of a sampler node before its run. See `show_guidance_notices`."""
    plan = request.step_plan
    steps = [GuidedStep(step, plan.experts[step], plan.guidance[step]) for step in plan.steps]
    high = values["guidance_high"]
    low = values["guidance_low"]
    return show_guidance_notices(host, experts, steps, request.guidance_settings, high, low)


def sampler_inputs(
    experts: ExpertsRef, request: DenoiseRequest, values: SamplerValues
) -> SamplerInputs:
    return SamplerInputs(
        experts=experts,
        request=request,
        requested=values.get("policy") or OffloadPolicy.layerwise(),
        workers=values.get("workers"),
    )


def sampler_output(run: SamplerRun, shown: dict[str, Any]) -> dict[str, Any]:
    """Return the UI output of a sampler node: its notices, the timeline and the changes."""
    text = [*shown.get("text", ()), *run.timeline.changes]
    # Lists, because ComfyUI concatenates the values when a node runs several times.
    return {**shown, TIMELINE: [run.timeline.to_dict()], "text": text}


TIMELINE = "wanstream_timeline"
"""Key of the timeline in the history: one `Timeline.to_dict()`."""


def check_scales(**scales: object) -> None:
    """Raise RequestError for an invalid guidance, in `validate_inputs`."""
    # Not left to ComfyUI, which names the limit alone: 0 means no guidance in other samplers, and
    # needs the remedy.
    for name, scale in inputs.known(int | float, **scales).items():
        if not 1.0 <= scale <= MAX_GUIDANCE:
            raise RequestError(
                f"{name} is {scale:g}: give 1 for no guidance, or up to {MAX_GUIDANCE:g}"
            )


class WanStreamSampler(io.ComfyNode):
    """Denoising run with both streamed experts and no reload at the switch."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamSampler",
            display_name="Wan Sampler (streamed)",
            category="WanStream/sampling",
            **search_aliases("ksampler, moe, high noise, low noise, t2v, i2v"),
            description="Denoises with both experts in one run. The defaults are those of Wan2.2 "
            "text-to-video; for image-to-video use flow_shift 5, boundary_ratio 0.9 and "
            "guidance 3.5.",
            inputs=[
                inputs.EXPERTS_INPUT,
                inputs.POSITIVE_INPUT,
                inputs.NEGATIVE_INPUT,
                io.Latent.Input(
                    "latent",
                    tooltip="An empty latent, or one to continue from (see start_step). Where its "
                    "noise mask is 0, it is kept.",
                ),
                SEED_INPUT,
                *SETTING_INPUTS,
            ],
            outputs=[
                io.Latent.Output(display_name="latent"),
                sockets.Run.Output(display_name="run"),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(
        cls,
        steps: int | None = None,
        start_step: int | None = None,
        switch_step: int | None = None,
        end_step: int | None = None,
        guidance_high: float | None = None,
        guidance_low: float | None = None,
        sigmas: object = NOT_CONNECTED,
    ) -> bool:
        # ComfyUI does not check the range of inputs that are checked here.
        given = inputs.known(int, start_step=start_step, switch_step=switch_step, end_step=end_step)
        if given.get("switch_step") == FROM_BOUNDARY:
            del given["switch_step"]
        if sigmas is NOT_CONNECTED:  # connected ones define the number of steps
            given |= inputs.known(int, steps=steps)
        # Placeholders for unknown values refuse nothing. `execute` checks the real ones.
        StepSettings(**{"steps": TRAIN_TIMESTEPS, "end_step": NO_END_STEP, **given})
        check_scales(guidance_high=guidance_high, guidance_low=guidance_low)
        return True

    @classmethod
    def execute(
        cls,
        experts: ExpertsRef,
        positive: Sequence[Any],
        negative: Sequence[Any],
        latent: Mapping[str, Any],
        *,
        seed: int,
        **values: Unpack[SamplerValues],
    ) -> io.NodeOutput:
        host = current_host()
        settings = SamplerSettings.of(experts, values)
        request = settings.request(positive, negative, latent, seed)
        # Before the run: strict mode refuses it here, and the user may stop it.
        shown = show_sampler_notices(host, experts, request, values)
        run = run_experts(
            host,
            sampler_inputs(experts, request, values),
            node_id=cls.hidden.unique_id,
            preview=values.get("preview"),
        )
        denoised = native_latent(run.result.latents, latent, sigma=run.result.sigma)
        return io.NodeOutput(denoised, run, ui=sampler_output(run, shown))
