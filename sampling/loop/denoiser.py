"""How far a run of the denoising loop is, and its next step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from ...schema import StepRecord, Timeline
from ...telemetry import Recorder
from ...wan import WAN22, ExpertEngine
from ..cache.base import CachedCalls, StepCache, step_cache
from ..errors import NonFiniteLatentError
from ..inputs.mask import KeptPart
from ..inputs.request import DenoiseRequest
from ..noise import step_seeds
from ..schedules import PURE_NOISE
from ..solvers import Solver, make_solver
from .lanes import LaneInputs, LaneName, names_at, prefetch_embeddings, windows_at
from .model_calls import ModelCalls
from .oom_fallback import Revise, RunPolicy
from .parallel import Compute, RunSlice
from .resume import RunState, own_steps


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
    state: Callable[[], RunState]
    """Gives the run as it is after this step, copied to the CPU when it is called; costs nothing otherwise."""

    @property
    def index(self) -> int:
        """The step, 0-based in the whole schedule."""
        return self.record.index


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """Who is told and asked on the way; see `denoise`."""

    on_step: Callable[[StepProgress], None] | None = None
    should_stop: Callable[[], bool] | None = None
    revise: Revise | None = None


class _Taken(NamedTuple):
    """A step that was computed to its end."""

    latents: torch.Tensor
    solver: Solver
    denoised: torch.Tensor
    finite: torch.Tensor


class Denoiser:
    """How far a run is: the latents, and the solver with its history. Both change only when a step is whole."""

    def __init__(
        self,
        request: DenoiseRequest,
        part: RunSlice,
        policy: RunPolicy,
        recorder: Recorder,
        callbacks: Callbacks,
        cache: StepCache | None = None,
    ) -> None:
        place = policy.device
        self.step_plan = request.step_plan
        self._range = own_steps(self.step_plan, part.resume, part.until)
        self._steps = [(step, self.step_plan.experts[step]) for step in self._range]
        self._request, self._policy, self._place = request, policy, place
        self._callbacks = callbacks
        self._recorder = recorder
        self._inputs = LaneInputs(request, place)
        self._kept = _kept_part(request, place)
        self._cache = cache or step_cache(request.cache, part.split)
        seeds = step_seeds(request.noise, request.latent)
        self._solver = make_solver(request.solver, self.step_plan.schedule, request.start_step, seeds=seeds)
        if part.resume is None:
            self.latents = _starting_latents(request, self.step_plan.start_sigma).to(place)
        else:
            self.latents = part.resume.latents.to(place)
            self._solver.remember(part.resume.history, place)
        self._done = 0

    @property
    def sigma(self) -> float:
        """The noise level after the last step that this run takes."""
        return self.step_plan.schedule.sigmas[self._range.stop]

    def timeline(self) -> Timeline:
        return replace(self._recorder.timeline(), changes=tuple(self._policy.changes))

    def run(self) -> None:
        """Take all steps that are left."""
        cached = None
        if self._cache is not None:
            cached = CachedCalls(cache=self._cache, skipped=self._cache.known_skips(self._step_lanes()))
        passes = ModelCalls(
            None,
            [expert for _, expert in self._steps],
            recorder=self._recorder,
            first_step=self._range.start,
            should_stop=self._callbacks.should_stop,
            policy=self._policy,
            nag=self._request.nag,
            cached=cached,
        )
        with passes:
            if self._steps:
                self._foretell(passes.engine)
            schedule = self.step_plan.schedule
            for step, expert in self._steps:
                self._accept(passes.step(expert, schedule.sigmas[step], schedule.timesteps[step], self._take))

    def _foretell(self, engine: ExpertEngine) -> None:
        """Tell the engine all timesteps and texts of this request, those of steps taken too: the next may be equal."""
        timesteps = self.step_plan.schedule.timesteps
        nag = self._request.nag is not None
        with_negative = {expert for step, expert in self._steps if nag or self.step_plan.guidance[step] != 1}
        guided = {expert: expert in with_negative for _, expert in self._steps}
        prefetch_embeddings(
            engine, self._inputs, ((expert, timesteps[step]) for step, expert in self._steps), guided=guided
        )

    def _step_lanes(self) -> dict[int, tuple[str, Sequence[LaneName]]]:
        """The expert of each step, and the names of its lanes."""
        return {step: (expert, names_at(self._request, step)) for step, expert in self._steps}

    def _take(self, compute: Compute) -> _Taken:
        """Compute the next step and leave everything as it is."""
        step = self._steps[self._done][0]
        sigma, guidance = self.step_plan.schedule.sigmas[step], self.step_plan.guidance[step]
        latents, solver = self.latents, self._solver.copy()
        shown = latents if self._kept is None else self._kept.shown(latents, sigma)
        windows = windows_at(self._request, step)
        held = guidance == 1 and self._request.nag is not None
        velocities = compute(self._inputs.lanes(shown, with_negative=guidance != 1, attach_nag=held, windows=windows))
        velocity = _guided(velocities if windows is None else windows.whole(velocities), guidance)
        denoised = shown - sigma * velocity
        if self._kept is not None:
            denoised = self._kept.ended(denoised)
            velocity = (latents - denoised) / sigma
        latents = solver.step(velocity, latents)
        return _Taken(latents=latents, solver=solver, denoised=denoised, finite=latents.isfinite().all())

    def _accept(self, taken: _Taken) -> None:
        """Go on from a step that was computed to its end, and report it."""
        step, expert = self._steps[self._done]
        if not taken.finite:
            raise NonFiniteLatentError(
                f"the latent is NaN or infinite after step {step} ({expert}-noise expert, sigma "
                f"{self.step_plan.schedule.sigmas[step]:.4f}): an input or a weight is broken, or "
                f"{self._policy.compute_dtype} is too narrow for them"
            )
        self.latents, self._solver = taken.latents, taken.solver
        self._done += 1
        record = self._recorder.last
        if self._callbacks.on_step is not None:
            before = self._range.start - self.step_plan.start_step
            state = partial(_state, step + 1, taken)
            done, total = before + self._done, len(self.step_plan.steps)
            told = StepProgress(record=record, done=done, total=total, denoised=taken.denoised, state=state)
            self._callbacks.on_step(told)


def _state(next_step: int, taken: _Taken) -> RunState:
    return RunState(next_step=next_step, latents=taken.latents.to("cpu", copy=True), history=taken.solver.history())


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

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, torch.float32)

    nothing = torch.zeros(())
    latent = nothing if request.latent is None else request.latent
    noise = request.noise if request.add_noise else nothing
    shown_clean = request.channels == WAN22.channels
    return KeptPart.of(placed(request.mask), placed(latent), None if shown_clean else placed(noise))


def _guided(velocities: Sequence[torch.Tensor], guidance: float) -> torch.Tensor:
    """Velocities of all lanes -> the velocity [B, 16, T, h, w] float32 to follow."""
    every = torch.cat(list(velocities)).float()
    if guidance == 1:
        return every
    positive, negative = every.chunk(2)
    return negative + guidance * (positive - negative)
