"""Report tables: comparison of variants, their steps and transfer rates, phases, settings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain

from ..schema.records import (
    PHASES,
    RATE_BORDERS,
    RateRange,
    StepRecord,
    Timeline,
    largest_known,
    limit_share,
    together,
)
from ..schema.text import format_seconds, format_size, second_digits
from . import figures
from .report import Report, Table, Variant

MAX_COLUMNS = 4
"""Largest number of variants as columns in the comparison. More variants are rows."""


def comparison(report: Report) -> Table:
    """Compare the variants, with ratios to the first one.

    Up to `MAX_COLUMNS` variants are columns, more are rows.
    """
    variants = report.variants
    digits = _digits(report.variants)
    many = len(variants) > MAX_COLUMNS
    shown = [figure for figure in figures.FIGURES if figure.brief or not many]
    rows = [(figure.name, *_figure_cells(figure, variants, digits)) for figure in shown]
    rows += [
        ("Share of the device's limit", *map(_limit, variants)),
        ("Predicted total", *map(_predicted, variants)),
        ("Latents", *(_latents(variant, report) for variant in variants)),
        ("Remarks", *map(_remarks, variants)),
    ]
    if len(variants) == 1:
        return _variant_table("Figures", "Metric", rows, report)
    title = "Head to head, ratios to the first"
    if not many:
        return _variant_table(title, "Metric", rows, report)
    table = _variant_table(title, "Variant", rows, report)
    # The table is transposed: so many variants would be too wide as columns.
    head, *lines = zip(table.head, *table.rows, strict=True)
    return Table(title=title, head=head, rows=tuple(lines))


def _variant_table(
    title: str, corner: str, rows: Iterable[tuple[str, ...]], report: Report
) -> Table:
    """Return rows with a name and a cell per variant as a table. Rows without cells are dropped."""
    head = (corner, *(variant.name for variant in report.variants))
    return Table(title=title, head=head, rows=tuple(row for row in rows if any(row[1:])))


def _digits(variants: Iterable[Variant]) -> int:
    """Return the number of decimals that suits a step's seconds."""
    runs = chain.from_iterable(variant.measured for variant in variants)
    return second_digits(step.wall_s for run in runs for step in run.steps)


def _figure_cells(
    figure: figures.Figure, variants: Sequence[Variant], digits: int
) -> Iterator[str]:
    """Yield cells like `23.0 s (22.6 to 23.4), 1.13x`.

    Without a ratio if the base rounds to 0 or a value is negative.
    """
    base = figure.spread(variants[0])
    for variant in variants:
        spread = figure.spread(variant)
        if spread is None:
            yield ""
            continue
        cell = spread.text(figure.unit, digits)
        if (
            variant is not variants[0]
            and base
            and spread.median >= 0
            and base.median >= 0.1**digits
        ):
            cell += f", {spread.median / base.median:.2f}x"
        yield cell


def _predicted(variant: Variant) -> str:
    """Format the simulated total, and the measured median's ratio to it."""
    if variant.predicted is None:
        return ""
    wall = variant.predicted.wall_s
    cell = f"{format_seconds(wall)} s"
    total = figures.TOTAL.spread(variant)
    if total is not None and wall > 0:
        cell += f" (measured: {total.median / wall:.2f}x)"
    return cell


def _limit(variant: Variant) -> str:
    """Format the share of compute time for products and attention alone."""
    shares = (limit_share(timeline, variant.predicted) for timeline in variant.measured)
    return figures.spread_text(shares, "share")


def _latents(variant: Variant, report: Report) -> str:
    """Compare the results bit by bit.

    Compares a variant's runs, and the variant with the first one for the same job.
    """
    if not variant.latents:
        return ""
    if len(variant.latents) > 1:
        return "differ from run to run"
    # `next` always finds a variant, because `variant` itself matches.
    first = next(other for other in report.variants if other.job == variant.job and other.latents)
    if first is variant:
        return f"{min(variant.latents)[:12]} in {len(variant.trials)} of {len(variant.trials)} runs"
    equal = {True: "equal to the bit", False: "not equal"}[first.latents == variant.latents]
    if first is report.variants[0]:
        return equal
    return f"{equal} to {first.name}"


def _remarks(variant: Variant) -> str:
    """List the changes during the runs, and the reason for a failure."""
    # Most runs have the same changes. A dict lists each one once, in order.
    changes = dict.fromkeys(change for timeline in variant.measured for change in timeline.changes)
    failed = variant.failed and f"failed: {variant.failed}"
    return "; ".join(filter(None, (failed, *changes)))


