"""Tables of a report: comparison of the variants, steps and transfer rates of each, phases, settings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate

from ..schema import (
    PHASES,
    RATE_BORDERS,
    RateRange,
    StepRecord,
    Timeline,
    format_seconds,
    format_size,
    largest_known,
    limit_share,
    second_digits,
    together,
)
from .figures import FIGURES, TOTAL, Figure, Spread, Unit, figure_text, memory_bytes, over_steady_s, steady_s
from .report import Report, Table, Variant

MAX_COLUMNS = 4
"""Largest number of variants that are columns of the comparison; more of them are rows."""

ROW_FIGURES = (
    *("Total denoising", "Steady step, high-noise expert", "Steady step, low-noise expert", "First step"),
    *("Switch step over a steady one", "Stall", "Transfers hidden", "Rate to buffers", "Rate from files"),
    *("Peak VRAM, allocated", "Most RAM of the process"),
)
"""Figures of the comparison if the variants are rows, which have space for only a few."""


def comparison(report: Report) -> Table:
    """Compare the variants, with ratios to the first one: up to `MAX_COLUMNS` as columns, more as rows."""
    variants, digits = report.variants, _digits(report)
    many = len(variants) > MAX_COLUMNS
    figures = [figure for figure in FIGURES if not many or figure.name in ROW_FIGURES]
    rows = [(figure.name, *_figure_cells(figure, variants, digits)) for figure in figures]
    rows += [
        ("Share of the device's limit", *map(_limit, variants)),
        ("Predicted total", *map(_predicted, variants)),
        ("Latents", *(_latents(variant, report) for variant in variants)),
        ("Remarks", *map(_remarks, variants)),
    ]
    title = "Head to head, ratios to the first" if len(variants) > 1 else "Figures"
    table = _variant_table(title, "Variant" if many else "Metric", rows, report)
    if not many:
        return table
    head, *lines = zip(table.head, *table.rows, strict=True)
    return Table(title=title, head=head, rows=tuple(lines))


def _variant_table(title: str, corner: str, rows: Iterable[tuple[str, ...]], report: Report) -> Table:
    """Return rows of a name and a cell for each variant as a table, without the rows that have no cells."""
    head = (corner, *(variant.name for variant in report.variants))
    return Table(title=title, head=head, rows=tuple(row for row in rows if any(row[1:])))


def _digits(report: Report) -> int:
    """Return the number of decimals that suits the seconds of a step."""
    runs = [timeline for variant in report.variants for timeline in variant.measured]
    return second_digits(step.wall_s for timeline in runs for step in timeline.steps)


def _figure_cells(figure: Figure, variants: Sequence[Variant], digits: int) -> Iterator[str]:
    """Yield cells like `23.0 s (22.6 to 23.4), 1.13x`; without a ratio if the base rounds to 0 or one is negative."""
    base, *others = (figure.spread(variant) for variant in variants)
    yield figure.text(base, digits)
    for spread in others:
        ratio = ""
        if spread is not None and base is not None and spread.median >= 0 and base.median >= 0.1**digits:
            ratio = f", {spread.median / base.median:.2f}x"
        yield f"{figure.text(spread, digits)}{ratio}"


def _predicted(variant: Variant) -> str:
    """Format the simulated total, and the ratio of the measured median to it."""
    total = TOTAL.spread(variant)
    if variant.predicted is None:
        return ""
    wall = variant.predicted.wall_s
    measured = "" if total is None or wall <= 0 else f" (measured: {total.median / wall:.2f}x)"
    return f"{format_seconds(wall)} s{measured}"


def _limit(variant: Variant) -> str:
    """Format the share of the compute time that products and attention would take alone."""
    spread = Spread.of(limit_share(timeline, variant.predicted) for timeline in variant.measured)
    return "" if spread is None else spread.text("share")


def _latents(variant: Variant, report: Report) -> str:
    """Compare the results bit by bit: among the runs of the variant, and with the first variant of the same job."""
    if not variant.latents:
        return ""
    if len(variant.latents) > 1:
        return "differ from run to run"
    first = next(other for other in report.variants if other.job == variant.job and other.latents)
    if first is variant:
        return f"{min(variant.latents)[:12]} in {len(variant.trials)} of {len(variant.trials)} runs"
    equal = "equal to the bit" if first.latents == variant.latents else "not equal"
    return equal if first is report.variants[0] else f"{equal} to {first.name}"


def _remarks(variant: Variant) -> str:
    """List the changes during any of the runs, and the reason of a failure."""
    changes = dict.fromkeys(change for timeline in variant.measured for change in timeline.changes)
    return "; ".join([*([f"failed: {variant.failed}"] if variant.failed else []), *changes])


def settings_table(report: Report) -> Table:
    """List the settings of the runs: a row for each setting, a column for each variant."""
    names = dict.fromkeys(name for variant in report.variants for name in variant.settings)
    rows = ((name, *(variant.settings.get(name, "") for variant in report.variants)) for name in names)
    return _variant_table("Settings", "Setting", rows, report)


def run_phase_table(report: Report) -> Table:
    """List the seconds of the phases of each variant's runs, a row for each recorded phase."""
    digits = _digits(report)
    figures = (Figure(name=name, unit="s", of=partial(_phase_s, name=name)) for name in PHASES)
    cells = ((each.name, *(each.text(each.spread(variant), digits) for variant in report.variants)) for each in figures)
    return _variant_table("Phases of a run", "Phase", cells, report)


