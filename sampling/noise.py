"""Seeded noise: starting noise equal to ComfyUI's, and seeds for solvers that draw noise in every step.

Torch's global generator is never used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from .errors import RequestError


def seeded_noise(shape: Sequence[int], seed: int, *, batch_index: Sequence[int] | None = None) -> torch.Tensor:
    """Return standard normal noise of `shape` [B, ...], float32, on the CPU.

    Args:
        batch_index: index of each sample in its original batch, from a LATENT that was cut out of one. The sample
            then gets the noise that it had there.

    Raises:
        RequestError: the indices do not fit the number of samples.
    """
    generator = torch.Generator().manual_seed(seed)
    if batch_index is None:
        return torch.randn(tuple(shape), generator=generator)
    if len(batch_index) != shape[0] or min(batch_index) < 0:
        raise RequestError(f"batch_index {list(batch_index)} for {shape[0]} samples: give one index >= 0 for each")
    # Draw k depends on the draws before it, so unused ones are made too.
    one = (1, *shape[1:])
    draws = [torch.randn(one, generator=generator) for _ in range(max(batch_index) + 1)]
    return torch.cat([draws[k] for k in batch_index])


def step_seeds(*starts: torch.Tensor | None) -> tuple[int, ...]:
    """Return a seed for each sample, derived from its starting tensors [B, ...].

    It does not depend on the rest of the batch, so a sample draws the same noise in any batch and on any worker.
    """
    given = [start.detach().to("cpu", torch.float32) for start in starts if start is not None]
    return tuple(_seed(sample) for sample in zip(*given, strict=True))


def _seed(tensors: Sequence[torch.Tensor]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")
