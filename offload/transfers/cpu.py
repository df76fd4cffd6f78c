"""Transfer backends without streams.

On a CPU, the fetch thread acts as the copy stream, and buffers in RAM act as the device memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch

from ...devices import DeviceEvent
from ...plan import BlockKey
from ..formats.decode import decode_block
from ..formats.layout import BlockFormat, allocate_flat, host_bytes
from ..host_memory.pages import keep_freed_memory
from ..patches import StagedPatches
from ..sources.base import BlockSource
from .base import BlockCopy, PendingBlock, TransferBackend


class CpuBackend(TransferBackend):
    """Copies bytes on the fetch thread; decodes out of the RAM slot and adds patches on the compute thread."""

    def __init__(self, source: BlockSource, formats: Mapping[BlockKey, BlockFormat], patches: StagedPatches) -> None:
        super().__init__(source, formats, patches)
        keep_freed_memory()

    def copy_in(self, copy: BlockCopy) -> PendingBlock:
        key = copy.key
        stored = copy.flat
        into = copy.into
        fmt, patch = self._formats[key.stored], self._patches.get(key)
        copied: tuple[DeviceEvent, DeviceEvent] | None = None
        if fmt.is_raw and stored is not None:
            start = time.perf_counter()
            _copy(stored, into[: fmt.stored.nbytes])
            copied = (start, time.perf_counter())
            copy.release_source()
        if fmt.is_raw and patch is None:
            return PendingBlock(copied=copied)
        scales = {} if fmt.is_raw else self._source.scales(key.stored)

        # Decoding and patching are torch arithmetic, so both are deferred to the compute thread: on this thread torch
        # would start a second thread pool, which competes with the first one for the cores.
        def decode() -> None:
            if not fmt.is_raw:
                assert stored is not None, f"{key} must be decoded, but has no RAM slot"
                decode_block(stored, into, fmt, scales)
                copy.release_source()  # only now: the slot is the only copy of the stored bytes
            if patch is not None:
                patch.add_to(into, fmt.computed)

        return PendingBlock(decode=decode, copied=copied)


class SynchronousBackend(CpuBackend):
    """Backend of a device without streams: blocks are completed in RAM and copied on the compute thread.

    Only that thread uses the device: with one queue of work, a second thread gains nothing, and torch's backend for it
    need not allow one. Blocks are decoded in RAM, because such devices do not have all stored dtypes.
    """

    def copy_in(self, copy: BlockCopy) -> PendingBlock:
        def load() -> None:
            fmt = self._formats[copy.key.stored]
            block = copy.flat
            assert block is not None, f"{copy.key} cannot be read directly into device memory"
            if not fmt.is_raw or self._patches.get(copy.key) is not None:
                # As large as the buffer: factors of a patch may be behind the block.
                block = allocate_flat(copy.into.numel(), "cpu")
                pending = CpuBackend.copy_in(self, copy._replace(into=block, release_source=_keep))
                assert pending.decode is not None
                pending.decode()
            copy.into[: block.numel()].copy_(block)
            copy.release_source()

        return PendingBlock(decode=load)


def _keep(drained: object = None) -> None:
    """Keep the slot until the block is on the device."""


def _copy(stored: torch.Tensor, into: torch.Tensor) -> None:
    # numpy copies on the calling thread; `Tensor.copy_` would use torch's thread pool.
    np.copyto(host_bytes(into), host_bytes(stored))
