"""`--share-weights N`: the rows of a batch as jobs of up to N rows that share one stream of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..host.embedded_graph import Prompt
from .batch_jobs import Job, Planner, Sockets, with_values
from .batch_rows import Row
from .lanes import LanePass, check_lanes, lane_passes

MOST_NAMED = 8
"""Rows that are named where they have something in common; of more only the number is told."""


def lane_planner(workflow: Prompt, sockets: Sockets, lanes: int, tell: Callable[[str], None]) -> Planner:
    """Makes jobs of up to `lanes` rows, and tells once which rows run alone and why. Raises LanesError for no lanes."""
    check_lanes(lanes)

    def plan(rows: Sequence[Row]) -> list[Job]:
        named = {f"line {row.line}": row for row in rows}
        passes = lane_passes({name: with_values(workflow, row, sockets) for name, row in named.items()}, lanes)
        if len(rows) > 1:  # what is tried alone after it failed with others has been told of already
            for words in alone_words(passes):
                tell(words)
        return [_job(made, [named[str(name)] for name in made.rows]) for made in passes]

    return plan


def alone_words(passes: Sequence[LanePass]) -> list[str]:
    """Which rows run alone for which reason, a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for made in passes:
        if made.reason:
            by_reason.setdefault(made.reason, []).append(str(made.rows[0]))
    return [f"{_listed(names)} alone: {reason}" for reason, names in by_reason.items()]


def _listed(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} runs"
    if len(names) > MOST_NAMED:
        return f"{names[0]} and {len(names) - 1} more run"
    return f"{', '.join(names[:-1])} and {names[-1]} run"


def _job(made: LanePass, rows: Sequence[Row]) -> Job:
    if len(rows) == 1:
        return Job(prompt=made.prompt, rows=tuple(rows), saves={rows[0].hash: None})
    saves = {row.hash: own for row, own in zip(rows, made.own_ids, strict=True)}
    return Job(prompt=made.prompt, rows=tuple(rows), saves=saves)
