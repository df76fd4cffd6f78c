"""Daemon threads that return futures; they do not delay the exit of the process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class WorkThread:
    """Executor with one daemon thread, which runs calls in order.

    A `ThreadPoolExecutor` would wait for its calls at exit, and a worker that hangs would never let the process end.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run a call after all earlier ones. The future has its result or error."""
        future: Future[R] = Future()
        self._calls.put(lambda: settle(future, function, *args, **kwargs))
        return future

    def close(self) -> None:
        """End the thread after the calls that were submitted so far. Later calls do nothing."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # releases its arguments: the next call may come much later


def run_in_thread(name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
    """Run a call at once, on a new daemon thread."""
    future: Future[R] = Future()
    threading.Thread(target=settle, args=(future, function, *args), kwargs=kwargs, name=name, daemon=True).start()
    return future


def settle(future: Future[Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Run a call on this thread, and set the future to its result or error."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*args, **kwargs)
    except BaseException as err:  # noqa: BLE001 - the future raises it
        future.set_exception(err)
    else:
        future.set_result(result)
