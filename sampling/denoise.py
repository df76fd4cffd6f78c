"""The denoising loop: one for every host, every policy and every device.

    with open_experts(high, low) as pair:
        result = denoise(pair, request, policy=OffloadPolicy.layerwise(), device="cuda")

The visits of the whole run are known before the first block computes; the engine streams the weights underneath.
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
    """The end of a run."""

    latents: torch.Tensor
    """[B, 16, T, h, w] float32, normalised, where the request's noise is."""
    sigma: float
    """The noise level that the latents are at: 0, or that of the end step where noise was left over."""
    timeline: Timeline
    predicted: Timeline | None = None
    """What was foretold of this run; None where nothing was."""

    def with_note(self, reason: str) -> DenoiseResult:
        """The same, with a reason for the policy before the changes on the way; an empty one changes nothing."""
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
    """Denoise `request` with both experts, their weights streamed to `device` as `policy` says.

    A step that runs out of device memory is taken again from its latent with the next smaller policy, which stays for
    the rest of the run; `Timeline.changes` and the log tell it. Not a bit of the result changes, but where only fewer
    tokens at once were left to try, which may round last bits differently.

    Args:
        on_step: called after each step, on the calling thread.
        should_stop: asked before every block.
        revise: told once how the first step went, where it went undisturbed (memory was not short, nothing was
            compiled); the policy that it answers with holds for the rest of the run, None changes nothing.
        observe: what is told beside the timeline; by default from the environment, see `TelemetryOptions.asked`.

    Raises:
        RequestError: the request does not fit the experts.
        ValueError: the policy does not fit the experts, or the device is not there.
        NoRoomError: the device has too little memory even for the smallest policy; or, on a CPU, the run is estimated
            to need more RAM than there is.
        Cancelled: `should_stop` returned True. The pair can be used again at once, as after any error.
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
    """Compute `part` of what `denoise` would: some of the steps, or the share that others leave.

    The result has the latents after the last step that is taken, and their noise level; its timeline has those steps.

    Raises:
        RequestError: the part is none of this request; and as `denoise`.
        SmallerPolicyError: memory was short in a step that other workers compute too.
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
    """As `denoise`, with `cache` in place of what the request asks for: one that looks at every step."""
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
    place = compute_device(device)
    going = RunPolicy(
        pair,
        policy,
        place,
        shape=request.computed_shape,
        guided=request.guided,
        split=part.split,
        cache=request.cache,
        revise=callbacks.revise,
    )
    going.refuse_without_ram()
    with torch.inference_mode():
        recorder = Recorder(place, observe=observe or TelemetryOptions.asked(os.environ))
        denoising = Denoiser(request, part, going, recorder, callbacks, cache)
        denoising.run()
    # A copy made outside inference mode is an ordinary tensor again.
    ended = denoising.latents.to(request.noise.device, copy=True)
    return DenoiseResult(latents=ended, sigma=denoising.sigma, timeline=denoising.timeline())
