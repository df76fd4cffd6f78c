"""Daemon threads that return futures. They do not delay the exit of the process."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

POLL_S = 0.05
"""Interval at which a waiting thread polls for a stop."""


class WorkThread:
    """Executor with one daemon thread, which runs calls in order.

    A `ThreadPoolExecutor` would wait for running calls at exit, and with a hung worker the process
    would never end.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run a call after all earlier ones. The future has the result or error."""
        future: Future[R] = Future()
        self._calls.put(lambda: settle(future, function, *args, **kwargs))
        return future

    def close(self) -> None:
        """End the thread after all calls submitted so far. Later calls do nothing."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # releases the arguments: the next call may come much later


def run_in_thread(
    name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> Future[R]:
    """Run a call at once, on a new daemon thread."""
    future: Future[R] = Future()
    threading.Thread(
        target=settle, args=(future, function, *args), kwargs=kwargs, name=name, daemon=True
    ).start()
    return future


def settle(future: Future[Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Run a call on this thread, and put the result or error into the future."""
    # False means that the future was cancelled before the call began.
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*args, **kwargs)
    except BaseException as err:  # noqa: BLE001 - the future raises it
        future.set_exception(err)
    else:
        future.set_result(result)


def wait_polling(
    requests: Sequence[Future[Any]], check: Callable[[], object], limit_s: float = math.inf
) -> list[Future[Any]]:
    """Wait for all requests, for `limit_s` at most. Returns finished ones, errors included.

    `check` is called often on this thread. An error in it ends the wait.
    """
    until = time.monotonic() + limit_s
    while wait(requests, timeout=POLL_S).not_done and time.monotonic() < until:
        check()
    return [each for each in requests if each.done()]
