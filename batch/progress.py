"""Batch progress on stderr: one bar over all rows with an estimate of the time left."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from ..host.embedded import NodeProgress
from .rows.rows import Row

_MAX_FRACTION = 0.99
"""Limit of the estimate for a running job."""


_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {rows} [{elapsed}<{remaining}{postfix}]"
_SILENT = "{desc}: {percentage:3.0f}%|{bar}| {rows} [{elapsed}, no answer for {silence:.0f} s]"
"""Without a remaining time: there is no estimate while no backend responds."""

_MAX_NAMED = 2
"""Maximum number of silent backends to list by name."""


@dataclass(kw_only=True)
class _Progress:
    """Progress of one backend's running, or next, job."""

    job: str | None = None
    together: int = 0
    """Unfinished rows in the job."""
    begin: float = 0.0
    """Start of the job, later by the time without a response."""
    polled: float = 0.0
    """Time of the last poll, or of the last row's end."""
    duration: float = 0.0
    """Seconds for the previous job; 0 before the end of the first one."""
    steps: int = 1
    """Steps of the job's longest node."""
    reached: float = 0.0
    """Largest fraction of the job shown so far."""

    def passed(self, now: float) -> float:
        """Return the number of rows that count as finished, never decreasing during a job.

        It follows the reported steps. Without any, as from a server, it follows the previous job's
        duration.
        """
        if self.job is None:
            return 0.0
        if self.steps == 1 and self.duration:
            self.reached = max(self.reached, min((now - self.begin) / self.duration, _MAX_FRACTION))
        return self.together * self.reached


class BatchBar(tqdm):  # type: ignore[misc]
    """Batch output for the user, with a progress bar. All methods may be called by any thread.

    The remaining time uses the mean duration of rows finished by this process. Running rows count
    fractionally: by their steps or, on a server, by the duration of the previous job there.
    """

    # Forked processes share tqdm's own lock. It stays locked there if one of them is killed.
    _lock = threading.RLock()
    # Without tqdm's monitor thread: `refresh` redraws the bar, and when memory is short a thread
    # start may never return.
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
        # `super().__init__` draws the bar and needs all fields, so it is called last.
        self._clock = clock
        self._noun = noun
        self._ended = ended
        self._backends = backends
        self._progress: dict[str, _Progress] = {}
        self._silent: dict[str, float] = {}
        """Time of the last response, by silent backend."""
        self._silent_since: float | None = None
        """Time since which no backend responds."""
        self._silent_before = 0.0
        """Total seconds in which no backend responded earlier. The rate excludes them."""
        # `refresh` and `write` call back here with this lock. With another one, two threads could
        # wait for each other, one in `refresh` and one in a method here.
        self._exclusive = self.get_lock()
        super().__init__(
            total=rows,
            initial=ended,
            desc="batch",
            # 0: the mean over all rows, not over the last ones.
            smoothing=0,
            bar_format=_FORMAT,
            file=sys.stderr,
        )

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
                progress.passed(min(now, self._silent.get(name, now)))
                for name, progress in self._progress.items()
            )

    @property
    def format_dict(self) -> dict[str, Any]:
        """Values for the bar's format, with a fractional position and the number of whole rows."""
        known: dict[str, Any] = super().format_dict
        silence = 0.0
        if self._silent_since is not None:
            silence = self._clock() - self._silent_since
        worked = known["elapsed"] - self._silent_before - silence
        rate = (self.passed - self.initial) / worked if worked > 0 else None
        rows = f"{self._ended}/{self.total}"
        return {**known, "n": self.passed, "rate": rate, "rows": rows, "silence": silence}

    def running(self, backend: str, job: str | None, rows: int) -> None:
        """Report a backend's running, or next, job and the number of rows.

        Called at every poll. `job` is None if there is no job.
        """
        with self._exclusive:
            progress = self._progress.setdefault(backend, _Progress())
            progress.polled = self._clock()
            if job != progress.job:
                progress.job = job
                progress.begin = self._clock()
                progress.steps = 1
                progress.reached = 0.0
            progress.together = rows

    def done(self, backend: str | None = None) -> None:
        """Report a finished or failed row in a job on this backend."""
        with self._exclusive:
            self._ended += 1
            progress = self._progress.get(backend or "")
            if progress is not None:
                progress.polled = self._clock()
                progress.together = max(0, progress.together - 1)
                if not progress.together and progress.job is not None:
                    progress.duration = self._clock() - progress.begin
                    progress.job = None
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
        """Report that a backend has not responded since its last poll, or responds again."""
        with self._exclusive:
            now = self._clock()
            progress = self._progress.setdefault(backend, _Progress(polled=now))
            if unresponsive:
                self._silent.setdefault(backend, progress.polled)
            elif backend not in self._silent:
                return
            else:
                since = self._silent.pop(backend)
                progress.begin += now - max(since, progress.begin)
            if len(self._silent) == self._backends and self._silent_since is None:
                self._silent_since = max(self._silent.values())
                self.bar_format = _SILENT
            elif len(self._silent) < self._backends and self._silent_since is not None:
                self._silent_before += now - self._silent_since
                self._silent_since = None
                self.bar_format = _FORMAT
            if self._backends > 1:
                self.set_postfix_str(self._servers(), refresh=False)
            self.refresh()

    def excluded(self, backend: str) -> None:
        """Report that a backend gets no more rows."""
        with self._exclusive:
            self._backends -= 1
            self._progress.pop(backend, None)
            self._silent.pop(backend, None)
            self.set_postfix_str(self._servers() * (self._backends > 1), refresh=False)

    def show(self, progress: NodeProgress, *, backend: str) -> None:
        """Show the progress of this backend's running node.

        With only one backend, it shows the node's name too.
        """
        with self._exclusive:
            each = self._progress.get(backend)
            # A shorter node does not start again.
            if each is not None and progress.total >= max(each.steps, 2):
                each.steps = progress.total
                each.reached = max(each.reached, min(progress.done / progress.total, _MAX_FRACTION))
            if self._backends > 1:
                return  # redrawn by the waiting thread
            steps = f" {progress.done}/{progress.total}" * (progress.total > 1)
            self.set_postfix_str(f"{progress.node_id}{steps}", refresh=False)
            self.refresh()

    def _servers(self) -> str:
        """Return the number of responding backends, and the names of the others."""
        names = [*self._silent][:_MAX_NAMED]
        if len(self._silent) > _MAX_NAMED:
            names.append(f"{len(self._silent) - _MAX_NAMED} more")
        silent = f", no answer from {', '.join(names)}" * bool(names)
        return f"{self._backends - len(self._silent)} of {self._backends} {self._noun}{silent}"
