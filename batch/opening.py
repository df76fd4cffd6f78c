"""Batch state on disk: the output folder and the journal, locked and restored."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from .errors import SetupError
from .folder.disk import system_error
from .folder.journal_header import may_be_journal, read_head
from .journal.database import copy_of
from .journal.entry import State
from .journal.journal import Journal, check_journal
from .output_store import OutputStore
from .resume import open_journal, resume
from .rows.rows import lines_by_reason, workflow_digest
from .spec import BatchSpec

JOURNAL = "journal.sqlite"


@dataclass(kw_only=True)
class Tally:
    """Numbers of ended rows."""

    made: Counter[str] = field(default_factory=Counter)
    """Rows finished since the start, by backend name."""
    failures: int = 0
    """Number of failed rows, except rows that continue a failed one."""
    max_failures: int | None = None
    """Number of failures after which no more rows start; None: no limit."""

    @property
    def is_full(self) -> bool:
        """True if no more rows are to be started."""
        return self.max_failures is not None and self.failures >= self.max_failures


@dataclass(frozen=True, kw_only=True)
class OpenBatch:
    """Batch whose folder and journal no other process uses."""

    spec: BatchSpec
    store: OutputStore
    journal: Journal
    notes: tuple[str, ...]
    """Notes for the user."""
    tally: Tally

    @property
    def done(self) -> int:
        """Number of finished rows."""
        return self._states[State.done]

    @property
    def ended(self) -> int:
        """Number of finished and failed rows."""
        return self._states[State.done] + self._states[State.failed]

    @property
    def _states(self) -> Counter[State]:
        return Counter(self.journal.entries[row.hash].state for row in self.spec.rows)

    def failures(self, *, whole: bool) -> list[tuple[str, int, str]]:
        """Return each failure reason with the number of rows and the lines.

        Without `whole`, a reason is only the first line.
        """
        faults = []
        for row in self.spec.rows:
            entry = self.journal.entries[row.hash]
            if entry.state is State.failed:
                reason = str(entry.error)
                faults.append((row.line, reason if whole else reason.partition("\n")[0]))
        return [
            (reason, count, lines) for reason, (count, lines) in lines_by_reason(faults).items()
        ]

    def done_by(self) -> tuple[dict[str, int], dict[str | None, int]]:
        """Return the finished rows by backend name, and by address for other backends."""
        entries = [self.journal.entries[row.hash] for row in self.spec.rows]
        by_address = Counter(entry.backend for entry in entries if entry.state is State.done)
        counts = {}
        for backend in self.spec.backends:
            # A backend without an address ends with this command.
            count = (
                by_address[backend.address] if backend.address else self.tally.made[backend.name]
            )
            by_address[backend.address] -= count
            counts[backend.name] = count
        # A unary `+` drops addresses with a count of 0 or less.
        return counts, dict(+by_address)

    def clean_up(self) -> list[tuple[Path, list[int] | None]]:
        """Back up the journal and remove leftovers.

        Return the remaining latents, and the lines of their rows.
        """
        self.journal.back_up()
        return self.store.remove_leftovers(self.journal.lines_left)


class LockedError(OSError):
    """Another process has the lock, or the lock file cannot be created."""


@contextmanager
def locked(path: Path, *, of: str) -> Iterator[None]:
    """Lock a file inside the `with`. The file is not removed.

    The lock is an exclusive SQLite transaction, the only portable file lock in the standard
    library. The kernel releases it however the process ends. It has a separate file next to the
    journal, so the journal stays readable.

    Raises LockedError at once if another process has the lock, or if the file cannot be created.
    """
    with ExitStack() as opened:
        try:
            # timeout=0: refuse a second command at once instead of waiting for the first.
            connection = opened.enter_context(
                closing(sqlite3.connect(path, isolation_level=None, timeout=0))
            )
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.Error as err:
            if "locked" in str(err):
                raise LockedError(
                    f"another `wanstream batch` is using {of}: wait for it, or stop it"
                ) from err
            cause = system_error(err, path)
            raise LockedError(f"{path} cannot be locked: {cause.strerror}") from cause
        yield


@contextmanager
def open_batch(
    spec: BatchSpec, folder: Path, journal: Path | None, *, max_failures: int | None
) -> Iterator[OpenBatch]:
    """Lock and open the output folder and the journal, and restore the state.

    Raises ValueError or OSError.

    Args:
        spec: rows, workflow and backends.
        folder: output folder; it must exist.
        journal: None for the journal in the folder.
        max_failures: see `Tally`.
    """
    store = OutputStore(folder)
    path = journal or folder / JOURNAL
    lock = path.with_name(f"{path.name}.lock")
    check_journal(path)
    # The lock file and the copy stay next to a journal, also next to a damaged one.
    was_journal = lock.exists() or copy_of(path).exists()
    if journal and not was_journal and not may_be_journal(read_head(path)):
        raise SetupError(
            f"--journal {path} is not a journal, and is not changed: give the name of a new file"
        )
    # Two locks: with --journal, another folder may use the same journal.
    with locked(store.work_folder / "lock", of=str(folder)), locked(lock, of=str(path)):
        start = partial(resume, store=store, rows=spec.rows, find_rows=spec.find_rows)
        workflow = workflow_digest(spec.workflow)
        opened, notes = open_journal(path, workflow=workflow, start=start, is_own=was_journal)
        with opened:
            notes += start(opened)
            # `start` may finish rows, and their latents are leftovers then.
            store.remove_leftovers(opened.lines_left)
            tally = Tally(max_failures=max_failures)
            yield OpenBatch(spec=spec, store=store, journal=opened, notes=tuple(notes), tally=tally)
