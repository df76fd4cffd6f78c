"""Copying beside computing on a CPU: the fetch thread is the stream, and RAM buffers are the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from ...devices import DeviceEvent
from ...plan import BlockKey
from ..formats.decode import decode_block
from ..formats.layout import BlockFormat, host_bytes
from ..host_memory.pages import keep_freed_memory
from ..patches import StagedPatches
from ..sources.base import BlockSource
from .base import PendingBlock, ReleaseSource


class CpuStreams:
    """The fetch thread only copies bytes; the computing thread decodes out of the slot, and adds patches.

    torch arithmetic on the fetch thread would start a second pool of threads that fights the first one for the cores.
    """

    device_bytes = 0

    def __init__(self, source: BlockSource, formats: Mapping[BlockKey, BlockFormat], patches: StagedPatches) -> None:
        self._source = source
        self._formats = formats
        self._patches = patches
        keep_freed_memory()

    def begin_run(self) -> None:
        return

    def land(
        self,
        key: BlockKey,
        stored: torch.Tensor | None,
        into: torch.Tensor,
        after: DeviceEvent,
        leave: ReleaseSource,
    ) -> PendingBlock:
        fmt = self._formats[key]
        patch = self._patches.get(key)
        decode: Callable[[], None] | None = None
        copied: tuple[DeviceEvent, DeviceEvent] | None = None
        if not fmt.is_raw:
            assert stored is not None, f"{key} has to be decoded, and lies in no slot"
            decode = self._decoding(key, stored, into, leave)
        elif stored is not None:
            began = time.perf_counter()
            _copy(stored, into[: fmt.stored.nbytes])
            copied = (began, time.perf_counter())
            leave()
        if patch is None:
            return PendingBlock(unpack=decode, copied=copied)

        def decode_and_patch() -> None:
            if decode is not None:
                decode()
            patch.add_to(into, fmt.computed)

        return PendingBlock(unpack=decode_and_patch, copied=copied)

    def _decoding(
        self, key: BlockKey, stored: torch.Tensor, into: torch.Tensor, leave: ReleaseSource
    ) -> Callable[[], None]:
        fmt, scales = self._formats[key], self._source.scales(key)

        def decode() -> None:
            decode_block(stored, into, fmt, scales)
            leave()

        return decode

    def end_run(self) -> None:
        return

    def settle(self) -> None:
        return

    def give_back(self) -> int:
        return 0

    def close(self) -> None:
        return


def _copy(stored: torch.Tensor, into: torch.Tensor) -> None:
    # numpy copies on this thread alone; torch would call its thread pool for it.
    np.copyto(host_bytes(into), host_bytes(stored))