def settings_table(report: Report) -> Table:
    """List the run settings: a row per setting, a column per variant."""
    names = dict.fromkeys(name for variant in report.variants for name in variant.settings)
    rows = (
        (name, *(variant.settings.get(name, "") for variant in report.variants)) for name in names
    )
    return _variant_table("Settings", "Setting", rows, report)


def run_phase_table(report: Report) -> Table:
    """List phase seconds by variant, a row per recorded phase."""
    digits = _digits(report.variants)
    rows = [
        (name, *(_phase_text(variant, name, digits) for variant in report.variants))
        for name in PHASES
    ]
    return _variant_table("Phases of a run", "Phase", rows, report)


def _phase_text(variant: Variant, name: str, digits: int) -> str:
    """Format one phase's seconds, empty if a run has no phase with this name."""
    seconds = []
    for timeline in variant.measured:
        found = [phase.wall_s for phase in timeline.phases if phase.name == name]
        if not found:
            return ""
        seconds.append(sum(found))
    return figures.spread_text(seconds, "s", digits)


def phase_table(report: Report) -> Table:
    """List the queue item's phases in start order."""
    digits = second_digits(phase.wall_s for phase in report.phases)
    rows = tuple(
        (
            phase.name,
            format_seconds(phase.start_s, digits),
            format_seconds(phase.wall_s, digits),
            _size(phase.device_bytes),
            _size(phase.rss_bytes),
        )
        for phase in report.phases
    )
    head = ("Phase", "Began (s)", "Took (s)", "VRAM peak", "RAM")
    return Table(title="Parts of the queue item", head=head, rows=rows).without_empty_columns()


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else format_size(nbytes)


STEP_FIGURES: tuple[tuple[str, figures.Unit, Callable[[StepRecord], float | None]], ...] = (
    ("Compute (s)", "s", lambda step: step.compute_s),
    ("Stall (s)", "s", lambda step: step.stall_s),
    ("Stall, files (s)", "s", lambda step: step.transfers.stall_on_read_s),
    ("Moved", "bytes", lambda step: step.bytes_moved),
    ("To buffers", "bytes/s", lambda step: step.transfers.copy_bytes_per_s),
    ("Read", "bytes", lambda step: step.transfers.read_bytes),
    ("From files", "bytes/s", lambda step: step.transfers.read_bytes_per_s),
    ("Hidden", "share", lambda step: step.transfers.overlap),
    ("VRAM peak", "bytes", lambda step: step.memory.device_bytes),
    ("RAM", "bytes", lambda step: step.memory.rss_bytes),
)
"""Columns with medians over the runs."""
READ_COLUMNS = {"Stall, files (s)", "Read"}
"""Columns that are empty if no run read files in a step."""
STEP_HEAD = (
    *("Step", "Expert", "Cumulative (s)", "Delta (s)", "Spread (s)"),
    *(name for name, _, _ in STEP_FIGURES),
    *("Skipped", "Phase"),
)

ROUTES: tuple[tuple[str, Callable[[Timeline], Sequence[RateRange]]], ...] = (
    ("RAM to buffers", lambda timeline: timeline.copy_rates),
    ("files", lambda timeline: timeline.read_rates),
)
"""Route names, and the fetch rates on each route in a run."""


def step_table(variant: Variant) -> Table:
    """List a measured variant's steps with times, transfers, memory and phase.

    Figures are medians over the runs. The spread column has each step's shortest and longest time.
    """
    runs = variant.measured
    digits = _digits([variant])
    # All runs of a variant have the same steps and the same switch.
    switch = runs[0].switch_step
    # Cumulative per run: medians of steps come from different runs, and do not add up.
    ends = [tuple(accumulate(step.wall_s for step in run.steps)) for run in runs]
    rows = [
        _step_row(
            steps, [end[place] for end in ends], _step_phase(runs, place, switch, digits), digits
        )
        for place, steps in enumerate(zip(*(run.steps for run in runs), strict=True))
    ]
    marked = next((place for place, step in enumerate(runs[0].steps) if step.index == switch), None)
    title = f"Per-step timing: {variant.name}"
    table = Table(title=title, head=STEP_HEAD, rows=tuple(rows), marked=marked)
    return table.without_empty_columns()


