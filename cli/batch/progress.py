"""Progress of a batch on stderr: one bar over all rows with an estimate of the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from ...host.embedded import NodeProgress
from .rows import Row

_MAX_FRACTION = 0.99
"""Limit of the estimate for a running job."""


_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {rows} [{elapsed}<{remaining}{postfix}]"
_SILENT = "{desc}: {percentage:3.0f}%|{bar}| {rows} [{elapsed}, no answer for {silence:.0f} s]"
"""Without a remaining time, which cannot be estimated while the backend does not respond."""


class BatchBar(tqdm):  # type: ignore[misc]
    """Output of a batch for the user, with a progress bar.

    The remaining time uses the mean duration of rows finished by this process. The running rows count
    fractionally: by their steps or, on a server, by the duration of the previous job.
    """

    # No monitor thread of tqdm: `refresh` redraws the bar, and when memory is short a thread start may never return.
    monitor_interval = 0

    def __init__(self, *, rows: int, ended: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._job: str | None = None
        self._ended, self._together = ended, 0
        """Finished rows, and rows of the running job."""
        self._begin = self._duration = 0.0
        """Start of the running job, and seconds of the previous one; 0 before its end."""
        self._steps, self._reached = 1, 0.0
        """Steps of the longest node of the job; largest fraction of it shown so far."""
        self._silent_since: float | None = None
        self._silent_before = 0.0
        """Total seconds of earlier silences, which the rate excludes."""
        super().__init__(total=rows, initial=ended, desc="batch", smoothing=0, bar_format=_FORMAT, file=sys.stderr)

    def __exit__(self, *error: object) -> None:
        self._together = 0
        self.set_postfix_str("", refresh=False)
        self.refresh()
        self.close()

    @property
    def passed(self) -> float:
        """Number of finished rows, including fractions of the running ones."""
        return float(self._ended + self._together * self._fraction())

    @property
    def format_dict(self) -> dict[str, Any]:
        """Values of the bar's format, with a fractional position and the number of whole rows."""
        known: dict[str, Any] = super().format_dict
        silence = 0.0 if self._silent_since is None else self._clock() - self._silent_since
        worked = known["elapsed"] - self._silent_before - silence
        rate = (self.passed - self.initial) / worked if worked > 0 else None
        rows = f"{self._ended}/{self.total}"
        return {**known, "n": self.passed, "rate": rate, "rows": rows, "silence": silence}

    def running(self, job: str, rows: int) -> None:
        """Report the running, or next, job and its number of rows; called at every poll."""
        if job != self._job:
            self._job, self._begin = job, self._clock()
            self._steps, self._reached = 1, 0.0
        self._together = rows

    def done(self) -> None:
        """Report a finished or failed row."""
        self._ended += 1
        self._together = max(0, self._together - 1)
        if not self._together and self._job is not None:
            self._duration, self._job = self._clock() - self._begin, None
        self.refresh()

    def failed(self, row: Row, reason: str) -> None:
        """Report a failed row, with the reason."""
        self.note(f"{row}: {reason}")
        self.done()

    def note(self, text: str) -> None:
        """Print any other message."""
        tqdm.write(text, file=sys.stderr)

    def unresponsive(self, unresponsive: bool) -> None:
        """Report that the backend does not respond, or that it responds again."""
        if unresponsive and self._silent_since is None:
            self._silent_since, self.bar_format = self._clock(), _SILENT
        elif not unresponsive and self._silent_since is not None:
            self._silent_before += self._clock() - self._silent_since
            self._silent_since, self.bar_format = None, _FORMAT
        self.refresh()

    def show(self, progress: NodeProgress) -> None:
        """Show the progress of the node that is running in this process."""
        if progress.total >= max(self._steps, 2):  # a shorter node that follows does not start again
            self._steps = progress.total
            self._reached = max(self._reached, min(progress.done / progress.total, _MAX_FRACTION))
        part = f" {progress.done}/{progress.total}" if progress.total > 1 else ""
        self.set_postfix_str(f"{progress.node_id}{part}", refresh=False)
        self.refresh()

    def _fraction(self) -> float:
        """Return the finished fraction of the running job, 0 to 1, never decreasing; 0 without a job.

        It is that of the reported steps; without any, as from a server, that of the previous job's duration.
        """
        if self._job is None:
            return 0.0
        if self._steps == 1 and self._duration:
            self._reached = min((self._clock() - self._begin) / self._duration, _MAX_FRACTION)
        return self._reached
