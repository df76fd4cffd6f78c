"""Block source that quantises blocks to fp8, with one scale per row, while it reads them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from ...plan import BlockKey
from ..engine.threads import torch_thread_pool
from ..formats.decode import QUANTISABLE_DTYPES, QUANTISED_DTYPE, NotFiniteError, quantise_rows, row_scales, work_memory
from ..formats.layout import BlockFormat, FlatLayout, FlatTensor, allocate_flat, block_format, host_bytes, tensor_views
from .base import ReadThreads, SourceError
from .file import FileSource
from .read_plan import ALIGNMENT, EXTENT_BYTES

# Stored bytes that a thread reads and quantises at once: enough for a disk to be fast, and few enough that they are in
# the CPU cache when they are quantised. Two extents of a direct read cover them, wherever they start.
PIECE_BYTES = 2 * EXTENT_BYTES - ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class RowPiece:
    """Consecutive rows of the view of one stored tensor, to be quantised or copied as they are."""

    tensor: FlatTensor
    rows: range
    quantised: bool

    @property
    def bytes_of_tensor(self) -> slice:
        """Range of the rows in the tensor's stored bytes."""
        row_bytes = self.tensor.nbytes // self.tensor.view_shape[0]
        return slice(self.rows.start * row_bytes, self.rows.stop * row_bytes)


def quantised_names(stored: BlockFormat) -> frozenset[str]:
    """Return the names of matrices that are quantised: all except those that are fp8 or packed already."""
    return frozenset(
        tensor.name
        for tensor in stored.stored.tensors
        if tensor.dtype in QUANTISABLE_DTYPES and tensor.name not in stored.scaled
    )


def quantised_format(stored: BlockFormat) -> BlockFormat:
    """Return the format of a block after quantisation; `stored` itself if nothing is quantised."""
    changed = quantised_names(stored)
    if not changed:
        return stored
    tensors = stored.stored.tensors
    return block_format(
        {t.name: (t.shape, QUANTISED_DTYPE if t.name in changed else t.dtype) for t in tensors},
        {tensor.name: stored.patch_dtype(tensor) for tensor in stored.computed.tensors},
        scaled=stored.scaled | changed,
        packings={tensor.name: tensor.packing for tensor in tensors if tensor.packing is not None},
        int8=stored.dtype is not None,
    )


def scale_bytes(stored: BlockFormat) -> int:
    """Return the bytes of scales that quantisation adds to a block: one fp32 value per row."""
    changed = quantised_names(stored)
    return sum(4 * tensor.shape[0] for tensor in stored.stored.tensors if tensor.name in changed)


