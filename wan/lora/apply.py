"""LoRA factors in host RAM, and the changes that they make to streamed and resident parameters."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from ...offload import CHUNK_VALUES, BlockPatch, WeightPatch, read_tensors
from ...plan import BlockKey
from ..checkpoint.detect import WanConfig
from ..checkpoint.files import CheckpointError
from ..checkpoint.meta_model import block_streams
from .file import LoraFile

LoraStack: TypeAlias = "Sequence[tuple[LoraFile, float]]"
"""What is added to one expert: files and their strengths."""

Tensors = Mapping[str, torch.Tensor]


class LoraFactors:
    """Reads each file once, when it is first asked for."""

    def __init__(self) -> None:
        self._held: dict[Hashable, Tensors] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensors in self._held.values() for tensor in tensors.values())

    def of(self, lora: LoraFile) -> Tensors:
        """The tensors of `lora` by key, on the CPU, as they are stored.

        Raises:
            CheckpointError: one of them has a number that is not finite; names the key.
            SourceError: the file cannot be read, or is no longer the one that was opened.
        """
        if lora.identity not in self._held:
            tensors = read_tensors(lora.tensors)
            for key, tensor in tensors.items():
                _check_finite(lora, key, tensor)
            self._held[lora.identity] = tensors
        return self._held[lora.identity]

    def keep_only(self, loras: Iterable[LoraFile]) -> None:
        """Let go of all other files."""
        wanted = {lora.identity for lora in loras}
        self._held = {identity: tensors for identity, tensors in self._held.items() if identity in wanted}


def bytes_in_both_forms(loras: Iterable[LoraFile], dtype: torch.dtype) -> int:
    """Host memory of these LoRAs as they are stored, and once more as the engine holds them."""
    factors = [tensor for lora in loras for tensor in lora.tensors.values()]
    folded = sum(math.prod(tensor.shape) for tensor in factors) * dtype.itemsize
    return sum(tensor.nbytes for tensor in factors) + folded


def combined(parameter: str, stack: LoraStack, factors: LoraFactors) -> WeightPatch:
    """What the LoRAs of `stack`, at least one of which changes `parameter`, add to it together.

    Low-rank products are put side by side along their rank, with strength and scale in `up`; differences are summed.
    `up` [rows, rank] and `full`, in the shape of the parameter, are fp32; `down` [rank, columns] is as it is stored.
    """
    ups: list[torch.Tensor] = []
    downs: list[torch.Tensor] = []
    full: torch.Tensor | None = None
    for lora, strength in stack:
        low, difference = lora.low_rank.get(parameter), lora.differences.get(parameter)
        tensors = factors.of(lora) if low or difference else {}
        if low is not None:
            ups.append(_times(tensors[low.up].flatten(1), low.scale * strength))
            downs.append(tensors[low.down].flatten(1))
        if difference is not None:
            part = _times(tensors[difference.key], difference.scale * strength)
            full = part if full is None else full.add_(part)
    return WeightPatch(up=_joined(ups, dim=1), down=_joined(downs, dim=0), full=full)


def _times(stored: torch.Tensor, factor: float) -> torch.Tensor:
    return stored.to(torch.float32, copy=True).mul_(factor)


def _joined(parts: Sequence[torch.Tensor], *, dim: int) -> torch.Tensor | None:
    """The parts as one tensor: of one, itself; of several, fp32."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return torch.cat([part.float() for part in parts], dim=dim)


def put_patched(base: torch.Tensor, patch: WeightPatch, into: torch.Tensor) -> None:
    """Write `base` (on the CPU) with `patch` added into a parameter of its shape and dtype, on any device.

    Computed on that device in fp32 and rounded once, a few rows at a time: the largest of these matrices would take
    630 MB in fp32.
    """
    rows = len(base)
    source, target = base.reshape(rows, -1), into.view(rows, -1)
    full = None if patch.full is None else patch.full.reshape(target.shape)
    down = None if patch.down is None else patch.down.to(into.device, torch.float32)
    rows_at_once = max(1, CHUNK_VALUES // target.shape[1])
    for start in range(0, rows, rows_at_once):
        part = slice(start, start + rows_at_once)
        total = source[part].to(into.device, torch.float32, copy=True)
        if full is not None:
            total.add_(full[part].to(into.device))
        if patch.up is not None and down is not None:
            total.addmm_(patch.up[part].to(into.device), down)
        target[part].copy_(total)


def _check_finite(lora: LoraFile, key: str, tensor: torch.Tensor) -> None:
    # If any number is NaN, so are the extremes, which take a tenth of the time; torch has none of fp8.
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
    """Equal for stacks that add the same: the files in their order, and their strengths."""
    return tuple((lora.identity, strength) for lora, strength in stack)


def block_patches(expert: str, config: WanConfig, stack: LoraStack, factors: LoraFactors) -> dict[BlockKey, BlockPatch]:
    """The patch of each block of `expert` in which `stack` changes a weight that streams.

    A block's factors are folded when its patch is read, so that only one block's are there twice at a time.
    """
    patches = {}
    for block in range(config.num_layers):
        names = {name: f"blocks.{block}.{name}" for name in block_streams(config)}
        changed = {name: full for name, full in names.items() if any(_changes(lora, full) for lora, _ in stack)}
        if changed:
            involved = [(lora, by) for lora, by in stack if any(_changes(lora, full) for full in changed.values())]
            patches[BlockKey(expert, block)] = BlockPatch(
                identity=stack_identity(involved), weights=Folded(changed, involved, factors)
            )
    return patches


def staying_patches(config: WanConfig, stack: LoraStack, factors: LoraFactors) -> Folded:
    """What `stack` adds to the parameters of an expert that do not stream, by full name."""
    streamed = {f"blocks.{block}.{name}" for block in range(config.num_layers) for name in block_streams(config)}
    names = [name for lora, _ in stack for name in (*lora.low_rank, *lora.differences) if name not in streamed]
    return Folded({name: name for name in names}, stack, factors)


class Folded(Mapping[str, WeightPatch]):
    """What is added to parameters, folded whenever one is looked up; `parameters` are their full names by key."""

    def __init__(self, parameters: Mapping[str, str], stack: LoraStack, factors: LoraFactors) -> None:
        self._parameters, self._stack, self._factors = parameters, stack, factors

    def __getitem__(self, name: str) -> WeightPatch:
        return combined(self._parameters[name], self._stack, self._factors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


class PatchedParameters:
    """The parameters of one model that do not stream, with and without what LoRAs add to them.

    Those that are changed are kept in host RAM as they were, so that nothing has to be read when the LoRAs change.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._pristine: dict[str, torch.Tensor] = {}

    def set(self, patches: Mapping[str, WeightPatch]) -> None:
        """Let the model compute with these patches and no others."""
        # The parameters outlive the run that first needs them, so they must not be inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            for name in [name for name in self._pristine if name not in patches]:
                self._model.get_parameter(name).copy_(self._pristine[name])
                del self._pristine[name]
            for name, patch in patches.items():
                parameter = self._model.get_parameter(name)
                if name not in self._pristine:
                    self._pristine[name] = parameter.detach().to("cpu", copy=True)
                put_patched(self._pristine[name], patch, parameter)


def _changes(lora: LoraFile, parameter: str) -> bool:
    return parameter in lora.low_rank or parameter in lora.differences
