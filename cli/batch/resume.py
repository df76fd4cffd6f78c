"""Where a batch goes on: what the journal, the folder and the rows say together, before anything is posted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..arguments import ArgumentError
from .journal import Journal
from .journal_entry import Entry, State
from .media_check import UnreadableFileError
from .output_store import OutputStore
from .rows import Row
from .runner import Submission

_TO_BE_MADE = (State.waiting, State.posted, State.failed)

Recognise = Callable[[Path], Collection[str]]
"""Returns the hashes of the rows whose workflow is stored in a file."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Rows that wait, rows that were posted before, and how many have come to an end already."""

    waiting: tuple[Row, ...]
    flights: tuple[Submission, ...]
    done: int
    faults: tuple[tuple[Row, str], ...]
    """Rows that cannot run, and why."""
    notes: tuple[str, ...]


def take_up(journal: Journal, shelf: OutputStore, rows: Sequence[Row], recognise: Recognise = lambda path: ()) -> Start:
    """Make the journal know `rows`, and finish what was interrupted while files got their names.

    A finished file that the journal does not have becomes the file of the row that it was made of, if `recognise`
    finds one. Raises ArgumentError, before any file is moved or removed, if files of others have the names of files
    that are to be made.
    """
    for entry in _placing(journal):
        if not shelf.can_place(entry.files):
            journal.wait([entry.hash])
    missing = _enter(journal, shelf, rows)
    adopted = _adopt(journal, shelf, rows, recognise)
    if adopted:
        _enter(journal, shelf, rows)
    _check_names(shelf, [*journal.entries().values()])
    for entry in _placing(journal):
        if shelf.place(entry.files):
            journal.finish(entry.hash)
        else:
            journal.wait([entry.hash])
    shelf.clear()
    before = journal.entries()
    for row in rows:
        if row.fault is not None and before[row.hash].state is State.posted:
            journal.fail(row.hash, row.fault)  # The host has other nodes than when the row was posted.
    entries = journal.entries()
    posted = [row for row in rows if entries[row.hash].state is State.posted]
    return Start(
        waiting=tuple(row for row in rows if entries[row.hash].state is State.waiting),
        flights=_flights(posted, entries),
        done=sum(entries[row.hash].state is State.done for row in rows),
        faults=tuple((row, entries[row.hash].error or "") for row in rows if entries[row.hash].state is State.failed),
        notes=(
            *(f"the files of line {row.line} are gone: they are made again" for row in missing if row not in adopted),
            *(f"line {row.line} is not made again: a finished file has its workflow" for row in adopted),
        ),
    )


def _placing(journal: Journal) -> list[Entry]:
    return [entry for entry in journal.entries().values() if entry.state is State.placing]


def _enter(journal: Journal, shelf: OutputStore, rows: Sequence[Row]) -> list[Row]:
    return journal.enter(rows, gone=lambda entry: not shelf.has(entry.files))


def _adopt(journal: Journal, shelf: OutputStore, rows: Sequence[Row], recognise: Recognise) -> list[Row]:
    """Take finished files that no row has for those of the rows that they were made of; return these rows."""
    entries = journal.entries()
    taken = {(entry.stem or "").casefold() for entry in entries.values() if entry.files}
    waiting = {row.hash: row for row in rows if entries[row.hash].state in {State.waiting, State.posted}}
    free = [(stem, paths) for stem, paths in shelf.finished() if stem.casefold() not in taken] if waiting else []
    made_of = [(stem, paths, _made_of(paths, recognise)) for stem, paths in free]
    adopted: list[Row] = []
    # If several rows have one workflow, a file goes first to the row that has its name.
    for by_name in (True, False):
        for stem, paths, digests in made_of:
            fitting = [waiting[digest] for digest in digests if digest in waiting and _may_have(waiting[digest], stem)]
            named = [row for row in fitting if entries[row.hash].stem == stem]
            row = next(iter(named if by_name else fitting), None)
            if row is None or stem.casefold() in taken:
                continue
            try:
                kept = [shelf.inspect(path) for path in paths]
            except UnreadableFileError:
                continue  # Half of a file: it is made again.
            journal.adopt(row.hash, stem, kept)
            taken.add(stem.casefold())
            adopted.append(waiting.pop(row.hash))
    return adopted


def _made_of(paths: Sequence[Path], recognise: Recognise) -> list[str]:
    """Return the rows that all these files were made of."""
    first, *others = (recognise(path) for path in paths)
    return [digest for digest in first if all(digest in other for other in others)]


def _may_have(row: Row, stem: str) -> bool:
    """Return True if the files of the row may have this stem: its name, or any number for a row without a name."""
    return stem.casefold() == row.name.casefold() if row.name is not None else stem.isdecimal()


def _check_names(shelf: OutputStore, entries: Sequence[Entry]) -> None:
    """Nothing that this batch has not made is ever replaced."""
    to_be_made = [entry for entry in entries if entry.line is not None and entry.state in _TO_BE_MADE]
    strangers = shelf.strangers([entry.stem for entry in to_be_made if entry.stem])
    for entry in entries:
        if entry.state is State.placing:
            strangers += shelf.in_the_way(entry.files)
    if strangers:
        more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
        raise ArgumentError(
            f"{shelf.folder} holds {strangers[0]}{more}, which this batch has not made, or not like that: move it away "
            "or give another --out"
        )


def _flights(posted: Sequence[Row], entries: Mapping[str, Entry]) -> tuple[Submission, ...]:
    """The rows that were posted under one id are one flight."""
    flights: dict[str, list[Row]] = {}
    for row in posted:
        flights.setdefault(entries[row.hash].prompt_id or "", []).append(row)
    return tuple(
        Submission(prompt_id=prompt_id, rows=together, saves={row.hash: entries[row.hash].saves for row in together})
        for prompt_id, together in flights.items()
    )
