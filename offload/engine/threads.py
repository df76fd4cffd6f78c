"""Threads of a run: their synchronisation, the thread of one run, and a thread for torch arithmetic.

Above RAM, the producer is the fetch thread and the consumer is the compute thread. The compute thread waits on the host
until a fetch is *issued*, never until its bytes have arrived; the fetch thread waits until a visit was *issued to the
device*, never until the device has finished it. Work on the device is ordered by events (`transfers/cuda.py`), but
waiting for an event that was not recorded yet has no effect. Each thread therefore waits here until the other one has
recorded its event. In RAM, the producers are the read threads and the consumer is the fetch thread.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from ...devices import runtime_for


class RunStopped(Exception):
    """Ends a thread whose run has ended while it still had work; not an error."""


POLL_S = 1.0
"""Time between two polls for a cancel while a thread waits for a block."""


class ThreadSync:
    """Numbers of the issued fetches and released visits of one program. Both sets only grow."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._issued: set[int] = set()
        self._released = {-1}  # the visit before the first one, which a fetch may wait for
        self._no_more: float = math.inf
        self._stopped = False
        self._ending = False

    def note_issued(self, fetch: int) -> None:
        """Note that fetch number `fetch` of the program was issued (producer)."""
        with self._changed:
            self._issued.add(fetch)
            self._changed.notify_all()

    def note_released(self, visit: int) -> None:
        """Note that visit number `visit` of the program was released (consumer)."""
        with self._changed:
            self._released.add(visit)
            self._changed.notify_all()

    def end_issuing(self, first: int = 0) -> None:
        """Make waits for fetches from `first` on that were not issued raise: the producer has failed.

        Issued fetches stay valid.
        """
        with self._changed:
            self._no_more = min(self._no_more, first)
            self._changed.notify_all()

    def stop(self) -> None:
        """End all waits: the run has ended."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def end_visits(self) -> None:
        """Make waits for visits that were not released raise: no more visits will come.

        The producer still issues the fetches that depend on released visits only.
        """
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def await_issued(self, fetch: int, poll: Callable[[], object] | None = None) -> None:
        """Wait until fetch number `fetch` was issued.

        Args:
            fetch: number of the fetch.
            poll: called every `POLL_S`. It ends the wait by raising.

        Raises:
            RunStopped: it will not be issued.
        """
        # Usual case, without the lock: the fetch was issued long before its visit, and the set only grows.
        if fetch in self._issued:
            return
        while not self._ends(fetch, None if poll is None else POLL_S):
            assert poll is not None
            poll()  # without the lock, which the producer needs
        if fetch not in self._issued:
            raise RunStopped

    def _ends(self, fetch: int, timeout_s: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: fetch in self._issued or fetch >= self._no_more or self._stopped, timeout_s
            )

    def await_released(self, visit: int) -> None:
        """Wait until visit number `visit` was released; -1 counts as released.

        Raises:
            RunStopped: the run has ended, or the visit will not come.
        """
        with self._changed:
            self._changed.wait_for(lambda: visit in self._released or self._stopped or self._ending)
            if self._stopped or visit not in self._released:
                raise RunStopped


class RunThread:
    """Thread next to the compute thread; `result` raises the exception of its work again.

    Args:
        name: name of the thread.
        device: device of the work.
        failed: called after the work has raised any exception but `RunStopped`.
    """

    def __init__(self, name: str, *, device: torch.device, failed: Callable[[], None]) -> None:
        self._name, self._device, self._failed = name, device, failed
        self._thread: threading.Thread | None = None
        self._ended: Future[None] = Future()

    def start(self, work: Callable[[], None]) -> None:
        """Start the thread with `work`, which may raise `RunStopped`; that is not an error."""
        # The thread drops `work`, a method of the object that owns this one, when it ends: nothing is left for the
        # garbage collector. A daemon: a run that was never ended, because a forward raised, must not keep the process
        # alive.
        self._thread = threading.Thread(target=self._run, args=(work,), name=self._name, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended; return at once if it was never started."""
        if self._thread is not None and self._thread.ident is not None:
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

    def _run(self, work: Callable[[], None]) -> None:
        try:
            runtime = runtime_for(self._device)
            if runtime is not None:
                # A new thread is on device 0: leaving a stream would create a context of about 0.5 GB there.
                runtime.enter_thread()
            work()
        except RunStopped:
            self._ended.set_result(None)
        except BaseException as err:  # noqa: BLE001 - `result` raises it again on the compute thread
            self._ended.set_exception(err)
            self._failed()
        else:
            self._ended.set_result(None)


_setting = threading.Lock()


def torch_thread_pool(threads: int, name: str) -> ThreadPoolExecutor:
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
