"""Blocks of a diffusion model that stream: the large children of its outermost lists of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import nn

SMALLEST_BLOCK = 8_000_000
"""Bytes of the smallest block that streams; smaller ones cost more in scheduling than they save."""

SMALLEST_MODEL = 2_000_000_000
"""Bytes in blocks of the smallest model that is streamed."""


ANY_SIZE: Mapping[str, int] = {"smallest_block": 1, "smallest_model": 1}
"""Limits without a limit, to try streaming with a small model."""
SMALL_SETTING = "Settings > WanStream > Stream small models"


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


def refusal(kind: str, nbytes: int, *, smallest_block: int, smallest_model: int, remedy: str) -> str:
    """Return the reason why a model with so many bytes in blocks of any size is not streamed, and what to do."""
    if nbytes == 0:
        return f"has no list of blocks to stream ({kind}): {remedy}"
    if nbytes < smallest_model:
        reason = f"{nbytes / 1e9:.2f} GB in its blocks, from {smallest_model / 1e9:g} GB on"
    else:
        reason = f"each of its blocks is below {smallest_block / 1e6:g} MB"
    return f"is too small to be worth streaming ({reason}): {remedy}, or turn on {SMALL_SETTING} to try it ({kind})"
