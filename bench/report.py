"""Benchmark report as values: variants, runs, and text, Markdown or HTML tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ..schema.records import PhaseRecord, Timeline

FIGURE = re.compile(r"-?$|[-+]?\d(?!.*[A-Za-z]{6})")
"""Right-aligned cell: a figure with its unit, a dash, or nothing. Text with a six-letter word is
not a figure."""
MARKDOWN_RULES = {">": "--:", "<": "---"}


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text cells under a head. Columns of figures are right-aligned, all others left-aligned."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    marked: int | None = None
    """Index of the highlighted row."""

    def without_empty_columns(self) -> Table:
        """Return the table without columns that are empty in every row."""
        kept = [place for place in range(len(self.head)) if any(row[place] for row in self.rows)]
        head, *rows = (tuple(cells[place] for place in kept) for cells in (self.head, *self.rows))
        return Table(title=self.title, head=head, rows=tuple(rows), marked=self.marked)

    def markdown(self) -> str:
        """Format title and cells as Markdown. The marked row is bold."""
        rule = tuple(MARKDOWN_RULES[side] for side in self._sides())
        cells = [self.head, rule, *self.rows]
        if self.marked is not None:
            # Head and rule come before the rows. An empty cell stays empty: `****` would be shown.
            cells[2 + self.marked] = tuple(
                cell and f"**{cell}**" for cell in self.rows[self.marked]
            )
        lines = [*map(_markdown_line, cells)]
        if self.title:
            lines = [f"## {_plain(self.title)}", "", *lines]
        return "\n".join(lines)

    def html(self) -> str:
        """Format title and cells as HTML elements. The marked row has the class `marked`."""

        def row(cells: Sequence[str], tag: str) -> str:
            return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)

        rows = [f"<tr>{row(cells, 'td')}</tr>" for cells in self.rows]
        if self.marked is not None:
            # Cells are escaped, so only the row's own `<tr>` matches.
            rows[self.marked] = rows[self.marked].replace("<tr>", '<tr class="marked">')
        head = f"<thead><tr>{row(self.head, 'th')}</tr></thead>"
        return (
            f'<h2>{escape(self.title)}</h2><div class="wide">'
            f"<table>{head}<tbody>{''.join(rows)}</tbody></table></div>"
        )

    def text(self) -> str:
        """Format the cells in aligned columns for a terminal. An empty head is omitted."""
        lines = [*self.rows]
        if any(self.head):
            lines = [self.head, *lines]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        row = "  ".join(
            f"{{:{side}{width}}}" for side, width in zip(self._sides(), widths, strict=True)
        )
        return "\n".join(row.format(*cells).rstrip() for cells in lines)

    def _sides(self) -> list[str]:
        """Return each column's side: ">" with figures only and at least one, else "<"."""
        columns = [[row[place] for row in self.rows] for place in range(len(self.head))]
        return [
            ">" if any(column) and all(map(FIGURE.match, column)) else "<" for column in columns
        ]


def _markdown_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_plain(cell) for cell in cells)} |"


def _plain(text: str) -> str:
    """Return the text in one line, without the character that would end a Markdown cell."""
    return " ".join(text.replace("|", "/").split())


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a variant."""

    timeline: Timeline
    latents: str
    """SHA-256 of the latents, to compare results bit by bit."""
    warmup: bool = False
    """True for an uncounted trial before the others."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Settings for a run, and the trials made with them."""

    name: str
    settings: Mapping[str, str]
    """Settings as text by name, in table order."""
    job: str = ""
    """Computation name. Variants with the same job differ only in streaming, so their latents must
    be equal."""
    trials: tuple[Trial, ...] = ()
    predicted: Timeline | None = None
    """Simulated run. None for an unknown machine."""
    failed: str = ""
    """Reason why the variant could not be run. Empty if it could."""

    @property
    def measured(self) -> tuple[Timeline, ...]:
        """Timelines of the trials without warm-ups."""
        return tuple(trial.timeline for trial in self.trials if not trial.warmup)

    @property
    def latents(self) -> frozenset[str]:
        """Distinct results of all trials, including warm-ups: one if they are all equal."""
        return frozenset(trial.latents for trial in self.trials)

    @property
    def median_run(self) -> Timeline | None:
        """Measured run with the median wall time, the shorter of two in the middle.

        None without a run.
        """
        ordered = sorted(self.measured, key=lambda timeline: timeline.wall_s)
        if not ordered:
            return None
        return ordered[(len(ordered) - 1) // 2]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Benchmark results, finished or in progress."""

    title: str
    variants: tuple[Variant, ...]
    method: Mapping[str, str]
    """Method as text by name: warm-ups, repeats, pauses, date."""
    machine: Mapping[str, str]
    """Machine as text by name: device, processor, memory, versions."""
    phases: tuple[PhaseRecord, ...] = ()
    """Phases of the first run's queue item. Empty if none were recorded."""
    planned: int
    """Number of requested trials, including warm-ups."""
    finished: bool = True
    """False while trials are outstanding, and after a cancelled benchmark."""

    @property
    def done(self) -> int:
        """Number of completed trials."""
        return sum(len(variant.trials) for variant in self.variants)
