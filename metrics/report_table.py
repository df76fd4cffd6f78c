"""A table of a report as a value, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells of text under a head."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: int | None = None
    """The row that stands out."""

    def without_empty_columns(self) -> Table:
        """The same, less the columns of which no row says anything."""
        kept = [place for place in range(len(self.head)) if any(row[place] for row in self.rows)]
        head, *rows = (tuple(cells[place] for place in kept) for cells in (self.head, *self.rows))
        return Table(title=self.title, head=head, rows=tuple(rows), marked=self.marked)

    def markdown(self) -> str:
        """Title and cells; the marked row is bold."""
        lines = [f"### {_plain(self.title)}", "", _line(self.head), _line(["---"] * len(self.head))]
        for place, row in enumerate(self.rows):
            lines.append(_line([f"**{cell}**" if cell else "" for cell in row] if place == self.marked else row))
        return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_plain(cell) for cell in cells)} |"


def _plain(text: str) -> str:
    """In one line, and without what would end a cell."""
    return " ".join(text.replace("|", "/").split())
