"""Weights bound to modules: streamed weights from buffers, resident tensors on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...plan.programs import BlockKey
from ..core.buffers import BlockBuffer
from ..formats.layout import (
    FlatLayout,
    FlatTensor,
    pieces_by_parameter,
    streamed_names,
    tensor_views,
)
from ..formats.packing import EightBit
from ..transfers.patches import StagedPatch

Tensors: TypeAlias = Mapping[str, torch.Tensor]

JoinPieces: TypeAlias = Callable[[BlockKey, str, Tensors], torch.Tensor]
"""Returns a block parameter made from pieces.

The arguments are the block, the parameter name and the pieces: views of a buffer, and pieces made
by a `ComputedPatch`. Called once per pair of block and buffer. The result refers to the views,
because their contents change later.
"""


class AbsentWeightError(ValueError):
    """A streamed weight was used while the block was not on the device.

    Args:
        key: the block in programs.
        name: weight name within the block.
    """

    def __init__(self, key: BlockKey, name: str) -> None:
        super().__init__(
            f"{name} of block {key.block} of {key.expert!r} was used outside a visit of the block, "
            "when it is not on the device, as by code that reads weights without calling their "
            "layer: load the model with a loader that keeps its weights in memory"
        )
        self.key = key


class AbsentWeight(torch.Tensor):
    """Empty tensor in place of a streamed weight. Computing with it raises AbsentWeightError.

    A meta tensor would not raise: CPU kernels accept one as a weight and return another one.
    """

    place: tuple[BlockKey, str]
    """Block and weight name."""

    @staticmethod
    def __new__(cls, key: BlockKey, name: str, dtype: torch.dtype | None = None) -> AbsentWeight:
        # Outside inference mode, because it outlives the run.
        with torch.inference_mode(False):
            made: AbsentWeight = torch.Tensor._make_subclass(cls, torch.empty(0, dtype=dtype))
        made.place = (key, name)
        # `nn.Parameter(made)` would be a detached one.
        made._is_param = True
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        absent = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
        if function is torch.ops.aten.detach.default:  # by `state_dict`
            with torch.inference_mode(False):  # like the tensor itself
                return torch.empty(0, dtype=absent.dtype)
        raise AbsentWeightError(*absent.place)


class BlockBinding:
    """Streamed parameters in one block.

    From the first `unbind` on, they are absent weights while the block is not in a buffer.

    Args:
        key: the block in programs.
        block: the module.
        layout: layout for a buffer with the block.
        join: makes parameters stored in pieces. None for blocks without such parameters.

    Raises:
        ValueError: layout and module do not match.
    """

    def __init__(
        self, key: BlockKey, block: nn.Module, layout: FlatLayout, join: JoinPieces | None = None
    ) -> None:
        self.key = key
        self._layout = layout
        self._join = join
        parameters = pieces_by_parameter(tensor.name for tensor in layout.tensors)
        self._pieces = {name: pieces for name, pieces in parameters.items() if pieces}
        streamed = parameters.keys()
        tensors = dict(chain(block.named_parameters(), block.named_buffers()))
        without_data = {name for name in streamed_names(block) if tensors[name].is_meta}
        if difference := sorted((streamed - tensors.keys()) | (without_data - streamed)):
            raise ValueError(
                f"block {key.block} of {key.expert!r}: the source and the module differ in "
                f"{', '.join(difference)}"
            )
        self._whole = [tensor for tensor in layout.tensors if tensor.name in parameters]
        self._unbound: dict[str, torch.Tensor] = {}
        factors: list[str] = []
        for tensor in self._whole:
            self._unbound |= _absent(key, tensor)
        for name in self._pieces:
            self._unbound[name] = AbsentWeight(key, name)
        for tensor in layout.tensors:
            if tensor.packing:
                factors += [_factor(tensor.name, part) for part in ("up", "down")]
        self._places = {name: _place(block, name) for name in (*self._unbound, *factors)}
        self._originals = {name: store[leaf] for name, (store, leaf) in self._places.items()}
        self._bound: int | None = None

    def bind(self, buffer: BlockBuffer, patch: StagedPatch | None = None) -> None:
        """Point the block's parameters and patch factors to the contents of `buffer`."""
        # A resident block keeps buffer and views between two visits.
        if self._bound == buffer.index:
            return
        # Each patch of a block needs its own views, because the factors differ.
        key = buffer.key or self.key
        tensors = buffer.views.get(key)
        if tensors is None:
            tensors = buffer.views[key] = self._views(buffer, patch)
        self._put(tensors)
        self._bound = buffer.index

    def unbind(self) -> None:
        """Replace the parameters with absent weights. Another block gets the buffer."""
        self._put(self._unbound)
        self._bound = None

    def restore(self) -> None:
        """Put back the parameter objects from before attaching."""
        for name, (store, leaf) in self._places.items():
            store[leaf] = self._originals[name]
        self._bound = None

    def _put(self, tensors: Tensors) -> None:
        for name, (store, leaf) in self._places.items():
            # `_parameters` rather than `setattr` or `.data`: no `nn.Module.__setattr__` per visit,
            # and a meta parameter cannot get data on another device. The module sees ordinary
            # parameters in the buffer's memory.
            store[leaf] = tensors.get(name)  # none for the factors of a block without a patch

    def _views(self, buffer: BlockBuffer, patch: StagedPatch | None) -> Tensors:
        # Created once per pair of block and buffer, and cached by the buffer. Outside inference
        # mode, because buffers outlive the run that binds them first, and the next run may be in
        # another mode.
        with torch.inference_mode(False):
            views = tensor_views(buffer.memory, self._layout)
            bound: dict[str, torch.Tensor] = {}
            for tensor in self._whole:
                bound |= _bound(tensor, views[tensor.name])
            for name, pieces in self._pieces.items():
                assert self._join is not None, f"{name} is stored in pieces, which nobody joins"
                made = {} if patch is None else patch.made.get(name, {})
                stored = {piece: views[at] for piece, at in pieces.items()}
                bound[name] = self._join(self.key, name, {**stored, **made})
            if patch is not None:
                for name, (up, down) in patch.factors_in(buffer.memory).items():
                    bound |= {_factor(name, "up"): up, _factor(name, "down"): down}
            return bound


