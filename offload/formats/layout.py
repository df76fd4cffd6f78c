"""Where the matrices of one block lie in one flat piece of memory.

Owns the layout (names, shapes, dtypes, offsets), the memory that can hold it, and the rule that says which
parameters of a block stream. A block that is one flat piece is one copy over the bus instead of ten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from .gguf_dequant import QuantFormat, stored_bytes

# Every view starts at a multiple of this: CPU and CUDA kernels pick their path by alignment, so equal alignment is what
# makes streamed results equal bit for bit to those of an ordinary model.
ALIGNMENT = 256

NO_QUANT_FORMATS: Mapping[str, QuantFormat] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class FlatTensor:
    """One tensor inside a flat piece of memory; `offset` and `nbytes` in bytes.

    `shape` is that of the values; `dtype` is uint8 where they are packed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int
    packing: QuantFormat | None = None

    @property
    def view_shape(self) -> tuple[int, ...]:
        """The shape of the tensor's bytes as a tensor of `dtype`: [packs, bytes] where values are packed."""
        return self.shape if self.packing is None else (self.nbytes // self.packing.nbytes, self.packing.nbytes)


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """Tensors in the order they lie in memory; offsets and `nbytes` are multiples of `ALIGNMENT`.

    The bytes between two tensors belong to nobody and hold anything.
    """

    tensors: tuple[FlatTensor, ...]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """One block twice: as its source stores it and as the model computes with it.

    Both layouts name the same tensors with the same shapes in the same order. `scaled` names the tensors whose stored
    values count only together with a scale (fp8). A tensor is packed, scaled, or neither.
    """

    stored: FlatLayout
    computed: FlatLayout
    scaled: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        stored = [(tensor.name, tensor.shape) for tensor in self.stored.tensors]
        computed = [(tensor.name, tensor.shape) for tensor in self.computed.tensors]
        assert stored == computed, f"layouts differ: {stored} and {computed}"
        plain = {tensor.name for tensor in self.stored.tensors if tensor.packing is None}
        assert self.scaled <= plain, f"scales without a tensor, or of a packed one: {sorted(self.scaled - plain)}"

    @property
    def is_raw(self) -> bool:
        """Whether the stored bytes are the computed bytes, so that nothing has to be decoded."""
        return self.stored == self.computed and not self.scaled


def flat_layout(
    tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]], packings: Mapping[str, QuantFormat] = NO_QUANT_FORMATS
) -> FlatLayout:
    """Lay out (name, shape, dtype) one behind the other, in the given order; those in `packings` by name are packed."""
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
    scaled: Iterable[str] = (),
    packings: Mapping[str, QuantFormat] = NO_QUANT_FORMATS,
) -> BlockFormat:
    """Return the format of a block from the (shape, dtype) that its source stores under each parameter name.

    `computed_dtypes` is one dtype for all or a dtype for each name; `packings` names how packed tensors are packed.
    """

    def computed_dtype(name: str) -> torch.dtype:
        return computed_dtypes if isinstance(computed_dtypes, torch.dtype) else computed_dtypes[name]

    return BlockFormat(
        stored=flat_layout(((name, shape, dtype) for name, (shape, dtype) in stored.items()), packings),
        computed=flat_layout((name, shape, computed_dtype(name)) for name, (shape, _) in stored.items()),
        scaled=frozenset(scaled),
    )


def tensor_views(flat: torch.Tensor, layout: FlatLayout) -> dict[str, torch.Tensor]:
    """Return the tensors of `layout` as views of `flat`, 1-D uint8 of at least `layout.nbytes`, on any device.

    A packed tensor is its packs, uint8 [packs, bytes].
    """
    assert flat.dtype == torch.uint8, f"flat memory is bytes, not {flat.dtype}"
    assert flat.dim() == 1, f"flat memory has one dimension, not {flat.dim()}"
    assert flat.numel() >= layout.nbytes, f"{flat.numel()} bytes cannot hold {layout.nbytes}"
    return {
        tensor.name: flat[tensor.offset : tensor.offset + tensor.nbytes].view(tensor.dtype).view(tensor.view_shape)
        for tensor in layout.tensors
    }


def host_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the bytes of a contiguous CPU tensor as an array that shares its memory.

    Fetch threads read and copy through it: torch would start a pool of threads for a copy, next to the one that
    computes.
    """
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def allocate_flat(nbytes: int, device: torch.device | str) -> torch.Tensor:
    """Return `nbytes` of uninitialised memory as 1-D uint8 whose address is a multiple of `ALIGNMENT`."""
    device = torch.device(device)
    # CUDA memory is always aligned, and 255 bytes more could cost another 2 MB there. CPU memory is aligned to 64 only.
    slack = ALIGNMENT - 1 if device.type == "cpu" else 0
    # A tensor made in inference mode may not be written by a thread outside it, and the mode is thread-local.
    with torch.inference_mode(False):
        memory = torch.empty(nbytes + slack, dtype=torch.uint8, device=device)
        start = -memory.data_ptr() % ALIGNMENT
        return memory[start : start + nbytes]


def streamed_names(block: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters that stream, in `named_parameters` order: the weight of every `nn.Linear`.

    They are nearly all of a block (99.965 % of Wan2.2 A14B's); biases and norms stay resident.
    """
    return tuple(
        f"{name}.weight" if name else "weight"
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
