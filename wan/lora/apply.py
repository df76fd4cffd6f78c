"""LoRA factors in host RAM and their patches for streamed and resident parameters."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from ...offload import (
    BlockPatch,
    Hadamard,
    Kronecker,
    Product,
    Rescaled,
    WeightPatch,
    read_tensors,
    write_sum,
)
from ...plan import BlockKey
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
        self._tensors = {identity: tensors for identity, tensors in self._tensors.items() if identity in wanted}


def lora_host_bytes(stacks: Sequence[LoraStack], dtype: torch.dtype) -> int:
    """Return the host memory for an expert's LoRAs: each file as stored, and each stack folded for the engine."""
    files = {lora.identity: lora for stack in stacks for lora, _ in stack}.values()
    stored = sum(tensor.nbytes for lora in files for tensor in lora.tensors.values())
    folded = sum(math.prod(tensor.shape) for stack in stacks for lora, _ in stack for tensor in lora.tensors.values())
    return stored + folded * dtype.itemsize


def block_factor_bytes(config: WanConfig, stack: LoraStack, dtype: torch.dtype) -> int:
    """Return the folded factor bytes of the block with the most."""

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
    """Combine the changes of all LoRAs in `stack` to `parameter`. There must be at least one.

    Low-rank products are concatenated along their rank, with strength and scale folded into `up`. Differences are
    summed. `up` [rows, rank] and `full` (parameter shape) are fp32. `down` [rank, columns] is as stored, or fp32 if
    there are several. Every DoRA starts from the unchanged parameter, so the LoRA order does not matter.
    """
    added: list[_Scaled] = []
    rescaled: list[Rescaled] = []
    for lora, strength in stack:
        for change in lora.changes.get(parameter, ()):
            tensors = factors.load(lora)
            if change.magnitude is None:
                added.append(_Scaled(change, tensors, change.scale * strength))
                continue
            magnitude = tensors[change.magnitude].float()
            _, columns = change.shape(lora.tensors)
            shape = (1, -1) if is_by_column(tuple(magnitude.shape), columns) else (-1, 1)
            alone = _summed([_Scaled(change, tensors, change.scale)])
            rescaled.append(Rescaled(change=alone, magnitude=magnitude.reshape(shape), strength=strength))
    return replace(_summed(added), rescaled=tuple(rescaled))


class _Scaled(NamedTuple):
    """Change with tensors and factor."""

    change: Change
    tensors: Tensors
    factor: float


def _summed(changes: Sequence[_Scaled]) -> WeightPatch:
    """Return the sum of changes, without their magnitudes."""
    ups: list[torch.Tensor] = []
    downs: list[torch.Tensor] = []
    full: torch.Tensor | None = None
    kronecker: list[Kronecker] = []
    hadamard: list[Hadamard] = []
    for change, tensors, factor in changes:
        if change.kind == "kronecker":
            kronecker.append(_kronecker(change, tensors, factor))
        elif change.kind == "hadamard":
            one, other = (_product(keys, tensors) for keys in (change.first, change.second))
            hadamard.append(Hadamard(one=Product(up=_scaled(one.up, factor), down=one.down), other=other))
        elif len(change.first) > 1:
            product = _product(change.first, tensors)
            ups.append(_scaled(product.up, factor))
            downs.append(product.down)
        else:
            scaled = _scaled(tensors[change.first[0]], factor)
            full = scaled if full is None else full.add_(scaled)
    return WeightPatch(
        up=_concatenated(ups, dim=1),
        down=_concatenated(downs, dim=0),
        full=full,
        kronecker=tuple(kronecker),
        hadamard=tuple(hadamard),
    )


def _kronecker(change: Change, tensors: Tensors, factor: float) -> Kronecker:
    # Most trainers' files have few values in the first matrix. The second stays factors if the file has them.
    first, second = (_product(keys, tensors) if len(keys) > 1 else None for keys in (change.first, change.second))
    whole = tensors[change.first[0]] if first is None else first.up.float() @ first.down.float()
    return Kronecker(
        first=_scaled(whole, factor).flatten(1),
        second=tensors[change.second[0]].flatten(1) if second is None else second,
    )


