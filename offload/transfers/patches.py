"""Patches (LoRA) added to blocks on arrival.

The factors are in host memory, one flat tensor per block.

`WeightPatch` factors are added to the decoded matrices in the buffer, so a new strength does not
read the file again, and an unpatched block costs nothing. A `ComputedPatch` costs more than a sum,
so it also changes the bytes in the block's RAM slot, once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import torch

from ...plan.programs import BlockKey
from ..core.pages import LockedBlocks, PageLock, in_pages, map_memory
from ..formats.layout import (
    BlockFormat,
    FlatLayout,
    FlatTensor,
    flat_layout,
    pieces_by_parameter,
    tensor_views,
)
from .weight_patch import MAGNITUDE, ComputedPatch, Product, WeightPatch, add_patch


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockPatch:
    """Patches for one block, by parameter name within the block, e.g. "attn1.to_q.weight".

    Equal identities mean equal patches: `weights` is not read if the block has this identity
    already.
    """

    identity: Hashable
    weights: Mapping[str, WeightPatch | ComputedPatch]


class SlotPatch:
    """Patch contained in the bytes of a RAM slot.

    Attributes:
        patch: the patch. None for the source's bytes.
        is_partial: True if a write was cut off, which makes the bytes useless.
    """

    def __init__(self) -> None:
        self.patch: StagedPatch | None = None
        self.is_partial = False

    @contextmanager
    def writing(self, patch: StagedPatch) -> Iterator[None]:
        """Write the patched block over the source's bytes, or issue the copy."""
        assert self.patch is None, "the slot has a patch already"
        # There is no `finally`: after an error the bytes must remain marked as useless.
        self.is_partial = True
        yield
        self.is_partial = False
        self.patch = patch


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedPatch:
    """Factors for one block.

    They are in their matrices' compute dtype, or as in a `ComputedPatch`.

    `memory` is 1-D uint8 with `layout.nbytes`.
    """

    identity: Hashable
    weights: Mapping[str, WeightPatch | ComputedPatch]
    """Patches by matrix name, with empty tensors in place of tensors in `memory`."""
    layout: FlatLayout
    memory: torch.Tensor
    tail: int | None = None
    """Buffer offset, behind the block, of factors for matrices that stay codes and get no addition.
    None without such."""

    made: dict[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    """Parameter pieces outside the buffer, on the device, from the first `add_to` on."""

    @property
    def is_computed(self) -> bool:
        """True if the patched bytes may replace the stored ones in a RAM slot."""
        return all(isinstance(weight, ComputedPatch) for weight in self.weights.values())

    def add_to(
        self, block: torch.Tensor, computed: FlatLayout, factors: torch.Tensor | None = None
    ) -> None:
        """Add to a decoded block in place, as `add_patch`.

        Some matrices stay codes: rounding the sum to codes again would lose changes smaller than
        half a code, all of a LoRA with 0.3 % of the weight norm. Their factors are copied behind
        the block instead, and the layers add `(x @ down.T) @ up.T` to their result.

        Args:
            block: 1-D uint8 with the block in the layout `computed`, ordered by the device's
                current stream.
            computed: layout of `block`.
            factors: copy of `memory` on the device of `block`. None on the CPU.
        """
        matrices = tensor_views(block, computed)
        if factors is None:
            factors = self.memory
        parts = tensor_views(factors, self.layout)
        if self.tail is not None:
            block[self.tail : self.tail + self.layout.nbytes].copy_(factors[: self.layout.nbytes])
        codes = {tensor.name for tensor in computed.tensors if tensor.packing is not None}
        pieces = pieces_by_parameter(matrices)
        for name, weight in self.weights.items():
            views = partial(_view, parts, name)
            if isinstance(weight, ComputedPatch):
                stored = {piece: matrices[at] for piece, at in (pieces[name] or {"": name}).items()}
                made = weight.compute(stored, weight.map(views).parts)
                # The first ones stay: a visit may still read them.
                self.made.setdefault(name, made)
            elif name not in codes:
                add_patch(matrices[name], weight.map(views))

    def factors_in(self, buffer: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return views of `up` and `down` in a buffer by matrix name.

        Empty if no matrix stays codes.
        """
        if self.tail is None:
            return {}
        parts = tensor_views(buffer[self.tail :], self.layout)
        return {
            name: (parts[_part(name, "up")], parts[_part(name, "down")])
            for name in self.weights
            if _part(name, "up") in parts
        }


class StagedPatches:
    """Patches for all blocks in one engine.

    Args:
        formats: block formats.
        lock: page-locks the factors for asynchronous copies to the device. None for a CPU.

    Attributes:
        locked: page-locked factors.
    """

    def __init__(
        self, formats: Mapping[BlockKey, BlockFormat], *, lock: PageLock | None = None
    ) -> None:
        self._formats = formats
        self.locked = LockedBlocks(lock)
        self._staged: Mapping[BlockKey, StagedPatch] = {}

    @property
    def tail_bytes(self) -> int:
        """Bytes behind a block in its buffer, for the largest patch to matrices that stay codes."""
        staged = (each for each in self._staged.values() if each.tail is not None)
        return max((each.layout.nbytes for each in staged), default=0)

    @property
    def host_bytes(self) -> int:
        """Host memory for all factors in bytes, page-locked or not."""
        return sum(in_pages(staged.layout.nbytes) for staged in _distinct(self._staged))

    @property
    def largest_bytes(self) -> int:
        """Largest block patch in bytes."""
        return max((staged.layout.nbytes for staged in self._staged.values()), default=0)

    def get(self, key: BlockKey) -> StagedPatch | None:
        return self._staged.get(key)

    def nbytes(self, key: BlockKey) -> int:
        """Return a block's factor bytes. 0 without a patch."""
        if key not in self._staged:
            return 0
        return self._staged[key].layout.nbytes

    def prepare(self, patches: Mapping[BlockKey, BlockPatch]) -> dict[BlockKey, StagedPatch]:
        """Copy `patches` for `replace`.

        Patches for one block with the same identity share their factors. Changes nothing.

        Raises:
            ValueError: a patch names a block or weight that does not stream, or has another shape.
            OSError: there is not enough memory.
        """
        known = {(key.stored, staged.identity): staged for key, staged in self._staged.items()}
        prepared: dict[BlockKey, StagedPatch] = {}
        for key, patch in patches.items():
            staged = known.get((key.stored, patch.identity))
            if staged is None and patch.weights:
                staged = _stage(key, patch, self._formats)
                known[key.stored, patch.identity] = staged
            if staged is not None:
                prepared[key] = staged
        return prepared

    def changed(self, prepared: Mapping[BlockKey, StagedPatch]) -> frozenset[BlockKey]:
        """Return the blocks with another patch after `replace(prepared)`."""
        keys = self._staged.keys() | prepared.keys()
        return frozenset(key for key in keys if self._staged.get(key) is not prepared.get(key))

    def replace(self, prepared: Mapping[BlockKey, StagedPatch]) -> None:
        """Install `prepared` and release all other patches.

        No copy out of a patch may be pending.
        """
        before = _distinct(self._staged)
        after = _distinct(prepared)
        for staged in before:
            if staged not in after:
                # Old patches go first: unlocking makes room, and permits attempts after a refusal.
                self.locked.remove(staged.memory)
        for staged in after:
            if staged not in before:
                self.locked.add(staged.memory)
        self._staged = prepared


def _distinct(patches: Mapping[BlockKey, StagedPatch]) -> Mapping[StagedPatch, None]:
    """Return the patches in order, each once, because several keys may share one."""
    return dict.fromkeys(patches.values())


def _stage(
    key: BlockKey, patch: BlockPatch, formats: Mapping[BlockKey, BlockFormat]
) -> StagedPatch:
    """Copy one block's factors into one flat tensor."""
    label = f"the patch of block {key.block} of {key.expert!r}"
    fmt = formats.get(key.stored)
    if fmt is None:
        raise ValueError(f"{label}: no such block, only {_available_blocks(key.expert, formats)}")
    matrices = {tensor.name: tensor for tensor in fmt.computed.tensors}
    parameters = pieces_by_parameter(matrices)
    factors: list[tuple[str, torch.Tensor, torch.dtype]] = []
    weights = dict(patch.weights.items())  # read once: a look-up may fold factors
    for name, weight in weights.items():
        if name not in parameters:
            raise ValueError(
                f"{label}: {name} is not streamed; only {', '.join(parameters)} can be patched"
            )
        if isinstance(weight, ComputedPatch):
            if key.patch:
                raise ValueError(f"{label}: {name} is computed, so the block has no other patch")
            for part, factor in weight.parts.items():
                factors.append((_part(name, part), factor, factor.dtype))
            continue
        _check(f"{label}, {name}", weight, matrices[name])
        dtype = fmt.patch_dtype(matrices[name])
        for part, factor in weight.parts.items():
            # In 16 bits, a magnitude would change whole rows by up to 0.4 %.
            kept = torch.float32 if part.endswith(MAGNITUDE) else dtype
            factors.append((_part(name, part), factor, kept))
    layout = flat_layout((part, tuple(factor.shape), dtype) for part, factor, dtype in factors)
    try:
        memory = map_memory(layout.nbytes)
    except OSError as err:
        raise OSError(
            f"{label}: {layout.nbytes / 1e6:.1f} MB of RAM cannot be allocated ({err.strerror}): "
            "use fewer LoRAs"
        ) from err
    views = tensor_views(memory, layout)
    for part, factor, _ in factors:
        views[part].copy_(factor.detach())
    beside = any(name in matrices and matrices[name].packing is not None for name in weights)
    empty = torch.empty(0)
    return StagedPatch(
        identity=patch.identity,
        weights={name: weight.map(lambda *_: empty) for name, weight in weights.items()},
        layout=layout,
        memory=memory,
        tail=fmt.computed.nbytes if beside else None,
    )


def _check(label: str, weight: WeightPatch, matrix: FlatTensor) -> None:
    """Raise ValueError unless `weight` can be added to `matrix`."""
    if matrix.packing is not None and not weight.is_product:
        raise ValueError(
            f"{label}: it is multiplied as it is stored, which takes LoRAs of two factors only: "
            'open the model with arithmetic "decoded", or leave this LoRA out'
        )
    parts = weight.parts
    if not parts or (weight.up is None) != (weight.down is None):
        raise ValueError(
            f"{label}: has {', '.join(parts) or 'nothing'}; give up and down, or another change, "
            "or all"
        )
    for part, factor in parts.items():
        if factor.device.type != "cpu" or not factor.is_floating_point():
            raise ValueError(
                f"{label}: {part} is {factor.dtype} on {factor.device}; it must be a floating "
                "dtype on the CPU"
            )
        if factor.dim() != 2 or 0 in factor.shape:
            raise ValueError(
                f"{label}: {part} is {list(factor.shape)}; a matrix with a rank above 0 is expected"
            )
    _check_shapes(label, weight, (matrix.shape[0], matrix.shape[1]))


def _check_shapes(label: str, weight: WeightPatch, shape: tuple[int, int]) -> None:
    for name, product in weight.products.items():
        _check_product(f"{label}: {name}", product, shape)
    if weight.full is not None and tuple(weight.full.shape) != shape:
        _refuse(f"{label}: full is {list(weight.full.shape)}", shape)
    for each in weight.kronecker:
        second = each.second_shape
        if isinstance(each.second, Product):
            _check_product(f"{label}: second", each.second, second)
        if (each.first.shape[0] * second[0], each.first.shape[1] * second[1]) != shape:
            found = f"the Kronecker product of {list(each.first.shape)} and {list(second)}"
            _refuse(f"{label}: {found}", shape)
    for rescaled in weight.rescaled:
        if tuple(rescaled.magnitude.shape) not in {(shape[0], 1), (1, shape[1])}:
            _refuse(f"{label}: {MAGNITUDE} is {list(rescaled.magnitude.shape)}", shape)
        _check_shapes(label, rescaled.change, shape)


def _check_product(label: str, product: Product, shape: tuple[int, int]) -> None:
    rank = product.up.shape[1]
    parts = {"up": (product.up, (shape[0], rank)), "down": (product.down, (rank, shape[1]))}
    for part, (factor, wanted) in parts.items():
        if tuple(factor.shape) != wanted:
            _refuse(f"{label}{part} is {list(factor.shape)}, which should be {list(wanted)}", shape)


def _refuse(found: str, shape: tuple[int, int]) -> NoReturn:
    raise ValueError(f"{found}; the matrix is {list(shape)}: was it made for another model?")


def _view(
    views: Mapping[str, torch.Tensor], name: str, part: str, _staged: torch.Tensor
) -> torch.Tensor:
    """Return the view of one part in the patch to the matrix `name`."""
    return views[_part(name, part)]


def _part(name: str, part: str) -> str:
    return f"{name} {part}"


def _available_blocks(expert: str, formats: Mapping[BlockKey, BlockFormat]) -> str:
    count = sum(key.expert == expert for key in formats)
    if count:
        return f"blocks 0 to {count - 1}"
    return f"those of {', '.join(sorted({repr(key.expert) for key in formats}))}"
