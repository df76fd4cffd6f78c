"""Block source that reads safetensors and GGUF files when a block is needed."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from contextlib import closing
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from ...devices import core_count
from ...devices.machine import available_bytes
from ...plan.programs import BlockKey
from ..core.pages import host_bytes
from ..formats.layout import BlockFormat, block_format, flat_layout
from ..formats.packing import EightBit, Microscaled, Packing
from ..formats.safetensors_header import CheckpointFileError, FileTensor
from .base import RangeSource, SourceError
from .read_plan import PIECE_BYTES, Read, ReadPiece, read_pieces, read_route, whole_piece, within
from .reader import HAS_PREADV, FileReader, lies_in_ram

TensorsOfBlock = Mapping[str, FileTensor]

SCALAR_SHAPES = ((), (1,), (1, 1))


class FileSource(RangeSource):
    """Source of blocks stored in files.

    Reads nothing until a block or its scales are requested.

    Args:
        blocks: tensors in each block by parameter name. The layout keeps their order.
        computed_dtypes: compute dtype: one for all parameters, or one for each block and parameter
            name.
        scales: scales for stored tensors by parameter name, with one value per tensor or one per
            row.
        multiplied: dtypes of codes that are multiplied as stored.
        decoded: parameters in a block whose codes are decoded all the same.
        readers: threads that read one block together. None: decide by `read_route`.
        portable: use seek and read instead of `preadv`.
        direct: read past the page cache (O_DIRECT). If the file system refuses, log it and read
            through the cache. None: decide by `read_route`.

    Attributes:
        reader: reads the files, and counts the bytes.

    Raises:
        CheckpointFileError: a scale's shape matches neither the whole tensor nor its rows.
    """

    def __init__(
        self,
        blocks: Mapping[BlockKey, TensorsOfBlock],
        *,
        computed_dtypes: Mapping[BlockKey, Mapping[str, torch.dtype]] | torch.dtype,
        scales: Mapping[BlockKey, TensorsOfBlock] | None = None,
        multiplied: Collection[torch.dtype] = (),
        decoded: Mapping[BlockKey, Collection[str]] | None = None,
        readers: int | None = None,
        portable: bool = not HAS_PREADV,
        direct: bool | None = None,
    ) -> None:
        self._blocks = blocks
        self._stored_scales = scales or {}
        self._scales: dict[BlockKey, Mapping[str, torch.Tensor]] = {}
        self.formats: dict[BlockKey, BlockFormat] = {}
        for key, tensors in blocks.items():
            scaled = self._stored_scales.get(key, {})
            _check_shapes(scaled, tensors)
            dtypes = (
                computed_dtypes
                if isinstance(computed_dtypes, torch.dtype)
                else computed_dtypes[key]
            )
            self.formats[key] = block_format(
                {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()},
                dtypes,
                scaled,
                _packings(tensors),
                multiplied=multiplied,
                decoded=(decoded or {}).get(key, ()),
            )
        stored = list(chain(*(tensors.values() for tensors in blocks.values())))
        route = read_route(
            file_bytes=sum(tensor.stored_bytes for tensor in stored),
            available_bytes=available_bytes(),
            cores=core_count(),
            in_ram=all(map(lies_in_ram, {tensor.path for tensor in stored})),
        )
        self.reader = FileReader(
            readers=route.readers if readers is None else readers,
            portable=portable,
            direct=route.direct if direct is None else direct,
        )

    @property
    def identity(self) -> str:
        """Digest of the stored tensors, equal if tensors and files are the same."""
        digest = hashlib.sha256()
        for key, tensors in self._blocks.items():
            for name, tensor in tensors.items():
                # The text includes the file version, so a changed file has another digest.
                digest.update(repr((key, name, tensor, tensor.path.absolute())).encode())
        return digest.hexdigest()

    def scales(self, key: BlockKey) -> Mapping[str, torch.Tensor]:
        if key not in self._scales:
            scales = _read_scales(self._stored_scales.get(key, {}), self.reader)
            # Scales behind codes are read again with their block. Here they are only checked, to
            # refuse a damaged file in words.
            behind = {
                name: each.behind
                for name, each in self._blocks[key].items()
                if isinstance(each.packing, EightBit) and each.behind
            }
            _read_scales(behind, self.reader)
            _check_group_scales(self._blocks[key], self.reader)
            # Last: after an error or a cancel in a check, the next call must check again.
            self._scales[key] = scales
        return self._scales[key]

    def file_bytes(self, key: BlockKey) -> int:
        return sum(tensor.stored_bytes for tensor in self._blocks[key].values())

    def range_file_bytes(self, key: BlockKey, wanted: range) -> int:
        return sum(piece.nbytes for piece in self._pieces(key, wanted))

    def read_range(self, key: BlockKey, wanted: range, into: torch.Tensor) -> None:
        memory = host_bytes(into).data
        self.reader.read([(piece, memory) for piece in self._pieces(key, wanted)])

    def read_rows(self, key: BlockKey, name: str, rows: range, into: torch.Tensor) -> None:
        """Read some stored rows of one parameter into `into`, 1-D uint8 CPU memory.

        Any thread may call this.

        Raises:
            SourceError: the rows could not be read. The contents of `into` are then undefined.
        """
        tensor = self._blocks[key][name].rows(rows.start, rows.stop)
        self.reader.read([(whole_piece(name, tensor), host_bytes(into).data)])

    def path(self, key: BlockKey, name: str) -> Path:
        """Return the file with this parameter."""
        return self._blocks[key][name].path

    def close(self) -> None:
        self.reader.close()

    def _pieces(self, key: BlockKey, wanted: range) -> tuple[ReadPiece, ...]:
        return within(read_pieces(self._blocks[key], self.formats[key].stored), wanted)


def read_tensors(tensors: TensorsOfBlock, *, readers: int = 4) -> dict[str, torch.Tensor]:
    """Read tensors into new CPU memory in their stored shape and dtype.

    Packed tensors are read as `FlatTensor.view_shape`.

    Raises:
        SourceError: a file could not be read.
    """
    # Starting a thread takes longer than reading a small tensor, and a native model has a thousand.
    is_small = len(tensors) == 1 and all(
        tensor.stored_bytes <= PIECE_BYTES for tensor in tensors.values()
    )
    with closing(FileReader(readers=0 if is_small else readers)) as reader:
        return _read(tensors, reader)


def read_scales(scales: TensorsOfBlock) -> dict[str, torch.Tensor]:
    """Read scales into new CPU memory: fp32, 0-d for one value, [rows, 1] for one value per row.

    Raises:
        SourceError: a file could not be read, or a scale is NaN or infinite.
    """
    with closing(FileReader(readers=1)) as reader:
        return _read_scales(scales, reader)


def _read_scales(scales: TensorsOfBlock, reader: FileReader) -> dict[str, torch.Tensor]:
    factors = {name: _as_factor(scale) for name, scale in _read(scales, reader).items()}
    more = {name: scale.times for name, scale in scales.items() if scale.times is not None}
    for name, factor in _read(more, reader).items():
        factors[name] = factors[name] * _as_factor(factor)
    for name, factor in factors.items():
        if not torch.isfinite(factor).all():
            raise SourceError(
                f"{scales[name].path}: the scale of {name} is NaN or infinite: download the file "
                "again"
            )
    return factors


NOT_FINITE = {8: (0xFF,), 4: (0x7F, 0xFF)}
"""NaN bytes in e8m0 and e4m3fn scales, by the bits per value."""


def _check_group_scales(tensors: TensorsOfBlock, reader: FileReader) -> None:
    """Refuse a microscaled matrix with a NaN scale. Attention could hide it in a wrong result."""
    not_finite: dict[str, tuple[int, ...]] = {}
    behind: dict[str, FileTensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor.packing, Microscaled) and tensor.behind is not None:
            not_finite[name] = NOT_FINITE[tensor.packing.bits]
            behind[name] = tensor.behind
    for name, stored in _read(behind, reader).items():
        if np.isin(host_bytes(stored), not_finite[name]).any():
            raise SourceError(
                f"{tensors[name].path}: a scale of {name} is NaN: download the file again"
            )


def _read(tensors: TensorsOfBlock, reader: FileReader) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    reads: list[Read] = []
    for name, tensor in tensors.items():
        layout = flat_layout([(name, tensor.shape, tensor.dtype)], _packings({name: tensor}))
        with torch.inference_mode(False):  # the tensors outlive the run that reads them
            result[name] = torch.empty(layout.tensors[0].view_shape, dtype=tensor.dtype)
        memory = host_bytes(result[name]).data
        reads += [(piece, memory) for piece in read_pieces({name: tensor}, layout)]
    reader.read(reads)
    return result


def _check_shapes(scales: TensorsOfBlock, tensors: TensorsOfBlock) -> None:
    for name, scale in scales.items():
        rows = tensors[name].shape[0]
        if scale.shape not in SCALAR_SHAPES and scale.shape not in ((rows,), (rows, 1)):
            raise CheckpointFileError(
                scale.path,
                f"the scale of {name} has shape {list(scale.shape)}; it must have one value or "
                f"{rows}, one per row",
            )


def _packings(tensors: TensorsOfBlock) -> dict[str, Packing]:
    return {name: tensor.packing for name, tensor in tensors.items() if tensor.packing is not None}


def _as_factor(scale: torch.Tensor) -> torch.Tensor:
    """Return the scale as fp32: 0-d with one value, [rows, 1] with one per row."""
    if scale.numel() == 1:
        return scale.float().reshape(())
    return scale.float().reshape(-1, 1)
