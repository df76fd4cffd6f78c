"""Host events: progress, interrupts, and messages to users about the executing node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from ..telemetry import QueueItemPhases


class Executing(NamedTuple):
    """Queue item and node executing on a thread, or None outside one."""

    prompt_id: str | None = None
    node_id: str | None = None


class ProgressBar(Protocol):
    """Node progress bar."""

    def update(self, done: int, denoised: torch.Tensor | None = None) -> None:
        """Set the bar to `done`.

        `denoised` [B, C, T, h, w], normalised, is the current estimate of the final latents. A host
        with previews shows it. Raises the host's interrupt if the user has stopped the run and the
        host checks for interrupts here.
        """

    def advance(self, done: float) -> None:
        """Move the bar forward to a fraction of a step, on any thread.

        A host without such bars does nothing.
        """

    def close(self) -> None:
        """End the bar's console line, even if the bar is not complete."""


class Events(Protocol):
    """Host events.

    All methods except `should_stop` are called on the thread that executes the node.
    """

    def progress(self, total: int, node_id: str | None, *, unit: str | None = None) -> ProgressBar:
        """Return a new progress bar with `total` steps for `node_id` (None: the executing node).

        With a `unit`, the server console shows a line for it too.
        """

    def should_stop(self) -> bool:
        """Return True if the user wants the run to end.

        Has no side effect and may be called on any thread.
        """

    def is_stop(self, error: BaseException) -> bool:
        """Return True for the host's own interrupt, as raised by `raise_if_stopped`.

        Return False for an error.
        """

    def raise_if_stopped(self) -> None:
        """Raise the host's interrupt if the user wants the run to end, and clear the request."""

    def executing(self) -> Executing:
        """Return the queue item (ComfyUI's prompt id) and the node executing on this thread."""

    def ledger(self) -> QueueItemPhases:
        """Return the executing queue item's phase record. Outside one, a throw-away record."""

    def open_to_browsers(self, nodes: Iterable[type[Any]]) -> None:
        """Serve announced events to browsers, and check constants in queued workflows for `nodes`.

        The check is `plain_value`. Called once, before the host's server starts to listen.
        """

    def has_viewers(self) -> bool:
        """Return True if anybody who receives announced events is connected."""

    def running_graph(self) -> Mapping[str, Any]:
        """Return the running queue item's graph in API format.

        It is empty if the host keeps none.
        """

    def announce(self, event: str, payload: Mapping[str, Any]) -> None:
        """Send an event to all subscribers without waiting. `payload` is plain JSON."""
