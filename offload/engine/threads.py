"""Threads of an engine: the thread of a run, and pools whose threads run torch single-threaded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from .thread_sync import RunStopped


class RunThread:
    """Runs `work` next to the compute thread; `result` raises the exception of `work` again.

    Args:
        name: name of the thread.
        work: may raise `RunStopped`, which is not an error.
        failed: called after `work` has raised any other exception.
    """

    def __init__(self, name: str, work: Callable[[], None], *, failed: Callable[[], None]) -> None:
        self._work, self._failed = work, failed
        # A daemon: a run that was never ended, because a forward raised, must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._ended: Future[None] = Future()

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended; return at once if it was never started."""
        if self._thread.ident is not None:
            # Not `Thread.join` alone: after an interrupt, Python before 3.13 takes the thread for ended.
            wait([self._ended])
            self._thread.join()

    def result(self) -> None:
        """Wait until the thread has ended, and raise its error if it failed."""
        self._ended.result()

    @property
    def error(self) -> BaseException | None:
        """The error that ended the thread; None if there was none or the thread is running."""
        return self._ended.exception() if self._ended.done() else None

    def _run(self) -> None:
        try:
            self._work()
        except RunStopped:
            self._ended.set_result(None)
        except BaseException as err:  # noqa: BLE001 - `result` raises it again on the compute thread
            self._ended.set_exception(err)
            self._failed()
        else:
            self._ended.set_result(None)


_setting = threading.Lock()


def one_thread_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool of up to `threads` threads, each of which runs torch single-threaded.

    The number of torch threads of all other threads does not change, including threads that start later.
    """
    return ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=_use_one_torch_thread)


def _use_one_torch_thread() -> None:
    """Limit torch to one thread for calls from this thread."""
    with _setting:
        usual = torch.get_num_threads()
        torch.set_num_threads(1)
        # The limit belongs to the thread that sets it, but a thread that calls torch for the first time inherits the
        # limit that was set last, by any thread. A thread that ends at once restores the usual limit for those.
        last = threading.Thread(target=torch.set_num_threads, args=(usual,))
        last.start()
        last.join()
