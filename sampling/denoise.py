"""Denoising: one function for all hosts, policies and devices.

    with open_experts(high, low) as pair:
        result = denoise(pair, request, policy=OffloadPolicy.layerwise(), device="cuda")

The visits in the whole run are known before the first block computes, so the engine fetches weights
ahead of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace

import torch

from ..devices import compute_device
from ..schema import OffloadPolicy
from ..shapes import TEXT_TOKENS
from ..telemetry import Recorder, TelemetryOptions
from ..wan import ExpertPair
from .inputs.extra_tokens import check_tokens_fit
from .inputs.request import DenoiseRequest
from .inputs.run_inputs import RunInputs
from .loop.denoiser import Denoiser
from .loop.memory import extra_tokens_of
from .loop.oom_fallback import Revise, RunPolicy
from .steps.errors import RequestError
from .steps.parallel import WHOLE_RUN, RunSlice
from .steps.results import DenoiseResult, StepProgress

logger = logging.getLogger("wanstream.sampling")


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
    """Denoise `request` with the experts in `pair`, streamed to `device` under `policy`.

    A step that runs out of device memory is computed again from its latent with the next smaller
    policy. This policy then applies to the rest of the run, and the log and `Timeline.changes`
    report it. The result stays bit-equal unless the only smaller policy computes fewer tokens at
    once, which may round the last bits differently.

    Args:
        part: part of the run to compute: some steps, this worker's share of each step, or both. The
            result has the latents and noise level after the last computed step, and a timeline of
            the computed steps.
        on_step: called after each step, on the calling thread.
        should_stop: polled before every block, and within blocks that take long on a CPU.
        revise: called once with the first step's record, unless that step ran out of memory or
            compiled blocks. The returned policy applies to the rest of the run. None keeps the
            present one.
        observe: telemetry in addition to the timeline, by default
            `TelemetryOptions.from_environment()`.

    Raises:
        RequestError: the request does not fit the experts, or the part does not belong to this
            request.
        ValueError: the policy does not fit the experts, or the device does not exist.
        InsufficientMemoryError: the device has too little memory even for the smallest policy. Or,
            on a CPU, the run is estimated to need more RAM than there is.
        SmallerPolicyError: a step shared with other workers ran out of memory.
        SamplingCancelled: `should_stop` returned True. The pair can be used again at once, as after
            any error.
        NonFiniteLatentError: a step made NaN or infinity.
    """
    taken = denoise_steps(
        pair,
        request,
        part,
        policy=policy,
        device=device,
        should_stop=should_stop,
        revise=revise,
        observe=observe,
    )
    # Closed before an error from `on_step` is raised too, so that the pair can be used again at
    # once.
    with closing(taken):
        for each in taken:
            if isinstance(each, DenoiseResult):
                return each
            if on_step is not None:
                on_step(each)
    raise AssertionError("a run without a result")


def denoise_steps(
    pair: ExpertPair,
    request: DenoiseRequest,
    part: RunSlice = WHOLE_RUN,
    *,
    policy: OffloadPolicy,
    device: torch.device | str,
    should_stop: Callable[[], bool] | None = None,
    revise: Revise | None = None,
    observe: TelemetryOptions | None = None,
) -> Generator[StepProgress | DenoiseResult, None, None]:
    """Denoise as `denoise` does: yield the progress after each step, then the result.

    Close the generator to end the run early. It runs on one thread, in inference mode between its
    steps.
    """
    check_fits(request, pair)
    run_policy = RunPolicy(
        pair,
        policy,
        compute_device(device),
        shape=request.computed_shape,
        sides=extra_tokens_of(pair, request),
        split=part.split,
        cache=request.options.cache,
        revise=revise,
    )
    run_policy.refuse_without_ram()
    with torch.inference_mode():
        recorder = Recorder(
            run_policy.device, observe=observe or TelemetryOptions.from_environment()
        )
        denoiser = Denoiser(request, part, run_policy, recorder)
        yield from denoiser.steps(should_stop)
    timeline = replace(recorder.timeline(), changes=tuple(run_policy.changes))
    # Copied outside inference mode. Otherwise callers could not change the tensor in place, or use
    # it under autograd.
    latents = denoiser.latents.to(request.noise.device, copy=True)
    yield DenoiseResult(latents=latents, sigma=denoiser.sigma, timeline=timeline)


def check_fits(request: DenoiseRequest, pair: ExpertPair) -> None:
    """Raise RequestError unless the experts and the LoRA strengths fit the request.

    Experts must fit the channels, steps and image, and LoRA strengths the steps. An image embedding
    for experts without an image branch, or a reference image for experts without `ref_conv`, is not
    an error. It is ignored, as in ComfyUI.
    """
    inputs = request.inputs
    config = pair.high.config
    inputs.check_channels(config.in_channels, config.out_channels)
    for tokens in inputs.tokens_of_sides:
        check_tokens_fit(
            tokens,
            inputs.noise.shape,
            in_channels=config.in_channels,
            reference_channels=config.reference_channels,
        )
    if inputs.tokens.reference is not None and not pair.reads_reference:
        logger.info(
            "the reference image (reference_latents) is ignored, as native sampling does: no "
            "ref_conv"
        )
    step_plan = request.step_plan
    low = [step for step in step_plan.steps if step_plan.experts[step] == "low"]
    if pair.is_single and low:
        raise RequestError(
            f"step {low[0]} is one of the low-noise expert, and this is a single model, which runs "
            "every step: give boundary_ratio 0 and no switch_step"
        )
    step_plan.check_strengths(pair.strength_ranges)
    width = config.image_dim
    if width is not None:
        _check_image(inputs, width)


def _check_image(inputs: RunInputs, width: int) -> None:
    image = inputs.image_embedding
    if image is None:
        raise RequestError(
            "the model has an image branch (Wan2.1 I2V), and the request has no image embedding: "
            "choose a clip_vision file in WanStream Image to Video, or connect a CLIP Vision "
            "output to WanImageToVideo"
        )
    if image.shape[2] != width:
        raise RequestError(
            f"the image embedding is {list(image.shape)}, the model takes [1, tokens, {width}]: "
            "use clip_vision_h"
        )
    for name, texts in (("positive", inputs.positive), ("negative", inputs.negative)):
        for text in () if texts is None else texts:
            if text.shape[-2] != TEXT_TOKENS:
                raise RequestError(
                    f"{name} has {text.shape[-2]} tokens, and a model with an image branch (Wan2.1 "
                    f"I2V) needs {TEXT_TOKENS}: encode it with Wan Text Encode, which pads or cuts "
                    "to that length"
                )
