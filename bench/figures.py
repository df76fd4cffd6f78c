"""Variant figures: median, minimum and maximum over runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

from ..schema.records import MemorySample, StepMemory, StepRecord, Timeline, largest_known
from ..schema.text import format_rate, format_seconds, format_share, format_size, second_digits
from .report import Variant

Unit = Literal["s", "bytes", "bytes/s", "share"]


def figure_text(value: float, unit: Unit, digits: int) -> str:
    """Format one value with a unit. Seconds are formatted without a unit."""
    if unit == "s":
        return format_seconds(value, digits)
    return {"bytes": format_size, "bytes/s": format_rate, "share": format_share}[unit](value)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One figure over several runs."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Return the spread of `values`, or None without values or if one is None."""
        given = [*values]
        known = [value for value in given if value is not None]
        if not known or len(known) < len(given):
            return None
        median = statistics.median(known)
        return cls(median=median, low=min(known), high=max(known), runs=len(known))

    def text(self, unit: Unit, digits: int = 4) -> str:
        """Format the spread as `23.0 s (22.6 to 23.4)`, or `23.0 s (1 run)`.

        Seconds have at most `digits` decimals, or fewer if the median needs fewer.
        """
        # Low and high have as many digits as the median, so they can be compared.
        digits = min(digits, second_digits([self.median]))
        median, low, high = (
            figure_text(value, unit, digits) for value in (self.median, self.low, self.high)
        )
        if unit == "s":
            median += " s"
        if self.runs == 1:
            return f"{median} (1 run)"
        return f"{median} ({low} to {high})"


def spread_text(values: Iterable[float | None], unit: Unit, digits: int = 4) -> str:
    """Format the spread of `values`, empty if it is unknown."""
    spread = Spread.of(values)
    return "" if spread is None else spread.text(unit, digits)


@dataclass(frozen=True)
class Figure:
    """One line in a comparison."""

    name: str
    unit: Unit
    of: Callable[[Timeline], float | None]
    brief: bool = False
    """True for a figure in the comparison with variants as rows, which has space for only a few."""

    def spread(self, variant: Variant) -> Spread | None:
        """Return the spread over the measured runs of `variant`."""
        return Spread.of(self.of(timeline) for timeline in variant.measured)


def memory_bytes(record: StepMemory | MemorySample) -> int | None:
    """Return device bytes, or the process's RAM if the device has no counter."""
    if record.device_bytes is None:
        return record.rss_bytes
    return record.device_bytes


def steady_s(timeline: Timeline, expert: str) -> float | None:
    """Return the median seconds of steps with `expert` that do not begin a stage.

    None without such steps.
    """
    # The first step has no predecessor and begins a stage, so it never counts.
    pairs = pairwise(timeline.steps)
    steady = [step.wall_s for before, step in pairs if before.expert == step.expert == expert]
    return statistics.median(steady) if steady else None


def over_steady_s(timeline: Timeline, step: StepRecord | None) -> float | None:
    """Return the extra seconds of `step` over a steady step with the same expert.

    None if either does not exist.
    """
    if step is None:
        return None
    steady = steady_s(timeline, step.expert)
    if steady is None:
        return None
    return step.wall_s - steady


def switch_record(timeline: Timeline) -> StepRecord | None:
    """Return the second expert's first step, or None if the expert does not change."""
    switch = timeline.switch_step
    return next((step for step in timeline.steps if step.index == switch), None)


def _switch_over_steady_s(timeline: Timeline) -> float | None:
    return over_steady_s(timeline, switch_record(timeline))


def _wall_s(step: StepRecord | None) -> float | None:
    return None if step is None else step.wall_s


def _whole_s(timeline: Timeline) -> float | None:
    """Return the seconds from the start of the run to the end of the last phase."""
    ends = (phase.start_s + phase.wall_s for phase in timeline.phases)
    # Phases before the run have negative times.
    return max((end for end in ends if end > 0), default=None)


def _mean_s(timeline: Timeline) -> float | None:
    if timeline.steps:
        return timeline.wall_s / len(timeline.steps)
    return None


def _cached_share(timeline: Timeline) -> float | None:
    """Return the share of steps in which a cache skipped blocks, or None if no lane skipped any."""
    if any(step.skipped_lanes for step in timeline.steps):
        return timeline.skipped_steps / len(timeline.steps)
    return None


def _peak(timeline: Timeline, name: str) -> float | None:
    """Return the largest value in a byte field over all steps and memory samples."""
    # Steps and samples have different fields.
    memories = (*(step.memory for step in timeline.steps), *timeline.memory)
    return largest_known(getattr(memory, name, None) for memory in memories)


TOTAL = Figure("Total denoising", "s", lambda run: run.wall_s, brief=True)
PER_STEP = Figure("Average per step", "s", _mean_s)
DEVICE_PEAK = Figure(
    "Peak VRAM, allocated", "bytes", partial(_peak, name="device_bytes"), brief=True
)
RAM_PEAK = Figure("Most RAM of the process", "bytes", partial(_peak, name="rss_bytes"), brief=True)

FIGURES = (
    TOTAL,
    Figure("Whole run, with what lies between steps", "s", _whole_s),
    PER_STEP,
    Figure("Steady step, high-noise expert", "s", partial(steady_s, expert="high"), brief=True),
    Figure("Steady step, low-noise expert", "s", partial(steady_s, expert="low"), brief=True),
    Figure("First step", "s", lambda run: _wall_s(next(iter(run.steps), None)), brief=True),
    Figure("Switch step", "s", lambda run: _wall_s(switch_record(run))),
    Figure("Switch step over a steady one", "s", _switch_over_steady_s, brief=True),
    Figure("First block after", "s", lambda run: run.first_block_s),
    Figure("Compute", "s", lambda run: run.compute_s),
    Figure("Stall", "s", lambda run: run.stall_s, brief=True),
    Figure("Stall for files", "s", lambda run: run.transfers.stall_on_read_s),
    Figure("Transfers hidden", "share", lambda run: run.transfers.overlap, brief=True),
    Figure("Moved to buffers", "bytes", lambda run: run.bytes_moved),
    Figure("Read from files", "bytes", lambda run: run.transfers.read_bytes),
    Figure("Weights outside the blocks", "bytes", lambda run: run.non_block_bytes),
    Figure("Rate to buffers", "bytes/s", lambda run: run.transfers.copy_bytes_per_s, brief=True),
    Figure("Rate from files", "bytes/s", lambda run: run.transfers.read_bytes_per_s, brief=True),
    DEVICE_PEAK,
    Figure("Peak VRAM, held by torch", "bytes", partial(_peak, name="reserved_bytes")),
    Figure("Most VRAM used by all", "bytes", partial(_peak, name="device_used_bytes")),
    Figure("Most VRAM of ComfyUI's other models", "bytes", partial(_peak, name="dynamic_bytes")),
    RAM_PEAK,
    Figure("Most page-locked RAM", "bytes", partial(_peak, name="pinned_bytes")),
    Figure("Steps in which a cache skipped blocks", "share", _cached_share),
)


def figures_dict(variant: Variant) -> dict[str, Any]:
    """Return all known figures for `variant`, ready for JSON: median, low, high, runs and unit."""
    found = ((figure, figure.spread(variant)) for figure in FIGURES)
    return {
        figure.name: {**asdict(spread), "unit": figure.unit}
        for figure, spread in found
        if spread is not None
    }
