"""Block sources for weights already in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

from ...plan.programs import BlockKey
from ..core.pages import host_bytes
from ..formats.layout import BlockFormat, block_format, streamed_names
from .base import RangeSource, check_not_stopped


class TensorSource(RangeSource):
    """Source of matrices in memory, in their compute dtype.

    It saves no RAM.

    Args:
        weights: matrices in each block, by name within the block, in model order.
    """

    def __init__(self, weights: Mapping[BlockKey, Mapping[str, torch.Tensor]]) -> None:
        self._weights = dict(weights)
        self.formats = {key: _format_of(matrices) for key, matrices in self._weights.items()}

    def weights(self, key: BlockKey) -> Mapping[str, torch.Tensor]:
        """Return a block's matrices by name."""
        return self._weights[key]

    def scales(self, key: BlockKey) -> Mapping[str, torch.Tensor]:
        return {}

    def file_bytes(self, key: BlockKey) -> int:
        return self.formats[key].stored.nbytes

    def range_file_bytes(self, key: BlockKey, wanted: range) -> int:
        return len(wanted)

    def read_range(self, key: BlockKey, wanted: range, into: torch.Tensor) -> None:
        # numpy copies, because torch would start a second thread pool on the reading thread.
        target = host_bytes(into)
        for place in self.formats[key].stored.tensors:
            start = max(place.offset, wanted.start)
            stop = min(place.offset + place.nbytes, wanted.stop)
            if start < stop:
                check_not_stopped()
                weight = host_bytes(self._weights[key][place.name].cpu().contiguous()).reshape(-1)
                part = weight[start - place.offset : stop - place.offset]
                np.copyto(target[start - wanted.start : stop - wanted.start], part)

    def close(self) -> None:
        """Release the weights. The formats remain available."""
        self._weights.clear()


class ModuleSource(TensorSource):
    """Source of the Linear weights in modules loaded in the usual way.

    Keeps references to the weights from its creation on, so it still has them when the engine has
    replaced them in the modules.

    Args:
        blocks: blocks per expert, in the order they run.

    Raises:
        ValueError: a weight has no data (it is on `meta`).
    """

    def __init__(self, blocks: Mapping[str, Sequence[nn.Module]]) -> None:
        weights = {
            BlockKey(expert, index): _linear_weights(block, f"block {index} of {expert!r}")
            for expert, stack in blocks.items()
            for index, block in enumerate(stack)
        }
        super().__init__(weights)


def _linear_weights(block: nn.Module, label: str) -> dict[str, torch.Tensor]:
    weights = {name: block.get_parameter(name).detach() for name in streamed_names(block)}
    for name, weight in weights.items():
        if weight.is_meta:
            raise ValueError(
                f"{label}: {name} has a shape but no data; pass a source that has its bytes"
            )
    return weights


def _format_of(weights: Mapping[str, torch.Tensor]) -> BlockFormat:
    dtypes = {name: weight.dtype for name, weight in weights.items()}
    return block_format(
        {name: (tuple(weight.shape), weight.dtype) for name, weight in weights.items()}, dtypes
    )
