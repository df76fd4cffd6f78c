"""Host memory in whole pages, because pages are what gets locked for a device and filled by a disk."""

from __future__ import annotations

import ctypes
import mmap
import platform

import numpy as np
import numpy.typing as npt
import torch

HUGE_PAGE = 2 * 1024**2

# Parameters of glibc's mallopt, and what they are set to.
M_TRIM_THRESHOLD, KEPT_BYTES = -1, 256 * 1024**2
M_MMAP_THRESHOLD, LARGEST_KEPT = -3, 32 * 1024**2  # the most it takes


def in_pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def map_memory(nbytes: int) -> torch.Tensor:
    """Map untouched memory as 1-D uint8. It goes when its last view is dropped, never under somebody who still reads.

    The mapping is of the shared kind (Python's default), so that a fork cannot move locked pages away from the device.

    Raises:
        OSError: the system does not give that much memory.
    """
    mapping = mmap.mmap(-1, max(nbytes, 1))
    with torch.inference_mode(False):
        return torch.frombuffer(mapping, dtype=torch.uint8)


def map_huge(nbytes: int) -> npt.NDArray[np.uint8]:
    """Map memory of this thread's own that starts at a multiple of 2 MB, in huge pages where Linux gives them.

    What follows the last byte in its page is not to be used. Untouched pages around it take no memory.
    """
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    return memory[start : start + nbytes]


def keep_freed_memory() -> None:
    """Let glibc keep up to 256 MB of what is freed, in blocks of up to 32 MB, for what is allocated next.

    By itself it gives the memory of one block's activations back to the system and takes it again page by page for the
    next block, unless it has seen large blocks freed before. A process that has loaded a model has, and ours loads
    nothing: with two 1.4 B experts, 980 tokens and two cores that was up to 70 MB for each block, and some 5 % of a
    step (one run of each). Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
