"""Tiny test models in ComfyUI's folder layout, with the real files' names.

File names and depth are those of Wan2.2 A14B and 5B, of Wan2.1, and of Fun and Bernini-R, so every workflow runs on it
unchanged. It has two attention heads instead of forty, so it takes 1.1 GB and its videos show noise. The weights are
drawn from fixed seeds, so a file has the same values whatever else is written.
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

from ..schema import format_size
from ..wan import HEADS, PREFIX, WAN21, WAN22, WIDTH, LatentSpace
from .components import (
    SHARED,
    link_components,
    save_text_encoder_file,
    save_text_encoder_folders,
    save_vae_file,
    save_vae_folder,
    write_settings,
)
from .experts import make_lora, save_expert_file, save_expert_folder, save_lora
from .folder import ModelFolder, TinyModelError
from .quantised import Fp8Layout, save_single_file
from .tokenizer import VOCABULARY
from .weights import (
    TINY_WIDTH,
    TinyShape,
    make_expert,
    make_text_encoder,
    make_tiny_vae,
    make_vae,
    make_wan22_vae,
    randomised,
)

__all__ = ["TinyModel", "TinyModelError", "model_names", "write_tiny_model"]

A14B_LAYERS = 40
RECIPE = 10
"""Version of the files; a higher one replaces older test models on disk."""

VAE_SEED, TEXT_SEED, CLIP_SEED, WAN22_VAE_SEED, TINY_VAE_SEED = 1, 2, 3, 4, 5
LORA_SEED = 100
"""Added to the seed of the expert once for its first LoRA, twice for the second, and so on."""
VAE_FILE = Path("vae", "wan_2.1_vae.safetensors")
WAN22_VAE_FILE = Path("vae", "wan2.2_vae.safetensors")
TINY_VAE_FILES = {
    Path("vae_approx", f"{name}.safetensors"): space
    for name, space in (("lighttaew2_1", WAN21), ("taew2_1", WAN21), ("lighttaew2_2", WAN22), ("taew2_2", WAN22))
}
TEXT_ENCODER_FILE = Path("text_encoders", "umt5_xxl_fp8_e4m3fn_scaled.safetensors")
CLIP_FILE = Path("clip_vision", "clip_vision_h.safetensors")
T2V_FILE = Path("diffusion_models", "wan2.1_t2v_1.3B_fp16.safetensors")
I2V_FILE = Path("diffusion_models", "wan2.1_i2v_480p_14B_fp8_scaled.safetensors")
TI2V_FILE = Path("diffusion_models", "wan2.2_ti2v_5B_fp16.safetensors")
FUN_CONTROL_FILE = Path("diffusion_models", "wan2.2_fun_control_{}_noise_14B_fp8_scaled.safetensors")
FUN_INP_FILE = Path("diffusion_models", "wan2.2_fun_inpaint_{}_noise_14B_fp8_scaled.safetensors")
FUN_CONTROL21_FILE = Path("diffusion_models", "wan2.1_fun_control_1.3B_bf16.safetensors")
BERNINI_FILE = Path("diffusion_models", "wan2.2_bernini_r_{}_noise_fp8_scaled.safetensors")
BERNINI13_FILE = Path("diffusion_models", "wan2.1_bernini_1.3B_fp16.safetensors")
A14B_PIPELINE = Path("diffusers", "Wan2.2-T2V-A14B-Diffusers")
T2V_PIPELINE = Path("diffusers", "Wan2.1-T2V-1.3B-Diffusers")
TI2V_PIPELINE = Path("diffusers", "Wan2.2-TI2V-5B-Diffusers")


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model, with its official settings. In names, {} stands for the expert: high or low; {1} for HIGH or LOW."""

    name: str
    """For progress."""
    seeds: tuple[int, ...]
    """Seeds of the high-noise and the low-noise expert, or of the only one."""
    files: tuple[Path, ...]
    """Single files; in fp8 or bf16 if the name says so, else in fp16."""
    loras: tuple[Path, ...] = ()
    pipeline: Path | None = None
    linked: tuple[str, ...] = SHARED
    """Components that the pipeline shares with `A14B_PIPELINE`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `write_settings`."""
    in_channels: int = 16
    out_channels: int = 0
    """See `TinyShape`."""
    image_dim: int = 0
    reference: bool = False
    """True for a model with the `ref_conv` of Fun Control."""
    layers: int = A14B_LAYERS
    """Blocks of the real model."""

    @property
    def experts(self) -> dict[str, int]:
        """Seeds by expert, high or low; a single one is "high"."""
        return dict(zip(("high", "low"), self.seeds, strict=False))

    def names(self, expert: str) -> set[str]:
        """Return the names of the files and of the pipeline that contain this expert or a LoRA for it."""
        files = {str(file.name).format(expert, expert.upper()) for file in (*self.files, *self.loras)}
        return files if self.pipeline is None else {*files, self.pipeline.name}


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
            "kind": "WanImageToVideoPipeline",
            "flow_shift": 5.0,
            "boundary_ratio": 0.9,
            # Listed, but not there.
            "more": {"image_encoder": (None, None), "image_processor": (None, None)},
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
    Family(name="Wan2.1 image to video", seeds=(31,), files=(I2V_FILE,), in_channels=36, image_dim=WIDTH),
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
    {file.name for file in (VAE_FILE, WAN22_VAE_FILE, *TINY_VAE_FILES, TEXT_ENCODER_FILE, CLIP_FILE)}
    | {name for family in FAMILIES for expert in family.experts for name in family.names(expert)}
)
"""Names of all files and pipelines."""


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
    return randomised(lambda: CLIPVisionModel(config), seed)


