"""Figures of a variant: median, minimum and maximum over its runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

from ..schema import (
    MemorySample,
    StepRecord,
    Timeline,
    format_rate,
    format_seconds,
    format_share,
    format_size,
    largest_known,
    second_digits,
)
from .report import Variant

Unit = Literal["s", "bytes", "bytes/s", "share"]


def figure_text(value: float, unit: Unit, digits: int) -> str:
    """Format one value with its unit; seconds are formatted without."""
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
        """Return the spread of `values`; None if there are none, or if one of them is None."""
        known = []
        for value in values:
            if value is None:
                return None
            known.append(value)
        return cls(median=statistics.median(known), low=min(known), high=max(known), runs=len(known)) if known else None

    def text(self, unit: Unit, digits: int = 4) -> str:
        """Format the spread as `23.0 s (22.6 to 23.4)`, or `23.0 s (1 run)`.

        Seconds have at most `digits` decimals, or fewer if that suits the median.
        """
        digits = min(digits, second_digits([self.median]))
        median, low, high = (figure_text(value, unit, digits) for value in (self.median, self.low, self.high))
        suffix = " s" if unit == "s" else ""
        return f"{median}{suffix} (1 run)" if self.runs == 1 else f"{median}{suffix} ({low} to {high})"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of a comparison."""

    name: str
    unit: Unit
    of: Callable[[Timeline], float | None]

    def spread(self, variant: Variant) -> Spread | None:
        """Return the spread over the measured runs of `variant`."""
        return Spread.of(self.of(timeline) for timeline in variant.measured)

    def text(self, spread: Spread | None, digits: int = 4) -> str:
        """Format a spread of this figure with its unit; empty for None."""
        return "" if spread is None else spread.text(self.unit, digits)


def memory_bytes(record: StepRecord | MemorySample) -> int | None:
    """Return the bytes on the device, or the RAM of the process if the device has no counter."""
    return record.rss_bytes if record.device_bytes is None else record.device_bytes


def steady_s(timeline: Timeline, expert: str) -> float | None:
    """Return the median seconds of the steps of `expert` that do not begin a stage; None if there are none."""
    steady = [step.wall_s for before, step in pairwise(timeline.steps) if before.expert == step.expert == expert]
    return statistics.median(steady) if steady else None


def over_steady_s(timeline: Timeline, step: StepRecord | None) -> float | None:
    """Return the extra seconds of `step` over a steady step of its expert; None if one of both does not exist."""
    steady = None if step is None else steady_s(timeline, step.expert)
    return None if step is None or steady is None else step.wall_s - steady


def switch_record(timeline: Timeline) -> StepRecord | None:
    """Return the first step of the second expert; None if the expert does not change."""
    switch = timeline.switch_step
    return next((step for step in timeline.steps if step.index == switch), None)


def _wall_s(step: StepRecord | None) -> float | None:
    return None if step is None else step.wall_s


def _whole_s(timeline: Timeline) -> float | None:
    """Return the seconds from the start of the run to the end of its last phase."""
    ends = [phase.start_s + phase.wall_s for phase in timeline.phases]
    return max(ends) if ends and max(ends) > 0 else None


def _mean_s(timeline: Timeline) -> float | None:
    return timeline.wall_s / len(timeline.steps) if timeline.steps else None


def _cached_share(timeline: Timeline) -> float | None:
    """Return the share of steps in which a cache skipped blocks; None if no lane skipped any."""
    used = any(step.skipped_lanes for step in timeline.steps)
    return timeline.skipped_steps / len(timeline.steps) if used else None


def _peak(timeline: Timeline, name: str) -> float | None:
    """Return the largest value of a field of bytes over all steps and memory samples."""
    return largest_known(getattr(record, name, None) for record in (*timeline.steps, *timeline.memory))


FIGURES = (
    Figure(name="Total denoising", unit="s", of=lambda timeline: timeline.wall_s),
    Figure(name="Whole run, with what lies between steps", unit="s", of=_whole_s),
    Figure(name="Average per step", unit="s", of=_mean_s),
    Figure(name="Steady step, high-noise expert", unit="s", of=lambda timeline: steady_s(timeline, "high")),
    Figure(name="Steady step, low-noise expert", unit="s", of=lambda timeline: steady_s(timeline, "low")),
    Figure(name="First step", unit="s", of=lambda timeline: _wall_s(next(iter(timeline.steps), None))),
    Figure(name="Switch step", unit="s", of=lambda timeline: _wall_s(switch_record(timeline))),
    Figure(name="Switch step over a steady one", unit="s", of=lambda run: over_steady_s(run, switch_record(run))),
    Figure(name="First block after", unit="s", of=lambda timeline: timeline.first_block_s),
    Figure(name="Compute", unit="s", of=lambda timeline: timeline.compute_s),
    Figure(name="Stall", unit="s", of=lambda timeline: timeline.stall_s),
    Figure(name="Stall for files", unit="s", of=lambda timeline: timeline.stall_on_read_s),
    Figure(name="Transfers hidden", unit="share", of=lambda timeline: timeline.overlap),
    Figure(name="Moved to buffers", unit="bytes", of=lambda timeline: timeline.bytes_moved),
    Figure(name="Read from files", unit="bytes", of=lambda timeline: timeline.read_bytes),
    Figure(name="Weights outside the blocks", unit="bytes", of=lambda timeline: timeline.non_block_bytes),
    Figure(name="Rate to buffers", unit="bytes/s", of=lambda timeline: timeline.copy_bytes_per_s),
    Figure(name="Rate from files", unit="bytes/s", of=lambda timeline: timeline.read_bytes_per_s),
    Figure(name="Peak VRAM, allocated", unit="bytes", of=partial(_peak, name="device_bytes")),
    Figure(name="Peak VRAM, held by torch", unit="bytes", of=partial(_peak, name="reserved_bytes")),
    Figure(name="Most VRAM used by all", unit="bytes", of=partial(_peak, name="device_used_bytes")),
    Figure(name="Most VRAM of ComfyUI's other models", unit="bytes", of=partial(_peak, name="dynamic_bytes")),
    Figure(name="Most RAM of the process", unit="bytes", of=partial(_peak, name="rss_bytes")),
    Figure(name="Most page-locked RAM", unit="bytes", of=partial(_peak, name="pinned_bytes")),
    Figure(name="Steps in which a cache skipped blocks", unit="share", of=_cached_share),
)
TOTAL = FIGURES[0]


def figures_dict(variant: Variant) -> dict[str, Any]:
    """Return every known figure of `variant`, ready for JSON: median, low, high, runs and unit."""
    found = ((figure, figure.spread(variant)) for figure in FIGURES)
    return {figure.name: {**asdict(spread), "unit": figure.unit} for figure, spread in found if spread is not None}
