"""Progress of a batch on stderr: one bar over all rows with an estimate of the time left."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from ...host.embedded import NodeProgress
from .rows import Row

_MAX_FRACTION = 0.99
"""Limit of the estimate for a running job."""


_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {rows} [{elapsed}<{remaining}{postfix}]"
_SILENT = "{desc}: {percentage:3.0f}%|{bar}| {rows} [{elapsed}, no answer for {silence:.0f} s]"
"""Without a remaining time, which cannot be estimated while no backend responds."""

_MAX_NAMED = 2
"""Maximum number of silent backends that the bar lists by name."""


@dataclass(kw_only=True)
class _Progress:
    """Progress of the running, or next, job of one backend."""

    job: str | None = None
    together: int = 0
    """Rows of the job that are not finished."""
    begin: float = 0.0
    """Time of its begin, later by the time without a response meanwhile."""
    polled: float = 0.0
    """Time of the last poll, or of the end of the last row."""
    duration: float = 0.0
    """Seconds of the previous job; 0 before its end."""
    steps: int = 1
    """Steps of the longest node of the job."""
    reached: float = 0.0
    """Largest fraction of it shown so far."""

    def passed(self, now: float) -> float:
        """Return the number of rows that count as finished, never decreasing during a job.

        It is that of the reported steps; without any, as from a server, that of the previous job's duration.
        """
        if self.job is None:
            return 0.0
        if self.steps == 1 and self.duration:
            self.reached = max(self.reached, min((now - self.begin) / self.duration, _MAX_FRACTION))
        return self.together * self.reached


class BatchBar(tqdm):  # type: ignore[misc]
    """Output of a batch for the user, with a progress bar. All methods may be called by any thread.

    The remaining time uses the mean duration of rows finished by this process. The running rows count
    fractionally: by their steps or, on a server, by the duration of the previous job there.
    """

    # tqdm's own lock is shared with forked processes, in which it stays locked if one of them is killed.
    _lock = threading.RLock()
    # No monitor thread of tqdm: `refresh` redraws the bar, and when memory is short a thread start may never return.
    monitor_interval = 0

    def __init__(
        self,
        *,
        rows: int,
        ended: int,
        backends: int = 1,
        noun: str = "servers",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._noun = clock, noun
        self._ended, self._backends = ended, backends
        self._progress: dict[str, _Progress] = {}
        self._silent: dict[str, float] = {}
        """Time of the last response, by backends that do not respond."""
        self._silent_since: float | None = None
        """Time since which no backend responds."""
        self._silent_before = 0.0
        """Total seconds of earlier silences of all backends, which the rate excludes."""
        # The lock with which `refresh` and `write` call back here: with another one, two threads could wait for each
        # other, one in `refresh` and one in a method of this class.
        self._exclusive = self.get_lock()
        super().__init__(total=rows, initial=ended, desc="batch", smoothing=0, bar_format=_FORMAT, file=sys.stderr)

    def __exit__(self, *error: object) -> None:
        with self._exclusive:
            self._progress = {}
            self.set_postfix_str("", refresh=False)
            self.refresh()
            self.close()

    @property
    def passed(self) -> float:
        """Number of finished rows, including fractions of the running ones."""
        with self._exclusive:
            now = self._clock()
            return self._ended + sum(
                progress.passed(min(now, self._silent.get(name, now))) for name, progress in self._progress.items()
            )

    @property
    def format_dict(self) -> dict[str, Any]:
        """Values of the bar's format, with a fractional position and the number of whole rows."""
        known: dict[str, Any] = super().format_dict
        silence = 0.0 if self._silent_since is None else self._clock() - self._silent_since
        worked = known["elapsed"] - self._silent_before - silence
        rate = (self.passed - self.initial) / worked if worked > 0 else None
        rows = f"{self._ended}/{self.total}"
        return {**known, "n": self.passed, "rate": rate, "rows": rows, "silence": silence}

    def running(self, backend: str, job: str | None, rows: int) -> None:
        """Report the running, or next, job of a backend and its number of rows; called at every poll. None: no job."""
        with self._exclusive:
            progress = self._progress.setdefault(backend, _Progress())
            progress.polled = self._clock()
            if job != progress.job:
                progress.job, progress.begin = job, self._clock()
                progress.steps, progress.reached = 1, 0.0
            progress.together = rows

    def done(self, backend: str | None = None) -> None:
        """Report a finished or failed row, of a job of this backend."""
        with self._exclusive:
            self._ended += 1
            progress = self._progress.get(backend or "")
            if progress is not None:
                progress.polled = self._clock()
                progress.together = max(0, progress.together - 1)
                if not progress.together and progress.job is not None:
                    progress.duration, progress.job = self._clock() - progress.begin, None
            self.refresh()

    def failed(self, row: Row, reason: str, backend: str | None = None) -> None:
        """Report a failed row, with the reason."""
        with self._exclusive:
            self.note(f"{row}: {reason}")
            self.done(backend)

    def note(self, text: str) -> None:
        """Print any other message."""
        with self._exclusive:
            self.write(text, file=sys.stderr)

    def unresponsive(self, backend: str, unresponsive: bool) -> None:
        """Report that a backend has not responded since its last poll, or that it responds again."""
        with self._exclusive:
            now, progress = self._clock(), self._progress.get(backend)
            if unresponsive:
                self._silent.setdefault(backend, now if progress is None else progress.polled)
            elif (since := self._silent.pop(backend, None)) is None:
                return
            elif progress is not None:
                progress.begin += now - max(since, progress.begin)
            if len(self._silent) == self._backends and self._silent_since is None:
                self._silent_since, self.bar_format = max(self._silent.values()), _SILENT
            elif len(self._silent) < self._backends and self._silent_since is not None:
                self._silent_before += now - self._silent_since
                self._silent_since, self.bar_format = None, _FORMAT
            if self._backends > 1:
                self.set_postfix_str(self._servers(), refresh=False)
            self.refresh()

    def excluded(self, backend: str) -> None:
        """Report that a backend gets no more rows."""
        with self._exclusive:
            self._backends -= 1
            self._progress.pop(backend, None)
            self._silent.pop(backend, None)
            self.set_postfix_str(self._servers() if self._backends > 1 else "", refresh=False)

    def show(self, progress: NodeProgress, *, backend: str) -> None:
        """Show the progress of the node that is running on this backend; its name, if there is only one backend."""
        with self._exclusive:
            each = self._progress.get(backend)
            if each is not None and progress.total >= max(each.steps, 2):  # a shorter node does not start again
                each.steps = progress.total
                each.reached = max(each.reached, min(progress.done / progress.total, _MAX_FRACTION))
            if self._backends > 1:
                return  # redrawn by the thread that waits
            part = f" {progress.done}/{progress.total}" if progress.total > 1 else ""
            self.set_postfix_str(f"{progress.node_id}{part}", refresh=False)
            self.refresh()

    def _servers(self) -> str:
        """Return the number of responding backends, and the names of the others."""
        names = [*self._silent][:_MAX_NAMED]
        more = [f"{len(self._silent) - _MAX_NAMED} more"] if len(self._silent) > _MAX_NAMED else []
        silent = f", no answer from {', '.join([*names, *more])}" if names else ""
        return f"{self._backends - len(self._silent)} of {self._backends} {self._noun}{silent}"
