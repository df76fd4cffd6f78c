"""Host memory in whole pages, the unit for page-locking and disk reads.

Ordinary memory is page-locked in place, so a device copies from it without blocking the host.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import platform
import sys
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ...devices import NoPageLockError, PageLockError
from ...devices.machine import PageLock as PageLock

HUGE_PAGE = 2 * 1024**2  # on x86, and on ARM with pages of 4 KB

TAKES_ADVICE = sys.platform == "linux"
"""True if mappings can use huge pages and stay apart from forked processes. Other systems map
ordinary pages."""

MADV_WIPEONFORK = 18
"""Linux advice missing in Python's `mmap`."""

LOCK_BYTES = 128 * 1024**2
"""Largest memory piece to page-lock, and to copy, in one driver call.

CUDA takes 0.1 to 0.3 s per GB to lock pages. Other threads' launches and copies wait meanwhile: up
to 0.2 s per Wan2.2 A14B block, or 40 ms per piece. Neither was measured here.
"""

# Parameters and values for glibc's mallopt.
M_TRIM_THRESHOLD = -1
TRIM_BYTES = 256 * 1024**2
M_MMAP_THRESHOLD = -3
MMAP_BYTES = 32 * 1024**2  # glibc's upper limit


def host_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the bytes of a contiguous CPU tensor as an array that shares its memory.

    Fetch and read threads copy with numpy, because a torch copy there would start a second thread
    pool next to the compute thread's.
    """
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def in_pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def map_memory(nbytes: int) -> torch.Tensor:
    """Map untouched private memory as a 1-D uint8 tensor. Deleting the last view unmaps it.

    On Linux, memory from 2 MB up starts at a multiple of 2 MB and is mapped in huge pages: one
    fault, and one entry for the driver to lock, in place of 512. A forked process finds zeros
    there.

    Raises:
        OSError: the system refuses this much memory.
    """
    spare = 0
    if TAKES_ADVICE and nbytes >= HUGE_PAGE:
        spare = HUGE_PAGE  # to align the start, never touched
    start = 0
    # mmap and `frombuffer` refuse 0 bytes.
    mapping = _map_private(max(nbytes, 1) + spare)
    if spare:
        start = -np.frombuffer(mapping, np.uint8).ctypes.data % HUGE_PAGE
        # Only whole huge pages within the request. The last one would take up to 2 MB outside any
        # account.
        with suppress(OSError):  # some kernels have no huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE_PAGE * HUGE_PAGE)
    # The memory outlives the run that allocates it, and inference tensors cannot be changed outside
    # inference mode.
    with torch.inference_mode(False):
        memory = torch.frombuffer(mapping, dtype=torch.uint8, count=max(nbytes, 1), offset=start)
        return memory[:nbytes]


def _map_private(nbytes: int) -> mmap.mmap:
    if not TAKES_ADVICE:
        return mmap.mmap(-1, nbytes)
    # Python maps shared memory by default. For shared memory, Linux refuses MADV_WIPEONFORK and, in
    # its default configuration, uses no huge pages.
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # After a fork, copy-on-write would move pages while the device copies from them, or copy them
    # to a child without need. MADV_DONTFORK does not work here: the child reuses the addresses, and
    # deleting its copy of this object would unmap them again.
    with suppress(OSError):  # some sandboxes do not take this advice
        mapping.madvise(MADV_WIPEONFORK)
    return mapping


class ScatteredBlock(NamedTuple):
    """Block bytes in several places in host memory, without the padding between tensors."""

    parts: tuple[tuple[int, torch.Tensor], ...]
    """Offset in the block, and 1-D uint8 memory, for every part."""


HostBlock: TypeAlias = "torch.Tensor | ScatteredBlock"
"""Block bytes in host memory: 1-D uint8, or scattered."""


def copy_to_device(into: torch.Tensor, host: HostBlock) -> None:
    """Copy page-locked memory to the device, on the current stream, without a wait.

    Args:
        into: 1-D uint8 device memory, as large as `host`.
        host: 1-D uint8 memory from a block's start, locked in pieces by `LockedBlocks`, or parts
            locked in one piece each. From unlocked memory, the copy blocks the host.
    """
    if isinstance(host, ScatteredBlock):
        for offset, part in host.parts:
            into[offset : offset + part.numel()].copy_(part, non_blocking=True)
        return
    # A driver refuses, or stages, a copy that starts in one locked piece and ends in the next.
    for start in range(0, host.numel(), LOCK_BYTES):
        piece = slice(start, start + LOCK_BYTES)
        into[piece].copy_(host[piece], non_blocking=True)


def copy_to_host(host: torch.Tensor, block: torch.Tensor) -> None:
    """Copy 1-D uint8 device memory to equally large host memory, as `copy_to_device`."""
    for start in range(0, host.numel(), LOCK_BYTES):
        piece = slice(start, start + LOCK_BYTES)
        host[piece].copy_(block[piece], non_blocking=True)


def keep_freed_memory() -> None:
    """Let glibc keep up to 256 MB of freed memory, in allocations up to 32 MB, for reuse.

    By default, glibc returns one block's activations to the system and faults them in again page by
    page for the next block, unless large allocations were freed before. A process that has loaded a
    model has freed some, but WanStream never loads one. This cost up to 70 MB of page faults per
    block and about 5 % of a step (two 1.4B experts, 980 tokens, 2 cores, one run each). Does
    nothing with other C libraries.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    # Both are set, because after one call glibc no longer raises the other one above 128 KB.
    libc.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
    libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


