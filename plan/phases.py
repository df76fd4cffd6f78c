"""The phases of a run, from its steps: the first block, each expert's stage, and the switch between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from .timeline import PhaseRecord, StepRecord


def run_phases(steps: Sequence[StepRecord], computed_from: Sequence[float | None]) -> tuple[PhaseRecord, ...]:
    """Parts of a run that follow each other without a gap, from its start to the end of its last step.

    "first block" ends, and so does each "switch", when the first block of the stage behind it begins to compute. A
    stage has the name of its expert.

    Args:
        steps: all of the run, each with its `began_s`; without it there are no phases.
        computed_from: per step, in seconds since the run began, when its first block began to compute; None for a step
            without blocks.
    """
    phases: list[PhaseRecord] = []
    reached = 0.0
    placed = zip(steps, computed_from, strict=True)
    for expert, members in groupby(placed, key=lambda placed_step: placed_step[0].expert):
        stage = list(members)
        (first, computes), (last, _) = stage[0], stage[-1]
        if first.began_s is None or last.began_s is None:
            return ()
        computes = first.began_s if computes is None else computes
        opening = "switch" if phases else "first block"
        phases.append(PhaseRecord(name=opening, began_s=reached, wall_s=computes - reached))
        reached = last.began_s + last.wall_s
        phases.append(
            PhaseRecord(
                name=expert,
                began_s=computes,
                wall_s=reached - computes,
                device_bytes=_most(step.device_bytes for step, _ in stage),
                device_used_bytes=_most(step.device_used_bytes for step, _ in stage),
                rss_bytes=last.rss_bytes,
            )
        )
    return tuple(phases)


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
