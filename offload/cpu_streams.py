"""Copying beside computing on a CPU: the fetch thread is the stream, and RAM buffers are the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from ..metrics import Mark
from ..plan import BlockKey
from .decode import decode_block
from .layout import BlockFormat, host_bytes
from .patches import HeldPatches
from .source import BlockSource
from .staging import Staging
from .streams import Arrival, Staged, nothing_left


class CpuStreams:
    """The fetch thread only reads and copies bytes; the computing thread decodes and adds patches.

    torch arithmetic on the fetch thread would start a second pool of threads that fights the first one for the cores.
    """

    device_bytes = 0
    pinned_bytes = 0

    def __init__(
        self, source: BlockSource, formats: Mapping[BlockKey, BlockFormat], patches: HeldPatches, *, slots: int
    ) -> None:
        self._source = source
        self._formats = formats
        self._patches = patches
        staged = [fmt.stored.nbytes for fmt in formats.values() if not fmt.is_raw]
        self._staging = Staging(slots, max(staged)) if staged else None

    def begin_run(self) -> None:
        if self._staging is not None:
            self._staging.begin_run()

    def stage(self, key: BlockKey) -> Staged:
        held = self._source.host_block(key)
        fmt = self._formats[key]
        if held is not None or fmt.is_raw:
            return Staged(key=key, memory=held)
        assert self._staging is not None
        slot = self._staging.take()
        memory = slot.memory[: fmt.stored.nbytes]
        self._source.read_block(key, memory)
        return Staged(key=key, memory=memory, slot=slot)

    def land(self, staged: Staged, into: torch.Tensor, after: Mark) -> Arrival:
        fmt = self._formats[staged.key]
        patch = self._patches.get(staged.key)
        if fmt.is_raw:
            self._copy(staged, into[: fmt.stored.nbytes])
            decode = nothing_left
        else:
            decode = self._decoding(staged, into, fmt)
        if patch is None:
            return Arrival(unpack=decode)

        def decode_and_patch() -> None:
            decode()
            patch.add_to(into, fmt.computed)

        return Arrival(unpack=decode_and_patch)

    def _copy(self, staged: Staged, target: torch.Tensor) -> None:
        if staged.memory is None:
            self._source.read_block(staged.key, target)
        else:
            # numpy copies on this thread alone; torch would call its thread pool for it.
            np.copyto(host_bytes(target), host_bytes(staged.memory))

    def _decoding(self, staged: Staged, into: torch.Tensor, fmt: BlockFormat) -> Callable[[], None]:
        scales = self._source.scales(staged.key)

        def decode() -> None:
            assert staged.memory is not None
            decode_block(staged.memory, into, fmt, scales)
            if staged.slot is not None and self._staging is not None:
                self._staging.give_back(staged.slot)

        return decode

    def stop(self) -> None:
        if self._staging is not None:
            self._staging.stop()

    def end_run(self) -> None:
        return

    def settle(self) -> None:
        return

    def give_back(self) -> int:
        return 0

    def close(self) -> None:
        self._staging = None
