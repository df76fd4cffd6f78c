"""Tiny test models in ComfyUI's folder layout, with the real files' names.

File names and depth follow Wan2.2 A14B and 5B, Wan2.1, Fun and Bernini-R, so every workflow runs on
the test model unchanged. It has two attention heads instead of forty, so it takes 1.1 GB and the
videos show noise. The weights are drawn from fixed seeds, so a file has the same values whatever
else is written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import CLIPVisionConfig, CLIPVisionModel, UMT5EncoderModel

from ..wan import HEADS, PREFIX, WIDTH
from ..wan.latents import WAN21, WAN22, LatentSpace
from . import weights
from .components import (
    SHARED,
    link_components,
    save_text_encoder_file,
    save_text_encoder_folders,
    save_vae_file,
    write_settings,
)
from .experts import make_lora, save_expert_file, save_expert_folder, save_lora
from .folder import ModelFolder, TinyModelError
from .quantised import save_single_file, scaled_fp8
from .tokenizer import VOCABULARY

A14B_LAYERS = 40
RECIPE = 10
"""Version of the files. A higher one replaces older test models on disk."""

VAE_SEED = 1
TEXT_SEED = 2
CLIP_SEED = 3
WAN22_VAE_SEED = 4
TINY_VAE_SEED = 5
LORA_SEED = 100
"""Added to the expert's seed once for its first LoRA, twice for the second, and so on."""
VAE_FILE = Path("vae", "wan_2.1_vae.safetensors")
WAN22_VAE_FILE = Path("vae", "wan2.2_vae.safetensors")
TINY_VAE_FILES = {
    Path("vae_approx", f"{name}.safetensors"): space
    for name, space in (
        ("lighttaew2_1", WAN21),
        ("taew2_1", WAN21),
        ("lighttaew2_2", WAN22),
        ("taew2_2", WAN22),
    )
}
TEXT_ENCODER_FILE = Path("text_encoders", "umt5_xxl_fp8_e4m3fn_scaled.safetensors")
CLIP_FILE = Path("clip_vision", "clip_vision_h.safetensors")
T2V_FILE = Path("diffusion_models", "wan2.1_t2v_1.3B_fp16.safetensors")
I2V_FILE = Path("diffusion_models", "wan2.1_i2v_480p_14B_fp8_scaled.safetensors")
TI2V_FILE = Path("diffusion_models", "wan2.2_ti2v_5B_fp16.safetensors")
FUN_CONTROL_FILE = Path(
    "diffusion_models", "wan2.2_fun_control_{}_noise_14B_fp8_scaled.safetensors"
)
FUN_INP_FILE = Path("diffusion_models", "wan2.2_fun_inpaint_{}_noise_14B_fp8_scaled.safetensors")
FUN_CONTROL21_FILE = Path("diffusion_models", "wan2.1_fun_control_1.3B_bf16.safetensors")
BERNINI_FILE = Path("diffusion_models", "wan2.2_bernini_r_{}_noise_fp8_scaled.safetensors")
BERNINI13_FILE = Path("diffusion_models", "wan2.1_bernini_1.3B_fp16.safetensors")
A14B_PIPELINE = Path("diffusers", "Wan2.2-T2V-A14B-Diffusers")
T2V_PIPELINE = Path("diffusers", "Wan2.1-T2V-1.3B-Diffusers")
TI2V_PIPELINE = Path("diffusers", "Wan2.2-TI2V-5B-Diffusers")


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model, with official settings.

    In names, {} stands for the expert: high or low. {1} stands for HIGH or LOW.
    """

    name: str
    """Name for progress messages."""
    seeds: tuple[int, ...]
    """Seeds for the high-noise and the low-noise expert, or for the only one."""
    files: tuple[Path, ...]
    """Single files, in fp8 or bf16 if the name says so, else in fp16."""
    loras: tuple[Path, ...] = ()
    pipeline: Path | None = None
    linked: tuple[str, ...] = SHARED
    """Components shared with `A14B_PIPELINE`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for `write_settings`."""
    in_channels: int = 16
    out_channels: int = 0
    """See `TinyShape`."""
    image_dim: int = 0
    reference: bool = False
    """True for a model with Fun Control's `ref_conv`."""
    layers: int = A14B_LAYERS
    """Block count of the real model."""

    @property
    def experts(self) -> dict[str, int]:
        """Seeds by expert, high or low. A single one is "high"."""
        # A single expert has one seed, so the lengths may differ.
        return dict(zip(("high", "low"), self.seeds, strict=False))

    def names(self, expert: str) -> set[str]:
        """Return the names of files and pipelines with this expert or a LoRA for it."""
        files = {
            str(file.name).format(expert, expert.upper()) for file in (*self.files, *self.loras)
        }
        if self.pipeline is None:
            return files
        return {*files, self.pipeline.name}


