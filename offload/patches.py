"""Patches (LoRA) that are added to blocks on arrival; their factors are kept in host memory, one flat tensor per block.

The stored bytes of a block never change. Its factors are added to the decoded matrices in the buffer, so that a new
strength does not read the file again, and a block without a patch costs nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

import torch

from ..plan import BlockKey
from .formats.layout import BlockFormat, FlatLayout, FlatTensor, flat_layout, tensor_views
from .host_memory.pages import LockedBlocks, PageLock, in_pages, map_memory


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightPatch:
    """Change of one matrix [rows, columns]: adds `up @ down`, `full`, or both.

    CPU tensors of a floating dtype, with the strength already in `up` and `full`. `set_patches` copies them, rounded to
    the compute dtype of the matrix.
    """

    up: torch.Tensor | None = None
    """[rows, rank]; requires `down`."""
    down: torch.Tensor | None = None
    """[rank, columns]"""
    full: torch.Tensor | None = None
    """[rows, columns]"""


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockPatch:
    """Patches of one block, by the name of the streamed parameter within the block, e.g. "attn1.to_q.weight".

    Equal identities mean equal patches of that block: `weights` is not read if the block has this identity already.
    """

    identity: Hashable
    weights: Mapping[str, WeightPatch]


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedPatch:
    """Factors of one block in the compute dtype of their matrices; `memory` is 1-D uint8 of `layout.nbytes`."""

    identity: Hashable
    names: tuple[str, ...]
    layout: FlatLayout
    memory: torch.Tensor
    tail: int | None = None
    """First byte in a buffer of the factors of matrices that stay codes and get no addition; None without such."""

    def add_to(self, block: torch.Tensor, computed: FlatLayout, factors: torch.Tensor | None = None) -> None:
        """Add to a decoded block in place, one `addmm` per matrix, which sums in fp32 and rounds once.

        A `full` is added before, and rounded separately. Some matrices stay codes: rounding the sum to codes again
        would lose changes that are smaller than half a code, all of a LoRA with 0.3 % of the norm of the weight.
        Factors of these are copied behind the block instead, and its layers add `(x @ down.T) @ up.T` to their result.

        Args:
            block: 1-D uint8 with the block in the layout `computed`; ordered by the current stream of its device.
            computed: layout of `block`.
            factors: a copy of `memory` on the device of `block`; None if that device is the CPU.
        """
        matrices = tensor_views(block, computed)
        given = self.memory if factors is None else factors
        parts = tensor_views(given, self.layout)
        if self.tail is not None:
            block[self.tail : self.tail + self.layout.nbytes].copy_(given[: self.layout.nbytes])
        codes = {tensor.name for tensor in computed.tensors if tensor.packing is not None}
        for name in self.names:
            if name in codes:
                continue
            matrix = matrices[name]
            if (full := parts.get(_part(name, "full"))) is not None:
                matrix.add_(full)
            if (up := parts.get(_part(name, "up"))) is not None:
                matrix.addmm_(up, parts[_part(name, "down")])

    def factors_in(self, buffer: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return views of `up` and `down` in a buffer by the name of the matrix; empty if no matrix stays codes."""
        if self.tail is None:
            return {}
        parts = tensor_views(buffer[self.tail :], self.layout)
        return {
            name: (parts[_part(name, "up")], parts[_part(name, "down")])
            for name in self.names
            if _part(name, "up") in parts
        }


class StagedPatches:
    """Patches of all blocks of one engine.

    Args:
        formats: formats of all blocks.
        lock: page-locks the factors for asynchronous copies to the device; None for a CPU.
    """

    def __init__(self, formats: Mapping[BlockKey, BlockFormat], *, lock: PageLock | None = None) -> None:
        self._formats = formats
        self._locked = LockedBlocks(lock) if lock is not None else None
        self._staged: Mapping[BlockKey, StagedPatch] = {}
        self.tail = max((fmt.computed.nbytes for fmt in formats.values()), default=0)
        """First byte of factors in a buffer, behind the largest block; to be set before patches are prepared."""

    @property
    def tail_bytes(self) -> int:
        """Bytes of a buffer for factors: those of the largest patch of a block with matrices that stay codes."""
        return max((staged.layout.nbytes for staged in self._staged.values() if staged.tail is not None), default=0)

    @property
    def locked_bytes(self) -> int:
        """Bytes of page-locked host memory."""
        return 0 if self._locked is None else self._locked.nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory of all factors, page-locked or not."""
        return sum(in_pages(staged.layout.nbytes) for staged in _distinct(self._staged))

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest patch of a block."""
        return max((staged.layout.nbytes for staged in self._staged.values()), default=0)

    def get(self, key: BlockKey) -> StagedPatch | None:
        return self._staged.get(key)

    def nbytes(self, key: BlockKey) -> int:
        """Return the bytes of the factors of a block; 0 without a patch."""
        staged = self._staged.get(key)
        return 0 if staged is None else staged.layout.nbytes

    def prepare(self, patches: Mapping[BlockKey, BlockPatch]) -> dict[BlockKey, StagedPatch]:
        """Copy `patches` for `replace`; patches of a block with the same identity share their factors. Changes nothing.

        Raises:
            ValueError: a patch names a block or weight that does not stream, or has another shape.
            OSError: there is not enough memory.
        """
        known = {(key.stored, staged.identity): staged for key, staged in self._staged.items()}
        prepared: dict[BlockKey, StagedPatch] = {}
        for key, patch in patches.items():
            staged = known.get((key.stored, patch.identity))
            if staged is None and patch.weights:
                staged = known[key.stored, patch.identity] = _stage(key, patch, self._formats, tail=self.tail)
            if staged is not None:
                prepared[key] = staged
        return prepared

    def changed(self, prepared: Mapping[BlockKey, StagedPatch]) -> frozenset[BlockKey]:
        """Return the blocks whose patch differs after `replace(prepared)`."""
        keys = self._staged.keys() | prepared.keys()
        return frozenset(key for key in keys if self._staged.get(key) is not prepared.get(key))

    def replace(self, prepared: Mapping[BlockKey, StagedPatch]) -> None:
        """Install `prepared` and release all other patches. No copy out of a patch may be pending."""
        if self._locked is not None:
            before, after = _distinct(self._staged), _distinct(prepared)
            for staged in before:
                if staged not in after:
                    self._locked.remove(staged.memory)
            for staged in after:
                if staged not in before:
                    self._locked.add(staged.memory)
        self._staged = prepared


