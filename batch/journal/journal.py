"""Batch journal: the state of every row in an SQLite file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeAlias

from ..folder.names import is_of_journal, name_key, number_stem
from ..folder.own_files import check_database, check_file
from ..rows.rows import Row
from .database import Database, JournalError, copy_of
from .entry import KeptFile, RowEntry, State
from .tables import insert, read_or_create

_BACK_UP_SECONDS = 60.0
"""Minimum time between two backups."""


def check_journal(path: Path) -> None:
    """Raise ForeignFileError if a file of the journal at `path` is not this user's regular file.

    SQLite and the copies would follow a link.
    """
    for name in (path.name, f"{path.name}.lock", f"{path.name}.copy", f"{path.name}.recovered"):
        check_database(path.with_name(name))
    check_file(copy_of(path))


Compared: TypeAlias = Callable[[Sequence[KeptFile]], Sequence[KeptFile] | None]
"""Returns the files of a row with their present stamps; None if one is missing or was changed."""


class Journal(AbstractContextManager["Journal"]):
    """Open journal for several threads, each of which changes the rows that it holds.

    Only the process with the lock may use it.
    """

    entries: dict[str, RowEntry]
    """All rows by hash, in line order. Entries are replaced, not changed."""
    workflow: str
    """Workflow digest."""
    path: Path

    def __init__(self, path: Path, *, workflow: str) -> None:
        """Open or create the journal for the workflow with this digest. Raises JournalError."""
        self.workflow = workflow
        self.path = path
        self._backed_up = time.monotonic()
        self._database = Database(path)
        try:
            with self._database.transaction() as execute:
                found = read_or_create(self._database, execute, workflow)
            reserved = [
                each.stem for each in found if each.stem and is_of_journal(each.stem, path.name)
            ]
            if reserved:
                raise ValueError(f"{reserved[0]!r} is not the stem of a file name here")
            self.entries = {entry.hash: entry for entry in found}
        except JournalError:
            self._database.close()
            raise
        except ValueError as err:
            self._database.close()
            raise self._database.damaged(str(err)) from err

    def __exit__(self, *error: object) -> None:
        self._database.close()

    def enter(self, rows: Sequence[Row], *, compared: Compared) -> list[Row]:
        """Replace the rows, but keep former ones that are `placing`, or done with all their files.

        Failed rows are set to waiting, rows with a fault to failed. Returns the done rows whose
        files are gone by `compared`. They run again, and their `files` are kept until then.
        """
        present = {row.hash for row in rows}
        before = dict(self.entries)
        missing = set()
        for entry in self.entries.values():
            if entry.state is State.done:
                files = compared(entry.files)
                if files is None:
                    missing.add(entry.hash)
                else:
                    before[entry.hash] = replace(entry, files=tuple(files))
        kept = [
            entry
            for entry in before.values()
            if entry.hash in present
            or (entry.state in {State.placing, State.done} and entry.hash not in missing)
        ]
        entries = {
            entry.hash: replace(entry, line=None) for entry in kept if entry.hash not in present
        }
        stems = _file_stems(
            rows, {entry.stem: entry.hash for entry in kept if entry.stem}, self.path.name
        )
        for row in rows:
            fault = row.fault
            if fault is None and stems[row.hash] is None:
                fault = _taken_fault(str(row.name), self.path.name)
            entry = replace(
                before.get(row.hash, RowEntry(hash=row.hash)), line=row.line, stem=stems[row.hash]
            )
            if entry.state in {State.waiting, State.failed} or row.hash in missing:
                state = State.failed if fault else State.waiting
                entry = replace(entry, state=state, error=fault)
            entries[row.hash] = entry
        # Rows that are no longer in the jobs file get None, and `_save` deletes their entries.
        self._save({**dict.fromkeys(self.entries), **entries})
        # `_save` appends new rows to `self.entries`, so the order is set here.
        self.entries = entries
        return [row for row in rows if row.hash in missing and row.fault is None]

    def post(
        self,
        saves: Mapping[str, frozenset[str] | None],
        prompt_id: str,
        backend: str | None = None,
        *,
        elsewhere: bool = False,
    ) -> None:
        """Record that rows are about to be sent under this id to the backend with this address.

        `saves` maps row hashes to the nodes of their files. `elsewhere`: the previous backend does
        not respond. Results under the former id are no longer used.
        """
        before = {True: State.posted, False: State.waiting}[elsewhere]
        posted = {}
        for digest, nodes in saves.items():
            row = self._row(digest, before)
            posted[digest] = replace(
                row,
                state=State.posted,
                prompt_id=prompt_id,
                attempts=row.attempts + 1,
                saves=nodes,
                backend=backend,
            )
        self._save(posted, attempts=[(prompt_id, digest) for digest in posted])

    def lines_left(self, prompt_id: str) -> list[int] | None:
        """Return the lines of unfinished rows posted under this id. None for an unknown id."""
        with self._database.transaction() as execute:
            found = execute(
                "SELECT hash FROM attempts WHERE prompt_id = ?", (prompt_id,)
            ).fetchall()
        posted = [self.entries[digest] for (digest,) in found if digest in self.entries]
        if not posted:
            return None
        return sorted(
            entry.line
            for entry in posted
            if entry.state is not State.done and entry.line is not None
        )

    def adopt(self, digest: str, stem: str, files: Sequence[KeptFile]) -> None:
        """Assign finished files with this stem to an unfinished row, and set it to `placing`.

        The former row with this stem loses it.
        """
        row = self._row(digest, State.waiting, State.posted, State.failed)
        owners = [
            each for each in self.entries.values() if name_key(each.stem or "") == name_key(stem)
        ]
        # The row may be an owner itself, so the new entry comes last and replaces the first one.
        self._save(
            {owner.hash: replace(owner, stem=None, files=()) for owner in owners}
            | {digest: replace(row, state=State.placing, stem=stem, files=tuple(files), error=None)}
        )

    def back_up_if_old(self) -> None:
        """Write a copy as `back_up`, unless the last attempt was less than a minute ago."""
        with self._database.lock:
            if time.monotonic() - self._backed_up > _BACK_UP_SECONDS:
                self.back_up()

    def back_up(self) -> None:
        """Write a copy as `Database.back_up`."""
        # Before the copy, so that a failing one is not tried again for every row.
        self._backed_up = time.monotonic()
        self._database.back_up()

    def wait(self, hashes: Iterable[str]) -> None:
        """Set these rows to waiting: the host does not have them."""
        self._change(hashes, State.posted, State.placing, state=State.waiting)

    def fail(self, digest: str, error: str) -> None:
        """Set the row to failed, with the reason."""
        text = error.encode("utf-8", "backslashreplace").decode()  # SQLite takes no lone surrogates
        self._change([digest], State.waiting, State.posted, state=State.failed, error=text)

    def place(self, digest: str, files: Sequence[KeptFile]) -> None:
        """Record the row's files, checked and synced to disk, before they are renamed."""
        assert files, "a row needs files to be placed"
        self._change([digest], State.posted, state=State.placing, files=tuple(files))

    def finish(self, digest: str, files: Sequence[KeptFile]) -> None:
        """Set the row to done: all files have their names, and stamps here."""
        self._change([digest], State.placing, state=State.done, error=None, files=tuple(files))

    def _change(self, hashes: Iterable[str], *before: State, **changes: Any) -> None:
        """Change the entries of rows that are in one of these states."""
        self._save({digest: replace(self._row(digest, *before), **changes) for digest in hashes})

    def _row(self, digest: str, *states: State) -> RowEntry:
        """Return a row entry, which has to be in one of these states."""
        assert digest in self.entries, f"there is no row {digest}"
        assert self.entries[digest].state in states, f"{self.entries[digest]} is not {states}"
        return self.entries[digest]

    def _save(
        self, changes: Mapping[str, RowEntry | None], *, attempts: Iterable[tuple[str, str]] = ()
    ) -> None:
        """Write changed entries, remove None entries, and add new attempts in one transaction."""
        # Without a look at the other entries: a batch of thousands of rows changes each row three
        # times.
        changed = {
            digest: entry for digest, entry in changes.items() if entry != self.entries.get(digest)
        }
        with self._database.transaction() as execute:
            # Before any row is inserted: stems are unique, and a stem may pass from one row to
            # another.
            for digest in changed:
                execute("DELETE FROM rows WHERE hash = ?", (digest,))
            for entry in changed.values():
                if entry is not None:
                    insert(execute, entry)
            for attempt in attempts:
                execute("INSERT INTO attempts VALUES (?, ?)", attempt)
        for digest, entry in changed.items():
            if entry is None:
                self.entries.pop(digest)
            else:
                self.entries[digest] = entry


