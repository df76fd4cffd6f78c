"""Layout for a block's matrices in one flat tensor: names, shapes, dtypes, offsets.

Also allocates such tensors, and selects the block parameters that stream. A block in one flat
tensor takes one copy over the bus instead of ten.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import torch
from torch import nn

from .packing import EightBit, Packing, QuantFormat, stored_bytes

# Every tensor starts at a multiple of this number of bytes. CPU and CUDA kernels choose their code
# path by alignment, and the paths sum in different orders. Streamed results are bit-equal to an
# ordinary model's only with the alignment of an ordinary tensor.
ALIGNMENT = 256

PIECE = "/"
"""Separates a parameter and its piece in a tensor name. No module parameter has it in the name."""

NO_PACKINGS: Mapping[str, Packing] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class FlatTensor:
    """One tensor inside a flat tensor. `offset` and `nbytes` are in bytes.

    `shape` is the values' shape. `dtype` is the stored numbers' dtype, or uint8 for packed bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int
    packing: Packing | None = None

    @property
    def view_shape(self) -> tuple[int, ...]:
        """Shape of the stored bytes as a `dtype` tensor: [groups, bytes] if GGUF-quantised."""
        if self.packing is None:
            return self.shape
        return self.packing.view_shape(self.shape)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this tensor as a view of `flat`, 1-D uint8, in its `view_shape`."""
        stored = flat[self.offset : self.offset + self.nbytes]
        return stored.view(self.dtype).view(self.view_shape)

    def is_continued_by(self, follower: FlatTensor) -> bool:
        """Return True if `follower` starts where this tensor ends and is stored alike."""
        alike = (self.dtype, self.packing) == (follower.dtype, follower.packing)
        return alike and self.offset + self.nbytes == follower.offset

    def joined(self, follower: FlatTensor) -> FlatTensor:
        """Return this tensor and the next one in memory as one vector."""
        shape = (math.prod(self.shape) + math.prod(follower.shape),)
        return replace(self, shape=shape, nbytes=self.nbytes + follower.nbytes)


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """Tensors in memory order. Offsets and the total `nbytes` are multiples of `ALIGNMENT`.

    The padding between two tensors is undefined.
    """

    tensors: tuple[FlatTensor, ...]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Layouts for one block, as stored by the source and as used for compute.

    Both have the same tensors with the same shapes in the same order. `scaled` names the tensors
    with a scale, per tensor or per row, to multiply the stored values by.
    """

    stored: FlatLayout
    computed: FlatLayout
    scaled: frozenset[str] = frozenset()
    dtype: torch.dtype | None = None
    """Dtype for activations that are multiplied by codes, and for patches to matrices that stay
    codes."""

    def __post_init__(self) -> None:
        stored = [(tensor.name, tensor.shape) for tensor in self.stored.tensors]
        computed = [(tensor.name, tensor.shape) for tensor in self.computed.tensors]
        assert stored == computed, f"layouts differ: {stored} and {computed}"
        can = {t.name for t in self.stored.tensors if not isinstance(t.packing, QuantFormat)}
        wrong = sorted(self.scaled - can)
        assert not wrong, f"scales without a tensor, or of a quantised one: {wrong}"

    @property
    def is_raw(self) -> bool:
        """True if the model computes with the stored bytes, so nothing has to be decoded."""
        return self.stored == self.computed and not self.scaled

    @property
    def quantised_values(self) -> int:
        """Values in the largest part dequantised with work memory. 0 for none."""
        most = 0
        for stored, computed in self.parts:
            if stored.packing is None or computed.packing is not None:
                continue
            # Codes without rotation are converted and scaled in place.
            if not isinstance(stored.packing, EightBit) or stored.packing.group:
                most = max(most, math.prod(stored.shape))
        return most

    def patch_dtype(self, tensor: FlatTensor) -> torch.dtype:
        """Return the dtype for the patch factors of one computed tensor."""
        if tensor.packing is None:
            return tensor.dtype
        assert self.dtype is not None, f"{tensor.name} stays codes"
        return self.dtype

    @cached_property
    def parts(self) -> tuple[tuple[FlatTensor, FlatTensor], ...]:
        """Stored and computed tensors.

        Neighbours in one GGUF format are joined, to be decoded as a vector.
        """
        parts: list[tuple[FlatTensor, FlatTensor]] = []
        for stored, computed in zip(self.stored.tensors, self.computed.tensors, strict=True):
            if parts and isinstance(stored.packing, QuantFormat):
                before, result = parts[-1]
                if before.is_continued_by(stored) and result.is_continued_by(computed):
                    parts[-1] = (before.joined(stored), result.joined(computed))
                    continue
            parts.append((stored, computed))
        return tuple(parts)


