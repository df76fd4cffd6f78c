"""What LoRAs change in one expert, sorted by the way it gets there: with a streamed block, or into what stays."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

import torch
from torch import nn

from ..offload.patches import BlockPatch, WeightPatch
from ..plan import BlockKey
from .detect import WanConfig
from .lora import LoraFile
from .lora_factors import LoraFactors, LoraStack, combined, put_patched
from .meta_model import block_streams


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
