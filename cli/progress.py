"""Progress of a run on stderr: a line per node, with a bar for a node that has steps.

If stderr is not a terminal, as in a log, a few plain lines replace the bar, which would be written again and again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from tqdm import tqdm  # type: ignore[import-untyped]

from ..host.embedded import NodeProgress

_NO_BAR = "{desc}: {elapsed}"

LINE_EVERY_S = 10.0
"""Seconds between two plain lines of one node."""


def progress_of_run() -> ProgressBars | ProgressLines:
    """Return bars for a terminal, and plain lines for everything else."""
    return ProgressBars() if sys.stderr.isatty() else ProgressLines()


class ProgressLines:
    """Writes a plain line at the end of each node, and every `LINE_EVERY_S` during its steps."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._progress: NodeProgress | None = None
        self._shown: NodeProgress | None = None
        self._begin = self._written = 0.0

    def show(self, progress: NodeProgress) -> None:
        """Store the node's progress; write the line of the previous node, or this node's line if it is due."""
        now = self._clock()
        if self._progress is None or self._progress.node_id != progress.node_id:
            self._end()
            self._begin = self._written = now
            self._progress = progress
        elif progress.total > 1:  # not at a node's end, which is reported as 1 of 1: its last step is shown
            self._progress = progress
        if now - self._written >= LINE_EVERY_S:
            self._write(now)

    def __enter__(self) -> ProgressLines:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._progress is not self._shown:
            self._write(self._clock())
        self._progress = self._shown = None

    def _write(self, now: float) -> None:
        node = self._progress
        assert node is not None
        steps = f" {node.done}/{node.total} steps" if node.total > 1 else ""
        print(f"{node.node_id}:{steps} {now - self._begin:.1f} s", file=sys.stderr, flush=True)
        self._written, self._shown = now, node


class ProgressBars:
    """Draws a bar for the running node; the lines of finished nodes stay above it."""

    def __init__(self) -> None:
        self._node_id: str | None = None
        self._line: tqdm | None = None

    def show(self, progress: NodeProgress) -> None:
        """Update the line of the node."""
        if self._line is None or self._node_id != progress.node_id:
            self._end()
            self._node_id = progress.node_id
            self._line = tqdm(desc=progress.node_id, unit="step", bar_format=_NO_BAR, file=sys.stderr)
        if progress.total > 1:
            self._line.bar_format = None
            self._line.total, self._line.n = progress.total, progress.done
        self._line.refresh()

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = None
