"""Denoising: all steps of both experts in one node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..host import ExpertsRef, host, io
from ..plan import OffloadPolicy
from ..plan.experts import TRAIN_TIMESTEPS
from ..sampling import (
    SCHEDULES,
    SOLVERS,
    Cancelled,
    DenoiseRequest,
    DenoiseResult,
    NativeInputs,
    RequestError,
    StepProgress,
    denoise,
    native_inputs,
    native_latent,
)
from ..sampling.checks import check_course
from ..sampling.schedules import check_steps
from . import sockets

FROM_BOUNDARY = -1
"""The `switch_step` that leaves the switch to `boundary_ratio`."""

TIMELINE = "wanstream_timeline"
"""Where the history keeps what each step took: one `Timeline.to_dict()`."""


class WanStreamSampler(io.ComfyNode):
    """Runs the high-noise expert, then the low-noise one, both streamed, in one run without a reload at the switch."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanStreamSampler",
            display_name="Wan Sampler (both experts)",
            category="WanStream",
            description="Denoises with both experts in one run. The defaults are those of Wan2.2 text-to-video; for "
            "image-to-video use flow_shift 5, boundary_ratio 0.9 and guidance 3.5.",
            inputs=[*_socket_inputs(), *_step_inputs(), *_switch_inputs(), *_guidance_inputs(), *_optional_inputs()],
            outputs=[io.Latent.Output(display_name="latent")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(
        cls, steps: int | None = None, start_step: int | None = None, switch_step: int | None = None
    ) -> bool | str:
        return _course_refusal(steps, start_step, switch_step)

    @classmethod
    def execute(
        cls,
        experts: ExpertsRef,
        positive: Sequence[Any],
        negative: Sequence[Any],
        latent: Mapping[str, Any],
        policy: OffloadPolicy | None = None,
        **settings: Any,
    ) -> io.NodeOutput:
        request = _request(native_inputs(positive, negative, latent), **settings)
        result = _denoise(experts, request, policy or OffloadPolicy.layerwise(), cls.hidden.unique_id)
        return io.NodeOutput(native_latent(result.latents, latent), ui={TIMELINE: [result.timeline.to_dict()]})


def _course_refusal(steps: object, start_step: object, switch_step: object) -> bool | str:
    """For `validate_inputs`: why a run of such steps cannot be, told before the text encoder runs; True if it can.

    A host checks no range of an input that is checked here. What is no number is left to others: a link is None here
    and known only at the run, and text is refused by the host.
    """
    count = steps if isinstance(steps, int) else TRAIN_TIMESTEPS
    start = start_step if isinstance(start_step, int) else 0
    switch = switch_step if isinstance(switch_step, int) else FROM_BOUNDARY
    try:
        check_steps(count)
        check_course(count, start_step=start, switch_step=None if switch == FROM_BOUNDARY else switch, end_step=count)
    except RequestError as err:
        return str(err)
    return True


def _request(
    inputs: NativeInputs, *, seed: int, switch_step: int, guidance_high: float, guidance_low: float, **settings: Any
) -> DenoiseRequest:
    """The run that the widgets describe; `settings` are those that the request calls by the same name."""
    return DenoiseRequest(
        inputs.noise(seed),
        inputs.positive,
        negative=inputs.negative,
        image_condition=inputs.image_condition,
        latent=inputs.latent,
        switch_step=None if switch_step == FROM_BOUNDARY else switch_step,
        guidance=(guidance_high, guidance_low),
        **settings,
    )


def _denoise(ref: ExpertsRef, request: DenoiseRequest, policy: OffloadPolicy, node_id: str | None) -> DenoiseResult:
    """Run the request on the host's device; the host's Cancel ends it before the next block."""
    pair, device = host.experts(ref), host.device()
    host.make_room(pair.bytes_to_come(policy, device), device)
    progress = host.progress(len(request.course().steps), node_id)

    def on_step(step: StepProgress) -> None:
        progress.update(step.done)

    try:
        return denoise(pair, request, policy=policy, device=device, on_step=on_step, should_stop=host.should_stop)
    except Cancelled:
        host.raise_if_stopped()
        raise


def _socket_inputs() -> list[io.Input]:
    return [
        sockets.Experts.Input("experts", tooltip="From Wan Experts (streamed)."),
        io.Conditioning.Input("positive", tooltip="From Wan Text Encode or, with an image, Wan Image to Video."),
        io.Conditioning.Input("negative", tooltip="As positive. Costs nothing where a guidance is 1."),
        io.Latent.Input("latent", tooltip="An empty latent, or one to go on from (see start_step)."),
    ]


def _step_inputs() -> list[io.Input]:
    return [
        io.Int.Input(
            "seed",
            default=0,
            min=0,
            max=2**64 - 1,
            control_after_generate=True,
            tooltip="Draws the same noise as ComfyUI's own samplers. A new seed reloads nothing.",
        ),
        io.Int.Input(
            "steps",
            default=40,
            min=1,
            max=1000,
            tooltip="Time is proportional to it: every step computes 40 blocks for each prompt in use. 40 is what "
            "Wan2.2 was tuned for, 20 are usually enough, 4 need a distilled LoRA in the files.",
        ),
        io.Combo.Input(
            "solver",
            options=list(SOLVERS),
            default="unipc",
            tooltip="The rule of a step. unipc: second order, needs fewer steps. euler: first order, for distilled "
            "experts. Neither costs time worth naming.",
        ),
        io.Combo.Input(
            "schedule",
            options=list(SCHEDULES),
            default="wan",
            tooltip="How noise falls from step to step. wan: as in Wan2.2 and diffusers. simple: as in ComfyUI.",
        ),
        io.Float.Input(
            "flow_shift",
            default=12.0,
            min=0.01,
            max=100.0,
            step=0.01,
            tooltip="Higher: more steps at high noise, so more of them run the high-noise expert. 12 for text-to- "
            "video, 5 for image-to-video.",
        ),
    ]


def _switch_inputs() -> list[io.Input]:
    return [
        io.Float.Input(
            "boundary_ratio",
            default=0.875,
            min=0.0,
            max=1.0,
            step=0.001,
            tooltip="The noise level below which the low-noise expert takes over: 0.875 for text-to-video, 0.9 for "
            "image-to-video. The switch itself costs nothing: the next expert's blocks are fetched ahead.",
        ),
        io.Int.Input(
            "switch_step",
            default=FROM_BOUNDARY,
            min=FROM_BOUNDARY,
            max=1000,
            tooltip="First step of the low-noise expert, counted from 0. -1: boundary_ratio decides.",
        ),
    ]


def _guidance_inputs() -> list[io.Input]:
    return [
        io.Float.Input(
            "guidance_high",
            default=4.0,
            min=1.0,
            max=100.0,
            step=0.1,
            tooltip="How strongly the high-noise expert follows the prompt. Anything but 1 computes the negative as "
            "well and doubles the compute of its steps; the bytes that are moved stay the same.",
        ),
        io.Float.Input(
            "guidance_low",
            default=3.0,
            min=1.0,
            max=100.0,
            step=0.1,
            tooltip="The same for the low-noise expert. 1 halves the compute of its steps.",
        ),
        io.Int.Input(
            "start_step",
            default=0,
            min=0,
            max=999,
            tooltip="Steps to leave out at the start. The connected latent is mixed with noise of the level of that "
            "step.",
        ),
    ]


def _optional_inputs() -> list[io.Input]:
    return [
        sockets.Policy.Input(
            "policy",
            optional=True,
            tooltip="How much device memory the experts may take. Without it: layerwise, the smallest (2 GB in bf16).",
        ),
    ]
