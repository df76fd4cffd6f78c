"""Compute benchmark for a Wan block with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from ...block_kernels import choose_math
from ...devices import auto_dtype, clock_for, free_bytes, runtime_for
from ...schema.refs import KernelSet
from ...shapes import HEAD_DIM, IMAGE_TOKENS, TEXT_TOKENS, ExpertShape
from ..transformer.block import BlockSettings, WanBlock

MIN_TOKENS = 256
"""Tokens in the first measurement."""
FREE_MEMORY_SHARE = 0.8
"""Share of free device memory that a measurement may use."""


@dataclass(frozen=True, kw_only=True)
class ComputeRate:
    """Floating-point operations per second in a block, as counted by `ExpertShape.block_flops`."""

    flops_per_s: float
    tokens: int
    """Measured tokens, fewer than requested if the full number would take too much time or
    memory."""


@torch.inference_mode()
def probe_block(
    shape: ExpertShape,
    tokens: int,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    most_s: float = 2.0,
) -> ComputeRate:
    """Measure a `shape` block on `device` with `tokens` tokens, or as many as fill about `most_s`.

    Starts with a few tokens and grows. Each time is the median of three passes, or of fewer on a
    slow device.
    """
    block = random_block(shape, device, BlockVariant(dtype=dtype))
    tried = min(tokens, MIN_TOKENS)
    while True:
        # Not kept: its inputs would take memory that `fits` counts as free.
        seconds = median_s(block_pass(block, shape, tried, device), device, most_s=most_s / 4)
        rate = shape.block_flops(tried) / seconds
        # Three passes and one to warm up. The next size is at most 16 times as large, because the
        # rate at a few tokens does not predict the rate at many.
        sizes = {min(tokens, tried * factor) for factor in (2, 4, 8, 16)}
        larger = (
            count
            for count in sorted(sizes, reverse=True)
            if count > tried
            and 4 * shape.block_flops(count) / rate <= most_s
            and fits(shape, count, device)
        )
        following = next(larger, None)
        if following is None:
            return ComputeRate(flops_per_s=rate, tokens=tried)
        tried = following


@dataclass(frozen=True, kw_only=True)
class BlockVariant:
    """Block as opened by a user."""

    dtype: torch.dtype | None = None
    """Compute dtype. None: the device's `auto_dtype`."""
    kernels: KernelSet = "auto"
    lora_rank: int = 0
    """Rank of factors computed next to 8-bit matrices. 0: no factors."""


USUAL_BLOCK = BlockVariant()


def random_block(
    shape: ExpertShape, device: torch.device, variant: BlockVariant = USUAL_BLOCK
) -> WanBlock:
    """Return a block with small random weights and fp32 norms, as in diffusers."""
    # Outside `meta`: a first import inside would leave tensors of diffusers' modules on `meta`.
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

    added = None if shape.image_width is None else shape.width
    with torch.device("meta"):
        block = WanTransformerBlock(
            shape.width,
            shape.ffn_width,
            shape.width // HEAD_DIM,
            cross_attn_norm=True,
            added_kv_proj_dim=added,
        )
    dtype = variant.dtype or auto_dtype(device)
    block = block.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    # A short random tile is repeated. Drawing 350 million numbers would take longer than the
    # measurement.
    tile = torch.randn(2**16, device=device).mul_(0.02)
    for parameter in block.parameters():
        tile_into(parameter.view(-1), tile)
    # diffusers keeps the table and the norms in fp32.
    block.scale_shift_table.data = block.scale_shift_table.data.float()
    block.norm2.float()
    return WanBlock(
        block, BlockSettings(math=choose_math(variant.kernels, device, dtype, shape.width))
    )


def tile_into(flat: torch.Tensor, tile: torch.Tensor) -> None:
    """Fill `flat` with copies of `tile`."""
    whole = flat.numel() // tile.numel() * tile.numel()
    flat[:whole].view(-1, tile.numel()).copy_(tile.expand(whole // tile.numel(), -1))
    flat[whole:].copy_(tile[: flat.numel() - whole])


def block_pass(
    block: WanBlock, shape: ExpertShape, tokens: int, device: torch.device
) -> Callable[[], None]:
    """Return a function that passes one lane of `tokens` random tokens in its dtype to `block`."""
    dtype = block.attn1.norm_q.weight.dtype
    rows = (tokens, TEXT_TOKENS + (0 if shape.image_width is None else IMAGE_TOKENS), 6)
    hidden, text, modulation = (
        torch.randn(1, n, shape.width, device=device, dtype=dtype) for n in rows
    )
    tables = (torch.randn(1, tokens, 1, HEAD_DIM, device=device) for _ in range(2))
    rotation = block.settings.used_math.rotation(*tables)

    def once() -> None:
        block(hidden, text, modulation, rotation)

    return once


def median_s(once: Callable[[], object], device: torch.device, *, most_s: float) -> float:
    """Return the median seconds of three calls (slow ones: fewer) after a warm-up call."""
    clock = clock_for(device)
    times: list[float] = []
    # The first pass warms up. It counts only if it is the only one: on a CPU, it then took so long
    # that start-up is negligible. On a device it may have compiled kernels for seconds.
    may_be_only = runtime_for(device) is None
    while len(times) < 4 and not (len(times) > 1 - may_be_only and times[-1] > most_s):
        start = clock.mark()
        once()
        end = clock.mark()
        clock.settle()
        times.append(clock.seconds(start, end))
    return median(times[1:] or times)


def fits(shape: ExpertShape, tokens: int, device: torch.device) -> bool:
    """Return True if a lane of `tokens` fits into the free memory of `device`."""
    free = free_bytes(device)
    # A measurement that is short enough on a CPU is also small enough.
    return free is None or shape.working_bytes([tokens]) <= FREE_MEMORY_SHARE * free
