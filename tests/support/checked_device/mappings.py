"""Host memory mapped by the product for copies, in place of `map_memory`.

It is unmapped with the last tensor, then reused. The machine keeps the bytes to make late work read
poison, or the next block at this address.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable

import numpy as np
import torch

from .clocks import History


class Pages:
    """Whole pages in host memory."""

    history: History

    def __init__(self, nbytes: int) -> None:
        memory = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
        start = -memory.ctypes.data % mmap.PAGESIZE
        self.array = memory[start : start + nbytes]
        with torch.inference_mode(False):
            self.bytes = torch.from_numpy(self.array)
        self.start = self.bytes.data_ptr()
        self.nbytes = nbytes

    def mapped(self, nbytes: int, unmap: Callable[[Pages], None]) -> torch.Tensor:
        """Return the first bytes as a tensor. `unmap` is called when the last view is deleted."""
        mapping = _Mapping(self.array)
        weakref.finalize(mapping, unmap, self).atexit = False
        with torch.inference_mode(False):
            return torch.from_numpy(np.asarray(mapping))[:nbytes]

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return contiguous `memory` in these pages, without keeping them mapped."""
        start = memory.data_ptr() - self.start
        with torch.inference_mode(False):
            return self.bytes[start : start + memory.nbytes].view(memory.dtype).view(memory.shape)


class _Mapping:
    def __init__(self, array: np.ndarray) -> None:
        self.__array_interface__ = array.__array_interface__
