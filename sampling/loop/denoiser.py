"""Denoiser: the latents and the solver of one run, advanced step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from ...schema import StepRecord
from ...telemetry import Recorder
from ...wan import WAN22, ExpertEngine
from ..cache.stages import start_cache
from ..errors import NonFiniteLatentError, RequestError
from ..inputs.mask import MaskedPart
from ..inputs.request import DenoiseRequest, StepPlan
from ..inputs.sides import guided_velocity
from ..schedules import PURE_NOISE, step_seeds
from ..solvers import Solver
from .lanes import LaneInputs, names_at, patches_at, windows_at
from .model_calls import ModelCalls
from .oom_fallback import RunPolicy
from .parallel import Compute, RunSlice, RunState


@dataclass(frozen=True, kw_only=True, eq=False)
class StepProgress:
    """Argument of `on_step`, which is called after each step."""

    record: StepRecord
    done: int
    """Steps finished so far."""
    total: int
    """Steps of this run, which may start after step 0 of the schedule."""
    denoised: torch.Tensor | None
    """Current estimate of the final latents: [B, 16, T, h, w] float32, normalised, on the run's device. In
    a run of workers, that of the part on the CPU; None for a step that they send no preview of."""
    state: Callable[[], RunState]
    """Return a CPU copy of the run's state after this step; nothing is copied unless it is called."""
    part: int = 0
    """Part of the batch that took the step, if several workers compute one part each; the first has the first video."""
    changes: tuple[str, ...] = ()
    """Policy changes so far, as in `Timeline.changes`. Workers report theirs at the end of the run."""

    @property
    def index(self) -> int:
        """The step, 0-based in the whole schedule."""
        return self.record.index


class _StepResult(NamedTuple):
    """State after a finished step, before the run accepts it."""

    latents: torch.Tensor
    solver: Solver
    denoised: torch.Tensor
    finite: torch.Tensor
    """0-d bool on the run's device, read after the step: reading it inside would wait for the device."""


