"""The tables that set variants beside each other, and those of what was run and of the whole queue item."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from ..plan import PHASES, Timeline
from ..plan.figure_words import second_digits, seconds_text, size_text
from .report import Report, Variant
from .report_figures import FIGURES, TOTAL, Figure, Spread, known_figures
from .report_steps import bandwidth_tables, step_table
from .report_table import Table

SIDE_BY_SIDE = 4
"""Most variants that have columns of their own; more of them have a line each."""

IN_LINES = (
    *("Total denoising", "Steady step, high-noise expert", "Steady step, low-noise expert", "First step"),
    *("Switch step over a steady one", "Stall", "Transfers hidden", "Rate to buffers", "Rate from files"),
    *("Peak VRAM, allocated", "Most RAM of the process"),
)
"""The figures that a line of a variant has room for."""


def comparison(report: Report) -> Table:
    """The variants head to head, the first one as what the others are measured against."""
    return _lines(report) if len(report.variants) > SIDE_BY_SIDE else _columns(report)


def _columns(report: Report) -> Table:
    """A line for each figure."""
    first, *others = report.variants
    digits = _digits(report)
    head = ["Metric", first.name]
    for variant in others:
        head += [variant.name, "against the first"]
    rows = [_figure_row(figure, first, others, digits) for figure in known_figures(report.variants)]
    rows += [_words_row(name, words, report) for name, words in _WORDS]
    said = tuple(row for row in rows if any(row[1:]))
    return Table(title="Head to head" if others else "Figures", head=tuple(head), rows=said)


def _digits(report: Report) -> int:
    """Digits behind the point that suit the seconds of a step."""
    runs = [timeline for variant in report.variants for timeline in variant.measured]
    return second_digits(step.wall_s for timeline in runs for step in timeline.steps)


def _figure_row(figure: Figure, first: Variant, others: list[Variant], digits: int) -> tuple[str, ...]:
    base = figure.spread(first)
    cells = [figure.name, _text(figure, base, digits)]
    for variant in others:
        spread = figure.spread(variant)
        cells += [_text(figure, spread, digits), _ratio(spread, base, least=0.1**digits)]
    return tuple(cells)


def _words_row(name: str, words: Callable[[Variant, Report], str], report: Report) -> tuple[str, ...]:
    first, *others = (words(variant, report) for variant in report.variants)
    return (name, first, *(cell for said in others for cell in (said, "")))


def _lines(report: Report) -> Table:
    """A line for each variant."""
    first = report.variants[0]
    known = {figure.name for figure in known_figures(report.variants)}
    figures = [figure for figure in FIGURES if figure.name in IN_LINES and figure.name in known]
    head = ("Variant", *(figure.name for figure in figures), "Total against the first", *(name for name, _ in _WORDS))
    rows, digits = [], _digits(report)
    for variant in report.variants:
        cells = [_text(figure, figure.spread(variant), digits) for figure in figures]
        ratio = _ratio(TOTAL.spread(variant), TOTAL.spread(first), least=0.1**digits)
        rows.append((variant.name, *cells, ratio, *(words(variant, report) for _, words in _WORDS)))
    return Table(title="Head to head", head=head, rows=tuple(rows)).without_empty_columns()


def _text(figure: Figure, spread: Spread | None, digits: int) -> str:
    return "" if spread is None else figure.text(spread, digits)


def _ratio(spread: Spread | None, base: Spread | None, *, least: float) -> str:
    """`1.13x`: the median against that of the first variant; nothing against what is shown as 0, or less than 0."""
    if spread is None or base is None or spread.median < 0 or base.median < least:
        return ""
    return f"{spread.median / base.median:.2f}x"


def _predicted(variant: Variant, report: Report) -> str:
    """What the simulator said of the total, and how the measured median stands to it."""
    total = TOTAL.spread(variant)
    if variant.predicted is None:
        return ""
    wall = variant.predicted.wall_s
    measured = "" if total is None or wall <= 0 else f" (measured: {total.median / wall:.2f}x)"
    return f"{seconds_text(wall)} s{measured}"


def _latents(variant: Variant, report: Report) -> str:
    """Whether the results of all runs are equal to the bit: among each other, and to the first variant of their job."""
    if not variant.latents:
        return ""
    if len(variant.latents) > 1:
        return "differ from run to run"
    first = next(other for other in report.variants if other.job == variant.job and other.latents)
    if first is variant:
        return f"{min(variant.latents)[:12]} in {len(variant.trials)} of {len(variant.trials)} runs"
    equal = "equal to the bit" if first.latents == variant.latents else "not equal"
    return equal if first is report.variants[0] else f"{equal} to {first.name}"


def _remarks(variant: Variant, report: Report) -> str:
    """What was changed on the way, in any of the runs, and why a variant could not be run."""
    said = dict.fromkeys(change for timeline in variant.measured for change in timeline.changes)
    return "; ".join([*([f"failed: {variant.failed}"] if variant.failed else []), *said])


_WORDS: tuple[tuple[str, Callable[[Variant, Report], str]], ...] = (
    ("Predicted total", _predicted),
    ("Latents", _latents),
    ("Remarks", _remarks),
)


def settings_table(report: Report) -> Table:
    """What was run: a line for each setting, a column for each variant."""
    names = dict.fromkeys(name for variant in report.variants for name in variant.settings)
    rows = tuple((name, *(variant.settings.get(name, "") for variant in report.variants)) for name in names)
    return Table(title="What was run", head=("Setting", *(variant.name for variant in report.variants)), rows=rows)


def run_phase_table(report: Report) -> Table | None:
    """Seconds of the phases of each variant's runs, a line for each phase; None where nobody took them down."""
    digits = _digits(report)
    rows = []
    for name in PHASES:
        figure = Figure(name=name, unit="s", of=partial(_phase_s, name=name))
        cells = [_text(figure, figure.spread(variant), digits) for variant in report.variants]
        if any(cells):
            rows.append((name, *cells))
    head = ("Phase", *(variant.name for variant in report.variants))
    return Table(title="Phases of a run", head=head, rows=tuple(rows)) if rows else None


def _phase_s(timeline: Timeline, name: str) -> float | None:
    found = [phase.wall_s for phase in timeline.phases if phase.name == name]
    return sum(found) if found else None


def phase_table(report: Report) -> Table | None:
    """The parts of the queue item, in the order in which they began; None where nobody took them down."""
    if not report.phases:
        return None
    digits = second_digits(phase.wall_s for phase in report.phases)
    rows = tuple(
        (
            phase.name,
            seconds_text(phase.began_s, digits),
            seconds_text(phase.wall_s, digits),
            *("" if nbytes is None else size_text(nbytes) for nbytes in (phase.device_bytes, phase.rss_bytes)),
        )
        for phase in report.phases
    )
    head = ("Phase", "Began (s)", "Took (s)", "VRAM peak", "RAM")
    return Table(title="Parts of the queue item", head=head, rows=rows).without_empty_columns()


def every_table(report: Report) -> Iterator[Table]:
    """All tables, in the order in which a reader wants them."""
    yield comparison(report)
    for variant in report.variants:
        if table := step_table(variant):
            yield table
        yield from bandwidth_tables(variant)
    for table in (run_phase_table(report), phase_table(report), settings_table(report)):
        if table is not None:
            yield table
