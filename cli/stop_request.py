"""Ctrl-C in two steps: the first asks for an orderly end, the second for one at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """What the user has asked for so far."""

    def __init__(self) -> None:
        self._count = 0

    @property
    def soon(self) -> bool:
        """Begin nothing more."""
        return self._count > 0

    @property
    def at_once(self) -> bool:
        """End what runs, too."""
        return self._count > 1

    def ask(self) -> None:
        """Ask once more."""
        self._count += 1

    @contextmanager
    def listening(self, on_request: Callable[[], None]) -> Iterator[None]:
        """Inside, the first two Ctrl-C are requests; the third ends the process as usual.

        `on_request` is called in the signal handler, after the request is counted: it must only set flags.
        """

        def handle(signum: int, frame: FrameType | None) -> None:
            self.ask()
            if self.at_once:
                signal.signal(signal.SIGINT, before)
            on_request()

        before = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
