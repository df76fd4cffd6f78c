"""Main loop of one backend of a batch: posts, polls, fetches, and writes every step to the journal before it is done.

Five rules guarantee that every row gets its files exactly once, whichever process is killed at any time:
* an id is in the journal before it is sent, and its outcome is polled before its rows are posted again;
* each attempt has its own id, so that the results of an earlier attempt are never mistaken for those of a later one;
* files are renamed after their sizes and digests are in the journal, and renaming is idempotent;
* rows are posted again only if the backend reports their id as unknown, or if another backend takes them from one that
  does not respond;
* only the runner that holds a row fetches and places its files, and only it gives the row away.

A row that continues another one is posted when that row is done, with the latent among its checked files.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ...host import LATENT
from ...schema import format_count
from ..arguments import StopRequest, error_text
from .backend import (
    BatchBackend,
    Ended,
    ForeignResponseError,
    Interrupted,
    JobFailed,
    Lost,
    NoSuchFileError,
    RefusedError,
    UnderWay,
    Unknown,
    UnreachableError,
    UnsuitableError,
)
from .continued import latent_name
from .job_queue import JobQueue, Submission
from .journal import DamagedJournalError, Entry, Journal, KeptFile
from .output_store import OutputStore, UnreadableFileError, file_names
from .progress import BatchBar
from .rows import BatchJob, Row

GRACE_SECONDS = 10.0
"""Time without a response after which other backends take the rows of a backend: longer than a short network fault.

