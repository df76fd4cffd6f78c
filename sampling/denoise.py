"""The denoising loop: one for every host, every policy and every device.

    with open_experts(high, low) as pair:
        result = denoise(pair, request, policy=OffloadPolicy.layerwise(), device="cuda")

The visits of the whole run are known before the first block computes; the engine streams the weights underneath.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..metrics import Recorder, compute_device
from ..plan import OffloadPolicy, StepRecord, Timeline, step_visits
from ..wan import ExpertPair, forward_lanes
from .errors import NonFiniteLatentError
from .lanes import LaneInputs, cancellable
from .mask import KeptPart
from .request import DenoiseRequest, check_channels
from .schedules import PURE_NOISE
from .solvers import make_solver


@dataclass(frozen=True, kw_only=True, eq=False)
class StepProgress:
    """What `on_step` is told after each step."""

    record: StepRecord
    done: int
    """Steps taken so far."""
    total: int
    """Steps of this run, which may start late."""
    denoised: torch.Tensor
    """[B, 16, T, h, w] float32, normalised, on the run's device: where the run would end by the present estimate."""

    @property
    def index(self) -> int:
        """The step, 0-based in the whole schedule."""
        return self.record.index


@dataclass(frozen=True, kw_only=True, eq=False)
class DenoiseResult:
    """The end of a run."""

    latents: torch.Tensor
    """[B, 16, T, h, w] float32, normalised, where the request's noise is."""
    sigma: float
    """The noise level that the latents are at: 0, or that of the end step where noise was left over."""
    timeline: Timeline


def denoise(
    pair: ExpertPair,
    request: DenoiseRequest,
    *,
    policy: OffloadPolicy,
    device: torch.device | str,
    on_step: Callable[[StepProgress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> DenoiseResult:
    """Denoise `request` with both experts, their weights streamed to `device` as `policy` says.

    Args:
        on_step: called after each step, on the calling thread.
        should_stop: asked before every block.

    Raises:
        RequestError: the request does not fit the experts.
        ValueError: the policy does not fit the experts, or the device is not there.
        Cancelled: `should_stop` returned True. The pair can be used again at once, as after any error.
        NonFiniteLatentError: a step made NaN or infinity.
    """
    check_channels(request, pair.in_channels)
    course = request.course()
    experts = [course.experts[step] for step in course.steps]
    place = compute_device(device)
    recorder = Recorder(place)
    engine = pair.engine(policy, place)
    outer_bytes = engine.outer_bytes
    visits = step_visits(experts, engine.block_counts, first_step=request.start_step)
    with torch.inference_mode(), engine.run(visits, recorder=recorder) as run:
        inputs = LaneInputs(request, place)
        latents, kept = _starting_latents(request, course.start_sigma).to(place), _kept_part(request, place)
        solver = make_solver(request.solver, course.schedule, request.start_step)
        for done, (step, expert) in enumerate(zip(course.steps, experts, strict=True), start=1):
            sigma, guidance = course.schedule.sigmas[step], request.guidance_of(expert)
            with recorder.step(step, expert, sigma):
                timestep = torch.tensor([course.schedule.timesteps[step]], device=place)
                shown = latents if kept is None else kept.shown(latents, sigma)
                lanes = inputs.lanes(shown, with_negative=guidance != 1)
                visit = cancellable(partial(run.visit, step, expert), step, should_stop)
                velocity = _guided(forward_lanes(engine.models[expert], lanes, timestep, visit), guidance)
                denoised = shown - sigma * velocity
                if kept is not None:
                    denoised = kept.ended(denoised)
                    velocity = (latents - denoised) / sigma
                latents = solver.step(velocity, latents)
                finite = latents.isfinite().all()
            if not finite:
                raise NonFiniteLatentError(
                    f"the latent is NaN or infinite after step {step} ({expert}-noise expert, sigma {sigma:.4f}): "
                    f"an input or a weight is broken, or {pair.compute_dtype} is too narrow for them"
                )
            if on_step is not None:
                on_step(StepProgress(record=recorder.last, done=done, total=len(experts), denoised=denoised))
    recorder.outer_bytes = engine.outer_bytes - outer_bytes
    # A copy made outside inference mode is an ordinary tensor again.
    ended = latents.to(request.noise.device, copy=True)
    return DenoiseResult(latents=ended, sigma=course.end_sigma, timeline=recorder.timeline())


def _starting_latents(request: DenoiseRequest, sigma: float) -> torch.Tensor:
    """The latents at the first step's noise level; without a given latent, an empty one is mixed in."""
    if not request.add_noise:
        assert request.latent is not None
        return (1 - sigma) * request.latent.to(request.noise)
    if request.latent is not None:
        return sigma * request.noise + (1 - sigma) * request.latent.to(request.noise)
    return request.noise if sigma > PURE_NOISE else sigma * request.noise


def _kept_part(request: DenoiseRequest, device: torch.device) -> KeptPart | None:
    """What the request's mask keeps; without added noise the given latent is kept with the noise that it carries."""
    if request.mask is None:
        return None
    nothing = torch.zeros((), dtype=torch.float32)
    latent = nothing if request.latent is None else request.latent
    noise = request.noise if request.add_noise else nothing
    return KeptPart.of(*(tensor.to(device, torch.float32) for tensor in (request.mask, latent, noise)))


def _guided(velocities: Sequence[torch.Tensor], guidance: float) -> torch.Tensor:
    """Velocities of all lanes -> the velocity [B, 16, T, h, w] float32 to follow."""
    every = torch.cat(list(velocities)).float()
    if guidance == 1:
        return every
    positive, negative = every.chunk(2)
    return negative + guidance * (positive - negative)