def _distinct(patches: Mapping[BlockKey, StagedPatch]) -> Mapping[StagedPatch, None]:
    """Return the patches in their order, each once: several keys may share one."""
    return dict.fromkeys(patches.values())


def _stage(key: BlockKey, patch: BlockPatch, formats: Mapping[BlockKey, BlockFormat], *, tail: int) -> StagedPatch:
    """Copy the factors of one block into one flat tensor."""
    label = f"the patch of block {key.block} of {key.expert!r}"
    fmt = formats.get(key.stored)
    if fmt is None:
        raise ValueError(f"{label}: no such block, only {_available_blocks(key.expert, formats)}")
    matrices = {tensor.name: tensor for tensor in fmt.computed.tensors}
    factors: list[tuple[str, torch.Tensor, torch.dtype]] = []
    for name, weight in patch.weights.items():
        if name not in matrices:
            raise ValueError(f"{label}: {name} is not streamed; only {', '.join(matrices)} can be patched")
        _check(f"{label}, {name}", weight, matrices[name])
        dtype = fmt.patch_dtype(matrices[name])
        factors += ((_part(name, part), factor, dtype) for part, factor in _parts_of(weight))
    layout = flat_layout((part, tuple(factor.shape), dtype) for part, factor, dtype in factors)
    try:
        memory = map_memory(layout.nbytes)[: layout.nbytes]
    except OSError as err:
        raise OSError(
            f"{label}: {layout.nbytes / 1e6:.1f} MB of RAM cannot be allocated ({err.strerror}): use fewer LoRAs"
        ) from err
    views = tensor_views(memory, layout)
    for part, factor, _ in factors:
        views[part].copy_(factor.detach())
    beside = any(matrices[name].packing is not None for name in patch.weights)
    return StagedPatch(
        identity=patch.identity,
        names=tuple(patch.weights),
        layout=layout,
        memory=memory,
        tail=tail if beside else None,
    )


def _parts_of(weight: WeightPatch) -> Iterator[tuple[str, torch.Tensor]]:
    for part in ("up", "down", "full"):
        factor: torch.Tensor | None = getattr(weight, part)
        if factor is not None:
            yield part, factor


def _check(label: str, weight: WeightPatch, matrix: FlatTensor) -> None:
    """Raise ValueError unless `weight` can be added to `matrix`."""
    if matrix.packing is not None and weight.full is not None:
        raise ValueError(
            f"{label}: it is multiplied as it is stored, which takes LoRAs of two factors only: open the model with "
            'arithmetic "decoded", or leave this LoRA out'
        )
    parts = dict(_parts_of(weight))
    if not parts or ("up" in parts) != ("down" in parts):
        raise ValueError(f"{label}: has {', '.join(parts) or 'nothing'}; give up and down, or full, or all three")
    for part, factor in parts.items():
        if factor.device.type != "cpu" or not factor.is_floating_point():
            raise ValueError(
                f"{label}: {part} is {factor.dtype} on {factor.device}; it must be a floating dtype on the CPU"
            )
    rows, columns = matrix.shape
    rank = parts["up"].shape[-1] if "up" in parts and parts["up"].ndim else 0
    if "up" in parts and not rank:
        raise ValueError(f"{label}: up is {list(parts['up'].shape)}; expected [{rows}, rank] with a rank above 0")
    wanted = {"up": (rows, rank), "down": (rank, columns), "full": (rows, columns)}
    for part, factor in parts.items():
        if tuple(factor.shape) != wanted[part]:
            raise ValueError(
                f"{label}: {part} is {list(factor.shape)}, but the matrix [{rows}, {columns}] needs "
                f"{list(wanted[part])}: was it made for another model?"
            )


def _part(name: str, part: str) -> str:
    return f"{name} {part}"


def _available_blocks(expert: str, formats: Mapping[BlockKey, BlockFormat]) -> str:
    count = sum(key.expert == expert for key in formats)
    if count:
        return f"blocks 0 to {count - 1}"
    return f"those of {', '.join(sorted({repr(key.expert) for key in formats}))}"
