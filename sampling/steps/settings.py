"""Steps of a run: settings, and noise level, expert and guidance by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ...plan.programs import split_at_boundary
from ...schema import StepRange
from .errors import RequestError
from .guidance import Guidance
from .schedules import Schedule, explicit_schedule, make_schedule
from .solvers import SOLVERS

DEFAULT_STEPS = 40
"""Steps in the Wan2.2 release."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Steps of a run: noise levels, and expert and guidance by step."""

    schedule: Schedule
    experts: tuple[str, ...]
    """Expert by step of the schedule: "high" or "low"."""
    guidance: tuple[float, ...]
    """CFG scale by step of the schedule."""
    start_step: int
    whole_steps: int
    """Steps in the whole schedule, including steps after this run's end."""

    @property
    def start_sigma(self) -> float:
        """Noise level at the start of the first step."""
        return self.schedule.sigmas[self.start_step]

    @property
    def end_sigma(self) -> float:
        """Noise level after the last step. 0 for a finished video."""
        return self.schedule.sigmas[-1]

    @property
    def steps(self) -> range:
        """Steps that the run computes, a part of the schedule."""
        return range(self.start_step, self.schedule.steps)

    def scales(self, expert: str | None = None) -> tuple[float, ...]:
        """Return the CFG scales for the run's steps, or for one expert's steps in it."""
        return tuple(
            self.guidance[step] for step in self.steps if expert in (None, self.experts[step])
        )

    def check_strengths(self, ranges: Iterable[tuple[str, StepRange]]) -> None:
        """Raise RequestError if a range of steps ends after the run's steps.

        Each range comes after its LoRA file name.
        """
        steps = self.whole_steps
        for file, strengths in ranges:
            if strengths.last >= steps:
                raise RequestError(
                    f"{file} has a strength for steps {str(strengths)!r}, and the run has {steps} "
                    f"steps, 0 to {steps - 1}: change strength_steps in Wan LoRA (pair), or the "
                    "steps"
                )


@dataclass(frozen=True, kw_only=True, eq=False)
class StepSettings:
    """Schedule, solver, part of the schedule, and switch for a run.

    Raises:
        RequestError: a value is out of range, or values do not fit together.
    """

    steps: int | None = None
    """Steps in the whole schedule. None: 40, or the number in `sigmas`."""
    solver: str = "unipc"
    """One of `SOLVERS`: "euler", "unipc", "dpm++" or "lcm"."""
    schedule: str = "wan"
    """One of `SCHEDULES`: "simple" (ComfyUI's) or "wan" (diffusers'). Not used with `sigmas`."""
    sigmas: Sequence[float] | torch.Tensor | None = None
    """Steps + 1 descending values, used without a flow shift. A last value above 0 leaves noise
    over."""
    flow_shift: float = 12.0
    boundary_ratio: float = 0.875
    """The high-noise expert computes steps with a timestep of at least 1000 times this."""
    switch_step: int | None = None
    """First step for the low-noise expert, in place of `boundary_ratio`. 0: low only. The number of
    steps: high only."""
    start_step: int = 0
    """First step to compute, 0-based. The schedule and the switch still belong to all steps."""
    end_step: int | None = None
    """Step before which the run ends. None, or a number above the last step: the run computes all
    steps."""
    leftover_noise: bool = False
    """True: a run that ends early leaves the end step's noise in. False: its last step goes down to
    sigma 0."""

    def __post_init__(self) -> None:
        self._check_range()
        if not 0 <= self.boundary_ratio <= 1:
            raise RequestError(
                f"boundary ratio {self.boundary_ratio:g}: give 0 to 1 (Wan2.2: 0.875 for text, 0.9 "
                "for images)"
            )
        if self.solver not in SOLVERS:
            raise RequestError(
                f"unknown solver {self.solver!r}: choose one of {', '.join(SOLVERS)}"
            )

    def _check_range(self) -> None:
        steps = self.whole.steps
        start = self.start_step
        end = self._end
        switch = self.switch_step
        if end < 1:
            raise RequestError(
                f"end step {end}: give at least 1, the first step runs before step 1"
            )
        if not 0 <= start < steps:
            before_end = f", below end_step {end}" * (end <= start)
            raise RequestError(
                f"start step {start} of {steps} steps: give 0 to {min(steps, end) - 1}{before_end}"
            )
        if start >= end:
            raise RequestError(
                f"the run starts with step {start} and ends before step {end}, so no step is left: "
                f"set start_step below {end}, or end_step above {start}"
            )
        if switch is not None and not 0 <= switch <= steps:
            raise RequestError(f"switch step {switch} of {steps} steps: give 0 to {steps}")

    @property
    def _end(self) -> int:
        return self.whole.steps if self.end_step is None else self.end_step

    @cached_property
    def whole(self) -> Schedule:
        """Noise levels in the whole schedule, including steps outside the run."""
        if self.sigmas is None:
            return make_schedule(
                self.schedule, DEFAULT_STEPS if self.steps is None else self.steps, self.flow_shift
            )
        schedule = explicit_schedule(self.sigmas)
        if self.steps not in (None, schedule.steps):
            raise RequestError(
                f"{schedule.steps + 1} sigmas make {schedule.steps} steps, not {self.steps}: do "
                "not give steps"
            )
        return schedule

    def plan(self, guidance: Guidance) -> StepPlan:
        """Return the steps of a run with this guidance."""
        switch = self.switch_step
        if switch is None:
            # In the whole schedule, so that a part of a run switches where the whole would.
            switch = split_at_boundary(self.whole.timesteps, self.boundary_ratio)
        schedule = self.whole.until(self._end, leftover_noise=self.leftover_noise)
        # A negative count gives no low steps, if the run ends before the switch.
        experts = ("high",) * min(switch, schedule.steps) + ("low",) * (schedule.steps - switch)
        return StepPlan(
            schedule=schedule,
            experts=experts,
            guidance=tuple(guidance.scale(step, expert) for step, expert in enumerate(experts)),
            start_step=self.start_step,
            whole_steps=self.whole.steps,
        )
