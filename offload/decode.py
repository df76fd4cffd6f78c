"""Turns a block's stored bytes into what the model computes with, on arrival."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .layout import BlockFormat, tensor_views

# Scaled values pass through fp32 in pieces of about this many: 8 MB of extra memory however large the matrix is. On a
# CPU that takes half the time of the formula in one go, and 64 Ki to 4 Mi values do equally well; on a GPU every piece
# is three launches.
CHUNK_VALUES = 2 * 1024**2


def decode_block(
    raw: torch.Tensor, into: torch.Tensor, block_format: BlockFormat, scales: Mapping[str, torch.Tensor]
) -> None:
    """Decode the stored bytes of one block.

    A scaled tensor becomes exactly `(stored.float() * scale).to(dtype)`, any other exactly `stored.to(dtype)`.

    Args:
        raw: the stored bytes, 1-D uint8 of at least `stored.nbytes`.
        into: 1-D uint8 of at least `computed.nbytes`, on any device; ordered by the current stream there.
        scales: fp32 factors, 0-d or [rows, 1], one for each name in `block_format.scaled`. Where they lie on another
            device than `raw` they are copied on every call.
    """
    assert scales.keys() == block_format.scaled, f"scales of {sorted(scales)}, not of {sorted(block_format.scaled)}"
    computed = tensor_views(into, block_format.computed)
    for name, stored in tensor_views(raw, block_format.stored).items():
        if name in scales:
            _multiply(stored, scales[name].to(raw.device), computed[name])
        else:
            computed[name].copy_(stored, non_blocking=True)


def _multiply(stored: torch.Tensor, scale: torch.Tensor, computed: torch.Tensor) -> None:
    """Write `stored * scale` row by row, through one piece of fp32 memory that is used again and again."""
    rows = stored.shape[0]
    rows_at_once = min(rows, max(1, CHUNK_VALUES * rows // stored.numel()))
    work = torch.empty(rows_at_once, *stored.shape[1:], dtype=torch.float32, device=stored.device)
    for start in range(0, rows, rows_at_once):
        part = slice(start, start + rows_at_once)
        product = work[: min(rows_at_once, rows - start)]
        product.copy_(stored[part])
        product.mul_(scale if scale.dim() == 0 else scale[part])
        computed[part].copy_(product, non_blocking=True)
