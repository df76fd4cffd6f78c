"""Blocks with weights already in RAM: page-locked in place, and copied to the device from there.

Only pages that a weight has to itself are locked. The first and last page may contain other
tensors, and a driver refuses to copy partly locked memory: copies of such tensors would fail with
"invalid argument".
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import psutil
import torch

from ...devices import DeviceRuntime
from ...plan.programs import BlockKey
from ..core.pages import LockedBlocks, ScatteredBlock, copy_to_device, host_bytes, map_memory
from ..sources.module import TensorSource

MAPS = Path("/proc/self/maps")
"""This process's memory mappings, one per line. Linux only."""

IN_RAM = ("/dev/zero", "/dev/nvidia")
"""Name prefixes of anonymous mappings for which Linux lists a file."""
SHARED_IN_RAM = ("/dev/shm/", "/memfd:", "/SYSV")
"""The same, if several processes share the mapping. In a private one, page-locking would copy every
page."""


class InPlaceBlocks:
    """Blocks copied to a device from the source tensors, without a slot.

    A block's first use page-locks the block memory, within the limits of `LockedBlocks`, and copies
    the bytes outside whole pages into a page-locked place. Copying a block that could not be locked
    blocks the host. Left out are blocks with a matrix that is not contiguous RAM or is stored in
    another dtype, and blocks mapped from a file: page-locking would read the whole file, and copy
    every page of a private mapping.

    Args:
        source: tensor source. The tensors must not be changed or closed before `close`.
        runtime: device runtime, which page-locks the tensors.

    Attributes:
        locked: page-locked memory of blocks.
    """

    def __init__(self, source: TensorSource, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self.locked = LockedBlocks(runtime.shared_pages)
        self._files = list(file_mappings())
        self._blocks: dict[BlockKey, ScatteredBlock] = {}
        for key, fmt in source.formats.items():
            weights = [(place, source.weights(key)[place.name]) for place in fmt.stored.tensors]
            if all(self._is_usable(weight, place.dtype) for place, weight in weights):
                parts = [(at.offset, _bytes_of(weight)) for at, weight in weights if weight.numel()]
                self._blocks[key] = ScatteredBlock(parts=tuple(parts))
        self._taken: set[BlockKey] = set()
        self._taking = threading.Lock()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._blocks)

    def take(self, key: BlockKey) -> ScatteredBlock:
        """Return the block memory. The first call page-locks it (read thread)."""
        with self._taking:
            if key not in self._taken:
                self._blocks[key] = self._lock(self._blocks[key])
                self._taken.add(key)
            return self._blocks[key]

    def close(self) -> None:
        """Unlock and release all memory. No copy from it may be in progress."""
        self.locked.release()
        self._blocks.clear()

    def _lock(self, block: ScatteredBlock) -> ScatteredBlock:
        parts: list[tuple[int, torch.Tensor]] = []
        edges: list[tuple[int, torch.Tensor]] = []
        for offset, memory in block.parts:
            if self._is_locked_by_owner(memory):
                parts.append((offset, memory))
                continue
            whole = whole_pages(memory)
            if whole:
                inside = memory[whole.start : whole.stop]
                self.locked.add(inside)
                # A copy must not start in the pages of one driver call and end in the pages of
                # another.
                parts += _at(offset + whole.start, self._runtime.shared_pages.split(inside))
            edges += _at(offset, [memory[: whole.start]])
            edges += _at(offset + whole.stop, [memory[whole.stop :]])
        return ScatteredBlock(parts=(*parts, *self._gather(edges)))

    def _gather(self, edges: list[tuple[int, torch.Tensor]]) -> Iterable[tuple[int, torch.Tensor]]:
        """Copy the edges into one page-locked place, and return them there."""
        if not edges:
            return []
        sizes = [edge.numel() for _, edge in edges]
        place = map_memory(sum(sizes))
        copies = place.split(sizes)
        for (_, edge), copy in zip(edges, copies, strict=True):
            np.copyto(host_bytes(copy), host_bytes(edge))  # torch would start a second thread pool
        self.locked.add(place)
        return [(offset, copy) for (offset, _), copy in zip(edges, copies, strict=True)]

    def _is_locked_by_owner(self, memory: torch.Tensor) -> bool:
        """Return True if the owner page-locked the memory: it stays locked while it exists."""
        # Both ends, because the owner may have locked only a part.
        ends = memory[:1], memory[-1:]
        is_locked = all(map(self._runtime.is_locked, ends))
        return is_locked and not self._runtime.shared_pages.has(memory)

    def _is_usable(self, weight: torch.Tensor, stored: torch.dtype) -> bool:
        if weight.dtype != stored or weight.device.type != "cpu" or not weight.is_contiguous():
            return False
        start = weight.data_ptr()
        stop = start + weight.nbytes
        return not any(start < file.stop and file.start < stop for file in self._files)


