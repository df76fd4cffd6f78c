"""Writer for an expert with block matrices in int8 ConvRot, as ComfyUI's single file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from ...offload import host_bytes
from ...offload.formats import EightBit, FileTensor, NotFiniteError, decode_tensor, quantise_rotated
from ...offload.sources import read_scales, read_tensors
from .files import CheckpointError
from .key_names import native_transformer_name
from .meta_model import streamed_parameters
from .open import Expert

GROUP = 256
ROW_BYTES = 2**26
"""fp32 bytes to rotate at once."""

NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}


def write_int8(
    expert: Expert, path: Path, *, on_matrix: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write an expert to `path`: block matrices in int8 ConvRot with row scales, the rest as it is.

    Matrices that are already quantised are decoded first. Other quantised tensors become bf16.
    `path` is replaced once the whole file is written. RAM holds one matrix at a time: 0.9 GB for
    Wan2.2 A14B.

    Args:
        on_matrix: called with the numbers of written matrices and of all matrices.

    Raises:
        CheckpointError: the matrices are in int8 already, their column count is not a multiple of
            256, or the disk is full.
        OSError: a file cannot be read or written.
    """
    matrices = streamed_parameters(expert.config)
    for name in sorted(matrices):
        tensor = expert.weights[name]
        if isinstance(tensor.packing, EightBit) and tensor.packing.dtype == torch.int8:
            reason = f"{name} is in int8 already: another rounding would only lose precision"
            raise CheckpointError(expert.path, reason)
        if tensor.shape[1] % GROUP:
            reason = f"{name} has {tensor.shape[1]} columns, which is no multiple of {GROUP}"
            raise CheckpointError(expert.path, f"{reason}: leave it as it is")
    entries: dict[str, torch.Tensor] = {}
    with torch.device("meta"):
        for name, tensor in expert.weights.items():
            entries |= _entries(name, tensor, name in matrices)
    free = shutil.disk_usage(path.parent).free
    needed = sum(entry.nbytes for entry in entries.values())
    if free < needed:
        reason = f"needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there"
        raise CheckpointError(path, f"{reason}: choose another folder (--out)")
    # In the same folder, because `os.replace` does not work across file systems.
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(_header(entries))
            done = 0
            for name, tensor in expert.weights.items():
                # In the order of `_entries`: the header has the offsets in this order.
                for written in _tensors(expert, name, tensor, name in matrices):
                    file.write(host_bytes(written.contiguous()).data)
                if name in matrices:
                    done += 1
                    on_matrix(done, len(matrices))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _entries(name: str, tensor: FileTensor, quantised: bool) -> dict[str, torch.Tensor]:
    """Return a parameter's tensors in the new file by key, without values."""
    key = native_transformer_name(name)
    if not quantised:
        is_kept = tensor.packing is None and tensor.dtype in NAMES
        dtype = tensor.dtype if is_kept else torch.bfloat16
        return {key: torch.empty(tensor.shape, dtype=dtype)}
    layer = key.removesuffix(".weight")
    return {
        key: torch.empty(tensor.shape, dtype=torch.int8),
        f"{layer}.weight_scale": torch.empty(tensor.shape[0], 1),
        f"{layer}.comfy_quant": _marker(),
    }


def _tensors(
    expert: Expert, name: str, tensor: FileTensor, quantised: bool
) -> Iterator[torch.Tensor]:
    """Yield the values of a parameter's entries. The codes of a matrix come in pieces of rows."""
    stored = read_tensors({name: tensor})[name]
    scales = read_scales({key: scale for key, scale in expert.scales.items() if key == name})
    if not quantised and tensor.packing is None and name not in scales and tensor.dtype in NAMES:
        yield stored
        return
    values = torch.empty(tensor.shape, dtype=torch.float32 if quantised else torch.bfloat16)
    decode_tensor(stored, values, packing=tensor.packing, scale=scales.get(name))
    # Not held while a matrix is quantised: RAM would hold it twice.
    del stored
    if not quantised:
        yield values
        return
    found = []
    for rows in values.split(max(1, ROW_BYTES // (4 * tensor.shape[1]))):
        try:
            codes, scale = quantise_rotated(rows, GROUP)
        except NotFiniteError as err:
            raise CheckpointError(
                expert.path, f"{name} holds NaN or an infinity, so it cannot be quantised"
            ) from err
        found.append(scale)
        yield codes
    yield torch.cat(found)
    yield _marker()


def _marker() -> torch.Tensor:
    settings = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": GROUP}
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


def _header(entries: Mapping[str, torch.Tensor]) -> bytes:
    """Return a safetensors header, padded with spaces so that data start at a multiple of 8."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, entry in entries.items():
        start = end
        end = end + entry.nbytes
        described[key] = {
            "dtype": NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
