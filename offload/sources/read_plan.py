"""Read plan: file pieces for parallel threads, and the extents read past the page cache.

A direct read has to start at a multiple of `ALIGNMENT` in the file and in memory. Safetensors
tensors start where the file header ends, at a multiple of 8, and block views start at multiples of
256 (`formats/layout.py`), so file and memory are rarely aligned alike. Every read therefore goes
into an aligned bounce buffer, one per reading thread. The wanted bytes are copied from there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.pages import HUGE_PAGE
from ..formats.layout import FlatLayout
from ..formats.safetensors_header import FileTensor, FileVersion

# Large enough for the call cost not to matter, small enough for four threads to share one matrix
# evenly. From the page cache (2 cores, 512 MB) one thread reads 7.0 GB/s, two 13.2 and four 13.2.
# Pieces of 1 to 32 MB differ by 3 %.
PIECE_BYTES = 8 * 1024**2


@dataclass(frozen=True, kw_only=True)
class ReadPiece:
    """File range, and target in memory."""

    path: Path
    offset: int
    """First byte in the file."""
    nbytes: int
    target: int
    """First byte in the memory to fill."""
    names: tuple[str, ...]
    """Tensors at least partly in the piece, for error messages."""
    version: FileVersion | None = None
    """Required file version. None for any."""


def read_pieces(
    tensors: Mapping[str, FileTensor], layout: FlatLayout, *, piece_bytes: int = PIECE_BYTES
) -> tuple[ReadPiece, ...]:
    """Cut the reads for `layout` into pieces of at most `piece_bytes`.

    Pieces contiguous both in the file and in memory are merged, so small tensors do not cost a read
    each.
    """
    pieces: list[ReadPiece] = []
    for piece in _cut(tensors, layout, piece_bytes):
        if pieces and _is_contiguous(pieces[-1], piece):
            last = pieces[-1]
            nbytes = last.nbytes + piece.nbytes
            if nbytes <= piece_bytes:
                pieces[-1] = replace(last, nbytes=nbytes, names=(*last.names, *piece.names))
                continue
        pieces.append(piece)
    return tuple(pieces)


def within(pieces: Iterable[ReadPiece], wanted: range) -> tuple[ReadPiece, ...]:
    """Return the parts of `pieces` with targets in `wanted`.

    The new targets count from `wanted.start`.
    """
    parts: list[ReadPiece] = []
    for piece in pieces:
        start = max(piece.target, wanted.start)
        stop = min(piece.target + piece.nbytes, wanted.stop)
        if start < stop:
            shift = piece.offset - piece.target
            part = _part(piece, start + shift, stop + shift)
            parts.append(replace(part, target=start - wanted.start))
    return tuple(parts)


def whole_piece(name: str, tensor: FileTensor, target: int = 0) -> ReadPiece:
    """Return the piece for a whole tensor."""
    return ReadPiece(
        path=tensor.path,
        offset=tensor.offset,
        nbytes=tensor.nbytes,
        target=target,
        names=(name,),
        version=tensor.version,
    )


def _cut(
    tensors: Mapping[str, FileTensor], layout: FlatLayout, piece_bytes: int
) -> Iterator[ReadPiece]:
    for place in layout.tensors:
        stored = tensors[place.name]
        assert stored.stored_bytes == place.nbytes, (
            f"{place.name}: {stored} is laid out in {place.nbytes} bytes"
        )
        target = place.offset
        for tensor in (stored, stored.behind):
            if tensor is not None:
                whole = whole_piece(place.name, tensor, target)
                end = tensor.offset + tensor.nbytes
                for start in range(tensor.offset, end, piece_bytes):
                    yield _part(whole, start, min(start + piece_bytes, end))
                target += tensor.nbytes


def _is_contiguous(first: ReadPiece, second: ReadPiece) -> bool:
    return (
        _same_file(first, second)
        and first.offset + first.nbytes == second.offset
        and first.target + first.nbytes == second.target
    )


# A piece, and the memory around the target.
Read = tuple[ReadPiece, memoryview]

O_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux only

# The page size, a multiple of every disk's sector size.
ALIGNMENT = 4096

# Bounce buffer size per thread: one huge page, which a disk fills in few segments. Four threads
# read a 0.95 GB file directly at 2.5 to 2.9 GB/s into huge pages and at 1.0 to 1.1 GB/s into
# ordinary ones (a few alternating runs on a virtual disk, maybe cached by the host). 1 and 4 MB
# were slower.
EXTENT_BYTES = HUGE_PAGE

# A gap up to this size is read along, because one read is faster than two: biases between the
# matrices of a block.
GAP_BYTES = 32 * 1024

# Share of the available RAM that the page cache should keep from one pass to the next.
CACHED_SHARE = 1 / 8


# Four threads keep a disk busy, on two cores too. Page cache copies are bound by cores, up to the
# memory bandwidth. One core is left to the compute thread.
DISK_READERS = 4
MOST_READERS = 16


@dataclass(frozen=True, kw_only=True)
class ReadRoute:
    """Route for a file's bytes, and the number of threads for one block."""

    direct: bool
    """Past the page cache, into a bounce buffer."""
    readers: int


