"""Order between host threads: thread starts and ends, futures, and `ThreadSync` numbers.

Only real waits order anything before a thread, so the checks do not depend on timing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from wanstream.offload.core.threads import ThreadSync
from wanstream.offload.host_memory import device_slots, in_place, ram_run, ram_slots
from wanstream.offload.sources.base import timed_read
from wanstream.offload.transfers import patches

from .clocks import Clock
from .machine import Machine


@contextmanager
def host_edges(machine: Machine) -> Iterator[None]:
    """Record the order between host threads and their writes to host memory inside the `with`."""
    with ExitStack() as patched:
        _patch_threads(machine, patched)
        _patch_futures(machine, patched)
        _patch_numbers(machine, patched)
        _patch_reads(machine, patched)
        yield


def _sent(machine: Machine) -> Clock:
    """Return the calling thread's clock for another thread, and advance it."""
    with machine.lock:
        host = machine.host()
        clock = dict(host.clock)
        host.tick()
        return clock


def _receive(machine: Machine, clock: Clock | None) -> None:
    if clock is not None:
        with machine.lock:
            machine.host().join(clock)


def _patch_threads(machine: Machine, patched: ExitStack) -> None:
    start = threading.Thread.start
    join = threading.Thread.join
    ends: WeakKeyDictionary[threading.Thread, Clock] = WeakKeyDictionary()

    def start_after(self: threading.Thread) -> None:
        clock = _sent(machine)
        run = self.run

        def ordered() -> None:
            _receive(machine, clock)
            try:
                run()
            finally:
                ends[self] = _sent(machine)

        self.run = ordered  # type: ignore[method-assign]
        start(self)

    def join_behind(self: threading.Thread, timeout: float | None = None) -> None:
        join(self, timeout)
        if not self.is_alive():
            _receive(machine, ends.get(self))

    patched.enter_context(mock.patch.object(threading.Thread, "start", start_after))
    patched.enter_context(mock.patch.object(threading.Thread, "join", join_behind))


def _patch_futures(machine: Machine, patched: ExitStack) -> None:
    clocks: WeakKeyDictionary[Future[Any], Clock] = WeakKeyDictionary()

    def sets(name: str) -> Callable[..., None]:
        original = getattr(Future, name)

        def setter(self: Future[Any], value: Any) -> None:
            clocks[self] = _sent(machine)
            original(self, value)

        return setter

    def gets(name: str) -> Callable[..., Any]:
        original = getattr(Future, name)

        def getter(self: Future[Any], timeout: float | None = None) -> Any:
            try:
                return original(self, timeout)
            finally:
                _receive(machine, clocks.get(self))

        return getter

    submit = ThreadPoolExecutor.submit

    def submit_after(self, work, /, *args, **kwargs) -> Future[Any]:
        clock = _sent(machine)

        def ordered() -> Any:
            _receive(machine, clock)
            return work(*args, **kwargs)

        return submit(self, ordered)

    for name in ("set_result", "set_exception"):
        patched.enter_context(mock.patch.object(Future, name, sets(name)))
    for name in ("result", "exception"):
        patched.enter_context(mock.patch.object(Future, name, gets(name)))
    patched.enter_context(mock.patch.object(ThreadPoolExecutor, "submit", submit_after))


def _patch_numbers(machine: Machine, patched: ExitStack) -> None:
    clocks: WeakKeyDictionary[ThreadSync, dict[tuple[str, int], Clock]] = WeakKeyDictionary()

    def notes(kind: str) -> Callable[[ThreadSync, int], None]:
        original = getattr(ThreadSync, f"note_{kind}")

        def note(self: ThreadSync, number: int) -> None:
            clocks.setdefault(self, {})[kind, number] = _sent(machine)
            original(self, number)

        return note

    def awaits(kind: str) -> Callable[..., None]:
        original = getattr(ThreadSync, f"await_{kind}")

        def await_(self: ThreadSync, number: int, *more: Any) -> None:
            original(self, number, *more)
            _receive(machine, clocks.get(self, {}).get((kind, number)))

        return await_

    for kind in ("issued", "released"):
        patched.enter_context(mock.patch.object(ThreadSync, f"note_{kind}", notes(kind)))
        patched.enter_context(mock.patch.object(ThreadSync, f"await_{kind}", awaits(kind)))


def _patch_reads(machine: Machine, patched: ExitStack) -> None:
    def noted(source: Any, key: Any, into: Any, *args: Any, **kwargs: Any) -> Any:
        if into.device.type == "cpu":
            machine.host_writes(into, f"read of {key}")
        return timed_read(source, key, into, *args, **kwargs)

    for module in (ram_slots, ram_run):
        patched.enter_context(mock.patch.object(module, "timed_read", noted))
    for module in (ram_slots, in_place, device_slots, patches):
        patched.enter_context(mock.patch.object(module, "map_memory", machine.map_memory))
