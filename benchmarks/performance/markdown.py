"""Tables and numbers as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

NOTHING = "-"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    aligned = ["---", *(["--:"] * (len(head) - 1))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, aligned, *rows)) + "\n"


def number(value: float | None, digits: int = 1) -> str:
    """A number, or a dash where there is none."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def numbers(values: Sequence[float], digits: int = 1) -> str:
    """Several numbers in one cell."""
    return " / ".join(number(value, digits) for value in values)


def ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}x"
