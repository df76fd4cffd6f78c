"""Weights of a VAE of Wan: files, names of parameters in each of its two formats.

Only names differ: shapes are the same in both, and nothing is transposed.

A diffusers `vae` folder has a config. A single file (ComfyUI's `wan_2.1_vae.safetensors`, `wan2.2_vae.safetensors`) has
native names or those of diffusers, and its sizes follow from shapes. In both, parameters get the names of diffusers'
AutoencoderKLWan.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...offload import FileTensor
from ..checkpoint.components import (
    CONFIG,
    build_on_meta,
    component_weights,
    match_weights,
    read_config,
    require_config,
    require_sizes,
)
from ..checkpoint.files import CheckpointError, read_checkpoint
from ..latent_space import SPACES, WAN21, WAN22, LatentSpace

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan


_WHOLE = {
    "quant_conv": "conv1",
    "post_quant_conv": "conv2",
    "encoder.conv_in": "encoder.conv1",
    "decoder.conv_in": "decoder.conv1",
    "encoder.norm_out": "encoder.head.0",
    "decoder.norm_out": "decoder.head.0",
    "encoder.conv_out": "encoder.head.2",
    "decoder.conv_out": "decoder.head.2",
}

_RESNET = {
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}

_MIDDLE = re.compile(r"(encoder|decoder)\.mid_block\.(resnets|attentions)\.(\d+)\.(.+)")
_DOWN = re.compile(r"encoder\.down_blocks\.(\d+)\.(.+)")
_UP = re.compile(r"decoder\.up_blocks\.(\d+)\.(resnets|upsamplers)\.(\d+)\.(.+)")
_WAN22_BLOCK = re.compile(r"(encoder\.down|decoder\.up)_blocks\.(\d+)\.(?:resnets\.(\d+)|(?:down|up)sampler)\.(.+)")

# The native decoder of Wan2.1 is one flat list: three residual blocks and a resampler for each up block of diffusers.
_LAYERS_PER_UP_BLOCK = 4
# In the VAE of Wan2.2 the resampler of a block is the last item of the block's list.
_WAN22_RESAMPLER = {"encoder.down": 2, "decoder.up": 3}


def native_vae_name(name: str) -> str:
    """Return the native name of a parameter of Wan2.1's `AutoencoderKLWan`, which A14B also uses.

    Raises:
        ValueError: this VAE has no such parameter.
    """
    module, _, leaf = name.rpartition(".")
    native = _outside_blocks(module)
    if native is None and (down := _DOWN.fullmatch(module)):
        index, layer = down.groups()
        native = f"encoder.downsamples.{index}.{_RESNET.get(layer, layer)}"
    if native is None and (up := _UP.fullmatch(module)):
        block, kind, index, layer = up.groups()
        position = _LAYERS_PER_UP_BLOCK * int(block) + (3 if kind == "upsamplers" else int(index))
        native = f"decoder.upsamples.{position}.{_RESNET.get(layer, layer)}"
    if native is None:
        raise ValueError(f"{name!r} is not a parameter of the Wan2.1 VAE")
    return f"{native}.{leaf}"


def native_wan22_vae_name(name: str) -> str:
    """Return the native name of a parameter of Wan2.2 5B's `AutoencoderKLWan`, whose blocks contain nested lists.

    Raises:
        ValueError: this VAE has no such parameter.
    """
    module, _, leaf = name.rpartition(".")
    native = _outside_blocks(module)
    if native is None and (inside := _WAN22_BLOCK.fullmatch(module)):
        half, block, index, layer = inside.groups()
        position = _WAN22_RESAMPLER[half] if index is None else index
        native = f"{half}samples.{block}.{half.partition('.')[2]}samples.{position}.{_RESNET.get(layer, layer)}"
    if native is None:
        raise ValueError(f"{name!r} is not a parameter of the Wan2.2 VAE")
    return f"{native}.{leaf}"


def _outside_blocks(module: str) -> str | None:
    """Return the native name of a module that both VAEs have (first and last layers, middle); None for others."""
    if middle := _MIDDLE.fullmatch(module):
        half, kind, index, layer = middle.groups()
        # The middle is resnet, attention, resnet.
        position = 1 if kind == "attentions" else 2 * int(index)
        return f"{half}.middle.{position}.{_RESNET.get(layer, layer)}"
    return _WHOLE.get(module)


@dataclass(frozen=True, kw_only=True)
class VaeFamily:
    """VAEs of one latent space, in any width."""

    space: LatentSpace
    config: Mapping[str, Any]
    """Config values that all of them share."""
    widths: Mapping[str, tuple[str, int]]
    """Name in the config -> convolution and dimension that have this width."""
    native: Callable[[str], str]
    """Returns the name of a parameter in ComfyUI's single file."""
    file: str
    """Name of ComfyUI's single file."""


_STAGES = {
    "_class_name": "AutoencoderKLWan",
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
}

FIRST_CONVOLUTION = "encoder.conv_in.weight"
LAST_CONVOLUTION = "decoder.conv_out.weight"

