"""Writers of the test model's VAE and text encoder, in the layouts of diffusers and ComfyUI."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import save_file
from torch import nn
from transformers import UMT5EncoderModel

from ..wan import native_vae_name, native_wan22_vae_name
from .fp8 import Fp8Layout, fp8_metadata, fp8_tensors
from .tokenizer import save_tokenizer, sentencepiece_model


def save_vae_folder(vae: AutoencoderKLWan, folder: Path) -> None:
    """Write the `vae` folder of a diffusers pipeline, in fp32."""
    vae.save_pretrained(folder)


def save_vae_file(vae: AutoencoderKLWan, path: Path) -> None:
    """Write the VAE as ComfyUI's single file, in fp32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    native = native_wan22_vae_name if vae.config.is_residual else native_vae_name
    save_file({native(name): tensor for name, tensor in vae.state_dict().items()}, path, {"format": "pt"})


def save_text_encoder_folders(encoder: UMT5EncoderModel, pipeline: Path, *, dtype: torch.dtype) -> None:
    """Write `text_encoder`, in `dtype`, and `tokenizer` of a diffusers pipeline folder."""
    folder = pipeline / "text_encoder"
    folder.mkdir(parents=True)
    config = {**encoder.config.to_diff_dict(), "architectures": ["UMT5EncoderModel"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(_parameters(encoder, dtype), folder / "model.safetensors", {"format": "pt"})
    save_tokenizer(pipeline / "tokenizer")


def save_text_encoder_file(
    encoder: UMT5EncoderModel, path: Path, *, dtype: torch.dtype, fp8: Fp8Layout | None = None
) -> None:
    """Write ComfyUI's single file, which includes the tokenizer; `fp8` quantises the matrices of the blocks."""
    tensors, metadata = _parameters(encoder, dtype), {"format": "pt"}
    if fp8 is not None:
        blocks = encoder.encoder.block.named_modules(prefix="encoder.block")
        linears = {name: module for name, module in blocks if isinstance(module, nn.Linear)}
        tensors |= fp8_tensors(linears, fp8)
        metadata |= fp8_metadata(linears, fp8)
    tensors["spiece_model"] = torch.frombuffer(bytearray(sentencepiece_model()), dtype=torch.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata)


def _parameters(encoder: UMT5EncoderModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the parameters in `dtype`; `named_parameters` has the shared token table once, as the files do."""
    return {name: parameter.to(dtype) for name, parameter in encoder.named_parameters()}
