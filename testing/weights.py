"""Tiny models with seeded random weights: a Wan expert, the VAE, the UMT5 encoder.

Weights are drawn from a separate generator in parameter name order, so seed and shape determine
them. The scales keep activations finite and of order 1 at any depth, and every input (latents,
timestep, text) visibly changes the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import nn
from transformers import UMT5Config, UMT5EncoderModel

from ..shapes import HEAD_DIM
from ..wan.checkpoint import NoInitialValues
from ..wan.latents import WAN21, WAN22, LatentSpace
from ..wan.vae import TinyDecoder, family_of

TEXT_DIM = 4096
TINY_WIDTH: dict[str, Any] = {"heads": 2, "ffn_dim": 256}
"""Width of all experts in the test model. Two heads are the minimum for Ulysses with two
workers."""

ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class TinyShape:
    """Shape of a tiny expert.

    Args:
        in_channels: 16 for text to video, 36 for image to video, 52 or 48 for Fun Control, 48, 100
            or 148 for 5B.
        out_channels: 16 or 48. 0: 48 for the input channels 48, 100 and 148 (5B), else 16. Wan2.1
            Fun Control, with 48 input channels, needs 16.
        image_dim: width of image embeddings for Wan2.1 I2V's image branch. 0: no image branch.
        reference: add Fun Control's `ref_conv`.
    """

    layers: int = 4
    heads: int = 2
    in_channels: int = 16
    ffn_dim: int = 512
    text_dim: int = TEXT_DIM
    image_dim: int = 0
    out_channels: int = 0
    reference: bool = False

    @property
    def latent_channels(self) -> int:
        """Latent channels."""
        return self.out_channels or (
            WAN22.channels if self.in_channels in {48, 100, 148} else WAN21.channels
        )


def expert_config(shape: TinyShape) -> dict[str, int]:
    """Return the arguments for the diffusers model."""
    config = {
        "num_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "attention_head_dim": HEAD_DIM,
        "in_channels": shape.in_channels,
        "out_channels": shape.latent_channels,
        "ffn_dim": shape.ffn_dim,
        "text_dim": shape.text_dim,
    }
    if shape.image_dim:
        config |= {"image_dim": shape.image_dim, "added_kv_proj_dim": shape.heads * HEAD_DIM}
    return config


def make_expert(shape: TinyShape, *, seed: int) -> WanTransformer3DModel:
    """Return a random expert in fp32, in eval mode and without gradients."""
    return randomised(lambda: _expert(shape), seed)


def _expert(shape: TinyShape) -> WanTransformer3DModel:
    model = WanTransformer3DModel(**expert_config(shape))
    if shape.reference:
        model.ref_conv = nn.Conv2d(
            shape.latent_channels, shape.heads * HEAD_DIM, kernel_size=2, stride=2
        )
    return model


def make_vae(*, seed: int, base_dim: int = 8) -> AutoencoderKLWan:
    """Return a random fp32 Wan2.1 VAE: 16 latent channels, 8 x 8 pixels and 4 frames per latent."""
    return randomised(lambda: AutoencoderKLWan(base_dim=base_dim), seed)


def make_wan22_vae(*, seed: int, base_dim: int = 4, decoder_base_dim: int = 8) -> AutoencoderKLWan:
    """Return a random Wan2.2 5B VAE in fp32.

    It has 48 latent channels, and 16 x 16 pixels and 4 frames per latent.
    """
    widths = {"base_dim": base_dim, "decoder_base_dim": decoder_base_dim}
    # diffusers' defaults are for the 16 channels of Wan2.1.
    spread = {"latents_mean": list(WAN22.mean), "latents_std": list(WAN22.std)}
    return randomised(
        lambda: AutoencoderKLWan.from_config({**family_of(WAN22).config, **widths, **spread}), seed
    )


TINY_VAE_WIDTHS = (256, 128, 64, 64)
"""Widths of the published tiny VAEs. The encoder layers have the last one."""


def make_tiny_vae(
    space: LatentSpace, *, seed: int, widths: tuple[int, ...] = (16, 12, 8, 8)
) -> dict[str, torch.Tensor]:
    """Return random fp32 tensors for a tiny VAE, decoder and encoder, with the published names."""
    decoder = randomised(lambda: TinyDecoder(space, widths), seed)
    shapes = _tiny_encoder_shapes(
        space.channels, decoder.state_dict()["decoder.22.bias"].numel(), widths[-1]
    )
    generator = torch.Generator().manual_seed(seed)
    encoder = {
        name: random_values(name, torch.Size(shape), generator) for name, shape in shapes.items()
    }
    found = {**encoder, **decoder.state_dict()}
    found["decoder.22.bias"] += 0.5  # most values are within 0..1
    return found


def _tiny_encoder_shapes(channels: int, colours: int, width: int) -> dict[str, tuple[int, ...]]:
    def convolution(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (outputs, inputs, 3, 3), f"{name}.bias": (outputs,)}

    shapes = convolution("encoder.0", colours, width)
    # Each pair has the number of a stage's first layer, and the frames merged into one there.
    for first, frames in ((2, 2), (7, 2), (12, 1)):
        shapes[f"encoder.{first}.conv.weight"] = (width, frames * width, 1, 1)
        shapes[f"encoder.{first + 1}.weight"] = (width, width, 3, 3)
        for block in range(first + 2, first + 5):
            # A block also reads the previous frame, as `width` further channels.
            for layer, inputs in ((0, 2 * width), (2, width), (4, width)):
                shapes |= convolution(f"encoder.{block}.conv.{layer}", inputs, width)
    return shapes | convolution("encoder.17", width, channels)


def make_text_encoder(*, seed: int, vocabulary: int, layers: int = 2) -> UMT5EncoderModel:
    """Return a random fp32 UMT5 encoder with the width of the real one (4096), otherwise small."""
    config = UMT5Config(
        vocab_size=vocabulary,
        d_model=TEXT_DIM,
        d_kv=16,
        d_ff=128,
        num_heads=4,
        num_layers=layers,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
    return randomised(lambda: UMT5EncoderModel(config), seed)


def randomised(build: Callable[[], ModelT], seed: int) -> ModelT:
    """Build a model with parameters drawn from that seed, in eval mode and without gradients."""
    # Some layers draw values without `torch.nn.init`, from the caller's random state.
    with torch.random.fork_rng(devices=[]), NoInitialValues():
        model = build()
    generator = torch.Generator().manual_seed(seed)
    # In name order, so that values do not depend on the order of registration.
    for name, parameter in sorted(model.named_parameters()):
        parameter.data.copy_(random_values(name, parameter.shape, generator))
    return model.eval().requires_grad_(False)


def random_values(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Return fp32 values for the parameter of that name, on the device of the generator."""
    noise = torch.randn(shape, generator=generator, device=generator.device)
    if name.endswith("bias"):
        return 0.1 * noise
    if name.endswith("attn2.norm_q.weight"):
        # Attention must be sharp enough for a few words to matter among hundreds of rows of
        # padding.
        return 2.0 + 0.1 * noise
    if "norm" in name or name.endswith("gamma"):
        return 1.0 + 0.1 * noise
    if name.endswith("scale_shift_table"):
        return 0.5 * noise
    if name.endswith(("shared.weight", "embed_tokens.weight", "relative_attention_bias.weight")):
        return noise
    # Matrices and convolutions map inputs of order 1 to outputs of order 1.
    return noise / math.sqrt(math.prod(shape[1:]))
