"""Binding of weights to modules: streamed weights from buffers, resident tensors on the device."""

from __future__ import annotations

from typing import TypeAlias, cast

import torch
from torch import nn

from ...plan import BlockKey
from ..formats.layout import FlatLayout, streamed_names, tensor_views
from .buffers import BlockBuffer


class BlockBinding:
    """The streamed parameters of one block.

    From the first `unbind` on they are empty while the block is in no buffer: computing with it fails by its shape. (A
    meta tensor would not do, CPU kernels accept one as a weight and return another.)
    """

    def __init__(self, key: BlockKey, block: nn.Module, layout: FlatLayout) -> None:
        self.key = key
        self._layout = layout
        names = streamed_names(block)
        expected = tuple(tensor.name for tensor in layout.tensors)
        if set(names) != set(expected):
            odd = sorted(set(names) ^ set(expected))
            raise ValueError(
                f"block {key.block} of {key.expert!r}: the source and the module differ in {', '.join(odd)}"
            )
        self._slots = {name: _slot(block, name) for name in names}
        self._originals = {name: module._parameters[leaf] for name, (module, leaf) in self._slots.items()}
        self._absent = {
            tensor.name: nn.Parameter(torch.empty(0, dtype=tensor.dtype), requires_grad=False)
            for tensor in layout.tensors
        }
        self._bound: int | None = None

    def bind(self, buffer: BlockBuffer) -> None:
        """Let the block compute with what lies in `buffer`."""
        if self._bound == buffer.index:
            return
        parameters = buffer.views.get(self.key)
        if parameters is None:
            parameters = buffer.views[self.key] = self._views(buffer)
        self._put(parameters)
        self._bound = buffer.index

    def unbind(self) -> None:
        """The tenancy is over: the buffer belongs to another block now."""
        self._put(self._absent)
        self._bound = None

    def restore(self) -> None:
        """Give the block the very parameters it came with."""
        for name, (module, leaf) in self._slots.items():
            module._parameters[leaf] = self._originals[name]
        self._bound = None

    def _put(self, parameters: dict[str, nn.Parameter]) -> None:
        for name, (module, leaf) in self._slots.items():
            module._parameters[leaf] = parameters[name]

    def _views(self, buffer: BlockBuffer) -> dict[str, nn.Parameter]:
        # Made once per block and buffer, which keeps them; outside inference mode, because buffers outlive the run that
        # first binds them.
        with torch.inference_mode(False):
            views = tensor_views(buffer.memory, self._layout)
            return {name: nn.Parameter(view, requires_grad=False) for name, view in views.items()}


def _slot(block: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return block.get_submodule(path), leaf


_Place: TypeAlias = "tuple[dict[str, torch.Tensor | None], str, torch.Tensor]"  # where a tensor is, and the tensor


class ResidentTensors:
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