FAMILIES = (
    Family(
        name="t2v {}-noise expert",
        seeds=(10, 11),
        files=tuple(
            Path("diffusion_models", f"wan2.2_t2v_{{}}_noise_14B_{precision}.safetensors")
            for precision in ("fp16", "fp8_scaled")
        ),
        loras=(Path("loras", "wan2.2_t2v_lightx2v_4steps_lora_v1.1_{}_noise.safetensors"),),
        pipeline=A14B_PIPELINE,
        linked=(),
        settings={"flow_shift": 12.0, "boundary_ratio": 0.875},
    ),
    Family(
        name="i2v {}-noise expert",
        seeds=(20, 21),
        files=tuple(
            Path("diffusion_models", f"wan2.2_i2v_{{}}_noise_14B_{precision}.safetensors")
            for precision in ("fp16", "fp8_scaled")
        ),
        loras=(
            Path("loras", "wan2.2_i2v_lightx2v_4steps_lora_v1_{}_noise.safetensors"),
            Path("loras", "SVI_v2_PRO_Wan2.2-I2V-A14B_{1}_lora_rank_128_fp16.safetensors"),
        ),
        pipeline=Path("diffusers", "Wan2.2-I2V-A14B-Diffusers"),
        settings={
            "_class_name": "WanImageToVideoPipeline",
            "flow_shift": 5.0,
            "boundary_ratio": 0.9,
            # Listed, but not there.
            "image_encoder": (None, None),
            "image_processor": (None, None),
        },
        in_channels=36,
    ),
    Family(
        name="Wan2.1 text to video",
        seeds=(30,),
        files=(T2V_FILE,),
        pipeline=T2V_PIPELINE,
        settings={"flow_shift": 3.0},
        layers=30,
    ),
    Family(
        name="Wan2.1 image to video",
        seeds=(31,),
        files=(I2V_FILE,),
        in_channels=36,
        image_dim=WIDTH,
    ),
    Family(
        name="Wan2.2 5B",
        seeds=(40,),
        files=(TI2V_FILE,),
        pipeline=TI2V_PIPELINE,
        linked=("text_encoder", "tokenizer"),
        settings={"flow_shift": 5.0, "expand_timesteps": True},
        in_channels=48,
        layers=30,
    ),
    Family(
        name="Fun Control {}-noise expert",
        seeds=(50, 51),
        files=(FUN_CONTROL_FILE,),
        in_channels=52,
        reference=True,
    ),
    Family(name="Fun InP {}-noise expert", seeds=(52, 53), files=(FUN_INP_FILE,), in_channels=36),
    Family(
        name="Wan2.1 Fun Control",
        seeds=(54,),
        files=(FUN_CONTROL21_FILE,),
        in_channels=48,
        out_channels=16,
        image_dim=WIDTH,
        layers=30,
    ),
    Family(name="Bernini-R {}-noise expert", seeds=(60, 61), files=(BERNINI_FILE,)),
    Family(name="Bernini-R 1.3B", seeds=(62,), files=(BERNINI13_FILE,), layers=30),
)

NAMES = frozenset(
    {
        file.name
        for file in (VAE_FILE, WAN22_VAE_FILE, *TINY_VAE_FILES, TEXT_ENCODER_FILE, CLIP_FILE)
    }
    | {name for family in FAMILIES for expert in family.experts for name in family.names(expert)}
)
"""Names of all files and pipelines."""


def make_image_encoder(*, seed: int, layers: int = 2, image_size: int = 224) -> CLIPVisionModel:
    """Return a random fp32 CLIP vision model with ViT-H's width (1280), otherwise small."""
    config = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        patch_size=14,
        image_size=image_size,
        hidden_act="gelu",
    )
    return weights.randomised(lambda: CLIPVisionModel(config), seed)


def save_image_encoder(model: CLIPVisionModel, path: Path, *, dtype: torch.dtype) -> None:
    """Write ComfyUI's single file, with tensor names as in transformers 4."""
    tensors = {
        # Names have the prefix in transformers 4, but not in transformers 5.
        PREFIX + name.removeprefix(PREFIX): tensor.to(dtype)
        for name, tensor in model.named_parameters()
    }
    save_single_file(tensors, path)


