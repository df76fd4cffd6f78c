"""Page-locking of ordinary memory in place, so that a device copies from it without blocking the host."""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import Protocol

import torch

logger = logging.getLogger(__name__)

CUDA_HOST_REGISTER_PORTABLE = 1  # locked for every device of the process

# The rates are typical of PCIe 4.0 x16.
REFUSED = (
    "%.2f GB of RAM are page-locked for the device, but the next %.2f GB were refused (%s). Further blocks are copied "
    "from ordinary memory: slower (often 6 GB/s instead of 25), and the host waits for each copy. Raise the limit on "
    "locked memory (ulimit -l; under WSL2 the memory of the virtual machine), or keep fewer blocks in RAM."
)


class PageLockError(OSError):
    """The driver refused to page-lock memory."""


class PageLock(Protocol):
    """Driver that page-locks memory in place."""

    def lock(self, memory: torch.Tensor) -> None:
        """Page-lock 1-D uint8 CPU memory.

        Raises:
            PageLockError: the driver refuses.
        """
        ...

    def unlock(self, memory: torch.Tensor) -> None:
        """Unlock memory that was locked. No copy from it may be in progress."""
        ...


class CudaPageLock:
    """Page lock that registers memory with CUDA.

    `pin_memory` would copy the block instead, into a pool that rounds sizes up to powers of two: 1.53 times the bytes
    of a Wan2.2 A14B block.

    Args:
        device: device that has a CUDA context; on another one the driver would create a context of about 0.5 GB.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._device = torch.device(device)

    def lock(self, memory: torch.Tensor) -> None:
        cudart = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            result = cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), CUDA_HOST_REGISTER_PORTABLE)
            if result != cudart.cudaError.success:
                _clear_last_error()
                raise PageLockError(f"cudaHostRegister: {cudart.cudaGetErrorString(result)}")

    def unlock(self, memory: torch.Tensor) -> None:
        # The result is ignored: the pages are unlocked at the latest when they are unmapped.
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class LockedBlocks:
    """Page-locked blocks. After the driver has refused one, no other is tried until one is unlocked.

    Keeps a reference to their memory and unlocks it at the latest when this object is deleted: if memory were unmapped
    while it is locked, the driver would take the next mapping at that address for the locked pages.
    """

    def __init__(self, driver: PageLock) -> None:
        self._driver = driver
        self._blocks: dict[int, torch.Tensor] = {}
        self._refused = False
        self._warned = False
        # Not at exit: the driver may be unloaded by then, and the system frees the pages.
        weakref.finalize(self, _unlock_all, driver, self._blocks).atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes that are page-locked now."""
        # A copy of the values, because other threads read this while one locks blocks.
        return sum(block.numel() for block in list(self._blocks.values()))

    def add(self, block: torch.Tensor) -> None:
        """Lock a block, unless it is locked. If the driver refuses, log a warning once and leave the block unlocked."""
        if self._refused or block.data_ptr() in self._blocks:
            return
        try:
            self._driver.lock(block)
        except PageLockError as err:
            self._refused = True
            self._warn(block.numel(), err)
        else:
            self._blocks[block.data_ptr()] = block

    def _warn(self, nbytes: int, err: PageLockError) -> None:
        if not self._warned:
            logger.warning(REFUSED, self.nbytes / 1e9, nbytes / 1e9, err)
        self._warned = True

    def remove(self, block: torch.Tensor) -> None:
        """Unlock a block, if it is locked, and allow new attempts. No copy from it may be in progress."""
        if self._blocks.pop(block.data_ptr(), None) is not None:
            self._refused = False
            self._driver.unlock(block)

    def release(self) -> None:
        """Unlock all blocks. No copy may be in progress."""
        _unlock_all(self._driver, self._blocks)


def _unlock_all(driver: PageLock, blocks: dict[int, torch.Tensor]) -> None:
    while blocks:
        driver.unlock(blocks.popitem()[1])


def _clear_last_error() -> None:
    # A refused call remains this thread's last CUDA error, and torch raises it at the next kernel launch. Launch one
    # here whose result is not needed.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