def _bound(tensor: FlatTensor, view: torch.Tensor) -> Tensors:
    """Return the module data for a streamed matrix: the weight, and with codes the scales too."""
    if tensor.packing is None:
        return {tensor.name: nn.Parameter(view, requires_grad=False)}
    assert isinstance(tensor.packing, EightBit), (
        f"{tensor.name}: no module computes with {tensor.packing.name}"
    )
    codes, scale = tensor.packing.split(view, tensor.shape)
    return {tensor.name: nn.Parameter(codes, requires_grad=False), f"{tensor.name}_scale": scale}


def _factor(name: str, part: str) -> str:
    """Return a patch factor's buffer name in a layer with codes."""
    return f"{name.removesuffix('weight')}patch_{part}"


def _absent(key: BlockKey, tensor: FlatTensor) -> Tensors:
    dtype = getattr(tensor.packing, "dtype", tensor.dtype)
    weight = {tensor.name: AbsentWeight(key, tensor.name, dtype)}
    if tensor.packing is None:
        return weight
    return {**weight, f"{tensor.name}_scale": torch.empty(0)}


def _place(block: nn.Module, name: str) -> tuple[dict[str, torch.Tensor | None], str]:
    path, _, leaf = name.rpartition(".")
    module = block.get_submodule(path)
    if leaf in module._parameters:
        return cast("dict[str, torch.Tensor | None]", module._parameters), leaf
    if leaf not in module._buffers:
        raise ValueError(
            f"{name} is multiplied as it is stored, and {path} is not a module for that"
        )
    return module._buffers, leaf


_Entry: TypeAlias = "tuple[dict[str, torch.Tensor | None], str, torch.Tensor]"
"""Module dictionary, key and value."""


class ResidentTensors:
    """Tensors in one block that do not stream and are not on the device yet.

    The constructor copies them to the device and may fail. `put` installs the copies and cannot
    fail.
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
        # Blocks outlive the run they were attached for, so the copies must not be inference
        # tensors.
        with torch.inference_mode(False):
            self._copies: list[_Entry] = [
                (at, name, _copy(tensor, device)) for at, name, tensor in self._originals
            ]

    def put(self) -> None:
        """Install the copies in the block."""
        _install(self._copies)

    def restore(self) -> None:
        """Put back the tensors from before attaching."""
        _install(self._originals)


def _install(entries: list[_Entry]) -> None:
    # The list is emptied. Otherwise it would keep the copies alive after `restore`.
    while entries:
        tensors, name, tensor = entries.pop()
        tensors[name] = tensor


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    copy = tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, requires_grad=False)
    return copy
