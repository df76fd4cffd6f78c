"""What the files of each row are called: its own name, or its place among the rows. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .batch_rows import Row

_DIGITS = 5


def file_stems(rows: Sequence[Row], taken: Mapping[str, str]) -> list[str | None]:
    """The stem of each row's files; no two rows, present or former, have the same.

    `taken` are the stems in use, each with the hash of its row: a row keeps its stem. A row without a name is called by
    its position, or by the next free number if that is taken. None: the row has a fault, or its name is taken.
    """
    owned = {digest: stem for stem, digest in taken.items()}
    used = {stem.casefold() for stem in taken}
    stems: dict[str, str | None] = {}
    # Names first, so that no number takes one.
    for row in sorted(rows, key=lambda row: row.name is None):
        if row.hash in owned:
            stems[row.hash] = owned[row.hash]
        elif row.fault is not None:
            stems[row.hash] = None
        elif row.name is not None:
            stems[row.hash] = None if row.name.casefold() in used else row.name
        else:
            stems[row.hash] = _number(row.position, used, len(rows))
        used.add((stems[row.hash] or "").casefold())
    return [stems[row.hash] for row in rows]


def _number(position: int, used: set[str], rows: int) -> str:
    """The position; where it is taken, the first free number above all rows."""
    number = position
    while f"{number:0{_DIGITS}}" in used:
        number = max(number, rows) + 1
    return f"{number:0{_DIGITS}}"
