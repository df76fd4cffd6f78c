"""Main loop of a batch: posts, polls, fetches, and writes every step to the journal before it is done.

Four rules guarantee that every row gets its files exactly once, whichever process is killed at any time:
* an id is in the journal before it is sent, and its outcome is polled before its rows are posted again;
* each attempt has its own id, so that the results of an earlier attempt are never mistaken for those of a later one;
* files are renamed after their sizes and digests are in the journal, and renaming is idempotent;
* rows are posted again only if the backend reports their id as unknown, not if it does not respond.

A row that continues another one is posted when that row is done, with the latent among its checked files.
"""

from __future__ import annotations

import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ...host import LATENT
from ..arguments import StopRequest
from .backend import (
    BatchBackend,
    Ended,
    Interrupted,
    JobFailed,
    NoSuchFileError,
    RefusedError,
    UnderWay,
    Unknown,
    UnreachableError,
)
from .continued import latent_name
from .journal import DamagedJournalError, Entry, Journal, KeptFile, State
from .output_store import OutputStore, UnreadableFileError, file_names
from .progress import BatchBar
from .rows import BatchJob, Planner, Row

MAX_LOSSES = 5
"""Maximum number of times a row may be lost while it runs: it may be the row that crashes the server."""

_MAX_TRIES = 5
"""Maximum number of failed requests for a row while the same requests succeed for other rows."""

_FIRST_POLL, _LAST_POLL, _SLOWER = 0.05, 1.0, 1.5
_FIRST_RETRY, _LAST_RETRY = 0.5, 30.0


class BackendTimeoutError(OSError):
    """The backend has not responded within the time limit."""


@dataclass(kw_only=True)
class _Setback:
    """Failed requests of one kind for a row. `succeeded` is the number of successful ones before the first failure."""

    succeeded: int
    tries: int = 0
    waited_s: float = 0.0

    def is_row_fault(self, succeeded: int) -> bool:
        """Return True if the row is to blame: it had enough tries, and requests for others have succeeded since."""
        return self.tries >= _MAX_TRIES and succeeded > self.succeeded


class UnsentError(UnreachableError):
    """The backend responds, but not with the files of one row."""

    def __init__(self, err: UnreachableError, setback: _Setback) -> None:
        super().__init__(str(err))
        self.setback = setback


@dataclass(kw_only=True)
class Submission:
    """Rows that were posted under one id."""

    prompt_id: str
    rows: list[Row]
    begun: bool | None = None
    """True if it is running, False if it is queued; None: not seen on the backend yet."""
    post_error: str = ""
    """Error of a post without a response."""


