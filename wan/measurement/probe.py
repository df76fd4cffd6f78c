"""Compute benchmark of a Wan block with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from ...devices import auto_dtype, clock_for, free_bytes, runtime_for
from ...schema import HEAD_DIM, IMAGE_TOKENS, TEXT_TOKENS, ExpertShape, KernelSet
from ..kernels.math_choice import choose_math
from ..transformer.block import BlockSettings, WanBlock

MIN_TOKENS = 256
"""Tokens of the first measurement."""
FREE_MEMORY_SHARE = 0.8
"""Share of the free device memory that a measurement may use."""


@dataclass(frozen=True, kw_only=True)
class ComputeRate:
    """Floating point operations per second of one block, as `ExpertShape.block_flops` counts them."""

    flops_per_s: float
    tokens: int
    """Tokens of the measurement; fewer than requested if those would have taken too much time or memory."""


@torch.inference_mode()
def probe_block(
    shape: ExpertShape, tokens: int, device: torch.device, *, dtype: torch.dtype | None = None, most_s: float = 2.0
) -> ComputeRate:
    """Measure a block of `shape` on `device` with `tokens` tokens, or with as many as take about `most_s` seconds.

    Starts with a few tokens and grows. Each time is the median of three passes; on a slow device, of fewer.
    """
    block = random_block(shape, device, BlockVariant(dtype=dtype))
    tried = min(tokens, MIN_TOKENS)
    while True:
        rate = shape.block_flops(tried) / _block_s(block, shape, tried, device, most_s=most_s / 4)
        # Three passes and one to warm up. The next size is at most 16 times as large, because the rate at a few tokens
        # does not predict the rate at many.
        affordable = [count for count in _sizes(tried, tokens) if 4 * shape.block_flops(count) / rate <= most_s]
        fitting = [count for count in affordable if fits(shape, count, device)]
        if not fitting:
            return ComputeRate(flops_per_s=rate, tokens=tried)
        tried = fitting[-1]


@dataclass(frozen=True, kw_only=True)
class BlockVariant:
    """Block of a model as a user opened it."""

    dtype: torch.dtype | None = None
    """Compute dtype; None: `auto_dtype` of the device."""
    kernels: KernelSet = "auto"
    lora_rank: int = 0
    """Rank of the factors that are computed beside matrices in 8 bits; 0: there are none."""


def random_block(shape: ExpertShape, device: torch.device, variant: BlockVariant | None = None) -> WanBlock:
    """Return a block with small random weights and fp32 norms, as in diffusers."""
    variant = variant or BlockVariant()
    added = None if shape.image_width is None else shape.width
    with torch.device("meta"):
        from diffusers.models.transformers.transformer_wan import WanTransformerBlock

        block = WanTransformerBlock(
            shape.width, shape.ffn_width, shape.width // HEAD_DIM, cross_attn_norm=True, added_kv_proj_dim=added
        )
    dtype = variant.dtype or auto_dtype(device)
    block = block.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    # One short tile of random numbers is repeated: drawing 350 million of them would take longer than the measurement.
    tile = torch.randn(2**16, device=device).mul_(0.02)
    for parameter in block.parameters():
        tile_into(parameter.view(-1), tile)
    block.scale_shift_table.data = block.scale_shift_table.data.float()
    block.norm2.float()
    return WanBlock(block, BlockSettings(math=choose_math(variant.kernels, device, dtype, shape.width).math))


def tile_into(flat: torch.Tensor, tile: torch.Tensor) -> None:
    """Fill `flat` with copies of `tile`."""
    whole = flat.numel() // tile.numel() * tile.numel()
    flat[:whole].view(-1, tile.numel()).copy_(tile.expand(whole // tile.numel(), -1))
    flat[whole:].copy_(tile[: flat.numel() - whole])


def block_pass(block: WanBlock, shape: ExpertShape, tokens: int, device: torch.device) -> Callable[[], None]:
    """Return a function that passes one lane of `tokens` random tokens in the dtype of `block` through it."""
    dtype = block.attn1.norm_q.weight.dtype
    rows = (tokens, TEXT_TOKENS + (0 if shape.image_width is None else IMAGE_TOKENS), 6)
    hidden, text, modulation = (torch.randn(1, n, shape.width, device=device, dtype=dtype) for n in rows)
    tables = (torch.randn(1, tokens, 1, HEAD_DIM, device=device) for _ in range(2))
    rotation = block.settings.used_math.rotation(*tables)

    def once() -> None:
        block(hidden, text, modulation, rotation)

    return once


def _block_s(block: WanBlock, shape: ExpertShape, tokens: int, device: torch.device, *, most_s: float) -> float:
    return median_s(block_pass(block, shape, tokens, device), device, most_s=most_s)


def median_s(once: Callable[[], object], device: torch.device, *, most_s: float) -> float:
    """Return the median seconds of three calls after one to warm up; on a slow device, of fewer."""
    clock = clock_for(device)
    times: list[float] = []
    # The first pass warms up. It counts only if it is the only one: on a CPU, it then took so long that start-up is
    # negligible. On a device it may have compiled kernels for seconds.
    may_be_only = runtime_for(device) is None
    while len(times) < 4 and not (len(times) > 1 - may_be_only and times[-1] > most_s):
        start = clock.mark()
        once()
        end = clock.mark()
        clock.settle()
        times.append(clock.seconds(start, end))
    return median(times[1:] or times)


def _sizes(tried: int, wanted: int) -> list[int]:
    """Return token counts above `tried`, up to 16 times as many and at most `wanted`."""
    return sorted({min(wanted, tried * factor) for factor in (2, 4, 8, 16)} - {tried} - set(range(tried)))


def fits(shape: ExpertShape, tokens: int, device: torch.device) -> bool:
    """Return True if a lane of `tokens` fits into the free memory of `device`."""
    free = free_bytes(device)
    # A measurement that is short enough on a CPU is also small enough.
    return free is None or shape.working_bytes(tokens, lanes=1) <= FREE_MEMORY_SHARE * free
