"""Host: ComfyUI's services for nodes, real or embedded.

A node's `execute` passes on the host, or only the part it needs. `comfy/adapter/` implements the
parts with ComfyUI, `embedded/adapter.py` without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Protocol

from ..telemetry import TelemetryOptions
from .events import Events
from .files import Files
from .memory import Memory
from .models import Models
from .native_models import NativeModels


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """User settings."""

    strict: bool = False
    """Raise an error instead of a warning for suspicious inputs."""
    graph_in_files: bool = True
    """Write the graph into the metadata of output files."""
    shows_latents: bool = False
    """Progress bars show previews of the given `denoised`."""


class Host(Protocol):
    """Services a host provides."""

    @property
    def name(self) -> str:
        """Name and version, for display."""

    @property
    def files(self) -> Files: ...

    @property
    def memory(self) -> Memory: ...

    @property
    def models(self) -> Models: ...

    @property
    def native(self) -> NativeModels: ...

    @property
    def events(self) -> Events: ...

    def settings(self) -> HostSettings:
        """Return the settings now. The user may change them at any time."""


def telemetry_options(host: Host) -> TelemetryOptions:
    """Return the run options for the executing node.

    Raises ValueError for invalid environment variables.
    """
    options = TelemetryOptions.from_environment()
    return replace(options, ledger=host.events.ledger(), dynamic_bytes=host.memory.dynamic_bytes)


_RUNNING: ContextVar[Host | None] = ContextVar("wanstream_host", default=None)


@contextmanager
def use_host(host: Host) -> Iterator[None]:
    """Make `host` the result of `running_host` in this context, inside the `with`."""
    token = _RUNNING.set(host)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def running_host() -> Host | None:
    """Return the host of the node executing in this context.

    Return None for a host that has the process to itself.

    New threads do not inherit it.
    """
    return _RUNNING.get()
