"""Which parts of files are read past the page cache (O_DIRECT), and when that pays. Decides; reads nothing.

Such a read starts at a multiple of `ALIGNMENT` in the file and in memory. The tensors of a safetensors file start where
its header happens to end, at a multiple of 8, and a block's views at multiples of 256 (layout.py): file and memory are
congruent by chance only. So every read goes through an aligned bounce buffer of the thread that reads, and the wanted
bytes are copied out of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..host_memory.pages import HUGE_PAGE
from .pieces import ReadPiece

# A piece and the memory it is a piece of.
Read = tuple[ReadPiece, memoryview]

O_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux only

# The page size, a multiple of every sector size that disks have.
ALIGNMENT = 4096

# The bounce buffer of one thread: one huge page, which a disk fills in few pieces. Four threads read a file of 0.95 GB
# past the page cache at 2.5 to 2.9 GB/s into such pages and at 1.0 to 1.1 GB/s into ordinary ones (a few runs in turns
# on a virtual disk, whose host may have held the file); with 1 and 4 MB they were slower.
EXTENT_BYTES = HUGE_PAGE

# Bytes that nobody wants are read along where that saves a read: biases between the matrices of a block.
GAP_BYTES = 32 * 1024

# Of the RAM that is available: as much as the page cache is trusted to keep from one pass to the next.
CACHED_SHARE = 1 / 8


def reads_directly(file_bytes: int, available_bytes: int) -> bool:
    """Whether to read past the page cache what streams from files, pass after pass.

    A direct read with its copy out of the bounce buffer costs as much CPU time as a read from a warm cache, 0.11 to
    0.19 s per GB (2 cores, benchmarks/file_reading.py). A cold read through the cache gives no more GB/s, but
    costs 2 to 6 times that on the cores that compute: pages are taken, and given up again. So the cache pays with what
    it still holds in the next pass, and of a pass that does not fit it holds nothing. RAM that could hold one is better
    given to blocks as homes: those are chosen, page-locked and not pushed out by other files. What is left for the
    cache is whatever is small beside the RAM that is free.

    Args:
        file_bytes: bytes of all blocks that are streamed, of both experts.
        available_bytes: RAM that can still be taken.
    """
    return file_bytes > available_bytes * CACHED_SHARE


@dataclass(frozen=True, kw_only=True)
class DirectExtent:
    """One aligned read, and the wanted `parts` inside it with the memory they belong to.

    `span` is the aligned part of the file, with the names of all its parts. `wanted` bytes of it are needed: a file may
    end inside its last extent.
    """

    span: ReadPiece
    wanted: int
    parts: tuple[Read, ...]


def direct_extents(reads: Iterable[Read], *, extent_bytes: int = EXTENT_BYTES) -> tuple[DirectExtent, ...]:
    """Cover `reads` with aligned extents of at most `extent_bytes`, in the order of the file.

    No page is read twice, unless a byte is wanted in two places.
    """
    assert extent_bytes % ALIGNMENT == 0, f"an extent of {extent_bytes} bytes"
    return tuple(_extent(start, parts) for start, parts in _grouped(reads, extent_bytes))


def _grouped(reads: Iterable[Read], extent_bytes: int) -> Iterator[tuple[int, list[Read]]]:
    """The start of every extent and its parts."""
    start, end, parts = 0, 0, list[Read]()
    for piece, memory in sorted(reads, key=lambda read: (read[0].path, read[0].offset)):
        at, stop = piece.offset, piece.offset + piece.nbytes
        while at < stop:
            joins = start <= at < start + extent_bytes and _down(at) <= _up(end) + GAP_BYTES
            if not parts or not joins or not _same_file(parts[-1][0], piece):
                if parts:
                    yield start, parts
                start, parts = _down(at), []
            end = min(stop, start + extent_bytes)
            parts.append((_part(piece, at, end), memory))
            at = end
    if parts:
        yield start, parts


def _extent(start: int, parts: list[Read]) -> DirectExtent:
    end = max(piece.offset + piece.nbytes for piece, _ in parts)
    names = dict.fromkeys(name for piece, _ in parts for name in piece.names)
    span = replace(parts[0][0], offset=start, nbytes=_up(end) - start, target=0, names=tuple(names))
    return DirectExtent(span=span, wanted=end - start, parts=tuple(parts))


def _part(piece: ReadPiece, start: int, stop: int) -> ReadPiece:
    return replace(piece, offset=start, nbytes=stop - start, target=piece.target + start - piece.offset)


def _same_file(first: ReadPiece, second: ReadPiece) -> bool:
    return (first.path, first.version) == (second.path, second.version)


def _down(position: int) -> int:
    return position // ALIGNMENT * ALIGNMENT


def _up(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
