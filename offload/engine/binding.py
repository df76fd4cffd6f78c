"""Binding of weights to modules: streamed weights from buffers, resident tensors on the device."""

from __future__ import annotations

from typing import TypeAlias, cast

import torch
from torch import nn

from ...plan import BlockKey
from ..formats.layout import FlatLayout, streamed_names, tensor_views
from .buffers import BlockBuffer


class BlockBinding:
    """Streamed parameters of one block.

    From the first `unbind` on, they are empty tensors while the block is not in a buffer, so that computing with the
    block raises a shape error. Meta tensors would not: CPU kernels accept one as a weight and return another one.
    """

    def __init__(self, key: BlockKey, block: nn.Module, layout: FlatLayout) -> None:
        self.key = key
        self._layout = layout
        names = streamed_names(block)
        expected = tuple(tensor.name for tensor in layout.tensors)
        if set(names) != set(expected):
            difference = sorted(set(names) ^ set(expected))
            raise ValueError(
                f"block {key.block} of {key.expert!r}: the source and the module differ in {', '.join(difference)}"
            )
        self._slots = {name: _slot(block, name) for name in names}
        self._originals = {name: module._parameters[leaf] for name, (module, leaf) in self._slots.items()}
        self._unbound = {
            tensor.name: nn.Parameter(torch.empty(0, dtype=tensor.dtype), requires_grad=False)
            for tensor in layout.tensors
        }
        self._bound: int | None = None

    def bind(self, buffer: BlockBuffer) -> None:
        """Point the parameters of the block to the contents of `buffer`."""
        if self._bound == buffer.index:
            return
        parameters = buffer.views.get(self.key)
        if parameters is None:
            parameters = buffer.views[self.key] = self._views(buffer)
        self._put(parameters)
        self._bound = buffer.index

    def unbind(self) -> None:
        """Replace the parameters by empty tensors: another block gets the buffer."""
        self._put(self._unbound)
        self._bound = None

    def restore(self) -> None:
        """Put back the parameter objects that the block was attached with."""
        for name, (module, leaf) in self._slots.items():
            module._parameters[leaf] = self._originals[name]
        self._bound = None

    def _put(self, parameters: dict[str, nn.Parameter]) -> None:
        for name, (module, leaf) in self._slots.items():
            # `_parameters` rather than `setattr` or `.data`: no `nn.Module.__setattr__` per visit, and a meta parameter
            # cannot get the data of another device. The module sees ordinary parameters of the buffer's memory.
            module._parameters[leaf] = parameters[name]

    def _views(self, buffer: BlockBuffer) -> dict[str, nn.Parameter]:
        # Created once per pair of block and buffer, and cached by the buffer. Outside inference mode, because buffers
        # outlive the run that binds them first, and the next run may be in another mode.
        with torch.inference_mode(False):
            views = tensor_views(buffer.memory, self._layout)
            return {name: nn.Parameter(view, requires_grad=False) for name, view in views.items()}


def _slot(block: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return block.get_submodule(path), leaf


_Entry: TypeAlias = "tuple[dict[str, torch.Tensor | None], str, torch.Tensor]"  # a module's dict, the key, the value


class ResidentTensors:
    """Tensors of one block that do not stream and are not on the device yet.

    The constructor copies them to the device, which may fail; `put` installs the copies, which cannot fail.
    """

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        self._originals: list[_Entry] = []
        streamed = streamed_names(block)
        for path, module in block.named_modules():
            for store in (module._parameters, module._buffers):
                tensors = cast("dict[str, torch.Tensor | None]", store)
                for name, tensor in tensors.items():
                    if tensor is None or tensor.is_meta or tensor.device == device:
                        continue
                    if f"{path}.{name}".lstrip(".") not in streamed:
                        self._originals.append((tensors, name, tensor))
        # Blocks outlive the run that they were attached for, so the copies must not be inference tensors.
        with torch.inference_mode(False):
            self._copies: list[_Entry] = [(at, name, _copy(tensor, device)) for at, name, tensor in self._originals]

    def put(self) -> None:
        """Install the copies in the block."""
        for tensors, name, tensor in self._copies:
            tensors[name] = tensor
        self._copies.clear()

    def restore(self) -> None:
        """Put back the tensors that the block was attached with."""
        for tensors, name, tensor in self._originals:
            tensors[name] = tensor
        self._originals.clear()


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    copy = tensor.detach().to(device)
    return nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy
