"""Where the weights of the Wan2.1 VAE lie, in either of the two forms it comes in.

A diffusers `vae` folder has a config; a single file (ComfyUI's `wan_2.1_vae.safetensors`) has native names, or those of
diffusers, and its sizes follow from shapes. Parameters go by the names of diffusers' AutoencoderKLWan in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKLWan
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

from ..offload.safetensors_header import FileTensor
from .component import (
    CONFIG,
    build_on_meta,
    component_weights,
    match_weights,
    read_config,
    require_config,
    require_sizes,
)
from .native_keys import native_vae_name
from .stored import CheckpointError, read_stored

# What makes a VAE one of 16 channels, 8 x 8 pixels and 4 frames per latent; its width is its own affair.
WAN21 = {
    "_class_name": "AutoencoderKLWan",
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
}

FIRST_CONVOLUTION = "encoder.conv_in.weight"
NATIVE_MARK = "encoder.downsamples.0."
DIFFUSERS_MARK = "encoder.down_blocks.0."
WAN22_MARKS = (
    "decoder.upsamples.0.upsamples.",
    "encoder.downsamples.0.downsamples.",
    "encoder.down_blocks.0.resnets.0.norm1.gamma",
)
IMAGE_VAE_MARKS = ("decoder.up.0.block.0.", "decoder.up_blocks.0.resnets.0.norm1.weight")

REMEDY = "Wan2.2 A14B has the VAE of Wan2.1: use wan_2.1_vae.safetensors"


@dataclass(frozen=True, kw_only=True, eq=False)
class VaeWeights:
    """An opened VAE: `path` and `config` to build it from, and where each of its parameters lies."""

    path: Path
    config: Mapping[str, Any]
    weights: Mapping[str, FileTensor]

    def build(self) -> AutoencoderKLWan:
        """The VAE without its weights."""
        return _build(self.path, self.config)


def open_vae_folder(folder: Path) -> VaeWeights:
    """Open a `vae` folder of diffusers.

    Raises:
        CheckpointFileError: a file is missing, damaged, or that of another model.
    """
    config = read_config(folder)
    require_config(folder, config, WAN21, "the VAE of Wan2.1 or of Wan2.2 A14B (the 5B model has another)")
    require_sizes(folder, config, ["base_dim"])
    path = folder / CONFIG
    return VaeWeights(path=path, config=config, weights=component_weights(folder, _build(path, config)))


def open_vae_file(path: Path) -> VaeWeights:
    """Open a single file.

    Raises:
        CheckpointFileError: the file is missing, damaged, a pickle, or that of another model.
    """
    stored = read_stored(path).tensors
    _refuse_other_models(path, stored)
    names = _parameter_names(path, stored)
    tensors = {names[key]: tensor for key, tensor in stored.items()}
    config = {**WAN21, "base_dim": _width(path, tensors)}
    native = names.keys() != set(names.values())
    weights = match_weights(
        path,
        tensors,
        _build(path, config),
        described_by="the rest of the file",
        key_of=native_vae_name if native else str,
    )
    return VaeWeights(path=path, config=config, weights=weights)


def _build(path: Path, config: Mapping[str, Any]) -> AutoencoderKLWan:
    return build_on_meta(path, lambda: AutoencoderKLWan.from_config(config))


def _refuse_other_models(path: Path, tensors: Mapping[str, FileTensor]) -> None:
    for key, tensor in tensors.items():
        if key.startswith(WAN22_MARKS):
            raise CheckpointError(
                path, f"is the VAE of Wan2.2 5B, of 48 channels ({key} {list(tensor.shape)}); {REMEDY}"
            )
        if key.startswith(IMAGE_VAE_MARKS):
            raise CheckpointError(path, f"is the VAE of an image model ({key} {list(tensor.shape)}); {REMEDY}")
    if not any(key.startswith((NATIVE_MARK, DIFFUSERS_MARK)) for key in tensors):
        first = next((f"{key} {list(tensor.shape)}" for key, tensor in tensors.items()), "none")
        raise CheckpointError(path, f"is no VAE of Wan: it holds {len(tensors)} tensors, {first} first; {REMEDY}")


def _parameter_names(path: Path, keys: Iterable[str]) -> dict[str, str]:
    """The parameter name of every key; diffusers' own names stay."""
    keys = list(keys)
    try:
        # The converter moves values from key to key without looking at them, so the keys themselves can be the values.
        renamed = convert_wan_vae_to_diffusers({key: key for key in keys})
    except (ValueError, LookupError) as err:
        raise CheckpointError(path, f"holds a tensor whose name no VAE of Wan has ({err})") from err
    names = {key: name for name, key in renamed.items()}
    for key in keys:
        if key not in names:
            raise CheckpointError(path, f"{key} means the same parameter as another key")
    return names


def _width(path: Path, tensors: Mapping[str, FileTensor]) -> int:
    first = tensors.get(FIRST_CONVOLUTION)
    if first is None:
        raise CheckpointError(path, f"{native_vae_name(FIRST_CONVOLUTION)} is missing")
    if len(first.shape) != 5 or 0 in first.shape:
        raise CheckpointError(
            path, f"{native_vae_name(FIRST_CONVOLUTION)} is {list(first.shape)}; [width, 3, 3, 3, 3] is expected"
        )
    return first.shape[0]
