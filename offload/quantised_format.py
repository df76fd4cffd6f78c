"""Which tensors of a block are quantised, and in which pieces of rows. Decides; reads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from .direct_read import ALIGNMENT, EXTENT_BYTES
from .layout import BlockFormat, FlatLayout, FlatTensor, block_format
from .quantise import QUANTISABLE_DTYPES, QUANTISED_DTYPE

# Stored bytes that a thread reads and quantises at once: enough for a disk to be fast, and still in the cache when they
# are quantised. Two extents of a direct read hold them, whatever byte they begin at.
PIECE_BYTES = 2 * EXTENT_BYTES - ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class RowPiece:
    """Consecutive rows of one tensor, and whether they are quantised or kept as they are stored."""

    tensor: FlatTensor
    rows: range
    quantised: bool

    @property
    def bytes_of_tensor(self) -> slice:
        """Where the rows lie among the tensor's stored bytes."""
        row_bytes = self.tensor.nbytes // self.tensor.shape[0]
        return slice(self.rows.start * row_bytes, self.rows.stop * row_bytes)


def quantised_names(stored: BlockFormat) -> frozenset[str]:
    """Return the matrices that quantising changes: all but those that are fp8 already, or packed."""
    return frozenset(
        tensor.name
        for tensor in stored.stored.tensors
        if tensor.dtype in QUANTISABLE_DTYPES and tensor.name not in stored.scaled
    )


def quantised_format(stored: BlockFormat) -> BlockFormat:
    """Return the format of a block after quantising; `stored` itself if there is nothing to quantise."""
    changed = quantised_names(stored)
    if not changed:
        return stored
    tensors = stored.stored.tensors
    return block_format(
        {t.name: (t.shape, QUANTISED_DTYPE if t.name in changed else t.dtype) for t in tensors},
        {tensor.name: tensor.dtype for tensor in stored.computed.tensors},
        scaled=stored.scaled | changed,
        packings={tensor.name: tensor.packing for tensor in tensors if tensor.packing is not None},
    )


def scale_bytes(stored: BlockFormat) -> int:
    """Bytes of the scales that quantising adds to a block, one fp32 number for each row."""
    changed = quantised_names(stored)
    return sum(4 * tensor.shape[0] for tensor in stored.stored.tensors if tensor.name in changed)


def pieces_within(pieces: Iterable[RowPiece], kept: FlatLayout, wanted: range) -> Iterator[RowPiece]:
    """What of `pieces` holds a byte of `wanted`, in whole rows; `kept` says where the rows lie after quantising."""
    places = {tensor.name: tensor for tensor in kept.tensors}
    for piece in pieces:
        place = places[piece.tensor.name]
        row_bytes = place.nbytes // place.shape[0]
        start = max(piece.rows.start, (wanted.start - place.offset) // row_bytes)
        stop = min(piece.rows.stop, -((place.offset - wanted.stop) // row_bytes))
        if start < stop:
            yield replace(piece, rows=range(start, stop))


def row_pieces(stored: BlockFormat, *, piece_bytes: int = PIECE_BYTES) -> Iterator[RowPiece]:
    """Cut a block into pieces of whole rows, of at most `piece_bytes` where a row is not larger than that."""
    changed = quantised_names(stored)
    for tensor in stored.stored.tensors:
        count = tensor.shape[0]
        at_once = max(1, piece_bytes * count // tensor.nbytes)
        for start in range(0, count, at_once):
            rows = range(start, min(count, start + at_once))
            yield RowPiece(tensor=tensor, rows=rows, quantised=tensor.name in changed)