def _phase_s(timeline: Timeline, name: str) -> float | None:
    found = [phase.wall_s for phase in timeline.phases if phase.name == name]
    return sum(found) if found else None


def phase_table(report: Report) -> Table:
    """List the phases of the queue item in order of their start."""
    digits = second_digits(phase.wall_s for phase in report.phases)
    rows = tuple(
        (
            phase.name,
            format_seconds(phase.start_s, digits),
            format_seconds(phase.wall_s, digits),
            *("" if nbytes is None else format_size(nbytes) for nbytes in (phase.device_bytes, phase.rss_bytes)),
        )
        for phase in report.phases
    )
    head = ("Phase", "Began (s)", "Took (s)", "VRAM peak", "RAM")
    return Table(title="Parts of the queue item", head=head, rows=rows).without_empty_columns()


STEP_FIGURES: tuple[tuple[str, Unit, Callable[[StepRecord], float | None]], ...] = (
    ("Compute (s)", "s", lambda step: step.compute_s),
    ("Stall (s)", "s", lambda step: step.stall_s),
    ("Stall, files (s)", "s", lambda step: step.stall_on_read_s),
    ("Moved", "bytes", lambda step: step.bytes_moved),
    ("To buffers", "bytes/s", lambda step: step.copy_bytes_per_s),
    ("Read", "bytes", lambda step: step.read_bytes),
    ("From files", "bytes/s", lambda step: step.read_bytes_per_s),
    ("Hidden", "share", lambda step: step.overlap),
    ("VRAM peak", "bytes", lambda step: step.device_bytes),
    ("RAM", "bytes", lambda step: step.rss_bytes),
)
"""Columns with the median over the runs."""
READ_COLUMNS = {"Stall, files (s)", "Read"}
"""Columns that are empty if no run read files in that step."""
STEP_HEAD = (
    *("Step", "Expert", "Cumulative (s)", "Delta (s)", "Spread (s)"),
    *(name for name, _, _ in STEP_FIGURES),
    *("Skipped", "Phase"),
)

ROUTES: tuple[tuple[str, Callable[[Timeline], Sequence[RateRange]]], ...] = (
    ("RAM to buffers", lambda timeline: timeline.copy_rates),
    ("files", lambda timeline: timeline.read_rates),
)
"""Name of each route, and the rates of its fetches in a run."""


def step_table(variant: Variant) -> Table:
    """List the steps of a measured variant with their times, transfers, memory and phase.

    The figures are medians over the runs; the spread column has the shortest and the longest time of each step.
    """
    runs = variant.measured
    digits, switch = second_digits(step.wall_s for run in runs for step in run.steps), runs[0].switch_step
    ends = [tuple(accumulate(step.wall_s for step in run.steps)) for run in runs]
    rows = [
        _step_row(steps, [end[place] for end in ends], _step_phase(runs, place, switch, digits), digits)
        for place, steps in enumerate(zip(*(run.steps for run in runs), strict=True))
    ]
    marked = next((place for place, step in enumerate(runs[0].steps) if step.index == switch), None)
    table = Table(title=f"Per-step timing: {variant.name}", head=STEP_HEAD, rows=tuple(rows), marked=marked)
    return table.without_empty_columns()


def _step_row(steps: Sequence[StepRecord], ends: Sequence[float], phase: str, digits: int) -> tuple[str, ...]:
    """Return the cells of one step; `ends` are the times at which the runs finished it."""
    walls, reads = [step.wall_s for step in steps], any(step.read_bytes for step in steps)
    times = (min(walls), max(walls), statistics.median(ends), statistics.median(walls))
    low, high, end, wall = (format_seconds(value, digits) for value in times)
    cells = []
    for name, unit, value in STEP_FIGURES:
        spread = Spread.of(value(step) for step in steps) if reads or name not in READ_COLUMNS else None
        cells.append("" if spread is None else figure_text(spread.median, unit, digits))
    spread_text = f"{low} to {high}" if len(walls) > 1 else "1 run"
    return (str(steps[0].index + 1), steps[0].expert, end, wall, spread_text, *cells, _skipped(steps), phase)


