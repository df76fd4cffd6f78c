"""ComfyUI events: progress, interrupt, and messages to browsers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import comfy.model_management
from comfy_execution.utils import get_executing_context

from ....telemetry import PhaseRegistry, QueueItemPhases
from ...events import Events, Executing, ProgressBar
from .. import versions
from .progress import NodeBar
from .prompt_values import PromptValues
from .server_events import ServerEvents


class ComfyEvents(Events):
    """Events for the executing node in ComfyUI.

    Args:
        listed_model: see `PromptValues`.
    """

    def __init__(self, listed_model: Callable[[str, Sequence[object]], str]) -> None:
        self._listed_model = listed_model
        self._ledgers = PhaseRegistry()
        self._server: ServerEvents | None = None

    def progress(self, total: int, node_id: str | None, *, unit: str | None = None) -> ProgressBar:
        return NodeBar(total, node_id, unit)

    def should_stop(self) -> bool:
        stop: bool = comfy.model_management.processing_interrupted()
        return stop

    def is_stop(self, error: BaseException) -> bool:
        return isinstance(error, comfy.model_management.InterruptProcessingException)

    def raise_if_stopped(self) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()

    def executing(self) -> Executing:
        context = get_executing_context()
        if context is None:
            return Executing()
        return Executing(context.prompt_id, context.node_id)

    def ledger(self) -> QueueItemPhases:
        prompt_id = self.executing().prompt_id
        if prompt_id is None:
            return QueueItemPhases()
        return self._ledgers.of(prompt_id)

    def open_to_browsers(self, nodes: Iterable[type[Any]]) -> None:
        self._server = ServerEvents()
        self._server.open()
        self._server.check_prompts(PromptValues(nodes, self._listed_model))

    def has_viewers(self) -> bool:
        return self._server is not None and versions.has_viewers()

    def running_graph(self) -> Mapping[str, Any]:
        if self._server is None:
            return {}
        return versions.running_item(self.executing().prompt_id).graph

    def announce(self, event: str, payload: Mapping[str, Any]) -> None:
        if self._server is not None:
            self._server.announce(event, payload)
