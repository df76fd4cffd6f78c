"""Interface for device runtimes: streams, events, memory, page locks, a thread's current device.

Only classes in this package call torch's device modules, such as `torch.cuda`, so tests can
register their own runtime for a device that does not exist.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch

from .machine.shared_pages import LockedPages, SharedPages

logger = logging.getLogger(__name__)


class Event(Protocol):
    """Point in a stream's work."""

    def record(self, stream: Stream) -> None:
        """Record the event after all work issued to `stream` so far."""

    def synchronize(self) -> None:
        """Block the host until the device has passed the event."""

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds until `end`.

        Both must have been made with `timing` and passed.
        """


class Stream(Protocol):
    """Queue for device work, done in order."""

    def wait_event(self, event: Event) -> None:
        """Order all later work behind `event`. Does not block the host."""

    def wait_stream(self, stream: Stream) -> None:
        """Order all later work behind the work issued to `stream` so far.

        Does not block the host.
        """

    def synchronize(self) -> None:
        """Block the host until the device has done all work issued so far."""


class DeviceMemory(NamedTuple):
    """Device memory in bytes, over all processes."""

    free: int
    total: int

    @property
    def used(self) -> int:
        return self.total - self.free


class PageLockError(OSError):
    """The driver refused to page-lock memory."""


class NoPageLockError(PageLockError):
    """The device family cannot page-lock memory in place. No system limit is involved."""


class DeviceRuntime:
    """Calls for one device with streams. The methods here use what CUDA and XPU have in common.

    They call torch's family module, not `torch.accelerator`, which has memory figures only from
    torch 2.9 on and ignores `blocking` in events. Any thread may call, except where the calling
    thread is named.

    Args:
        device: with an index.
        pages: locked pages in the device family. None for the family's only runtime.
    """

    family: ClassVar[str]
    """Device type, and torch's module name."""

    def __init__(self, device: torch.device, pages: LockedPages | None = None) -> None:
        self.device = device
        self.shared_pages = SharedPages(self, pages)
        """Page locks for memory not mapped for one purpose. Others may lock parts of the pages."""
        self._idle_streams: list[Stream] = []
        self._still_locked: list[torch.Tensor] = []

    @classmethod
    def _module(cls) -> Any:
        return torch.get_device_module(cls.family)

    @cached_property
    def _torch(self) -> Any:
        return self._module()

    @classmethod
    def count(cls) -> int:
        """Return the number of devices in this family found by torch. 0 if it cannot use any."""
        module = cls._module()
        if module.is_available():
            return int(module.device_count())
        return 0

    @staticmethod
    def unavailable() -> str:
        """Return why `count` is 0, and a remedy. Queries no device."""
        raise NotImplementedError

    @classmethod
    def current_index(cls) -> int:
        """Return the index of the calling thread's device."""
        return int(cls._module().current_device())

    @classmethod
    def is_initialized(cls) -> bool:
        """Return True if this process has used the device family.

        Earlier queries would initialise it.
        """
        return bool(cls._module().is_initialized())

    def stream(self) -> Stream:
        """Return a new stream."""
        return cast(Stream, self._torch.Stream(self.device))

    def borrow_stream(self) -> Stream:
        """Return a stream that nobody else uses until `return_stream`.

        torch has 32 streams per device and hands them out in turn, so one engine's copies could end
        up on another's decoding stream. Memory allocated on a stream is also reused on this stream
        alone.
        """
        if self._idle_streams:
            return self._idle_streams.pop()
        return self.stream()

    def return_stream(self, stream: Stream) -> None:
        """Allow others to borrow a stream without pending work."""
        self._idle_streams.append(stream)

    def current_stream(self) -> Stream:
        """Return the stream for the calling thread's work."""
        return cast(Stream, self._torch.current_stream(self.device))

    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Issue the calling thread's work to `stream` inside the `with`."""
        return cast("AbstractContextManager[object]", self._torch.stream(stream))

    def event(self, *, timing: bool = False, blocking: bool = False) -> Event:
        """Return a new event.

        Args:
            timing: its time can be read.
            blocking: a waiting host thread sleeps instead of spinning on a core. Families whose
                events have no such option ignore it.
        """
        return cast(Event, self._torch.Event(enable_timing=timing))

    def enter_thread(self) -> None:
        """Make this the calling thread's current device. A new thread starts with device 0."""
        self._torch.set_device(self.device)

    def name(self) -> str:
        """Return the device name, as reported by the driver."""
        return str(self._torch.get_device_name(self.device))

    def memory(self) -> DeviceMemory:
        """Return the memory free now, and all memory."""
        free, total = self._torch.mem_get_info(self.device)
        return DeviceMemory(free=int(free), total=int(total))

    def allocated_bytes(self, *, peak: bool = False) -> int:
        """Return the bytes in this process's tensors, now or at most since `reset_peaks`."""
        read = self._torch.max_memory_allocated if peak else self._torch.memory_allocated
        return int(read(self.device))

    def reserved_bytes(self, *, peak: bool = False) -> int:
        """Return bytes in torch's allocator, used or cached, now or at most since `reset_peaks`."""
        read = self._torch.max_memory_reserved if peak else self._torch.memory_reserved
        return int(read(self.device))

    def active_bytes(self) -> int:
        """Return `allocated_bytes` plus freed bytes that still wait for another stream.

        ComfyUI counts free memory by this figure.
        """
        return int(self._torch.memory_stats(self.device)["active_bytes.all.current"])

    def limit_memory(self, nbytes: int | None) -> None:
        """Let torch reserve at most `nbytes` in this process.

        None: all memory. Returns cached memory first.
        """
        self._torch.empty_cache()  # cached memory counts against the limit
        fraction = 1.0 if nbytes is None else nbytes / self.memory().total
        # torch takes a fraction of all memory, not a number of bytes.
        self._torch.set_per_process_memory_fraction(fraction, self.device)

    def reset_peaks(self) -> None:
        """Count peaks from now on."""
        self._torch.reset_peak_memory_stats(self.device)

    def lock_pages(self, memory: torch.Tensor) -> None:
        """Page-lock 1-D uint8 CPU memory in place.

        Raises:
            PageLockError: the driver refuses.
        """
        raise NotImplementedError

    def unlock_pages(self, memory: torch.Tensor) -> None:
        """Unlock locked memory. No copy from it may be in progress.

        If the driver refuses, the memory stays mapped as long as the process. Otherwise the driver
        would take the next mapping at the same address for the locked pages, and copy from there.
        """
        if not self._unlock(memory):
            self._still_locked.append(memory)
            logger.warning(
                "%.2f GB of RAM stay page-locked: the driver refused to unlock them",
                memory.numel() / 1e9,
            )

    def _unlock(self, memory: torch.Tensor) -> bool:
        """Return False if the driver refuses to unlock `memory`."""
        raise NotImplementedError

    def is_locked(self, memory: torch.Tensor) -> bool:
        """Return True if CPU memory starts in locked pages, locked by this process or the owner."""
        return bool(memory.is_pinned())

    def auto_dtype(self) -> torch.dtype:
        """Return the narrowest dtype in which the device computes fast."""
        raise NotImplementedError
