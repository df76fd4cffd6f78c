"""ComfyUI patches (LoRA and others) on native model blocks, added when the blocks arrive."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from .....offload import BlockPatch, ComputedPatch
from .....offload.formats import pieces_by_parameter
from .....plan.programs import RAW_SLOTS, BlockKey
from ... import versions
from ..network.layers import inner_tensors, is_joined
from .weights import NativeWeights

Tensors: TypeAlias = Mapping[str, torch.Tensor]


COPIES = 3
"""Matrix-sized fp32 tensors needed while patches are added: the sum, the product of factors, and
rounding. Not measured on a GPU."""


@dataclass(frozen=True, kw_only=True)
class Arriving:
    """Patches for a model's blocks."""

    blocks: Mapping[BlockKey, BlockPatch]
    device_bytes: int
    """Device memory needed while patches are added to a block."""

    @classmethod
    def joined(cls, parts: Sequence[Arriving]) -> Arriving:
        """Return the patches for all stacks. Blocks arrive one by one."""
        return cls(
            blocks=dict(ChainMap(*(dict(part.blocks) for part in parts))),
            device_bytes=max(part.device_bytes for part in parts),
        )


def arriving_patches(stack: str, model: Any, patches: Mapping[str, Sequence[Any]]) -> Arriving:
    """Return the patches for a stack's streamed tensors.

    The results are bit-equal to ComfyUI's own model. ComfyUI's functions compute them from the
    same values and quantise them again with the same seed.

    Args:
        stack: the stack.
        model: the stack's model.
        patches: ComfyUI's patches by key.

    Raises:
        ValueError: a patch changes a weight's shape.
    """
    weights: NativeWeights = model.weights
    dtype = versions.compute_dtype(model)
    blocks: dict[BlockKey, BlockPatch] = {}
    factors = largest = 0
    for index, path in enumerate(weights.blocks):
        key = BlockKey(stack, index)
        identity: list[Hashable] = [dtype]
        computed: dict[str, ComputedPatch] = {}
        tensors = weights.formats[key].computed.tensors
        for name in pieces_by_parameter(tensor.name for tensor in tensors):
            full = f"{weights.prefix}{path}.{name}"
            layer = model.get_submodule(full.rpartition(".")[0])
            if full not in patches or not is_patched(layer):
                continue
            _check_shape(full, model.stored[full], patches[full], model.plain_loader)
            parts: dict[str, torch.Tensor] = {}
            change = _Change(
                key=full,
                layer=layer,
                join=partial(weights.join, key, name),
                patches=_with_tensors(patches[full], partial(_taken, parts)),
                dtype=dtype,
            )
            identity.append((name, versions.patch_identity(patches[full])))
            computed[name] = ComputedPatch(parts=parts, compute=change.compute)
            largest = max(largest, model.stored[full].numel())
        if computed:
            blocks[key] = BlockPatch(identity=tuple(identity), weights=computed)
            of_block = (part.nbytes for each in computed.values() for part in each.parts.values())
            factors = max(factors, sum(of_block))
    copies = COPIES * largest * torch.float32.itemsize
    return Arriving(blocks=blocks, device_bytes=RAW_SLOTS * factors + copies)


def is_patched(module: nn.Module) -> bool:
    """Return True if ComfyUI patches a module's parameters.

    It skips parameters next to child modules with parameters.
    """
    return not any(True for child in module.children() for _ in child.parameters())


def _check_shape(key: str, weight: torch.Tensor, patches: Sequence[Any], loader: str) -> None:
    shape = tuple(versions.patched_shape(patches, weight, key))
    if shape != tuple(weight.shape):
        raise ValueError(
            f"a patch changes the shape of {key} from {list(weight.shape)} to {list(shape)}, and "
            "the memory of a block that streams cannot grow: load this model with "
            f"{loader}"
        )


def _with_tensors(
    patches: Sequence[Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> list[Any]:
    return [versions.with_tensors(patch, change) for patch in patches]


def _taken(parts: dict[str, torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Add a tensor to `parts` under a number, and return an empty tensor instead."""
    parts[str(len(parts))] = tensor
    return torch.empty(0)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Change:
    """Change to one weight.

    Attributes:
        key: ComfyUI's weight key.
        layer: layer with the weight.
        join: joins pieces into a quantised weight.
        patches: patches for the weight, with empty tensors.
        dtype: the model's compute dtype.
    """

    key: str
    layer: nn.Module
    join: Callable[[Tensors], torch.Tensor]
    patches: Sequence[Any]
    dtype: torch.dtype

    def compute(self, stored: Tensors, parts: Tensors) -> Tensors:
        """Change the weight in a buffer. See `ComputedPatch.compute`."""
        # `parts` has the order of the empty tensors, because `_taken` has replaced each in turn.
        staged = iter(parts.values())
        patches = _with_tensors(self.patches, lambda _empty: next(staged))
        weight = stored[""] if "" in stored else self.join(stored)
        with torch.no_grad():
            patched = versions.patched_weight(
                self.layer, self.key, weight, patches, dtype=self.dtype
            )
        if not is_joined(patched):
            stored[""].copy_(patched)
            return {}
        made = inner_tensors(patched)
        for name, piece in stored.items():
            # Scales per row become one scale for the matrix, and this one joins the weight.
            if made[name].nbytes == piece.nbytes:
                piece.copy_(made.pop(name).contiguous().view(-1).view(torch.uint8))
        with torch.inference_mode(False):  # they outlive the run
            return {name: tensor.clone() for name, tensor in made.items()}
