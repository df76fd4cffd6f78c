"""Interface for device runtimes: streams, events, memory, page locks and the current device of a thread.

Only classes in this package call torch's device modules, such as `torch.cuda`, so that tests can register their own
runtime for a device that does not exist.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from .shared_pages import LockedPages, SharedPages

logger = logging.getLogger(__name__)


class Event(Protocol):
    """Point in a stream's work."""

    def record(self, stream: Stream) -> None:
        """Record the event after all work issued to `stream` so far."""

    def synchronize(self) -> None:
        """Block the host until the device has passed the event."""

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds until `end`. Both must have been made with `timing` and passed."""


class Stream(Protocol):
    """Queue for device work, done in order."""

    def wait_event(self, event: Event) -> None:
        """Order all later work behind `event`. Does not block the host."""

    def wait_stream(self, stream: Stream) -> None:
        """Order all later work behind the work issued to `stream` so far. Does not block the host."""

    def synchronize(self) -> None:
        """Block the host until the device has done all work issued so far."""


class DeviceMemory(NamedTuple):
    """Device memory in bytes, over all processes."""

    free: int
    total: int


class PageLockError(OSError):
    """The driver refused to page-lock memory."""


class NoPageLockError(PageLockError):
    """The device family cannot page-lock memory in place. No system limit is involved."""


class DeviceRuntime(ABC):
    """Calls for one device with streams. Any thread may call, except where the calling thread is named.

    Args:
        device: with an index.
        pages: locked pages of the device family. None for the family's only runtime.
    """

    def __init__(self, device: torch.device, pages: LockedPages | None = None) -> None:
        self.device = device
        self.shared_pages = SharedPages(self, pages)
        """Page locks for memory not mapped for one purpose, so that others may lock parts of the pages."""
        self._idle_streams: list[Stream] = []
        self._still_locked: list[torch.Tensor] = []

    @staticmethod
    @abstractmethod
    def count() -> int:
        """Return the number of devices in this family found by torch. 0 if it cannot use any."""

    @staticmethod
    def unavailable() -> str:
        """Return why `count` is 0, and a remedy. Queries no device."""
        return "torch finds none: use cpu"

    @staticmethod
    @abstractmethod
    def current_index() -> int:
        """Return the index of the calling thread's device."""

    @staticmethod
    @abstractmethod
    def is_initialized() -> bool:
        """Return True if this process has used the device family. Earlier queries would initialise it."""

    @abstractmethod
    def stream(self) -> Stream:
        """Return a new stream."""

    def borrow_stream(self) -> Stream:
        """Return a stream that nobody else uses until `return_stream`.

        torch has 32 streams per device and hands them out in turn: one engine's copies could end up on the stream for
        another's decodings. Memory allocated on a stream is also reused on this stream alone.
        """
        return self._idle_streams.pop() if self._idle_streams else self.stream()

    def return_stream(self, stream: Stream) -> None:
        """Allow others to borrow a stream without pending work."""
        self._idle_streams.append(stream)

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream to which the calling thread issues work."""

    @abstractmethod
    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Issue the calling thread's work to `stream` inside the `with`."""

    @abstractmethod
    def event(self, *, timing: bool = False, blocking: bool = False) -> Event:
        """Return a new event.

        Args:
            timing: its time can be read.
            blocking: a waiting host thread sleeps instead of spinning on a core.
        """

    @abstractmethod
    def enter_thread(self) -> None:
        """Make this the calling thread's current device. A new thread starts with device 0."""

    @abstractmethod
    def name(self) -> str:
        """Return the device name, as reported by the driver."""

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """Return the memory free now, and all memory."""

    @abstractmethod
    def allocated_bytes(self, *, peak: bool = False) -> int:
        """Return the bytes in tensors of this process, now or at most since `reset_peaks`."""

    @abstractmethod
    def reserved_bytes(self, *, peak: bool = False) -> int:
        """Return the bytes in torch's allocator, in use or cached, now or at most since `reset_peaks`."""

    @abstractmethod
    def active_bytes(self) -> int:
        """Return `allocated_bytes` plus freed bytes that still wait for another stream.

        ComfyUI counts free memory by this figure.
        """

    @abstractmethod
    def limit_memory(self, nbytes: int | None) -> None:
        """Let torch reserve at most `nbytes` in this process. None: all memory. Returns cached memory first."""

    @abstractmethod
    def reset_peaks(self) -> None:
        """Count peaks from now on."""

    @abstractmethod
    def lock_pages(self, memory: torch.Tensor) -> None:
        """Page-lock 1-D uint8 CPU memory in place.

        Raises:
            PageLockError: the driver refuses.
        """

    def unlock_pages(self, memory: torch.Tensor) -> None:
        """Unlock locked memory. No copy from it may be in progress.

        If the driver refuses, the memory stays mapped as long as the process: a driver takes the next mapping at the
        same address for the locked pages, and copies from there.
        """
        if not self._unlock(memory):
            self._still_locked.append(memory)
            logger.warning("%.2f GB of RAM stay page-locked: the driver refused to unlock them", memory.numel() / 1e9)

    @abstractmethod
    def _unlock(self, memory: torch.Tensor) -> bool:
        """Return False if the driver refuses to unlock `memory`."""

    @abstractmethod
    def is_locked(self, memory: torch.Tensor) -> bool:
        """Return True if CPU memory starts in locked pages, whether this process or the owner locked them."""

    @abstractmethod
    def auto_dtype(self) -> torch.dtype:
        """Return the narrowest dtype in which the device computes fast."""
