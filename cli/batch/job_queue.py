"""Jobs of a batch that wait or are on a backend, shared by the runners of all backends.

Every row is in one place at a time: in a waiting job, or in a submission of one backend. The lock makes the moves
atomic, so that no row is lost or taken twice, and `over` is never true in between.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..arguments import StopRequest
from .backend import BatchBackend, UnsuitableError
from .journal import Journal, KeptFile, State
from .progress import BatchBar
from .rows import BatchJob, Planner, Row

MAX_LOSSES = 5
"""Maximum number of times a row may be lost while it runs: it may be the row that crashes the servers."""

MAX_FAILURES = 2
"""Maximum number of backends that a row is tried on: a backend may fail every row, for example without a GPU."""

MAX_UNENDED = 2
"""Number of commands that run a row in its order, if it does not end in them."""

MAX_STREAK = 3
"""Rows that a backend may fail in a row: one more than it has at a time, which one fault may fail together."""


@dataclass(kw_only=True, eq=False)
class Submission:
    """Rows that were posted under one id."""

    prompt_id: str
    rows: list[Row]
    begun: bool | None = None
    """True if it is running, False if it is queued; None: not seen on the backend yet."""
    post_error: str = ""
    """Error of a post without a response."""


@dataclass(frozen=True, kw_only=True)
class RowHistory:
    """Failures of one row: by the name of a backend, the number of losses while it ran there, and the last reason."""

    losses: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    def suits(self, name: str, alive: Iterable[str]) -> bool:
        """Return True unless one of the other backends has failed or lost the row less often than this one."""
        return all(self._cost(name) <= self._cost(other) for other in alive)

    def retry(self, name: str, alive: Iterable[str]) -> bool:
        """Return True if a row that has failed on this backend is to be tried on another one."""
        others = [other for other in alive if other not in {name, *self.reasons}]
        return bool(others) and len({name, *self.reasons}) < MAX_FAILURES

    def _cost(self, name: str) -> int:
        return self.losses.get(name, 0) + (name in self.reasons)


@dataclass(kw_only=True)
class Streak:
    """Rows that a backend has failed since it last finished one, and that no other one has failed."""

    reasons: dict[str, str] = field(default_factory=dict)
    """Reason by the hash of a row."""
    finished_by: str = ""
    """Another backend, which has finished one of them."""

    @property
    def is_long(self) -> bool:
        """Return True if the backend is to be suspected, and gets only rows that others have failed."""
        return len(self.reasons) >= MAX_STREAK


@dataclass(kw_only=True)
class JobQueue:
    """Jobs of a batch on these backends. All methods may be called by any thread."""

    journal: Journal
    planner: Planner
    reporter: BatchBar
    stop: StopRequest
    backends: Sequence[BatchBackend]
    max_failures: int | None = None
    """Number of failed rows after which no more rows are started; None: no limit."""
    failures: int = 0
    """Number of failed rows, except those that continue a failed row."""
    aborted: bool = False
    """True if an error has ended the batch."""
    made: Counter[str] = field(default_factory=Counter)
    """Rows that were finished since the start, by the name of the backend."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    _waiting: deque[BatchJob] = field(default_factory=deque)
    _held: dict[str, list[Submission]] = field(default_factory=dict)
    _losses: dict[str, Counter[str]] = field(default_factory=dict)
    _reasons: dict[str, dict[str, str]] = field(default_factory=dict)
    _streaks: dict[str, Streak] = field(default_factory=dict)
    _silences: dict[str, float | None] = field(default_factory=dict)
    """Seconds without a response by the name of each backend in use; None: it responds."""
    _untried: set[str] = field(default_factory=set)
    """Backends that respond, but whose last post had no response: they may take rows, and their silence goes on."""
    _hung: set[str] = field(default_factory=set)
    """Backends whose present request has had no response for some time: named by the bar, and nothing else yet."""

    def __post_init__(self) -> None:
        self._silences = dict.fromkeys((backend.name for backend in self.backends), None)
        self._held = {name: [] for name in self._silences}
        self._streaks = {name: Streak() for name in self._silences}

    def enter(self, rows: Iterable[Row]) -> None:
        """Add the waiting ones of these rows, and those that an earlier command has posted, to their backends.

        Posted rows of a backend that is not used any more wait again.
        """
        by_state: dict[State, list[Row]] = {state: [] for state in State}
        for row in rows:
            by_state[self.journal.entries[row.hash].state].append(row)
        self.failures = sum(not row.is_blocked for row in by_state[State.failed])
        posted: dict[str, list[Row]] = {}
        for row in by_state[State.posted]:
            posted.setdefault(self.journal.entries[row.hash].prompt_id or "", []).append(row)
        names = {backend.address: backend.name for backend in reversed(self.backends)}
        gone: dict[str, list[Row]] = {}
        ended: list[Row] = []
        for prompt_id, share in posted.items():
            address = self.journal.entries[share[0].hash].backend
            if address is None and self.backends[0].address is None:
                ended += share  # with the process that had them
                continue
            # Without an address the journal is an old one.
            name = names.get(address, self.backends[0].name if address is None else None)
            if name is None:
                gone.setdefault(str(address), []).extend(share)
            else:
                self._held[name].append(Submission(prompt_id=prompt_id, rows=share))
        self.journal.wait(row.hash for row in ended)
        for address, share in gone.items():
            self.journal.wait(row.hash for row in share)
            self.reporter.note(
                f"{_counted(share)} posted to {address}, which is not in this command: computed again elsewhere, while "
                f"{address} may still compute them"
            )
        again = [row for share in (ended, *gone.values()) for row in share]
        left = {row.hash for row in (*by_state[State.waiting], *again)}
        waiting = [row for row in rows if row.hash in left]
        # Those that have not ended twice come last: one may be the row that ends this process each time.
        waiting.sort(key=lambda row: self.journal.entries[row.hash].attempts >= MAX_UNENDED)
        self._waiting = deque(self.planner(waiting))

    @property
    def stopping(self) -> bool:
        """True if no more rows are to be started."""
        return self.stop.requested or (self.max_failures is not None and self.failures >= self.max_failures)

    @property
    def over(self) -> bool:
        """True if no backend has anything to do, now or later."""
        with self.lock:
            return self.aborted or not (any(self._held.values()) or (self._waiting and not self.stopping))

    def needs(self, name: str) -> bool:
        """Return True if the runner of this backend has to go on: others may give it rows, or finish their sources."""
        with self.lock:
            return not self.aborted and (bool(self._held[name]) or not (self.stopping or self.over))

    def submissions(self, name: str) -> list[Submission]:
        """Return the submissions of a backend, the oldest first."""
        with self.lock:
            return [*self._held[name]]

    def take(self, backend: BatchBackend) -> tuple[Submission, BatchJob] | None:
        """Move the first job that this backend may run to its submissions, and into the journal; None without one.

        Raises UnsuitableError for a backend that fails rows which another one finishes, when it has none.
        """
        with self.lock:
            streak = self._streaks[backend.name]
            if streak.is_long and streak.finished_by and not self._held[backend.name]:
                last = [*streak.reasons.values()][-1].partition("\n")[0]
                raise UnsuitableError(
                    f"{backend.name} failed {len(streak.reasons)} rows in a row, of which {streak.finished_by} has "
                    f"finished one: restart it, or leave it out of the next batch; its last error: {last}"
                )
            job = self._next_ready(backend.name) if self._may_take(backend.name) else None
            if job is None:
                return None
            submission = Submission(prompt_id=str(uuid.uuid4()), rows=list(job.rows))
            given = any(self.journal.entries[row.hash].state is State.posted for row in job.rows)
            self.journal.post(job.saves, submission.prompt_id, backend.address, elsewhere=given)
            self._held[backend.name].append(submission)
            return submission, job

    def is_superfluous(self, name: str, submission: Submission) -> bool:
        """Return True if a submission that has not begun is to be withdrawn: to stop, or for an idle backend."""
        with self.lock:
            idle = any(not self._held[other] for other in self._alive())
            return not submission.begun and (
                self.stopping or (idle and not self._waiting and submission.begun is False)
            )

    def finish(self, row: Row, *, on: str, files: Sequence[KeptFile] = ()) -> None:
        """Set a row to done by this backend. The files are renamed, and `files` have their stamps."""
        with self.lock:
            self.journal.finish(row.hash, files)
            self.made[on] += 1
            self._streaks[on] = Streak()
            for streak in self._streaks.values():
                if row.hash in streak.reasons:
                    streak.finished_by = on

    def end(self, name: str, submission: Submission) -> None:
        """Remove a submission whose rows are finished."""
        with self.lock:
            self._held[name].remove(submission)

    def cancel(self, name: str, submission: Submission) -> None:
        """Remove a submission; its rows wait for the next command."""
        with self.lock:
            self._held[name].remove(submission)
            self.journal.wait(row.hash for row in submission.rows)

    def wait_again(self, name: str, submission: Submission, *, first: bool, apart: bool = False) -> None:
        """Move the unfinished rows of a submission back to the waiting jobs, each one alone if `apart`."""
        with self.lock:
            self._held[name].remove(submission)
            self.journal.wait(row.hash for row in submission.rows)
            self._add([[row] for row in submission.rows] if apart else [submission.rows], first=first)

    def fail(self, row: Row, reason: str, *, on: str | None = None) -> None:
        """Set a row to failed; a row that has failed `on` one backend may wait for another one instead."""
        with self.lock:
            found = self._history(row)
            if on is not None and not self.stopping and found.retry(on, self._alive()):
                self._reasons.setdefault(row.hash, {})[on] = self._streaks[on].reasons[row.hash] = reason
                self.journal.wait([row.hash])
                self._add([[row]], first=True)
                self.reporter.note(f"{row} failed on {on} and is tried on another backend: {reason}")
                return
            for streak in self._streaks.values():
                streak.reasons.pop(row.hash, None)
            before = {name: text for name, text in found.reasons.items() if name != on}
            if before and on is not None:
                reason = merged_reasons({on: reason, **before})
            elif before:
                reason = f"{reason}; {merged_reasons(before)}"
            self.journal.fail(row.hash, reason)
            self.failures += 1
            self.reporter.failed(row, reason, on)

    def lose(self, name: str, rows: Iterable[Row], reason: str) -> dict[str, str]:
        """Count a loss of running rows on a backend for this reason, "" for an unknown one.

        Returns the faults of those that were lost too often, by hash.
        """
        with self.lock:
            faults = {}
            for row in rows:
                losses = self._losses.setdefault(row.hash, Counter())
                losses[name] += 1
                if losses.total() >= MAX_LOSSES:
                    faults[row.hash] = ": ".join(filter(None, [f"lost {MAX_LOSSES} times while running", reason]))
            return faults

    def silence(self, name: str, seconds: float | None, *, untried: bool = False) -> None:
        """Record for how long a backend has not responded; None: it responds. `untried`: only its posts did not."""
        with self.lock:
            if seconds is None and self._silences.get(name) is not None:
                self._streaks[name] = Streak()  # it may have been restarted
            self._silences[name] = seconds
            (self._untried.add if untried else self._untried.discard)(name)
            self._report_silence(name)

    def hangs(self, name: str, hangs: bool) -> None:
        """Record if the present request to a backend has had no response for some time."""
        with self.lock:
            if name in self._silences and hangs != (name in self._hung):
                (self._hung.add if hangs else self._hung.discard)(name)
                self._report_silence(name)

    def all_silent_for(self) -> float:
        """Return the seconds for which no backend has responded."""
        with self.lock:
            return min(seconds or 0.0 for seconds in self._silences.values())

    def give_back(self, name: str, *, only_unposted: bool = False) -> list[Submission]:
        """Let other backends take the rows of this one, if one of them responds; return its former submissions.

        In the journal the rows stay posted until they are taken. `only_unposted`: without those whose post had a
        response.
        """
        with self.lock:
            if not any(other != name for other in self._alive()):
                return []
            given = [each for each in self._held[name] if each.post_error or not only_unposted]
            self._held[name] = [each for each in self._held[name] if each not in given]
            self._add([submission.rows for submission in given], first=True)
            return given

    def reclaim(self, name: str, submission: Submission) -> bool:
        """Move a former submission back to its backend, without rows that others have taken; False if none is left."""
        with self.lock:
            waiting = {row.hash for job in self._waiting for row in job.rows}
            left = [row for row in submission.rows if row.hash in waiting and self._is_posted_as(row, submission)]
            if not left:
                return False
            hashes = {row.hash for row in left}
            self._waiting = deque(job for job in self._waiting if hashes.isdisjoint(row.hash for row in job.rows))
            submission.rows = left
            self._held[name].append(submission)
            return True

    def exclude(self, name: str) -> bool:
        """Use a backend no more, and move its rows to the others; False if there is no other one."""
        with self.lock:
            if len(self._silences) == 1:
                return False
            given, self._held[name] = self._held[name], []
            self._add([submission.rows for submission in given], first=True)
            del self._silences[name]
            self.reporter.excluded(name)
            return True

    def abort(self) -> None:
        """End the batch: submissions stay posted in the journal."""
        with self.lock:
            self.aborted = True

    def _alive(self) -> list[str]:
        return [name for name, seconds in self._silences.items() if seconds is None or name in self._untried]

    def _report_silence(self, name: str) -> None:
        self.reporter.unresponsive(name, name in self._hung or name not in self._alive())

    def _may_take(self, name: str) -> bool:
        """Return True if a backend may have another job: it may queue one if enough are left for those with fewer."""
        if self.stopping or self.aborted:
            return False
        held = len(self._held[name])
        fewer = sum(len(self._held[other]) < held for other in self._alive())
        return len(self._waiting) > fewer

    def _history(self, row: Row) -> RowHistory:
        return RowHistory(losses=self._losses.get(row.hash, {}), reasons=self._reasons.get(row.hash, {}))

    def _suits(self, name: str, row: Row) -> bool:
        """Return True if a backend may try this row.

        A suspected one tries only rows that others have failed: two suspected ones do not wait for each other then.
        """
        others = [other for other in self._alive() if other != name]
        if others and self._streaks[name].is_long and row.hash not in self._reasons:
            return False
        return self._history(row).suits(name, self._alive())

    def _is_posted_as(self, row: Row, submission: Submission) -> bool:
        entry = self.journal.entries[row.hash]
        return entry.state is State.posted and entry.prompt_id == submission.prompt_id

    def _add(self, shares: Iterable[Sequence[Row]], *, first: bool) -> None:
        jobs = [job for rows in shares for job in self.planner(rows)]
        if first:
            self._waiting.extendleft(reversed(jobs))
        else:
            self._waiting.extend(jobs)

    def _next_ready(self, name: str) -> BatchJob | None:
        """Remove and return the first waiting job that continues finished rows only, or none, and suits the backend.

        Rows that continue a failed one fail.
        """
        at = 0
        while at < len(self._waiting):
            job = self._waiting[at]
            states = {self.journal.entries[row.source].state for row in job.rows if row.source is not None}
            if State.failed in states:
                del self._waiting[at]
                self._fail_continuing(job)
                at = 0
            elif states <= {State.done} and all(self._suits(name, row) for row in job.rows):
                del self._waiting[at]
                return job
            else:
                at += 1
        return None

    def _fail_continuing(self, job: BatchJob) -> None:
        """Fail the rows of a job that continue a failed row, and plan the others again."""
        kept: list[Row] = []
        for row in job.rows:
            source = self.journal.entries[row.source] if row.source is not None else None
            if source is None or source.state is not State.failed:
                kept.append(row)
                continue
            # Not counted as failures, of which the user may allow only some: nothing was run.
            reason = f"not run: it continues '{row.continues}' (line {source.line}), which failed"
            self.journal.fail(row.hash, reason)
            self.reporter.failed(row, reason)
        if kept:
            self._add([kept], first=True)


def merged_reasons(reasons: Mapping[str, str]) -> str:
    """Return the reasons by the name of a backend as one text, which has equal reasons once."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"on {' and '.join(sorted(who))}: {reason}" for reason, who in names.items())


def _counted(rows: Sequence[Row]) -> str:
    if len(rows) == 1:
        return f"{rows[0]} was"
    return f"{rows[0]} and {len(rows) - 1} more were"
