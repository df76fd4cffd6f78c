"""Threads in a run: their synchronisation, a run's own thread, and one for torch arithmetic.

Above RAM, the producer is the fetch thread and the consumer is the compute thread. The compute
thread waits on the host until a fetch is *issued*, never until the bytes have arrived. The fetch
thread waits until a visit was *issued to the device*, never until the device has finished it.
Events order the work on the device (`transfers/cuda.py`), but waiting for an event that was not
recorded yet has no effect. Each thread therefore waits here until the other one has recorded the
event. In RAM, the producers are the read threads and the consumer is the fetch thread.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from ...devices import runtime_for


class RunStopped(Exception):
    """Ends a thread whose run has ended while it still had work. Not an error."""


CANCEL_POLL_S = 1.0
"""Seconds between two polls for a cancel while a thread waits for a block."""


class ThreadSync:
    """Numbers of issued fetches and released visits in one program. Both sets only grow."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._issued: set[int] = set()
        self._released = {-1}  # the visit before the first one, which a fetch may wait for
        self._no_more: float = math.inf
        self._stopped = False
        self._ending = False

    def note_issued(self, fetch: int) -> None:
        """Record fetch number `fetch` as issued (producer)."""
        with self._changed:
            self._issued.add(fetch)
            self._changed.notify_all()

    def note_released(self, visit: int) -> None:
        """Record visit number `visit` as released (consumer)."""
        with self._changed:
            self._released.add(visit)
            self._changed.notify_all()

    def end_issuing(self, first: int = 0) -> None:
        """Make waits for unissued fetches from `first` on raise. The producer has failed.

        Issued fetches stay valid.
        """
        with self._changed:
            self._no_more = min(self._no_more, first)
            self._changed.notify_all()

    def stop(self) -> None:
        """End all waits, because the run has ended."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def end_visits(self) -> None:
        """Make waits for unreleased visits raise. No more visits will come.

        The producer still issues fetches that depend on released visits only.
        """
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def await_issued(self, fetch: int, poll: Callable[[], object] | None = None) -> None:
        """Wait until fetch number `fetch` was issued.

        Args:
            fetch: the fetch number.
            poll: called every `CANCEL_POLL_S`. It ends the wait by raising.

        Raises:
            RunStopped: it will not be issued.
        """
        # Usual case, without the lock: the fetch was issued long before the visit, and the set only
        # grows.
        if fetch in self._issued:
            return
        while not self._ends(fetch, None if poll is None else CANCEL_POLL_S):
            assert poll is not None
            poll()  # without the lock, which the producer needs
        # A fetch that was issued is valid, even if the run has been stopped meanwhile.
        if fetch not in self._issued:
            raise RunStopped

    def _ends(self, fetch: int, timeout_s: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: fetch in self._issued or fetch >= self._no_more or self._stopped, timeout_s
            )

    def await_released(self, visit: int) -> None:
        """Wait until visit number `visit` was released. -1 counts as released.

        Raises:
            RunStopped: the run has ended, or the visit will not come.
        """
        with self._changed:
            self._changed.wait_for(lambda: visit in self._released or self._stopped or self._ending)
            if self._stopped or visit not in self._released:
                raise RunStopped


class RunThread:
    """Thread next to the compute thread. `result` raises the work's exception again.

    Args:
        name: thread name.
        device: device for the work.
        failed: called after the work has raised any exception but `RunStopped`.
    """

    def __init__(self, name: str, *, device: torch.device, failed: Callable[[], None]) -> None:
        self._name = name
        self._device = device
        self._failed = failed
        self._thread: threading.Thread | None = None
        self._ended: Future[None] = Future()

    def start(self, work: Callable[[], None]) -> None:
        """Start the thread with `work`. It may raise `RunStopped`, which is not an error."""
        # When the thread ends, it drops `work`, a method on the owner of this object, and leaves
        # nothing to the garbage collector. It is a daemon because a run that never ended, after a
        # forward raised, must not keep the process alive.
        self._thread = threading.Thread(
            target=self._run, args=(work,), name=self._name, daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended. Return at once if it was never started."""
        if self._thread is not None and self._thread.ident is not None:
            # Not `Thread.join` alone: after an interrupt, Python before 3.13 takes the thread for
            # ended.
            wait([self._ended])
            self._thread.join()

    def result(self) -> None:
        """Wait until the thread has ended, and raise the error if it failed."""
        self._ended.result()

    @property
    def error(self) -> BaseException | None:
        """Error that ended the thread. None without an error, or while the thread runs."""
        return self._ended.exception() if self._ended.done() else None

    def _run(self, work: Callable[[], None]) -> None:
        try:
            runtime = runtime_for(self._device)
            if runtime is not None:
                # A new thread is on device 0. Leaving a stream would create a context there, of
                # about 0.5 GB.
                runtime.enter_thread()
            work()
        except RunStopped:
            self._ended.set_result(None)
        except BaseException as err:  # noqa: BLE001 - `result` raises it again on the compute thread
            # The error is set first, because `_failed` wakes threads and they look for the error.
            self._ended.set_exception(err)
            self._failed()
        else:
            self._ended.set_result(None)


_setting = threading.Lock()


def torch_thread_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool with up to `threads` threads that each run torch single-threaded.

    All other threads keep their number of torch threads, including threads that start later.
    """
    return ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=_use_one_torch_thread)


def _use_one_torch_thread() -> None:
    """Limit torch to one thread for calls from this thread."""
    # Without the lock, a second thread could read 1 as the usual number.
    with _setting:
        usual = torch.get_num_threads()
        torch.set_num_threads(1)
        # A limit belongs to the thread that sets it, but a thread that calls torch for the first
        # time inherits the last limit set by any thread. This short-lived thread restores the usual
        # limit for later ones.
        last = threading.Thread(target=torch.set_num_threads, args=(usual,))
        last.start()
        last.join()
