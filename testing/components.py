"""Tiny VAEs, text encoders and pipeline folders on disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, __version__
from safetensors.torch import save_file
from torch import nn
from transformers import UMT5EncoderModel

from ..wan.latents import WAN21, WAN22
from ..wan.vae import family_of
from .quantised import QuantiseLayers, save_single_file
from .tokenizer import save_tokenizer, sentencepiece_model


def save_vae_file(vae: AutoencoderKLWan, path: Path) -> None:
    """Write the VAE as ComfyUI's single file, in fp32."""
    family = family_of(WAN22 if vae.config.is_residual else WAN21)
    save_single_file(
        {family.native_name(name): tensor for name, tensor in vae.state_dict().items()}, path
    )


def save_text_encoder_folders(
    encoder: UMT5EncoderModel, pipeline: Path, *, dtype: torch.dtype
) -> None:
    """Write `text_encoder`, in `dtype`, and `tokenizer` for a diffusers pipeline folder."""
    folder = pipeline / "text_encoder"
    folder.mkdir(parents=True)
    config = {**encoder.config.to_diff_dict(), "architectures": ["UMT5EncoderModel"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(_parameters(encoder, dtype), folder / "model.safetensors", {"format": "pt"})
    save_tokenizer(pipeline / "tokenizer")


def save_text_encoder_file(
    encoder: UMT5EncoderModel,
    path: Path,
    *,
    dtype: torch.dtype,
    quantised: QuantiseLayers | None = None,
) -> None:
    """Write ComfyUI's single file, which includes the tokenizer.

    `quantised` writes the block matrices.
    """
    blocks = encoder.encoder.block.named_modules(prefix="encoder.block")
    linears = {name: module for name, module in blocks if isinstance(module, nn.Linear)}
    # torch warns about a buffer that cannot be written, so this is a bytearray.
    tokenizer = torch.frombuffer(bytearray(sentencepiece_model()), dtype=torch.uint8)
    save_single_file(
        {**_parameters(encoder, dtype), "spiece_model": tokenizer},
        path,
        layers=linears,
        quantised=quantised,
    )


def _parameters(encoder: UMT5EncoderModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the parameters in `dtype`.

    `named_parameters` has the shared token table once, as the files do.
    """
    return {name: parameter.to(dtype) for name, parameter in encoder.named_parameters()}


SHARED = ("vae", "text_encoder", "tokenizer")
"""Components shared by all Wan2.1 and Wan2.2 A14B pipelines."""

COMPONENTS = {
    "scheduler": ("diffusers", "UniPCMultistepScheduler"),
    "text_encoder": ("transformers", "UMT5EncoderModel"),
    "tokenizer": ("transformers", "T5TokenizerFast"),
    "transformer": ("diffusers", "WanTransformer3DModel"),
    "vae": ("diffusers", "AutoencoderKLWan"),
}


def write_settings(
    pipeline: Path, *, flow_shift: float, boundary_ratio: float | None = None, **index: object
) -> None:
    """Write the scheduler and `model_index.json`.

    Args:
        boundary_ratio: boundary for a pipeline with two experts. None: single expert.
        index: other index entries, including components in addition to `COMPONENTS`.
    """
    UniPCMultistepScheduler(
        num_train_timesteps=1000,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=flow_shift,
    ).save_pretrained(pipeline / "scheduler")
    index = {
        "_class_name": "WanPipeline",
        "_diffusers_version": __version__,
        "boundary_ratio": boundary_ratio,
        "expand_timesteps": False,
        # diffusers reads (None, None) as a component that does not exist.
        "transformer_2": (None, None) if boundary_ratio is None else COMPONENTS["transformer"],
        **COMPONENTS,
        # This comes last, because `index` may replace entries, such as the class name.
        **index,
    }
    (pipeline / "model_index.json").write_text(
        json.dumps(dict(sorted(index.items())), indent=2) + "\n", encoding="utf-8"
    )


def link_components(source: Path, target: Path, components: Iterable[str]) -> None:
    """Hard-link components from the pipeline `source` into `target`.

    Copy them if the file system has no hard links.
    """
    for component in components:
        (target / component).mkdir(parents=True)
        for file in sorted((source / component).iterdir()):
            try:
                os.link(file, target / component / file.name)
            except OSError:
                # The file system has no hard links, or the folders are on two.
                shutil.copyfile(file, target / component / file.name)
