"""Blocks of a diffusion model that stream: the large children of its outermost lists of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import nn

SMALLEST_BLOCK = 8_000_000
"""Bytes of the smallest block that streams; smaller ones cost more in scheduling than they save."""

SMALLEST_MODEL = 2_000_000_000
"""Bytes in blocks of the smallest model that is streamed."""


def find_blocks(
    model: nn.Module, nbytes: Callable[[nn.Module], int], *, smallest: int = SMALLEST_BLOCK
) -> Mapping[str, nn.Module]:
    """Return the blocks of `model` by path, in the order of the model.

    Args:
        model: a diffusion model.
        nbytes: returns the bytes of the matrices in a module.
        smallest: bytes of the smallest block.
    """
    return {path: block for path, block in _listed(model, "") if _is_called(block) and nbytes(block) >= smallest}


def _is_called(block: nn.Module) -> bool:
    """Return False for the blocks of a UNet: ComfyUI calls the layers in them, and never the blocks themselves."""
    return not isinstance(block, nn.Sequential)


def _listed(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of the outermost lists below `module`, with their paths."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from ((f"{prefix}{name}.{key}", block) for key, block in child.named_children())
        else:
            yield from _listed(child, f"{prefix}{name}.")