def _product(keys: Factors, tensors: Tensors) -> Product:
    """Return two factors as matrices. A Tucker core is multiplied into the second one."""
    up, down = (tensors[key] for key in keys[:2])
    if len(keys) < 3:
        return Product(up=up.flatten(1), down=down.flatten(1))
    core = tensors[keys[2]].float()
    return Product(up=up.T, down=torch.einsum("ij...,jc->ic...", core, down.float()).flatten(1))


def _scaled(stored: torch.Tensor, factor: float) -> torch.Tensor:
    return stored.to(torch.float32, copy=True).mul_(factor)  # `stored` is in the cache and must not change


def _concatenated(parts: Sequence[torch.Tensor], *, dim: int) -> torch.Tensor | None:
    """Concatenate the parts in fp32. A single part is returned as it is."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return torch.cat([part.float() for part in parts], dim=dim)


def _check_finite(lora: LoraFile, key: str, tensor: torch.Tensor) -> None:
    # The extremes are NaN if any value is, and take a tenth of the time of `isfinite`. torch has no aminmax for fp8.
    extremes = torch.aminmax(tensor.float() if tensor.itemsize == 1 else tensor)
    if all(math.isfinite(extreme) for extreme in extremes):
        return
    wrong = tensor.numel() - int(torch.isfinite(tensor.float()).sum())
    raise CheckpointError(
        lora.path,
        f"{key} {list(tensor.shape)} holds {wrong} of {tensor.numel()} numbers that are not finite: the file is "
        "damaged or its training failed",
    )


def stack_identity(stack: LoraStack) -> Hashable:
    """Return a hashable, equal for stacks with the same files in the same order with the same strengths."""
    return tuple((lora.identity, strength) for lora, strength in stack)


def block_patches(
    expert: str, config: WanConfig, stack: LoraStack, factors: LoraFactors, *, number: int = 0
) -> dict[BlockKey, BlockPatch]:
    """Return the patches, with this `BlockKey.patch`, for blocks with a streamed weight changed by `stack`.

    A block's factors are folded when the patch is read, so that only one block at a time has both forms in RAM.
    """
    patches = {}
    for block in range(config.num_layers):
        names = {name: f"blocks.{block}.{name}" for name in block_streams(config)}
        changed = {name: full for name, full in names.items() if any(full in lora.changes for lora, _ in stack)}
        if changed:
            involved = [each for each in stack if not each[0].changes.keys().isdisjoint(changed.values())]
            patches[BlockKey(expert, block, number)] = BlockPatch(
                identity=stack_identity(involved), weights=LazyPatches(changed, involved, factors)
            )
    return patches


def resident_patches(config: WanConfig, stack: LoraStack, factors: LoraFactors) -> LazyPatches:
    """Return the patches for an expert's parameters that are not streamed, by full name."""
    names = {name: name for lora, _ in stack for name in lora.changes if name not in streamed_parameters(config)}
    return LazyPatches(names, stack, factors)


class LazyPatches(Mapping[str, WeightPatch]):
    """Mapping of patches, folded at each look-up. `parameters` maps the keys to full parameter names."""

    def __init__(self, parameters: Mapping[str, str], stack: LoraStack, factors: LoraFactors) -> None:
        self._parameters, self._stack, self._factors = parameters, stack, factors

    def __getitem__(self, name: str) -> WeightPatch:
        return combine_patches(self._parameters[name], self._stack, self._factors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


class PatchedParameters:
    """Patches for a model's parameters that are not streamed.

    Unpatched copies of changed parameters are kept in host RAM, so that changing LoRAs reads nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._pristine: dict[str, torch.Tensor] = {}

    def set(self, patches: Mapping[str, WeightPatch]) -> None:
        """Apply these patches and undo all others."""
        # The parameters outlive the run that first needs them, and an inference tensor could not be changed later.
        with torch.inference_mode(False), torch.no_grad():
            for name in [name for name in self._pristine if name not in patches]:
                self._model.get_parameter(name).copy_(self._pristine[name])
                del self._pristine[name]
            for name, patch in patches.items():
                parameter = self._model.get_parameter(name)
                if name not in self._pristine:
                    self._pristine[name] = parameter.detach().to("cpu", copy=True)
                write_sum(self._pristine[name], patch, parameter)
