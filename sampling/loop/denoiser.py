"""Denoiser: latents and solver of one run, advanced step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from ...telemetry import Recorder
from ...wan import ExpertEngine
from ...wan.latents import WAN22
from ..inputs.mask import MaskedPart
from ..inputs.request import DenoiseRequest
from ..inputs.run_inputs import RunInputs
from ..steps.errors import NonFiniteLatentError, RequestError
from ..steps.parallel import RunSlice, RunState
from ..steps.results import StepProgress
from ..steps.schedules import PURE_NOISE, step_seeds
from ..steps.settings import StepPlan
from ..steps.sides import guided_velocity
from ..steps.solvers import Solver
from .lanes import LaneInputs, step_lanes, windows_at
from .model_calls import ModelCalls
from .oom_fallback import RunPolicy


class _StepResult(NamedTuple):
    """State after a finished step, before the run accepts it."""

    latents: torch.Tensor
    solver: Solver
    denoised: torch.Tensor
    finite: torch.Tensor
    """0-d bool on the run's device, read after the step. Reading it inside the step would wait for
    the device."""


class Denoiser:
    """State of one run: the latents, and the solver with its history.

    Both change only after a finished step.
    """

    def __init__(
        self, request: DenoiseRequest, part: RunSlice, policy: RunPolicy, recorder: Recorder
    ) -> None:
        device = policy.device
        self.step_plan = request.step_plan
        self._range = _remaining_steps(self.step_plan, part.resume, part.until)
        self.sigma = self.step_plan.schedule.sigmas[self._range.stop]
        """Noise level after the run's last step."""
        self._steps = [(step, self.step_plan.experts[step]) for step in self._range]
        self._request = request
        self._policy = policy
        self._recorder = recorder
        self._inputs = LaneInputs(request, device, reads_reference=policy.pair.reads_reference)
        self._masked = _masked_part(request.inputs, device)
        cache = request.options.cache
        self._cache = None
        if cache is not None:
            self._cache = cache.start(step_lanes(policy.pair, request, self._range), part.split)
        seeds = step_seeds(request.noise, request.latent)
        self._solver = Solver(
            request.solver, self.step_plan.schedule, request.start_step, seeds=seeds
        )
        if part.resume is None:
            self.latents = _starting_latents(request.inputs, self.step_plan.start_sigma).to(device)
        else:
            # Not scaled again: the state is at the step's noise level.
            self.latents = part.resume.latents.to(device)
            self._solver.restore(part.resume.history, device)

    def steps(self, should_stop: Callable[[], bool] | None) -> Iterator[StepProgress]:
        """Compute the remaining steps, one at a time. See `denoise` for the callback."""
        calls = ModelCalls(
            self._policy,
            [expert for _, expert in self._steps],
            recorder=self._recorder,
            first_step=self._range.start,
            should_stop=should_stop,
            nag=self._request.guidance_settings.nag,
            cache=self._cache,
        )
        with calls:
            if self._steps:
                self._prefetch_embeddings(calls.engine)
            schedule = self.step_plan.schedule
            for step, expert in self._steps:
                for attempt in calls.attempts(expert, schedule.sigmas[step]):
                    # If memory runs out, `attempt` suppresses the error, and the loop tries again.
                    with attempt:
                        result = self._compute_step(step, calls)
                self._accept(step, result)
                yield StepProgress(
                    record=self._recorder.last,
                    done=step + 1 - self.step_plan.start_step,
                    total=len(self.step_plan.steps),
                    denoised=result.denoised,
                    state=partial(_state, step + 1, result),
                    changes=tuple(self._policy.changes),
                )

    def _prefetch_embeddings(self, engine: ExpertEngine) -> None:
        """Pass all timesteps and texts of the run to the engine, to be embedded together."""
        plan = self.step_plan
        nag = self._request.guidance_settings.nag is not None
        calls = [
            (expert, plan.schedule.timesteps[step], nag or plan.guidance[step] != 1)
            for step, expert in self._steps
        ]
        self._inputs.prefetch(engine, calls)

    def _compute_step(self, step: int, calls: ModelCalls) -> _StepResult:
        """Compute a step without changing the run, as it is repeated after out-of-memory errors."""
        schedule = self.step_plan.schedule
        sigma = schedule.sigmas[step]
        guidance = self.step_plan.guidance[step]
        latents = self.latents
        # A copy, because a scheduler changes its history before the step is known to be finite and
        # finished.
        solver = self._solver.copy()
        state = latents if self._masked is None else self._masked.model_input(latents, sigma)
        windows = windows_at(self._request, step)
        # NAG replaces the negative lane, so it acts without CFG only.
        nag = guidance == 1 and self._request.guidance_settings.nag is not None
        sides = self._request.sides_at(step)
        lanes = self._inputs.lanes(state, sides, attach_nag=nag, windows=windows)
        velocities = calls.velocities(lanes, schedule.timesteps[step])
        if windows is not None:
            velocities = windows.whole(velocities)
        velocity = guided_velocity(
            velocities, sides, guidance, self._request.guidance_settings.context
        )
        # x = (1 - sigma) x0 + sigma noise and v = noise - x0, so x0 = x - sigma v.
        denoised = state - sigma * velocity
        if self._masked is not None:
            denoised = self._masked.merge_kept(denoised)
            # The velocity towards the merged estimate, so that the solver's history agrees with it.
            velocity = (latents - denoised) / sigma
        latents = solver.step(velocity, latents)
        return _StepResult(
            latents=latents, solver=solver, denoised=denoised, finite=latents.isfinite().all()
        )

    def _accept(self, step: int, result: _StepResult) -> None:
        """Make a finished step the run's state.

        Raises:
            NonFiniteLatentError: the step made NaN or infinity.
        """
        if not result.finite:
            raise NonFiniteLatentError(
                f"the latent is NaN or infinite after step {step} "
                f"({self.step_plan.experts[step]}-noise expert, sigma "
                f"{self.step_plan.schedule.sigmas[step]:.4f}): an input or a weight is broken, or "
                f"{self._policy.pair.compute_dtype} is too narrow for them"
            )
        self.latents = result.latents
        self._solver = result.solver