logger = logging.getLogger(__name__)

# The rates are typical for PCIe 4.0 x16.
REFUSED = (
    "%.2f GB of RAM are page-locked for the device, but the next %.2f GB were refused (%s). "
    "Further blocks are copied from ordinary memory: slower (often 6 GB/s instead of 25), and the "
    "host waits for each copy. %s"
)


def lock_limit() -> str:
    """Return this system's usual limit on page-locked memory, and a remedy."""
    fewer = "keep fewer blocks in RAM"
    if platform.system() == "Windows":
        return (
            "Windows locks at most about half of the RAM for a GPU, often less: add RAM, or "
            f"{fewer}."
        )
    if "microsoft" in platform.release().lower():
        return (
            "WSL2 locks about 1 GB, whatever `ulimit -l` says: give the virtual machine more "
            f"memory (`memory=` in .wslconfig), run under Linux itself, or {fewer}."
        )
    return f"Raise the limit on locked memory (`ulimit -l`), free RAM, or {fewer}."


class LockedBlocks:
    """Blocks page-locked in pieces of `LOCK_BYTES`, each block as a whole or not at all.

    Once the driver has refused a block, no other is tried until one is unlocked. The memory is kept
    alive and unlocked at the latest when this object is deleted. If locked memory were unmapped,
    the driver would take the next mapping at the same address for the locked pages.

    Args:
        driver: locks the pages. None: no block is locked.
        level: log level for the first refusal.
    """

    def __init__(self, driver: PageLock | None, *, level: int = logging.WARNING) -> None:
        self._driver = driver
        self._level = level
        self._blocks: dict[_Place, tuple[torch.Tensor, ...]] = {}
        self._refused = False
        self._warned = False
        self._one_at_a_time = threading.Lock()  # a driver locks pages for one call at a time anyway
        # Not at exit: the driver may be unloaded by then, and the system frees the pages.
        weakref.finalize(self, _unlock_all, driver, self._blocks).atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes page-locked now."""
        # A list, because other threads read this while one locks blocks.
        return sum(piece.numel() for pieces in list(self._blocks.values()) for piece in pieces)

    def add(self, block: torch.Tensor, *, filled: int | None = None) -> bool:
        """Lock a block, unless it is locked.

        If the driver refuses, log it once and leave the block unlocked.

        Args:
            block: 1-D uint8 memory.
            filled: bytes written so far. The pages behind them are touched first, because the
                driver would fault them in one by one. None for all.

        Returns:
            True if this call has locked it.
        """
        with self._one_at_a_time:
            if self._driver is None or self._refused or _place(block) in self._blocks:
                return False
            if filled is not None:
                # `in_pages` rounds up, so no written byte is overwritten.
                host_bytes(block)[in_pages(filled) :: mmap.PAGESIZE] = 0
            try:
                self._blocks[_place(block)] = _lock(self._driver, block)
            except PageLockError as err:
                self._refused = True
                if not self._warned:
                    remedy = "" if isinstance(err, NoPageLockError) else lock_limit()
                    logger.log(
                        self._level, REFUSED, self.nbytes / 1e9, block.numel() / 1e9, err, remedy
                    )
                self._warned = True
                return False
            return True

    def remove(self, block: torch.Tensor) -> None:
        """Unlock a block, if it is locked, and allow new attempts.

        No copy from it may be in progress.
        """
        with self._one_at_a_time:
            pieces = self._blocks.pop(_place(block), None)
            if pieces is not None:
                self._refused = False
                _unlock(self._driver, pieces)

    def release(self) -> None:
        """Unlock all blocks, and allow new attempts. No copy may be in progress."""
        _unlock_all(self._driver, self._blocks)
        self._refused = False


_Place: TypeAlias = "tuple[int, int]"
"""Block address and size. Several views of a storage may start at the same address."""


def _place(block: torch.Tensor) -> _Place:
    return block.data_ptr(), block.numel()


def _lock(driver: PageLock, block: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Lock all pieces of a block. After an error, unlock the earlier pieces and raise it."""
    locked: list[torch.Tensor] = []
    try:
        for piece in block.split(LOCK_BYTES):
            driver.lock_pages(piece)
            locked.append(piece)
    except BaseException:  # an interrupt too
        _unlock(driver, locked)
        raise
    return tuple(locked)


def _unlock(driver: PageLock | None, pieces: Iterable[torch.Tensor]) -> None:
    assert driver is not None, "a driver has locked these pieces"
    for piece in pieces:
        driver.unlock_pages(piece)


def _unlock_all(driver: PageLock | None, blocks: dict[_Place, tuple[torch.Tensor, ...]]) -> None:
    while blocks:
        _, pieces = blocks.popitem()
        _unlock(driver, pieces)
