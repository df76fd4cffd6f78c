"""Split of a request over a mesh, and progress of its parts merged into the progress of one run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...plan import stage_boundaries
from ...sampling import DenoiseRequest, RequestError, RunState, StepProgress
from ...schema import Mesh
from ..messages import StepReport


def part_sizes(batch: int, mesh: Mesh) -> list[int]:
    """Return the number of samples in each part of a request; the samples of one part are lanes of one pass.

    With several stages, every sample is a part, because a pipeline needs several items. Otherwise each data coordinate
    gets one part of about equal size, so that its weights are streamed once for all its samples.
    """
    if mesh.stage > 1:
        return [1] * batch
    parts = min(batch, mesh.data)
    each, more = divmod(batch, parts)
    return [each + (number < more) for number in range(parts)]


def stage_steps(request: DenoiseRequest, stages: int) -> list[range]:
    """Return the steps of each stage, cut at the switch of experts first, then by the number of lanes to compute.

    Raises MeshError if there are more stages than steps.
    """
    step_plan = request.step_plan
    experts = [step_plan.experts[step] for step in step_plan.steps]
    lanes = [float(request.lanes_at(step)) for step in step_plan.steps]
    first = step_plan.start_step
    return [range(first + each.start, first + each.stop) for each in stage_boundaries(experts, lanes, stages)]


class MergedProgress:
    """Progress of a run that is computed in several parts, given in the order of its samples."""

    def __init__(self, parts: Sequence[DenoiseRequest]) -> None:
        self._total = sum(len(part.step_plan.steps) for part in parts)
        self._done = 0
        self._denoised = [part.noise.cpu() for part in parts]

    def add(self, part: int, report: StepReport) -> StepProgress:
        """Return the progress of the run after a step of one part, reported by the leader of its group."""
        assert report.denoised is not None
        self._done += 1
        self._denoised[part] = report.denoised
        return StepProgress(
            record=report.record,
            done=self._done,
            total=self._total,
            denoised=torch.cat(self._denoised),
            state=lambda: self._state(report),
        )

    def _state(self, report: StepReport) -> RunState:
        if len(self._denoised) > 1 or report.state is None:
            raise RequestError("the samples of this run are at different steps, so there is no common state")
        return report.state
