"""A thread that belongs to one run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from .progress import RunStopped


class RunThread:
    """Does `work` beside the computing thread; what it raises is raised again by `result`.

    Args:
        work: may end by `RunStopped`, which is no error.
        failed: called when it has raised anything else.
    """

    def __init__(self, name: str, work: Callable[[], None], *, failed: Callable[[], None]) -> None:
        self._work, self._failed = work, failed
        # A daemon: a run that nobody ended (a forward raised) must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._ended: Future[None] = Future()

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Return when the thread has ended, or was never started. Ends nothing by itself."""
        if self._thread.ident is not None:
            # Not `join` alone: interrupted once, it takes the thread for ended (Python before 3.13).
            wait([self._ended])
            self._thread.join()

    def result(self) -> None:
        """Wait for the end, and raise what ended it, if that was an error."""
        self._ended.result()

    @property
    def error(self) -> BaseException | None:
        """What has ended it, if that was an error; None while it runs."""
        return self._ended.exception() if self._ended.done() else None

    def _run(self) -> None:
        try:
            self._work()
        except RunStopped:
            self._ended.set_result(None)
        except BaseException as err:  # noqa: BLE001 - it is raised again on the computing thread
            self._ended.set_exception(err)
            self._failed()
        else:
            self._ended.set_result(None)
