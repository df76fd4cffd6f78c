"""What is added to blocks when they arrive (LoRA): kept in host memory, one flat piece for each block.

The stored bytes of a block never change. Its factors are added to the decoded matrices in the buffer, so that another
strength needs no file, and a block without a patch costs nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

import torch

from ..plan import BlockKey
from .formats.layout import BlockFormat, FlatLayout, FlatTensor, flat_layout, tensor_views
from .host_memory.page_lock import LockedBlocks, PageLock
from .host_memory.pages import in_pages, map_memory


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightPatch:
    """What is added to one arrived matrix [rows, columns]: `up @ down`, and `full`.

    CPU tensors of a floating dtype, with the strength already in `up` and `full`. They are copied when they are set,
    rounded to the dtype that the matrix is computed in.
    """

    up: torch.Tensor | None = None
    """[rows, rank]; together with `down`."""
    down: torch.Tensor | None = None
    """[rank, columns]"""
    full: torch.Tensor | None = None
    """[rows, columns]"""


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockPatch:
    """The patches of one block, by streamed parameter name within the block, e.g. "attn1.to_q.weight".

    Equal identities mean equal patches of that block: of a patch that is set already, `weights` is not looked at.
    """

    identity: Hashable
    weights: Mapping[str, WeightPatch]


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedPatch:
    """The factors of one block in the dtype of their matrices; `memory` is 1-D uint8 of `layout.nbytes`."""

    identity: Hashable
    names: tuple[str, ...]
    layout: FlatLayout
    memory: torch.Tensor

    def add_to(self, block: torch.Tensor, computed: FlatLayout, factors: torch.Tensor | None = None) -> None:
        """Add to a decoded block in place, each matrix by one `addmm`: summed in fp32, rounded once.

        A `full` is added before, and rounded by itself.

        Args:
            block: 1-D uint8 that holds the block as `computed` says; ordered by the current stream of its device.
            factors: a copy of `memory` on the device of `block`; None where that is the CPU.
        """
        matrices = tensor_views(block, computed)
        parts = tensor_views(self.memory if factors is None else factors, self.layout)
        for name in self.names:
            matrix = matrices[name]
            if (full := parts.get(_part(name, "full"))) is not None:
                matrix.add_(full)
            if (up := parts.get(_part(name, "up"))) is not None:
                matrix.addmm_(up, parts[_part(name, "down")])


class StagedPatches:
    """The patches of all blocks of one engine.

    Args:
        formats: of every block there is.
        lock: locks the pages of the factors, so that the device copies out of them by itself; None for a CPU.
    """

    def __init__(self, formats: Mapping[BlockKey, BlockFormat], *, lock: PageLock | None = None) -> None:
        self._formats = formats
        self._locked = LockedBlocks(lock) if lock is not None else None
        self._staged: Mapping[BlockKey, StagedPatch] = {}

    @property
    def locked_bytes(self) -> int:
        """Bytes of page-locked host memory."""
        return 0 if self._locked is None else self._locked.nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the factors take, locked or not."""
        return sum(in_pages(staged.layout.nbytes) for staged in self._staged.values())

    @property
    def largest_bytes(self) -> int:
        """Bytes of the factors of the block that has most of them."""
        return max((staged.layout.nbytes for staged in self._staged.values()), default=0)

    def get(self, key: BlockKey) -> StagedPatch | None:
        return self._staged.get(key)

    def nbytes(self, key: BlockKey) -> int:
        """Bytes of the factors that arrive together with a block."""
        staged = self._staged.get(key)
        return 0 if staged is None else staged.layout.nbytes

    def prepare(self, patches: Mapping[BlockKey, BlockPatch]) -> dict[BlockKey, StagedPatch]:
        """Copy `patches` for `replace`; of blocks whose identity stays, what is staged already. Nothing is changed.

        Raises:
            ValueError: a patch of a block or weight that does not stream, or of another shape.
            OSError: the system does not give that much memory.
        """
        prepared: dict[BlockKey, StagedPatch] = {}
        for key, patch in patches.items():
            staged = self._staged.get(key)
            if staged is not None and staged.identity == patch.identity:
                prepared[key] = staged
            elif patch.weights:
                prepared[key] = _stage(key, patch, self._formats)
        return prepared

    def changed(self, prepared: Mapping[BlockKey, StagedPatch]) -> frozenset[BlockKey]:
        """The blocks that arrive with other bytes after `replace(prepared)`."""
        keys = self._staged.keys() | prepared.keys()
        return frozenset(key for key in keys if self._staged.get(key) is not prepared.get(key))

    def replace(self, prepared: Mapping[BlockKey, StagedPatch]) -> None:
        """Let go of all patches that are not in `prepared`. No copy out of one may be under way."""
        if self._locked is not None:
            changed = self.changed(prepared)
            for key in changed & self._staged.keys():
                self._locked.remove(self._staged[key].memory)
            for key in changed & prepared.keys():
                self._locked.add(prepared[key].memory)
        self._staged = prepared