class LockedTensors:
    """Tensors in RAM, page-locked in place for one copy.

    They are unlocked at the latest when this object is deleted.

    Args:
        tensors: contiguous tensors, kept until they are unlocked.
        runtime: device runtime, which page-locks them.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        # No warning: the larger blocks of the same model warn at the first refusal. These tensors
        # come in every run.
        self._locked = LockedBlocks(runtime.shared_pages, level=logging.INFO)
        for memory in map(_bytes_of, tensors):
            if whole := whole_pages(memory):
                self._locked.add(memory[whole.start : whole.stop])

    @property
    def nbytes(self) -> int:
        """Bytes locked now."""
        return self._locked.nbytes

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a device copy of a tensor, made on the current stream.

        The host does not wait for the device: the driver takes the bytes outside whole pages, up to
        two pages, at once.
        """
        copied = torch.empty_like(tensor, device=self._runtime.device)
        parts = _at(0, self._runtime.shared_pages.split(_bytes_of(tensor)))
        copy_to_device(copied.view(-1).view(torch.uint8), ScatteredBlock(parts=tuple(parts)))
        return copied

    def release(self) -> None:
        """Unlock all tensors. No copy from them may be in progress."""
        self._locked.release()


def file_mappings() -> Iterable[range]:
    """Yield the addresses in this process with a file on a disk behind them.

    Raises:
        OSError: the system does not report them.
    """
    if not MAPS.exists():
        # Windows lists only mappings with a file.
        for mapping in psutil.Process().memory_maps(grouped=False):
            start = int(mapping.addr, 16)
            yield range(start, start + mapping.rss)
        return
    for line in MAPS.read_text(errors="replace").splitlines():
        # A path may contain spaces. Anonymous mappings have the inode 0.
        addresses, permissions, _, _, inode, *path = line.split(maxsplit=5)
        name = "".join(path)
        in_ram = name.startswith(IN_RAM + SHARED_IN_RAM if permissions.endswith("s") else IN_RAM)
        if inode != "0" and not in_ram:
            start, stop = (int(address, 16) for address in addresses.split("-"))
            yield range(start, stop)


def whole_pages(memory: torch.Tensor) -> range:
    """Return the range of `memory`, 1-D uint8, in whole pages."""
    start = -memory.data_ptr() % mmap.PAGESIZE
    return range(start, start + max(0, memory.numel() - start) // mmap.PAGESIZE * mmap.PAGESIZE)


def _at(offset: int, parts: Iterable[torch.Tensor]) -> Iterable[tuple[int, torch.Tensor]]:
    """Yield consecutive parts from `offset` on, each with the offset of the first byte.

    Skips empty parts.
    """
    for part in parts:
        if part.numel():
            yield offset, part
        offset += part.numel()


def _bytes_of(weight: torch.Tensor) -> torch.Tensor:
    assert weight.is_contiguous()
    with torch.inference_mode(weight.is_inference()):
        return weight.detach().reshape(-1).view(torch.uint8)
