"""Seeded noise: to start from, the numbers ComfyUI draws for the same seed; on the way, some of each sample's own.

Torch's global generator is never touched.
"""

from __future__ import annotations

import hashlib
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


def step_seeds(*starts: torch.Tensor | None) -> tuple[int, ...]:
    """A seed for each sample, for noise that is drawn on the way, from the tensors [B, ...] that it starts from.

    So it is the sample's own: the same whichever others it is computed with, and wherever.
    """
    given = [start.detach().to("cpu", torch.float32) for start in starts if start is not None]
    return tuple(_seed(sample) for sample in zip(*given, strict=True))


def _seed(tensors: Sequence[torch.Tensor]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")
