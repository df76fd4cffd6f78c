"""Source that quantises blocks to fp8, one scale per row, while they are read."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from ...plan import BlockKey
from ..engine.threads import one_thread_pool
from ..formats.fp8 import QUANTISABLE_DTYPES, QUANTISED_DTYPE, NotFiniteError, quantise_rows, row_scales, work_memory
from ..formats.layout import BlockFormat, FlatLayout, FlatTensor, allocate_flat, block_format, host_bytes, tensor_views
from .base import RangeSource, SourceError
from .direct_read import ALIGNMENT, EXTENT_BYTES

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


# One quantises 2.2 GB of bf16 per second (2 cores), and few disks give more than four of them take.
MOST_THREADS = 4

Tensors = Mapping[str, torch.Tensor]


class RowSource(RangeSource, Protocol):
    """A source that can read a few rows of one parameter."""

    @property
    def identity(self) -> str:
        """Says what is stored, for those who share it."""
        ...

    def read_rows(self, key: BlockKey, name: str, rows: range, into: torch.Tensor) -> None:
        """Fill `into`, 1-D uint8 CPU memory, with those rows as they are stored. Any thread may call.

        Raises:
            SourceError: they could not be read; `into` then holds anything.
        """
        ...

    def path(self, key: BlockKey, name: str) -> Path:
        """Return the file that holds a parameter."""
        ...


class QuantisedSource:
    """Gives the blocks of another source in fp8 (e4m3fn) with one fp32 scale for each row.

    That halves what a bf16 or fp16 block takes in RAM and on the bus, and quarters an fp32 one. Matrices that are fp8
    already or packed stay as they are. Threads of its own read and quantise side by side, a few rows at a time, through
    6 MB of memory each: no block is ever in RAM in the form in which its file has it. What a block holds depends on its
    file alone, so it is the same however often and wherever it is read.

    Args:
        inner: where the blocks are read from; closed together with this source.
        threads: how many threads read and quantise: one for each core but at most 4, unless told otherwise.
        piece_bytes: stored bytes that a thread reads at once.
    """

    def __init__(self, inner: RowSource, *, threads: int | None = None, piece_bytes: int = PIECE_BYTES) -> None:
        self._threads = min(MOST_THREADS, os.cpu_count() or 1) if threads is None else threads
        if self._threads < 1:
            raise ValueError(f"{threads} threads cannot quantise: use 1 or more")
        self._inner = inner
        self._piece_bytes = piece_bytes
        self._formats = {key: quantised_format(inner.block_format(key)) for key in inner.keys()}
        self._scales: dict[BlockKey, Tensors] = {}
        self._own_scales: dict[BlockKey, Tensors] = {}
        self._memory = threading.local()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    @property
    def identity(self) -> str:
        """Says what is stored, for those who share it."""
        return f"{self._inner.identity} in fp8, a scale for each row"

    def keys(self) -> Iterable[BlockKey]:
        return self._formats.keys()

    def block_format(self, key: BlockKey) -> BlockFormat:
        return self._formats[key]

    def scales(self, key: BlockKey) -> Tensors:
        """Return the scales by parameter name, and keep them: 0.24 MB for an A14B block.

        They come with the first `read_block` of the block. Asked for before that, they cost a reading of it.
        """
        if key not in self._scales:
            self._keep(key, self._read(key, None))
        return self._scales[key]

    def file_bytes(self, key: BlockKey) -> int:
        return self._inner.file_bytes(key)

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        self._keep(key, self._read(key, tensor_views(into, self._formats[key].stored)))

    def range_file_bytes(self, key: BlockKey, wanted: range) -> int:
        return self.file_bytes(key) * len(wanted) // self._formats[key].stored.nbytes

    def read_range(self, key: BlockKey, wanted: range, into: torch.Tensor) -> None:
        """See `RangeSource`. The rows at both ends are read whole; `own_scales` has those of all rows read."""
        whole = allocate_flat(self._formats[key].stored.nbytes, "cpu")  # pages that are not touched take no memory
        fresh = self._read(key, tensor_views(whole, self._formats[key].stored), wanted)
        known = self._own_scales.setdefault(key, fresh)
        if not all(torch.equal(scale, known[name]) for name, scale in fresh.items()):
            raise self._changed(key)
        np.copyto(host_bytes(into[: len(wanted)]), host_bytes(whole[wanted.start : wanted.stop]))

    def own_scales(self, key: BlockKey) -> Tensors:
        """The scales by parameter name that the `read_range` of a block came by, [rows, 1]; 0 for all other rows."""
        return self._own_scales[key]

    def put_scales(self, key: BlockKey, scales: Tensors) -> None:
        """Those who have read the other rows say what all scales are."""
        self._scales[key] = {**self._inner.scales(key), **scales}

    def close(self) -> None:
        """Let reads that are under way end, then stop the threads and close the inner source."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        self._inner.close()

    def _read(self, key: BlockKey, into: Tensors | None, wanted: range | None = None) -> Tensors:
        """Read a block, only what holds the bytes `wanted` of it, or its scales alone if `into` is None; its scales."""
        stored = self._inner.block_format(key)
        fresh = _room_for_scales(stored)
        rows = row_pieces(stored, piece_bytes=self._piece_bytes)
        if wanted is not None:
            rows = pieces_within(rows, self._formats[key].stored, wanted)
        pieces = deque(piece for piece in rows if into is not None or piece.quantised)
        pool = self._started_pool()
        jobs = [pool.submit(self._drain, key, pieces, into, fresh) for _ in range(min(self._threads, len(pieces)))]
        wait(jobs)
        for job in jobs:
            job.result()
        return fresh

    def _keep(self, key: BlockKey, fresh: Tensors) -> None:
        # Kept by the first one that read the block: whoever copied scales to a device copied these.
        known = self._scales.get(key)
        if known is None:
            self._scales[key] = {**self._inner.scales(key), **fresh}
        elif not all(torch.equal(scale, known[name]) for name, scale in fresh.items()):
            raise self._changed(key)

    def _changed(self, key: BlockKey) -> SourceError:
        return SourceError(
            f"block {key.block} of {key.expert!r} is not what it was when it was first read: open its file again"
        )

    def _drain(self, key: BlockKey, pieces: deque[RowPiece], into: Tensors | None, scales: Tensors) -> None:
        while pieces:
            try:
                piece = pieces.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                if piece.quantised:
                    self._quantise(key, piece, into, scales)
                else:
                    assert into is not None
                    self._copy(key, piece, into[piece.tensor.name])
            except SourceError:
                pieces.clear()  # nobody wants the rest
                raise

    def _copy(self, key: BlockKey, piece: RowPiece, into: torch.Tensor) -> None:
        flat = into.view(-1).view(torch.uint8)
        self._inner.read_rows(key, piece.tensor.name, piece.rows, flat[piece.bytes_of_tensor])

    def _quantise(self, key: BlockKey, piece: RowPiece, into: Tensors | None, scales: Tensors) -> None:
        name, part = piece.tensor.name, slice(piece.rows.start, piece.rows.stop)
        stored, work = self._own_memory(piece)
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

    def _own_memory(self, piece: RowPiece) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory of this thread for the bytes of `piece` and to quantise in, the same for every piece."""
        part = piece.bytes_of_tensor
        nbytes, columns = part.stop - part.start, piece.tensor.shape[1]
        held: tuple[torch.Tensor, torch.Tensor] | None = getattr(self._memory, "held", None)
        if held is None or held[0].numel() < nbytes or held[1].numel() < columns:
            held = self._memory.held = (allocate_flat(max(nbytes, self._piece_bytes), "cpu"), work_memory(columns))
        return held[0][:nbytes], held[1]

    def _started_pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._closed:
                raise SourceError("the source was closed; open it again to read from it")
            if self._pool is None:
                self._pool = one_thread_pool(self._threads, "wanstream-quantise")
            return self._pool


def _room_for_scales(stored: BlockFormat) -> dict[str, torch.Tensor]:
    changed = quantised_names(stored)
    with torch.inference_mode(False):
        return {
            t.name: torch.zeros(t.shape[0], 1, dtype=torch.float32) for t in stored.stored.tensors if t.name in changed
        }
