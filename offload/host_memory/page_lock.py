"""Locks pages of ordinary memory, so that a device copies out of them by itself and the host need not wait."""

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
    "%.2f GB of RAM are page-locked for the device, the next %.2f GB were refused (%s). From here on the device gets "
    "its copies from ordinary memory: slower (often 6 GB/s instead of 25), and the host waits for each of them. Raise "
    "the limit on locked memory (ulimit -l; under WSL2 the memory of the virtual machine), or keep less in RAM."
)


class PageLockError(OSError):
    """The driver refused to lock memory."""


class PageLock(Protocol):
    """A driver that locks memory where it lies."""

    def lock(self, memory: torch.Tensor) -> None:
        """Lock the pages of 1-D uint8 CPU memory; raises `PageLockError` where the driver refuses."""
        ...

    def unlock(self, memory: torch.Tensor) -> None: ...


class CudaPageLock:
    """Registers memory with CUDA.

    `pin_memory` would copy it instead, into a pool that rounds every block up to a power of two: 1.53 times the bytes
    of a Wan2.2 A14B block.

    Args:
        device: on which a context is there already; on any other the driver would make one, of some 0.5 GB.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._device = torch.device(device)

    def lock(self, memory: torch.Tensor) -> None:
        cudart = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            result = cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), CUDA_HOST_REGISTER_PORTABLE)
            if result != cudart.cudaError.success:
                _forget_last_error()
                raise PageLockError(f"cudaHostRegister: {cudart.cudaGetErrorString(result)}")

    def unlock(self, memory: torch.Tensor) -> None:
        # Whatever the answer, the pages go back together with the mapping.
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class LockedBlocks:
    """The blocks a device copies by itself. After a refusal no other block is tried until one was unlocked.

    It keeps their memory, and unlocks it at the latest when it goes itself: the device would copy from pages that were
    given back while they are locked, whatever lies at that address by then.
    """

    def __init__(self, driver: PageLock) -> None:
        self._driver = driver
        self._blocks: dict[int, torch.Tensor] = {}
        self._refused = False
        self._told = False
        weakref.finalize(self, _unlock_all, driver, self._blocks).atexit = False

    @property
    def nbytes(self) -> int:
        """The bytes that are locked now."""
        return sum(block.numel() for block in list(self._blocks.values()))

    def add(self, block: torch.Tensor) -> None:
        """Lock a block, unless it is locked already; where the driver refuses, it stays ordinary memory.

        What that costs is told in the log, once.
        """
        if self._refused or block.data_ptr() in self._blocks:
            return
        try:
            self._driver.lock(block)
        except PageLockError as err:
            self._refused = True
            self._tell(block.numel(), err)
        else:
            self._blocks[block.data_ptr()] = block

    def _tell(self, nbytes: int, err: PageLockError) -> None:
        if not self._told:
            logger.warning(REFUSED, self.nbytes / 1e9, nbytes / 1e9, err)
        self._told = True

    def remove(self, block: torch.Tensor) -> None:
        """Unlock one block, if it is locked; the next one may be tried again. No copy out of it may be under way."""
        if self._blocks.pop(block.data_ptr(), None) is not None:
            self._refused = False
            self._driver.unlock(block)

    def release(self) -> None:
        """Unlock everything. No copy may be under way."""
        _unlock_all(self._driver, self._blocks)


def _unlock_all(driver: PageLock, blocks: dict[int, torch.Tensor]) -> None:
    while blocks:
        driver.unlock(blocks.popitem()[1])


def _forget_last_error() -> None:
    # A refused call stays behind as this thread's last CUDA error, and the next kernel would be blamed for it: let it
    # be this one, which nobody needs.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
