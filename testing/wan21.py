"""Test models of Wan2.1, which are single models: text to video, image to video, and the CLIP image encoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, CLIPVisionModel

from ..wan import HEADS, PREFIX, WIDTH
from .experts import save_expert_file, save_expert_folder
from .fp8 import Fp8Layout
from .pipeline import link_shared, write_settings
from .weights import TINY_WIDTH, TinyShape, make_expert, randomised

T2V_LAYERS = 30
"""Blocks of the 1.3B model; the 14B ones have 40."""
T2V_SEED, I2V_SEED, CLIP_SEED = 30, 31, 3

T2V_FILE = Path("diffusion_models", "wan2.1_t2v_1.3B_fp16.safetensors")
I2V_FILE = Path("diffusion_models", "wan2.1_i2v_480p_14B_fp8_scaled.safetensors")
CLIP_FILE = Path("clip_vision", "clip_vision_h.safetensors")
T2V_PIPELINE = Path("diffusers", "Wan2.1-T2V-1.3B-Diffusers")


def write_wan21(folder: Path, shared: Path, layers: int, on_progress: Callable[[str], object]) -> None:
    """Write the models below `folder`; `shared` is a pipeline there that has the VAE and the text encoder."""
    on_progress("Wan2.1 text to video")
    t2v = make_expert(TinyShape(layers=min(layers, T2V_LAYERS), **TINY_WIDTH), seed=T2V_SEED)
    save_expert_file(t2v, folder / T2V_FILE, dtype=torch.float16)
    pipeline = folder / T2V_PIPELINE
    save_expert_folder(t2v, pipeline / "transformer", dtype=torch.bfloat16)
    link_shared(shared, pipeline)
    write_settings(pipeline, kind="WanPipeline", flow_shift=3.0, boundary_ratio=None, more={})
    on_progress("Wan2.1 image to video")
    i2v = make_expert(TinyShape(layers=layers, in_channels=36, image_dim=WIDTH, **TINY_WIDTH), seed=I2V_SEED)
    save_expert_file(i2v, folder / I2V_FILE, dtype=torch.float16, fp8=Fp8Layout())
    save_image_encoder(make_image_encoder(seed=CLIP_SEED), folder / CLIP_FILE, dtype=torch.float16)


def make_image_encoder(*, seed: int, layers: int = 2, image_size: int = 224) -> CLIPVisionModel:
    """Return a random CLIP vision model in fp32 with the width of ViT-H (1280) and small other sizes."""
    config = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        patch_size=14,
        image_size=image_size,
        hidden_act="gelu",
    )
    with torch.random.fork_rng(devices=[]):
        model = CLIPVisionModel(config)
    return randomised(model, seed)


def save_image_encoder(model: CLIPVisionModel, path: Path, *, dtype: torch.dtype) -> None:
    """Write ComfyUI's single file, with the tensor names of transformers 4."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {PREFIX + name.removeprefix(PREFIX): tensor.to(dtype) for name, tensor in model.named_parameters()}
    save_file(tensors, path, {"format": "pt"})
