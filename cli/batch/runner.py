"""The loop of a batch: posts, polls, fetches, and writes every step into the journal before it takes it.

That every row ends up with its files once, whoever is killed when, rests on four rules:
* an id is in the journal before the host can know it, and a host is asked by that id before anything is posted again;
* each attempt has an id of its own, so what an earlier attempt left behind is never taken for a later one;
* files get their names after the journal knows their sizes and digests, and giving them again does no harm;
* only what the host says it does not know is posted again; no answer is no reason.
"""

from __future__ import annotations

import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..stop_request import StopRequest
from .backends.base import (
    BatchBackend,
    Ended,
    Interrupted,
    JobFailed,
    MadeFile,
    NoSuchFileError,
    RefusedError,
    UnderWay,
    Unknown,
    UnreachableError,
)
from .jobs import BatchJob, Planner
from .journal import DamagedJournalError, Journal
from .journal_entry import KeptFile
from .media_check import UnreadableFileError
from .output_store import OutputStore, file_names
from .rows import Row

MOST_LOSSES = 5
"""So often may a row be lost while it runs: one that takes the server down with it must not do so for ever."""

_MOST_TRIES = 5
"""So often may one request for a row fail while the same request succeeds for other rows."""

_FIRST_POLL, _LAST_POLL, _SLOWER = 0.05, 1.0, 1.5
_FIRST_RETRY, _LAST_RETRY = 0.5, 30.0


class BackendTimeoutError(OSError):
    """The host has not answered for too long."""


class UnsentError(UnreachableError):
    """The host answers, but does not send the files of one row; `waited_s` seconds were waited for these so far."""

    def __init__(self, err: UnreachableError, row: Row, waited_s: float) -> None:
        super().__init__(str(err))
        self.row, self.waited_s = row, waited_s


class BatchReporter(Protocol):
    """Tells the user how the batch goes on."""

    def runs(self, job: str, rows: int) -> None:
        """So many rows are what runs now, or next, under this id."""

    def done(self, row: Row, files: Sequence[KeptFile]) -> None:
        """The row's files have their names."""

    def failed(self, row: Row, reason: str) -> None:
        """The row has come to nothing."""

    def silent(self, silent: bool) -> None:
        """Say that the host does not answer, or that it answers again."""

    def note(self, text: str) -> None:
        """Something else that the user should know."""


@dataclass(kw_only=True)
class Submission:
    """Rows that were posted under one id. `begun` None: not seen on the host yet. `unanswered`: what its post met."""

    prompt_id: str
    rows: list[Row]
    saves: Mapping[str, frozenset[str] | None]
    begun: bool | None = None
    unanswered: str = ""


