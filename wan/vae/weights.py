"""Wan VAE weights: files, and parameter names in two formats.

Only names differ: shapes are the same in both, and nothing is transposed.

A diffusers `vae` folder has a config. A single file (ComfyUI's `wan_2.1_vae.safetensors`,
`wan2.2_vae.safetensors`) has native or diffusers names, and sizes follow from shapes. In both,
parameters get the names in diffusers' AutoencoderKLWan.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...offload.formats import FileTensor
from ..checkpoint import components
from ..checkpoint.files import CheckpointError, read_checkpoint
from ..latents.space import SPACES, WAN21, WAN22, LatentSpace
from .memory import decode_pixel_bytes
from .tiles import decoded_frames

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan


# Module places as patterns, with native places: in both VAEs, and in the blocks of each.
_PLACES = {
    r"quant_conv": "conv1",
    r"post_quant_conv": "conv2",
    r"(encoder|decoder)\.conv_in": r"\1.conv1",
    r"(encoder|decoder)\.norm_out": r"\1.head.0",
    r"(encoder|decoder)\.conv_out": r"\1.head.2",
    r"(encoder|decoder)\.mid_block\.resnets\.0": r"\1.middle.0",
    r"(encoder|decoder)\.mid_block\.attentions\.0": r"\1.middle.1",
    r"(encoder|decoder)\.mid_block\.resnets\.1": r"\1.middle.2",
}
# The native Wan2.1 decoder is one flat list: three residual blocks and a resampler for each
# diffusers up block.
_WAN21_PLACES = {
    r"encoder\.down_blocks\.(\d+)": r"encoder.downsamples.\1",
    **{
        rf"decoder\.up_blocks\.{block}\.{item}": f"decoder.upsamples.{4 * block + index}"
        for block in range(4)
        for index, item in enumerate(
            (r"resnets\.0", r"resnets\.1", r"resnets\.2", r"upsamplers\.0")
        )
    },
}
# In the Wan2.2 VAE a block's resampler is the last item in the block's list.
_WAN22_PLACES = {
    r"encoder\.down_blocks\.(\d+)\.resnets\.(\d+)": r"encoder.downsamples.\1.downsamples.\2",
    r"encoder\.down_blocks\.(\d+)\.downsampler": r"encoder.downsamples.\1.downsamples.2",
    r"decoder\.up_blocks\.(\d+)\.resnets\.(\d+)": r"decoder.upsamples.\1.upsamples.\2",
    r"decoder\.up_blocks\.(\d+)\.upsampler": r"decoder.upsamples.\1.upsamples.3",
}
# Layers in a residual block. Other layers have the same names.
_RESNET = {
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}


@dataclass(frozen=True, kw_only=True)
class VaeFamily:
    """VAEs with one latent space, in any width."""

    space: LatentSpace
    config: Mapping[str, Any]
    """Config values shared by all."""
    widths: Mapping[str, tuple[str, int]]
    """Config name -> convolution and dimension with this width."""
    places: Mapping[str, str]
    """Native module places in the blocks, by pattern."""
    file: str
    """Name of ComfyUI's single file."""

    @property
    def remedy(self) -> str:
        """Advice to use the usual file."""
        return f"use {self.file} in fp32 or bf16"

    def native_name(self, name: str) -> str:
        """Return the parameter name in ComfyUI's single file.

        Raises:
            ValueError: these VAEs have no such parameter.
        """
        module, _, leaf = name.rpartition(".")
        for place, native in {**_PLACES, **self.places}.items():
            if found := re.fullmatch(rf"{place}(?:\.(?P<layer>.+))?", module):
                parts = (found.expand(native), _RESNET.get(found["layer"], found["layer"]), leaf)
                return ".".join(part for part in parts if part)
        raise ValueError(f"{name!r} is not a parameter of the VAE of {self.space.models}")


_STAGES = {
    "_class_name": "AutoencoderKLWan",
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
}

RGB = 3
FIRST_CONVOLUTION = "encoder.conv_in.weight"
LAST_CONVOLUTION = "decoder.conv_out.weight"

