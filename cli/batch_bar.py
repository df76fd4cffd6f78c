"""The progress of a batch on stderr: one bar over all rows with the time that is left, messages above it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType

from tqdm import tqdm  # type: ignore[import-untyped]

from ..host.embedded_door import NodeProgress
from .batch_rows import Row
from .journal import KeptFile


class BatchBar:
    """Implements `Teller`. The time left is that of the rows that this process has seen end, on average."""

    def __init__(self, *, rows: int, ended: int) -> None:
        self._bar = tqdm(total=rows, initial=ended, desc="batch", unit="row", smoothing=0, file=sys.stderr)

    def __enter__(self) -> BatchBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.set_postfix_str("", refresh=False)
        self._bar.close()

    def done(self, row: Row, files: Sequence[KeptFile]) -> None:
        self._bar.update()

    def failed(self, row: Row, reason: str) -> None:
        self.note(f"line {row.line}: {reason}")
        self._bar.update()

    def note(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)

    def show(self, progress: NodeProgress) -> None:
        """How far the node is that runs in this process."""
        part = f" {progress.done}/{progress.total}" if progress.total > 1 else ""
        self._bar.set_postfix_str(f"{progress.node_id}{part}")

    def tick(self) -> None:
        """Bring the time up to date."""
        self._bar.refresh()