def pieces_within(pieces: Iterable[RowPiece], kept: FlatLayout, wanted: range) -> Iterator[RowPiece]:
    """Yield the rows of `pieces` that contain a byte of `wanted`.

    Args:
        kept: layout of the block after quantisation, to which `wanted` refers.
    """
    places = {tensor.name: tensor for tensor in kept.tensors}
    for piece in pieces:
        place = places[piece.tensor.name]
        row_bytes = place.nbytes // place.view_shape[0]
        start = max(piece.rows.start, (wanted.start - place.offset) // row_bytes)
        stop = min(piece.rows.stop, -((place.offset - wanted.stop) // row_bytes))
        if start < stop:
            yield replace(piece, rows=range(start, stop))


def row_pieces(stored: BlockFormat, *, piece_bytes: int = PIECE_BYTES) -> Iterator[RowPiece]:
    """Cut a block into pieces of whole rows, of at most `piece_bytes` unless a single row is larger."""
    changed = quantised_names(stored)
    for tensor in stored.stored.tensors:
        count = tensor.view_shape[0]
        at_once = max(1, piece_bytes * count // tensor.nbytes)
        for start in range(0, count, at_once):
            rows = range(start, min(count, start + at_once))
            yield RowPiece(tensor=tensor, rows=rows, quantised=tensor.name in changed)


# One thread quantises 2.2 GB of bf16 per second (2 cores), and few disks are faster than four threads.
MAX_THREADS = 4

Tensors = Mapping[str, torch.Tensor]


class QuantisedSource:
    """Source of the blocks of another source in fp8 (e4m3fn), with one fp32 scale per row.

    Halves the bytes of a bf16 or fp16 block in RAM and on the bus, and quarters those of an fp32 block. Matrices that
    are fp8 or packed already are not changed. Several threads read and quantise a few rows at a time, with 6 MB of
    memory each, so that no block is ever in RAM in the precision of its file. The result depends on the file alone: it
    is the same for every read, on every rank.

    Args:
        inner: source to read from; `close` closes it too.
        threads: threads that read and quantise; default one per core, at most 4.
        piece_bytes: stored bytes that a thread reads at once.

    Raises:
        ValueError: `threads` is less than 1.
    """

    def __init__(self, inner: FileSource, *, threads: int | None = None, piece_bytes: int = PIECE_BYTES) -> None:
        count = min(MAX_THREADS, os.cpu_count() or 1) if threads is None else threads
        # torch computes with one thread in each: its own pool of threads would compete with the compute thread.
        self._threads = ReadThreads(count, partial(torch_thread_pool, name="wanstream-quantise"))
        self._inner = inner
        self._piece_bytes = piece_bytes
        self.formats: Mapping[BlockKey, BlockFormat] = {
            key: quantised_format(stored) for key, stored in inner.formats.items()
        }
        self._scales: dict[BlockKey, Tensors] = {}
        self._range_scales: dict[BlockKey, Tensors] = {}
        self._memory = threading.local()

    @property
    def identity(self) -> str:
        """Digest of the stored tensors and their precision."""
        return f"{self._inner.identity} in fp8, a scale for each row"

    def scales(self, key: BlockKey) -> Tensors:
        """Return the scales by parameter name and keep them: 0.24 MB for an A14B block.

        The first `read_block` of a block computes them. Before that, this method reads the block to compute them.
        """
        if key not in self._scales:
            self._keep(key, self._read(key, None))
        return self._scales[key]

    def file_bytes(self, key: BlockKey) -> int:
        return self._inner.file_bytes(key)

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        self._keep(key, self._read(key, tensor_views(into, self.formats[key].stored)))

    def range_file_bytes(self, key: BlockKey, wanted: range) -> int:
        return self.file_bytes(key) * len(wanted) // self.formats[key].stored.nbytes

    def read_range(self, key: BlockKey, wanted: range, into: torch.Tensor) -> None:
        """See `RangeSource.read_range`. Reads whole rows at both ends; `local_scales` has the scales of all of them."""
        whole = allocate_flat(self.formats[key].stored.nbytes, "cpu")  # pages that are never touched use no RAM
        scales = self._read(key, tensor_views(whole, self.formats[key].stored), wanted)
        first = self._range_scales.setdefault(key, scales)
        if not all(torch.equal(scale, first[name]) for name, scale in scales.items()):
            raise self._changed(key)
        np.copyto(host_bytes(into[: len(wanted)]), host_bytes(whole[wanted.start : wanted.stop]))

    def local_scales(self, key: BlockKey) -> Tensors:
        """Return the scales that `read_range` computed, [rows, 1] by parameter name; 0 for all other rows."""
        return self._range_scales[key]

    def set_scales(self, key: BlockKey, scales: Tensors) -> None:
        """Set all scales of a block, gathered from the ranks that have read its rows."""
        self._scales[key] = {**self._inner.scales(key), **scales}

    def close(self) -> None:
        """Wait for reads in progress, then stop the threads and close the inner source."""
        self._threads.close()
        self._inner.close()

    def _read(self, key: BlockKey, into: Tensors | None, wanted: range | None = None) -> Tensors:
        """Read a block and return its scales.

        Args:
            into: memory of the block by parameter name; None: compute the scales only.
            wanted: bytes of the quantised block to read, widened to whole rows; None: all of them.
        """
        stored = self._inner.formats[key]
        scales = _allocate_scales(stored)
        rows = row_pieces(stored, piece_bytes=self._piece_bytes)
        if wanted is not None:
            rows = pieces_within(rows, self.formats[key].stored, wanted)
        self._threads.run(
            partial(self._quantise if piece.quantised else self._copy, key, piece, into, scales)
            for piece in rows
            if into is not None or piece.quantised
        )
        return scales

    def _keep(self, key: BlockKey, scales: Tensors) -> None:
        # The first scales of a block are kept and never replaced: copies of them may be on a device.
        first = self._scales.get(key)
        if first is None:
            self._scales[key] = {**self._inner.scales(key), **scales}
        elif not all(torch.equal(scale, first[name]) for name, scale in scales.items()):
            raise self._changed(key)

    def _changed(self, key: BlockKey) -> SourceError:
        return SourceError(
            f"block {key.block} of {key.expert!r} has changed since it was first read: open its file again"
        )

    def _copy(self, key: BlockKey, piece: RowPiece, into: Tensors | None, scales: Tensors) -> None:
        assert into is not None, "only scales are computed"
        flat, part = into[piece.tensor.name].view(-1).view(torch.uint8), piece.bytes_of_tensor
        wanted = range(piece.tensor.offset + part.start, piece.tensor.offset + part.stop)
        self._inner.read_range(key, wanted, flat[part])

    def _quantise(self, key: BlockKey, piece: RowPiece, into: Tensors | None, scales: Tensors) -> None:
        name, part = piece.tensor.name, slice(piece.rows.start, piece.rows.stop)
        stored, work = self._thread_memory(piece)
        self._inner.read_rows(key, name, piece.rows, stored)
        values = stored.view(piece.tensor.dtype).view(len(piece.rows), -1)
        try:
            if into is None:
                row_scales(values, scales[name][part], work)
            else:
                quantise_rows(values, into[name][part], scales[name][part], work)
        except NotFiniteError as err:
            raise SourceError(
                f"{self._inner.path(key, name)}: {name} of block {key.block} holds NaN or an infinity in row "
                f'{part.start + err.row}, so it cannot be quantised: load it with storage "as stored", or another file'
            ) from err

    def _thread_memory(self, piece: RowPiece) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this thread's memory for the stored bytes of `piece` and for quantising, reused by all pieces."""
        part = piece.bytes_of_tensor
        nbytes, columns = part.stop - part.start, piece.tensor.shape[1]
        memory: tuple[torch.Tensor, torch.Tensor] | None = getattr(self._memory, "reused", None)
        if memory is None or memory[0].numel() < nbytes or memory[1].numel() < columns:
            memory = self._memory.reused = (allocate_flat(max(nbytes, self._piece_bytes), "cpu"), work_memory(columns))
        return memory[0][:nbytes], memory[1]


def _allocate_scales(stored: BlockFormat) -> dict[str, torch.Tensor]:
    changed = quantised_names(stored)
    with torch.inference_mode(False):  # the scales outlive the run that first reads the block
        return {
            t.name: torch.zeros(t.shape[0], 1, dtype=torch.float32) for t in stored.stored.tensors if t.name in changed
        }
