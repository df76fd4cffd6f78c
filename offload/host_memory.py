"""Host memory in whole pages, because pages are what gets locked for a device."""

from __future__ import annotations

import mmap

import torch


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
