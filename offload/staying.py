"""What a block keeps on the device all the time: biases, norms, tables. Meta tensors are their owner's to fill."""

from __future__ import annotations

from typing import TypeAlias, cast

import torch
from torch import nn

from .layout import streamed_names

_Place: TypeAlias = "tuple[dict[str, torch.Tensor | None], str, torch.Tensor]"  # where a tensor is, and the tensor


class StayingTensors:
    """The tensors of one block that do not stream and are not on the device yet.

    They are copied when this is made, which may fail, and take their places in `put`, which may not.
    """

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        self._originals: list[_Place] = []
        streamed = streamed_names(block)
        for path, module in block.named_modules():
            for store in (module._parameters, module._buffers):
                tensors = cast("dict[str, torch.Tensor | None]", store)
                for name, tensor in tensors.items():
                    if tensor is None or tensor.is_meta or tensor.device == device:
                        continue
                    if f"{path}.{name}".lstrip(".") not in streamed:
                        self._originals.append((tensors, name, tensor))
        # Blocks outlive the run that they were attached for, so none of this may be an inference tensor.
        with torch.inference_mode(False):
            self._copies: list[_Place] = [(at, name, _copy(tensor, device)) for at, name, tensor in self._originals]

    def put(self) -> None:
        """Let the block compute with the copies."""
        for tensors, name, tensor in self._copies:
            tensors[name] = tensor
        self._copies.clear()

    def restore(self) -> None:
        for tensors, name, tensor in self._originals:
            tensors[name] = tensor
        self._originals.clear()


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    there = tensor.detach().to(device)
    return nn.Parameter(there, requires_grad=False) if isinstance(tensor, nn.Parameter) else there
