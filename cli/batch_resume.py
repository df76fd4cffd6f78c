"""Where a batch goes on: what the journal, the folder and the rows say together, before anything is posted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .arguments import ArgumentError
from .batch_rows import Row
from .batch_runner import Flight
from .batch_shelf import Shelf
from .journal import Entry, Journal, State


@dataclass(frozen=True, kw_only=True)
class Start:
    """Rows that wait, rows that were posted before, and how many have come to an end already."""

    waiting: tuple[Row, ...]
    flights: tuple[Flight, ...]
    done: int
    faults: tuple[tuple[Row, str], ...]
    """Rows that cannot run, and why."""
    notes: tuple[str, ...]


def take_up(journal: Journal, shelf: Shelf, rows: Sequence[Row]) -> Start:
    """Finish what was interrupted while files got their names, and make the journal know `rows`.

    Raises ArgumentError if files of others have the names of files that are to be made.
    """
    for entry in journal.entries().values():
        if entry.state is State.placing and shelf.place(entry.files):
            journal.finish(entry.hash)
        elif entry.state is State.placing:
            journal.wait([entry.hash])
    shelf.clear()
    missing = journal.enter(rows, gone=lambda entry: not shelf.has(entry.files))
    before = journal.entries()
    for row in rows:
        if row.fault is not None and before[row.hash].state is State.posted:
            journal.fail(row.hash, row.fault)  # The host has other nodes than when the row was posted.
    entries = journal.entries()
    _check_names(shelf, [entries[row.hash] for row in rows])
    posted = [row for row in rows if entries[row.hash].state is State.posted]
    return Start(
        waiting=tuple(row for row in rows if entries[row.hash].state is State.waiting),
        flights=_flights(posted, entries),
        done=sum(entries[row.hash].state is State.done for row in rows),
        faults=tuple((row, entries[row.hash].error or "") for row in rows if entries[row.hash].state is State.failed),
        notes=tuple(f"the files of line {row.line} are gone: they are made again" for row in missing),
    )


def _check_names(shelf: Shelf, entries: Sequence[Entry]) -> None:
    """Nothing that this batch has not made is ever replaced."""
    strangers = shelf.strangers([entry.stem for entry in entries if entry.stem and entry.state is not State.done])
    if strangers:
        more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
        raise ArgumentError(
            f"{shelf.folder} holds {strangers[0]}{more}, which this batch has not made, or not like that: move it away "
            "or give another --out"
        )


def _flights(posted: Sequence[Row], entries: Mapping[str, Entry]) -> tuple[Flight, ...]:
    """The rows that were posted under one id are one flight."""
    flights: dict[str, list[Row]] = {}
    for row in posted:
        flights.setdefault(entries[row.hash].prompt_id or "", []).append(row)
    return tuple(
        Flight(prompt_id=prompt_id, rows=together, saves={row.hash: entries[row.hash].saves for row in together})
        for prompt_id, together in flights.items()
    )
