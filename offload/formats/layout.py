"""Layout of the matrices of one block in one flat tensor: names, shapes, dtypes, offsets.

Also allocates such tensors, and selects the parameters of a block that stream. A block in one flat tensor takes one
copy over the bus instead of ten.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from .packing import EightBit, Packing, QuantFormat, stored_bytes

# Every tensor starts at a multiple of this number of bytes. CPU and CUDA kernels choose their code path by alignment,
# and the paths sum in different orders: only with the alignment of an ordinary tensor are streamed results bit-equal to
# those of an ordinary model.
ALIGNMENT = 256

PIECE = "/"
"""Separates a parameter and its piece in the name of a tensor; no parameter of a module has it in its name."""

NO_PACKINGS: Mapping[str, Packing] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class FlatTensor:
    """One tensor inside a flat tensor; `offset` and `nbytes` in bytes.

    `shape` is the shape of the values; `dtype` is that of their stored numbers, or uint8 for bytes of a packing.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int
    packing: Packing | None = None

    @property
    def view_shape(self) -> tuple[int, ...]:
        """Shape of the stored bytes as a tensor of `dtype`: [groups, bytes] if values are GGUF-quantised."""
        return self.shape if self.packing is None else self.packing.view_shape(self.shape)

    def is_continued_by(self, follower: FlatTensor) -> bool:
        """Return True if `follower` starts at the end of this tensor and is stored alike."""
        alike = (self.dtype, self.packing) == (follower.dtype, follower.packing)
        return alike and self.offset + self.nbytes == follower.offset

    def joined(self, follower: FlatTensor) -> FlatTensor:
        """Return this tensor and the one that starts at its end as one vector."""
        shape = (math.prod(self.shape) + math.prod(follower.shape),)
        return replace(self, shape=shape, nbytes=self.nbytes + follower.nbytes)


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """Tensors in memory order; offsets and the total `nbytes` are multiples of `ALIGNMENT`.

    The padding between two tensors is undefined.
    """

    tensors: tuple[FlatTensor, ...]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Layouts of one block as its source stores it and as the model computes with it.

    Both have the same tensors with the same shapes in the same order. `scaled` names the tensors whose stored values
    must be multiplied by a scale of the tensor or of its rows.
    """

    stored: FlatLayout
    computed: FlatLayout
    scaled: frozenset[str] = frozenset()
    dtype: torch.dtype | None = None
    """Dtype of the activations that are multiplied by codes, and of patches of matrices that stay codes."""

    def __post_init__(self) -> None:
        stored = [(tensor.name, tensor.shape) for tensor in self.stored.tensors]
        computed = [(tensor.name, tensor.shape) for tensor in self.computed.tensors]
        assert stored == computed, f"layouts differ: {stored} and {computed}"
        can = {tensor.name for tensor in self.stored.tensors if not isinstance(tensor.packing, QuantFormat)}
        assert self.scaled <= can, f"scales without a tensor, or of a quantised one: {sorted(self.scaled - can)}"

    @property
    def is_raw(self) -> bool:
        """True if the model computes with the stored bytes, so that nothing has to be decoded."""
        return self.stored == self.computed and not self.scaled

    @property
    def quantised_values(self) -> int:
        """Values of the largest part that is dequantised with work memory; 0 for none."""
        parts = (stored for stored, computed in self.parts if stored.packing is not None and computed.packing is None)
        # Codes that are not rotated are converted and scaled in place.
        worked = (each for each in parts if not isinstance(each.packing, EightBit) or each.packing.group)
        return max((math.prod(stored.shape) for stored in worked), default=0)

    def patch_dtype(self, tensor: FlatTensor) -> torch.dtype:
        """Return the dtype of the factors of a patch of one of the computed tensors."""
        if tensor.packing is None:
            return tensor.dtype
        assert self.dtype is not None, f"{tensor.name} stays codes"
        return self.dtype

    @cached_property
    def parts(self) -> tuple[tuple[FlatTensor, FlatTensor], ...]:
        """Stored and computed tensors; neighbours in one format of GGUF are joined, to be decoded as a vector."""
        parts: list[tuple[FlatTensor, FlatTensor]] = []
        for stored, computed in zip(self.stored.tensors, self.computed.tensors, strict=True):
            if (
                parts
                and parts[-1][0].is_continued_by(stored)
                and parts[-1][1].is_continued_by(computed)
                and isinstance(stored.packing, QuantFormat)
            ):
                parts[-1] = (parts[-1][0].joined(stored), parts[-1][1].joined(computed))
            else:
                parts.append((stored, computed))
        return tuple(parts)


def flat_layout(
    tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]], packings: Mapping[str, Packing] = NO_PACKINGS
) -> FlatLayout:
    """Lay out tensors (name, shape, dtype) in the given order; `packings` has those that are packed by name."""
    placed: list[FlatTensor] = []
    end = 0
    for name, shape, dtype in tensors:
        packing = packings.get(name)
        nbytes = stored_bytes(shape, dtype, packing)
        placed.append(FlatTensor(name=name, shape=shape, dtype=dtype, offset=end, nbytes=nbytes, packing=packing))
        end += _aligned(nbytes)
    return FlatLayout(tensors=tuple(placed), nbytes=end)


def block_format(
    stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    computed_dtypes: Mapping[str, torch.dtype] | torch.dtype,
    scaled: Collection[str] = (),
    packings: Mapping[str, Packing] = NO_PACKINGS,
    *,
    multiplied: Collection[torch.dtype] = (),
    decoded: Collection[str] = (),
) -> BlockFormat:
    """Return the format of a block.

    Args:
        stored: shape and stored dtype by parameter name.
        computed_dtypes: one compute dtype for all, or one for each name.
        scaled: names of the tensors that have a scale.
        packings: packings by name.
        multiplied: dtypes of codes that are multiplied as they are stored, with their scales.
        decoded: names of matrices whose codes are decoded all the same.
    """

    def computed_dtype(name: str) -> torch.dtype:
        return computed_dtypes if isinstance(computed_dtypes, torch.dtype) else computed_dtypes[name]

    kept = {}
    for name, (shape, dtype) in stored.items():
        packing = packings.get(name)
        if name in decoded:
            continue
        if packing is None and dtype in multiplied and name not in scaled and math.prod(shape) % 4 == 0:
            kept[name] = EightBit(dtype=dtype, by_row=False)  # a plain cast, whose scale is 1
        elif isinstance(packing, EightBit) and packing.dtype in multiplied and not packing.block:
            # comfy-kitchen takes int8 codes with a scale for each row.
            by_row = packing.by_row or packing.dtype == torch.int8
            kept[name] = replace(packing, by_row=by_row, scale_dtype=torch.float32)
    dtypes = {name: torch.uint8 if name in kept else computed_dtype(name) for name in stored}
    return BlockFormat(
        stored=flat_layout(((name, shape, dtype) for name, (shape, dtype) in stored.items()), packings),
        computed=flat_layout(((name, shape, dtypes[name]) for name, (shape, _) in stored.items()), kept),
        scaled=frozenset(scaled),
        dtype=computed_dtype(next(iter(kept))) if kept else None,
    )


def tensor_views(flat: torch.Tensor, layout: FlatLayout) -> dict[str, torch.Tensor]:
    """Return the tensors of `layout` as views of `flat`, 1-D uint8 of at least `layout.nbytes`, on any device.

    The view of a packed tensor has its `view_shape`.
    """
    assert flat.dtype == torch.uint8, f"a flat tensor must be uint8, not {flat.dtype}"
    assert flat.dim() == 1, f"a flat tensor must have one dimension, not {flat.dim()}"
    assert flat.numel() >= layout.nbytes, f"the layout needs {layout.nbytes} bytes, the tensor has {flat.numel()}"
    return {
        tensor.name: flat[tensor.offset : tensor.offset + tensor.nbytes].view(tensor.dtype).view(tensor.view_shape)
        for tensor in layout.tensors
    }


def copy_together(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy small CPU tensors to `device` in one transfer; returns views of one flat tensor there.

    A blocking copy costs about as much for a bias as for a megabyte; an expert of Wan2.2 A14B has 685 small tensors.
    """
    layout = flat_layout((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
    flat = allocate_flat(layout.nbytes, "cpu")
    for name, view in tensor_views(flat, layout).items():
        view.copy_(tensors[name])
    return tensor_views(flat.to(device), layout)


def host_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the bytes of a contiguous CPU tensor as an array that shares its memory.

    Fetch and read threads copy with numpy, because a torch copy on them would start a second thread pool next to that
    of the compute thread.
    """
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def allocate_flat(nbytes: int, device: torch.device | str) -> torch.Tensor:
    """Return `nbytes` of uninitialised memory as 1-D uint8 whose address is a multiple of `ALIGNMENT`."""
    device = torch.device(device)
    # Callers may be in inference mode, which is thread-local. An inference tensor could not be written by the fetch
    # thread, or by a later run outside inference mode.
    with torch.inference_mode(False):
        if device.type != "cpu":  # aligned enough, and 255 extra bytes could cost 2 MB
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        memory = torch.empty(nbytes + ALIGNMENT - 1, dtype=torch.uint8, device=device)  # aligned to 64 bytes only
        start = -memory.data_ptr() % ALIGNMENT
        return memory[start : start + nbytes]


def piece_name(parameter: str, piece: str) -> str:
    """Return the name of one of the tensors that a parameter is joined from, when its block is bound."""
    return f"{parameter}{PIECE}{piece}"


def pieces_by_parameter(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the names of the pieces of each parameter by piece; a parameter that is stored whole has no pieces."""
    parameters: dict[str, dict[str, str]] = {}
    for name in names:
        parameter, separator, piece = name.partition(PIECE)
        parameters.setdefault(parameter, {}).update({piece: name} if separator else {})
    return parameters


def streamed_names(block: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters that stream, in `named_parameters` order: the weight of every `nn.Linear`.

    These are 99.965 % of the bytes of a Wan2.2 A14B block; biases and norms are always resident.
    """
    return tuple(
        f"{name}.weight" if name else "weight"
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
