"""Polling for a state that another thread or process reaches soon."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], *, limit_s: float = 30.0) -> bool:
    """Poll `condition` until it is true or the time is up. Return the last value."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
