"""What lies between two steps of a run: enough to go on with it in another process, as if nothing had happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import RequestError
from ..inputs.request import StepPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class RunState:
    """A run before its step `next_step`. Lives on the CPU; plain tensors, numbers and lists throughout."""

    next_step: int
    """0-based in the whole schedule; as many as there are steps when the run is over."""
    latents: torch.Tensor
    """[B, 16, T, h, w] float32, normalised, at that step's noise level."""
    history: Mapping[str, Any]
    """What the solver remembers of the steps before (`Solver.history`)."""


def own_steps(step_plan: StepPlan, resume: RunState | None, until: int | None) -> range:
    """The steps to take from `resume` on, or from the first of the course, to before step `until`, or to its last.

    Raises RequestError for a state, or an end, that is not one of this course.
    """
    first = step_plan.start_step if resume is None else resume.next_step
    end = step_plan.steps.stop if until is None else until
    if not step_plan.start_step <= first <= end <= step_plan.steps.stop:
        raise RequestError(
            f"steps {first} to {end} of a run that takes steps {step_plan.start_step} to {step_plan.steps.stop}: "
            "go on from "
            "a state of the same request, and end where it ends or before"
        )
    return range(first, end)
