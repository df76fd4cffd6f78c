"""The denoising loop: one for every host, every policy and every device.

    with open_experts(high, low) as pair:
        result = denoise(pair, request, policy=OffloadPolicy.layerwise(), device="cuda")

The visits of the whole run are known before the first block computes; the engine streams the weights underneath.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from ..metrics import Observe, Recorder, compute_device
from ..offload.attach import OffloadRun
from ..plan import OffloadPolicy, StepRecord, Timeline, step_visits
from ..wan import ExpertEngine, ExpertPair, forward_lanes
from .errors import NonFiniteLatentError
from .lanes import LaneInputs, cancellable, foretell
from .mask import KeptPart
from .request import DenoiseRequest, check_channels
from .run_policy import Revise, RunPolicy
from .schedules import PURE_NOISE
from .shortage import forget, is_out_of_memory
from .solvers import Solver, make_solver


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
    predicted: Timeline | None = None
    """What was foretold of this run; None where nothing was."""

    def told_first(self, reason: str) -> DenoiseResult:
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
    observe: Observe | None = None,
) -> DenoiseResult:
    """Denoise `request` with both experts, their weights streamed to `device` as `policy` says.

    A step that runs out of device memory is taken again from its latent with the next smaller policy, which stays for
    the rest of the run; `Timeline.changes` and the log tell it. Not a bit of the result changes, but where only fewer
    tokens at once were left to try, which may round last bits differently.

    Args:
        on_step: called after each step, on the calling thread.
        should_stop: asked before every block.
        revise: told once how the first step went, where it went undisturbed; the policy that it answers with holds for
            the rest of the run, None changes nothing.
        observe: what is told beside the timeline; by default what the environment asks for (see `Observe.asked`).

    Raises:
        RequestError: the request does not fit the experts.
        ValueError: the policy does not fit the experts, or the device is not there.
        NoRoomError: the device has too little memory even for the smallest policy.
        Cancelled: `should_stop` returned True. The pair can be used again at once, as after any error.
        NonFiniteLatentError: a step made NaN or infinity.
    """
    check_channels(request, pair.in_channels)
    place = compute_device(device)
    guided = any(scale != 1 for scale in request.guidance)
    going = RunPolicy(pair, policy, place, shape=request.noise.shape, guided=guided)
    with torch.inference_mode():
        recorder = Recorder(place, observe=observe or Observe.asked(os.environ))
        denoising = _Denoising(request, going, recorder, place, on_step=on_step, should_stop=should_stop, revise=revise)
        with recorder.watching():
            while not denoising.is_done:
                denoising.take_steps()
    # A copy made outside inference mode is an ordinary tensor again.
    ended = denoising.latents.to(request.noise.device, copy=True)
    return DenoiseResult(latents=ended, sigma=denoising.course.end_sigma, timeline=denoising.timeline())


class _Taken(NamedTuple):
    """A step that was computed to its end."""

    latents: torch.Tensor
    solver: Solver
    denoised: torch.Tensor
    finite: torch.Tensor


class _Denoising:
    """How far a run is: the latents, and the solver with its history. Both change only when a step is whole."""

    def __init__(
        self,
        request: DenoiseRequest,
        policy: RunPolicy,
        recorder: Recorder,
        place: torch.device,
        *,
        on_step: Callable[[StepProgress], None] | None,
        should_stop: Callable[[], bool] | None,
        revise: Revise | None,
    ) -> None:
        self.course = request.course()
        self._steps = [(step, self.course.experts[step]) for step in self.course.steps]
        self._request, self._policy, self._place = request, policy, place
        self._on_step, self._should_stop, self._revise = on_step, should_stop, revise
        self._recorder = recorder
        self._inputs = LaneInputs(request, place)
        self.latents = _starting_latents(request, self.course.start_sigma).to(place)
        self._kept = _kept_part(request, place)
        self._solver = make_solver(request.solver, self.course.schedule, request.start_step)
        self._done = 0

    @property
    def is_done(self) -> bool:
        return self._done == len(self._steps)

    def timeline(self) -> Timeline:
        return replace(self._recorder.timeline(), changes=tuple(self._policy.changes))

    def take_steps(self) -> None:
        """Take steps in one run of the engine: all that are left, or until the policy has changed."""
        policy, short = self._policy.policy, None
        with ExitStack() as ending:
            try:
                engine = self._policy.engine()
                run = ending.enter_context(self._run_of(engine))
                ending.callback(self._count_outer_bytes, engine, engine.outer_bytes)
            except RuntimeError as err:
                if not is_out_of_memory(err):
                    raise
                short = forget(err)
            while short is None and not self.is_done and self._policy.policy == policy:
                try:
                    taken = self._take(engine, run)
                except RuntimeError as err:
                    if not is_out_of_memory(err):
                        raise
                    short = forget(err)
                else:
                    self._accept(taken)
        if short is not None:
            step, expert = self._steps[self._done]
            self._policy.make_smaller(f"step {step} ({expert}-noise expert)", short)

    def _foretell(self, engine: ExpertEngine) -> None:
        """Tell the engine all timesteps and texts of this request, those of steps taken too: the next may be equal."""
        timesteps = self.course.schedule.timesteps
        guided = {expert: self._request.guidance_of(expert) != 1 for _, expert in self._steps}
        foretell(engine, self._inputs, ((expert, timesteps[step]) for step, expert in self._steps), guided=guided)

    def _run_of(self, engine: ExpertEngine) -> AbstractContextManager[OffloadRun]:
        """A run of all steps that are left; behind it RAM is made ready for the same request once more."""
        experts = [expert for _, expert in self._steps[self._done :]]
        visits = step_visits(experts, engine.block_counts, first_step=self._steps[self._done][0])
        first_step, first_expert = self._steps[0]
        self._foretell(engine)
        then = step_visits([first_expert], engine.block_counts, first_step=first_step)
        return engine.run(visits, recorder=self._recorder, then=then)

    def _count_outer_bytes(self, engine: ExpertEngine, before: int) -> None:
        self._recorder.outer_bytes += engine.outer_bytes - before

    def _take(self, engine: ExpertEngine, run: OffloadRun) -> _Taken:
        """Compute the next step and leave everything as it is."""
        step, expert = self._steps[self._done]
        schedule, guidance = self.course.schedule, self._request.guidance_of(expert)
        sigma, latents, solver = schedule.sigmas[step], self.latents, self._solver.copy()
        with self._recorder.step(step, expert, sigma):
            timestep = torch.tensor([schedule.timesteps[step]])
            shown = latents if self._kept is None else self._kept.shown(latents, sigma)
            lanes = self._inputs.lanes(shown, with_negative=guidance != 1)
            visit = cancellable(partial(run.visit, step, expert), step, self._should_stop)
            velocity = _guided(forward_lanes(engine.models[expert], lanes, timestep, visit), guidance)
            denoised = shown - sigma * velocity
            if self._kept is not None:
                denoised = self._kept.ended(denoised)
                velocity = (latents - denoised) / sigma
            latents = solver.step(velocity, latents)
            finite = latents.isfinite().all()
        return _Taken(latents=latents, solver=solver, denoised=denoised, finite=finite)

    def _accept(self, taken: _Taken) -> None:
        """The next step is whole: tell it, and ask after the first one whether to go on in the same way."""
        step, expert = self._steps[self._done]
        if not taken.finite:
            raise NonFiniteLatentError(
                f"the latent is NaN or infinite after step {step} ({expert}-noise expert, sigma "
                f"{self.course.schedule.sigmas[step]:.4f}): an input or a weight is broken, or "
                f"{self._policy.compute_dtype} is too narrow for them"
            )
        self.latents, self._solver = taken.latents, taken.solver
        self._done += 1
        record = self._recorder.last
        if self._on_step is not None:
            self._on_step(StepProgress(record=record, done=self._done, total=len(self._steps), denoised=taken.denoised))
        if self._revise is not None and self._done == 1 and not self.is_done:
            self._policy.revise(self._revise, record)


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
