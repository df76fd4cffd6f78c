"""Tiny VAEs, text encoders and pipeline folders on disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, __version__
from safetensors.torch import save_file
from torch import nn
from transformers import UMT5EncoderModel

from ..wan import WAN21, WAN22, family_of
from .number_formats import MixedLayout
from .quantised import Fp8Layout, save_single_file
from .tokenizer import save_tokenizer, sentencepiece_model


def save_vae_folder(vae: AutoencoderKLWan, folder: Path) -> None:
    """Write the `vae` folder of a diffusers pipeline, in fp32."""
    vae.save_pretrained(folder)


def save_vae_file(vae: AutoencoderKLWan, path: Path) -> None:
    """Write the VAE as ComfyUI's single file, in fp32."""
    family = family_of(WAN22 if vae.config.is_residual else WAN21)
    save_single_file({family.native_name(name): tensor for name, tensor in vae.state_dict().items()}, path)


def save_text_encoder_folders(encoder: UMT5EncoderModel, pipeline: Path, *, dtype: torch.dtype) -> None:
    """Write `text_encoder`, in `dtype`, and `tokenizer` of a diffusers pipeline folder."""
    folder = pipeline / "text_encoder"
    folder.mkdir(parents=True)
    config = {**encoder.config.to_diff_dict(), "architectures": ["UMT5EncoderModel"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(_parameters(encoder, dtype), folder / "model.safetensors", {"format": "pt"})
    save_tokenizer(pipeline / "tokenizer")


def save_text_encoder_file(
    encoder: UMT5EncoderModel, path: Path, *, dtype: torch.dtype, fp8: Fp8Layout | MixedLayout | None = None
) -> None:
    """Write ComfyUI's single file, which includes the tokenizer; `fp8` quantises the matrices of the blocks."""
    blocks = encoder.encoder.block.named_modules(prefix="encoder.block")
    linears = {name: module for name, module in blocks if isinstance(module, nn.Linear)}
    tokenizer = torch.frombuffer(bytearray(sentencepiece_model()), dtype=torch.uint8)
    save_single_file({**_parameters(encoder, dtype), "spiece_model": tokenizer}, path, layers=linears, fp8=fp8)


def _parameters(encoder: UMT5EncoderModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the parameters in `dtype`; `named_parameters` has the shared token table once, as the files do."""
    return {name: parameter.to(dtype) for name, parameter in encoder.named_parameters()}


SHARED = ("vae", "text_encoder", "tokenizer")
"""Components that all pipelines of Wan2.1 and Wan2.2 A14B share."""

COMPONENTS = {
    "scheduler": ("diffusers", "UniPCMultistepScheduler"),
    "text_encoder": ("transformers", "UMT5EncoderModel"),
    "tokenizer": ("transformers", "T5TokenizerFast"),
    "transformer": ("diffusers", "WanTransformer3DModel"),
    "vae": ("diffusers", "AutoencoderKLWan"),
}


def write_settings(
    pipeline: Path,
    *,
    flow_shift: float,
    kind: str = "WanPipeline",
    boundary_ratio: float | None = None,
    more: Mapping[str, tuple[str | None, str | None]] = MappingProxyType({}),
    expand_timesteps: bool = False,
) -> None:
    """Write the scheduler and `model_index.json`.

    Args:
        kind: class of the pipeline.
        boundary_ratio: boundary of a pipeline with two experts; None: single expert.
        more: components in addition to `COMPONENTS`.
        expand_timesteps: use one timestep per token, as TI2V-5B does.
    """
    UniPCMultistepScheduler(
        num_train_timesteps=1000, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift
    ).save_pretrained(pipeline / "scheduler")
    index = {
        "_class_name": kind,
        "_diffusers_version": __version__,
        "boundary_ratio": boundary_ratio,
        "expand_timesteps": expand_timesteps,
        "transformer_2": (None, None) if boundary_ratio is None else COMPONENTS["transformer"],
        **COMPONENTS,
        **more,
    }
    (pipeline / "model_index.json").write_text(
        json.dumps(dict(sorted(index.items())), indent=2) + "\n", encoding="utf-8"
    )


def link_components(source: Path, target: Path, components: Iterable[str]) -> None:
    """Hard-link components of the pipeline `source` into `target`; copy them if the file system has no hard links."""
    for component in components:
        (target / component).mkdir(parents=True)
        for file in sorted((source / component).iterdir()):
            try:
                os.link(file, target / component / file.name)
            except OSError:
                shutil.copyfile(file, target / component / file.name)
