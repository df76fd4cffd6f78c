"""Embeddings of the texts that were encoded last, so that equal texts are encoded once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch

from ...devices import auto_dtype
from ...offload import FileVersion, file_version
from ..checkpoint.components import component_folder
from .encoder import TextEncoder, open_text_encoder

MOST_BYTES = 64 << 20
"""80 texts of 50 tokens, or 8 of 512, the most that a text has."""

_EncoderVersion: TypeAlias = tuple[tuple[str, FileVersion], ...]
_Key: TypeAlias = tuple[_EncoderVersion, str, str]


class KeptTexts:
    """Encodes texts, and keeps embeddings in RAM up to a number of bytes; the least recent ones go first. Thread-safe.

    An encoder whose files were replaced encodes again. A text that is kept costs no read of the encoder, and has the
    embedding that encoding it again would have, to the bit: a result does not depend on the other texts of a call.
    """

    def __init__(self, *, most_bytes: int = MOST_BYTES, opened: Callable[..., TextEncoder] = open_text_encoder) -> None:
        self._most_bytes, self._opened = most_bytes, opened
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, torch.Tensor] = OrderedDict()
        self._rows = 0

    def encode(self, path: Path, texts: Sequence[str], *, device: torch.device) -> list[torch.Tensor]:
        """Return one embedding for each text, as `TextEncoder.encode` does; raises what that and opening raise.

        The encoder computes in the dtype that `device` is fast in.
        """
        version = _version(path)
        keys = [(version, str(device), text) for text in texts]
        with self._lock:
            missing = list(dict.fromkeys(key for key in keys if key not in self._kept))
            found = {key: self._kept[key] for key in keys if key in self._kept}
            if missing:
                with self._opened(path, compute_dtype=auto_dtype(device)) as encoder:
                    encoded = encoder.encode([text for _, _, text in missing], device=device)
                self._rows = encoded[0].shape[1]
                found |= {key: _without_padding(embedding) for key, embedding in zip(missing, encoded, strict=True)}
            self._keep({key: found[key] for key in keys})
            return [_padded(found[key], self._rows) for key in keys]

    @property
    def nbytes(self) -> int:
        """Bytes of all embeddings that are kept."""
        return sum(embedding.nbytes for embedding in self._kept.values())

    def _keep(self, used: dict[_Key, torch.Tensor]) -> None:
        for key, embedding in used.items():
            self._kept[key] = embedding
            self._kept.move_to_end(key)
        while self.nbytes > self._most_bytes:
            self._kept.popitem(last=False)


def _version(path: Path) -> _EncoderVersion:
    """The files of an encoder and its tokenizer, each with its version."""
    if path.is_file():
        files = [path]
    else:
        folder = component_folder(path, "text_encoder")
        files = sorted(file for part in (folder, folder.parent / "tokenizer") for file in part.glob("*"))
    return tuple((str(file.resolve()), file_version(file.stat())) for file in files)


def _without_padding(embedding: torch.Tensor) -> torch.Tensor:
    """A copy of the rows up to the last one that is not zero."""
    count = int(embedding[0].ne(0).any(dim=1).nonzero().max()) + 1 if bool(embedding.any()) else 0
    return embedding[:, :count].clone()


def _padded(embedding: torch.Tensor, rows: int) -> torch.Tensor:
    """A copy with `rows` rows, zero after those that are there."""
    padded = embedding.new_zeros((1, rows, embedding.shape[-1]))
    padded[:, : embedding.shape[1]] = embedding
    return padded