def flat_layout(
    tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]],
    packings: Mapping[str, Packing] = NO_PACKINGS,
) -> FlatLayout:
    """Lay out tensors (name, shape, dtype) in the given order.

    `packings` has the packed ones by name.
    """
    placed: list[FlatTensor] = []
    end = 0
    for name, shape, dtype in tensors:
        packing = packings.get(name)
        nbytes = stored_bytes(shape, dtype, packing)
        tensor = FlatTensor(
            name=name, shape=shape, dtype=dtype, offset=end, nbytes=nbytes, packing=packing
        )
        placed.append(tensor)
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT
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
    """Return a block's format.

    Args:
        stored: shape and stored dtype by parameter name.
        computed_dtypes: one compute dtype for all, or one for each name.
        scaled: names of tensors with a scale.
        packings: packings by name.
        multiplied: dtypes of codes that are multiplied as stored, with their scales.
        decoded: names of matrices to decode all the same.
    """
    if isinstance(computed_dtypes, torch.dtype):
        computed_dtypes = dict.fromkeys(stored, computed_dtypes)
    kept = {}
    for name, (shape, dtype) in stored.items():
        packing = packings.get(name)
        if name in decoded:
            continue
        is_plain = packing is None and name not in scaled
        # The fp32 scale follows the codes, and must start at a multiple of 4 bytes.
        if is_plain and dtype in multiplied and math.prod(shape) % 4 == 0:
            kept[name] = EightBit(dtype=dtype, by_row=False)  # a plain cast, whose scale is 1
        elif isinstance(packing, EightBit) and packing.dtype in multiplied and not packing.block:
            # comfy-kitchen takes int8 codes with a scale for each row.
            by_row = packing.by_row or packing.dtype == torch.int8
            kept[name] = replace(packing, by_row=by_row, scale_dtype=torch.float32)
    dtypes = {**computed_dtypes, **dict.fromkeys(kept, torch.uint8)}
    return BlockFormat(
        stored=flat_layout(((name, *form) for name, form in stored.items()), packings),
        computed=flat_layout(((name, stored[name][0], dtypes[name]) for name in stored), kept),
        scaled=frozenset(scaled),
        dtype=next((computed_dtypes[name] for name in kept), None),
    )


def tensor_views(flat: torch.Tensor, layout: FlatLayout) -> dict[str, torch.Tensor]:
    """Return the tensors in `layout` as views of `flat`, on any device.

    `flat` is 1-D uint8 with at least `layout.nbytes`. A packed tensor's view has its `view_shape`.
    """
    assert flat.dtype == torch.uint8, f"a flat tensor must be uint8, not {flat.dtype}"
    assert flat.dim() == 1, f"a flat tensor must have one dimension, not {flat.dim()}"
    assert flat.numel() >= layout.nbytes, (
        f"the layout needs {layout.nbytes} bytes, the tensor has {flat.numel()}"
    )
    return {tensor.name: tensor.view(flat) for tensor in layout.tensors}


def copy_together(
    tensors: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Copy small CPU tensors to `device` in one transfer. Returns views of one flat tensor there.

    A blocking copy costs about as much for a bias as for a megabyte, and a Wan2.2 A14B expert has
    685 small tensors.
    """
    layout = flat_layout(
        (name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
    )
    flat = allocate_flat(layout.nbytes, "cpu")
    for name, view in tensor_views(flat, layout).items():
        view.copy_(tensors[name])
    return tensor_views(flat.to(device), layout)


def allocate_flat(nbytes: int, device: torch.device | str) -> torch.Tensor:
    """Return `nbytes` of uninitialised memory as 1-D uint8, aligned to `ALIGNMENT`."""
    device = torch.device(device)
    # Callers may be in inference mode, which is thread-local. Neither the fetch thread nor a later
    # run outside inference mode could write an inference tensor.
    with torch.inference_mode(False):
        if device.type != "cpu":  # aligned enough, and 255 extra bytes could cost 2 MB
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        memory = torch.empty(nbytes + ALIGNMENT - 1, dtype=torch.uint8)  # aligned to 64 bytes only
        start = -memory.data_ptr() % ALIGNMENT
        return memory[start : start + nbytes]


def piece_name(parameter: str, piece: str) -> str:
    """Return the name of a tensor that is joined into a parameter when its block is bound."""
    return f"{parameter}{PIECE}{piece}"


def pieces_by_parameter(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the piece names for each parameter, by piece.

    A parameter that is stored whole has no pieces.
    """
    parameters: dict[str, dict[str, str]] = {}
    for name in names:
        parameter, separator, piece = name.partition(PIECE)
        pieces = parameters.setdefault(parameter, {})
        if separator:
            pieces[piece] = name
    return parameters


def streamed_names(block: nn.Module) -> tuple[str, ...]:
    """Return the streamed parameters' names in `named_parameters` order: all `nn.Linear` weights.

    These are 99.965 % of the bytes in a Wan2.2 A14B block. Biases and norms are always resident.
    """
    linears = (name for name, module in block.named_modules() if isinstance(module, nn.Linear))
    return tuple(f"{name}.weight".lstrip(".") for name in linears)
