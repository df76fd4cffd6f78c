"""Weights with blocks that stream through an engine, kept between runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from ...schema import OffloadPolicy
from .engine import OffloadEngine


class StreamedWeights(ABC):
    """Weights with an engine, created by the first run and reused by later ones.

    Without an engine they take no memory.
    """

    _engine: OffloadEngine | None = None

    @property
    @abstractmethod
    def block_counts(self) -> Mapping[str, int]:
        """Block counts by stack name."""

    @abstractmethod
    def device_bytes(self, policy: OffloadPolicy) -> int:
        """Return the device memory under `policy` in bytes.

        Raises ValueError if it does not match the blocks.
        """

    @abstractmethod
    def engine(self, policy: OffloadPolicy, device: torch.device) -> OffloadEngine:
        """Return the engine for `policy` on `device`. An existing one is changed."""

    @abstractmethod
    def close(self) -> None:
        """Free the engine."""

    @property
    def running(self) -> bool:
        """True while a run is in progress. No memory can be released then."""
        return self._engine is not None and self._engine.running

    @property
    def loaded_bytes(self) -> int:
        """Device memory for the weights now, in bytes."""
        return 0 if self._engine is None else self._engine.loaded_bytes

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory now, in bytes."""
        return 0 if self._engine is None else self._engine.pinned_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory now, in bytes: RAM-resident blocks, staging and patches."""
        return 0 if self._engine is None else self._engine.host_bytes

    def release_memory(self, nbytes: int) -> int:
        """Free buffers until `nbytes` of device memory are free or none is left.

        Return the freed bytes.

        The next run allocates and fetches missing blocks again. `close` frees all memory.

        Raises:
            RuntimeError: a run is in progress. Nothing is changed.
        """
        if self._engine is None:
            return 0
        return self._engine.release_memory(nbytes)

    def release_idle_buffers(self) -> int:
        """Free the buffers without a resident block, and return the freed bytes.

        The next run allocates them again.

        Raises:
            RuntimeError: a run is in progress. Nothing is changed.
        """
        if self._engine is None:
            return 0
        return self._engine.release_idle_buffers()
