"""Streamed network blocks.

They are the large children of the outermost module lists. Each large layer outside the lists is a
block by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .....schema import SMALLEST_BLOCK, SMALLEST_LAYER

SMALLEST_MODEL = 2_000_000_000
"""Bytes in the lists of the smallest streamed model."""


ANY_SIZE: Mapping[str, int] = {"smallest_block": 1, "smallest_model": 1}
"""No limits, for trying out streaming with a small model."""
SMALL_SETTING = "Settings > WanStream > Stream small models"


class NotStreamedError(ValueError):
    """A model has no blocks, or too little in them. The message lacks the subject."""


def blocks_to_stream(
    network: nn.Module,
    nbytes: Callable[[nn.Module], int],
    *,
    kind: str,
    layers: tuple[type, ...],
    remedy: str,
    smallest_block: int = SMALLEST_BLOCK,
    smallest_layer: int = SMALLEST_LAYER,
    smallest_model: int = SMALLEST_MODEL,
) -> Mapping[str, nn.Module]:
    """Return the blocks in a network by path, in network order.

    Args:
        network: a diffusion model, or text encoders.
        nbytes: returns the matrix bytes in a module.
        kind: class name, for errors.
        layers: linear layer classes. Outside the lists, a large layer is a block if it is only
            used by calling it.
        remedy: advice if the model is not streamed.
        smallest_block: minimum bytes for a block in a list.
        smallest_layer: minimum bf16 bytes for a linear layer outside the lists.
        smallest_model: minimum bytes for a model, all lists together.

    Raises:
        NotStreamedError: the model is too small, or has no block lists.
    """
    sizes: dict[str, int] = {}
    blocks: dict[str, nn.Module] = {}
    for path, block, is_listed in _candidates(network):
        if is_listed:
            # In UNet blocks, ComfyUI calls the layers only, never the block.
            if isinstance(block, nn.Sequential):
                continue
            sizes[path] = nbytes(block)
            if sizes[path] >= smallest_block:
                blocks[path] = block
        # Not by stored bytes: files in all formats must have the same blocks to be joined.
        elif isinstance(block, layers) and nbytes(block) and _bf16_bytes(block) >= smallest_layer:
            blocks[path] = block
    # At least one byte: without any block, nothing streams, whatever the limit.
    if sum(sizes[path] for path in blocks if path in sizes) >= max(1, smallest_model):
        return blocks
    total = sum(sizes.values())
    if total == 0:
        raise NotStreamedError(f"has no list of blocks to stream ({kind}): {remedy}")
    if total < smallest_model:
        reason = f"{total / 1e9:.2f} GB in its blocks, from {smallest_model / 1e9:g} GB on"
    else:
        reason = f"each of its blocks is below {smallest_block / 1e6:g} MB"
    raise NotStreamedError(
        f"is too small to be worth streaming ({reason}): {remedy}, or turn on {SMALL_SETTING} to "
        f"try it ({kind})"
    )


def listed(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of the outermost lists in a network."""
    return (module for _, module, is_listed in _candidates(network) if is_listed)


def _candidates(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield path and module for children of the outermost lists and for layers outside them.

    The last value is True in a list.
    """
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            for key, block in child.named_children():
                yield f"{path}.{key}", block, True
        elif next(child.children(), None) is None:
            yield path, child, False
        else:
            yield from _candidates(child, f"{path}.")


def _bf16_bytes(layer: Any) -> int:
    values: int = layer.in_features * layer.out_features
    return torch.bfloat16.itemsize * values
