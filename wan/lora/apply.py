"""LoRA stacks for an expert, LoRA factors in host RAM, and patches for parameters."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import nn

from ...offload import BlockPatch, Hadamard, Kronecker, Product, Rescaled, WeightPatch, write_sum
from ...offload.sources import read_tensors
from ...plan.programs import BlockKey
from ...schema import StepStrengths
from ..checkpoint.detect import WanConfig
from ..checkpoint.files import CheckpointError
from ..checkpoint.meta_model import block_streams, streamed_parameters
from .changes import Change, Factors, is_by_column
from .file import LoraFile

LoraStack: TypeAlias = "Sequence[tuple[LoraFile, float]]"
"""LoRA files for one expert with their strengths."""

Tensors = Mapping[str, torch.Tensor]


class LoraFactors:
    """Cache for LoRA tensors in host RAM. Each file is read once, at the first `load`."""

    def __init__(self) -> None:
        self._tensors: dict[Hashable, Tensors] = {}

    def load(self, lora: LoraFile) -> Tensors:
        """Return the tensors of `lora` by key, on the CPU, as stored.

        Raises:
            CheckpointError: a tensor has a value that is not finite. The message has the key.
            SourceError: the file cannot be read, or has changed since it was opened.
        """
        if lora.identity not in self._tensors:
            tensors = read_tensors(lora.tensors)
            for key, tensor in tensors.items():
                _check_finite(lora, key, tensor)
            self._tensors[lora.identity] = tensors
        return self._tensors[lora.identity]

    def keep_only(self, loras: Iterable[LoraFile]) -> None:
        """Release the tensors of all other files."""
        wanted = {lora.identity for lora in loras}
        self._tensors = {
            identity: tensors for identity, tensors in self._tensors.items() if identity in wanted
        }


def lora_host_bytes(stacks: Sequence[LoraStack], dtype: torch.dtype) -> int:
    """Return the host memory for an expert's LoRAs: stored files, stacks folded for the engine."""
    loras = [lora for stack in stacks for lora, _ in stack]
    files = {lora.identity: lora for lora in loras}.values()
    stored = sum(tensor.nbytes for lora in files for tensor in lora.tensors.values())
    folded = sum(math.prod(each.shape) for lora in loras for each in lora.tensors.values())
    return stored + folded * dtype.itemsize


def block_factor_bytes(config: WanConfig, stack: LoraStack, dtype: torch.dtype) -> int:
    """Return the size of the largest folded block factors, in bytes."""

    def values(block: int) -> int:
        names = {f"blocks.{block}.{name}" for name in block_streams(config)}
        return sum(
            math.prod(lora.tensors[key].shape)
            for lora, _ in stack
            for name in names & lora.changes.keys()
            for change in lora.changes[name]
            for key in change.keys
        )

    return max(map(values, range(config.num_layers))) * dtype.itemsize


def combine_patches(parameter: str, stack: LoraStack, factors: LoraFactors) -> WeightPatch:
    """Combine the changes by all LoRAs in `stack` to `parameter`. There must be at least one.

    Low-rank products are concatenated along their rank, with strength and scale folded into `up`.
    Differences are summed. `up` [rows, rank] and `full` (parameter shape) are fp32. `down` [rank,
    columns] is as stored, or fp32 if there are several. Every DoRA starts from the unchanged
    parameter, so the LoRA order does not matter.
    """
    added: list[tuple[Change, Tensors, float]] = []
    rescaled: list[Rescaled] = []
    for lora, strength in stack:
        for change in lora.changes.get(parameter, ()):
            tensors = factors.load(lora)
            if change.magnitude is None:
                added.append((change, tensors, change.scale * strength))
                continue
            magnitude = tensors[change.magnitude].float()
            _, columns = change.shape(lora.tensors)
            magnitude = magnitude.reshape(-1, 1)
            if is_by_column(lora.tensors[change.magnitude].shape, columns):
                magnitude = magnitude.T
            # Without the strength: it scales the difference between the matrix and the DoRA.
            alone = _summed([(change, tensors, change.scale)])
            rescaled.append(Rescaled(change=alone, magnitude=magnitude, strength=strength))
    return replace(_summed(added), rescaled=tuple(rescaled))


