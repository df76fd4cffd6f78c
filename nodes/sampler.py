"""Sampler node: its inputs, their checks and the request made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..host import io, search_aliases
from ..plan import TRAIN_TIMESTEPS, AutoOffload
from ..sampling import (
    SCHEDULES,
    SOLVERS,
    DenoiseRequest,
    Guidance,
    NativeInputs,
    RequestError,
    check_step_plan,
    check_steps,
    native_inputs,
    native_latent,
)
from ..schema import ExpertsRef, OffloadPolicy, WorkersRef
from ..wan import GuidedStep, guidance_mismatches
from . import sockets
from .inputs import (
    BOUNDARY_INPUT,
    CACHE_INPUT,
    EXPERTS_INPUT,
    GUIDANCE_INPUT,
    POLICY_INPUT,
    POSITIVE_INPUT,
    PREVIEW_INPUT,
    SHIFT_INPUT,
    WINDOWS_INPUT,
    WORKERS_INPUT,
    show_notices,
)
from .runs.preview import PreviewSettings
from .runs.run_experts import SamplerRun, run_experts

FROM_BOUNDARY = -1
"""Value of `switch_step` with which `boundary_ratio` decides."""

MAX_GUIDANCE = 100.0

NO_END_STEP = 10000
"""Value of `end_step` past the end of any schedule; ComfyUI's samplers use the same."""

SEED_INPUT = io.Int.Input(
    "seed",
    default=0,
    min=0,
    max=2**64 - 1,
    control_after_generate=True,
    tooltip="Draws the same noise as ComfyUI's own samplers. A new seed reloads nothing.",
)

SETTING_INPUTS: tuple[io.Input, ...] = (
    io.Int.Input(
        "steps",
        default=40,
        min=1,
        max=1000,
        tooltip="Time is proportional to it: every step computes 40 blocks for each prompt in use. Wan2.2 was "
        "tuned for 40, 20 are usually enough, 4 need a distilled LoRA.",
    ),
    io.Combo.Input(
        "solver",
        options=list(SOLVERS),
        default="unipc",
        tooltip="Rule of a step. unipc and dpm++: second order, need fewer steps. euler: first order, for "
        "distilled LoRAs. lcm: draws new noise in every step, for LoRAs distilled that way. Their own time is "
        "negligible.",
    ),
    io.Combo.Input(
        "schedule",
        options=list(SCHEDULES),
        default="wan",
        tooltip="Noise levels of the steps. wan: as in Wan2.2 and diffusers. simple: as in ComfyUI.",
    ),
    SHIFT_INPUT,
    BOUNDARY_INPUT,
    io.Int.Input(
        "switch_step",
        default=FROM_BOUNDARY,
        min=FROM_BOUNDARY,
        max=1000,
        tooltip="First step of the low-noise expert, counted from 0. -1: boundary_ratio decides.",
    ),
    io.Float.Input(
        "guidance_high",
        default=4.0,
        min=1.0,
        max=MAX_GUIDANCE,
        step=0.1,
        tooltip="Strength of the prompt in the high-noise expert. Any value but 1 also computes the negative and "
        "doubles the compute of its steps; the bytes that are moved stay the same. A single model uses it in "
        "every step.",
    ),
    io.Float.Input(
        "guidance_low",
        default=3.0,
        min=1.0,
        max=MAX_GUIDANCE,
        step=0.1,
        tooltip="The same for the low-noise expert. 1 halves the compute of its steps. Not used by a single model.",
    ),
    # The inputs for a part of the schedule have the same meaning as those of KSampler (Advanced).
    io.Int.Input(
        "start_step",
        default=0,
        min=0,
        max=999,
        tooltip="Steps to skip at the start, which saves their time. The connected latent is mixed with noise of "
        "the level of that step; see add_noise.",
    ),
    io.Int.Input(
        "end_step",
        default=NO_END_STEP,
        min=1,
        max=NO_END_STEP,
        optional=True,
        tooltip="The run ends before this step; past the last step: it takes all steps. A following sampler "
        "continues with this number as its start_step.",
    ),
    io.Boolean.Input(
        "add_noise",
        default=True,
        optional=True,
        tooltip="Off: the latent already contains noise, from a sampler with leftover_noise on. Both samplers "
        "need the same steps, schedule and flow_shift.",
    ),
    io.Boolean.Input(
        "leftover_noise",
        default=False,
        optional=True,
        tooltip="On: a run that ends before the last step keeps its noise, for another sampler with add_noise "
        "off. Off: its last step removes all noise at once.",
    ),
    POLICY_INPUT,
    io.Sigmas.Input(
        "sigmas",
        optional=True,
        tooltip="Noise levels from another node, used as they are instead of steps, schedule and flow_shift. If "
        "they end above 0, that noise is left over.",
    ),
    WORKERS_INPUT,
    CACHE_INPUT,
    GUIDANCE_INPUT,
    WINDOWS_INPUT,
    PREVIEW_INPUT,
)
"""Inputs of a run except for its experts and for the texts, latent and seed of each video, in the order that saved
workflows depend on."""

