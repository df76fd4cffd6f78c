"""LoRAs that are added to the blocks of a native model when they arrive, instead of each time a layer computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import comfy.weight_adapter
import torch

from ....offload import BlockPatch, WeightPatch
from ....plan import BlockKey
from .weights import STACK, NativeWeights

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of matrices to which factors can be added; a sum in fp8 would lose them."""


class Arriving(NamedTuple):
    """Patches of the blocks, and the keys of ComfyUI's patches that they contain."""

    blocks: Mapping[BlockKey, BlockPatch]
    keys: frozenset[str]


def arriving_patches(patches: Mapping[str, Sequence[Any]], weights: NativeWeights) -> Arriving:
    """Return the patches of streamed matrices that are sums of plain LoRAs.

    Args:
        patches: ComfyUI's patches by key.
        weights: weights of the model.
    """
    blocks: dict[BlockKey, BlockPatch] = {}
    keys: set[str] = set()
    for index, path in enumerate(weights.blocks):
        key, prefix = BlockKey(STACK, index), f"diffusion_model.{path}."
        matrices = {tensor.name: tensor.dtype for tensor in weights.formats[key].computed.tensors}
        found = {
            name: patches[prefix + name]
            for name, dtype in matrices.items()
            if dtype in FLOATING and prefix + name in patches and all(map(_is_plain, patches[prefix + name]))
        }
        if not found:
            continue
        keys |= {prefix + name for name in found}
        # The adapters are part of the identity, so that another one cannot get the `id` of one that was deleted.
        identity = tuple(
            (name, tuple((patch, strength) for strength, patch, *_ in added)) for name, added in found.items()
        )
        blocks[key] = BlockPatch(identity=identity, weights={name: _sum(added) for name, added in found.items()})
    return Arriving(blocks, frozenset(keys))


def _is_plain(entry: Sequence[Any]) -> bool:
    """Return True for a LoRA that only adds the product of two matrices to the whole weight."""
    _, patch, model_strength, offset, function = entry
    if not isinstance(patch, comfy.weight_adapter.LoRAAdapter) or model_strength != 1.0:
        return False
    up, down, _, *more = patch.weights
    whole = offset is None and function is None and up.dim() == down.dim() == 2
    return whole and all(each is None for each in more)


def _sum(entries: Sequence[Any]) -> WeightPatch:
    """Return LoRAs of one matrix as one, with their ranks added."""
    ups, downs = [], []
    for strength, patch, *_ in entries:
        up, down, alpha, *_ = patch.weights
        scale = strength * (1.0 if alpha is None else alpha / down.shape[0])
        ups.append(up.float().cpu() * scale)
        downs.append(down.float().cpu())
    return WeightPatch(up=torch.cat(ups, dim=1), down=torch.cat(downs, dim=0))
