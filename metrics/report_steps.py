"""The tables of one variant: what every step took, and how fast the routes were while they moved its weights."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from ..plan import StepRecord, Timeline
from ..plan.fetch_rates import RATE_BORDERS, RateRange, together
from ..plan.figure_words import rate_text, second_digits, seconds_text, share_text, size_text
from .report import Variant
from .report_figures import Spread, over_steady_s, steady_s
from .report_table import Table

HEAD = (
    *("Step", "Expert", "Cumulative (s)", "Delta (s)", "Spread (s)", "Compute (s)", "Stall (s)", "Stall, files (s)"),
    *("Moved", "To buffers", "Read", "From files", "Hidden", "VRAM peak", "RAM", "Left out", "Phase"),
)

ROUTES: tuple[tuple[str, Callable[[Timeline], Sequence[RateRange]]], ...] = (
    ("RAM to buffers", lambda timeline: timeline.copy_rates),
    ("files", lambda timeline: timeline.read_rates),
)
"""Each route, and how fast a run's fetches went on it."""


def step_table(variant: Variant) -> Table | None:
    """One line per step: when it ended, how long it took, what it waited for and moved, and what it was.

    Of several runs the medians are given, and beside them the shortest and the longest time of each step. None where
    no run was measured.
    """
    runs = variant.measured
    if not runs:
        return None
    digits, switch = second_digits(step.wall_s for run in runs for step in run.steps), runs[0].switch_step
    ends = [tuple(accumulate(step.wall_s for step in run.steps)) for run in runs]
    rows = [
        _row(steps, [end[place] for end in ends], _phase(runs, place, switch, digits), digits)
        for place, steps in enumerate(zip(*(run.steps for run in runs), strict=True))
    ]
    marked = next((place for place, step in enumerate(runs[0].steps) if step.index == switch), None)
    table = Table(title=f"Per-step timing: {variant.name}", head=HEAD, rows=tuple(rows), marked=marked)
    return table.without_empty_columns()


def _row(steps: Sequence[StepRecord], ends: Sequence[float], phase: str, digits: int) -> tuple[str, ...]:
    """The cells of one step, which the runs have ended at `ends`."""

    def cell(words: Callable[[float], str], value: Callable[[StepRecord], float | None]) -> str:
        spread = Spread.of(value(step) for step in steps)
        return "" if spread is None else words(spread.median)

    def seconds(value: float) -> str:
        return seconds_text(value, digits)

    walls, reads = [step.wall_s for step in steps], any(step.read_bytes for step in steps)
    return (
        str(steps[0].index + 1),
        steps[0].expert,
        seconds(statistics.median(ends)),
        seconds(statistics.median(walls)),
        f"{seconds(min(walls))} to {seconds(max(walls))}" if len(walls) > 1 else "1 run",
        cell(seconds, lambda step: step.compute_s),
        cell(seconds, lambda step: step.stall_s),
        cell(seconds, lambda step: step.stall_file_s if reads else None),
        cell(size_text, lambda step: step.bytes_moved),
        cell(rate_text, lambda step: step.copy_bytes_per_s),
        cell(size_text, lambda step: step.read_bytes if reads else None),
        cell(rate_text, lambda step: step.read_bytes_per_s),
        cell(share_text, lambda step: step.overlap),
        cell(size_text, lambda step: step.device_bytes),
        cell(size_text, lambda step: step.rss_bytes),
        _left_out(steps),
        phase,
    )


def _left_out(steps: Sequence[StepRecord]) -> str:
    """`39 blocks, 2 lanes`: what a cache took over in a step, in the run that it took most."""
    most = max(steps, key=lambda step: (step.skipped_visits, step.cached_lanes))
    return f"{most.skipped_visits} blocks, {most.cached_lanes} lanes" if most.cached_lanes else ""


def _phase(runs: Sequence[Timeline], place: int, switch: int | None, digits: int) -> str:
    """`Switch to the low-noise expert: +0.1 s (+0 %) over a steady step` and the like."""
    steps = runs[0].steps
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
    expert = runs[0].steps[place].expert
    over = Spread.of(over_steady_s(run, run.steps[place]) for run in runs)
    steady = Spread.of(steady_s(run, expert) for run in runs)
    if over is None or steady is None:
        return ""
    said = seconds_text(over.median, digits)
    sign = "" if said.startswith("-") else "+"
    return f": {sign}{said} s ({round(100 * over.median / steady.median):+d} %) over a steady step"


def bandwidth_tables(variant: Variant) -> Iterator[Table]:
    """For each route that moved anything: how many fetches, bytes and seconds it spent at which rate.

    Every fetch of the measured runs is counted, at the rate of its own bytes and time.
    """
    runs = variant.measured
    for route, rates_of in ROUTES:
        counted = together(rates for run in runs for rates in rates_of(run))
        if counted:
            several = f" ({len(runs)} runs together)" if len(runs) > 1 else ""
            yield _histogram(f"Bandwidth histogram: {variant.name}, {route}{several}", counted)


def _histogram(title: str, counted: Sequence[RateRange]) -> Table:
    digits = second_digits([sum(rates.busy_s for rates in counted)])
    by_border = {rates.from_gb_per_s: rates for rates in counted}
    rows = []
    for low, high in zip(RATE_BORDERS, (*RATE_BORDERS[1:], None), strict=True):
        found = by_border.get(low) or RateRange(from_gb_per_s=low, fetches=0, nbytes=0, busy_s=0.0)
        words = f"over {low} GB/s" if high is None else f"{low}-{high} GB/s"
        rows.append((words, str(found.fetches), size_text(found.nbytes), f"{seconds_text(found.busy_s, digits)} s"))
    return Table(title=title, head=("Range", "Fetches", "Data", "Time"), rows=tuple(rows))