def _step_row(
    steps: Sequence[StepRecord], ends: Sequence[float], phase: str, digits: int
) -> tuple[str, ...]:
    """Return the cells for one step. `ends` are the times at which the runs finished it."""
    walls = [step.wall_s for step in steps]
    reads = any(step.transfers.read_bytes for step in steps)
    times = (min(walls), max(walls), statistics.median(ends), statistics.median(walls))
    low, high, end, wall = (format_seconds(value, digits) for value in times)
    cells = [str(steps[0].index + 1), steps[0].expert, end, wall]
    cells.append(f"{low} to {high}" if len(walls) > 1 else "1 run")
    for name, unit, value in STEP_FIGURES:
        spread = figures.Spread.of(value(step) for step in steps)
        if spread is None or (name in READ_COLUMNS and not reads):
            cells.append("")
        else:
            cells.append(figures.figure_text(spread.median, unit, digits))
    return *cells, _skipped(steps), phase


def _skipped(steps: Sequence[StepRecord]) -> str:
    """Format blocks and lanes skipped by a cache in the run with the most: `39 blocks, 2 lanes`."""
    most = max(steps, key=lambda step: (step.skipped_visits, step.skipped_lanes))
    if most.skipped_lanes:
        return f"{most.skipped_visits} blocks, {most.skipped_lanes} lanes"
    return ""


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
    """Format a step's extra seconds over steady steps with the same expert.

    Empty without steady steps.
    """
    expert = runs[0].steps[place].expert
    over = figures.Spread.of(figures.over_steady_s(run, run.steps[place]) for run in runs)
    steady = figures.Spread.of(figures.steady_s(run, expert) for run in runs)
    if over is None or steady is None:
        return ""
    seconds = format_seconds(over.median, digits)
    # A rounded 0 gets a plus sign too.
    if not seconds.startswith("-"):
        seconds = f"+{seconds}"
    share = round(100 * over.median / steady.median)
    return f": {seconds} s ({share:+d} %) over a steady step"


def run_table(timeline: Timeline) -> Table:
    """List the run's steps and totals, narrow enough for a terminal.

    `moved` are the bytes of blocks fetched for a step, `read` the bytes read from files for it, and
    `memory` is the peak on the device, or the process's RAM if the device has no counter.
    """
    rows = []
    for step in timeline.steps:
        sigma = "" if step.sigma is None else f"{step.sigma:.4f}"
        cells = _run_cells(step, figures.memory_bytes(step.memory))
        rows.append((str(step.index + 1), step.expert, sigma, *cells))
    most = largest_known(figures.memory_bytes(step.memory) for step in timeline.steps)
    rows.append(("all", "", "", *_run_cells(timeline, most)))
    head = ("step", "expert", "sigma", "seconds", "stall", "decode", "moved", "read", "memory")
    return Table(head=head, rows=tuple(rows)).without_empty_columns()


def _run_cells(record: StepRecord | Timeline, memory: int | None) -> tuple[str, ...]:
    return (
        f"{record.wall_s:.2f}",
        f"{record.stall_s:.2f}",
        f"{record.decode_s:.2f}" if record.decode_s else "",
        format_size(record.bytes_moved),
        # Empty for 0, so a run without reads has no such column.
        _size(record.transfers.read_bytes or None),
        _size(memory),
    )


def bandwidth_tables(variant: Variant) -> Iterator[Table]:
    """Yield a fetch histogram, bytes and seconds by rate, for each route in use.

    Every fetch in the measured runs is counted at the measured rate.
    """
    runs = variant.measured
    for route, rates_of in ROUTES:
        counted = together(rates for run in runs for rates in rates_of(run))
        if counted:
            title = f"Bandwidth histogram: {variant.name}, {route}"
            if len(runs) > 1:
                title += f" ({len(runs)} runs together)"
            yield _histogram(title, counted)


def _histogram(title: str, counted: Sequence[RateRange]) -> Table:
    digits = second_digits([sum(rates.busy_s for rates in counted)])
    empty = (
        RateRange(from_gb_per_s=border, fetches=0, nbytes=0, busy_s=0.0) for border in RATE_BORDERS
    )
    rows = []
    # Empty ranges are added, so every table has the same rows. The last one has no upper border.
    for rates, high in zip(together([*empty, *counted]), (*RATE_BORDERS[1:], None), strict=True):
        low = rates.from_gb_per_s
        label = f"over {low} GB/s" if high is None else f"{low}-{high} GB/s"
        time = f"{format_seconds(rates.busy_s, digits)} s"
        rows.append((label, str(rates.fetches), format_size(rates.nbytes), time))
    return Table(title=title, head=("Range", "Fetches", "Data", "Time"), rows=tuple(rows))


def every_table(report: Report) -> Iterator[Table]:
    """Yield all report tables in reading order."""
    yield comparison(report)
    for variant in report.variants:
        if variant.measured:
            yield step_table(variant)
        yield from bandwidth_tables(variant)
    for table in (run_phase_table(report), phase_table(report), settings_table(report)):
        if table.rows:
            yield table
