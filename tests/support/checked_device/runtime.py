"""The checked device's `DeviceRuntime`."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import cast
from unittest.mock import patch

import torch

from wanstream.devices import DeviceRuntime
from wanstream.devices import Event as DeviceEvent
from wanstream.devices import Stream as DeviceStream
from wanstream.devices.machine.shared_pages import LockedPages
from wanstream.devices.registry import FAMILIES, LOCKED_PAGES, runtime_for
from wanstream.devices.runtime import DeviceMemory

from .edges import host_edges
from .machine import Device, Event, Machine, Stream, site
from .tensors import NAME, activate, active


class CheckedRuntime(DeviceRuntime):
    """See `DeviceRuntime`."""

    @staticmethod
    def count() -> int:
        return len(active().devices)

    @staticmethod
    def current_index() -> int:
        return active().current_device

    @staticmethod
    def is_initialized() -> bool:
        return True

    @property
    def _fake(self) -> Device:
        return active().devices[self.device.index or 0]

    def stream(self) -> DeviceStream:
        return self._fake.new_stream()

    def current_stream(self) -> DeviceStream:
        active().check_thread()
        return active().current_stream(self._fake.index)

    def on_stream(self, stream: DeviceStream) -> AbstractContextManager[object]:
        active().check_thread()
        return active().on_stream(cast(Stream, stream))

    def event(self, *, timing: bool = False, blocking: bool = False) -> DeviceEvent:
        return Event(active(), timing=timing)

    def enter_thread(self) -> None:
        active().set_device(self.device.index or 0)

    def name(self) -> str:
        return "checked device"

    def memory(self) -> DeviceMemory:
        fake = self._fake
        return DeviceMemory(free=fake.capacity - fake.reserved, total=fake.total)

    def allocated_bytes(self, *, peak: bool = False) -> int:
        fake = self._fake
        return fake.peak_allocated if peak else fake.allocated

    def reserved_bytes(self, *, peak: bool = False) -> int:
        fake = self._fake
        return fake.peak_reserved if peak else fake.reserved

    def active_bytes(self) -> int:
        return self._fake.allocated  # nothing is recorded on another stream

    def limit_memory(self, nbytes: int | None) -> None:
        self._fake.empty_cache()
        self._fake.capacity = self._fake.total if nbytes is None else nbytes

    def reset_peaks(self) -> None:
        fake = self._fake
        fake.peak_allocated = fake.allocated
        fake.peak_reserved = fake.reserved

    def lock_pages(self, memory: torch.Tensor) -> None:
        active().lock_pages(memory)

    def _unlock(self, memory: torch.Tensor) -> bool:
        return active().unlock_pages(memory)

    def return_stream(self, stream: DeviceStream) -> None:
        if not cast(Stream, stream).query():
            active().report(f"a stream is returned while its work is under way, at {site()}")
        super().return_stream(stream)

    def is_locked(self, memory: torch.Tensor) -> bool:
        return bool(active()._locked_parts(memory[:1]))

    def auto_dtype(self) -> torch.dtype:
        return torch.float32


@contextmanager
def registered(family: str, runtime: type[DeviceRuntime] | None) -> Iterator[None]:
    """Use `runtime` for `family` devices inside the `with`."""
    pages = {family: LockedPages()}
    try:
        with patch.dict(FAMILIES, {family: runtime}), patch.dict(LOCKED_PAGES, pages):
            runtime_for.cache_clear()
            yield
    finally:
        runtime_for.cache_clear()


@contextmanager
def checked_machine(seed=0, *, devices=1, capacity=2**33, streams=True) -> Iterator[Machine]:
    """Provide a machine with checked devices inside the `with`, then check for leftovers.

    Without `streams` the devices have no runtime, and only the calling thread may use them.

    Raises:
        AssertionError: a problem was reported, or memory is still allocated or locked.
    """
    machine = Machine(seed, devices=devices, capacity=capacity)
    if not streams:
        machine.only_thread = threading.get_ident()
    end = activate(machine)
    with ExitStack() as undo:
        undo.callback(end)
        undo.enter_context(registered(NAME, CheckedRuntime if streams else None))
        with host_edges(machine):
            yield machine
        machine.finish()
        gc.collect()
        left = [device.allocated for device in machine.devices]
        assert not machine.problems, "\n".join(machine.problems)
        assert not any(left), f"bytes that are still allocated, by device: {left}"
        assert not machine.locked, f"{len(machine.locked)} pieces of memory are still locked"