NOT_CONNECTED = object()
"""Default for sigmas that are not linked; a linked input is None until the run."""


def check_widgets(steps: object, start_step: object, switch_step: object, end_step: object) -> None:
    """Raise RequestError for steps that cannot be run, in `validate_inputs`: before the text encoder runs.

    `steps` is None if sigmas are connected, which define the number of steps.
    """
    # ComfyUI does not check the range of inputs that are checked here. A linked value is None until the run, and the
    # host itself refuses text for a number.
    count = steps if isinstance(steps, int) else TRAIN_TIMESTEPS
    start = start_step if isinstance(start_step, int) else 0
    switch = switch_step if isinstance(switch_step, int) else FROM_BOUNDARY
    end = end_step if isinstance(end_step, int) else NO_END_STEP
    check_steps(count)
    check_step_plan(count, start_step=start, switch_step=None if switch == FROM_BOUNDARY else switch, end_step=end)


def settings_for(experts: ExpertsRef, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a sampler or guider, adapted to these experts.

    A single model runs every step with `guidance_high`; `boundary_ratio` and `guidance_low` are not used.

    Raises:
        RequestError: `switch_step` is set for a single model.
    """
    if not experts.single:
        return dict(settings)
    switch = settings.get("switch_step", FROM_BOUNDARY)
    if switch != FROM_BOUNDARY:
        raise RequestError(f"switch_step is {switch}, but a single model runs every step: set it to {FROM_BOUNDARY}")
    return {**settings, "boundary_ratio": 0.0, "guidance_low": settings["guidance_high"]}


def request_of(
    positive: Sequence[Any],
    negative: Sequence[Any],
    latent: Mapping[str, Any],
    guidance: Guidance | None = None,
    **settings: Any,
) -> DenoiseRequest:
    """Return the request for native CONDITIONING and LATENT values and the widgets of a sampler.

    Raises:
        RequestError: the experts cannot use an input, or settings do not fit together.
    """
    guidance = guidance or Guidance()
    scales = guidance.steps or (settings["guidance_high"], settings["guidance_low"])
    # A negative that no step reads is not checked: its keys must not refuse the run.
    needs_negative = guidance.nag is not None or any(scale != 1 for scale in scales)
    inputs = native_inputs(positive, negative if needs_negative else None, latent)
    return _request(
        inputs, guidance_steps=guidance.steps, nag=guidance.nag, context_guidance=guidance.context, **settings
    )


def _request(
    inputs: NativeInputs,
    *,
    seed: int,
    steps: int,
    switch_step: int,
    guidance_high: float,
    guidance_low: float,
    add_noise: bool = True,
    sigmas: torch.Tensor | None = None,
    **settings: Any,
) -> DenoiseRequest:
    """Return the request; `settings` are passed on under their names."""
    return DenoiseRequest(
        inputs.noise(seed if add_noise else None),
        inputs.positive,
        negative=inputs.negative,
        image_condition=inputs.image_condition,
        image_embedding=inputs.image_embedding,
        latent=inputs.latent,
        latent_sigma=inputs.latent_sigma,
        mask=inputs.mask,
        tokens=inputs.tokens,
        negative_tokens=inputs.negative_tokens,
        add_noise=add_noise,
        steps=steps if sigmas is None else None,
        sigmas=sigmas,
        switch_step=None if switch_step == FROM_BOUNDARY else switch_step,
        guidance=(guidance_high, guidance_low),
        **settings,
    )


def show_guidance_notices(experts: ExpertsRef, request: DenoiseRequest, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Show notices on a guidance that does not fit the experts or the LoRAs. See `show_notices`.

    `settings` are the sampler widgets.
    """
    plan = request.step_plan
    steps = [GuidedStep(step, plan.experts[step], plan.guidance[step]) for step in plan.steps]
    by_steps = settings.get("guidance") is not None and settings["guidance"].steps is not None
    values = {} if by_steps else {name: settings[name] for name in ("guidance_high", "guidance_low")}
    return show_notices(*guidance_mismatches(experts, steps), **values)


def run_ui(run: SamplerRun, shown: Mapping[str, Any]) -> dict[str, Any]:
    """Return the UI output of a sampler: what `show_notices` returned, and the run."""
    return {**shown, TIMELINE: [run.timeline.to_dict()], "text": [*shown.get("text", ()), *run.timeline.changes]}


TIMELINE = "wanstream_timeline"
"""Key of the timeline in the history: one `Timeline.to_dict()`."""


def check_scales(**scales: object) -> None:
    """Raise RequestError for an invalid guidance, in `validate_inputs`. A linked one is None until the run."""
    # Not left to ComfyUI, which names the limit alone: 0 means no guidance in other samplers, and needs the remedy.
    for name, scale in scales.items():
        if isinstance(scale, int | float) and not 1.0 <= scale <= MAX_GUIDANCE:
            raise RequestError(f"{name} is {scale:g}: give 1 for no guidance, or up to {MAX_GUIDANCE:g}")


class WanStreamSampler(io.ComfyNode):
    """Denoising run with both streamed experts and no reload at the switch."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamSampler",
            display_name="Wan Sampler (streamed)",
            category="WanStream/sampling",
            **search_aliases("ksampler", "moe", "high noise", "low noise", "t2v", "i2v"),
            description="Denoises with both experts in one run. The defaults are those of Wan2.2 text-to-video; for "
            "image-to-video use flow_shift 5, boundary_ratio 0.9 and guidance 3.5.",
            inputs=[
                EXPERTS_INPUT,
                POSITIVE_INPUT,
                io.Conditioning.Input("negative", tooltip="Like positive. Costs nothing if a guidance is 1."),
                io.Latent.Input(
                    "latent",
                    tooltip="An empty latent, or one to continue from (see start_step). Where its noise mask is 0, it "
                    "is kept.",
                ),
                SEED_INPUT,
                *SETTING_INPUTS,
            ],
            outputs=[io.Latent.Output(display_name="latent"), sockets.Run.Output(display_name="run")],
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
        check_widgets(steps if sigmas is NOT_CONNECTED else None, start_step, switch_step, end_step)
        check_scales(guidance_high=guidance_high, guidance_low=guidance_low)
        return True

    @classmethod
    def execute(
        cls,
        experts: ExpertsRef,
        positive: Sequence[Any],
        negative: Sequence[Any],
        latent: Mapping[str, Any],
        policy: OffloadPolicy | AutoOffload | None = None,
        workers: WorkersRef | None = None,
        preview: PreviewSettings | None = None,
        **settings: Any,
    ) -> io.NodeOutput:
        request = request_of(positive, negative, latent, **settings_for(experts, settings))
        shown = show_guidance_notices(experts, request, settings)
        policy = policy or OffloadPolicy.layerwise()
        run = run_experts(experts, request, policy, node_id=cls.hidden.unique_id, workers=workers, preview=preview)
        denoised = native_latent(run.result.latents, latent, sigma=run.result.sigma)
        return io.NodeOutput(denoised, run, ui=run_ui(run, shown))
