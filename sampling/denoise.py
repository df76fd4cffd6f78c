"""The denoising loop: one for every host, every policy and every device.

    with open_experts(high, low) as pair:
        result = denoise(pair, request, policy=OffloadPolicy.layerwise(), device="cuda")

The visits of the whole run are known before the first block computes; the engine streams the weights underneath.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from ..metrics import Recorder, compute_device
from ..plan import OffloadPolicy, StepRecord, Timeline, step_visits
from ..wan import ExpertPair, Lane, forward_lanes
from .errors import Cancelled, NonFiniteLatentError
from .request import DenoiseRequest, check_channels
from .solvers import make_solver

PURE_NOISE = 1 - 2e-6
"""From this sigma on there is nothing but noise: the `wan` schedule starts 1e-6 below 1, and diffusers ignores that."""

EnterBlock: TypeAlias = "Callable[[int], AbstractContextManager[object]]"
"""Block -> the context in which it is there to compute."""


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
        inputs = _Inputs(request, place)
        latents = _starting_latents(request, course.schedule.sigmas[request.start_step]).to(place)
        solver = make_solver(request.solver, course.schedule, request.start_step)
        for done, (step, expert) in enumerate(zip(course.steps, experts, strict=True), start=1):
            sigma, guidance = course.schedule.sigmas[step], request.guidance_of(expert)
            with recorder.step(step, expert, sigma):
                timestep = torch.tensor([course.schedule.timesteps[step]], device=place)
                lanes = inputs.lanes(latents, with_negative=guidance != 1)
                visit = _cancellable(partial(run.visit, step, expert), step, should_stop)
                velocity = _guided(forward_lanes(engine.models[expert], lanes, timestep, visit), guidance)
                denoised = latents - sigma * velocity
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
    return DenoiseResult(latents=latents.to(request.noise.device, copy=True), timeline=recorder.timeline())


class _Inputs:
    """What stays the same over all steps: texts and image, on the device, cut into samples."""

    def __init__(self, request: DenoiseRequest, device: torch.device) -> None:
        def samples(tensor: torch.Tensor | None) -> Sequence[torch.Tensor]:
            if tensor is None:
                return ()
            return list(tensor.to(device).expand(request.batch, *tensor.shape[1:]).split(1))

        self._positive, self._negative = samples(request.positive), samples(request.negative)
        self._image = samples(request.image_condition)

    def lanes(self, latents: torch.Tensor, *, with_negative: bool) -> list[Lane]:
        """One lane per sample under its positive text, then one per sample under its negative text."""
        states = list(latents.split(1))
        if self._image:
            states = [torch.cat(pair, dim=1) for pair in zip(states, self._image, strict=True)]
        sides = (self._positive, self._negative) if with_negative else (self._positive,)
        return [Lane(latents=state, text=text) for texts in sides for state, text in zip(states, texts, strict=True)]


def _starting_latents(request: DenoiseRequest, sigma: float) -> torch.Tensor:
    """The latents at the first step's noise level; without a given latent, an empty one is mixed in."""
    if request.latent is not None:
        return sigma * request.noise + (1 - sigma) * request.latent.to(request.noise)
    return request.noise if sigma > PURE_NOISE else sigma * request.noise


def _cancellable(enter: EnterBlock, step: int, should_stop: Callable[[], bool] | None) -> EnterBlock:
    """`enter`, with a question before each block."""
    if should_stop is None:
        return enter

    def visit(block: int) -> AbstractContextManager[object]:
        if should_stop():
            raise Cancelled(step, block)
        return enter(block)

    return visit


def _guided(velocities: Sequence[torch.Tensor], guidance: float) -> torch.Tensor:
    """Velocities of all lanes -> the velocity [B, 16, T, h, w] float32 to follow."""
    every = torch.cat(list(velocities)).float()
    if guidance == 1:
        return every
    positive, negative = every.chunk(2)
    return negative + guidance * (positive - negative)
