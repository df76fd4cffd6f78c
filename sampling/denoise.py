"""Denoising: one function for all hosts, policies and devices.

    with open_experts(high, low) as pair:
        result = denoise(pair, request, policy=OffloadPolicy.layerwise(), device="cuda")

The visits of the whole run are known before the first block computes, so the engine fetches weights ahead of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from ..devices import compute_device
from ..schema import TEXT_TOKENS, OffloadPolicy, StepRange, Timeline
from ..telemetry import Recorder, TelemetryOptions
from ..wan import ExpertPair
from .errors import RequestError
from .inputs.extra_tokens import check_tokens_fit
from .inputs.request import DenoiseRequest, check_channels
from .loop.denoiser import Denoiser, StepProgress
from .loop.oom_fallback import Revise, RunPolicy
from .loop.parallel import WHOLE_RUN, RunSlice
from .memory import extra_tokens_of

logger = logging.getLogger("wanstream.sampling")


@dataclass(frozen=True, kw_only=True, eq=False)
class DenoiseResult:
    """Result of a run."""

    latents: torch.Tensor
    """[B, 16, T, h, w] float32, normalised, on the device of the request's noise."""
    sigma: float
    """Noise level of the latents: 0, or that of the end step if noise was left over."""
    timeline: Timeline
    predicted: Timeline | None = None
    """Prediction made before the run, if any."""

    def with_note(self, reason: str) -> DenoiseResult:
        """Return a copy with `reason`, unless it is empty, before the other changes of the timeline."""
        if not reason:
            return self
        return replace(self, timeline=replace(self.timeline, changes=(reason, *self.timeline.changes)))


def denoise(  # noqa: PLR0913 (the entry point of all hosts and workers)
    pair: ExpertPair,
    request: DenoiseRequest,
    part: RunSlice = WHOLE_RUN,
    *,
    policy: OffloadPolicy,
    device: torch.device | str,
    on_step: Callable[[StepProgress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    revise: Revise | None = None,
    observe: TelemetryOptions | None = None,
) -> DenoiseResult:
    """Denoise `request` with the experts of `pair`, whose weights are streamed to `device` under `policy`.

    A step that runs out of device memory is computed again from its latent with the next smaller policy, which then
    applies to the rest of the run; the log and `Timeline.changes` report it. The result stays bit-equal, unless the
    only smaller policy computes fewer tokens at once, which may round the last bits differently.

    Args:
        part: part of the run to compute: some of its steps, this worker's share of each step, or both. The result has
            the latents and the noise level after the last computed step, and a timeline of the computed steps.
        on_step: called after each step, on the calling thread.
        should_stop: polled before every block, and within blocks that take long on a CPU.
        revise: called once with the record of the first step, unless that step ran out of memory or compiled blocks.
            The policy that it returns applies to the rest of the run; None keeps the present one.
        observe: telemetry in addition to the timeline; by default `TelemetryOptions.from_environment()`.

    Raises:
        RequestError: the request does not fit the experts, or the part does not belong to this request.
        ValueError: the policy does not fit the experts, or the device does not exist.
        InsufficientMemoryError: the device has too little memory even for the smallest policy; or, on a CPU, the run
            is estimated to need more RAM than there is.
        SmallerPolicyError: a step that other workers compute too ran out of memory.
        SamplingCancelled: `should_stop` returned True. The pair can be used again at once, as after any error.
        NonFiniteLatentError: a step made NaN or infinity.
    """
    check_fits(request, pair)
    run_policy = RunPolicy(
        pair,
        policy,
        compute_device(device),
        shape=request.computed_shape,
        sides=extra_tokens_of(pair, request),
        split=part.split,
        cache=request.cache,
        revise=revise,
    )
    run_policy.refuse_without_ram()
    with torch.inference_mode():
        recorder = Recorder(run_policy.device, observe=observe or TelemetryOptions.from_environment())
        denoiser = Denoiser(request, part, run_policy, recorder)
        denoiser.run(on_step, should_stop)
    timeline = replace(recorder.timeline(), changes=tuple(run_policy.changes))
    # Copied outside inference mode: callers could not change an inference tensor in place, or use it under autograd.
    latents = denoiser.latents.to(request.noise.device, copy=True)
    return DenoiseResult(latents=latents, sigma=denoiser.sigma, timeline=timeline)


def check_fits(request: DenoiseRequest, pair: ExpertPair) -> None:
    """Raise RequestError unless the request's channels, steps and image fit the experts, and LoRA strengths its steps.

    An image embedding for experts without an image branch, or a reference image for experts without `ref_conv`, is not
    an error: it is ignored, as in ComfyUI.
    """
    check_channels(request, pair.in_channels, pair.latent_channels)
    for tokens in request.tokens_of_sides:
        check_tokens_fit(
            tokens,
            request.noise.shape,
            in_channels=pair.in_channels,
            reference_channels=pair.high.config.reference_channels,
        )
    if request.tokens.reference is not None and not pair.reads_reference:
        logger.info("the reference image (reference_latents) is ignored, as native sampling does: no ref_conv")
    step_plan = request.step_plan
    low = [step for step in step_plan.steps if step_plan.experts[step] == "low"]
    if pair.is_single and low:
        raise RequestError(
            f"step {low[0]} is one of the low-noise expert, and this is a single model, which runs every step: give "
            "boundary_ratio 0 and no switch_step"
        )
    check_strengths(request, pair.strength_ranges)
    width = pair.high.config.image_dim
    if width is not None:
        _check_image(request, width)


def check_strengths(request: DenoiseRequest, ranges: Iterable[tuple[str, StepRange]]) -> None:
    """Raise RequestError if a range of steps, given after the name of its LoRA's file, ends after the request's."""
    steps = request.step_plan.whole_steps
    for file, strengths in ranges:
        if strengths.last >= steps:
            raise RequestError(
                f"{file} has a strength for steps {str(strengths)!r}, and the run has {steps} steps, 0 to {steps - 1}: "
                "change strength_steps in Wan LoRA (pair), or the steps"
            )


def _check_image(request: DenoiseRequest, width: int) -> None:
    image = request.image_embedding
    if image is None:
        raise RequestError(
            "the model has an image branch (Wan2.1 I2V), and the request has no image embedding: choose a clip_vision "
            "file in WanStream Image to Video, or connect a CLIP Vision output to WanImageToVideo"
        )
    if image.shape[2] != width:
        raise RequestError(
            f"the image embedding is {list(image.shape)}, the model takes [1, tokens, {width}]: use clip_vision_h"
        )
    for name, texts in (("positive", request.positive), ("negative", request.negative)):
        for text in () if texts is None else texts:
            if text.shape[-2] != TEXT_TOKENS:
                raise RequestError(
                    f"{name} has {text.shape[-2]} tokens, and a model with an image branch (Wan2.1 I2V) needs "
                    f"{TEXT_TOKENS}: encode it with Wan Text Encode, which pads or cuts to that length"
                )
