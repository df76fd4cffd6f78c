"""Report of a benchmark as values: its variants, their runs, and tables that are rendered as text, Markdown or HTML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ..schema import PhaseRecord, Timeline

FIGURE = re.compile(r"-?$|[-+]?\d(?!.*[A-Za-z]{6})")
"""Right-aligned cell: a figure with its unit, a dash, or nothing. Text with a word of six letters is not a figure."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells of text under a head. Columns of figures are right-aligned, all others left-aligned."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    marked: int | None = None
    """Index of the highlighted row."""

    def without_empty_columns(self) -> Table:
        """Return the table without the columns that are empty in every row."""
        kept = [place for place in range(len(self.head)) if any(row[place] for row in self.rows)]
        head, *rows = (tuple(cells[place] for place in kept) for cells in (self.head, *self.rows))
        return Table(title=self.title, head=head, rows=tuple(rows), marked=self.marked)

    def markdown(self) -> str:
        """Format title and cells as Markdown; the marked row is bold."""
        rule = ["--:" if right else "---" for right in self._right()]
        lines = [_markdown_line(self.head), _markdown_line(rule)]
        for place, row in enumerate(self.rows):
            lines.append(
                _markdown_line([f"**{cell}**" if cell else "" for cell in row] if place == self.marked else row)
            )
        heading = [f"## {_plain(self.title)}", ""] if self.title else []
        return "\n".join([*heading, *lines])

    def html(self) -> str:
        """Format title and cells as HTML elements; the marked row has the class `marked`."""

        def row(cells: Sequence[str], tag: str) -> str:
            return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)

        marks = (' class="marked"' if place == self.marked else "" for place in range(len(self.rows)))
        body = "".join(f"<tr{mark}>{row(cells, 'td')}</tr>" for mark, cells in zip(marks, self.rows, strict=True))
        head = f"<thead><tr>{row(self.head, 'th')}</tr></thead>"
        return f'<h2>{escape(self.title)}</h2><div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'

    def text(self) -> str:
        """Format the cells in aligned columns for a terminal; an empty head is omitted."""
        lines = [self.head, *self.rows] if any(self.head) else [*self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        columns = [*zip(widths, self._right(), strict=True)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, (width, right) in zip(cells, columns, strict=True)
            ).rstrip()
            for cells in lines
        )

    def _right(self) -> list[bool]:
        """Return for each column if it is right-aligned: it has figures only, and at least one."""
        columns = [[row[place] for row in self.rows] for place in range(len(self.head))]
        return [any(column) and all(FIGURE.match(cell) for cell in column) for column in columns]


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
    """True for a trial that is made first and not counted."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Settings of a run, and the trials that were made with them."""

    name: str
    settings: Mapping[str, str]
    """Settings as text, by name, in the order of the tables."""
    job: str = ""
    """Name of the computation: variants with the same job differ only in streaming, so their latents must be equal."""
    trials: tuple[Trial, ...] = ()
    predicted: Timeline | None = None
    """Simulated run; None for an unknown machine."""
    failed: str = ""
    """Reason for which the variant could not be run; empty if it could."""

    @property
    def measured(self) -> tuple[Timeline, ...]:
        """Timelines of the trials without warm-ups."""
        return tuple(trial.timeline for trial in self.trials if not trial.warmup)

    @property
    def latents(self) -> frozenset[str]:
        """Distinct results of all trials, warm-ups included: one if they are all equal."""
        return frozenset(trial.latents for trial in self.trials)

    @property
    def median_run(self) -> Timeline | None:
        """Measured run with the median wall time, the shorter of two in the middle; None if there is no run."""
        ordered = sorted(self.measured, key=lambda timeline: timeline.wall_s)
        return ordered[(len(ordered) - 1) // 2] if ordered else None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Results of a benchmark, finished or in progress."""

    title: str
    variants: tuple[Variant, ...]
    method: Mapping[str, str]
    """Method as text by name: warm-ups, repeats, pauses, date."""
    machine: Mapping[str, str]
    """Machine as text by name: device, processor, memory, versions."""
    phases: tuple[PhaseRecord, ...] = ()
    """Phases of the queue item of the first run; empty if none were recorded."""
    planned: int
    """Number of requested trials, warm-ups included."""
    finished: bool = True
    """False while trials are outstanding, and after a cancelled benchmark."""

    @property
    def done(self) -> int:
        """Number of trials that were made."""
        return sum(len(variant.trials) for variant in self.variants)
