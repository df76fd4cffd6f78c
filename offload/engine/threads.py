"""Threads of an engine: one that belongs to a run, and single-thread pools for torch arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from .thread_sync import RunStopped


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


_setting = threading.Lock()


def one_thread_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool of up to `threads` threads in which torch computes with the calling thread alone.

    The number of torch's threads elsewhere stays as it is, also that of threads that start later.
    """
    return ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=_compute_alone)


def _compute_alone() -> None:
    """Let torch compute with one thread on this thread."""
    with _setting:
        usual = torch.get_num_threads()
        torch.set_num_threads(1)
        # The number belongs to the thread that sets it, but whoever calls torch for the first time takes over the one
        # that was set last: a thread that ends at once sets the usual one again.
        last = threading.Thread(target=torch.set_num_threads, args=(usual,))
        last.start()
        last.join()
