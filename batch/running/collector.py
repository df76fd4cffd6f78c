"""Collection of a backend's output files.

They are fetched, checked, and in the journal before they get their names.
"""

from __future__ import annotations

from ...schema.text import error_text
from ..backend import BatchBackend, Ended
from ..errors import NoSuchFileError, UnreachableError
from ..journal.database import DamagedJournalError
from ..journal.entry import KeptFile, RowEntry
from ..output_store import OutputStore, UnreadableFileError, file_names
from .failures import Setback, Setbacks
from .job_queue import JobQueue, Submission

MAX_FILES = 10_000
"""Most files per row: ten minutes of single frames."""


class UnsentError(UnreachableError):
    """The backend responds, but not with one row's files."""

    def __init__(self, err: UnreachableError, setback: Setback) -> None:
        super().__init__(str(err))
        self.setback = setback


class Collector:
    """Collects the files of rows that one backend has ended.

    `timeout_s` limits the tries for a row.
    """

    def __init__(
        self, backend: BatchBackend, queue: JobQueue, store: OutputStore, timeout_s: float
    ) -> None:
        self._backend = backend
        self._queue = queue
        self._store = store
        self._timeout_s = timeout_s
        self._setbacks = Setbacks()
        self._copy_failed = False

    def collect(self, submission: Submission, ended: Ended) -> None:
        """Collect the files of every row.

        Finished rows leave the submission, so a retry continues with the rest.

        Raises UnsentError if a row's files are to be fetched again.
        """
        while submission.rows:
            row = submission.rows[0]
            try:
                kept = self._fetch(self._queue.journal.entries[row.hash], ended)
            except (NoSuchFileError, UnreadableFileError) as err:
                self._queue.fail(row, str(err), on=self._backend.name)
            except UnreachableError as err:
                self._handle_unsent(submission, err)
            else:
                # In the journal first: after a crash, `place` can be repeated from it.
                self._queue.journal.place(row.hash, kept)
                placed = self._store.place(kept)
                if placed is None:
                    names = ", ".join(file.name for file in kept)
                    raise FileNotFoundError(
                        f"{names}: removed from {self._store.work_folder} after the check"
                    )
                self._queue.finish(row, on=self._backend.name, files=placed)
                self._queue.reporter.done(self._backend.name)
                self._setbacks.succeed([row.hash])
            submission.rows.remove(row)
            self._setbacks.forget(row.hash)

    def back_up(self) -> None:
        """Back up the journal if the last copy is old.

        A failed copy is reported once. A damaged journal raises.
        """
        try:
            self._queue.journal.back_up_if_old()
        # DamagedJournalError is an OSError, too, so it comes first.
        except DamagedJournalError:
            raise
        except OSError as err:
            if not self._copy_failed:
                self._queue.reporter.note(f"the journal was not copied: {error_text(err)}")
            self._copy_failed = True

    def _handle_unsent(self, submission: Submission, err: UnreachableError) -> None:
        """Fail the submission's first row if the backend responds, but not with the files.

        Otherwise raises UnsentError. The next try starts with the next row in the submission.
        """
        row = submission.rows[0]
        setback = self._setbacks.fail(row.hash)
        if self._setbacks.is_row_fault(setback) or setback.waited_s >= self._timeout_s:
            reason = f"{err}; {setback.tries} requests in {setback.waited_s:.0f} s"
            self._queue.fail(row, reason, on=self._backend.name)
            return
        submission.rows.append(submission.rows.pop(0))
        raise UnsentError(err, setback) from err

    def _fetch(self, entry: RowEntry, ended: Ended) -> list[KeptFile]:
        """Fetch and check a row's files. An error leaves no part behind."""
        saved = [file for file in ended.files if entry.saves is None or file.node_id in entry.saves]
        if not saved:
            raise NoSuchFileError(
                "no file was saved: the workflow needs a node that saves in the output folder"
            )
        assert entry.stem is not None, f"row {entry.hash} has failed before it could run"
        if len(saved) > MAX_FILES:
            raise NoSuchFileError(
                f"{len(saved)} files were saved, and a row may have {MAX_FILES}: save fewer"
            )
        names = file_names(entry.stem, [file.filename for file in saved])
        occupied = self._store.occupied(names, entry.files)
        if occupied:
            raise UnreadableFileError(
                f"'{occupied[0]}' has appeared in {self._store.folder} since the batch began: move "
                "it away, and run the same command again"
            )
        parts = [self._store.part_path(name) for name in names]
        try:
            for file, part in zip(saved, parts, strict=True):
                self._backend.fetch(file, part)
            return [self._store.check_file(part) for part in parts]
        # A full disk and Ctrl+C too: the next command fetches whole files again.
        except BaseException:
            for part in parts:
                part.unlink(missing_ok=True)
            raise
