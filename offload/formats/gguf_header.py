"""GGUF headers: type, shape and byte offset per tensor, without reading any data."""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import TypeVar

import torch

from .packing import QUANT_FORMATS, stored_bytes
from .safetensors_header import (
    DTYPES,
    GGUF_START,
    MAX_HEADER_BYTES,
    CheckpointFileError,
    FileHeader,
    FileTensor,
    FileVersion,
    other_format,
)
from .safetensors_header import START_BYTES as KIND_BYTES

TYPE_NAMES = {
    0: "F32 F16 Q4_0 Q4_1",
    6: "Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS",
    18: "IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M",
    30: "BF16",
    34: "TQ1_0 TQ2_0",
    39: "MXFP4 NVFP4 Q1_0",
}
"""ggml type names, by the first one's number. The numbers between belong to retired types."""

TYPES: dict[int, str] = {}
for first, names in TYPE_NAMES.items():
    TYPES |= enumerate(names.split(), first)
"""ggml type names by number: torch dtypes, formats with dequantisation, and others."""

STORED_DTYPES = DTYPES | dict.fromkeys(QUANT_FORMATS, torch.uint8)

READABLE_TYPES = ("F32", "F16", "BF16", *QUANT_FORMATS)
"""Type names for weights."""

SCALAR_FIELDS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""`struct` format characters for scalar field types."""

STRING_FIELD = 8
ARRAY_FIELD = 9


# Bytes for the magic number and the version.
START_BYTES = 8

Number = int | float | bool


class HeaderCursor:
    """Sequential reader for a little-endian header.

    All reading methods raise CheckpointFileError if the file ends before the header.

    Attributes:
        path: the file.
        version: file version.
        start: the first bytes, to detect other file types. A very short file is here as a whole.
        position: offset of the next byte.
    """

    def __init__(self, path: Path, file: BufferedReader) -> None:
        # The version is the open file's, because the path may name a newer file by now.
        self.version = FileVersion.of(os.fstat(file.fileno()))
        self.position = 0
        self.start = file.read(KIND_BYTES)
        file.seek(0)
        self.path = path
        self._file = file

    def take(self, nbytes: int) -> bytes:
        """Read `nbytes` bytes."""
        end = self.position + nbytes
        if end > self.version.nbytes:
            raise self.error(
                "is truncated or damaged: its header does not end within its "
                f"{self.version.nbytes} bytes"
            )
        if end > MAX_HEADER_BYTES:
            raise self.damaged(f"a header of more than {MAX_HEADER_BYTES} bytes")
        taken = self._file.read(nbytes)
        if len(taken) < nbytes:
            raise self.error("was truncated while its header was read")
        self.position = end
        return taken

    def numbers(self, kind: str, count: int) -> tuple[Number, ...]:
        """Read `count` numbers in the `struct` format `kind`."""
        return struct.unpack(f"<{count}{kind}", self.take(count * struct.calcsize(f"<{kind}")))

    def integer(self, kind: str) -> int:
        """Read one integer."""
        return int(self.numbers(kind, 1)[0])

    def text(self) -> str:
        """Read a length and as many UTF-8 bytes."""
        try:
            return self.take(self.integer("Q")).decode("utf-8")
        except UnicodeDecodeError as err:
            raise self.damaged("a name or text that is not UTF-8") from err

    def error(self, reason: str) -> CheckpointFileError:
        """Return an error with the file name and the reason."""
        return CheckpointFileError(self.path, reason)

    def damaged(self, finding: str) -> CheckpointFileError:
        """Return the error for an invalid header."""
        return self.error(f"is a damaged GGUF file: it has {finding}")


# Version 1 counted in 32 bits.
VERSIONS = (2, 3)

TOO_MANY_VALUES = 2**56
"""More values than any file has, but few enough to count their bytes in 64 bits."""
# A tensor with more dimensions than ggml supports is stored in another shape. This field has the
# original one.
SHAPE_FIELD = "comfy.gguf.orig_shape."
ALIGNMENT_FIELD = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 8
MAX_NAME = 65535  # the format's own limit, as messages quote names

Field = Number | str | tuple[Number, ...] | tuple[str, ...] | None
ItemT = TypeVar("ItemT")


def read_gguf_header(path: Path | str) -> FileHeader:
    """Read a GGUF file's header. A large file takes no longer than a small one.

    A tensor stored in another shape gets the original one if a field has it. The metadata are the
    text fields.

    Raises:
        CheckpointFileError: the file is missing, unreadable, truncated, damaged, big-endian, not a
            GGUF file, or has a tensor type without dequantisation.
    """
    path = Path(path)
    with _opened(path) as cursor:
        counts = cursor.integer("Q"), cursor.integer("Q")
        fields = _named(cursor, counts[1], _field)
        entries = _named(cursor, counts[0], _entry)
    alignment = _alignment(cursor, fields)
    data_start = -(-cursor.position // alignment) * alignment
    # An empty tensor may have the same offset as the next one, and then comes first.
    in_file_order = sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes))
    _check_offsets(cursor, in_file_order, data_start, alignment)
    tensors = {
        name: replace(
            entry,
            offset=data_start + entry.offset,
            shape=_original_shape(cursor, name, entry.shape, fields),
        )
        for name, entry in in_file_order
    }
    texts = {name: value for name, value in fields.items() if isinstance(value, str)}
    return FileHeader(path=path, tensors=tensors, metadata=texts)


def read_gguf_fields(path: Path, names: Collection[str]) -> dict[str, Field]:
    """Return these fields as far as a GGUF file has them, with lists of any length.

    Raises:
        CheckpointFileError: as `read_gguf_header`.
    """
    with _opened(path) as cursor:
        cursor.integer("Q")
        count = cursor.integer("Q")
        fields = _named(cursor, count, lambda *at: _field(*at, whole=at[1] in names))
    return {name: fields[name] for name in names if name in fields}


@contextmanager
def _opened(path: Path) -> Iterator[HeaderCursor]:
    """Open a file and read the start."""
    try:
        with path.open("rb") as file:
            cursor = HeaderCursor(path, file)
            _check_start(cursor)
            yield cursor
    except OSError as err:
        raise CheckpointFileError(path, f"cannot be read: {err.strerror or err}") from err


def _check_start(cursor: HeaderCursor) -> None:
    if not cursor.start.startswith(GGUF_START) or len(cursor.start) < START_BYTES:
        raise cursor.error(other_format("GGUF", cursor.start, cursor.version.nbytes))
    version = cursor.take(START_BYTES)[len(GGUF_START) :]
    # The magic number is text in either byte order. Only the version shows the byte order.
    if int.from_bytes(version, "big") in VERSIONS:
        raise cursor.error("is a big-endian GGUF file; only little-endian ones can be read")
    found = int.from_bytes(version, "little")
    if found not in VERSIONS:
        raise cursor.error(
            f"is a GGUF file of version {found}; versions 2 and 3 can be read: convert the model "
            "again"
        )


def _named(
    cursor: HeaderCursor, count: int, read: Callable[[HeaderCursor, str], ItemT]
) -> dict[str, ItemT]:
    """Read `count` items, each preceded by a name."""
    items: dict[str, ItemT] = {}
    for _ in range(count):
        name = cursor.text()
        if len(name) > MAX_NAME:
            raise cursor.damaged(f"a name of {len(name)} characters")
        if name in items:
            raise cursor.damaged(f"{name!r} twice")
        items[name] = read(cursor, name)
    return items


def _field(cursor: HeaderCursor, name: str, *, whole: bool = False) -> Field:
    """Read a field value.

    Unless `whole`, None for a list with texts or with more than `MAX_DIMENSIONS` numbers.
    """
    kind = cursor.integer("I")
    if kind == STRING_FIELD:
        return cursor.text()
    if kind in SCALAR_FIELDS:
        return cursor.numbers(SCALAR_FIELDS[kind], 1)[0]
    if kind == ARRAY_FIELD:
        kind = cursor.integer("I")
        count = cursor.integer("Q")
        if kind == STRING_FIELD:
            texts = (cursor.text() for _ in range(count))
            if whole:
                return tuple(texts)
            deque(texts, maxlen=0)  # a list may have more texts than fit into RAM
            return None
        if kind in SCALAR_FIELDS and (whole or count <= MAX_DIMENSIONS):
            return cursor.numbers(SCALAR_FIELDS[kind], count)
        if kind in SCALAR_FIELDS:
            cursor.take(count * struct.calcsize(f"<{SCALAR_FIELDS[kind]}"))
            return None
    raise cursor.damaged(f"a field {name!r} of the unknown type {kind}")


def _entry(cursor: HeaderCursor, name: str) -> FileTensor:
    """Read a tensor entry, with the offset counted from the data start, and the stored shape."""
    dimensions = cursor.integer("I")
    if dimensions > MAX_DIMENSIONS:
        raise cursor.damaged(f"a tensor {name!r} of {dimensions} dimensions")
    # The fastest dimension comes first in the file.
    shape = tuple(int(size) for size in reversed(cursor.numbers("Q", dimensions)))
    kind = cursor.integer("I")
    offset = cursor.integer("Q")
    stored_as = TYPES.get(kind, f"type {kind} of ggml")
    packing = QUANT_FORMATS.get(stored_as)
    dtype = STORED_DTYPES.get(stored_as)
    if dtype is None:
        raise cursor.error(
            f"{name} is stored as {stored_as}, which is not supported: use a file of "
            f"{', '.join(READABLE_TYPES)}"
        )
    # A size of 0 hides huge other sizes, but torch multiplies them nevertheless. Without a 0, the
    # bytes must fit the file.
    if 0 in shape and prod(max(size, 1) for size in shape) >= TOO_MANY_VALUES:
        raise cursor.damaged(f"the shape {list(shape)} for tensor {name!r}")
    if packing is not None and (not shape or shape[-1] % packing.values):
        raise cursor.damaged(
            f"a tensor {name!r} {list(shape)} in {packing.name}, whose groups have "
            f"{packing.values} values"
        )
    return FileTensor(
        path=cursor.path,
        offset=offset,
        nbytes=stored_bytes(shape, dtype, packing),
        dtype=dtype,
        shape=shape,
        version=cursor.version,
        packing=packing,
    )


def _alignment(cursor: HeaderCursor, fields: Mapping[str, Field]) -> int:
    alignment = fields.get(ALIGNMENT_FIELD, DEFAULT_ALIGNMENT)
    # `isinstance` would accept True.
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.damaged(f"{ALIGNMENT_FIELD} {alignment!r}; a power of two is expected")
    return alignment


def _check_offsets(
    cursor: HeaderCursor, entries: Sequence[tuple[str, FileTensor]], data_start: int, alignment: int
) -> None:
    """Raise CheckpointFileError for tensors that overlap, are misaligned, or pass the file end."""
    end = 0
    before = ""
    for name, entry in entries:
        if entry.offset % alignment:
            raise cursor.damaged(
                f"a tensor {name!r} at byte {entry.offset}, not a multiple of {alignment}"
            )
        if entry.offset < end:
            raise cursor.damaged(f"overlapping tensors {before!r} and {name!r}")
        end = entry.offset + entry.nbytes
        before = name
    # A file without tensors may end before `data_start`, without the padding.
    if data_start + end > cursor.version.nbytes and entries:
        raise cursor.error(
            f"is truncated: has {cursor.version.nbytes} of {data_start + end} bytes; download it "
            "again"
        )


def _original_shape(
    cursor: HeaderCursor, name: str, stored: tuple[int, ...], fields: Mapping[str, Field]
) -> tuple[int, ...]:
    """Return the tensor shape before conversion to GGUF."""
    original = fields.get(SHAPE_FIELD + name, stored)
    if not isinstance(original, tuple) or not all(
        type(size) is int and size >= 0 for size in original
    ):
        raise cursor.damaged(f"the shape {original!r} for tensor {name!r}")
    shape = tuple(int(size) for size in original)
    if prod(shape) != prod(stored):
        raise cursor.damaged(
            f"the shape {list(shape)} for tensor {name!r}, which is {list(stored)}"
        )
    return shape
