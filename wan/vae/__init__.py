"""Wan2.1 and Wan2.2 VAEs: weights, encoding, decoding in tiles, memory estimates."""

from .memory import GB, HEAP_BYTES, DecodeNeeds, VaeMemoryError, choose_tiling, shared_tiling
from .tiles import TileBlender, Tiling, TilingError, crop, empty_frames
from .tiny import BY_FILE_NAME, LATENT_SCALES, RAW, TinyDecoder
from .vae import (
    VAE_DTYPES,
    DecodeOutOfMemoryError,
    WanVae,
    check_latents,
    describe_tiling,
    open_tiny_vae,
    open_vae,
    retry_with_smaller_tiles,
)
from .weights import family_of

__all__ = [
    "BY_FILE_NAME",
    "GB",
    "HEAP_BYTES",
    "LATENT_SCALES",
    "RAW",
    "VAE_DTYPES",
    "DecodeNeeds",
    "DecodeOutOfMemoryError",
    "TileBlender",
    "Tiling",
    "TilingError",
    "TinyDecoder",
    "VaeMemoryError",
    "WanVae",
    "check_latents",
    "choose_tiling",
    "crop",
    "describe_tiling",
    "empty_frames",
    "family_of",
    "open_tiny_vae",
    "open_vae",
    "retry_with_smaller_tiles",
    "shared_tiling",
]