def save_image_encoder(model: CLIPVisionModel, path: Path, *, dtype: torch.dtype) -> None:
    """Write ComfyUI's single file, with the tensor names of transformers 4."""
    tensors = {PREFIX + name.removeprefix(PREFIX): tensor.to(dtype) for name, tensor in model.named_parameters()}
    save_single_file(tensors, path)


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """Test model on disk. `files` maps paths to bytes; `nbytes` counts hard links to one file once."""

    folder: Path
    files: dict[Path, int]
    nbytes: int

    def summary(self) -> str:
        """Return a line for each file of weights, and one for the total."""
        weights = {path: nbytes for path, nbytes in self.files.items() if path.suffix == ".safetensors"}
        lines = [f"{format_size(nbytes):>8}  {path}" for path, nbytes in weights.items()]
        return "\n".join([*lines, f"{format_size(self.nbytes):>8}  on disk, in {self.folder}"])


def model_names(prompt: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return the names of the model files and pipelines in the inputs of an API workflow."""
    values = [value for node in prompt.values() for value in node.get("inputs", {}).values() if isinstance(value, str)]
    return {value for value in values if value in NAMES or value.endswith(".safetensors")}


def write_tiny_model(
    folder: Path | str,
    *,
    layers: int = A14B_LAYERS,
    names: Collection[str] | None = None,
    on_progress: Callable[[str], object] | None = None,
) -> TinyModel:
    """Write a test model into a new or empty folder, or replace an older test model.

    A complete test model of the same recipe is not written again.

    Args:
        layers: number of blocks of each expert.
        names: files and pipelines to write. Those that the folder has are written again, too. None: all.
        on_progress: called with the name of the part that is written next.

    Raises:
        TinyModelError: the folder contains other files, it cannot be written, or the test model lacks one of `names`.
    """
    wanted = NAMES if names is None else frozenset(names)
    if unknown := sorted(wanted - NAMES):
        raise TinyModelError(f"the test model has no {', '.join(unknown)}: leave the model or the workflow out")
    target = ModelFolder(Path(folder), recipe={"recipe": RECIPE, "layers": layers})
    if not target.is_complete(wanted):
        try:
            with target.replacing() as empty:
                _write(empty, layers, wanted | (target.names() & NAMES), on_progress or _nothing)
        except TinyModelError:
            raise
        except (SafetensorError, OSError) as err:
            raise TinyModelError(f"the test model cannot be written to {folder}: {err}") from err
    return TinyModel(folder=target.folder, files=target.files(), nbytes=target.nbytes())


def _nothing(_: str) -> None:
    pass


def _write(folder: Path, layers: int, wanted: Collection[str], on_progress: Callable[[str], object]) -> None:
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
    """Write VAEs, text encoder and image encoder, as files and in the pipelines that others link."""
    files: dict[Path, Callable[[Path], None]] = {
        VAE_FILE: lambda path: save_vae_file(make_vae(seed=VAE_SEED), path),
        WAN22_VAE_FILE: lambda path: save_vae_file(make_wan22_vae(seed=WAN22_VAE_SEED), path),
        TEXT_ENCODER_FILE: lambda path: save_text_encoder_file(
            _text_encoder(), path, dtype=torch.float16, fp8=Fp8Layout()
        ),
        CLIP_FILE: lambda path: save_image_encoder(make_image_encoder(seed=CLIP_SEED), path, dtype=torch.float16),
    }
    for seed, (path, space) in enumerate(TINY_VAE_FILES.items(), TINY_VAE_SEED):
        files[path] = partial(_save_tiny_vae, space, seed)
    for path, save in files.items():
        if path.name in wanted:
            save(folder / path)
    if A14B_PIPELINE.name in wanted:
        save_vae_folder(make_vae(seed=VAE_SEED), folder / A14B_PIPELINE / "vae")
        save_text_encoder_folders(_text_encoder(), folder / A14B_PIPELINE, dtype=torch.bfloat16)
    if TI2V_PIPELINE.name in wanted:
        save_vae_folder(make_wan22_vae(seed=WAN22_VAE_SEED), folder / TI2V_PIPELINE / "vae")


def _text_encoder() -> UMT5EncoderModel:
    return make_text_encoder(seed=TEXT_SEED, vocabulary=len(VOCABULARY))


def _save_tiny_vae(space: LatentSpace, seed: int, path: Path) -> None:
    tensors = make_tiny_vae(space, seed=seed)
    save_single_file({name: tensor.to(torch.float16) for name, tensor in tensors.items()}, path)


def _write_expert(family: Family, folder: Path, layers: int, seed: int, expert: str, wanted: Collection[str]) -> None:
    """Write the wanted files of an expert, in the most common layouts, and its LoRAs."""
    shape = TinyShape(
        layers=min(layers, family.layers),
        in_channels=family.in_channels,
        out_channels=family.out_channels,
        image_dim=family.image_dim,
        reference=family.reference,
        **TINY_WIDTH,
    )
    model = make_expert(shape, seed=seed)
    if family.pipeline is not None and family.pipeline.name in wanted:
        component = "transformer" if expert == "high" else "transformer_2"
        save_expert_folder(model, folder / family.pipeline / component, dtype=torch.bfloat16)
    for file in family.files:
        path = folder / str(file).format(expert)
        if path.name in wanted:
            fp8 = Fp8Layout() if "fp8" in file.name else None
            save_expert_file(model, path, dtype=torch.bfloat16 if "bf16" in file.name else torch.float16, fp8=fp8)
    for number, lora in enumerate(family.loras, 1):
        path = folder / str(lora).format(expert, expert.upper())
        if path.name in wanted:
            save_lora(make_lora(model, seed=seed + number * LORA_SEED), path, dtype=torch.bfloat16)
