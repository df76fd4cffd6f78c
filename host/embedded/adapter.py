"""Host without ComfyUI: folders given by the caller, progress callbacks, a stop flag."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...schema import StateError
from ...wan import ExpertsRegistry
from ..api import HostSettings, use_host
from ..auto_policy import AutoPlanner
from .events import EmbeddedEvents, OnProgress
from .files import EmbeddedFiles, Folders
from .memory import EmbeddedMemory
from .models import EmbeddedModels
from .native_models import NoNativeModels


class EmbeddedHost:
    """`Host` for one run at a time. The experts stay open between runs."""

    name = "without ComfyUI"

    def __init__(
        self, planner: AutoPlanner | None = None, experts: ExpertsRegistry | None = None
    ) -> None:
        self._experts = experts or ExpertsRegistry()
        self._busy = threading.Lock()
        self._settings = HostSettings()
        self.files = EmbeddedFiles()
        self.events = EmbeddedEvents()
        self.memory = EmbeddedMemory(self._experts, planner or AutoPlanner())
        self.models = EmbeddedModels(self._experts, self.memory, self.events.raise_if_stopped)
        self.native = NoNativeModels()

    def settings(self) -> HostSettings:
        return self._settings

    @contextmanager
    def opened(
        self,
        folders: Folders,
        on_progress: OnProgress | None = None,
        device: torch.device | None = None,
        *,
        strict: bool = False,
    ) -> Iterator[None]:
        """Make this the current host inside the `with`, with these folders and this device.

        Args:
            folders: folders for models, inputs and outputs.
            on_progress: called with each node's progress.
            device: compute device. None means a GPU if there is one.
            strict: raise an error instead of a warning for suspicious inputs.

        Raises:
            StateError: this host is running another workflow.
        """
        if not self._busy.acquire(blocking=False):
            raise StateError(
                "this embedded host is already running a workflow: wait for it, or use another "
                "EmbeddedHost"
            )
        try:
            self._settings = HostSettings(strict=strict)
            self.files.of_run = folders
            self.memory.of_run = device
            self.events.begin(on_progress)
            with use_host(self):
                yield
        finally:
            self.events.end()
            self.memory.of_run = self.files.of_run = None
            self._settings = HostSettings()
            # Last: until then, no other run may set folders and device.
            self._busy.release()

    def stop(self) -> None:
        """Request the end of the run, at the next block or node. May be called on any thread."""
        self.events.stop()

    def free_experts(self) -> None:
        """Close the open pair, if any."""
        self._experts.free()
