"""Current host: the one whose node executes in this context, so that several hosts can run in one process."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from .api import RUNNING_HOST, HostApi


def current_host() -> HostApi:
    """Return the host of the running node; outside a run, the one that this process can have.

    A context does not reach new threads: take what another thread needs, such as `should_stop`, from the host before
    the thread starts.
    """
    return RUNNING_HOST.get() or _process_host()


@cache
def _process_host() -> HostApi:
    """ComfyUI has one server, one queue and one memory manager per process; without it, an idle embedded host."""
    if find_spec("comfy_api") is None:
        from .embedded.adapter import EmbeddedHost

        return EmbeddedHost()
    from .comfy.adapter import ComfyHost

    return ComfyHost()