def _taken_fault(name: str, journal: str) -> str:
    """Return why a row cannot have this name, which is in use, maybe by the `journal`."""
    if is_of_journal(name, journal):
        return f"name '{name}' is used by the journal: rename the row"
    return (
        f"name '{name}' is used by the files of a former row: if this is a changed row, or "
        "continues one, rename it, or move those files away"
    )


def _file_stems(
    rows: Sequence[Row], taken: Mapping[str, str], journal: str
) -> dict[str, str | None]:
    """Return a unique file stem for each row, by hash.

    `taken` maps present and former stems to row hashes: a row keeps its stem. A row without a name
    gets the row position, or the next free number. None: the row has a fault, or the name is taken,
    maybe by the `journal`.
    """
    owned = {digest: stem for stem, digest in taken.items()}
    used = {name_key(stem) for stem in taken}
    stems: dict[str, str | None] = {}
    # Rows with names first, so that no number takes a name.
    for row in sorted(rows, key=lambda row: row.name is None):
        stem = owned.get(row.hash)
        if stem is None and row.fault is None and row.name is not None:
            if name_key(row.name) not in used and not is_of_journal(row.name, journal):
                stem = row.name
        elif stem is None and row.fault is None:
            numbers = map(number_stem, chain([row.position], count(len(rows) + 1)))
            stem = next(
                number
                for number in numbers
                if number not in used and not is_of_journal(number, journal)
            )
        stems[row.hash] = stem
        used.add(name_key(stem or ""))
    return stems
