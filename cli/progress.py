"""The progress bars of a run, one per node, on stderr."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm import tqdm  # type: ignore[import-untyped]

from ..host.embedded_door import NodeProgress


class ProgressBars:
    """Draws the bar of the node that runs; the finished ones stay above it."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._node_id: str | None = None

    def show(self, progress: NodeProgress) -> None:
        """Bring the bar of the node that reports up to date."""
        if self._bar is None or self._node_id != progress.node_id:
            self._close()
            label = f"{progress.node_id} ({progress.class_type})"
            self._bar = tqdm(total=progress.total, desc=label, unit="step", file=sys.stderr)
            self._node_id = progress.node_id
        self._bar.total = progress.total
        self._bar.n = progress.done
        self._bar.refresh()

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None
