"""Main loop for one batch backend: posts, polls, fetches, and keeps the journal.

Every step is in the journal before it is done. Five rules guarantee that every row gets the files
exactly once, whichever process is killed at any time:

* an id is in the journal before it is sent, and is polled before the rows are posted again;
* each attempt has a new id, so results from an earlier attempt are never mistaken for later ones;
* files are renamed after their sizes and digests are in the journal, and renaming is idempotent;
* rows are posted again only if the backend reports their id as unknown, or if another backend takes
  them from a silent one;
* only the runner that holds a row fetches and places the files, and only this runner gives the row
  away.

A row that continues another one is posted when the other row is done, with the latent among the
checked files.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ...host import LATENT
from ...schema.text import format_count
from .. import errors
from ..backend import BatchBackend, Interrupted, JobFailed, Lost, UnderWay, Unknown
from ..output_store import OutputStore
from ..rows.continued import latent_name
from ..rows.rows import BatchJob, Row
from .collector import Collector, UnsentError
from .connection import FIRST_RETRY, Contact, RequestClock
from .failures import Setbacks
from .job_queue import JobQueue, Submission

GRACE_SECONDS = 10.0
"""Seconds without a response before other backends take the rows: longer than a short network
fault. A ComfyUI that restarts loses all rows in any case."""

_FIRST_POLL = 0.05
_LAST_POLL = 1.0
_SLOWER = 1.5
_LAST_RETRY = 30.0


class UnpostedError(errors.UnreachableError):
    """The backend responds, but not to a post."""


class Runner:
    """Runs rows from the queue on one backend until all rows are finished.

    Args:
        backend: computes the rows.
        queue: rows of the batch.
        store: output folder.
        sleep: waits for some seconds.
        clock: time in seconds.
        timeout_s: seconds without a response from any backend before the batch ends, including hung
            requests.
    """

    def __init__(
        self,
        *,
        backend: BatchBackend,
        queue: JobQueue,
        store: OutputStore,
        sleep: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
        timeout_s: float = 600.0,
    ) -> None:
        self._backend = backend
        self._name = backend.name
        self._queue = queue
        self._store = store
        self._sleep = sleep
        self._timeout_s = timeout_s
        self._connection = queue.connections[backend.name]
        self._requests = RequestClock(clock)
        self._collector = Collector(backend, queue, store, timeout_s)
        self._posts = Setbacks()
        self._given: list[Submission] = []
        """Former submissions that the backend may still run, while other backends take their
        rows."""

    def _submissions(self) -> list[Submission]:
        return self._queue.submissions(self._name)

    def run(self) -> None:
        """Run rows until no backend has any left.

        Raises BackendTimeoutError, or OSError if a file cannot be written. Submissions then stay
        posted in the journal.
        """
        poll = _FIRST_POLL
        # Starts the time without a response.
        self._requests.answered()
        if self._connection.contact is Contact.away:
            self._queue.reporter.unresponsive(self._name, True)
        try:
            while self._queue.needs(self._name) and not self._queue.stop.immediate:
                changed = self._try_poll_and_post()
                if changed is None:
                    if self._queue.stop.requested:
                        return
                    continue
                if changed:
                    poll = _FIRST_POLL
                else:
                    poll = min(poll * _SLOWER, _LAST_POLL)
                    self._sleep(poll)
        except errors.UnsuitableError as err:
            if not self._queue.exclude(self._name):
                raise
            self._queue.reporter.note(f"{err}; it gets no more rows")
        finally:
            self._requests.stop()
        if self._queue.stop.immediate and not self._queue.aborted:
            self._cancel_all()

    def watch(self) -> None:
        """Report if a request has had no answer for some time.

        Called by the thread that shows the progress.
        """
        self._queue.hang(self._name, self._requests.waited_s >= GRACE_SECONDS)

    def note_given(self) -> None:
        """Print how many rows were given to others and not ended here.

        Called at the end, by any thread.
        """
        # A copy: the runner's thread may still change it.
        count = sum(len(submission.rows) for submission in [*self._given])
        if count and self._backend.address is not None:  # others end with this process
            rows = format_count(count, "row")
            self._queue.reporter.note(
                f"{self._name} may still compute {rows} that were given to other backends"
            )

    def _try_poll_and_post(self) -> bool | None:
        """Poll and post. Return True if anything has changed.

        Without a response, wait and return None.
        """
        began = self._requests.now()
        try:
            changed = self._poll_and_post()
        except UnsentError as err:
            if not self._queue.stop.requested:
                self._wait_for_files(err)
            return None
        except (errors.UnreachableError, errors.ForeignResponseError) as err:
            if isinstance(err, errors.ForeignResponseError) and len(self._queue.backends) == 1:
                raise
            if not self._queue.stop.requested:
                self._wait_for_backend(err, self._requests.hung_s(began))
            return None
        self._requests.answered()
        self._queue.answered(self._name)
        return changed

    def _poll_and_post(self) -> bool:
        """Poll all submissions, and post jobs until the window is full.

        Return True if anything has changed.
        """
        self._report_running()
        if self._connection.contact is Contact.away:
            self._return()
        changed = False
        unsent: UnsentError | None = None
        # Before the posts: a backend may still deliver results when it takes no more workflows.
        for submission in self._submissions():
            if self._queue.is_superfluous(self._name, submission):
                self._backend.withdraw(submission.prompt_id)
            try:
                changed |= self._poll(submission)
            except UnsentError as err:
                unsent = err
            self._requests.answered()  # after a long download, a short fault is still a short one
        while len(self._submissions()) < self._backend.window:
            taken = self._queue.take(self._backend)
            if taken is None:
                break
            self._post(*taken)
            changed = True
        if unsent is not None and not changed:
            raise unsent
        return changed

    def _report_running(self) -> None:
        """Report the oldest submission, or none.

        The last one may be lost, or another backend may have taken it.
        """
        submissions = self._submissions()
        if submissions:
            self._queue.reporter.running(
                self._name, submissions[0].prompt_id, len(submissions[0].rows)
            )
        else:
            self._queue.reporter.running(self._name, None, 0)

    def _latent_of(self, row: Row) -> tuple[Path, str]:
        """Return the latent for a row that continues one, and the name in the workflow.

        Raises RefusedError for a missing or changed latent.
        """
        assert row.source is not None
        files = self._queue.journal.entries[row.source].files
        latents = [file for file in files if file.name.endswith(LATENT)]
        if len(latents) != 1 or not self._store.has(latents):
            found = ", ".join(file.name for file in latents) or "no latent"
            raise errors.RefusedError(
                f"it continues '{row.continues}', of whose files one latent is needed in "
                f"{self._store.folder}, not {found}: run the same command again, which makes "
                "missing files again"
            )
        if not self._store.is_intact(latents):
            raise errors.RefusedError(
                f"it continues '{row.continues}', whose {latents[0].name} in {self._store.folder} "
                "was changed after it was made: remove it, and run the same command again, which "
                "makes it again"
            )
        return self._store.folder / latents[0].name, latent_name(
            self._queue.journal.workflow, row.source
        )

    def _post(self, submission: Submission, job: BatchJob) -> None:
        try:
            latents = [self._latent_of(row) for row in job.rows if row.source is not None]
        except errors.RefusedError as err:
            self._fail(submission, str(err), everywhere=True)
            return
        try:
            for path, name in latents:
                self._backend.provide(submission.prompt_id, path, name)
            self._backend.post(submission.prompt_id, job.prompt)
        except errors.RefusedError as err:
            # A refusal is a response, too.
            self._accepted(submission)
            self._fail(submission, str(err))
        except (errors.UnreachableError, errors.ForeignResponseError) as err:
            submission.post_error = str(err)
            self._connection.post_unanswered = True
            for row in submission.rows:
                self._posts.fail(row.hash)
            if isinstance(err, errors.ForeignResponseError):
                raise
            raise UnpostedError(str(err)) from err
        else:
            self._accepted(submission)

    def _accepted(self, submission: Submission) -> None:
        """Record a response to a post."""
        self._connection.post_unanswered = False
        self._requests.answered()
        self._posts.succeed(row.hash for row in submission.rows)

    def _poll(self, submission: Submission) -> bool:
        """Poll a submission and handle the outcome. Return True if anything has changed."""
        outcome = self._backend.outcome(submission.prompt_id)
        if submission.post_error and not isinstance(outcome, Unknown):
            # The post had arrived, and only the response was lost.
            self._connection.post_unanswered = False
            submission.post_error = ""
        if isinstance(outcome, UnderWay):
            changed = outcome.begun != submission.begun
            submission.begun = outcome.begun
            return changed
        if isinstance(outcome, Unknown):
            self._handle_lost(submission)
        elif isinstance(outcome, Lost):
            submission.begun = True  # and may have been the cause
            self._handle_lost(submission, outcome.reason)
            # Raised: nothing may be posted before the backend is back.
            raise errors.UnreachableError(f"{self._name} has lost a row: {outcome.reason}")
        elif isinstance(outcome, Interrupted) and submission.begun is None:
            self._handle_lost(submission)  # by an earlier command that could not record it
        elif isinstance(outcome, Interrupted):
            self._fail(submission, "interrupted on the server", everywhere=True)
        elif isinstance(outcome, JobFailed):
            self._fail(submission, outcome.reason)
        else:
            self._requests.stop()  # while files are fetched and checked
            self._collector.collect(submission, outcome)
            self._requests.answered()
            self._queue.end(self._name, submission)
            self._backend.release(submission.prompt_id)
            self._collector.back_up()
        return True

    def _handle_lost(self, submission: Submission, reason: str = "") -> None:
        """Let the rows wait again: before the others, or after them if their post has failed.

        `reason` is the reason for the loss.
        """
        self._backend.release(submission.prompt_id)
        faults: dict[str, str] = {}
        if submission.post_error:
            # A row fails only if posts for other rows succeed.
            for row in submission.rows:
                setback = self._posts.of(row.hash)
                if self._posts.is_row_fault(setback):
                    last = submission.post_error
                    faults[row.hash] = (
                        f"{setback.tries} posts of it failed; error of the last one: {last}"
                    )
        elif submission.begun is not False and not self._queue.stopping:
            faults = self._queue.lose(self._name, submission.rows, reason)
        unposted_on = self._name if submission.post_error else None
        # The loop removes rows from `submission.rows`, so it iterates over a new list.
        for row in [row for row in submission.rows if row.hash in faults]:
            submission.rows.remove(row)
            self._queue.fail(row, faults[row.hash], on=unposted_on)
        self._queue.wait_again(self._name, submission, first=not submission.post_error)

    def _fail(self, submission: Submission, reason: str, *, everywhere: bool = False) -> None:
        """Fail a submission with one row, `everywhere` or on this backend only.

        With several rows, each is tried alone.
        """
        self._backend.release(submission.prompt_id)
        on = None if everywhere else self._name
        if len(submission.rows) == 1:
            self._queue.fail(submission.rows[0], reason, on=on)
            self._queue.end(self._name, submission)
            return
        self._queue.reporter.note(
            f"{len(submission.rows)} rows that ran together failed and are retried one by one: "
            f"{reason}"
        )
        self._queue.wait_again(self._name, submission, first=True, apart=True)

    def _cancel_all(self) -> None:
        """Cancel all submissions.

        If the backend does not respond, the next command polls them by their ids.
        """
        for submission in self._submissions():
            try:
                # Both requests, because a queued workflow may start in between.
                self._backend.withdraw(submission.prompt_id)
                self._backend.interrupt(submission.prompt_id)
            except errors.UnreachableError:
                return
            self._backend.release(submission.prompt_id)
            self._queue.cancel(self._name, submission)

    def _return(self) -> None:
        """Use a backend again after a response: reclaim the rows, and end the ones taken by others.

        Raises UnreachableError, or UnsuitableError if it cannot run the batch any more.
        """
        self._backend.check()
        while self._given:
            submission = self._given[0]
            if not self._queue.reclaim(self._name, submission):
                # Both requests, because a queued workflow may start in between.
                self._backend.withdraw(submission.prompt_id)
                self._backend.interrupt(submission.prompt_id)
                self._backend.release(submission.prompt_id)
            # Only now: an error above leaves it for the next try.
            self._given.pop(0)
        self._connection.check_passed()

    def _wait_for_backend(self, err: Exception, hung_s: float) -> None:
        """Wait before the next try, after `hung_s` in a request.

        Other backends take the rows after some time.

        Raises BackendTimeoutError if no backend has responded for too long.
        """
        if self._connection.contact is Contact.responding:
            self._queue.reporter.note(f"{err}; trying again")
        self._queue.unanswered(self._name, hung_s)
        total = self._queue.all_silent_for()
        if total >= self._timeout_s:
            raise errors.BackendTimeoutError(
                f"{err}; gave up after {total:.0f} s: run the same command again to resume"
            ) from err
        if self._connection.silence_s >= GRACE_SECONDS:
            self._give_back(only_unposted=isinstance(err, UnpostedError))
        left = self._timeout_s - total
        # The pauses double, so one could end long after the grace time. A try at this time gives
        # the rows away.
        if self._connection.silence_s < GRACE_SECONDS:
            left = min(left, GRACE_SECONDS - self._connection.silence_s)
        self._connection.silence_s += self._wait(self._connection.silence_s, left)

    def _wait_for_files(self, err: UnsentError) -> None:
        """Wait before the next try to fetch a row's files."""
        setback = err.setback
        if not setback.waited_s:
            self._queue.reporter.note(f"{err}; trying again")
        setback.waited_s += self._wait(setback.waited_s, self._timeout_s - setback.waited_s)
        self._connection.unsent()

    def _give_back(self, *, only_unposted: bool) -> None:
        given = self._queue.give_back(self._name, only_unposted=only_unposted)
        # Now, because the next poll is after a pause. Until then the row would count twice.
        self._report_running()
        self._given += given
        if not given:
            return
        if not self._connection.gave_rows:
            rows = format_count(sum(len(submission.rows) for submission in given), "row")
            self._queue.reporter.note(
                f"{self._name} has not responded for {self._connection.silence_s:.0f} s: other "
                f"backends take its {rows}"
            )
        self._connection.give_rows()

    def _wait(self, waited_s: float, left_s: float) -> float:
        """Wait before the next try, longer each time but not longer than `left_s`.

        Return the seconds.
        """
        self._queue.reporter.unresponsive(self._name, True)
        delay_s = min(max(waited_s, FIRST_RETRY), _LAST_RETRY, max(left_s, 0.1))
        self._sleep(delay_s)
        return delay_s
