"""Other ways to ask for the same videos: with weights kept in fewer bytes, or several videos in one pass.

They change what comes out, or how much comes out at once, so `plan_offload` does not choose them by itself.
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
    """One way, planned; or why it does not fit."""

    words: str
    videos: int
    """That come out of the run."""
    plan: OffloadPlan | None
    why_not: str = ""

    @property
    def video_s(self) -> float:
        """Seconds for each video; infinite where it does not fit."""
        return float("inf") if self.plan is None else self.plan.total_s / self.videos


def plan_alternatives(job: OffloadJob, machine: Machine, budgets: Budgets) -> tuple[Alternative, ...]:
    """`job` as it is, and every other way of it, by the time that each video takes; all are planned by `plan_offload`.

    A way that moves the same bytes and computes as much is not faster than another; of equal ones the first named stays
    first, and that is the job as it is.
    """
    choices = []
    for words, videos, other in _ways(job):
        try:
            choices.append(Alternative(words=words, videos=videos, plan=plan_offload(other, machine, budgets)))
        except DoesNotFitError as err:
            choices.append(Alternative(words=words, videos=videos, plan=None, why_not=str(err)))
    return tuple(sorted(choices, key=lambda choice: round(choice.video_s, 3)))


def in_fp8(job: OffloadJob) -> OffloadJob:
    """`job` with its weights quantised to fp8 while RAM is filled: one byte for each in RAM and on the bus.

    The scales of the rows, less than a thousandth, are not counted.
    """
    return replace(job, stored_bytes=job.stored_bytes // job.value_bytes)


def videos_at_once(job: OffloadJob, videos: int) -> OffloadJob:
    """`job` for that many videos in one pass over the weights."""
    return replace(job, lanes={expert: videos * lanes for expert, lanes in job.lanes.items()})


def _ways(job: OffloadJob) -> Iterator[tuple[str, int, OffloadJob]]:
    kinds = [("as asked", job)]
    if not job.decodes:
        kinds.append(('storage "fp8"', in_fp8(job)))
    for words, kind in kinds:
        yield words, 1, kind
        for videos in VIDEOS_AT_ONCE:
            yield f"{words}, {videos} videos in one pass", videos, videos_at_once(kind, videos)
