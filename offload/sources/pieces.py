"""Read pieces: ranges of files and their targets in memory, small enough for several threads to share a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..formats.layout import FlatLayout
from ..formats.safetensors_header import FileTensor, FileVersion

# Large enough for the cost of a call not to matter, small enough for four threads to share one matrix evenly. From the
# page cache (2 cores, 512 MB) one thread reads 7.0 GB/s, two 13.2 and four 13.2; pieces of 1 to 32 MB differ by 3 %.
PIECE_BYTES = 8 * 1024**2


@dataclass(frozen=True, kw_only=True)
class ReadPiece:
    """Range of a file, and its target in memory."""

    path: Path
    offset: int
    """First byte in the file."""
    nbytes: int
    target: int
    """First byte in the memory to fill."""
    names: tuple[str, ...]
    """Tensors that the piece contains at least a part of, for error messages."""
    version: FileVersion | None = None
    """Version that the file must have; None for any."""


def read_pieces(
    tensors: Mapping[str, FileTensor], layout: FlatLayout, *, piece_bytes: int = PIECE_BYTES
) -> tuple[ReadPiece, ...]:
    """Cut the reads that fill `layout` into pieces of at most `piece_bytes`.

    Pieces that are contiguous both in the file and in memory are merged, so that small tensors do not cost a read each.
    """
    pieces: list[ReadPiece] = []
    for piece in _cut(tensors, layout, piece_bytes):
        if pieces and _is_contiguous(pieces[-1], piece) and pieces[-1].nbytes + piece.nbytes <= piece_bytes:
            pieces[-1] = _merge(pieces[-1], piece)
        else:
            pieces.append(piece)
    return tuple(pieces)


def within(pieces: Iterable[ReadPiece], wanted: range) -> tuple[ReadPiece, ...]:
    """Return the parts of `pieces` whose targets lie in `wanted`; their targets count from `wanted.start`."""
    parts: list[ReadPiece] = []
    for piece in pieces:
        start = max(piece.target, wanted.start)
        stop = min(piece.target + piece.nbytes, wanted.stop)
        if start < stop:
            offset = piece.offset + start - piece.target
            parts.append(replace(piece, offset=offset, nbytes=stop - start, target=start - wanted.start))
    return tuple(parts)


def row_piece(name: str, tensor: FileTensor, rows: range) -> ReadPiece:
    """Return the piece for consecutive rows of a tensor, packed or not; its target is byte 0."""
    row_bytes = tensor.nbytes // tensor.shape[0]
    return ReadPiece(
        path=tensor.path,
        offset=tensor.offset + rows.start * row_bytes,
        nbytes=len(rows) * row_bytes,
        target=0,
        names=(name,),
        version=tensor.version,
    )


def _cut(tensors: Mapping[str, FileTensor], layout: FlatLayout, piece_bytes: int) -> Iterator[ReadPiece]:
    for place in layout.tensors:
        stored = tensors[place.name]
        assert stored.nbytes == place.nbytes, f"{place.name}: {stored.nbytes} bytes stored, {place.nbytes} laid out"
        for start in range(0, place.nbytes, piece_bytes):
            yield ReadPiece(
                path=stored.path,
                offset=stored.offset + start,
                nbytes=min(piece_bytes, place.nbytes - start),
                target=place.offset + start,
                names=(place.name,),
                version=stored.version,
            )


def _is_contiguous(first: ReadPiece, second: ReadPiece) -> bool:
    return (
        (first.path, first.version) == (second.path, second.version)
        and first.offset + first.nbytes == second.offset
        and first.target + first.nbytes == second.target
    )


def _merge(first: ReadPiece, second: ReadPiece) -> ReadPiece:
    return replace(first, nbytes=first.nbytes + second.nbytes, names=(*first.names, *second.names))
