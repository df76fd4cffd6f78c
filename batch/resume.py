"""Batch resumption: from the journal, the journal copy, the finished files, and the rows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Sequence
from itertools import chain, count
from pathlib import Path

from ..schema.text import format_count
from .errors import SetupError
from .folder.names import is_number, name_key
from .journal import database
from .journal.entry import RowEntry, State
from .journal.journal import Journal
from .output_store import OutputStore, UnreadableFileError
from .rows.rows import Row


def open_journal(
    path: Path, *, workflow: str, start: Callable[[Journal], Sequence[str]], is_own: bool = True
) -> tuple[Journal, list[str]]:
    """Open the journal at `path`, rebuilt from the last copy if damaged or missing.

    Return it and notes.

    `start` resumes a batch from a journal and returns notes. A rebuilt journal replaces the damaged
    one only after `start` has returned, so an error changes nothing. The damaged file, or another
    batch's copy, is renamed. `is_own`: a lock or a copy shows that a batch has used `path`, so even
    another application's database is a damaged journal. Raises JournalError, and errors from
    `start`.
    """
    gone = database.copy_of(path).is_file() and not (path.is_file() and path.stat().st_size)
    reason = f"the journal {path} is missing"
    try:
        if not gone:
            return Journal(path, workflow=workflow), []
    except database.DamagedJournalError as err:
        reason = str(err)
    except database.ForeignDatabaseError:
        if not is_own:
            raise
        reason = f"the journal {path} is damaged: its application id was changed"
    rebuilt = path.with_name(f"{path.name}.recovered")
    try:
        try:
            source, others = _rebuild(rebuilt, path, workflow)
        except database.JournalError as err:
            raise database.JournalError(
                f"{reason}; its copy {database.copy_of(path).name} is not usable: {err}"
            ) from err
        if others and gone:  # the user removed the journal to start another batch
            return Journal(path, workflow=workflow), []
        with Journal(rebuilt, workflow=workflow) as journal:
            found = start(journal)
            done = sum(
                entry.state in {State.placing, State.done} for entry in journal.entries.values()
            )
            of_all = f"{done} of {format_count(len(journal.entries), 'row')}"
        # The journal is closed before this, because Windows does not rename an open file.
        aside = _set_aside(path)
        if others and aside:
            database.copy_of(path).replace(database.copy_of(aside))
        rebuilt.replace(path)
    finally:
        rebuilt.unlink(missing_ok=True)
    kept = f"; it is kept as {aside.name}" if aside else ""
    note = f"{reason}{kept}; the batch resumes from {source}: {of_all} found"
    return Journal(path, workflow=workflow), [note, *found]


_VIDEOS = "the finished videos in the folder"


def _rebuild(rebuilt: Path, path: Path, workflow: str) -> tuple[str, bool]:
    """Write the journal `rebuilt`: the copy if it is intact and for this workflow, else nothing.

    Returns a description of the source, and True if the copy is for another workflow, version or
    application.
    """
    # SQLite would apply a leftover rollback file to the new copy.
    for leftover in (rebuilt, Path(f"{rebuilt}-journal")):
        leftover.unlink(missing_ok=True)
    try:
        shutil.copyfile(database.copy_of(path), rebuilt)
        with Journal(rebuilt, workflow=workflow):
            return f"its last copy, {database.copy_of(path).name}, and {_VIDEOS}", False
    except (FileNotFoundError, database.DamagedJournalError, database.OtherJournalError) as err:
        rebuilt.unlink(missing_ok=True)
        return _VIDEOS, isinstance(err, database.OtherJournalError)


def _set_aside(path: Path) -> Path | None:
    """Rename the damaged journal and return the new path. None if it does not exist."""
    numbers = count(2)
    aside = path.with_name(f"{path.name}.damaged")
    while os.path.lexists(aside):
        aside = path.with_name(f"{path.name}.damaged-{next(numbers)}")
    # Otherwise SQLite would apply the damaged journal's rollback file to the new journal.
    half = Path(f"{path}-journal")
    if half.exists():
        half.replace(f"{aside}-journal")
    if not path.exists():
        return None
    path.replace(aside)
    return aside


_UNFINISHED = (State.waiting, State.posted, State.failed)

FindRows = Callable[[Path], Collection[str]]
"""Returns the hashes of rows with their workflow in a file's metadata."""