class Denoiser:
    """State of one run: the latents, and the solver with its history. Both change only after a finished step."""

    def __init__(self, request: DenoiseRequest, part: RunSlice, policy: RunPolicy, recorder: Recorder) -> None:
        device = policy.device
        self.step_plan = request.step_plan
        self._range = _remaining_steps(self.step_plan, part.resume, part.until)
        self.sigma = self.step_plan.schedule.sigmas[self._range.stop]
        """The noise level after the last step that this run takes."""
        self._steps = [(step, self.step_plan.experts[step]) for step in self._range]
        self._request, self._policy = request, policy
        self._recorder = recorder
        self._inputs = LaneInputs(request, device, reads_reference=policy.pair.reads_reference)
        self._masked = _masked_part(request, device)
        lanes = {step: (expert, names_at(request, step)) for step, expert in self._steps}
        patches = patches_at(policy.pair, request)
        self._cache = None if request.cache is None else start_cache(request.cache, lanes, patches, part.split)
        seeds = step_seeds(request.noise, request.latent)
        self._solver = Solver(request.solver, self.step_plan.schedule, request.start_step, seeds=seeds)
        if part.resume is None:
            self.latents = _starting_latents(request, self.step_plan.start_sigma).to(device)
        else:
            self.latents = part.resume.latents.to(device)
            self._solver.restore(part.resume.history, device)

    def run(self, on_step: Callable[[StepProgress], None] | None, should_stop: Callable[[], bool] | None) -> None:
        """Compute all remaining steps; see `denoise` for both callbacks."""
        calls = ModelCalls(
            self._policy,
            [expert for _, expert in self._steps],
            recorder=self._recorder,
            first_step=self._range.start,
            should_stop=should_stop,
            nag=self._request.nag,
            cache=self._cache,
        )
        with calls:
            if self._steps:
                self._prefetch_embeddings(calls.engine)
            schedule = self.step_plan.schedule
            for step, expert in self._steps:
                compute_step = partial(self._compute_step, step)
                result = calls.step(expert, schedule.sigmas[step], schedule.timesteps[step], compute_step)
                self._accept(step, result)
                if on_step is not None:
                    progress = StepProgress(
                        record=self._recorder.last,
                        done=step + 1 - self.step_plan.start_step,
                        total=len(self.step_plan.steps),
                        denoised=result.denoised,
                        state=partial(_state, step + 1, result),
                        changes=tuple(self._policy.changes),
                    )
                    on_step(progress)

    def _prefetch_embeddings(self, engine: ExpertEngine) -> None:
        """Announce all timesteps and texts of the run to the engine, which embeds them together."""
        plan, nag = self.step_plan, self._request.nag is not None
        self._inputs.prefetch(
            engine,
            [(expert, plan.schedule.timesteps[step], nag or plan.guidance[step] != 1) for step, expert in self._steps],
        )

    def _compute_step(self, step: int, compute: Compute) -> _StepResult:
        """Compute a step without changing the run: it is called again if the device runs out of memory."""
        sigma, guidance = self.step_plan.schedule.sigmas[step], self.step_plan.guidance[step]
        # A copy, because a scheduler changes its history before the step is known to be finite and finished.
        latents, solver = self.latents, self._solver.copy()
        state = latents if self._masked is None else self._masked.model_input(latents, sigma)
        windows = windows_at(self._request, step)
        nag = guidance == 1 and self._request.nag is not None
        sides = self._request.sides_at(step)
        velocities = compute(self._inputs.lanes(state, sides, attach_nag=nag, windows=windows))
        if windows is not None:
            velocities = windows.whole(velocities)
        velocity = guided_velocity(velocities, sides, guidance, self._request.context_guidance)
        denoised = state - sigma * velocity
        if self._masked is not None:
            denoised = self._masked.merge_kept(denoised)
            # The velocity that leads to the merged estimate, so that the solver's history agrees with it.
            velocity = (latents - denoised) / sigma
        latents = solver.step(velocity, latents)
        return _StepResult(latents=latents, solver=solver, denoised=denoised, finite=latents.isfinite().all())

    def _accept(self, step: int, result: _StepResult) -> None:
        """Make a finished step the state of the run.

        Raises:
            NonFiniteLatentError: the step made NaN or infinity.
        """
        if not result.finite:
            raise NonFiniteLatentError(
                f"the latent is NaN or infinite after step {step} ({self.step_plan.experts[step]}-noise expert, sigma "
                f"{self.step_plan.schedule.sigmas[step]:.4f}): an input or a weight is broken, or "
                f"{self._policy.pair.compute_dtype} is too narrow for them"
            )
        self.latents, self._solver = result.latents, result.solver


def _state(next_step: int, result: _StepResult) -> RunState:
    return RunState(next_step=next_step, latents=result.latents.to("cpu", copy=True), history=result.solver.history())


def _remaining_steps(step_plan: StepPlan, resume: RunState | None, until: int | None) -> range:
    """Return the steps from `resume`, or else the first one, to before `until`, or else to the last one.

    Raises:
        RequestError: the state or the end does not belong to this step plan.
    """
    first = step_plan.start_step if resume is None else resume.next_step
    end = step_plan.steps.stop if until is None else until
    if not step_plan.start_step <= first <= end <= step_plan.steps.stop:
        raise RequestError(
            f"steps {first} to {end} of a run that takes steps {step_plan.start_step} to {step_plan.steps.stop}: "
            "continue from a state of the same request, and end where that ends or before"
        )
    return range(first, end)


def _starting_latents(request: DenoiseRequest, sigma: float) -> torch.Tensor:
    """Return the latents at the first step's noise level; a request without a latent counts as one of zeros."""
    if not request.add_noise:
        assert request.latent is not None
        return (1 - sigma) * request.latent.to(request.noise)
    if request.latent is not None:
        return sigma * request.noise + (1 - sigma) * request.latent.to(request.noise)
    return request.noise if sigma > PURE_NOISE else sigma * request.noise


def _masked_part(request: DenoiseRequest, device: torch.device) -> MaskedPart | None:
    """Return the masked part of the request; without added noise, the latent keeps the noise that it carries."""
    if request.mask is None:
        return None

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, torch.float32)

    nothing = torch.zeros(())
    latent = nothing if request.latent is None else request.latent
    noise = request.noise if request.add_noise else nothing
    # TI2V-5B reads given frames without noise and with their own timestep, A14B at the noise level of the step.
    without_noise = request.channels == WAN22.channels
    return MaskedPart.of(placed(request.mask), placed(latent), None if without_noise else placed(noise))