@dataclass(kw_only=True)
class _Setback:
    """Failed requests of one kind for a row. `succeeded`: the requests for other rows before the first of them."""

    succeeded: int
    tries: int = 0
    waited_s: float = 0.0

    def is_of_the_row(self, succeeded: int) -> bool:
        """Return True if it is the row that fails: it was tried often enough, and others have succeeded meanwhile."""
        return self.tries >= _MOST_TRIES and succeeded > self.succeeded


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When to give up: after how many failed rows (None: never), after how many seconds without an answer."""

    failures: int | None = None
    timeout_s: float = 600.0


@dataclass(kw_only=True)
class Runner:
    """Runs rows to their end. `sleep` waits for some seconds; `failures` counts the rows that came to nothing."""

    host: BatchBackend
    journal: Journal
    shelf: OutputStore
    planner: Planner
    teller: BatchReporter
    stop: StopRequest
    limits: Limits
    sleep: Callable[[float], None]
    failures: int = 0
    _waiting: deque[BatchJob] = field(default_factory=deque)
    _flights: list[Submission] = field(default_factory=list)
    _losses: Counter[str] = field(default_factory=Counter)
    _posted: int = 0
    _fetched: int = 0
    _unposted: dict[str, _Setback] = field(default_factory=dict)
    _unsent: dict[str, _Setback] = field(default_factory=dict)
    _outage: bool = False
    """The last post was not answered. That the host answers questions is no end of it."""
    _copy_failed: bool = False

    def run(self, rows: Sequence[Row], flights: Iterable[Submission]) -> None:
        """Take care of the rows that wait and of what was posted before.

        Raises GaveUpError, or OSError where nothing can be written; what is under way stays so in the journal.
        """
        self._flights = list(flights)
        self._waiting = deque(self.planner(rows))
        poll, silence = _FIRST_POLL, 0.0
        while (self._flights or (self._waiting and not self._closing())) and not self.stop.at_once:
            try:
                moved = self._turn()
            except UnreachableError as err:
                if self.stop.soon:
                    return
                if isinstance(err, UnsentError):
                    waited = self._wait_for_host(err, err.waited_s) - err.waited_s
                    self._unsent[err.row.hash].waited_s += waited
                    silence = max(silence, _FIRST_RETRY) if self._outage else _FIRST_RETRY
                else:
                    silence = self._wait_for_host(err, silence)
                continue
            if silence and not self._outage:
                self.teller.silent(False)
                silence = 0.0
            poll = _FIRST_POLL if moved else min(poll * _SLOWER, _LAST_POLL)
            if self._flights and not moved:
                self.sleep(poll)
        self._abandon()

    def _closing(self) -> bool:
        """Whether nothing more is begun."""
        return self.stop.soon or (self.limits.failures is not None and self.failures >= self.limits.failures)

    def _turn(self) -> bool:
        """Post what there is room for and look at all that was posted; whether anything has changed."""
        moved = False
        while self._waiting and len(self._flights) < self.host.window and not self._closing():
            self._post(self._waiting.popleft())
            moved = True
        if self._flights:
            self.teller.runs(self._flights[0].prompt_id, len(self._flights[0].rows))
        unsent: UnsentError | None = None
        for flight in list(self._flights):
            if self._closing() and not flight.begun:
                self.host.withdraw(flight.prompt_id)
            try:
                moved |= self._look(flight)
            except UnsentError as err:
                unsent = err
        if unsent is not None and not moved:
            raise unsent
        return moved

    def _post(self, job: BatchJob) -> None:
        flight = Submission(prompt_id=str(uuid.uuid4()), rows=list(job.rows), saves=job.saves)
        self.journal.post(job.saves, flight.prompt_id)
        self._flights.append(flight)
        try:
            self.host.post(flight.prompt_id, job.prompt)
        except RefusedError as err:
            self._taken(flight)
            self._fail(flight, str(err))
        except UnreachableError as err:
            flight.unanswered = str(err)
            self._outage = True
            for row in flight.rows:
                self._unposted.setdefault(row.hash, _Setback(succeeded=self._posted)).tries += 1
            raise
        else:
            self._taken(flight)

    def _taken(self, flight: Submission) -> None:
        """Note that the host has answered a post."""
        self._outage = False
        self._posted += 1
        for row in flight.rows:
            self._unposted.pop(row.hash, None)

    def _look(self, flight: Submission) -> bool:
        """Act on what has become of a flight; whether anything has."""
        outcome = self.host.outcome(flight.prompt_id)
        if flight.unanswered and not isinstance(outcome, Unknown):
            self._outage, flight.unanswered = False, ""  # The post has arrived: only its answer has not.
        if isinstance(outcome, UnderWay):
            changed = outcome.begun != flight.begun
            flight.begun = outcome.begun
            return changed
        if isinstance(outcome, Unknown):
            self._lost(flight)
        elif isinstance(outcome, Interrupted) and flight.begun is None:
            self._lost(flight)  # By a client that was killed before it could write that down.
        elif isinstance(outcome, Interrupted):
            self._fail(flight, "interrupted on the server")
        elif isinstance(outcome, JobFailed):
            self._fail(flight, outcome.reason)
        else:
            self._collect(flight, outcome)
        return True

    def _collect(self, flight: Submission, ended: Ended) -> None:
        """Fetch the files of every row; after an interruption it goes on with the row that was interrupted."""
        while flight.rows:
            row = flight.rows[0]
            nodes = flight.saves[row.hash]
            made = [file for file in ended.files if nodes is None or file.node_id in nodes]
            try:
                kept = self._fetch(row, made)
            except (NoSuchFileError, UnreadableFileError) as err:
                self.shelf.clear()
                self._fail_row(row, str(err))
            except UnreachableError as err:
                self.shelf.clear()
                self._not_sent(flight, err)
            else:
                self.journal.place(row.hash, kept)
                if not self.shelf.place(kept):
                    names = ", ".join(file.name for file in kept)
                    raise FileNotFoundError(f"{names}: removed from {self.shelf.workshop} after it was checked")
                self.journal.finish(row.hash)
                self.teller.done(row, kept)
                self._fetched += 1
            flight.rows.remove(row)
            self._unsent.pop(row.hash, None)
        self._end(flight)
        self._back_up()

    def _not_sent(self, flight: Submission, err: UnreachableError) -> None:
        """Fail the first row of a flight if its files do not come while others' do, or raise UnsentError.

        The next try begins with the next row of the flight.
        """
        row = flight.rows[0]
        setback = self._unsent.setdefault(row.hash, _Setback(succeeded=self._fetched))
        setback.tries += 1
        if setback.is_of_the_row(self._fetched) or setback.waited_s >= self.limits.timeout_s:
            self._fail_row(row, f"{err}; asked {setback.tries} times in {setback.waited_s:.0f} s")
            return
        flight.rows.append(flight.rows.pop(0))
        raise UnsentError(err, row, setback.waited_s) from err

    def _back_up(self) -> None:
        """Copy the journal once in a while. A batch goes on without a copy, but not with a damaged journal."""
        if not self.journal.copy_is_old:
            return
        try:
            self.journal.back_up()
        except DamagedJournalError:
            raise
        except OSError as err:
            if not self._copy_failed:
                self.teller.note(f"the journal was not copied: {err}")
            self._copy_failed = True

    def _fetch(self, row: Row, made: Sequence[MadeFile]) -> list[KeptFile]:
        if not made:
            raise NoSuchFileError("no file was saved: the workflow needs a node that saves in the output folder")
        stem = self.journal.stem(row.hash)
        names = file_names(stem, [file.filename for file in made])
        for file, name in zip(made, names, strict=True):
            self.host.fetch(file, self.shelf.part(name))
        return [self.shelf.seal(name) for name in names]

    def _lost(self, flight: Submission) -> None:
        self._end(flight)
        self.journal.wait(row.hash for row in flight.rows)
        if self._closing():
            return
        if flight.unanswered:
            self._never_arrived(flight)
            return
        if flight.begun is not False:
            self._losses.update(row.hash for row in flight.rows)
        lost = [row for row in flight.rows if self._losses[row.hash] >= MOST_LOSSES]
        for row in lost:
            self._fail_row(row, f"lost by the host {MOST_LOSSES} times")
        self._waiting.extendleft(reversed(self.planner([row for row in flight.rows if row not in lost])))

    def _never_arrived(self, flight: Submission) -> None:
        """Post the rows again, after the others: an error of the host costs no row unless it takes other rows."""
        bad = [row for row in flight.rows if self._unposted[row.hash].is_of_the_row(self._posted)]
        for row in bad:
            tries = self._unposted.pop(row.hash).tries
            self._fail_row(row, f"not taken by the host {tries} times; at the last post: {flight.unanswered}")
        self._waiting.extend(self.planner([row for row in flight.rows if row not in bad]))

    def _fail(self, flight: Submission, reason: str) -> None:
        """One row fails; of several that were posted together each is tried alone."""
        self._end(flight)
        if len(flight.rows) == 1:
            self._fail_row(flight.rows[0], reason)
            return
        self.journal.wait(row.hash for row in flight.rows)
        self.teller.note(f"{len(flight.rows)} rows that ran together failed and are tried one by one: {reason}")
        self._waiting.extendleft(job for row in reversed(flight.rows) for job in self.planner([row]))

    def _fail_row(self, row: Row, reason: str) -> None:
        self.journal.fail(row.hash, reason)
        self.failures += 1
        self.teller.failed(row, reason)

    def _end(self, flight: Submission) -> None:
        self._flights.remove(flight)
        self.host.forget(flight.prompt_id)

    def _abandon(self) -> None:
        """Leave nothing behind on the host; what does not answer is asked by its id in the next run."""
        for flight in list(self._flights):
            try:
                self.host.withdraw(flight.prompt_id)
                self.host.interrupt(flight.prompt_id)
            except UnreachableError:
                return
            self._end(flight)
            self.journal.wait(row.hash for row in flight.rows)

    def _wait_for_host(self, err: UnreachableError, silence: float) -> float:
        """Wait before the next try, longer each time; the seconds of silence so far."""
        if silence >= self.limits.timeout_s:
            raise BackendTimeoutError(
                f"{err}; given up after {silence:.0f} s: the same command goes on from here"
            ) from err
        if not silence:
            self.teller.note(f"{err}; trying again")
        self.teller.silent(True)
        delay = min(max(silence, _FIRST_RETRY), _LAST_RETRY, max(self.limits.timeout_s - silence, 0.1))
        self.sleep(delay)
        return silence + delay
