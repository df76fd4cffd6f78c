"""Page locks for memory with shared pages: neighbours, views of one storage, one storage twice."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch


class PageLock(Protocol):
    """Driver that page-locks memory in place, such as a `DeviceRuntime`."""

    def lock_pages(self, memory: torch.Tensor) -> None:
        """Page-lock 1-D uint8 CPU memory.

        Raises:
            PageLockError: the driver refuses.
        """

    def unlock_pages(self, memory: torch.Tensor) -> None:
        """Unlock locked memory. No copy from it may be in progress."""


@dataclass(kw_only=True, eq=False)
class _Span:
    """Whole pages locked in one driver call."""

    pages: range
    memory: torch.Tensor
    """The pages as 1-D uint8."""
    driver: PageLock
    """Driver that locked the pages. It also unlocks them."""
    users: int = 1


@dataclass(kw_only=True, eq=False)
class LockedPages:
    """Pages locked by the drivers in one device family.

    A page locked for one device is locked for all.
    """

    spans: list[_Span] = field(default_factory=list)
    changing: threading.Lock = field(default_factory=threading.Lock)
    left: deque[torch.Tensor] = field(default_factory=deque)
    """Memory to unlock, kept alive until then."""


class SharedPages:
    """Locks every page once, and unlocks it after the last user.

    Implements `PageLock` for any 1-D uint8 memory.

    A driver may refuse to lock a page twice, and unlocking for the first user would unlock the page
    for both.

    Any thread may call, also finalisers. These can run while the same thread locks memory, so
    `unlock_pages` never waits for this object's lock.

    Args:
        driver: locks the pages for this object's users.
        pages: pages shared with the drivers for other devices.
    """

    def __init__(self, driver: PageLock, pages: LockedPages | None = None) -> None:
        self._driver = driver
        self._pages = pages or LockedPages()

    def lock_pages(self, memory: torch.Tensor) -> None:
        """Lock the unlocked pages of `memory`, and keep `memory` alive until they are unlocked.

        Raises:
            PageLockError: the driver refuses. Nothing was locked.
        """
        pages = _pages_of(memory)
        with self._held():
            self._unlock_left()
            # A list, not a generator: the loop below appends new spans.
            users = list(self._spans_in(pages))
            for span in users:
                span.users += 1
            try:
                for gap in _gaps(pages, [span.pages for span in users]):
                    span = _Span(
                        pages=gap, memory=_as_tensor(gap, owner=memory), driver=self._driver
                    )
                    self._driver.lock_pages(span.memory)
                    users.append(span)
                    self._pages.spans.append(span)
            except BaseException:
                # `users` includes the spans locked above, before the driver refused another one.
                self._leave(users)
                raise

    def unlock_pages(self, memory: torch.Tensor) -> None:
        """Unlock the pages of `memory` without other users. No copy from it may be in progress.

        If another call is under way, it unlocks these pages when it ends.
        """
        # A deque's `append` is atomic, so it needs no lock.
        self._pages.left.append(memory)
        self._unlock_if_free()

    def has(self, memory: torch.Tensor) -> bool:
        """Return True if some pages of `memory` are locked here."""
        with self._held():
            return next(self._spans_in(_pages_of(memory)), None) is not None

    def split(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return `memory` in parts, each in pages locked by one call, or only in unlocked pages."""
        start = memory.data_ptr()
        stop = memory.data_ptr() + memory.numel()
        with self._held():
            spans = list(self._spans_in(_pages_of(memory)))
        cuts = {
            at - start
            for span in spans
            for at in (span.pages.start, span.pages.stop)
            if start < at < stop
        }
        edges = [0, *sorted(cuts), memory.numel()]
        return [memory[first:last] for first, last in itertools.pairwise(edges)]

    def _spans_in(self, pages: range) -> Iterator[_Span]:
        return (
            span
            for span in self._pages.spans
            if span.pages.start < pages.stop and pages.start < span.pages.stop
        )

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold this object's lock inside the `with`, then unlock everything added meanwhile."""
        try:
            with self._pages.changing:
                yield
        finally:
            self._unlock_if_free()

    def _unlock_if_free(self) -> None:
        # Checked again after each round: another call may have added memory before the lock was
        # free.
        while self._pages.left and self._pages.changing.acquire(blocking=False):
            try:
                self._unlock_left()
            finally:
                self._pages.changing.release()

    def _unlock_left(self) -> None:
        while self._pages.left:
            memory = self._pages.left.popleft()
            self._leave(list(self._spans_in(_pages_of(memory))))

    def _leave(self, spans: list[_Span]) -> None:
        for span in spans:
            span.users -= 1
            if span.users == 0:
                self._pages.spans.remove(span)
                span.driver.unlock_pages(span.memory)


def _pages_of(memory: torch.Tensor) -> range:
    """Return the addresses of the whole pages around `memory`."""
    start = memory.data_ptr()
    stop = memory.data_ptr() + memory.numel()
    return range(start // mmap.PAGESIZE * mmap.PAGESIZE, -(-stop // mmap.PAGESIZE) * mmap.PAGESIZE)


def _gaps(pages: range, locked: list[range]) -> Iterator[range]:
    """Yield the parts of `pages` outside `locked`. The locked ranges must not overlap."""
    at = pages.start
    for each in sorted(locked, key=lambda span: span.start):
        if at < each.start:
            yield range(at, each.start)
        at = each.stop
    if at < pages.stop:
        yield range(at, pages.stop)


def _as_tensor(pages: range, *, owner: torch.Tensor) -> torch.Tensor:
    """Return pages as 1-D uint8 that keeps `owner` alive.

    The owner has a byte in each page, so all stay mapped.
    """
    memory = (ctypes.c_ubyte * len(pages)).from_address(pages.start)
    memory.owner = owner  # type: ignore[attr-defined]
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=torch.uint8)
