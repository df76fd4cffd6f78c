"""Step functions for processes of stages, which a new process imports."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from .polling import eventually

Step = Callable[[int, int], int]


def make_adding(amount: int) -> Step:
    """Return a step that adds `amount`."""
    return lambda state, step: state + amount


def make_meeting(folder: str, own: str, other: str) -> Step:
    """Return a step in which one item waits until the process with the name `other` computes too."""

    def step(state: int, number: int) -> int:
        if f"{own} {state}" in {"first 100", "second 1"}:
            Path(folder, own).touch()
            assert eventually(Path(folder, other).exists), f"{other} does not compute at the same time"
        return state + 1

    return step


def make_dying(marker: str, at: int) -> Step:
    """Return a step that ends its process in step `at`, once."""

    def step(state: int, number: int) -> int:
        if number == at and not Path(marker).exists():
            Path(marker).touch()
            os._exit(1)
        return state + 1

    return step


def make_slowly(folder: str) -> Step:
    """Touch `started`, wait much longer than a test, and touch `made`."""
    Path(folder, "started").touch()
    eventually(Path(folder, "never").exists)
    Path(folder, "made").touch()
    return lambda state, step: state


def make_pid() -> Step:
    """Return a step whose state is the id of its process."""
    return lambda state, step: os.getpid()


def make_nothing(folder: str) -> Step:
    """Write a line to `calls` and raise ValueError."""
    with Path(folder, "calls").open("a", encoding="utf-8") as calls:
        calls.write("called\n")
    raise ValueError("this device has no room for the model")