The rows of a ComfyUI that restarts are lost in any case."""

MAX_FILES = 10_000
"""Maximum number of files in a row: ten minutes of single frames."""

_MAX_TRIES = 5
"""Maximum number of failed requests for a row while the same requests succeed for other rows."""

_FIRST_POLL, _LAST_POLL, _SLOWER = 0.05, 1.0, 1.5
_FIRST_RETRY, _LAST_RETRY = 0.5, 30.0


class BackendTimeoutError(OSError):
    """No backend has responded within the time limit."""


@dataclass(kw_only=True)
class _Setback:
    """Failed requests of one kind for a row. `succeeded` is the number of successful ones before the first failure."""

    succeeded: int
    tries: int = 0
    waited_s: float = 0.0

    def is_row_fault(self, succeeded: int) -> bool:
        """Return True if the row is to blame: it had enough tries, and requests for others have succeeded since."""
        return self.tries >= _MAX_TRIES and succeeded > self.succeeded


class UnpostedError(UnreachableError):
    """The backend responds, but not to a post."""


class UnsentError(UnreachableError):
    """The backend responds, but not with the files of one row."""

    def __init__(self, err: UnreachableError, setback: _Setback) -> None:
        super().__init__(str(err))
        self.setback = setback


@dataclass(kw_only=True)
class Runner:
    """Runs rows of the queue on one backend until all rows are finished. `sleep` waits for some seconds."""

    backend: BatchBackend
    queue: JobQueue
    store: OutputStore
    sleep: Callable[[float], None]
    clock: Callable[[], float] = time.monotonic
    timeout_s: float = 600.0
    """Seconds without a response of any backend after which the batch ends, those of requests that hang included."""
    reachable: bool = True
    """False if the backend did not respond at the start of the batch."""
    _posted: int = 0
    _fetched: int = 0
    _post_setbacks: dict[str, _Setback] = field(default_factory=dict)
    _fetch_setbacks: dict[str, _Setback] = field(default_factory=dict)
    _outage: bool = False
    """True if the last post got no response; responses to other requests do not end the outage."""
    _copy_failed: bool = False
    _away: bool = False
    """True if the backend has to be checked before it gets rows: it did not respond for some time."""
    _given: list[Submission] = field(default_factory=list)
    """Former submissions that the backend may still run, while other backends take their rows."""
    _given_noted: bool = False
    _silence: float = 0.0
    """Seconds since the last response, in requests without one and between them."""
    _answered_at: float = math.inf
    """Time of the last response or, without a request, of the last poll; infinite before and after `run`."""
    _collecting: bool = False
    """True while it downloads and checks files, which may take any time."""

    @property
    def _name(self) -> str:
        return self.backend.name

    @property
    def _journal(self) -> Journal:
        return self.queue.journal

    @property
    def _reporter(self) -> BatchBar:
        return self.queue.reporter

    @property
    def _stop(self) -> StopRequest:
        return self.queue.stop

    def run(self) -> None:
        """Run rows until no backend has any left.

        Raises BackendTimeoutError, or OSError if a file cannot be written; submissions stay posted in the journal.
        """
        poll, self._answered_at = _FIRST_POLL, self.clock()
        if not self.reachable:
            self._away, self._silence = True, _FIRST_RETRY
            self.queue.silence(self._name, 0.0)
        try:
            while self.queue.needs(self._name) and not self._stop.immediate:
                changed = self._try_poll_and_post()
                if changed is None:
                    if self._stop.requested:
                        return
                    continue
                poll = _FIRST_POLL if changed else min(poll * _SLOWER, _LAST_POLL)
                if not changed:
                    self.sleep(poll)
        except UnsuitableError as err:
            if not self.queue.exclude(self._name):
                raise
            self._reporter.note(f"{err}; it gets no more rows")
        finally:
            self._answered_at = math.inf
        if self._stop.immediate and not self.queue.aborted:
            self._cancel_all()

    def watch(self) -> None:
        """Report if a request has had no answer for some time. Called by the thread that shows the progress."""
        waited_s = 0.0 if self._collecting else self.clock() - self._answered_at
        self.queue.hangs(self._name, waited_s >= GRACE_SECONDS)

    def note_given(self) -> None:
        """Print the number of rows that were given to others and not ended here. Called at the end, by any thread."""
        count = sum(len(submission.rows) for submission in [*self._given])
        if count and self.backend.address is not None:  # others end with this process
            rows = format_count(count, "row")
            self._reporter.note(f"{self._name} may still compute {rows} that were given to other backends")

    def _try_poll_and_post(self) -> bool | None:
        """Poll and post; return True if anything has changed. Without a response, wait and return None."""
        began = self.clock()
        try:
            changed = self._poll_and_post()
        except UnsentError as err:
            if not self._stop.requested:
                if not err.setback.waited_s:
                    self._reporter.note(f"{err}; trying again")
                err.setback.waited_s = self._wait(err.setback.waited_s, self.timeout_s - err.setback.waited_s)
                self._silence = max(self._silence, _FIRST_RETRY) if self._outage else _FIRST_RETRY
            return None
        except (UnreachableError, ForeignResponseError) as err:
            if isinstance(err, ForeignResponseError) and len(self.queue.backends) == 1:
                raise
            if not self._stop.requested:
                self._wait_for_backend(err, self.clock() - max(began, self._answered_at))
            return None
        self._answered_at = self.clock()
        if self._silence and self._outage:
            # Only the next post shows if the outage is over, and without waiting rows it never comes: others have to
            # be able to give it theirs.
            self.queue.silence(self._name, self._silence, untried=True)
        elif self._silence:
            self.queue.silence(self._name, None)
            self._silence, self._given_noted = 0.0, False
        return changed

    def _poll_and_post(self) -> bool:
        """Poll all submissions, and post jobs until the window is full; return True if anything has changed."""
        self._report_running()
        if self._away:
            self._return()
        submissions = self.queue.submissions(self._name)
        changed = False
        unsent: UnsentError | None = None
        # Before the posts, so that a backend that takes no more workflows still delivers what it has.
        for submission in submissions:
            if self.queue.is_superfluous(self._name, submission):
                self.backend.withdraw(submission.prompt_id)
            try:
                changed |= self._poll(submission)
            except UnsentError as err:
                unsent = err
            self._answered_at = self.clock()  # after a long download, a short fault is still a short one
        while len(self.queue.submissions(self._name)) < self.backend.window:
            taken = self.queue.take(self.backend)
            if taken is None:
                break
            self._post(*taken)
            changed = True
        if unsent is not None and not changed:
            raise unsent
        return changed

    def _report_running(self) -> None:
        """Report the oldest submission, or none: the last one may be lost, or another backend may have taken it."""
        submissions = self.queue.submissions(self._name)
        job, rows = (submissions[0].prompt_id, len(submissions[0].rows)) if submissions else (None, 0)
        self._reporter.running(self._name, job, rows)

    def _latents_of(self, row: Row) -> list[tuple[Path, str]]:
        """Return the latent that a row continues, and its name for the workflow; none for a row that continues none.

        Raises RefusedError for a missing or changed latent.
        """
        if row.source is None:
            return []
        files = self._journal.entries[row.source].files
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
        return [(self.store.folder / latents[0].name, latent_name(self._journal.workflow, row.source))]

    def _post(self, submission: Submission, job: BatchJob) -> None:
        try:
            latents = [latent for row in job.rows for latent in self._latents_of(row)]
        except RefusedError as err:
            self._fail(submission, str(err), everywhere=True)
            return
        try:
            for path, name in latents:
                self.backend.provide(submission.prompt_id, path, name)
            self.backend.post(submission.prompt_id, job.prompt)
        except RefusedError as err:
            self._accepted(submission)
            self._fail(submission, str(err))
        except (UnreachableError, ForeignResponseError) as err:
            submission.post_error = str(err)
            self._outage = True
            for row in submission.rows:
                self._post_setbacks.setdefault(row.hash, _Setback(succeeded=self._posted)).tries += 1
            if isinstance(err, ForeignResponseError):
                raise
            raise UnpostedError(str(err)) from err
        else:
            self._accepted(submission)

    def _accepted(self, submission: Submission) -> None:
        """Record that the backend has responded to a post."""
        self._outage, self._answered_at = False, self.clock()
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
        elif isinstance(outcome, Lost):
            submission.begun = True  # and may have been the cause
            self._handle_lost(submission, outcome.reason)
            raise UnreachableError(f"{self._name} has lost a row: {outcome.reason}")  # no post before it is back
        elif isinstance(outcome, Interrupted) and submission.begun is None:
            self._handle_lost(submission)  # by an earlier command that could not record it
        elif isinstance(outcome, Interrupted):
            self._fail(submission, "interrupted on the server", everywhere=True)
        elif isinstance(outcome, JobFailed):
            self._fail(submission, outcome.reason)
        else:
            self._collect(submission, outcome)
        return True

    def _collect(self, submission: Submission, ended: Ended) -> None:
        """Fetch the files of every row; finished rows leave the submission, so that a retry continues with the rest."""
        self._collecting = True
        try:
            self._collect_rows(submission, ended)
        finally:
            self._answered_at, self._collecting = self.clock(), False
        self._end(submission)
        self._back_up()

    def _collect_rows(self, submission: Submission, ended: Ended) -> None:
        while submission.rows:
            row = submission.rows[0]
            try:
                kept = self._fetch(self._journal.entries[row.hash], ended)
            except (NoSuchFileError, UnreadableFileError) as err:
                self.queue.fail(row, str(err), on=self._name)
            except UnreachableError as err:
                self._handle_unsent(submission, err)
            else:
                self._journal.place(row.hash, kept)
                placed = self.store.place(kept)
                if placed is None:
                    names = ", ".join(file.name for file in kept)
                    raise FileNotFoundError(f"{names}: removed from {self.store.work_folder} after the check")
                self.queue.finish(row, on=self._name, files=placed)
                self._reporter.done(self._name)
                self._fetched += 1
            submission.rows.remove(row)
            self._fetch_setbacks.pop(row.hash, None)

    def _handle_unsent(self, submission: Submission, err: UnreachableError) -> None:
        """Fail the first row of a submission if only its files cannot be fetched, else raise UnsentError.

        The next try starts with the next row of the submission.
        """
        row = submission.rows[0]
        setback = self._fetch_setbacks.setdefault(row.hash, _Setback(succeeded=self._fetched))
        setback.tries += 1
        if setback.is_row_fault(self._fetched) or setback.waited_s >= self.timeout_s:
            reason = f"{err}; {setback.tries} requests in {setback.waited_s:.0f} s"
            self.queue.fail(row, reason, on=self._name)
            return
        submission.rows.append(submission.rows.pop(0))
        raise UnsentError(err, setback) from err

    def _back_up(self) -> None:
        """Back up the journal if the last copy is old. A failed copy is reported once; a damaged journal raises."""
        try:
            self._journal.back_up_if_old()
        except DamagedJournalError:
            raise
        except OSError as err:
            if not self._copy_failed:
                self._reporter.note(f"the journal was not copied: {error_text(err)}")
            self._copy_failed = True

    def _fetch(self, entry: Entry, ended: Ended) -> list[KeptFile]:
        """Fetch and check the files of a row; no part of them is left after an error."""
        saved = [file for file in ended.files if entry.saves is None or file.node_id in entry.saves]
        if not saved:
            raise NoSuchFileError("no file was saved: the workflow needs a node that saves in the output folder")
        assert entry.stem is not None, f"row {entry.hash} has failed before it could run"
        if len(saved) > MAX_FILES:
            raise NoSuchFileError(f"{len(saved)} files were saved, and a row may have {MAX_FILES}: save fewer")
        names = file_names(entry.stem, [file.filename for file in saved])
        if occupied := self.store.occupied(names, entry.files):
            raise UnreadableFileError(
                f"'{occupied[0]}' has appeared in {self.store.folder} since the batch began: move it away, and run the "
                "same command again"
            )
        parts = [self.store.part_path(name) for name in names]
        try:
            for file, part in zip(saved, parts, strict=True):
                self.backend.fetch(file, part)
            return [self.store.check_file(part) for part in parts]
        except (NoSuchFileError, UnreadableFileError, UnreachableError):
            self.store.remove_parts(parts)
            raise

    def _handle_lost(self, submission: Submission, reason: str = "") -> None:
        """Let the rows wait again: before the others, or after them if their post has failed. `reason`: of the loss."""
        self.backend.release(submission.prompt_id)
        faults: dict[str, str] = {}
        if submission.post_error:
            # A row fails only if posts of other rows succeed.
            for row in submission.rows:
                setback = self._post_setbacks[row.hash]
                if setback.is_row_fault(self._posted):
                    last = submission.post_error
                    faults[row.hash] = f"{setback.tries} posts of it failed; error of the last one: {last}"
        elif submission.begun is not False and not self.queue.stopping:
            faults = self.queue.lose(self._name, submission.rows, reason)
        for row in [row for row in submission.rows if row.hash in faults]:
            submission.rows.remove(row)
            self.queue.fail(row, faults[row.hash], on=self._name if submission.post_error else None)
        self.queue.wait_again(self._name, submission, first=not submission.post_error)

    def _fail(self, submission: Submission, reason: str, *, everywhere: bool = False) -> None:
        """Fail a submission of one row, `everywhere` or on this backend only; of several rows each is tried alone."""
        self.backend.release(submission.prompt_id)
        if len(submission.rows) == 1:
            self.queue.fail(submission.rows[0], reason, on=None if everywhere else self._name)
            self.queue.end(self._name, submission)
            return
        self._reporter.note(
            f"{len(submission.rows)} rows that ran together failed and are retried one by one: {reason}"
        )
        self.queue.wait_again(self._name, submission, first=True, apart=True)

    def _end(self, submission: Submission) -> None:
        self.queue.end(self._name, submission)
        self.backend.release(submission.prompt_id)

    def _cancel_all(self) -> None:
        """Cancel all submissions; if the backend does not respond, the next command polls them by their ids."""
        for submission in self.queue.submissions(self._name):
            try:
                self.backend.withdraw(submission.prompt_id)
                self.backend.interrupt(submission.prompt_id)
            except UnreachableError:
                return
            self.backend.release(submission.prompt_id)
            self.queue.cancel(self._name, submission)

    def _return(self) -> None:
        """Use a backend again that has responded: reclaim its rows, and end those that others have taken.

        Raises UnreachableError, or UnsuitableError if it cannot run the batch any more.
        """
        self.backend.check()
        while self._given:
            submission = self._given[0]
            if not self.queue.reclaim(self._name, submission):
                self.backend.withdraw(submission.prompt_id)
                self.backend.interrupt(submission.prompt_id)
                self.backend.release(submission.prompt_id)
            self._given.pop(0)
        self._away = False

    def _wait_for_backend(self, err: Exception, hung_s: float) -> None:
        """Wait before the next try, after a request that took `hung_s`. Other backends take the rows after some time.

        Raises BackendTimeoutError if no backend has responded for too long.
        """
        if not self._silence:
            self._reporter.note(f"{err}; trying again")
        self._silence += hung_s
        self.queue.silence(self._name, self._silence)
        total = self.queue.all_silent_for()
        if total >= self.timeout_s:
            raise BackendTimeoutError(
                f"{err}; gave up after {total:.0f} s: run the same command again to resume"
            ) from err
        if self._silence >= GRACE_SECONDS:
            self._give_back(only_unposted=isinstance(err, UnpostedError))
        left = self.timeout_s - total
        if self._silence < GRACE_SECONDS:  # the pauses double, and a try at this time gives the rows away
            left = min(left, GRACE_SECONDS - self._silence)
        self._silence = self._wait(self._silence, left)

    def _give_back(self, *, only_unposted: bool) -> None:
        given = self.queue.give_back(self._name, only_unposted=only_unposted)
        self._report_running()  # now, because the next poll is after a pause: the row would count twice until then
        if given and not self._given_noted:
            rows = format_count(sum(len(submission.rows) for submission in given), "row")
            self._reporter.note(
                f"{self._name} has not responded for {self._silence:.0f} s: other backends take its {rows}"
            )
            self._given_noted = True
        self._given += given
        self._away |= bool(given)

    def _wait(self, waited: float, left: float) -> float:
        """Wait before the next try, longer each time but not longer than `left`; return the total seconds."""
        self._reporter.unresponsive(self._name, True)
        delay = min(max(waited, _FIRST_RETRY), _LAST_RETRY, max(left, 0.1))
        self.sleep(delay)
        return waited + delay