def _summed(changes: Sequence[tuple[Change, Tensors, float]]) -> WeightPatch:
    """Return a sum of changes with their factors, without magnitudes."""
    products: list[Product] = []
    full: torch.Tensor | None = None
    kronecker: list[Kronecker] = []
    hadamard: list[Hadamard] = []
    for change, tensors, factor in changes:
        if change.kind == "kronecker":
            kronecker.append(_kronecker(change, tensors, factor))
        elif change.kind == "hadamard":
            one, other = (_product(keys, tensors) for keys in (change.first, change.second))
            hadamard.append(Hadamard(one=_times(one, factor), other=other))
        elif len(change.first) > 1:
            products.append(_times(_product(change.first, tensors), factor))
        else:
            scaled = _scaled(tensors[change.first[0]], factor)
            full = scaled if full is None else full.add_(scaled)
    return WeightPatch(
        up=_concatenated([each.up for each in products], dim=1),
        down=_concatenated([each.down for each in products], dim=0),
        full=full,
        kronecker=tuple(kronecker),
        hadamard=tuple(hadamard),
    )


def _kronecker(change: Change, tensors: Tensors, factor: float) -> Kronecker:
    # Most trainers' files have few values in the first matrix. The second stays factors if the file
    # has them.
    first = tensors[change.first[0]]
    if len(change.first) > 1:
        product = _product(change.first, tensors)
        first = product.up.float() @ product.down.float()
    second: torch.Tensor | Product = tensors[change.second[0]].flatten(1)
    if len(change.second) > 1:
        second = _product(change.second, tensors)
    return Kronecker(first=_scaled(first, factor).flatten(1), second=second)


def _product(keys: Factors, tensors: Tensors) -> Product:
    """Return two factors as matrices. A Tucker core is multiplied into the second one."""
    up, down = (tensors[key] for key in keys[:2])
    if len(keys) < 3:
        return Product(up=up.flatten(1), down=down.flatten(1))
    core = tensors[keys[2]].float()
    # With a core, `up` is [rank, rows], `down` [rank, columns] and the core [rank, rank, ...].
    return Product(up=up.T, down=torch.einsum("ij...,jc->ic...", core, down.float()).flatten(1))


def _times(product: Product, factor: float) -> Product:
    return replace(product, up=_scaled(product.up, factor))


def _scaled(stored: torch.Tensor, factor: float) -> torch.Tensor:
    # A copy: `stored` is in the cache and must not change.
    return stored.to(torch.float32, copy=True).mul_(factor)


def _concatenated(parts: Sequence[torch.Tensor], *, dim: int) -> torch.Tensor | None:
    """Concatenate the parts in fp32. A single part is returned as it is."""
    if len(parts) < 2:
        return next(iter(parts), None)
    return torch.cat([part.float() for part in parts], dim=dim)


def _check_finite(lora: LoraFile, key: str, tensor: torch.Tensor) -> None:
    # The extremes are NaN if any value is, and take a tenth of the time of `isfinite`. torch has no
    # aminmax for fp8.
    extremes = torch.aminmax(tensor.float() if tensor.itemsize == 1 else tensor)
    if all(math.isfinite(extreme) for extreme in extremes):
        return
    wrong = tensor.numel() - int(torch.isfinite(tensor.float()).sum())
    raise CheckpointError(
        lora.path,
        f"{key} {list(tensor.shape)} holds {wrong} of {tensor.numel()} numbers that are not "
        "finite: the file is damaged or its training failed",
    )


def stack_identity(stack: LoraStack) -> Hashable:
    """Return a hashable, equal for stacks with the same files and strengths in the same order."""
    return tuple((lora.identity, strength) for lora, strength in stack)


