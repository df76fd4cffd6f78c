"""Writing of an expert with its block matrices in int8 ConvRot, as ComfyUI's single file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from ...offload import (
    EightBit,
    FileTensor,
    NotFiniteError,
    decode_tensor,
    host_bytes,
    quantise_rotated,
    read_scales,
    read_tensors,
)
from .files import CheckpointError
from .key_names import native_transformer_name
from .meta_model import streamed_parameters
from .open import Expert

GROUP = 256
ROW_BYTES = 2**26
"""fp32 bytes that are rotated at once."""

NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One tensor of the new file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_int8(expert: Expert, path: Path, *, on_matrix: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Write an expert to `path`: matrices of blocks in int8 ConvRot with a scale for each row, the rest as it is.

    Matrices that are quantised in the expert's file are decoded first, and other tensors of that kind become bf16.
    `path` is replaced when the whole file is written. One matrix is in RAM at a time: 0.9 GB for Wan2.2 A14B.

    Args:
        on_matrix: called with the number of matrices that are written, and that of all.

    Raises:
        CheckpointError: the matrices are in int8 already, or have columns that 256 does not divide; the disk is full.
        OSError: a file cannot be read or written.
    """
    matrices = streamed_parameters(expert.config)
    for name in sorted(matrices):
        tensor = expert.weights[name]
        if isinstance(tensor.packing, EightBit) and tensor.packing.dtype == torch.int8:
            raise CheckpointError(expert.path, f"{name} is in int8 already: another rounding would only lose precision")
        if tensor.shape[1] % GROUP:
            raise CheckpointError(
                expert.path, f"{name} has {tensor.shape[1]} columns, which is no multiple of {GROUP}: leave it as it is"
            )
    entries = [entry for name in expert.weights for entry in _entries(name, expert.weights[name], name in matrices)]
    free, needed = shutil.disk_usage(path.parent).free, sum(entry.nbytes for entry in entries)
    if free < needed:
        raise CheckpointError(
            path, f"needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there: choose another folder (--out)"
        )
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(_header(entries))
            done = 0
            for name, tensor in expert.weights.items():
                for written in _tensors(expert, name, tensor, name in matrices):
                    _write(file, written)
                if name in matrices:
                    done += 1
                    on_matrix(done, len(matrices))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _entries(name: str, tensor: FileTensor, quantised: bool) -> Iterator[_Entry]:
    key = native_transformer_name(name)
    if not quantised:
        yield _Entry(key=key, dtype=_kept_dtype(tensor), shape=tensor.shape)
        return
    layer = key.removesuffix(".weight")
    yield _Entry(key=key, dtype=torch.int8, shape=tensor.shape)
    yield _Entry(key=f"{layer}.weight_scale", dtype=torch.float32, shape=(tensor.shape[0], 1))
    yield _Entry(key=f"{layer}.comfy_quant", dtype=torch.uint8, shape=tuple(_marker().shape))


def _tensors(expert: Expert, name: str, tensor: FileTensor, quantised: bool) -> Iterator[torch.Tensor]:
    """Yield the values of the entries of a parameter; the codes of a matrix in pieces of rows."""
    stored, scales = read_tensors({name: tensor})[name], read_scales(_only(expert.scales, name))
    if not quantised and tensor.packing is None and name not in scales and tensor.dtype in NAMES:
        yield stored
        return
    values = torch.empty(tensor.shape, dtype=torch.float32 if quantised else torch.bfloat16)
    decode_tensor(stored, values, packing=tensor.packing, scale=scales.get(name))
    del stored
    if not quantised:
        yield values
        return
    found = []
    for rows in values.split(max(1, ROW_BYTES // (4 * tensor.shape[1]))):
        try:
            codes, scale = quantise_rotated(rows, GROUP)
        except NotFiniteError as err:
            raise CheckpointError(expert.path, f"{name} holds NaN or an infinity, so it cannot be quantised") from err
        found.append(scale)
        yield codes
    yield torch.cat(found)
    yield _marker()


def _only(scales: Mapping[str, FileTensor], name: str) -> dict[str, FileTensor]:
    return {name: scales[name]} if name in scales else {}


def _kept_dtype(tensor: FileTensor) -> torch.dtype:
    return tensor.dtype if tensor.packing is None and tensor.dtype in NAMES else torch.bfloat16


def _marker() -> torch.Tensor:
    settings = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": GROUP}
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


def _header(entries: list[_Entry]) -> bytes:
    """Return the header of a safetensors file, padded with spaces so that the data start at a multiple of 8."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.nbytes
        described[entry.key] = {"dtype": NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(file: BinaryIO, tensor: torch.Tensor) -> None:
    file.write(host_bytes(tensor.contiguous()).data)