def model_names(prompt: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return the names of model files and pipelines in the inputs of an API workflow."""
    values = [
        value
        for node in prompt.values()
        for value in node.get("inputs", {}).values()
        if isinstance(value, str)
    ]
    return {value for value in values if value in NAMES or value.endswith(".safetensors")}


def write_tiny_model(
    folder: Path | str,
    *,
    layers: int = A14B_LAYERS,
    names: Collection[str] | None = None,
    on_progress: Callable[[str], object] = lambda part: None,
) -> ModelFolder:
    """Write a test model into a new or empty folder, or replace an older test model.

    A complete test model from the same recipe is not written again.

    Args:
        layers: number of blocks per expert.
        names: files and pipelines to write. Those in the folder are written again too. None: all.
        on_progress: called with the name of the next part.

    Raises:
        TinyModelError: the folder contains other files, it cannot be written, or the test model
            lacks one of `names`.
    """
    wanted = NAMES if names is None else frozenset(names)
    if unknown := sorted(wanted - NAMES):
        raise TinyModelError(
            f"the test model has no {', '.join(unknown)}: leave the model or the workflow out"
        )
    target = ModelFolder(Path(folder), recipe={"recipe": RECIPE, "layers": layers})
    if not target.is_complete(wanted):
        try:
            with target.replacing() as empty:
                _write(empty, layers, wanted | (target.names() & NAMES), on_progress)
        except TinyModelError:  # an OSError with a message of its own
            raise
        except (SafetensorError, OSError) as err:
            raise TinyModelError(f"the test model cannot be written to {folder}: {err}") from err
    return target


def _write(
    folder: Path, layers: int, wanted: Collection[str], on_progress: Callable[[str], object]
) -> None:
    if any(family.pipeline is not None and family.pipeline.name in wanted for family in FAMILIES):
        wanted = {*wanted, A14B_PIPELINE.name}  # the others link its components
    on_progress("VAE and text encoder")
    _write_components(folder, wanted)
    for family in FAMILIES:
        if family.pipeline is not None and family.pipeline.name in wanted:
            link_components(folder / A14B_PIPELINE, folder / family.pipeline, family.linked)
            write_settings(folder / family.pipeline, **family.settings)
        for expert, seed in family.experts.items():
            if not family.names(expert).isdisjoint(wanted):
                on_progress(family.name.format(expert))
                _write_expert(family, folder, layers, seed, expert, wanted)


def _write_components(folder: Path, wanted: Collection[str]) -> None:
    """Write VAEs, text and image encoder, as files and in the pipelines that others link."""
    files: dict[Path, Callable[[Path], None]] = {
        VAE_FILE: lambda path: save_vae_file(weights.make_vae(seed=VAE_SEED), path),
        WAN22_VAE_FILE: lambda path: save_vae_file(
            weights.make_wan22_vae(seed=WAN22_VAE_SEED), path
        ),
        TEXT_ENCODER_FILE: lambda path: save_text_encoder_file(
            _text_encoder(), path, dtype=torch.float16, quantised=scaled_fp8
        ),
        CLIP_FILE: lambda path: save_image_encoder(
            make_image_encoder(seed=CLIP_SEED), path, dtype=torch.float16
        ),
    }
    for seed, (path, space) in enumerate(TINY_VAE_FILES.items(), TINY_VAE_SEED):
        files[path] = partial(_save_tiny_vae, space, seed)
    for path, save in files.items():
        if path.name in wanted:
            save(folder / path)
    if A14B_PIPELINE.name in wanted:
        weights.make_vae(seed=VAE_SEED).save_pretrained(folder / A14B_PIPELINE / "vae")
        save_text_encoder_folders(_text_encoder(), folder / A14B_PIPELINE, dtype=torch.bfloat16)
    if TI2V_PIPELINE.name in wanted:
        weights.make_wan22_vae(seed=WAN22_VAE_SEED).save_pretrained(folder / TI2V_PIPELINE / "vae")


def _text_encoder() -> UMT5EncoderModel:
    return weights.make_text_encoder(seed=TEXT_SEED, vocabulary=len(VOCABULARY))


def _save_tiny_vae(space: LatentSpace, seed: int, path: Path) -> None:
    tensors = weights.make_tiny_vae(space, seed=seed)
    save_single_file({name: tensor.to(torch.float16) for name, tensor in tensors.items()}, path)


def _write_expert(
    family: Family, folder: Path, layers: int, seed: int, expert: str, wanted: Collection[str]
) -> None:
    """Write an expert's wanted files, in the most common layouts, and its LoRAs."""
    shape = weights.TinyShape(
        layers=min(layers, family.layers),
        in_channels=family.in_channels,
        out_channels=family.out_channels,
        image_dim=family.image_dim,
        reference=family.reference,
        **weights.TINY_WIDTH,
    )
    model = weights.make_expert(shape, seed=seed)
    if family.pipeline is not None and family.pipeline.name in wanted:
        # In diffusers' Wan2.2 pipelines, `transformer_2` is the low-noise expert.
        component = "transformer" if expert == "high" else "transformer_2"
        save_expert_folder(model, folder / family.pipeline / component, dtype=torch.bfloat16)
    for file in family.files:
        path = folder / str(file).format(expert)
        if path.name in wanted:
            quantised = scaled_fp8 if "fp8" in file.name else None
            dtype = torch.bfloat16 if "bf16" in file.name else torch.float16
            save_expert_file(model, path, dtype=dtype, quantised=quantised)
    for number, lora in enumerate(family.loras, 1):
        path = folder / str(lora).format(expert, expert.upper())
        if path.name in wanted:
            save_lora(make_lora(model, seed=seed + number * LORA_SEED), path, dtype=torch.bfloat16)
