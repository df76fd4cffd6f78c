"""How a request is shared out over a mesh, and how the steps of its parts become the steps of one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...plan import stage_boundaries
from ...sampling import DenoiseRequest, RequestError, RunState, StepProgress
from ...schema import Mesh
from ..messages import StepReport


def part_sizes(batch: int, mesh: Mesh) -> list[int]:
    """How many samples each part of a request has; the samples of a part are lanes of one pass.

    Stages are filled by single samples. Without stages each row of workers gets one part, as equal as can be, so that
    weights move once for all samples of a row.
    """
    if mesh.stage > 1:
        return [1] * batch
    parts = min(batch, mesh.data)
    each, more = divmod(batch, parts)
    return [each + (number < more) for number in range(parts)]


def stage_steps(request: DenoiseRequest, stages: int) -> list[range]:
    """The steps of the whole schedule that each stage computes: cut at the switch of experts, then by lanes to compute.

    Raises MeshError for stages that there are no steps for.
    """
    step_plan = request.step_plan
    experts = [step_plan.experts[step] for step in step_plan.steps]
    lanes = [float(request.lanes_at(step)) for step in step_plan.steps]
    first = step_plan.start_step
    return [range(first + each.start, first + each.stop) for each in stage_boundaries(experts, lanes, stages)]


class MergedProgress:
    """Tells the steps of several parts as those of one run.

    Args:
        parts: of the run, in the order of its samples.
        on_step: is told each step.
    """

    def __init__(self, parts: Sequence[DenoiseRequest], on_step: Callable[[StepProgress], None]) -> None:
        self._on_step = on_step
        self._total = sum(len(part.step_plan.steps) for part in parts)
        self._done = 0
        self._denoised = [part.noise.cpu() for part in parts]

    def show(self, part: int, told: StepReport) -> None:
        """A part has taken a step; `told` is of the leader of its group."""
        assert told.denoised is not None
        self._done += 1
        self._denoised[part] = told.denoised
        self._on_step(
            StepProgress(
                record=told.record,
                done=self._done,
                total=self._total,
                denoised=torch.cat(self._denoised),
                state=lambda: self._state(told),
            )
        )

    def _state(self, told: StepReport) -> RunState:
        if len(self._denoised) > 1 or told.state is None:
            raise RequestError("the samples of this run are at different steps: there is no state of all of them")
        return told.state