@dataclass(kw_only=True)
class Runner:
    """Runs rows until they are finished. `sleep` waits for some seconds."""

    backend: BatchBackend
    journal: Journal
    store: OutputStore
    planner: Planner
    reporter: BatchBar
    stop: StopRequest
    sleep: Callable[[float], None]
    max_failures: int | None = None
    """Number of failed rows after which no more rows are started; None: no limit."""
    timeout_s: float = 600.0
    """Seconds without a response after which the batch ends."""
    failures: int = 0
    """Number of failed rows, except those that continue a failed row."""
    _waiting: deque[BatchJob] = field(default_factory=deque)
    _submissions: list[Submission] = field(default_factory=list)
    _losses: Counter[str] = field(default_factory=Counter)
    _posted: int = 0
    _fetched: int = 0
    _post_setbacks: dict[str, _Setback] = field(default_factory=dict)
    _fetch_setbacks: dict[str, _Setback] = field(default_factory=dict)
    _outage: bool = False
    """True if the last post got no response; responses to other requests do not end the outage."""
    _copy_failed: bool = False

    def run(self, rows: Iterable[Row]) -> None:
        """Run the waiting ones of these rows, and finish those that an earlier command has posted.

        Raises BackendTimeoutError, or OSError if a file cannot be written; submissions stay posted in the journal.
        """
        by_state: dict[State, list[Row]] = {state: [] for state in State}
        for row in rows:
            by_state[self.journal.entries[row.hash].state].append(row)
        self.failures = sum(not row.is_blocked for row in by_state[State.failed])
        self._waiting = deque(self.planner(by_state[State.waiting]))
        posted: dict[str, list[Row]] = {}
        for row in by_state[State.posted]:
            posted.setdefault(self.journal.entries[row.hash].prompt_id or "", []).append(row)
        self._submissions = [Submission(prompt_id=prompt_id, rows=rows) for prompt_id, rows in posted.items()]
        poll, silence = _FIRST_POLL, 0.0
        while (self._submissions or (self._waiting and not self._stopping())) and not self.stop.immediate:
            try:
                changed = self._post_and_poll()
            except UnreachableError as err:
                if self.stop.requested:
                    return
                if isinstance(err, UnsentError):
                    err.setback.waited_s = self._wait_for_host(err, err.setback.waited_s)
                    silence = max(silence, _FIRST_RETRY) if self._outage else _FIRST_RETRY
                else:
                    silence = self._wait_for_host(err, silence)
                continue
            if silence and not self._outage:
                self.reporter.unresponsive(False)
                silence = 0.0
            poll = _FIRST_POLL if changed else min(poll * _SLOWER, _LAST_POLL)
            if self._submissions and not changed:
                self.sleep(poll)
        self._cancel_all()

    def _stopping(self) -> bool:
        """Return True if no more rows are to be started."""
        return self.stop.requested or (self.max_failures is not None and self.failures >= self.max_failures)

    def _post_and_poll(self) -> bool:
        """Post jobs until the window is full, and poll all submissions; return True if anything has changed."""
        changed = False
        while len(self._submissions) < self.backend.window and not self._stopping():
            job = self._take_ready()
            if job is None:
                break
            self._post(job)
            changed = True
        if self._submissions:
            self.reporter.running(self._submissions[0].prompt_id, len(self._submissions[0].rows))
        unsent: UnsentError | None = None
        for submission in list(self._submissions):
            if self._stopping() and not submission.begun:
                self.backend.withdraw(submission.prompt_id)
            try:
                changed |= self._poll(submission)
            except UnsentError as err:
                unsent = err
        if unsent is not None and not changed:
            raise unsent
        return changed

    def _take_ready(self) -> BatchJob | None:
        """Remove and return the first waiting job that continues finished rows only, or none; None without one.

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
            elif states <= {State.done}:
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
            self._waiting.extendleft(reversed(self.planner(kept)))

    def _latents_of(self, row: Row) -> list[tuple[Path, str]]:
        """Return the latent that a row continues, and its name for the workflow; none for a row that continues none.

        Raises RefusedError for a missing or changed latent.
        """
        if row.source is None:
            return []
        files = self.journal.entries[row.source].files
        latents = [file for file in files if file.name.endswith(LATENT)]
        if len(latents) != 1 or not self.store.has(latents):
            found = ", ".join(file.name for file in latents) or "no latent"
            raise RefusedError(
                f"it continues '{row.continues}', of whose files one latent is needed in {self.store.folder}, not "
                f"{found}: run the same command again, which makes missing files again"
            )
        if not self.store.is_intact(latents):
            raise RefusedError(
                f"it continues '{row.continues}', whose {latents[0].name} in {self.store.folder} was changed after it "
                "was made: remove it, and run the same command again, which makes it again"
            )
        return [(self.store.folder / latents[0].name, latent_name(self.journal.workflow, row.source))]

    def _post(self, job: BatchJob) -> None:
        submission = Submission(prompt_id=str(uuid.uuid4()), rows=list(job.rows))
        self.journal.post(job.saves, submission.prompt_id)
        self._submissions.append(submission)
        try:
            latents = [latent for row in job.rows for latent in self._latents_of(row)]
        except RefusedError as err:
            self._fail(submission, str(err))
            return
        try:
            for path, name in latents:
                self.backend.provide(submission.prompt_id, path, name)
            self.backend.post(submission.prompt_id, job.prompt)
        except RefusedError as err:
            self._accepted(submission)
            self._fail(submission, str(err))
        except UnreachableError as err:
            submission.post_error = str(err)
            self._outage = True
            for row in submission.rows:
                self._post_setbacks.setdefault(row.hash, _Setback(succeeded=self._posted)).tries += 1
            raise
        else:
            self._accepted(submission)

    def _accepted(self, submission: Submission) -> None:
        """Record that the backend has responded to a post."""
        self._outage = False
        self._posted += 1
        for row in submission.rows:
            self._post_setbacks.pop(row.hash, None)

    def _poll(self, submission: Submission) -> bool:
        """Poll a submission and handle its outcome; return True if anything has changed."""
        outcome = self.backend.outcome(submission.prompt_id)
        if submission.post_error and not isinstance(outcome, Unknown):
            self._outage, submission.post_error = False, ""  # the post had arrived, only its response was lost
        if isinstance(outcome, UnderWay):
            changed = outcome.begun != submission.begun
            submission.begun = outcome.begun
            return changed
        if isinstance(outcome, Unknown):
            self._handle_lost(submission)
        elif isinstance(outcome, Interrupted) and submission.begun is None:
            self._handle_lost(submission)  # by an earlier command that could not record it
        elif isinstance(outcome, Interrupted):
            self._fail(submission, "interrupted on the server")
        elif isinstance(outcome, JobFailed):
            self._fail(submission, outcome.reason)
        else:
            self._collect(submission, outcome)
        return True

    def _collect(self, submission: Submission, ended: Ended) -> None:
        """Fetch the files of every row; finished rows leave the submission, so that a retry continues with the rest."""
        while submission.rows:
            row = submission.rows[0]
            try:
                kept = self._fetch(self.journal.entries[row.hash], ended)
            except (NoSuchFileError, UnreadableFileError) as err:
                self.store.clear_parts()
                self._fail_row(row, str(err))
            except UnreachableError as err:
                self.store.clear_parts()
                self._handle_unsent(submission, err)
            else:
                self.journal.place(row.hash, kept)
                if not self.store.place(kept):
                    names = ", ".join(file.name for file in kept)
                    raise FileNotFoundError(f"{names}: removed from {self.store.work_folder} after the check")
                self.journal.finish(row.hash)
                self.reporter.done()
                self._fetched += 1
            submission.rows.remove(row)
            self._fetch_setbacks.pop(row.hash, None)
        self._end(submission)
        self._back_up()

    def _handle_unsent(self, submission: Submission, err: UnreachableError) -> None:
        """Fail the first row of a submission if only its files cannot be fetched, else raise UnsentError.

        The next try starts with the next row of the submission.
        """
        row = submission.rows[0]
        setback = self._fetch_setbacks.setdefault(row.hash, _Setback(succeeded=self._fetched))
        setback.tries += 1
        if setback.is_row_fault(self._fetched) or setback.waited_s >= self.timeout_s:
            self._fail_row(row, f"{err}; {setback.tries} requests in {setback.waited_s:.0f} s")
            return
        submission.rows.append(submission.rows.pop(0))
        raise UnsentError(err, setback) from err

    def _back_up(self) -> None:
        """Back up the journal if the last copy is old. A failed copy is reported once; a damaged journal raises."""
        try:
            self.journal.back_up_if_old()
        except DamagedJournalError:
            raise
        except OSError as err:
            if not self._copy_failed:
                self.reporter.note(f"the journal was not copied: {err}")
            self._copy_failed = True

    def _fetch(self, entry: Entry, ended: Ended) -> list[KeptFile]:
        """Fetch and check the files of a row."""
        saved = [file for file in ended.files if entry.saves is None or file.node_id in entry.saves]
        if not saved:
            raise NoSuchFileError("no file was saved: the workflow needs a node that saves in the output folder")
        assert entry.stem is not None, f"row {entry.hash} has failed before it could run"
        parts = [self.store.part_path(name) for name in file_names(entry.stem, [file.filename for file in saved])]
        for file, part in zip(saved, parts, strict=True):
            self.backend.fetch(file, part)
        return [self.store.check_file(part) for part in parts]

    def _handle_lost(self, submission: Submission) -> None:
        """Post the rows again: first, or after the others if their post has failed."""
        self._end(submission)
        self.journal.wait(row.hash for row in submission.rows)
        if self._stopping():
            return
        faults: dict[str, str] = {}
        if submission.post_error:
            # A row fails only if posts of other rows succeed.
            for row in submission.rows:
                setback = self._post_setbacks[row.hash]
                if setback.is_row_fault(self._posted):
                    last = submission.post_error
                    faults[row.hash] = f"{setback.tries} posts of it failed; error of the last one: {last}"
        elif submission.begun is not False:
            self._losses.update(row.hash for row in submission.rows)
            lost = [row.hash for row in submission.rows if self._losses[row.hash] >= MAX_LOSSES]
            faults = dict.fromkeys(lost, f"lost {MAX_LOSSES} times while running")
        for row in submission.rows:
            if row.hash in faults:
                self._fail_row(row, faults[row.hash])
        jobs = self.planner([row for row in submission.rows if row.hash not in faults])
        if submission.post_error:
            self._waiting.extend(jobs)
        else:
            self._waiting.extendleft(reversed(jobs))

    def _fail(self, submission: Submission, reason: str) -> None:
        """Fail a submission of one row; of several rows each is tried alone."""
        self._end(submission)
        if len(submission.rows) == 1:
            self._fail_row(submission.rows[0], reason)
            return
        self.journal.wait(row.hash for row in submission.rows)
        self.reporter.note(f"{len(submission.rows)} rows that ran together failed and are retried one by one: {reason}")
        self._waiting.extendleft(job for row in reversed(submission.rows) for job in self.planner([row]))

    def _fail_row(self, row: Row, reason: str) -> None:
        self.journal.fail(row.hash, reason)
        self.failures += 1
        self.reporter.failed(row, reason)

    def _end(self, submission: Submission) -> None:
        self._submissions.remove(submission)
        self.backend.release(submission.prompt_id)

    def _cancel_all(self) -> None:
        """Cancel all submissions; if the backend does not respond, the next command polls them by their ids."""
        for submission in list(self._submissions):
            try:
                self.backend.withdraw(submission.prompt_id)
                self.backend.interrupt(submission.prompt_id)
            except UnreachableError:
                return
            self._end(submission)
            self.journal.wait(row.hash for row in submission.rows)

    def _wait_for_host(self, err: UnreachableError, silence: float) -> float:
        """Wait before the next try, longer each time; return the total seconds of silence."""
        if silence >= self.timeout_s:
            raise BackendTimeoutError(
                f"{err}; gave up after {silence:.0f} s: run the same command again to resume"
            ) from err
        if not silence:
            self.reporter.note(f"{err}; trying again")
        self.reporter.unresponsive(True)
        delay = min(max(silence, _FIRST_RETRY), _LAST_RETRY, max(self.timeout_s - silence, 0.1))
        self.sleep(delay)
        return silence + delay
