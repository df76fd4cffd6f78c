"""Which bytes of which files go where, cut into pieces that threads can read side by side. Decides; reads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..formats.layout import FlatLayout
from ..formats.safetensors_header import FileTensor, FileVersion

# Large enough that the cost of a call does not count, small enough that four threads share one matrix evenly. From the
# page cache (2 cores, 512 MB) one thread reads 7.0 GB/s, two 13.2 and four 13.2; pieces of 1 to 32 MB differ by 3 %.
PIECE_BYTES = 8 * 1024**2


@dataclass(frozen=True, kw_only=True)
class ReadPiece:
    """`nbytes` bytes from byte `offset` of a file on, to byte `target` of the memory that is filled.

    `names` are the tensors that the piece holds at least a part of; `version` is the file's, None for any.
    """

    path: Path
    offset: int
    nbytes: int
    target: int
    names: tuple[str, ...]
    version: FileVersion | None = None


def read_pieces(
    tensors: Mapping[str, FileTensor], layout: FlatLayout, *, piece_bytes: int = PIECE_BYTES
) -> tuple[ReadPiece, ...]:
    """Cut the reads that fill `layout` into pieces of at most `piece_bytes`.

    Pieces that follow each other in the file as well as in memory become one, so that a block of many small tensors is
    not read in many small calls.
    """
    pieces: list[ReadPiece] = []
    for piece in _cut(tensors, layout, piece_bytes):
        if pieces and _continues(pieces[-1], piece) and pieces[-1].nbytes + piece.nbytes <= piece_bytes:
            pieces[-1] = _joined(pieces[-1], piece)
        else:
            pieces.append(piece)
    return tuple(pieces)


def within(pieces: Iterable[ReadPiece], wanted: range) -> tuple[ReadPiece, ...]:
    """Return what of `pieces` fills the bytes `wanted` of their memory; targets count from the first of them."""
    parts: list[ReadPiece] = []
    for piece in pieces:
        start = max(piece.target, wanted.start)
        stop = min(piece.target + piece.nbytes, wanted.stop)
        if start < stop:
            offset = piece.offset + start - piece.target
            parts.append(replace(piece, offset=offset, nbytes=stop - start, target=start - wanted.start))
    return tuple(parts)


def row_piece(name: str, tensor: FileTensor, rows: range) -> ReadPiece:
    """Return the piece of a file that holds consecutive rows of a tensor, packed or not; it fills memory of its own."""
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


def _continues(first: ReadPiece, second: ReadPiece) -> bool:
    return (
        (first.path, first.version) == (second.path, second.version)
        and first.offset + first.nbytes == second.offset
        and first.target + first.nbytes == second.target
    )


def _joined(first: ReadPiece, second: ReadPiece) -> ReadPiece:
    return replace(first, nbytes=first.nbytes + second.nbytes, names=(*first.names, *second.names))
