"""Ctrl-C in two stages: the first requests an orderly end, the second an immediate one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Number of stop requests of the user so far."""

    def __init__(self) -> None:
        self._count = 0

    @property
    def requested(self) -> bool:
        """True after the first request: start nothing more."""
        return self._count > 0

    @property
    def immediate(self) -> bool:
        """True after the second request: end the running work, too."""
        return self._count > 1

    def request(self) -> None:
        """Add a request."""
        self._count += 1

    @contextmanager
    def handle_sigint(self, on_request: Callable[[], None]) -> Iterator[None]:
        """Inside the `with`, count the first two Ctrl-C as requests; the third ends the process as usual.

        `on_request` is called in the signal handler after the request is counted, so it must only set flags.
        """

        def handle(signum: int, frame: FrameType | None) -> None:
            self.request()
            if self.immediate:
                signal.signal(signal.SIGINT, before)
            on_request()

        before = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
