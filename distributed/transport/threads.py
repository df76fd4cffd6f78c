"""A thread that calls one function after the other, and dies with its process instead of holding it up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class WorkThread:
    """Calls what it is given, in order, on one daemon thread. `concurrent.futures` would wait for it at exit."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call it when those before it have ended; its result or error comes out of the future."""
        future: Future[R] = Future()
        self._calls.put(lambda: settle(future, function, *args, **kwargs))
        return future

    def close(self) -> None:
        """Let the thread end after what it was given so far. Closing twice is allowed."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # and what it was given: the next one may come much later


def on_own_thread(name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
    """Call it at once, beside everything else."""
    future: Future[R] = Future()
    threading.Thread(target=settle, args=(future, function, *args), kwargs=kwargs, name=name, daemon=True).start()
    return future


def settle(future: Future[Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call it here, and put what comes of it into the future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*args, **kwargs)
    except BaseException as err:  # noqa: BLE001 - what waits for the future raises it
        future.set_exception(err)
    else:
        future.set_result(result)
