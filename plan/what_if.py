"""Alternatives to a run for comparison: weights stored in fp8, and several videos in one pass.

They change the result, or the number of videos, so `plan_offload` never chooses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .machine import Machine
from .memory import DoesNotFitError
from .offload_job import Budgets, OffloadJob
from .planner import OffloadPlan, plan_offload

VIDEOS_AT_ONCE = (2, 4)


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Plan of one alternative, or the reason for which it does not fit."""

    words: str
    """Description of the alternative."""
    videos: int
    """Number of videos of the run."""
    plan: OffloadPlan | None
    """None if the alternative does not fit into memory."""
    why_not: str = ""
    """Error message if the alternative does not fit."""

    @property
    def video_s(self) -> float:
        """Seconds per video; infinite if the alternative does not fit."""
        return float("inf") if self.plan is None else self.plan.total_s / self.videos


def plan_alternatives(job: OffloadJob, machine: Machine, budgets: Budgets) -> tuple[Alternative, ...]:
    """Plan `job` and its alternatives with `plan_offload`; return them sorted by seconds per video.

    The order of equal ones is kept, and `job` itself is the first.
    """
    choices = []
    for words, videos, other in _variants(job):
        try:
            choices.append(Alternative(words=words, videos=videos, plan=plan_offload(other, machine, budgets)))
        except DoesNotFitError as err:
            choices.append(Alternative(words=words, videos=videos, plan=None, why_not=str(err)))
    return tuple(sorted(choices, key=lambda choice: round(choice.video_s, 3)))


def in_fp8(job: OffloadJob) -> OffloadJob:
    """Return `job` with weights that are quantised to fp8 after reading: 1 byte per weight in RAM and on the bus.

    The row scales, less than a thousandth of it, are not counted.
    """
    return replace(job, stored_bytes=job.stored_bytes // job.value_bytes)


def videos_at_once(job: OffloadJob, videos: int) -> OffloadJob:
    """Return `job` with the lanes of that many videos in one pass over the weights."""
    return replace(job, lanes={expert: videos * lanes for expert, lanes in job.lanes.items()})


def _variants(job: OffloadJob) -> Iterator[tuple[str, int, OffloadJob]]:
    """Yield (description, videos, job) of each alternative."""
    kinds = [("as requested", job)]
    if not job.decodes:
        kinds.append(('storage "fp8"', in_fp8(job)))
    for words, kind in kinds:
        yield words, 1, kind
        for videos in VIDEOS_AT_ONCE:
            yield f"{words}, {videos} videos in one pass", videos, videos_at_once(kind, videos)
