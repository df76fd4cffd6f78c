"""Block source that quantises blocks to fp8 or int8 ConvRot while reading, with a scale per row."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from ...plan.programs import BlockKey
from ...schema.refs import Storage
from ..core.pages import host_bytes
from ..core.threads import torch_thread_pool
from ..formats import layout, quantise
from ..formats.decode import FP8_DTYPES, decode_tensor
from ..formats.packing import EightBit
from ..formats.rotation import rotation_group
from .base import ReadThreads, SourceError
from .file import FileSource
from .read_plan import ALIGNMENT, EXTENT_BYTES

# Stored bytes that a thread reads and quantises at once: enough for a fast disk read, and few
# enough to be in the CPU cache when they are quantised. Two direct read extents cover them,
# wherever they start.
QUANTISED_BYTES = 2 * EXTENT_BYTES - ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class RowPiece:
    """Consecutive rows in one stored tensor's view, to be quantised or copied as they are."""

    tensor: layout.FlatTensor
    rows: range
    packing: EightBit | None
    """Form to quantise to. None: the rows are copied."""

    @property
    def bytes_of_tensor(self) -> slice:
        """Range of these rows in the tensor's stored bytes."""
        row_bytes = self.tensor.nbytes // self.tensor.view_shape[0]
        return slice(self.rows.start * row_bytes, self.rows.stop * row_bytes)


def quantised_packings(stored: layout.BlockFormat, storage: Storage) -> dict[str, EightBit]:
    """Return the packings for quantised matrices, by name.

    Matrices without an entry do not change. fp8 leaves out fp8 and packed matrices. int8 ConvRot
    leaves out packed matrices, and matrices with a column count that 4 does not divide.
    """
    packings: dict[str, EightBit] = {}
    for tensor in stored.stored.tensors:
        # The fp32 scales follow the codes, and must start at a multiple of 4 bytes.
        if tensor.packing is not None or math.prod(tensor.shape) % 4:
            continue
        plain = tensor.dtype in quantise.QUANTISABLE_DTYPES
        group = rotation_group(tensor.shape[-1])
        if storage == "fp8" and plain and tensor.name not in stored.scaled:
            packings[tensor.name] = EightBit(dtype=quantise.FP8)
        elif storage == "int8 ConvRot" and group and (plain or tensor.dtype in FP8_DTYPES):
            packings[tensor.name] = EightBit(group=group)
    return packings


def quantised_format(
    stored: layout.BlockFormat, storage: Storage, multiplied: Collection[torch.dtype] = ()
) -> layout.BlockFormat:
    """Return a block's format after quantisation, or `stored` itself if nothing is quantised.

    Args:
        stored: format of the block in its file.
        storage: form of the quantised block.
        multiplied: as in `block_format`.
    """
    changed = quantised_packings(stored, storage)
    if not changed:
        return stored
    tensors = stored.stored.tensors
    dtypes = {t.name: t.dtype for t in tensors} | dict.fromkeys(changed, torch.uint8)
    return layout.block_format(
        {t.name: (t.shape, dtypes[t.name]) for t in tensors},
        {tensor.name: stored.patch_dtype(tensor) for tensor in stored.computed.tensors},
        scaled=stored.scaled - changed.keys(),
        packings={t.name: t.packing for t in tensors if t.packing is not None} | changed,
        multiplied=multiplied,
        decoded={tensor.name for tensor in stored.computed.tensors if tensor.packing is None}
        - changed.keys(),
    )


def pieces_within(
    pieces: Iterable[RowPiece], kept: layout.FlatLayout, wanted: range
) -> Iterator[RowPiece]:
    """Yield the rows in `pieces` with a code, a scale or another byte in `wanted`.

    Args:
        pieces: rows in the stored block.
        kept: block layout after quantisation, to which `wanted` refers.
        wanted: bytes in that layout.
    """
    places = {tensor.name: tensor for tensor in kept.tensors}
    for piece in pieces:
        for rows in _rows_within(places[piece.tensor.name], piece, wanted):
            part = range(max(rows.start, piece.rows.start), min(rows.stop, piece.rows.stop))
            if part:
                yield replace(piece, rows=part)


