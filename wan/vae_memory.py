"""What a VAE takes beside its weights, counted on the `meta` device: nothing is computed for it.

It is convolutions from end to end, so what it takes goes with the area of what it works on at once. A small latent
takes a little more for its size than a large one, because of the lines around it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..plan.shapes import FRAMES_PER_LATENT
from ..plan.vae_tiles import LEAST_LATENT
from .live_tensors import LiveTensors
from .meta_model import set_parameters
from .vae_tiles import decoded_frames

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan

STEADY_AFTER = 3
"""Latent frames after which every further one takes the same."""


def decode_pixel_bytes(config: Mapping[str, Any], latent_frames: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes for each latent pixel that is decoded at once in `dtype`, in a video of so many latent frames.

    Counted are all tensors beside the weights, and one copy of what a convolution reads and writes: its library may
    order both anew (oneDNN and cuDNN do).
    """
    return _counted(_key(config), min(latent_frames, STEADY_AFTER), dtype, _decode)


def encode_pixel_bytes(config: Mapping[str, Any], latent_frames: int, dtype: torch.dtype = torch.float32) -> int:
    """The same of encoding a video of so many latent frames, beside the video itself."""
    return _counted(_key(config), min(latent_frames, STEADY_AFTER), dtype, _encode)


def _key(config: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in config.items() if not name.startswith("_")}, sort_keys=True)


def _decode(vae: AutoencoderKLWan, latent_frames: int) -> LiveTensors:
    latents = torch.empty(1, vae.config.z_dim, latent_frames, LEAST_LATENT, LEAST_LATENT, dtype=vae.dtype)
    counted = LiveTensors()
    with counted:
        for frames in decoded_frames(vae, latents):
            del frames
    return counted


def _encode(vae: AutoencoderKLWan, latent_frames: int) -> LiveTensors:
    side = LEAST_LATENT * vae.spatial_compression_ratio
    video = torch.empty(1, 3, FRAMES_PER_LATENT * (latent_frames - 1) + 1, side, side, dtype=vae.dtype)
    counted = LiveTensors()
    with counted:
        vae.encode(video)
    return counted


@functools.cache
def _counted(
    config: str, latent_frames: int, dtype: torch.dtype, work: Callable[[AutoencoderKLWan, int], LiveTensors]
) -> int:
    from diffusers import AutoencoderKLWan

    # Inference mode shows fewer operations, and so less of what they make on their way.
    with torch.inference_mode(False), torch.device("meta"), torch.no_grad():
        vae = AutoencoderKLWan.from_config(json.loads(config)).eval()
        set_parameters(vae, {name: tensor.to(dtype) for name, tensor in vae.state_dict().items()})
        counted = work(vae, latent_frames)
    return -(-counted.convolution_peak // LEAST_LATENT**2)