FAMILIES = (
    VaeFamily(
        space=WAN21,
        config={**_STAGES, "z_dim": WAN21.channels},
        widths={"base_dim": (FIRST_CONVOLUTION, 0)},
        native=native_vae_name,
        file="wan_2.1_vae.safetensors",
    ),
    VaeFamily(
        space=WAN22,
        config={
            **_STAGES,
            "z_dim": WAN22.channels,
            "is_residual": True,
            "patch_size": 2,
            "in_channels": 12,
            "out_channels": 12,
            "scale_factor_spatial": WAN22.pixels,
        },
        widths={"base_dim": (FIRST_CONVOLUTION, 0), "decoder_base_dim": (LAST_CONVOLUTION, 1)},
        native=native_wan22_vae_name,
        file="wan2.2_vae.safetensors",
    ),
)

NATIVE_MARK = "encoder.downsamples.0."
DIFFUSERS_MARK = "encoder.down_blocks.0."
# Names that only the VAE of Wan2.2 has: two native ones and one of diffusers.
WAN22_MARKS = (
    "decoder.upsamples.0.upsamples.",
    "encoder.downsamples.0.downsamples.",
    "encoder.down_blocks.0.resnets.0.norm1.gamma",
)
# Names of the VAEs of SD and Flux, native and of diffusers.
IMAGE_VAE_MARKS = ("decoder.up.0.block.0.", "decoder.up_blocks.0.resnets.0.norm1.weight")

REMEDY = "use " + ", or ".join(f"{family.file} ({family.space.models})" for family in FAMILIES)


def family_of(space: LatentSpace) -> VaeFamily:
    """Return the VAEs of that space."""
    return FAMILIES[SPACES.index(space)]


@dataclass(frozen=True, kw_only=True, eq=False)
class VaeWeights:
    """Config and weight locations of an opened VAE."""

    path: Path
    """File of the config, for messages."""
    family: VaeFamily
    config: Mapping[str, Any]
    """Config of diffusers' AutoencoderKLWan."""
    weights: Mapping[str, FileTensor]
    """Location of each parameter."""

    def build(self) -> AutoencoderKLWan:
        """Return the VAE on `meta`, without its weights."""
        return _build(self.path, self.config)


def open_vae_folder(folder: Path) -> VaeWeights:
    """Open a `vae` folder of diffusers.

    Raises:
        CheckpointFileError: a file is missing, damaged, or of another model.
    """
    config = read_config(folder)
    family = family_of(WAN22 if config.get("z_dim") == WAN22.channels else WAN21)
    require_config(folder, config, family.config, f"the VAE of {' or of '.join(space.models for space in SPACES)}")
    require_sizes(folder, config, family.widths)
    path = folder / CONFIG
    weights = component_weights(folder, _build(path, config))
    return VaeWeights(path=path, family=family, config=config, weights=weights)


def open_vae_file(path: Path) -> VaeWeights:
    """Open a single file.

    Raises:
        CheckpointFileError: the file is missing, damaged, a pickle, or of another model.
    """
    stored = read_checkpoint(path).tensors
    family = _family_in(path, stored)
    native = any(key.startswith(NATIVE_MARK) for key in stored)
    key_of = family.native if native else str
    widths = {name: _width(path, stored, key_of(parameter), at) for name, (parameter, at) in family.widths.items()}
    config = {**family.config, **widths}
    vae = _build(path, config)
    names = {key_of(name): name for name, _ in vae.named_parameters()}
    tensors: dict[str, FileTensor] = {}
    for key, tensor in stored.items():
        if names.get(key, key) in tensors:
            raise CheckpointError(path, f"{key} means the same parameter as another key")
        tensors[names.get(key, key)] = tensor
    weights = match_weights(path, tensors, vae, described_by="the rest of the file", key_of=key_of)
    return VaeWeights(path=path, family=family, config=config, weights=weights)


def _build(path: Path, config: Mapping[str, Any]) -> AutoencoderKLWan:
    from diffusers import AutoencoderKLWan

    return build_on_meta(path, lambda: AutoencoderKLWan.from_config(config))


def _family_in(path: Path, tensors: Mapping[str, FileTensor]) -> VaeFamily:
    for key, tensor in tensors.items():
        if key.startswith(WAN22_MARKS):
            return family_of(WAN22)
        if key.startswith(IMAGE_VAE_MARKS):
            raise CheckpointError(path, f"is the VAE of an image model ({key} {list(tensor.shape)}); {REMEDY}")
    if not any(key.startswith((NATIVE_MARK, DIFFUSERS_MARK)) for key in tensors):
        first = next((f"{key} {list(tensor.shape)}" for key, tensor in tensors.items()), "none")
        raise CheckpointError(path, f"is not a VAE of Wan: it has {len(tensors)} tensors (first: {first}); {REMEDY}")
    return family_of(WAN21)


def _width(path: Path, tensors: Mapping[str, FileTensor], key: str, dimension: int) -> int:
    convolution = tensors.get(key)
    if convolution is None:
        raise CheckpointError(path, f"{key} is missing")
    shape = convolution.shape
    if len(shape) != 5 or 0 in shape:
        raise CheckpointError(path, f"{key} is {list(shape)}; [out, in, 3, 3, 3] is expected")
    return shape[dimension]