@dataclass(frozen=True, kw_only=True, eq=False)
class LoraStages:
    """Distinct LoRA stacks for an expert, and the stack for each step.

    LoRAs with strength 0 are left out.
    """

    stacks: tuple[LoraStack, ...]
    starts: tuple[int, ...]
    """First step in each stretch with the same stack, ascending from 0."""
    numbers: tuple[int, ...]
    """For each of `starts`: index in `stacks`."""

    def number_at(self, step: int) -> int:
        """Return the index in `stacks` for a step in the whole schedule."""
        return self.numbers[bisect_right(self.starts, step) - 1]


def lora_stages(loras: Sequence[tuple[LoraFile, StepStrengths]]) -> LoraStages:
    """Return the stacks for these LoRAs.

    One, possibly empty, if no strength differs between steps.
    """
    starts = sorted({0}.union(*(strengths.starts for _, strengths in loras)))
    stacks: list[LoraStack] = []
    number_of: dict[Hashable, int] = {}
    numbers: list[int] = []
    for step in starts:
        stack = [(lora, strengths.at(step)) for lora, strengths in loras if strengths.at(step) != 0]
        identity = stack_identity(stack)
        if identity not in number_of:
            number_of[identity] = len(stacks)
            stacks.append(stack)
        numbers.append(number_of[identity])
    return LoraStages(stacks=tuple(stacks), starts=tuple(starts), numbers=tuple(numbers))


def block_patches(
    expert: str, config: WanConfig, stack: LoraStack, factors: LoraFactors, *, number: int = 0
) -> dict[BlockKey, BlockPatch]:
    """Return patches with this `BlockKey.patch` for blocks with streamed weights in `stack`.

    A block's factors are folded when the patch is read, so that only one block at a time has both
    forms in RAM.
    """
    patches = {}
    for block in range(config.num_layers):
        names = {f"blocks.{block}.{name}": name for name in block_streams(config)}
        # Other LoRAs do not count, so the block stays in the buffer if they change.
        involved = [each for each in stack if names.keys() & each[0].changes]
        if involved:
            changed = {
                name: full
                for full, name in names.items()
                if any(full in lora.changes for lora, _ in involved)
            }
            patches[BlockKey(expert, block, number)] = BlockPatch(
                identity=stack_identity(involved), weights=LazyPatches(changed, involved, factors)
            )
    return patches


def resident_patches(config: WanConfig, stack: LoraStack, factors: LoraFactors) -> LazyPatches:
    """Return the patches for an expert's unstreamed parameters, by full name."""
    names = {
        name: name
        for lora, _ in stack
        for name in lora.changes
        if name not in streamed_parameters(config)
    }
    return LazyPatches(names, stack, factors)


class LazyPatches(Mapping[str, WeightPatch]):
    """Patches by name, folded at each look-up.

    `parameters` maps the keys to full parameter names.
    """

    def __init__(
        self, parameters: Mapping[str, str], stack: LoraStack, factors: LoraFactors
    ) -> None:
        self._parameters = parameters
        self._stack = stack
        self._factors = factors

    def __getitem__(self, name: str) -> WeightPatch:
        return combine_patches(self._parameters[name], self._stack, self._factors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


class PatchedParameters:
    """Patches for a model's unstreamed parameters.

    Host RAM keeps unpatched copies of changed parameters, so changing LoRAs reads nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._pristine: dict[str, torch.Tensor] = {}

    def set(self, patches: Mapping[str, WeightPatch]) -> None:
        """Apply these patches and undo all others."""
        # The parameters outlive the run that first needs them, and an inference tensor could not be
        # changed later.
        with torch.inference_mode(False), torch.no_grad():
            for name in [name for name in self._pristine if name not in patches]:
                self._model.get_parameter(name).copy_(self._pristine[name])
                del self._pristine[name]
            for name, patch in patches.items():
                parameter = self._model.get_parameter(name)
                if name not in self._pristine:
                    # A copy on a CPU too, because the parameter changes in place below.
                    self._pristine[name] = parameter.detach().to("cpu", copy=True)
                write_sum(self._pristine[name], patch, parameter)
