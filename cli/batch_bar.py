"""The progress of a batch on stderr: one bar over all rows with the time that is left, messages above it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from ..host.embedded_door import NodeProgress
from .batch_pace import Pace
from .batch_rows import Row
from .journal_entry import KeptFile

_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {rows} [{elapsed}<{remaining}{postfix}]"
_SILENT = "{desc}: {percentage:3.0f}%|{bar}| {rows} [{elapsed}, no answer for {silence:.0f} s]"
"""While nothing answers there is no time left to estimate."""


class _Line(tqdm):  # type: ignore[misc]
    """A bar that may stand between two rows; what it counts in words are whole ones."""

    # No thread of tqdm's: `tick` redraws the bar, and where memory is short the start of a thread may never return.
    monitor_interval = 0
    whole: int | None = None
    silence = 0.0
    """Seconds since the last answer of the host; 0 while it answers."""
    silent_before = 0.0
    """Seconds of earlier silences. The time left is estimated from the others."""

    @property
    def format_dict(self) -> dict[str, Any]:
        known: dict[str, Any] = super().format_dict
        worked = known["elapsed"] - self.silent_before - self.silence
        rate = (self.n - self.initial) / worked if worked > 0 else None
        rows = f"{self.initial if self.whole is None else self.whole}/{self.total}"
        return {**known, "rate": rate, "rows": rows, "silence": self.silence}


class BatchBar:
    """Implements `Teller`. The time left is that of the rows that this process has seen end, on average.

    Rows that run count as far as they are: by their steps where they run in this process, by the time that those before
    them took otherwise.
    """

    def __init__(self, *, rows: int, ended: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._pace = clock, Pace()
        self._together = 0
        self._silent_since: float | None = None
        self._bar = _Line(total=rows, initial=ended, desc="batch", smoothing=0, bar_format=_FORMAT, file=sys.stderr)
        self._whole = ended

    def __enter__(self) -> BatchBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._together = 0
        self._bar.set_postfix_str("", refresh=False)
        self.tick()
        self._bar.close()

    @property
    def passed(self) -> float:
        """How many rows are over, with the parts of those that run."""
        return float(self._whole + self._together * self._pace.share(self._clock()))

    def runs(self, job: str, rows: int) -> None:
        self._pace.begin(job, self._clock())
        self._together = rows

    def done(self, row: Row, files: Sequence[KeptFile]) -> None:
        self._ended()

    def failed(self, row: Row, reason: str) -> None:
        self.note(f"line {row.line}: {reason}")
        self._ended()

    def note(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)

    def silent(self, silent: bool) -> None:
        if silent and self._silent_since is None:
            self._silent_since = self._clock()
            self._bar.bar_format = _SILENT
        elif not silent and self._silent_since is not None:
            self._bar.silent_before += self._clock() - self._silent_since
            self._silent_since, self._bar.silence, self._bar.bar_format = None, 0.0, _FORMAT
        self.tick()

    def show(self, progress: NodeProgress) -> None:
        """How far the node is that runs in this process."""
        self._pace.report(progress.node_id, progress.done, progress.total, self._clock())
        part = f" {progress.done}/{progress.total}" if progress.total > 1 else ""
        self._bar.set_postfix_str(f"{progress.node_id}{part}", refresh=False)
        self.tick()

    def tick(self) -> None:
        """Bring the time up to date."""
        self._bar.n, self._bar.whole = self.passed, self._whole
        if self._silent_since is not None:
            self._bar.silence = self._clock() - self._silent_since
        self._bar.refresh()

    def _ended(self) -> None:
        self._whole += 1
        self._together = max(0, self._together - 1)
        if not self._together:
            self._pace.end(self._clock())
        self.tick()
