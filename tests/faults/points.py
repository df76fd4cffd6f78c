"""Crash points in this process: counted disk or journal calls, and an action at one point."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Action = Callable[[str], None]
"""Fault at a point, with the name of the call. Exceptions propagate from the call."""

_OF_OS = ("fsync", "replace", "rename", "unlink", "remove", "mkdir", "rmdir")
_OF_SHUTIL = ("rmtree", "copyfile")


def kill(name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full_disk(name: str) -> None:
    if name.startswith("sqlite"):
        raise sqlite3.OperationalError("database or disk is full")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupt_twice(name: str) -> None:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)


def remove(folder: Path) -> Action:
    """Return an action to remove a folder, as another process would."""
    return lambda name: shutil_rmtree(folder, ignore_errors=True)


shutil_rmtree = shutil.rmtree


class Points:
    """Counter of calls after `install`, with an action before or after number `at`."""

    def __init__(self, at=None, action=kill, *, after=False):
        self._at = at
        self._action = action
        self._after = after
        self._numbers = itertools.count()
        self.count = 0

    def install(self) -> None:
        """Replace this process's calls for good: it is a child and ends soon."""
        for module, names in ((os, _OF_OS), (shutil, _OF_SHUTIL)):
            for name in names:
                call = partial(self.call, f"{module.__name__}.{name}", getattr(module, name))
                setattr(module, name, call)
        points = self
        connect = sqlite3.connect

        class Connection(sqlite3.Connection):
            def execute(self, *arguments: Any) -> sqlite3.Cursor:
                return points.call("sqlite.execute", super().execute, *arguments)

            def backup(self, *arguments: Any, **named: Any) -> None:
                points.call("sqlite.backup", super().backup, *arguments, **named)

        sqlite3.connect = lambda *arguments, **named: points.call(
            "sqlite.connect", connect, *arguments, **{**named, "factory": Connection}
        )

    def call(self, name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        number = next(self._numbers)
        self.count = number + 1
        if number == self._at and not self._after:
            self._action(name)
        try:
            return function(*arguments, **named)
        finally:  # also after a failed call, such as `mkdir` for an existing folder
            if number == self._at and self._after:
                self._action(name)
