"""Batch jobs, waiting or on a backend, shared by all runners.

Every row is in one place at a time: in a waiting job, or in one backend's submission. The lock
makes moves atomic, so no row is lost or taken twice, and `over` is never true in between.
"""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ..backend import BatchBackend
from ..errors import UnsuitableError
from ..journal.entry import KeptFile, State
from ..journal.journal import Journal
from ..opening import Tally
from ..progress import BatchBar
from ..rows.rows import BatchJob, Planner, Row
from .connection import FIRST_RETRY, Connection, Contact
from .failures import FailureLog
from .stop_request import StopRequest

MAX_UNENDED = 2
"""Commands that run a row in order. If it does not end in them, it comes last."""


@dataclass(kw_only=True, eq=False)
class Submission:
    """Rows posted under one id."""

    prompt_id: str
    rows: list[Row]
    begun: bool | None = None
    """True if it is running, False if it is queued; None: not seen on the backend yet."""
    post_error: str = ""
    """Error from a post without a response."""


class JobQueue:
    """A batch's jobs on these backends. All methods may be called by any thread.

    The `silent` ones have not responded at the start.
    """

    def __init__(
        self,
        *,
        journal: Journal,
        planner: Planner,
        reporter: BatchBar,
        stop: StopRequest,
        backends: Sequence[BatchBackend],
        tally: Tally | None = None,
        silent: Collection[str] = (),
    ) -> None:
        self.journal = journal
        self.reporter = reporter
        self.stop = stop
        self.backends = backends
        self.tally = tally or Tally()
        self._planner = planner
        # The lock is reentrant: `wait_again` holds the lock and calls `cancel`.
        self._lock = threading.RLock()
        self.aborted = False
        """True if an error has ended the batch."""
        self._waiting: deque[BatchJob] = deque()
        self._held: dict[str, list[Submission]] = {backend.name: [] for backend in backends}
        self._failures = FailureLog(self._held)
        self.connections = {name: Connection() for name in self._held}
        """Connections to the backends in use."""
        for name in silent:
            self.connections[name] = Connection(contact=Contact.away, silence_s=FIRST_RETRY)
        self._hung: set[str] = set()
        """Backends with no response to the present request for some time. The bar names them,
        and nothing else happens yet."""

    def enter(self, rows: Sequence[Row]) -> None:
        """Add the waiting rows, and give rows posted by an earlier command to their backends.

        Posted rows wait again if their backend is not used any more.
        """
        posted: dict[str, list[Row]] = {}
        for row in rows:
            entry = self.journal.entries[row.hash]
            if entry.state is State.posted:
                posted.setdefault(entry.prompt_id or "", []).append(row)
            elif entry.state is State.failed and not row.is_blocked:
                self.tally.failures += 1
        self._enter_posted(posted)
        waiting = [row for row in rows if self.journal.entries[row.hash].state is State.waiting]
        # Rows with two unended attempts come last: one may end this process each time.
        waiting.sort(key=lambda row: self.journal.entries[row.hash].attempts >= MAX_UNENDED)
        self._waiting = deque(self._planner(waiting))

    def _enter_posted(self, posted: Mapping[str, list[Row]]) -> None:
        """Give posted rows back to their backends, by their ids. Rows from unused backends wait."""
        gone: dict[str | None, list[Row]] = {}
        # Reversed, so that the first of several backends at one address counts.
        names = {backend.address: backend.name for backend in reversed(self.backends)}
        names.pop(None, None)  # their posted rows have ended with their process
        for prompt_id, rows in posted.items():
            address = self.journal.entries[rows[0].hash].backend
            name = names.get(address)
            if name is None:
                gone.setdefault(address, []).extend(rows)
            else:
                self._held[name].append(Submission(prompt_id=prompt_id, rows=rows))
        for address, rows in gone.items():
            self.journal.wait(row.hash for row in rows)
            if address is not None:  # else they have ended with their process
                self.reporter.note(
                    f"{_counted(rows)} posted to {address}, which is not in this command: computed "
                    f"again elsewhere, while {address} may still compute them"
                )

    @property
    def stopping(self) -> bool:
        """True if no more rows are to be started."""
        return self.stop.requested or self.tally.is_full

    @property
    def over(self) -> bool:
        """True if no backend has anything to do, now or later."""
        with self._lock:
            return self.aborted or not (
                any(self._held.values()) or (self._waiting and not self.stopping)
            )

    def needs(self, name: str) -> bool:
        """Return True if this backend's runner has to go on.

        Other backends may give rows to it, or finish the rows that waiting ones continue.
        """
        with self._lock:
            return not self.aborted and (bool(self._held[name]) or not (self.stopping or self.over))

    def submissions(self, name: str) -> list[Submission]:
        """Return a backend's submissions, oldest first."""
        with self._lock:
            return [*self._held[name]]

    def take(self, backend: BatchBackend) -> tuple[Submission, BatchJob] | None:
        """Take the first job for this backend, as a submission, and record it in the journal.

        None without one.

        Raises UnsuitableError for an idle backend that fails rows which another one finishes.
        """
        with self._lock:
            fault = self._failures.fault_of(backend.name)
            if fault and not self._held[backend.name]:
                raise UnsuitableError(fault)
            if not self._may_take(backend.name):
                return None
            job = self._next_ready(backend.name)
            if job is None:
                return None
            submission = Submission(prompt_id=str(uuid.uuid4()), rows=list(job.rows))
            given = any(self.journal.entries[row.hash].state is State.posted for row in job.rows)
            # In the journal before the post: a killed process may have sent it.
            self.journal.post(job.saves, submission.prompt_id, backend.address, elsewhere=given)
            self._held[backend.name].append(submission)
            return submission, job

    def is_superfluous(self, name: str, submission: Submission) -> bool:
        """Return True if a submission should be withdrawn before it begins.

        It is withdrawn to stop the batch, or for an idle backend.
        """
        with self._lock:
            idle = any(not self._held[other] for other in self._alive())
            return not submission.begun and (
                self.stopping or (idle and not self._waiting and submission.begun is False)
            )

    def finish(self, row: Row, *, on: str, files: Sequence[KeptFile]) -> None:
        """Set a row to done by this backend.

        The files are renamed, and `files` have their stamps.
        """
        with self._lock:
            self.journal.finish(row.hash, files)
            self.tally.made[on] += 1
            self._failures.finish(on, row.hash)

    def end(self, name: str, submission: Submission) -> None:
        """Remove a submission with finished rows."""
        with self._lock:
            self._held[name].remove(submission)

    def cancel(self, name: str, submission: Submission) -> None:
        """Remove a submission. The rows wait for the next command."""
        with self._lock:
            self._held[name].remove(submission)
            self.journal.wait(row.hash for row in submission.rows)

    def wait_again(
        self, name: str, submission: Submission, *, first: bool, apart: bool = False
    ) -> None:
        """Move a submission's unfinished rows back to the waiting jobs, each alone if `apart`."""
        with self._lock:
            self.cancel(name, submission)
            shares = [submission.rows]
            if apart:
                shares = [[row] for row in submission.rows]
            self._add(shares, first=first)

    def fail(self, row: Row, reason: str, *, on: str | None = None) -> None:
        """Set a row to failed.

        After a failure `on` one backend, it may wait for another one instead.
        """
        with self._lock:
            if (
                on is not None
                and not self.stopping
                and self._failures.retries(on, row.hash, self._alive())
            ):
                self._failures.fail(on, row.hash, reason)
                self.journal.wait([row.hash])
                self._add([[row]], first=True)
                self.reporter.note(
                    f"{row} failed on {on} and is tried on another backend: {reason}"
                )
                return
            reason = self._failures.fail_everywhere(on, row.hash, reason)
            self.journal.fail(row.hash, reason)
            self.tally.failures += 1
            self.reporter.failed(row, reason, on)

    def lose(self, name: str, rows: Iterable[Row], reason: str) -> dict[str, str]:
        """Count a loss of running rows on a backend for this reason, "" for an unknown one.

        Returns the faults of rows lost too often, by hash.
        """
        with self._lock:
            faults = {row.hash: self._failures.lose(name, row.hash, reason) for row in rows}
        return {digest: fault for digest, fault in faults.items() if fault}

    def answered(self, name: str) -> None:
        """Record that a backend has answered a whole poll."""
        with self._lock:
            connection = self.connections[name]
            if connection.contact is Contact.silent:
                self._failures.restart(name)
            if connection.contact is not Contact.responding:
                connection.answered()
                self._report_response(name)

    def unanswered(self, name: str, hung_s: float) -> None:
        """Record `hung_s` without a response to a request."""
        with self._lock:
            self.connections[name].unanswered(hung_s)
            self._report_response(name)

    def hang(self, name: str, hangs: bool) -> None:
        """Record if the present request to a backend has had no response for some time."""
        with self._lock:
            if name in self.connections and hangs != (name in self._hung):
                self._hung ^= {name}
                self._report_response(name)

    def all_silent_for(self) -> float:
        """Return the seconds for which no backend has responded."""
        with self._lock:
            return min(each.silence_s for each in self.connections.values())

    def give_back(self, name: str, *, only_unposted: bool = False) -> list[Submission]:
        """Let other backends take this one's rows, if one of them responds.

        Returns the former submissions.

        In the journal the rows stay posted until they are taken. `only_unposted`: only submissions
        without a response to their post.
        """
        with self._lock:
            if not any(other != name for other in self._alive()):
                return []
            given = [each for each in self._held[name] if each.post_error or not only_unposted]
            self._held[name] = [each for each in self._held[name] if each not in given]
            self._add([submission.rows for submission in given], first=True)
            return given

    def reclaim(self, name: str, submission: Submission) -> bool:
        """Move a former submission back to the backend, without rows taken by others.

        False if none is left.
        """
        with self._lock:
            waiting = {row.hash for row in chain.from_iterable(job.rows for job in self._waiting)}
            entries = self.journal.entries
            left = [
                row
                for row in submission.rows
                if row.hash in waiting
                and entries[row.hash].state is State.posted
                # If the id differs, another backend has had the row since, and the row waits again.
                and entries[row.hash].prompt_id == submission.prompt_id
            ]
            if not left:
                return False
            hashes = {row.hash for row in left}
            self._waiting = deque(
                job for job in self._waiting if hashes.isdisjoint(row.hash for row in job.rows)
            )
            submission.rows = left
            self._held[name].append(submission)
            return True

    def exclude(self, name: str) -> bool:
        """Use a backend no more, and move the rows to the others.

        False if there is no other one.
        """
        with self._lock:
            if len(self.connections) == 1:
                return False
            self._add([submission.rows for submission in self._held[name]], first=True)
            self._held[name] = []
            del self.connections[name]
            self.reporter.excluded(name)
            return True

    def abort(self) -> None:
        """End the batch. Submissions stay posted in the journal."""
        with self._lock:
            self.aborted = True

    def _alive(self) -> list[str]:
        """Return the names of backends that may take rows."""
        return [name for name, connection in self.connections.items() if connection.may_take]

    def _report_response(self, name: str) -> None:
        self.reporter.unresponsive(name, name in self._hung or not self.connections[name].may_take)

    def _may_take(self, name: str) -> bool:
        """Return True if a backend may have another job.

        It may queue one if enough are left for backends with fewer.
        """
        if self.stopping or self.aborted:
            return False
        held = len(self._held[name])
        fewer = sum(len(self._held[other]) < held for other in self._alive())
        return len(self._waiting) > fewer

    def _add(self, shares: Iterable[Sequence[Row]], *, first: bool) -> None:
        jobs = [*chain.from_iterable(map(self._planner, shares))]
        if first:
            # extendleft adds one item at a time and so reverses their order.
            self._waiting.extendleft(reversed(jobs))
        else:
            self._waiting.extend(jobs)

    def _next_ready(self, name: str) -> BatchJob | None:
        """Remove and return the first ready job for the backend.

        A ready job continues finished rows only, or no row. Rows that continue a failed one fail.
        """
        at = 0
        while at < len(self._waiting):
            job = self._waiting[at]
            states = {
                self.journal.entries[row.source].state for row in job.rows if row.source is not None
            }
            if State.failed in states:
                del self._waiting[at]
                self._fail_continuing(job)
                # From the start: the failed job may have been planned again, at the front.
                at = 0
            elif states <= {State.done} and all(
                self._failures.suits(name, row.hash, self._alive()) for row in job.rows
            ):
                del self._waiting[at]
                return job
            else:
                at += 1
        return None

    def _fail_continuing(self, job: BatchJob) -> None:
        """Fail a job's rows that continue a failed row, and plan the others again."""
        kept: list[Row] = []
        for row in job.rows:
            source = self.journal.entries.get(row.source or "")
            if source is None or source.state is not State.failed:
                kept.append(row)
                continue
            # Not counted as failures, because nothing was run. The user may limit their number.
            reason = f"not run: it continues '{row.continues}' (line {source.line}), which failed"
            self.journal.fail(row.hash, reason)
            self.reporter.failed(row, reason)
        if kept:
            self._add([kept], first=True)


def _counted(rows: Sequence[Row]) -> str:
    if len(rows) == 1:
        return f"{rows[0]} was"
    return f"{rows[0]} and {len(rows) - 1} more were"
