"""Safetensors file headers: dtype, shape and byte offset per tensor, without the data.

The safetensors library validates the file. It does not expose the byte offsets, so this module
parses them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from .packing import Packing, stored_bytes

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,  # a dtype of torch 2.7 and later
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

# A file starts with the header length, little-endian.
LENGTH_BYTES = 8

# First bytes in files written by `torch.save`: a zip archive, or a bare pickle (protocol 2 to 5) in
# older versions.
PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")

GGUF_START = b"GGUF"

PICKLE_REMEDIES = {
    "GGUF": "model in GGUF or safetensors",
    "safetensors": "safetensors version of the model",
}

FAILED_DOWNLOADS = {
    (b"version https://git-lfs",): (
        "a git-lfs pointer, a text file of about 130 bytes: download the file itself in the "
        "browser, or run git lfs pull in its repository"
    ),
    (b"<!doctype", b"<html", b"<?xml"): (
        "a web page; the download probably needs a login or an accepted licence: open the link in "
        "a browser, log in, and download it again"
    ),
    (b'{"', b"[{"): (
        "a server's message (JSON): read it in an editor, and download the model again"
    ),
}
"""Remains of failed downloads in place of a model, by first bytes in lower case."""

START_BYTES = 40

# The library's own limit. A longer header is refused before it is read.
MAX_HEADER_BYTES = 100_000_000


_MOST_VALUES = 2**56
"""More values than any file has, but few enough to count their bytes in 64 bits."""


class CheckpointFileError(ValueError):
    """File that cannot be used as a checkpoint. The message names the file and the reason."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: {self.args[1]}"


class FileVersion(NamedTuple):
    """Size and modification time, to detect that a file was replaced or changed."""

    nbytes: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileVersion:
        """Return the version of a file with this status."""
        return cls(status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, kw_only=True)
class FileTensor:
    """One tensor in a file: `nbytes` bytes from byte `offset` on, row by row, little-endian.

    `shape` is the values' shape. `dtype` is the stored numbers' dtype, or uint8 for packed bytes.
    The offset is valid for this file `version`. None means any version.
    """

    path: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    version: FileVersion | None = None
    packing: Packing | None = None
    behind: FileTensor | None = None
    """Bytes that follow in memory: a microscaled matrix's scales."""
    times: FileTensor | None = None
    """Second factor if the scale is a product."""

    @property
    def stored_bytes(self) -> int:
        """Bytes in memory, including `behind`."""
        return self.nbytes + (0 if self.behind is None else self.behind.nbytes)

    def rows(self, start: int, stop: int) -> FileTensor:
        """Return rows `start` to `stop` (exclusive) as a separate tensor."""
        assert 0 <= start <= stop <= self.shape[0], f"rows {start}:{stop} of {self.shape}"
        row_bytes = stored_bytes(self.shape[1:], self.dtype, self.packing)
        return replace(
            self,
            offset=self.offset + start * row_bytes,
            nbytes=(stop - start) * row_bytes,
            shape=(stop - start, *self.shape[1:]),
        )


@dataclass(frozen=True, kw_only=True)
class FileHeader:
    """One file's header: tensors by name, ordered by offset, and free-form metadata."""

    path: Path
    tensors: Mapping[str, FileTensor]
    metadata: Mapping[str, str]


def read_header(path: Path | str) -> FileHeader:
    """Read a safetensors file's header. A large file takes no longer than a small one.

    Raises:
        CheckpointFileError: the file is missing, unreadable, a pickle (refused, never read),
            truncated, not a safetensors file, or has a tensor whose dtype is not in `DTYPES`.
    """
    path = Path(path)
    try:
        header, version = _read_start(path)
        # Opening makes the library validate the file. Nothing is read from it here.
        with safe_open(path, framework="np"):
            pass
    except OSError as err:
        raise CheckpointFileError(path, f"cannot be read: {err.strerror or err}") from err
    except SafetensorError as err:
        raise CheckpointFileError(path, _describe_damage(header, version.nbytes, str(err))) from err
    entries: dict[str, Any] = json.loads(header)
    metadata: dict[str, str] = entries.pop("__metadata__", None) or {}
    in_file_order = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
    data_start = LENGTH_BYTES + len(header)
    tensors = {
        name: replace(_file_tensor(path, name, entry, data_start), version=version)
        for name, entry in in_file_order
    }
    return FileHeader(path=path, tensors=tensors, metadata=metadata)


def _read_start(path: Path) -> tuple[bytes, FileVersion]:
    """Return the JSON header and the file version."""
    with path.open("rb") as file:
        version = FileVersion.of(os.fstat(file.fileno()))
        start = file.read(START_BYTES)
        length = int.from_bytes(start[:LENGTH_BYTES], "little")
        if start[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{" or length > MAX_HEADER_BYTES:
            raise CheckpointFileError(path, other_format("safetensors", start, version.nbytes))
        file.seek(LENGTH_BYTES)
        header = file.read(length)
    if len(header) < length:
        needed = LENGTH_BYTES + length
        raise CheckpointFileError(
            path,
            f"is truncated: has {version.nbytes} bytes, its header alone needs {needed}; download "
            "it again",
        )
    return header, version


def other_format(wanted: Literal["GGUF", "safetensors"], start: bytes, file_bytes: int) -> str:
    """Return why a file that begins with `start` is not in the format `wanted`."""
    text = start.lstrip().lower()
    if start.startswith(GGUF_START) and wanted != "GGUF":
        return "is not a safetensors file but GGUF: let its name end in .gguf"
    if start.startswith(PICKLE_STARTS):
        return (
            "is a PyTorch pickle, which may run code when it is read: use the "
            f"{PICKLE_REMEDIES[wanted]}"
        )
    if start[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{" and wanted != "safetensors":
        return "is not a GGUF file but safetensors: let its name end in .safetensors"
    for starts, kind in FAILED_DOWNLOADS.items():
        if text.startswith(starts):
            return f"is not the model but {kind}"
    if not start:
        return "is empty: download it again"
    return f"is not a {wanted} file: has {file_bytes} bytes and starts with {start[:9]!r}"


def _describe_damage(header: bytes, file_bytes: int, finding: str) -> str:
    """Turn the library's error into a helpful reason. Most often the download is incomplete."""
    try:
        entries = json.loads(header)
        data_bytes = max(
            entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"
        )
        expected = LENGTH_BYTES + len(header) + int(data_bytes)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return f"is not a safetensors file ({finding})"
    if file_bytes < expected:
        return f"is truncated: has {file_bytes} of {expected} bytes; download it again"
    return f"is a damaged safetensors file ({finding})"


def _file_tensor(path: Path, name: str, entry: Mapping[str, Any], data_start: int) -> FileTensor:
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise CheckpointFileError(
            path, f"{name} is stored as {entry['dtype']}, which is not one of {', '.join(DTYPES)}"
        )
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    # The library checks the product, which is 0 for an empty tensor, whatever the other sides.
    if 0 in shape and math.prod(side for side in shape if side) > _MOST_VALUES:
        raise CheckpointFileError(
            path, f"{name} has the shape {list(shape)}, too large for a tensor; download it again"
        )
    return FileTensor(
        path=path, offset=data_start + begin, nbytes=end - begin, dtype=dtype, shape=shape
    )
