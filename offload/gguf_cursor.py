"""Reads the header of a GGUF file; every length in it is doubted before it is followed."""

from __future__ import annotations

import os
import struct
from io import BufferedReader
from pathlib import Path

from .safetensors_header import MAX_HEADER_BYTES, CheckpointFileError, file_version
from .safetensors_header import START_BYTES as KIND_BYTES

# The magic number and the version.
START_BYTES = 8

Number = int | float | bool


class HeaderCursor:
    """Reads a header piece by piece, little-endian.

    Attributes:
        version: of the file.
        start: the first bytes, by which a file of another kind is known; all where there are fewer.
        position: the byte that is read next.

    All methods that read raise CheckpointFileError where the header asks for more than there is.
    """

    def __init__(self, path: Path, file: BufferedReader) -> None:
        self.version = file_version(os.fstat(file.fileno()))
        self.position = 0
        self.start = file.read(KIND_BYTES)
        file.seek(0)
        self._path = path
        self._file = file

    def take(self, nbytes: int) -> bytes:
        """Read that many bytes."""
        end = self.position + nbytes
        if end > self.version.nbytes:
            raise self.refuse(f"is truncated or damaged: its header goes on after its {self.version.nbytes} bytes")
        if end > MAX_HEADER_BYTES:
            raise self.damaged(f"a header of more than {MAX_HEADER_BYTES} bytes")
        taken = self._file.read(nbytes)
        if len(taken) < nbytes:
            raise self.refuse("was cut off while its header was read")
        self.position = end
        return taken

    def numbers(self, kind: str, count: int) -> tuple[Number, ...]:
        """Read `count` numbers of the type that `struct` calls `kind`."""
        return struct.unpack(f"<{count}{kind}", self.take(count * struct.calcsize(f"<{kind}")))

    def integer(self, kind: str) -> int:
        """Read one whole number."""
        return int(self.numbers(kind, 1)[0])

    def text(self) -> str:
        """Read a length and so many bytes of UTF-8."""
        try:
            return self.take(self.integer("Q")).decode("utf-8")
        except UnicodeDecodeError as err:
            raise self.damaged("a name or text that is no UTF-8") from err

    def refuse(self, reason: str) -> CheckpointFileError:
        """The error that names the file and the reason."""
        return CheckpointFileError(self._path, reason)

    def damaged(self, what: str) -> CheckpointFileError:
        """The error for a header that has what no sound one has."""
        return self.refuse(f"is a damaged GGUF file: it has {what}")
