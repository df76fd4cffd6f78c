"""Blocks kept in RAM in exactly the memory they need, each read once, when it is first asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from ..plan import BlockKey
from .host_memory import in_pages, map_memory
from .layout import BlockFormat, host_bytes
from .page_lock import CudaPageLock, LockedBlocks, PageLock
from .source import BlockSource, SourceError


class PinnedSource:
    """Keeps the blocks of another source in RAM.

    Nothing is loaded ahead: a block is read when it is first asked for, and never again. All blocks share one mapping
    of their exact size, in which a page that was not touched takes no memory.

    Args:
        inner: where the blocks are read from; closed together with this source.
        register: lock each block's pages, so that the device copies out of them by itself.
        driver: what locks pages; CUDA unless told otherwise.

    Raises:
        SourceError: the system does not give that much memory.
    """

    def __init__(self, inner: BlockSource, *, register: bool, driver: PageLock | None = None) -> None:
        self._inner = inner
        self._locked = LockedBlocks(driver or CudaPageLock()) if register else None
        self._places, total = page_aligned((key, inner.block_format(key).stored.nbytes) for key in inner.keys())
        self._memory: torch.Tensor | None = _map(total)
        self._filled: dict[BlockKey, torch.Tensor] = {}
        self._filling = threading.Lock()

    @property
    def bytes_held(self) -> int:
        """The bytes of the blocks that were read so far."""
        return sum(block.numel() for block in list(self._filled.values()))

    @property
    def locked_bytes(self) -> int:
        """Those of them that are page-locked."""
        return 0 if self._locked is None else self._locked.nbytes

    def keys(self) -> Iterable[BlockKey]:
        return self._inner.keys()

    def block_format(self, key: BlockKey) -> BlockFormat:
        return self._inner.block_format(key)

    def scales(self, key: BlockKey) -> Mapping[str, torch.Tensor]:
        return self._inner.scales(key)

    def host_block(self, key: BlockKey) -> torch.Tensor:
        block = self._filled.get(key)
        if block is not None:  # nobody waits for the reading of another block
            return block
        with self._filling:
            if key not in self._filled:
                self._filled[key] = self._fill(key)
            return self._filled[key]

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        np.copyto(host_bytes(into), host_bytes(self.host_block(key)))

    def close(self) -> None:
        """Unlock and give back the memory, and close the inner source. No copy out of a block may be under way."""
        with self._filling:
            if self._locked is not None:
                self._locked.release()
            self._filled.clear()
            self._memory = None
        self._inner.close()

    def _fill(self, key: BlockKey) -> torch.Tensor:
        if self._memory is None:
            raise SourceError(
                f"block {key.block} of {key.expert!r}: the source was closed; open it again to read from it"
            )
        block = self._memory[self._places[key]]
        self._inner.read_block(key, block)
        # Filled first: the driver would fault untouched pages in one by one.
        if self._locked is not None:
            self._locked.add(block)
        return block


def page_aligned(sizes: Iterable[tuple[BlockKey, int]]) -> tuple[dict[BlockKey, slice], int]:
    """Return where each block lies, and the bytes of all. Blocks share no page, because pages are what gets locked."""
    places: dict[BlockKey, slice] = {}
    end = 0
    for key, nbytes in sizes:
        places[key] = slice(end, end + nbytes)
        end += in_pages(nbytes)
    return places, end


def _map(nbytes: int) -> torch.Tensor:
    try:
        return map_memory(nbytes)
    except OSError as err:
        raise SourceError(
            f"{nbytes / 1e9:.1f} GB of RAM for all blocks are refused ({err.strerror}): stream from the file instead"
        ) from err