def resume(
    journal: Journal, store: OutputStore, rows: Sequence[Row], find_rows: FindRows = lambda path: ()
) -> list[str]:
    """Enter `rows` into the journal, and complete interrupted renames.

    Return notes on rows with unexpected files.

    Finished files outside the journal are assigned to their row, if `find_rows` finds one. Raises
    SetupError, before any file is moved or removed, if foreign files have the names of future
    output files.
    """
    # First, because `enter` keeps rows that are `placing`.
    journal.wait([entry.hash for entry in _placing(journal) if not store.can_place(entry.files)])
    missing = journal.enter(rows, compared=store.compared)
    adopted = _adopt(journal, store, rows, find_rows)
    if adopted:
        # Again, because an adopted row may have taken the stem of another one.
        journal.enter(rows, compared=store.compared)
    _check_names(store, [*journal.entries.values()])
    for entry in _placing(journal):
        placed = store.place(entry.files)
        if placed is not None:
            journal.finish(entry.hash, placed)
        else:
            journal.wait([entry.hash])
    # Only now: the renames above have used the parts of `placing` rows.
    store.clear_parts()
    for row in rows:
        if row.fault is not None and journal.entries[row.hash].state is State.posted:
            # The host's nodes have changed since the row was posted.
            journal.fail(row.hash, row.fault)
    return [
        *(f"{row} runs again: its files are missing" for row in missing if row not in adopted),
        *(f"{row} does not run again: a finished file contains its workflow" for row in adopted),
    ]


def _placing(journal: Journal) -> list[RowEntry]:
    return [entry for entry in journal.entries.values() if entry.state is State.placing]


def _adopt(
    journal: Journal, store: OutputStore, rows: Sequence[Row], find_rows: FindRows
) -> list[Row]:
    """Assign finished files without a row by the workflow inside them. Return the assigned rows."""
    entries = journal.entries
    taken = {
        name_key(entry.stem or "")
        for entry in entries.values()
        if entry.state in (State.placing, State.done)
    }
    waiting = {
        row.hash: row for row in rows if entries[row.hash].state in {State.waiting, State.posted}
    }
    # By name first: opening a large file takes long if it is not a video.
    names = {name_key(row.name) for row in waiting.values() if row.name is not None}
    numbered = any(row.name is None for row in waiting.values())
    free = [
        (stem, paths)
        for stem, paths in (store.finished() if waiting else ())
        if name_key(stem) not in taken
        and (name_key(stem) in names or (numbered and is_number(stem)))
    ]
    pairs = [
        (waiting[digest], stem, paths)
        for stem, paths in free
        for digest in _rows_of_all(paths, find_rows)
        if digest in waiting and _may_have(waiting[digest], stem)
    ]
    adopted: list[Row] = []
    # If several rows have equal workflows, rows with the file's name have precedence.
    for row, stem, paths in sorted(pairs, key=lambda pair: entries[pair[0].hash].stem != pair[1]):
        if row.hash not in waiting or name_key(stem) in taken:
            continue
        try:
            journal.adopt(row.hash, stem, [store.check_file(path) for path in paths])
        except UnreadableFileError:
            continue  # incomplete: the row runs again
        taken.add(name_key(stem))
        adopted.append(waiting.pop(row.hash))
    return adopted


def _rows_of_all(paths: Sequence[Path], find_rows: FindRows) -> list[str]:
    """Return the hashes of rows with their workflow in all these files."""
    first, *others = (find_rows(path) for path in paths)
    return [digest for digest in first if all(digest in other for other in others)]


def _may_have(row: Row, stem: str) -> bool:
    """Return True if the row's files may have this stem.

    The stem is the row's name, or any number if the row has none.
    """
    if row.name is None:
        return is_number(stem)
    return name_key(stem) == name_key(row.name)


def _check_names(store: OutputStore, entries: Sequence[RowEntry]) -> None:
    """Raise SetupError if an output file would replace a file from outside this batch."""
    unfinished = [
        entry for entry in entries if entry.line is not None and entry.state in _UNFINISHED
    ]
    # A row with one deleted file is made again: `place` replaces the others.
    files = chain.from_iterable(entry.files for entry in unfinished)
    former = {file.name for file in files if store.is_intact([file])}
    stems = [entry.stem for entry in unfinished if entry.stem]
    foreign = [name for name in store.foreign_files(stems) if name not in former]
    for entry in entries:
        if entry.state is State.placing:
            foreign += store.conflicts(entry.files)
    if foreign:
        more = f" and {len(foreign) - 1} more" * (len(foreign) > 1)
        raise SetupError(
            f"{store.folder} contains {foreign[0]}{more}, which is not from this batch or was "
            "changed: move it away or give another --out"
        )
