"""Events in a run without ComfyUI: progress callbacks and a stop flag."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ...schema import Cancelled
from ...telemetry import QueueItemPhases
from ..events import Events, Executing, ProgressBar


@dataclass(frozen=True, kw_only=True)
class EmbeddedBar:
    """Progress bar that calls `report`, without previews."""

    report: Callable[[int, int], None]
    """Called with `done` and `total`."""
    total: int

    def update(self, done: int, denoised: torch.Tensor | None = None) -> None:
        """See `ProgressBar.update`."""
        self.report(done, self.total)

    def advance(self, done: float) -> None:
        """See `ProgressBar.advance`."""

    def close(self) -> None:
        """See `ProgressBar.close`."""


@dataclass(frozen=True, kw_only=True)
class NodeProgress:
    """Node progress: `done` out of `total`."""

    node_id: str
    class_type: str
    done: int
    total: int


OnProgress: TypeAlias = Callable[[NodeProgress], None]
"""Called with each node's progress."""


class EmbeddedEvents(Events):
    """Events for one run at a time."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._on_progress: OnProgress | None = None
        self._prompt_id: str | None = None
        self._node: tuple[str, str] | None = None
        self._ledger: QueueItemPhases | None = None

    def begin(self, on_progress: OnProgress | None) -> None:
        """Start reporting a new run."""
        self._stop.clear()
        self._on_progress = on_progress
        self._prompt_id = uuid.uuid4().hex

    def end(self) -> None:
        """Stop reporting the run."""
        self._on_progress = self._prompt_id = self._ledger = None

    @contextmanager
    def node(self, node_id: str, class_type: str) -> Iterator[None]:
        """Make this the executing node inside the `with`.

        Reports 0 of 1 at the start and 1 of 1 at the end.
        """
        self._node = (node_id, class_type)
        try:
            self._report(0, 1)
            yield
            self._report(1, 1)
        finally:
            self._node = None

    def stop(self) -> None:
        """Request the end of the run. May be called on any thread."""
        self._stop.set()

    def progress(self, total: int, node_id: str | None, *, unit: str | None = None) -> ProgressBar:
        return EmbeddedBar(report=self._report, total=total)

    def should_stop(self) -> bool:
        return self._stop.is_set()

    def is_stop(self, error: BaseException) -> bool:
        return isinstance(error, Cancelled)

    def raise_if_stopped(self) -> None:
        if self._stop.is_set():
            self._stop.clear()
            raise Cancelled("the run was stopped")

    def executing(self) -> Executing:
        if self._node is None:
            return Executing(self._prompt_id)
        return Executing(self._prompt_id, self._node[0])

    def ledger(self) -> QueueItemPhases:
        if self._prompt_id is None:
            return QueueItemPhases()
        self._ledger = self._ledger or QueueItemPhases()
        return self._ledger

    def open_to_browsers(self, nodes: Iterable[type[Any]]) -> None:
        return  # without browsers: the embedded validation checks the constants

    def has_viewers(self) -> bool:
        return False

    def running_graph(self) -> Mapping[str, Any]:
        return {}

    def announce(self, event: str, payload: Mapping[str, Any]) -> None:
        return  # nobody is connected

    def _report(self, done: int, total: int) -> None:
        if self._on_progress is not None and self._node is not None:
            node_id, class_type = self._node
            progress = NodeProgress(node_id=node_id, class_type=class_type, done=done, total=total)
            self._on_progress(progress)
