"""Current host: the one whose node executes in this context, so that several hosts can run in one process."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from .api import RUNNING_HOST, HostApi


def current_host() -> HostApi:
    """Return the host of the running node; outside a run, the only host that this process can have.

    A context variable is not inherited by new threads: pass the host's methods, such as `should_stop`, to a thread.
    """
    return RUNNING_HOST.get() or _process_host()


@cache
def _process_host() -> HostApi:
    """Return the host for ComfyUI, which has one queue and memory manager per process, or an idle embedded host."""
    if find_spec("comfy_api") is None:
        from .embedded.adapter import EmbeddedHost

        return EmbeddedHost()
    from .comfy.adapter import ComfyHost

    return ComfyHost()