def _stage(key: BlockKey, patch: BlockPatch, formats: Mapping[BlockKey, BlockFormat]) -> StagedPatch:
    """Copy the factors of one block into one flat piece of memory."""
    label = f"the patch of block {key.block} of {key.expert!r}"
    if key not in formats:
        raise ValueError(f"{label}: there is no such block, only {_blocks_of(key.expert, formats)}")
    matrices = {tensor.name: tensor for tensor in formats[key].computed.tensors}
    factors: list[tuple[str, torch.Tensor, torch.dtype]] = []
    for name, weight in patch.weights.items():
        if name not in matrices:
            raise ValueError(f"{label}: no {name} is streamed, only {', '.join(matrices)} can be patched")
        _check(f"{label}, {name}", weight, matrices[name])
        factors += ((_part(name, part), factor, matrices[name].dtype) for part, factor in _parts_of(weight))
    layout = flat_layout((part, tuple(factor.shape), dtype) for part, factor, dtype in factors)
    try:
        memory = map_memory(layout.nbytes)[: layout.nbytes]
    except OSError as err:
        raise OSError(
            f"{label}: {layout.nbytes / 1e6:.1f} MB of RAM are refused ({err.strerror}): use fewer LoRAs"
        ) from err
    views = tensor_views(memory, layout)
    for part, factor, _ in factors:
        views[part].copy_(factor.detach())
    return StagedPatch(identity=patch.identity, names=tuple(patch.weights), layout=layout, memory=memory)


def _parts_of(weight: WeightPatch) -> Iterator[tuple[str, torch.Tensor]]:
    for part in ("up", "down", "full"):
        factor: torch.Tensor | None = getattr(weight, part)
        if factor is not None:
            yield part, factor


def _check(label: str, weight: WeightPatch, matrix: FlatTensor) -> None:
    """Raise ValueError unless `weight` can be added to `matrix`."""
    parts = dict(_parts_of(weight))
    if not parts or ("up" in parts) != ("down" in parts):
        raise ValueError(f"{label}: has {', '.join(parts) or 'nothing'}; give up and down, or full, or all three")
    for part, factor in parts.items():
        if factor.device.type != "cpu" or not factor.is_floating_point():
            raise ValueError(f"{label}: {part} is {factor.dtype} on {factor.device}, it must be floating on the CPU")
    rows, columns = matrix.shape
    rank = parts["up"].shape[-1] if "up" in parts and parts["up"].ndim else 0
    if "up" in parts and not rank:
        raise ValueError(f"{label}: up is {list(parts['up'].shape)}; [{rows}, rank] is expected, of a rank above 0")
    wanted = {"up": (rows, rank), "down": (rank, columns), "full": (rows, columns)}
    for part, factor in parts.items():
        if tuple(factor.shape) != wanted[part]:
            raise ValueError(
                f"{label}: {part} is {list(factor.shape)}, but {list(wanted[part])} fits the matrix "
                f"[{rows}, {columns}]: is it made for another model?"
            )


def _part(name: str, part: str) -> str:
    return f"{name} {part}"


def _blocks_of(expert: str, formats: Mapping[BlockKey, BlockFormat]) -> str:
    count = sum(key.expert == expert for key in formats)
    if count:
        return f"blocks 0 to {count - 1}"
    return f"those of {', '.join(sorted({repr(key.expert) for key in formats}))}"
