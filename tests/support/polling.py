"""Polling for a state that another thread or process reaches soon."""

import time


def eventually(condition, *, limit_s=30.0):
    """Poll `condition` until it is true or the time is up. Return the last value."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
