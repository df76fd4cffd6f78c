"""The progress of a run on stderr: a line per node, with a bar for a node that has steps."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm import tqdm  # type: ignore[import-untyped]

from ..host.embedded_door import NodeProgress

_NO_BAR = "{desc}: {elapsed}"


class ProgressBars:
    """Draws the line of the node that runs; the lines of finished nodes stay above it."""

    def __init__(self) -> None:
        self._node_id: str | None = None
        self._line: tqdm | None = None

    def show(self, progress: NodeProgress) -> None:
        """Bring the line of the node that reports up to date."""
        line = self._line_of(progress.node_id)
        if progress.total > 1:
            line.bar_format = None
            line.total, line.n = progress.total, progress.done
        line.refresh()

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _line_of(self, node_id: str) -> tqdm:
        if self._line is None or self._node_id != node_id:
            self._end()
            self._node_id = node_id
            self._line = tqdm(desc=node_id, unit="step", bar_format=_NO_BAR, file=sys.stderr)
        return self._line

    def _end(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = None
