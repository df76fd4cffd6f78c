"""The tables of one variant: what every step took, and how fast the routes were while they moved its weights."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf

from ..plan import StepRecord, Timeline
from ..plan.figure_words import rate_text, second_digits, seconds_text, share_text, size_text
from .report import Variant
from .report_figures import Spread, over_steady_s
from .report_table import Table

HEAD = (
    *("Step", "Expert", "Cumulative (s)", "Delta (s)", "Spread (s)", "Compute (s)", "Stall (s)", "Stall, files (s)"),
    *("Moved", "To buffers", "Read", "From files", "Hidden", "VRAM peak", "RAM", "Phase"),
)

RANGES_GB_PER_S = (0, 1, 5, 20, 50, 80, inf)
"""Borders of the ranges of the bandwidth histogram."""

ROUTES = (("RAM to buffers", "copied_bytes", "copy_s"), ("files", "read_bytes", "read_s"))
"""Each route, and the fields of a step with its bytes and its busy seconds."""


def step_table(variant: Variant) -> Table | None:
    """One line per step: when it ended, how long it took, what it waited for and moved, and what it was.

    Of several runs the medians are given, and beside them the shortest and the longest time of each step. None where
    no run was measured.
    """
    runs = variant.measured
    if not runs:
        return None
    digits = second_digits(step.wall_s for run in runs for step in run.steps)
    ends = [tuple(accumulate(step.wall_s for step in run.steps)) for run in runs]
    rows = [
        _row(steps, [end[place] for end in ends], _phase(runs, place, digits), digits)
        for place, steps in enumerate(zip(*(run.steps for run in runs), strict=True))
    ]
    switch = [place for place, step in enumerate(runs[0].steps) if step.index == runs[0].switch_step]
    table = Table(
        title=f"Per-step timing: {variant.name}", head=HEAD, rows=tuple(rows), marked=switch[0] if switch else None
    )
    return table.without_empty_columns()


def _row(steps: Sequence[StepRecord], ends: Sequence[float], phase: str, digits: int) -> tuple[str, ...]:
    """The cells of one step, which the runs have ended at `ends`."""

    def cell(words: Callable[[float], str], value: Callable[[StepRecord], float | None]) -> str:
        spread = Spread.of(value(step) for step in steps)
        return "" if spread is None else words(spread.median)

    def seconds(value: float) -> str:
        return seconds_text(value, digits)

    walls = [step.wall_s for step in steps]
    return (
        str(steps[0].index + 1),
        steps[0].expert,
        seconds(statistics.median(ends)),
        seconds(statistics.median(walls)),
        f"{seconds(min(walls))} to {seconds(max(walls))}" if len(walls) > 1 else "1 run",
        cell(seconds, lambda step: step.compute_s),
        cell(seconds, lambda step: step.stall_s),
        cell(seconds, lambda step: step.stall_file_s if step.read_bytes else None),
        cell(size_text, lambda step: step.bytes_moved),
        cell(rate_text, lambda step: step.copy_bytes_per_s),
        cell(size_text, lambda step: step.read_bytes or None),
        cell(rate_text, lambda step: step.read_bytes_per_s),
        cell(share_text, lambda step: step.overlap),
        cell(size_text, lambda step: step.device_bytes),
        cell(size_text, lambda step: step.rss_bytes),
        phase,
    )


def _phase(runs: Sequence[Timeline], place: int, digits: int) -> str:
    """`Switch to the low-noise expert: +0.1 s (+0 %) over a steady step` and the like."""
    steps, switch = runs[0].steps, runs[0].switch_step
    step = steps[place]
    if place == 0:
        return f"First step{_beside(runs, place, digits)}"
    if step.index == switch:
        return f"Switch to the {step.expert}-noise expert{_beside(runs, place, digits)}"
    if place == len(steps) - 1:
        return "Last step"
    if steps[place + 1].index == switch:
        return f"Steady (last step of the {step.expert}-noise expert)"
    return "Steady"


def _beside(runs: Sequence[Timeline], place: int, digits: int) -> str:
    """How much longer the step took than the steady ones of its expert, if there are any."""
    over = Spread.of(over_steady_s(run, run.steps[place]) for run in runs)
    if over is None:
        return ""
    steady = statistics.median(run.steps[place].wall_s for run in runs) - over.median
    said = seconds_text(over.median, digits)
    sign = "" if said.startswith("-") else "+"
    return f": {sign}{said} s ({round(100 * over.median / steady):+d} %) over a steady step"


def bandwidth_tables(variant: Variant) -> Iterator[Table]:
    """For each route that moved anything: how many steps, bytes and busy seconds it spent at which rate.

    Steps of all measured runs are counted, each at the rate of its own bytes and busy time.
    """
    for route, nbytes, seconds in ROUTES:
        moves = [
            (getattr(step, nbytes), getattr(step, seconds))
            for run in variant.measured
            for step in run.steps
            if getattr(step, seconds) > 0
        ]
        if moves:
            yield _histogram(f"Bandwidth histogram: {variant.name}, {route}", moves)


def _histogram(title: str, moves: Sequence[tuple[int, float]]) -> Table:
    digits = second_digits([sum(seconds for _, seconds in moves)])
    rows = []
    for low, high in pairwise(RANGES_GB_PER_S):
        found = [(nbytes, seconds) for nbytes, seconds in moves if low <= nbytes / seconds / 1e9 < high]
        words = f"{low}-{high} GB/s" if high < inf else f"over {low} GB/s"
        data, busy = sum(nbytes for nbytes, _ in found), sum(seconds for _, seconds in found)
        rows.append((words, str(len(found)), size_text(data), f"{seconds_text(busy, digits)} s"))
    return Table(title=title, head=("Range", "Steps", "Data", "Time"), rows=tuple(rows))
