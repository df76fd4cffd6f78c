"""Tables of a journal, and their version."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import TypeAlias

from .database import APPLICATION, Database, OtherJournalError
from .entry import COLUMNS, SEAL, RowEntry, columns_of, entry_of, seal_of

Execute: TypeAlias = Callable[..., sqlite3.Cursor]

_VERSION = 4
_TABLES = (
    "CREATE TABLE batch (workflow TEXT NOT NULL, seal TEXT NOT NULL)",
    "CREATE TABLE rows (hash TEXT PRIMARY KEY, line INTEGER, stem TEXT UNIQUE COLLATE NOCASE, "
    "state TEXT NOT NULL, prompt_id TEXT, attempts INTEGER NOT NULL DEFAULT 0, error TEXT, saves "
    "TEXT, files TEXT NOT NULL DEFAULT '[]', backend TEXT, seal TEXT NOT NULL)",
    "CREATE TABLE attempts (prompt_id TEXT NOT NULL, hash TEXT NOT NULL)",
)
"""`attempts` contains every prompt id ever used to post a row."""

_STORED = (*COLUMNS, SEAL)
_INSERT = (
    f"INSERT INTO rows ({', '.join(_STORED)}) VALUES ({', '.join(f':{name}' for name in _STORED)})"
)


def insert(execute: Execute, entry: RowEntry) -> None:
    """Write the row of an entry that is not in the table."""
    execute(_INSERT, columns_of(entry))


def read_or_create(database: Database, execute: Execute, workflow: str) -> list[RowEntry]:
    """Return the rows of this workflow's journal. Create the tables if empty.

    Raises JournalError, or ValueError for damaged rows.
    """
    tables = [*execute("SELECT sql, type FROM sqlite_master")]
    if not tables:
        _create(execute, workflow)
        return []
    (found,) = execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        raise database.damaged(found)
    _check_version(database, execute, tables)
    _check_workflow(database, execute, workflow)
    return _sealed_entries(database, execute)


def _check_workflow(database: Database, execute: Execute, workflow: str) -> None:
    before, *seal = execute("SELECT * FROM batch").fetchone() or (None,)
    if not isinstance(before, str) or seal != [seal_of([before])]:
        raise database.damaged("the digest of its workflow is missing or was changed")
    if before != workflow:
        raise OtherJournalError(
            f"{database.path} is the journal of another workflow, and the workflow of a batch "
            "cannot change: give another --out (or --journal), or the original workflow"
        )


def _sealed_entries(database: Database, execute: Execute) -> list[RowEntry]:
    entries = []
    for *row, seal in execute(f"SELECT {', '.join(_STORED)} FROM rows ORDER BY line").fetchall():
        if seal != seal_of(row):
            entry_of(row)  # raises for an invalid value, with a better message
            raise database.damaged(f"a value in the row of line {row[1]} was changed")
        entries.append(entry_of(row))
    return entries


def _create(execute: Execute, workflow: str) -> None:
    for statement in _TABLES:
        execute(statement)
    # SQLite takes no `?` parameters in a PRAGMA.
    execute(f"PRAGMA application_id = {APPLICATION}")
    execute(f"PRAGMA user_version = {_VERSION}")
    execute("INSERT INTO batch VALUES (?, ?)", (workflow, seal_of([workflow])))


def _check_version(
    database: Database, execute: Execute, tables: Sequence[Sequence[object]]
) -> None:
    """Raise JournalError for another version or other tables.

    Also for triggers, views and others.
    """
    (version,) = execute("PRAGMA user_version").fetchone()
    # SQLite creates an index without SQL for a PRIMARY KEY or UNIQUE column.
    created = {sql for sql, kind in tables if (kind, sql) != ("index", None)}
    if created == {*_TABLES}:
        if version != _VERSION:
            raise database.damaged(
                f"its version is {version}, and its tables are those of version {_VERSION}"
            )
        return
    if version != _VERSION:
        name = database.path.name
        raise OtherJournalError(
            f"{name} was written by another version of WanStream ({version}, this one reads "
            f"{_VERSION}): use that version, or move {name} and its copy away and run the same "
            "command again, which resumes with the videos in the folder\n(in "
            f"{database.path.parent})"
        )
    found = repr([*created.difference(_TABLES)] or "a table is missing")
    raise database.damaged(f"it was changed by another program ({found:.80})")