FAMILIES = (
    VaeFamily(
        space=WAN21,
        config={**_STAGES, "z_dim": WAN21.channels},
        widths={"base_dim": (FIRST_CONVOLUTION, 0)},
        places=_WAN21_PLACES,
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
        places=_WAN22_PLACES,
        file="wan2.2_vae.safetensors",
    ),
)

NATIVE_MARK = "decoder.middle.0.residual.0.gamma"
DIFFUSERS_MARK = "decoder.mid_block.resnets.0.norm1.gamma"
MARKS = (NATIVE_MARK, DIFFUSERS_MARK)
"""Native and diffusers name of a tensor in every Wan VAE."""
ROOTS = ("encoder", "decoder", "conv1", "conv2", "quant_conv", "post_quant_conv")
ENCODER_ROOTS = ("encoder.", "conv1.", "quant_conv.")
"""Name prefixes of tensors for encoding only."""
# Names found only in the Wan2.2 VAE: two native and two diffusers names.
WAN22_MARKS = (
    "decoder.upsamples.0.upsamples.",
    "encoder.downsamples.0.downsamples.",
    "encoder.down_blocks.0.resnets.0.norm1.gamma",
    "decoder.up_blocks.0.upsampler.",
)
# Names in SD and Flux VAEs, native and in diffusers.
IMAGE_VAE_MARKS = ("decoder.up.0.block.0.", "decoder.up_blocks.0.resnets.0.norm1.weight")

REMEDY = "use " + ", or ".join(f"{family.file} ({family.space.models})" for family in FAMILIES)


def family_of(space: LatentSpace) -> VaeFamily:
    """Return the VAEs for this space."""
    return FAMILIES[SPACES.index(space)]


@dataclass(frozen=True, kw_only=True, eq=False)
class VaeWeights:
    """Config and weight locations of an opened VAE."""

    path: Path
    """Config file, for messages."""
    family: VaeFamily
    config: Mapping[str, Any]
    """Config for diffusers' AutoencoderKLWan."""
    file: components.ComponentFile
    """Weights and scales by parameter."""

    lacking = "has no encoder"
    dtypes = (torch.float32, torch.bfloat16)
    """Compute dtypes. Not fp16: activations may exceed the largest fp16 number."""

    @property
    def space(self) -> LatentSpace:
        return self.family.space

    @property
    def encodes(self) -> bool:
        """False for a file with a decoder only."""
        return FIRST_CONVOLUTION in self.file.weights

    def build(self) -> AutoencoderKLWan:
        """Return the VAE on `meta` without weights, and without an encoder if the file has none."""
        vae = _build(self.path, self.config)
        if self.encodes:
            return vae
        return _without_encoder(vae)

    def decode_pixel_bytes(self, latent_frames: int, dtype: torch.dtype) -> int:
        """Return the bytes per latent pixel decoded at once. See `memory.decode_pixel_bytes`."""
        return decode_pixel_bytes(self.config, latent_frames, dtype)

    def decoder_input(self, latents: torch.Tensor) -> torch.Tensor:
        """Return raw latents as they are."""
        return latents

    def decoded_frames(
        self, vae: AutoencoderKLWan, latents: torch.Tensor, *, whole: bool
    ) -> Iterator[torch.Tensor]:
        """Return the iterator from `tiles.decoded_frames`."""
        return decoded_frames(vae, latents, whole=whole)

    def remedy(self, space: LatentSpace) -> str:
        """Return the file name for latents in this space."""
        return family_of(space).file


def open_vae_folder(folder: Path) -> VaeWeights:
    """Open a diffusers `vae` folder.

    Raises:
        CheckpointFileError: a file is missing, damaged, or for another model.
    """
    config = components.read_config(folder)
    # Any other width counts as Wan2.1, so `require_config` reports the width.
    family = family_of(WAN22 if config.get("z_dim") == WAN22.channels else WAN21)
    model = f"the VAE of {' or of '.join(space.models for space in SPACES)}"
    components.require_config(folder, config, family.config, family.widths, model)
    stored = components.component_file(read_checkpoint(folder), marks=MARKS, roots=ROOTS)
    path = folder / components.CONFIG
    file = components.match_weights(folder, stored, _build(path, config), remedy=family.remedy)
    return VaeWeights(path=path, family=family, config=config, file=file)


