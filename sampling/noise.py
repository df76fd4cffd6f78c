"""Seeded starting noise: the numbers ComfyUI draws for the same seed, without touching torch's global generator."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import RequestError


def seeded_noise(shape: Sequence[int], seed: int, *, batch_index: Sequence[int] | None = None) -> torch.Tensor:
    """Standard normal noise of `shape` [B, ...], float32, on the CPU.

    With `batch_index`, which a LATENT carries after a batch was cut, sample i gets draw number `batch_index[i]`:
    taken out of its batch, it starts from the noise it had there. Raises `RequestError` for indices that do not fit.
    """
    generator = torch.Generator().manual_seed(seed)
    if batch_index is None:
        return torch.randn(tuple(shape), generator=generator)
    if len(batch_index) != shape[0] or min(batch_index) < 0:
        raise RequestError(f"batch_index {list(batch_index)} for {shape[0]} samples: give one index >= 0 for each")
    # Draw k of a batch depends on the draws before it; those that nobody asks for are made and dropped.
    one = (1, *shape[1:])
    draws = [torch.randn(one, generator=generator) for _ in range(max(batch_index) + 1)]
    return torch.cat([draws[k] for k in batch_index])
