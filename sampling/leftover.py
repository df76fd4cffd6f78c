"""The mark on a LATENT that says at which noise level a run left it, so that the next sampler can tell if it fits.

Other nodes copy what they do not know and change the samples, so the mark counts only together with the samples that it
was made for.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch

MARK = "wanstream_leftover"
"""The key of the mark in a LATENT: {"sigma": float, "fingerprint": int}."""

PROBES = 1024
"""About how many values make a fingerprint."""


def leftover_mark(samples: torch.Tensor, sigma: float) -> dict[str, Any]:
    """The mark of raw `samples` that a run left at `sigma`; 0 is a finished video."""
    return {"sigma": sigma, "fingerprint": _fingerprint(samples)}


def left_at(latent: Mapping[str, Any]) -> float | None:
    """The noise level at which a run left this LATENT; None if no run of ours did, or its samples are other ones."""
    mark = latent.get(MARK)
    if mark is None or mark["fingerprint"] != _fingerprint(latent["samples"]):
        return None
    sigma: float = mark["sigma"]
    return sigma


def _fingerprint(samples: torch.Tensor) -> int:
    """A checksum over the shape and evenly spread values: sampling, scaling or cutting a latent changes them all."""
    spread = samples.flatten()[:: max(1, samples.numel() // PROBES)]
    return zlib.crc32(spread.float().cpu().numpy().tobytes(), zlib.crc32(repr(tuple(samples.shape)).encode()))