def _skipped(steps: Sequence[StepRecord]) -> str:
    """Format the blocks and lanes that a cache skipped, in the run with the most: `39 blocks, 2 lanes`."""
    most = max(steps, key=lambda step: (step.skipped_visits, step.skipped_lanes))
    return f"{most.skipped_visits} blocks, {most.skipped_lanes} lanes" if most.skipped_lanes else ""


def _step_phase(runs: Sequence[Timeline], place: int, switch: int | None, digits: int) -> str:
    """Describe a step like `Switch to the low-noise expert: +0.1 s (+0 %) over a steady step`."""
    steps = runs[0].steps
    step = steps[place]
    if place == 0:
        return f"First step{_over_steady(runs, place, digits)}"
    if step.index == switch:
        return f"Switch to the {step.expert}-noise expert{_over_steady(runs, place, digits)}"
    if place == len(steps) - 1:
        return "Last step"
    if steps[place + 1].index == switch:
        return f"Steady (last step of the {step.expert}-noise expert)"
    return "Steady"


def _over_steady(runs: Sequence[Timeline], place: int, digits: int) -> str:
    """Format the extra seconds of a step over the steady ones of its expert; empty if there are none."""
    expert = runs[0].steps[place].expert
    over = Spread.of(over_steady_s(run, run.steps[place]) for run in runs)
    steady = Spread.of(steady_s(run, expert) for run in runs)
    if over is None or steady is None:
        return ""
    seconds = format_seconds(over.median, digits)
    sign = "" if seconds.startswith("-") else "+"
    return f": {sign}{seconds} s ({round(100 * over.median / steady.median):+d} %) over a steady step"


def run_table(timeline: Timeline) -> Table:
    """List the steps and the totals of the run, narrow enough for a terminal.

    `moved` are the bytes of the blocks fetched for a step, `read` the bytes read from files for it, and `memory` is the
    peak on the device, or the RAM of the process if the device has no counter.
    """
    memory = [memory_bytes(step) for step in timeline.steps]
    rows = [
        (str(step.index + 1), step.expert, "" if step.sigma is None else f"{step.sigma:.4f}", *_run_cells(step, nbytes))
        for step, nbytes in zip(timeline.steps, memory, strict=True)
    ]
    rows.append(("all", "", "", *_run_cells(timeline, largest_known(memory))))
    head = ("step", "expert", "sigma", "seconds", "stall", "decode", "moved", "read", "memory")
    return Table(head=head, rows=tuple(rows)).without_empty_columns()


def _run_cells(record: StepRecord | Timeline, memory: int | None) -> tuple[str, ...]:
    return (
        f"{record.wall_s:.2f}",
        f"{record.stall_s:.2f}",
        f"{record.decode_s:.2f}" if record.decode_s else "",
        format_size(record.bytes_moved),
        format_size(record.read_bytes) if record.read_bytes else "",
        "" if memory is None else format_size(memory),
    )


def bandwidth_tables(variant: Variant) -> Iterator[Table]:
    """Yield a histogram of the fetches, bytes and seconds by rate for each route that was used.

    Every fetch of the measured runs is counted at its own rate.
    """
    runs = variant.measured
    for route, rates_of in ROUTES:
        counted = together(rates for run in runs for rates in rates_of(run))
        if counted:
            several = f" ({len(runs)} runs together)" if len(runs) > 1 else ""
            yield _histogram(f"Bandwidth histogram: {variant.name}, {route}{several}", counted)


def _histogram(title: str, counted: Sequence[RateRange]) -> Table:
    digits = second_digits([sum(rates.busy_s for rates in counted)])
    empty = (RateRange(from_gb_per_s=border, fetches=0, nbytes=0, busy_s=0.0) for border in RATE_BORDERS)
    rows = []
    for rates, high in zip(together([*empty, *counted]), (*RATE_BORDERS[1:], None), strict=True):
        low = rates.from_gb_per_s
        label = f"over {low} GB/s" if high is None else f"{low}-{high} GB/s"
        rows.append((label, str(rates.fetches), format_size(rates.nbytes), f"{format_seconds(rates.busy_s, digits)} s"))
    return Table(title=title, head=("Range", "Fetches", "Data", "Time"), rows=tuple(rows))


def every_table(report: Report) -> Iterator[Table]:
    """Yield all tables of a report in reading order."""
    yield comparison(report)
    for variant in report.variants:
        if variant.measured:
            yield step_table(variant)
        yield from bandwidth_tables(variant)
    for table in (run_phase_table(report), phase_table(report), settings_table(report)):
        if table.rows:
            yield table
