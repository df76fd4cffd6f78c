"""Binding of weights to modules: streamed weights from buffers, resident tensors on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias, cast

import torch
from torch import nn

from ...plan import BlockKey
from ..formats.layout import FlatLayout, FlatTensor, pieces_by_parameter, streamed_names, tensor_views
from ..formats.packing import EightBit
from ..patches import StagedPatch
from .buffers import BlockBuffer

Tensors: TypeAlias = Mapping[str, torch.Tensor]

JoinPieces: TypeAlias = Callable[[BlockKey, str, Tensors], torch.Tensor]
"""Returns a parameter of a block, given by its name, that consists of pieces: views of a buffer by piece.

Called once per pair of block and buffer; the result refers to the views, because their contents change later.
"""


class BlockBinding:
    """Streamed parameters of one block.

    From the first `unbind` on, they are empty tensors while the block is not in a buffer, so that computing with the
    block raises a shape error. Meta tensors would not: CPU kernels accept one as a weight and return another one.

    Args:
        key: the block in programs.
        block: the module.
        layout: layout of a buffer with the block.
        join: makes the parameters that are stored in pieces; None for blocks without such parameters.

    Raises:
        ValueError: the layout does not fit the module.
    """

    def __init__(self, key: BlockKey, block: nn.Module, layout: FlatLayout, join: JoinPieces | None = None) -> None:
        self.key = key
        self._layout, self._join = layout, join
        parameters = pieces_by_parameter(tensor.name for tensor in layout.tensors)
        self._pieces = {name: pieces for name, pieces in parameters.items() if pieces}
        streamed = parameters.keys()
        tensors = {**dict(block.named_parameters()), **dict(block.named_buffers())}
        without_data = {name for name in streamed_names(block) if tensors[name].is_meta}
        if difference := sorted((streamed - tensors.keys()) | (without_data - streamed)):
            raise ValueError(
                f"block {key.block} of {key.expert!r}: the source and the module differ in {', '.join(difference)}"
            )
        self._whole = [tensor for tensor in layout.tensors if tensor.name in parameters]
        self._unbound = {name: each for tensor in self._whole for name, each in _empty(tensor).items()}
        self._unbound |= {name: nn.Parameter(torch.empty(0), requires_grad=False) for name in self._pieces}
        factors = (_factor(each.name, part) for each in layout.tensors if each.packing for part in ("up", "down"))
        self._places = {name: _place(block, name) for name in (*self._unbound, *factors)}
        self._originals = {name: store[leaf] for name, (store, leaf) in self._places.items()}
        self._bound: int | None = None

    def bind(self, buffer: BlockBuffer, patch: StagedPatch | None = None) -> None:
        """Point the parameters of the block, and the factors of its patch, to the contents of `buffer`."""
        if self._bound == buffer.index:
            return
        # Each patch of a block has its own views: those of its factors differ.
        key = buffer.key or self.key
        tensors = buffer.views.get(key)
        if tensors is None:
            tensors = buffer.views[key] = self._views(buffer, patch)
        self._put(tensors)
        self._bound = buffer.index

    def unbind(self) -> None:
        """Replace the parameters by empty tensors: another block gets the buffer."""
        self._put(self._unbound)
        self._bound = None

    def restore(self) -> None:
        """Put back the parameter objects that the block was attached with."""
        for name, (store, leaf) in self._places.items():
            store[leaf] = self._originals[name]
        self._bound = None

    def _put(self, tensors: Tensors) -> None:
        for name, (store, leaf) in self._places.items():
            # `_parameters` rather than `setattr` or `.data`: no `nn.Module.__setattr__` per visit, and a meta parameter
            # cannot get the data of another device. The module sees ordinary parameters of the buffer's memory.
            store[leaf] = tensors.get(name)  # none for the factors of a block without a patch

    def _views(self, buffer: BlockBuffer, patch: StagedPatch | None) -> Tensors:
        # Created once per pair of block and buffer, and cached by the buffer. Outside inference mode, because buffers
        # outlive the run that binds them first, and the next run may be in another mode.
        with torch.inference_mode(False):
            views = tensor_views(buffer.memory, self._layout)
            bound = {name: each for tensor in self._whole for name, each in _bound(tensor, views[tensor.name]).items()}
            for name, pieces in self._pieces.items():
                assert self._join is not None, f"{name} is stored in pieces, which nobody joins"
                bound[name] = self._join(self.key, name, {piece: views[at] for piece, at in pieces.items()})
            for name, (up, down) in ({} if patch is None else patch.factors_in(buffer.memory)).items():
                bound |= {_factor(name, "up"): up, _factor(name, "down"): down}
            return bound


def _bound(tensor: FlatTensor, view: torch.Tensor) -> Tensors:
    """Return what the module of a streamed matrix gets: its weight, and with codes also their scales."""
    if tensor.packing is None:
        return {tensor.name: nn.Parameter(view, requires_grad=False)}
    assert isinstance(tensor.packing, EightBit), f"{tensor.name}: no module computes with {tensor.packing.name}"
    codes, scale = tensor.packing.split(view, tensor.shape)
    return {tensor.name: nn.Parameter(codes, requires_grad=False), f"{tensor.name}_scale": scale}


def _factor(name: str, part: str) -> str:
    """Return the name of the buffer of a layer with codes for a factor of the patch of its weight."""
    return f"{name.removesuffix('weight')}patch_{part}"


def _empty(tensor: FlatTensor) -> Tensors:
    dtype = tensor.packing.dtype if isinstance(tensor.packing, EightBit) else tensor.dtype
    weight = {tensor.name: nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)}
    return weight if tensor.packing is None else {**weight, f"{tensor.name}_scale": torch.empty(0)}


def _place(block: nn.Module, name: str) -> tuple[dict[str, torch.Tensor | None], str]:
    path, _, leaf = name.rpartition(".")
    module = block.get_submodule(path)
    if leaf in module._parameters:
        return cast("dict[str, torch.Tensor | None]", module._parameters), leaf
    if leaf not in module._buffers:
        raise ValueError(f"{name} is multiplied as it is stored, and {path} is not a module for that")
    return module._buffers, leaf


_Entry: TypeAlias = "tuple[dict[str, torch.Tensor | None], str, torch.Tensor]"  # a module's dict, the key, the value


class ResidentTensors:
    """Tensors of one block that do not stream and are not on the device yet.

    The constructor copies them to the device, which may fail; `put` installs the copies, which cannot fail.
    """

    def __init__(self, block: nn.Module, device: torch.device, layout: FlatLayout) -> None:
        self._originals: list[_Entry] = []
        streamed = pieces_by_parameter(tensor.name for tensor in layout.tensors)
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
