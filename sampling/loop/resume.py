"""State of a run between two steps, from which another process can continue it with the same result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import RequestError
from ..inputs.request import StepPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class RunState:
    """State of a run before step `next_step`: tensors on the CPU, numbers and lists, which travel between processes."""

    next_step: int
    """0-based in the whole schedule; equal to the number of steps after the last one."""
    latents: torch.Tensor
    """[B, 16, T, h, w] float32, normalised, at that step's noise level."""
    history: Mapping[str, Any]
    """History of the solver (`Solver.history`)."""


def remaining_steps(step_plan: StepPlan, resume: RunState | None, until: int | None) -> range:
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
