"""The inputs that all nodes which decode have in common."""

from __future__ import annotations

from ..host import host, io
from ..plan.shapes import PIXELS_PER_LATENT
from ..plan.vae_tiles import TilingError
from .decode_settings import VAE_DTYPES, asked


def vae_input() -> io.Input:
    """The VAE's file or folder."""
    return io.Combo.Input(
        "vae",
        options=host.model_names("diffusers", "vae"),
        tooltip="wan_2.1_vae.safetensors, for Wan2.2 5B wan2.2_vae.safetensors, or the diffusers pipeline folder that "
        "holds the VAE. It is loaded for this node alone (0.5 GB, for 5B 2.8 GB).",
    )


def tile_size_input() -> io.Input:
    """How large tiles are."""
    return io.Int.Input(
        "tile_size",
        default=0,
        min=0,
        max=4096,
        step=PIXELS_PER_LATENT,
        optional=True,
        tooltip="Width of the tiles that are decoded one by one; 0: whole frames if they fit in memory, else the "
        "tiles that fit and compute least. 256 computes a fourteenth of a 1280x720 frame at once, and 1.65 times as "
        "much in all, because tiles overlap by a quarter, over which they are blended. For Wan2.2 5B a multiple of 16, "
        "128 or more.",
    )


def memory_input() -> io.Input:
    """How much memory there is."""
    return io.Float.Input(
        "memory_gb",
        default=0.0,
        min=0.0,
        max=1024.0,
        step=0.1,
        optional=True,
        tooltip="Memory for decoding, in addition to the VAE's weights; 0: what is free. Whole frames of 1280x720 take "
        "21 GB, tiles of 256 pixels 1.5 GB; with the VAE of Wan2.2 5B 22 GB and 1.6 GB. Where even that is not there, "
        "smaller tiles are tried.",
    )


def dtype_input() -> io.Input:
    """What the VAE computes in."""
    return io.Combo.Input(
        "compute_dtype",
        options=list(VAE_DTYPES),
        default="fp32",
        optional=True,
        tooltip="What the VAE computes in. bf16 takes half the memory, also of the VAE itself, and less time where "
        "the device computes in it; colours are rounded, in places by a few of 255 levels.",
    )


def tiling_refusal(tile_size: int | None) -> bool | str:
    """For `validate_inputs`: why such tiles cannot be made; True if they can."""
    try:
        asked(tile_size)
    except TilingError as err:
        return str(err)
    return True
