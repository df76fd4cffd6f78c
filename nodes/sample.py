"""Denoising: all steps of both experts in one node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..host import ExpertsRef, io
from ..plan import AutoOffload, OffloadPolicy
from ..plan.experts import TRAIN_TIMESTEPS
from ..sampling import DenoiseRequest, NativeInputs, RequestError, native_inputs, native_latent
from ..sampling.checks import check_course
from ..sampling.schedules import check_steps
from . import sockets
from .sample_inputs import FROM_BOUNDARY, TO_THE_END, sampler_inputs
from .sampler_run import run_experts

if TYPE_CHECKING:
    import torch

NOT_CONNECTED = object()
"""Stands for sigmas that are not linked; a link is None until the run."""

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
            inputs=sampler_inputs(),
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
        sigmas: object = NOT_CONNECTED,
    ) -> bool | str:
        return _course_refusal(steps if sigmas is NOT_CONNECTED else None, start_step, switch_step, end_step)

    @classmethod
    def execute(
        cls,
        experts: ExpertsRef,
        positive: Sequence[Any],
        negative: Sequence[Any],
        latent: Mapping[str, Any],
        policy: OffloadPolicy | AutoOffload | None = None,
        **settings: Any,
    ) -> io.NodeOutput:
        # Without guidance nothing reads the negative, whatever it carries.
        used = negative if any(settings[f"guidance_{expert}"] != 1 for expert in ("high", "low")) else None
        request = _request(native_inputs(positive, used, latent), **settings)
        run = run_experts(experts, request, policy or OffloadPolicy.layerwise(), node_id=cls.hidden.unique_id)
        timeline, left = run.timeline, native_latent(run.result.latents, latent, sigma=run.result.sigma)
        return io.NodeOutput(left, run, ui={TIMELINE: [timeline.to_dict()], "text": list(timeline.changes)})


def _course_refusal(steps: object, start_step: object, switch_step: object, end_step: object) -> bool | str:
    """For `validate_inputs`: why a run of such steps cannot be, told before the text encoder runs; True if it can.

    A host checks no range of an input that is checked here. What is no number is left to others: a link is None here
    and known only at the run, and text is refused by the host. Connected sigmas bring a number of steps of their own.
    """
    count = steps if isinstance(steps, int) else TRAIN_TIMESTEPS
    start = start_step if isinstance(start_step, int) else 0
    switch = switch_step if isinstance(switch_step, int) else FROM_BOUNDARY
    end = end_step if isinstance(end_step, int) else TO_THE_END
    try:
        check_steps(count)
        check_course(count, start_step=start, switch_step=None if switch == FROM_BOUNDARY else switch, end_step=end)
    except RequestError as err:
        return str(err)
    return True


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
    """The run that the widgets describe; `settings` are those that the request calls by the same name."""
    return DenoiseRequest(
        inputs.noise(seed if add_noise else None),
        inputs.positive,
        negative=inputs.negative,
        image_condition=inputs.image_condition,
        latent=inputs.latent,
        latent_sigma=inputs.latent_sigma,
        mask=inputs.mask,
        add_noise=add_noise,
        steps=steps if sigmas is None else None,
        sigmas=sigmas,
        switch_step=None if switch_step == FROM_BOUNDARY else switch_step,
        guidance=(guidance_high, guidance_low),
        **settings,
    )
