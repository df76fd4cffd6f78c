"""Denoising: one function for all hosts, policies and devices.

    with open_experts(high, low) as pair:
        result = denoise(pair, request, policy=OffloadPolicy.layerwise(), device="cuda")

The visits of the whole run are known before the first block computes, so the engine fetches weights ahead of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..devices import compute_device
from ..schema import OffloadPolicy, Timeline
from ..telemetry import Recorder, TelemetryOptions
from ..wan import ExpertPair
from .cache.base import StepCache
from .inputs.model_checks import check_fits
from .inputs.request import DenoiseRequest
from .loop.denoiser import Callbacks, Denoiser, StepProgress
from .loop.oom_fallback import Revise, RunPolicy
from .loop.parallel import WHOLE_RUN, RunSlice


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


def denoise(
    pair: ExpertPair,
    request: DenoiseRequest,
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
        on_step: called after each step, on the calling thread.
        should_stop: polled before every block, and within blocks that take long on a CPU.
        revise: called once with the record of the first step, unless that step ran out of memory or compiled blocks.
            The policy that it returns applies to the rest of the run; None keeps the present one.
        observe: telemetry in addition to the timeline; by default from the environment, see `TelemetryOptions.asked`.

    Raises:
        RequestError: the request does not fit the experts.
        ValueError: the policy does not fit the experts, or the device does not exist.
        NoRoomError: the device has too little memory even for the smallest policy; or, on a CPU, the run is estimated
            to need more RAM than there is.
        SamplingCancelled: `should_stop` returned True. The pair can be used again at once, as after any error.
        NonFiniteLatentError: a step made NaN or infinity.
    """
    callbacks = Callbacks(on_step=on_step, should_stop=should_stop, revise=revise)
    return _denoise(pair, request, WHOLE_RUN, callbacks, policy=policy, device=device, observe=observe)


def denoise_part(
    pair: ExpertPair,
    request: DenoiseRequest,
    part: RunSlice,
    *,
    policy: OffloadPolicy,
    device: torch.device | str,
    on_step: Callable[[StepProgress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    observe: TelemetryOptions | None = None,
) -> DenoiseResult:
    """Compute a part of a run: some of its steps, this worker's share of each step, or both.

    The result has the latents and the noise level after the last computed step, and a timeline of the computed steps.

    Raises:
        RequestError: the part does not belong to this request; and as `denoise`.
        SmallerPolicyError: a step that other workers compute too ran out of memory.
    """
    callbacks = Callbacks(on_step=on_step, should_stop=should_stop)
    return _denoise(pair, request, part, callbacks, policy=policy, device=device, observe=observe)


def denoise_measured(
    pair: ExpertPair,
    request: DenoiseRequest,
    cache: StepCache,
    *,
    policy: OffloadPolicy,
    device: torch.device | str,
    on_step: Callable[[StepProgress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    observe: TelemetryOptions | None = None,
) -> DenoiseResult:
    """Run `denoise` with `cache` in place of the request's own, to measure every step."""
    callbacks = Callbacks(on_step=on_step, should_stop=should_stop)
    return _denoise(pair, request, WHOLE_RUN, callbacks, policy=policy, device=device, observe=observe, cache=cache)


def _denoise(
    pair: ExpertPair,
    request: DenoiseRequest,
    part: RunSlice,
    callbacks: Callbacks,
    *,
    policy: OffloadPolicy,
    device: torch.device | str,
    observe: TelemetryOptions | None,
    cache: StepCache | None = None,
) -> DenoiseResult:
    check_fits(request, pair)
    run_device = compute_device(device)
    run_policy = RunPolicy(
        pair,
        policy,
        run_device,
        shape=request.computed_shape,
        guided=request.guided,
        split=part.split,
        cache=request.cache,
        revise=callbacks.revise,
    )
    run_policy.refuse_without_ram()
    with torch.inference_mode():
        recorder = Recorder(run_device, observe=observe or TelemetryOptions.asked(os.environ))
        denoiser = Denoiser(request, part, run_policy, recorder, callbacks, cache)
        denoiser.run()
    # Copied outside inference mode: callers could not change an inference tensor in place, or use it under autograd.
    latents = denoiser.latents.to(request.noise.device, copy=True)
    return DenoiseResult(latents=latents, sigma=denoiser.sigma, timeline=denoiser.timeline())
