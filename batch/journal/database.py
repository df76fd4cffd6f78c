"""SQLite file behind a journal: checked before it is trusted, with errors in the system's words."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NoReturn

from ..folder.disk import system_error
from ..folder.journal_header import application_of, header_fault, read_head

APPLICATION = 0x57535442  # "WSTB" identifies a journal among SQLite files

_OF_SYSTEM = (
    "locked",
    "unable to open",
    "disk I/O error",
    "disk is full",
    "readonly",
    "permission",
    "out of memory",
    "interrupted",
)
"""Parts of SQLite's messages about system errors. All others are about the file."""

_LOCKED_SECONDS = 60.0
"""Maximum wait for another program that reads or copies the journal."""


class JournalError(OSError):
    """The journal cannot be read or written, or belongs to another batch."""


class DamagedJournalError(JournalError):
    """The file was truncated, overwritten or changed."""


class OtherJournalError(JournalError):
    """The file is an intact journal for another workflow, or with an unknown version."""


class ForeignDatabaseError(OtherJournalError):
    """The file is another application's database, or a journal with a damaged application id."""


def copy_of(path: Path) -> Path:
    """Return the backup path for `Journal.back_up`."""
    return path.with_name(f"{path.name}.before")


class Database:
    """Open SQLite file of a journal, for several threads. Every method raises JournalError."""

    def __init__(self, path: Path) -> None:
        """Open or create the file."""
        self.path = path
        # The lock is reentrant: `Journal.back_up_if_old` holds the lock and calls `back_up`.
        self.lock = threading.RLock()
        self._check_header()
        self._connection = self._connect()

    def close(self) -> None:
        """Close the file."""
        # Not while another thread writes: a thread waiting for a hung server may still run when the
        # batch ends.
        with self.lock:
            self._connection.close()

    def back_up(self) -> None:
        """Write a copy next to the file, atomically.

        Raises OSError, or DamagedJournalError if the copy is not intact. The previous copy is kept
        then.
        """
        unfinished = self.path.with_name(f"{self.path.name}.copy")
        with self.lock:
            try:
                unfinished.unlink(missing_ok=True)
                # `with connection` alone only commits, and Windows does not rename an open file.
                with closing(sqlite3.connect(unfinished)) as copy:
                    self._connection.backup(copy)
                    # `backup` does not check pages: a damaged journal would replace the last
                    # good copy.
                    (found,) = copy.execute("PRAGMA integrity_check(1)").fetchone()
                if found != "ok":
                    raise self.damaged(
                        f"{found}; {copy_of(self.path).name} was not changed: run the same command "
                        "again to resume from it"
                    )
                unfinished.replace(copy_of(self.path))
            except sqlite3.Error as err:
                self._raise(err)
            finally:
                unfinished.unlink(missing_ok=True)

    def _connect(self) -> sqlite3.Connection:
        try:
            # The lock keeps the threads apart.
            # With isolation_level=None, sqlite3 begins no transaction by itself.
            connection = sqlite3.connect(
                self.path, isolation_level=None, timeout=_LOCKED_SECONDS, check_same_thread=False
            )
            # Before anything is read: an untrusted file may contain triggers, views and functions.
            connection.execute("PRAGMA trusted_schema = OFF")
        except sqlite3.Error as err:
            self._raise(err)
        return connection

    def _check_header(self) -> None:
        """Check the file head, after SQLite has rolled back an unfinished transaction.

        Raises JournalError.
        """
        rollback = Path(f"{self.path}-journal")
        try:
            if self.path.is_file() and rollback.is_file() and rollback.stat().st_size:
                with closing(self._connect()) as connection:
                    # SQLite rolls back at the first read. Opening the file is not enough.
                    connection.execute("SELECT * FROM sqlite_master").fetchall()
            head = read_head(self.path)
            nbytes = self.path.stat().st_size if self.path.is_file() else 0
            fault = header_fault(head, nbytes)
        except sqlite3.Error as err:
            self._raise(err)
        except JournalError:
            raise
        except OSError as err:
            raise JournalError(f"the journal {self.path} cannot be read: {err.strerror}") from err
        if application_of(head) not in {None, APPLICATION}:
            raise ForeignDatabaseError(
                f"{self.path} is a database, but not a journal of a batch: give another --journal"
            )
        if fault:
            raise self.damaged(fault)

    def damaged(self, fault: str) -> DamagedJournalError:
        """Return the error of a file with this fault."""
        return DamagedJournalError(f"the journal {self.path} is damaged: {fault}")

    def _raise(self, err: sqlite3.Error) -> NoReturn:
        """Raise the journal error for `err`, caused by the system error if SQLite hides one."""
        # Exactly this class for a malformed file or another file type. This and other classes for
        # the contents.
        if type(err) is sqlite3.DatabaseError or not any(text in str(err) for text in _OF_SYSTEM):
            raise self.damaged(str(err)) from err
        cause = system_error(err, self.path)
        raise JournalError(
            f"the journal {self.path} cannot be written: {cause.strerror}"
        ) from cause

    @contextmanager
    def transaction(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
        """Execute all statements inside the `with` or none."""
        try:
            # The connection's `with` commits or rolls back. It does not close the connection.
            with self.lock, self._connection:
                # Locks for writing at once: a later upgrade of the lock could fail.
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection.execute
        except sqlite3.Error as err:
            self._raise(err)
