"""Text embedding cache, so that a text is encoded once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch.nn.functional import pad

from ...devices import auto_dtype
from ..checkpoint.files import ModelVersion
from .encoder import TextEncoder, encoder_version, open_text_encoder

MAX_BYTES = 64 << 20
"""64 MiB: 80 texts with 50 tokens, or 8 texts with 512, the maximum length."""

_Key: TypeAlias = tuple[ModelVersion, str, str]


class EmbeddingCache:
    """Least-recently-used cache for text embeddings in RAM. Thread-safe.

    A cached text costs no encoder read. Its embedding is bit-equal to a new one, because the
    encoder's result does not depend on other texts in a call. Replaced encoder files invalidate
    their entries.
    """

    def __init__(
        self,
        *,
        max_bytes: int = MAX_BYTES,
        open_encoder: Callable[..., TextEncoder] = open_text_encoder,
    ) -> None:
        self._max_bytes = max_bytes
        self._open_encoder = open_encoder
        self._lock = threading.Lock()
        self._entries: OrderedDict[_Key, torch.Tensor] = OrderedDict()
        self._rows = 0

    def encode(
        self,
        path: Path,
        texts: Sequence[str],
        *,
        device: torch.device,
        check: Callable[[], None] = lambda: None,
    ) -> list[torch.Tensor]:
        """Return an embedding for each text like `TextEncoder.encode`, in `auto_dtype(device)`.

        Raises the errors in `open_text_encoder` and `TextEncoder.encode`.
        """
        version = encoder_version(path.absolute())
        # The device counts too, because another one may round differently or use another dtype.
        keys = [(version, str(device), text) for text in texts]
        # The lock is kept while encoding. Otherwise a second caller would load the encoder again,
        # often for the same texts.
        with self._lock:
            missing = list(dict.fromkeys(key for key in keys if key not in self._entries))
            found = {key: self._entries[key] for key in keys if key in self._entries}
            if missing:
                with self._open_encoder(path, compute_dtype=auto_dtype(device)) as encoder:
                    encoded = encoder.encode(
                        [text for _, _, text in missing], device=device, check=check
                    )
                self._rows = encoded[0].shape[1]
                found |= {
                    key: _trim(embedding) for key, embedding in zip(missing, encoded, strict=True)
                }
            self._store({key: found[key] for key in keys})
            # Copies: a caller may write to its embeddings.
            return [pad(found[key], (0, 0, 0, self._rows - found[key].shape[1])) for key in keys]

    @property
    def nbytes(self) -> int:
        """Bytes of all cached embeddings."""
        return sum(embedding.nbytes for embedding in self._entries.values())

    def _store(self, used: dict[_Key, torch.Tensor]) -> None:
        for key, embedding in used.items():
            self._entries[key] = embedding
            self._entries.move_to_end(key)
        while self.nbytes > self._max_bytes:
            self._entries.popitem(last=False)


def _trim(embedding: torch.Tensor) -> torch.Tensor:
    """Return a copy of the rows up to the last nonzero one."""
    # Most rows of an embedding are padding. `clone`, because a view would keep the whole storage
    # alive.
    used = embedding[0].ne(0).any(dim=1).nonzero().flatten().tolist()
    return embedding[:, : max(used, default=-1) + 1].clone()
