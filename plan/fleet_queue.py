"""A queue of videos on a pipeline: stages in a row, each with cells that serve one video at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """What a cell of one stage takes for a video."""

    first_s: float
    """For its first one: from empty buffers."""
    next_s: float
    """For each one after that."""


@dataclass(frozen=True, kw_only=True)
class QueueRun:
    """A queue that ran to its end."""

    makespan_s: float
    """From the start to the end of the last video."""
    done_s: tuple[float, ...]
    """When each video was done, the earliest first."""
    videos: tuple[tuple[int, ...], ...]
    """Per stage and cell: how many videos passed it."""
    busy_s: tuple[tuple[float, ...], ...]
    """Per stage and cell: how long it computed, or waited for its own weights."""


def run_queue(stages: Sequence[StageSeconds], *, cells: int, videos: int, handover_s: float = 0.0) -> QueueRun:
    """Let `videos` pass all stages, each of which has that many cells.

    Whoever has waited longest goes to the cell that has been free longest; videos that wait between two stages are held
    by the driver, so no cell ever waits until it is rid of one. Raises ValueError without cells or videos.
    """
    if cells < 1 or videos < 1:
        raise ValueError(f"{videos} videos on {cells} cells: there must be one of each")
    arrived = [0.0] * videos
    served, busy = [], []
    for place, seconds in enumerate(stages):
        free = [(0.0, cell) for cell in range(cells)]
        passed, worked = [0] * cells, [0.0] * cells
        done = []
        for at in arrived:
            since, cell = heappop(free)
            takes = seconds.next_s if passed[cell] else seconds.first_s
            end = max(since, at) + takes
            passed[cell] += 1
            worked[cell] += takes
            heappush(free, (end, cell))
            done.append(end)
        last = place == len(stages) - 1
        arrived = sorted(end if last else end + handover_s for end in done)
        served.append(tuple(passed))
        busy.append(tuple(worked))
    return QueueRun(makespan_s=arrived[-1], done_s=tuple(arrived), videos=tuple(served), busy_s=tuple(busy))
