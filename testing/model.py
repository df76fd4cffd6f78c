"""Tiny test models in ComfyUI's folder layout, with the real files' names.

File names and depth are those of Wan2.2 A14B and 5B and of Wan2.1, so every workflow runs on it unchanged. It has two
attention heads instead of forty, so it takes 0.9 GB and its videos show noise. The weights are drawn from fixed seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, CLIPVisionModel

from ..schema import format_size
from ..wan import HEADS, PREFIX, WIDTH
from .components import (
    link_components,
    link_shared,
    save_text_encoder_file,
    save_text_encoder_folders,
    save_vae_file,
    save_vae_folder,
    write_settings,
)
from .experts import make_lora, save_expert_file, save_expert_folder, save_lora
from .folder import ModelFolder, TinyModelError
from .quantised import Fp8Layout
from .tokenizer import VOCABULARY
from .weights import TINY_WIDTH, TinyShape, make_expert, make_text_encoder, make_vae, make_wan22_vae, randomised

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


__all__ = ["TinyModel", "TinyModelError", "write_tiny_model"]

A14B_LAYERS = 40
RECIPE = 7
"""Version of the files; a higher one replaces older test models on disk."""

VAE_SEED, TEXT_SEED, WAN22_VAE_SEED = 1, 2, 4
LORA_SEED = 100
"""Added to the seed of the expert."""
VAE_FILE = Path("vae", "wan_2.1_vae.safetensors")
TEXT_ENCODER_FILE = Path("text_encoders", "umt5_xxl_fp8_e4m3fn_scaled.safetensors")


@dataclass(frozen=True, kw_only=True)
class Family:
    """One of the two A14B models, with its official settings."""

    name: str
    in_channels: int
    boundary_ratio: float
    flow_shift: float
    pipeline_class: str
    seeds: tuple[int, int]
    """Seeds of the high-noise and the low-noise expert."""
    lora_version: str
    """Version in the names of the 4-step LoRAs."""
    more_components: dict[str, tuple[None, None]] = field(default_factory=dict)
    """Components that the pipeline lists without having them."""

    @property
    def pipeline(self) -> Path:
        return Path("diffusers", f"Wan2.2-{self.name.upper()}-A14B-Diffusers")

    def lora(self, expert: str) -> Path:
        name = f"wan2.2_{self.name}_lightx2v_4steps_lora_{self.lora_version}_{expert}_noise.safetensors"
        return Path("loras", name)

    def single_file(self, expert: str, precision: str) -> Path:
        return Path("diffusion_models", f"wan2.2_{self.name}_{expert}_noise_14B_{precision}.safetensors")


T2V = Family(
    name="t2v",
    in_channels=16,
    boundary_ratio=0.875,
    flow_shift=12.0,
    pipeline_class="WanPipeline",
    seeds=(10, 11),
    lora_version="v1.1",
)
I2V = Family(
    name="i2v",
    in_channels=36,
    boundary_ratio=0.9,
    flow_shift=5.0,
    pipeline_class="WanImageToVideoPipeline",
    seeds=(20, 21),
    lora_version="v1",
    more_components={"image_encoder": (None, None), "image_processor": (None, None)},
)


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


def write_tiny_model(
    folder: Path | str, *, layers: int = A14B_LAYERS, on_progress: Callable[[str], object] | None = None
) -> TinyModel:
    """Write a test model into a new or empty folder, or replace an older test model.

    A complete test model of the same recipe is not written again.

    Args:
        layers: number of blocks of each expert.
        on_progress: called with the name of the part that is written next.

    Raises:
        TinyModelError: the folder contains other files, or it cannot be written.
    """
    target = ModelFolder(Path(folder), recipe={"recipe": RECIPE, "layers": layers})
    if not target.is_complete():
        try:
            with target.replacing() as empty:
                _write_all(empty, layers, on_progress or _nothing)
        except TinyModelError:
            raise
        except (SafetensorError, OSError) as err:
            raise TinyModelError(f"the test model cannot be written to {folder}: {err}") from err
    return TinyModel(folder=target.folder, files=target.files(), nbytes=target.nbytes())


def _nothing(_: str) -> None:
    pass


def _write_all(folder: Path, layers: int, on_progress: Callable[[str], object]) -> None:
    on_progress("VAE and text encoder")
    vae, encoder = make_vae(seed=VAE_SEED), make_text_encoder(seed=TEXT_SEED, vocabulary=len(VOCABULARY))
    save_vae_file(vae, folder / VAE_FILE)
    save_text_encoder_file(encoder, folder / TEXT_ENCODER_FILE, dtype=torch.float16, fp8=Fp8Layout())
    save_vae_folder(vae, folder / T2V.pipeline / "vae")
    save_text_encoder_folders(encoder, folder / T2V.pipeline, dtype=torch.bfloat16)
    link_shared(folder / T2V.pipeline, folder / I2V.pipeline)
    for family in (T2V, I2V):
        write_settings(
            folder / family.pipeline,
            kind=family.pipeline_class,
            flow_shift=family.flow_shift,
            boundary_ratio=family.boundary_ratio,
            more=family.more_components,
        )
        for expert, seed in zip(("high", "low"), family.seeds, strict=True):
            on_progress(f"{family.name} {expert}-noise expert")
            _write_expert(
                family, expert, folder, TinyShape(layers=layers, in_channels=family.in_channels, **TINY_WIDTH), seed
            )
    write_wan21(folder, folder / T2V.pipeline, layers, on_progress)
    write_ti2v(folder, make_wan22_vae(seed=WAN22_VAE_SEED), folder / T2V.pipeline, layers, on_progress)


def _write_expert(family: Family, expert: str, folder: Path, shape: TinyShape, seed: int) -> None:
    """Write an expert in the three most common layouts, and a LoRA for it."""
    model = make_expert(shape, seed=seed)
    component = "transformer" if expert == "high" else "transformer_2"
    save_expert_folder(model, folder / family.pipeline / component, dtype=torch.bfloat16)
    save_expert_file(model, folder / family.single_file(expert, "fp16"), dtype=torch.float16)
    save_expert_file(model, folder / family.single_file(expert, "fp8_scaled"), dtype=torch.float16, fp8=Fp8Layout())
    save_lora(make_lora(model, seed=seed + LORA_SEED), folder / family.lora(expert), dtype=torch.bfloat16)