def open_vae_file(path: Path, stored: components.ComponentFile) -> VaeWeights:
    """Open a single file with these tensors.

    Raises:
        CheckpointFileError: the file is damaged or for another model.
    """
    tensors = stored.weights
    family = _family_in(path, tensors)
    key_of = family.native_name if NATIVE_MARK in tensors else str
    decodes_only = not any(key.startswith("encoder.") for key in tensors)
    if decodes_only:
        tensors = {
            key: tensor for key, tensor in tensors.items() if not key.startswith(ENCODER_ROOTS)
        }
    _refuse_other_heads(path, tensors, key_of(LAST_CONVOLUTION), family)
    places = family.widths
    if decodes_only:
        # The first convolution belongs to the encoder, so the decoder's last one gives the width.
        places = dict.fromkeys(places, (LAST_CONVOLUTION, 1))
    widths = {
        name: components.convolution_width(path, tensors, key_of(parameter), at, kernel=3)
        for name, (parameter, at) in places.items()
    }
    config = {**family.config, **widths}
    vae = _build(path, config)
    if decodes_only:
        vae = _without_encoder(vae)
    names = {key_of(name): name for name, _ in vae.named_parameters()}
    renamed: dict[str, FileTensor] = {}
    for key, tensor in tensors.items():
        if names.get(key, key) in renamed:
            raise CheckpointError(path, f"{key} means the same parameter as another key")
        renamed[names.get(key, key)] = tensor
    scales = {names[key]: scale for key, scale in stored.scales.items() if key in names}
    file = components.match_weights(
        path,
        replace(stored, weights=renamed, scales=scales),
        vae,
        remedy=family.remedy,
        described_by="the rest of the file",
        key_of=key_of,
    )
    return VaeWeights(path=path, family=family, config=config, file=file)


def _build(path: Path, config: Mapping[str, Any]) -> AutoencoderKLWan:
    from diffusers import AutoencoderKLWan

    return components.build_on_meta(path, lambda: AutoencoderKLWan.from_config(config))


def _without_encoder(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    vae.encoder = None
    # `quant_conv` belongs to the encoder. `post_quant_conv` belongs to the decoder, and stays.
    vae.quant_conv = None
    return vae


def _family_in(path: Path, tensors: Mapping[str, FileTensor]) -> VaeFamily:
    for key, tensor in tensors.items():
        if key.startswith(WAN22_MARKS):
            return family_of(WAN22)
        if key.startswith(IMAGE_VAE_MARKS):
            raise CheckpointError(
                path, f"is the VAE of an image model ({key} {list(tensor.shape)}); {REMEDY}"
            )
    if not any(mark in tensors for mark in MARKS):
        first = next((f"{key} {list(tensor.shape)}" for key, tensor in tensors.items()), "none")
        raise CheckpointError(
            path, f"is not a VAE of Wan: it has {len(tensors)} tensors (first: {first}); {REMEDY}"
        )
    return family_of(WAN21)


def _refuse_other_heads(
    path: Path, tensors: Mapping[str, FileTensor], key: str, family: VaeFamily
) -> None:
    """Refuse a decoder with more output pixels than the published VAE, as in enlarging VAEs."""
    head = tensors.get(key)
    usual = int(family.config.get("out_channels", RGB))
    if head is None or not head.shape or head.shape[0] == usual:
        return
    times = isqrt(head.shape[0] // usual)
    if times > 1 and head.shape[0] == usual * times**2:
        size = f"enlarges the video {times} times"
        if times == 2:
            size = "doubles the size of the video"
        reason = f"is a VAE that {size}, which is not supported"
        found = f"{key} has {head.shape[0]} channels"
        raise CheckpointError(path, f"{reason} ({found}): use {family.file}")
    raise CheckpointError(
        path, f"{key} has {head.shape[0]} channels; {usual} are expected: use {family.file}"
    )