def _state(next_step: int, result: _StepResult) -> RunState:
    return RunState(
        next_step=next_step,
        # A copy on a CPU too, so a change to the state does not reach the run.
        latents=result.latents.to("cpu", copy=True),
        history=result.solver.history(),
    )


def _remaining_steps(step_plan: StepPlan, resume: RunState | None, until: int | None) -> range:
    """Return the steps from `resume`, or the first one, to before `until`, or to the last one.

    Raises:
        RequestError: the state or the end does not belong to this step plan.
    """
    first = step_plan.start_step if resume is None else resume.next_step
    end = step_plan.steps.stop if until is None else until
    if not step_plan.start_step <= first <= end <= step_plan.steps.stop:
        raise RequestError(
            f"steps {first} to {end} of a run that takes steps {step_plan.start_step} to "
            f"{step_plan.steps.stop}: continue from a state of the same request, and end where "
            "that ends or before"
        )
    return range(first, end)


def _starting_latents(inputs: RunInputs, sigma: float) -> torch.Tensor:
    """Return the latents at the first step's noise level.

    A missing latent counts as zeros.
    """
    if not inputs.add_noise:
        assert inputs.latent is not None
        # ComfyUI's samplers divide leftover noise by 1 - sigma. The factor undoes the division.
        return (1 - sigma) * inputs.latent.to(inputs.noise)
    if inputs.latent is not None:
        return sigma * inputs.noise + (1 - sigma) * inputs.latent.to(inputs.noise)
    # A first sigma just below 1 stands for noise alone, which must not be scaled.
    return inputs.noise if sigma > PURE_NOISE else sigma * inputs.noise


def _masked_part(inputs: RunInputs, device: torch.device) -> MaskedPart | None:
    """Return the masked part of the inputs.

    Without added noise, the latent keeps the noise in it.
    """
    if inputs.mask is None:
        return None

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, torch.float32)

    nothing = torch.zeros(())
    latent = nothing if inputs.latent is None else inputs.latent
    noise = inputs.noise if inputs.add_noise else nothing
    # TI2V-5B reads given frames without noise and with separate timesteps, A14B at the step's noise
    # level.
    without_noise = inputs.channels == WAN22.channels
    return MaskedPart.of(
        placed(inputs.mask), placed(latent), None if without_noise else placed(noise)
    )
