"""The scales of blocks on a GPU: copied there once, with the first fetch of their block."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..plan import BlockKey
from .source import BlockSource


class DeviceScales:
    """Scales by block and parameter name, as the source gives them."""

    def __init__(self, source: BlockSource, device: torch.device) -> None:
        self._source = source
        self._device = device
        self._scales: dict[BlockKey, Mapping[str, torch.Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(scale.nbytes for block in list(self._scales.values()) for scale in block.values())

    def of(
        self, key: BlockKey, *, copies: torch.cuda.Stream, decodings: torch.cuda.Stream
    ) -> Mapping[str, torch.Tensor]:
        """The scales of a block, copied on the one stream if they are not there yet, for use on the other."""
        if key not in self._scales:
            scales = self._source.scales(key)
            with torch.cuda.stream(copies):
                # A blocking copy would wait for the copy stream, and with it for the visits that stream waits for.
                there = {n: scale.to(self._device, non_blocking=True) for n, scale in scales.items()}
            for scale in there.values():
                scale.record_stream(decodings)
            self._scales[key] = there
        return self._scales[key]

    def clear(self) -> None:
        """Let go of them; each is copied anew when it is asked for."""
        self._scales.clear()
