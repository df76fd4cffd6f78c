"""Test model of Wan2.2 TI2V-5B, a single model with a different VAE."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan

from .components import save_vae_file, save_vae_folder
from .experts import save_expert_file, save_expert_folder
from .pipeline import link_components, write_settings
from .weights import TINY_WIDTH, TinyShape, make_expert

TI2V_LAYERS = 30
TI2V_SEED = 40

TI2V_FILE = Path("diffusion_models", "wan2.2_ti2v_5B_fp16.safetensors")
TI2V_PIPELINE = Path("diffusers", "Wan2.2-TI2V-5B-Diffusers")
WAN22_VAE_FILE = Path("vae", "wan2.2_vae.safetensors")


def write_ti2v(
    folder: Path, vae: AutoencoderKLWan, shared: Path, layers: int, on_progress: Callable[[str], object]
) -> None:
    """Write the model and `vae` below `folder`; `shared` is a pipeline there that has the text encoder."""
    on_progress("Wan2.2 5B")
    save_vae_file(vae, folder / WAN22_VAE_FILE)
    model = make_expert(TinyShape(layers=min(layers, TI2V_LAYERS), in_channels=48, **TINY_WIDTH), seed=TI2V_SEED)
    save_expert_file(model, folder / TI2V_FILE, dtype=torch.float16)
    pipeline = folder / TI2V_PIPELINE
    save_expert_folder(model, pipeline / "transformer", dtype=torch.bfloat16)
    save_vae_folder(vae, pipeline / "vae")
    link_components(shared, pipeline, ("text_encoder", "tokenizer"))
    write_settings(pipeline, kind="WanPipeline", flow_shift=5.0, boundary_ratio=None, more={}, expand_timesteps=True)
