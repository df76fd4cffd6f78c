"""Host memory in whole pages, the unit in which memory is page-locked and read from disk."""

from __future__ import annotations

import ctypes
import mmap
import platform

import numpy as np
import numpy.typing as npt
import torch

HUGE_PAGE = 2 * 1024**2

# Parameters of glibc's mallopt and their values.
M_TRIM_THRESHOLD, TRIM_BYTES = -1, 256 * 1024**2
M_MMAP_THRESHOLD, MMAP_BYTES = -3, 32 * 1024**2  # the largest value that glibc accepts


def in_pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def map_memory(nbytes: int) -> torch.Tensor:
    """Map untouched memory as a 1-D uint8 tensor; it is unmapped when the last view of it is deleted.

    Raises:
        OSError: the system refuses that much memory.
    """
    # A shared mapping (Python's default): after a fork, copy-on-write would move private pages, and the device would
    # go on to copy from the old ones.
    mapping = mmap.mmap(-1, max(nbytes, 1))
    # The memory outlives the run that allocates it, and inference tensors cannot be changed outside inference mode.
    with torch.inference_mode(False):
        return torch.frombuffer(mapping, dtype=torch.uint8)


def map_huge(nbytes: int) -> npt.NDArray[np.uint8]:
    """Map private memory that starts at a multiple of 2 MB, in huge pages if Linux provides them.

    Do not use the bytes between the end of the array and the end of its page.
    """
    # One huge page more than requested, to align the start; pages that are never touched use no RAM.
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    return memory[start : start + nbytes]


def keep_freed_memory() -> None:
    """Let glibc keep up to 256 MB of freed memory, in allocations of up to 32 MB, for later allocations.

    By default, glibc returns the activations of one block to the system and faults them in again page by page for the
    next block, unless large allocations were freed before. A process that has loaded a model has freed some, but
    WanStream never loads one. This cost up to 70 MB of page faults per block and about 5 % of a step (two 1.4B experts,
    980 tokens, 2 cores, one run each). Does nothing with other C libraries.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
    libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
