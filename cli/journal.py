"""The journal of a batch: what became of every row, in a SQLite file that outlives whoever writes it.

Each change is one transaction, on the disk before its method returns. A row goes from state to state in this order
only, and whoever asks for another order gets an AssertionError:

    waiting -> posted -> placing -> done
    waiting | posted -> failed
    posted | placing -> waiting
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

from .batch_rows import Row
from .journal_names import file_stems

_APPLICATION = 0x57535442  # "WSTB": tells a journal from other SQLite files
_VERSION = 1
_TABLES = (
    "CREATE TABLE batch (workflow TEXT NOT NULL)",
    "CREATE TABLE rows (hash TEXT PRIMARY KEY, line INTEGER, stem TEXT UNIQUE COLLATE NOCASE, state TEXT NOT NULL, "
    "prompt_id TEXT, attempts INTEGER NOT NULL DEFAULT 0, error TEXT, saves TEXT, files TEXT NOT NULL DEFAULT '[]')",
)


class JournalError(OSError):
    """The journal cannot be read or written, or it is that of another batch."""


class State(str, Enum):
    """What has become of a row."""

    waiting = "waiting"
    """Nothing of it is anywhere."""
    posted = "posted"
    """Its prompt id may be known to the host: the id is written before it is sent."""
    placing = "placing"
    """Its files are here and checked; some of them may have their names already."""
    done = "done"
    failed = "failed"
    """Taken up again by the next run."""


@dataclass(frozen=True, kw_only=True)
class KeptFile:
    """One file of a row, by its name in the batch's folder."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What the journal says of one row. `stem` is what its files are called, `saves` whose files they are.

    `line` None: the row is no longer in the file of rows. `saves` None: the files of all nodes.
    """

    hash: str
    line: int | None
    stem: str | None
    state: State
    prompt_id: str | None
    attempts: int
    error: str | None
    saves: frozenset[str] | None
    files: tuple[KeptFile, ...]


class Journal:
    """One batch's journal, open. Only the holder of its lock may use it."""

    def __init__(self, path: Path, *, workflow: str) -> None:
        """Open or make the journal of a batch of the workflow with this digest. Raises JournalError."""
        self._path = path
        try:
            self._connection = sqlite3.connect(path, isolation_level=None)
        except sqlite3.Error as err:
            raise JournalError(f"the journal {path} cannot be opened: {err}") from err
        try:
            self._own(workflow)
        except JournalError:
            self._connection.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def entries(self) -> dict[str, Entry]:
        """All rows by their hash, in the order of their lines."""
        with self._transaction() as execute:
            return {row[0]: _entry(row) for row in execute(f"SELECT {_COLUMNS} FROM rows ORDER BY line")}

    def stem(self, digest: str) -> str:
        """What the files of a row that may run are called."""
        with self._transaction() as execute:
            (stem,) = execute("SELECT stem FROM rows WHERE hash = ?", (digest,)).fetchone()
        assert stem is not None, f"row {digest} has failed before it could run"
        return str(stem)

    def enter(self, rows: Sequence[Row], *, gone: Callable[[Entry], bool]) -> list[Row]:
        """Make the journal know exactly these rows, and those former ones whose files are still here.

        A row that failed before waits again, a row with a fault has failed. Returns the rows that were done and whose
        files are `gone`: they wait again.
        """
        with self._transaction() as execute:
            known = {row[0]: _entry(row) for row in execute(f"SELECT {_COLUMNS} FROM rows")}
            wanted = {row.hash for row in rows}
            left = [entry for entry in known.values() if entry.hash not in wanted]
            dropped = {entry.hash for entry in left if entry.state is not State.done or gone(entry)}
            execute("UPDATE rows SET line = NULL")
            for digest in dropped:
                execute("DELETE FROM rows WHERE hash = ?", (digest,))
            taken = {self._path.stem: "", self._path.name: ""}  # what lies beside the journal is called like that
            taken |= {entry.stem: entry.hash for entry in known.values() if entry.stem and entry.hash not in dropped}
            for row, stem in zip(rows, file_stems(rows, taken), strict=True):
                fault = row.fault or (
                    f"name '{row.name}' is that of files made of a former row, or of the journal" if not stem else None
                )
                state = State.failed if fault else State.waiting
                execute(
                    "INSERT INTO rows (hash, stem, state) VALUES (?, ?, ?) ON CONFLICT (hash) DO NOTHING",
                    (row.hash, stem, state.value),
                )
                execute("UPDATE rows SET line = ?, stem = ? WHERE hash = ?", (row.line, stem, row.hash))
                execute(
                    "UPDATE rows SET state = ?, error = ? WHERE hash = ? AND state IN ('waiting', 'failed')",
                    (state.value, fault, row.hash),
                )
            missing = [row for row in rows if row.hash in known and known[row.hash].state is State.done]
            missing = [row for row in missing if gone(known[row.hash])]
            for row in missing:
                execute("UPDATE rows SET state = 'waiting', files = '[]' WHERE hash = ?", (row.hash,))
            return missing

    def post(self, saves: Mapping[str, frozenset[str] | None], prompt_id: str) -> None:
        """The rows of `saves` are about to be sent under this id; `saves` says which nodes' files are whose."""
        with self._transaction() as execute:
            for digest, nodes in saves.items():
                text = None if nodes is None else json.dumps(sorted(nodes))
                given = {"prompt_id": prompt_id, "saves": text}
                self._move(execute, digest, (State.waiting,), State.posted, "attempts = attempts + 1, ", **given)

    def wait(self, hashes: Iterable[str]) -> None:
        """What was sent of these rows is nowhere."""
        with self._transaction() as execute:
            for digest in hashes:
                self._move(execute, digest, (State.posted, State.placing), State.waiting, files="[]")

    def fail(self, digest: str, error: str) -> None:
        """The row has come to nothing, for this reason."""
        with self._transaction() as execute:
            self._move(execute, digest, (State.waiting, State.posted), State.failed, error=error)

    def place(self, digest: str, files: Sequence[KeptFile]) -> None:
        """The row's files are here, checked, and on the disk; they are about to get their names."""
        assert files, "a row is placed by its files"
        text = json.dumps([asdict(file) for file in files])
        with self._transaction() as execute:
            self._move(execute, digest, (State.posted,), State.placing, files=text)

    def finish(self, digest: str) -> None:
        """All files of the row have their names."""
        with self._transaction() as execute:
            self._move(execute, digest, (State.placing,), State.done, error=None)

    def _own(self, workflow: str) -> None:
        """Make the tables, or see that they are those of this workflow."""
        with self._transaction() as execute:
            (application,) = execute("PRAGMA application_id").fetchone()
            (version,) = execute("PRAGMA user_version").fetchone()
            (tables,) = execute("SELECT count(*) FROM sqlite_master").fetchone()
            if not tables:
                for statement in (*_TABLES, f"PRAGMA application_id = {_APPLICATION}"):
                    execute(statement)
                execute(f"PRAGMA user_version = {_VERSION}")
                execute("INSERT INTO batch VALUES (?)", (workflow,))
                return
            if application != _APPLICATION:
                raise JournalError(f"{self._path} is a database, but no journal of a batch: give another --journal")
            if version != _VERSION:
                raise JournalError(
                    f"{self._path} was written by another version ({version}, this one writes {_VERSION})"
                )
            (before,) = execute("SELECT workflow FROM batch").fetchone()
            if before != workflow:
                raise JournalError(
                    f"{self._path} is the journal of another workflow: a batch has one workflow from its beginning to "
                    "its end; give another --out (or --journal), or the workflow that it began with"
                )

    @staticmethod
    def _move(
        execute: Callable[..., sqlite3.Cursor],
        digest: str,
        before: tuple[State, ...],
        after: State,
        change: str = "",
        **columns: Any,
    ) -> None:
        named = "".join(f"{column} = :{column}, " for column in columns)
        allowed = ", ".join(f"'{state.value}'" for state in before)
        done = execute(
            f"UPDATE rows SET {change}{named}state = :after WHERE hash = :hash AND state IN ({allowed})",
            {**columns, "after": after.value, "hash": digest},
        )
        assert done.rowcount == 1, f"row {digest} is not {allowed}: it cannot become {after.value}"

    @contextmanager
    def _transaction(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
        """All of what is executed inside, or nothing."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection.execute
                self._connection.execute("COMMIT")
            except BaseException:
                self._connection.rollback()
                raise
        except sqlite3.Error as err:
            raise JournalError(f"the journal {self._path}: {err}") from err


_COLUMNS = "hash, line, stem, state, prompt_id, attempts, error, saves, files"


def _entry(row: Sequence[Any]) -> Entry:
    digest, line, stem, state, prompt_id, attempts, error, saves, files = row
    return Entry(
        hash=digest,
        line=line,
        stem=stem,
        state=State(state),
        prompt_id=prompt_id,
        attempts=attempts,
        error=error,
        saves=None if saves is None else frozenset(json.loads(saves)),
        files=tuple(KeptFile(**file) for file in json.loads(files)),
    )