def _rows_within(place: layout.FlatTensor, piece: RowPiece, wanted: range) -> tuple[range, ...]:
    """Return the rows for `wanted`: one range, or two if its scales belong to other rows."""
    if piece.packing is None:
        return (_overlap(place.offset, place.nbytes // place.view_shape[0], wanted),)
    rows, columns = place.shape
    codes = _overlap(place.offset, columns, wanted)
    scales = _overlap(place.offset + rows * columns, 4, wanted)
    codes, scales = (range(max(0, each.start), min(rows, each.stop)) for each in (codes, scales))
    if codes and scales and max(codes.start, scales.start) <= min(codes.stop, scales.stop):
        return (range(min(codes.start, scales.start), max(codes.stop, scales.stop)),)
    return codes, scales


def _overlap(offset: int, row_bytes: int, wanted: range) -> range:
    """Return the rows, with `row_bytes` from `offset` on, that overlap `wanted`.

    The range may exceed the existing rows.
    """
    return range((wanted.start - offset) // row_bytes, -((offset - wanted.stop) // row_bytes))


def row_pieces(stored: layout.BlockFormat, packings: Mapping[str, EightBit]) -> Iterator[RowPiece]:
    """Cut a block into pieces of whole rows.

    They have up to `QUANTISED_BYTES` unless a single row is larger.
    """
    for tensor in stored.stored.tensors:
        count = tensor.view_shape[0]
        at_once = max(1, QUANTISED_BYTES * count // tensor.nbytes)
        for start in range(0, count, at_once):
            rows = range(start, min(count, start + at_once))
            yield RowPiece(tensor=tensor, rows=rows, packing=packings.get(tensor.name))


# One thread quantises 2.2 GB of bf16 per second to fp8 (2 cores), and few disks are faster than
# four threads.
MAX_THREADS = 4

Tensors = Mapping[str, torch.Tensor]


class QuantisedSource:
    """Blocks from another source in fp8 (e4m3fn) or int8 ConvRot.

    One fp32 scale per row is behind the codes. This halves a bf16 or fp16 block in RAM and on the
    bus, and quarters an fp32 block. Other matrices do not change (`quantised_packings`). Several
    threads read and quantise a few rows at a time, with 6 MB of memory each (12 MB for int8), so no
    block is ever in RAM in the file's precision. The result depends on the file alone: it is the
    same for every read, on every rank. A rank that keeps the end of a matrix keeps all its scales,
    and reads the whole matrix for them. For an A14B block this is 5 % more in all with two ranks,
    and 36 % with eight.

    Args:
        inner: source to read from. `close` closes it too.
        storage: "fp8" or "int8 ConvRot".
        multiplied: dtypes of codes that are multiplied as stored.
        threads: threads that read and quantise. By default one per core, at most 4.

    Raises:
        ValueError: `threads` is less than 1.
    """

    def __init__(
        self,
        inner: FileSource,
        storage: Storage = "fp8",
        *,
        multiplied: Collection[torch.dtype] = (),
        threads: int | None = None,
    ) -> None:
        count = min(MAX_THREADS, os.cpu_count() or 1) if threads is None else threads
        # torch computes with one thread in each. Its own thread pool would compete with the compute
        # thread.
        self._threads = ReadThreads(count, partial(torch_thread_pool, name="wanstream-quantise"))
        self._inner = inner
        self._storage = storage
        self._packings = {
            key: quantised_packings(stored, storage) for key, stored in inner.formats.items()
        }
        self.formats: Mapping[BlockKey, layout.BlockFormat] = {
            key: quantised_format(stored, storage, multiplied)
            for key, stored in inner.formats.items()
        }
        self._memory = threading.local()

    @property
    def identity(self) -> str:
        """Digest of the stored tensors and their precision."""
        return f"{self._inner.identity} in {self._storage}, a scale for each row"

    def scales(self, key: BlockKey) -> Tensors:
        """Return the scales of matrices with separate scales that are not quantised."""
        scales = self._inner.scales(key)
        kept = self.formats[key].scaled
        return {name: scale for name, scale in scales.items() if name in kept}

    def file_bytes(self, key: BlockKey) -> int:
        return self._inner.file_bytes(key)

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        self._read(key, into, self._pieces(key))

    def range_file_bytes(self, key: BlockKey, wanted: range) -> int:
        pieces = pieces_within(self._pieces(key), self.formats[key].stored, wanted)
        return sum(part.stop - part.start for part in (piece.bytes_of_tensor for piece in pieces))

    def read_range(self, key: BlockKey, wanted: range, into: torch.Tensor) -> None:
        """See `RangeSource.read_range`.

        Reads whole rows, including all rows with scales in `wanted`.
        """
        kept = self.formats[key].stored
        whole = layout.allocate_flat(kept.nbytes, "cpu")  # pages that are never touched use no RAM
        self._read(key, whole, pieces_within(self._pieces(key), kept, wanted))
        np.copyto(host_bytes(into[: len(wanted)]), host_bytes(whole[wanted.start : wanted.stop]))

    def close(self) -> None:
        """Wait for reads in progress, then stop the threads and close the inner source."""
        self._threads.close()
        self._inner.close()

    def _pieces(self, key: BlockKey) -> Iterator[RowPiece]:
        return row_pieces(self._inner.formats[key], self._packings[key])

    def _read(self, key: BlockKey, into: torch.Tensor, pieces: Iterable[RowPiece]) -> None:
        views = layout.tensor_views(into, self.formats[key].stored)
        # Read here, because the threads below share the result.
        scales = self._inner.scales(key)
        self._threads.run(
            partial(self._read_piece, key, piece, views[piece.tensor.name], scales)
            for piece in pieces
        )

    def _read_piece(
        self, key: BlockKey, piece: RowPiece, into: torch.Tensor, scales: Tensors
    ) -> None:
        if piece.packing is not None:
            self._quantise(key, piece, piece.packing, into, scales)
            return
        flat = into.view(-1).view(torch.uint8)
        part = piece.bytes_of_tensor
        wanted = range(piece.tensor.offset + part.start, piece.tensor.offset + part.stop)
        self._inner.read_range(key, wanted, flat[part])

    def _quantise(
        self, key: BlockKey, piece: RowPiece, packing: EightBit, into: torch.Tensor, scales: Tensors
    ) -> None:
        name = piece.tensor.name
        part = slice(piece.rows.start, piece.rows.stop)
        stored, work = self._thread_memory(piece, work=not packing.group)
        self._inner.read_rows(key, name, piece.rows, stored)
        values = stored.view(piece.tensor.dtype).view(len(piece.rows), -1)
        codes, row_scales = (each[part] for each in packing.split(into, piece.tensor.shape))
        try:
            if packing.group:
                scale = _scale_of_rows(scales.get(name), part)
                _quantise_rotated(values, scale, packing.group, codes, row_scales)
            else:
                quantise.quantise_rows(values, codes, row_scales, work)
        except quantise.NotFiniteError as err:
            raise SourceError(
                f"{self._inner.path(key, name)}: {name} of block {key.block} holds NaN or an "
                f"infinity in row {part.start + err.row}, so it cannot be quantised: load it with "
                'storage "as stored", or another file'
            ) from err

    def _thread_memory(self, piece: RowPiece, *, work: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this thread's reused memory for the stored bytes of `piece` and for work."""
        part = piece.bytes_of_tensor
        nbytes = part.stop - part.start
        columns = piece.tensor.shape[1] if work else 0
        memory: tuple[torch.Tensor, torch.Tensor] | None = getattr(self._memory, "reused", None)
        if memory is None or memory[0].numel() < nbytes or memory[1].numel() < columns:
            fp32 = quantise.work_memory(columns) if work else torch.empty(0)
            stored = layout.allocate_flat(max(nbytes, QUANTISED_BYTES), "cpu")
            memory = self._memory.reused = (stored, fp32)
        return memory[0][:nbytes], memory[1]


def _scale_of_rows(scale: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    if scale is None or not scale.dim():
        return scale
    return scale[rows]


def _quantise_rotated(
    stored: torch.Tensor,
    scale: torch.Tensor | None,
    group: int,
    codes: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """Quantise rows to int8 ConvRot, a few at a time so they stay in the CPU cache.

    Raises:
        NotFiniteError: a row contains NaN or infinity.
    """
    rows, columns = stored.shape
    at_once = max(1, quantise.WORK_VALUES // columns)
    for start in range(0, rows, at_once):
        part = slice(start, min(rows, start + at_once))
        values = torch.empty(part.stop - start, columns, dtype=torch.float32)
        decode_tensor(stored[part], values, scale=_scale_of_rows(scale, part))
        try:
            codes[part], scales[part] = quantise.quantise_rotated(values, group)
        except quantise.NotFiniteError as err:
            raise quantise.NotFiniteError(start + err.row) from err