def read_route(*, file_bytes: int, available_bytes: int, cores: int, in_ram: bool) -> ReadRoute:
    """Choose the route for files streamed in every pass.

    A direct read and the copy from its bounce buffer cost as much CPU time as a read from a warm
    cache: 0.11 to 0.19 s per GB (2 cores, benchmarks/file_reading.py). A cold read through the
    cache is not faster, but takes 2 to 6 times the CPU time, on cores that compute, because pages
    are allocated and evicted. So the cache only pays if the next pass finds the blocks in it, and
    it keeps nothing from a pass that does not fit. RAM for a whole pass is better used for
    RAM-resident blocks: they are chosen, page-locked and not evicted by other files. The cache is
    therefore only used for files that are small compared to the available RAM, and for files in RAM
    themselves: Linux accepts direct reads there since 6.6, but only copies twice.

    The pages of such files are not page-locked and copied from in place, for three reasons. The
    file can be written to at any time, and such a change could not be refused, as it is after a
    read. Tensors do not lie at multiples of 256 bytes. Linux locks pages of other file systems for
    reading only, which not every device supports.

    Args:
        file_bytes: bytes of all streamed blocks, in both experts.
        available_bytes: RAM that can still be allocated, in bytes.
        cores: cores that this process may use.
        in_ram: the file system is in RAM.
    """
    if not in_ram and file_bytes > available_bytes * CACHED_SHARE:
        return ReadRoute(direct=True, readers=DISK_READERS)
    return ReadRoute(direct=False, readers=max(DISK_READERS, min(MOST_READERS, cores - 1)))


@dataclass(frozen=True, kw_only=True)
class DirectExtent:
    """One aligned read and the wanted parts inside it."""

    span: ReadPiece
    """Aligned file range, with the names of all parts."""
    wanted: int
    """Bytes in `span` up to the end of the last part. The file may end before `span` does."""
    parts: tuple[Read, ...]
    """Wanted pieces, each with memory."""


def direct_extents(
    reads: Iterable[Read], *, extent_bytes: int = EXTENT_BYTES
) -> tuple[DirectExtent, ...]:
    """Cover `reads` with aligned extents of at most `extent_bytes`, in file order.

    No page is read twice, unless a byte is wanted in two places.
    """
    assert extent_bytes % ALIGNMENT == 0, f"an extent of {extent_bytes} bytes"
    return tuple(_extent(start, parts) for start, parts in _group(reads, extent_bytes))


def _group(reads: Iterable[Read], extent_bytes: int) -> Iterator[tuple[int, list[Read]]]:
    """Yield the start and the parts of every extent."""
    start = 0
    end = 0
    parts = list[Read]()
    for piece, memory in sorted(reads, key=lambda read: (read[0].path, read[0].offset)):
        at = piece.offset
        stop = piece.offset + piece.nbytes
        while at < stop:
            is_near = _round_down(at) <= _round_up(end) + GAP_BYTES
            joins = is_near and start <= at < start + extent_bytes
            if not parts or not joins or not _same_file(parts[-1][0], piece):
                if parts:
                    yield start, parts
                start = _round_down(at)
                parts = []
            end = min(stop, start + extent_bytes)
            parts.append((_part(piece, at, end), memory))
            at = end
    if parts:
        yield start, parts


def _extent(start: int, parts: list[Read]) -> DirectExtent:
    end = max(piece.offset + piece.nbytes for piece, _ in parts)
    names = dict.fromkeys(name for piece, _ in parts for name in piece.names)
    nbytes = _round_up(end) - start
    span = replace(parts[0][0], offset=start, nbytes=nbytes, target=0, names=tuple(names))
    return DirectExtent(span=span, wanted=end - start, parts=tuple(parts))


def _part(piece: ReadPiece, start: int, stop: int) -> ReadPiece:
    """Return the part of `piece` between two file offsets."""
    return replace(
        piece, offset=start, nbytes=stop - start, target=piece.target + start - piece.offset
    )


def _same_file(first: ReadPiece, second: ReadPiece) -> bool:
    return (first.path, first.version) == (second.path, second.version)


def _round_down(position: int) -> int:
    return position // ALIGNMENT * ALIGNMENT


def _round_up(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
