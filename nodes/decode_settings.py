"""What a user says about a decode."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..host import host
from ..plan.shapes import PIXELS_PER_LATENT
from ..plan.vae_room import GB
from ..plan.vae_tiles import Tiling
from ..wan.latent_space import space_of
from ..wan.vae import check_latents

VAE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What a VAE may compute in. Not fp16, whose largest number its activations may pass."""


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """The inputs of a node that decodes, but for the latents."""

    vae: Path
    tiling: Tiling | None
    """None: the largest that fits."""
    memory_bytes: int
    """Limit on the decode's memory without the weights; 0 for the free memory of its device."""
    dtype: torch.dtype = torch.float32
    """What the VAE computes in; frames are fp32 in any case."""

    @classmethod
    def of(
        cls, vae: str, latents: torch.Tensor, tile_size: int, memory_gb: float, compute_dtype: str
    ) -> DecodeSettings:
        """As a node takes them; raises VaeInputError, TilingError, and as `host.model_path`."""
        check_latents(latents)
        return cls(
            vae=host.model_path(vae, "diffusers", "vae"),
            tiling=asked(tile_size, space_of(latents.shape[1]).pixels),
            memory_bytes=int(memory_gb * GB),
            dtype=VAE_DTYPES[compute_dtype],
        )


def asked(tile_size: int | None, per_latent: int = PIXELS_PER_LATENT) -> Tiling | None:
    """The tiles of that width; None for 0, and for a link, which is not known yet. Raises TilingError."""
    return Tiling.of(tile_size, per_latent) if tile_size else None
