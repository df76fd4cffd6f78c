"""Runs in ComfyUI's own Python: tiny checkpoints of ComfyUI's native models, their inputs, and native runs of them.

`FAMILIES` has the families whose classes this ComfyUI has. Models come from ComfyUI's own classes and have random
weights; files have the keys and the metadata with which such models are distributed. `check()` returns what a native
run of each family shows; `test_native_families.py` checks the values.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.clip_vision
import comfy.lora
import comfy.model_base
import comfy.model_detection
import comfy.ops
import comfy.sample
import comfy.samplers
import comfy.sd
import comfy.utils
import torch
from comfy.ldm.flux.model import FluxParams
from safetensors.torch import save_file

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}
"""Number formats of files. In "fp8" files the matrices are fp8 and all other tensors bf16."""

WEIGHT_DTYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "fp8_e4m3fn": {"dtype": torch.float8_e4m3fn},
    "fp8_e4m3fn_fast": {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True},
    "fp8_e5m2": {"dtype": torch.float8_e5m2},
}
"""Options of `load_diffusion_model` for the values of the `weight_dtype` of Load Diffusion Model."""

SCALED_LAYOUTS = ("comfy_quant", "metadata", "scaled_fp8")
"""Ways in which files mark scaled fp8: a tensor per layer, the file's metadata, or one tensor (the oldest way)."""

Conditions = Callable[[bool], dict[str, Any]]
"""Values of a conditioning next to the text, for the positive (True) or the negative one."""


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _nothing(_positive: bool) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A native model, its input and the marks of its files."""

    name: str
    base: str
    """The class in `comfy.model_base`."""
    network: str
    """The module and the class of the diffusion model."""
    settings: Mapping[str, Any]
    """Arguments of the diffusion model's class."""
    lists: tuple[str, ...]
    """Names of the lists of blocks."""
    sizes: tuple[tuple[int, ...], ...]
    """Shapes of the parts of a latent."""
    text: tuple[int, int, int]
    """Width of the text embeddings, tokens of the positive and of the negative one."""
    conditions: Conditions = _nothing
    given_frames: int = 0
    """Latent frames that the noise mask keeps."""
    unet_config: Mapping[str, Any] = field(default_factory=dict)
    """The part of the configuration that ComfyUI does not read from a file."""
    transformer: Mapping[str, Any] = field(default_factory=dict)
    """The part of the configuration that distributed files have in their metadata."""
    renames: tuple[tuple[str, str], ...] = ()
    """Replacements that turn keys of the class into keys of distributed files."""
    prefix: str = ""
    seed: int = 1

    @property
    def have(self) -> bool:
        """True if this ComfyUI has the classes."""
        module, _, name = self.network.rpartition(".")
        try:
            found = hasattr(import_module(module), name)
        except ModuleNotFoundError:
            return False
        return found and hasattr(comfy.model_base, self.base)

    @property
    def metadata(self) -> dict[str, str]:
        return {"config": json.dumps({"transformer": dict(self.transformer)})} if self.transformer else {}

    def key(self, name: str) -> str:
        """Return the key that a distributed file has for a parameter of the class."""
        for old, new in self.renames:
            name = name.replace(old, new)
        return self.prefix + name

    def weights(self) -> dict[str, torch.Tensor]:
        """Return random fp32 weights under the names of the class."""
        module, _, name = self.network.rpartition(".")
        settings = {**self.settings, **self.transformer}
        operations = comfy.ops.disable_weight_init
        model = getattr(import_module(module), name)(**settings, dtype=torch.float32, device="cpu", operations=operations)
        model = model.float()
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _fill(name, parameter, generator)
        return {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}

    def write(self, path: Path | str, dtype: str) -> None:
        """Write a checkpoint in a number format of `DTYPES`."""
        stored = {}
        for name, tensor in self.weights().items():
            small = dtype == "fp8" and not _is_matrix(name, tensor)
            stored[self.key(name)] = tensor.to(torch.bfloat16 if small else DTYPES[dtype])
        save_file(stored, path, metadata=self.metadata)

    def latent(self) -> Any:
        """Return the samples of a LATENT, nested if it has several parts."""
        parts = [_normal(*size, seed=10 + i) for i, size in enumerate(self.sizes)]
        if len(parts) == 1:
            return parts[0]
        from comfy.nested_tensor import NestedTensor

        return NestedTensor(parts)

    def mask(self) -> torch.Tensor | None:
        """Return the noise mask of a LATENT."""
        if not self.given_frames:
            return None
        mask = torch.ones(1, 1, *self.sizes[0][2:])
        mask[:, :, : self.given_frames] = 0
        return mask

    def conditioning(self) -> tuple[list[Any], list[Any]]:
        """Return the positive and the negative CONDITIONING."""
        width, *tokens = self.text
        return tuple(
            [[_normal(1, count, width, seed=20 + i), {"pooled_output": None, **self.conditions(i == 0)}]]
            for i, count in enumerate(tokens)
        )


def _is_matrix(name: str, tensor: torch.Tensor) -> bool:
    return name.endswith(".weight") and tensor.ndim >= 2


def _fill(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Fill with normals of a size that keeps activations near one, so that each block matters."""
    parameter.normal_(generator=generator)
    if name.startswith("motion_encoder."):
        # These layers divide by the root of their width themselves.
        return
    if parameter.ndim >= 2 and not name.endswith("audio_encoder.weights"):
        parameter.mul_((parameter.numel() / parameter.shape[0]) ** -0.5)
        return
    # Weights of norms, and weights that are divided by their sum.
    parameter.mul_(0.1).add_(float(not name.endswith("bias")))


def _clip(*, tokens: int, width: int, seed: int = 30) -> comfy.clip_vision.Output:
    """Return the output of a CLIP or SigLIP image encoder."""
    output = comfy.clip_vision.Output()
    output.penultimate_hidden_states = output.last_hidden_state = _normal(1, tokens, width, seed=seed)
    return output


TIME, HEIGHT, WIDTH = 2, 8, 6
WAN_MODEL = "comfy.ldm.wan.model."
WAN_TEXT = 4096, 12, 12
CLIP_VISION = {"tokens": 5, "width": 1280}


def _wan(channels: int = 16, height: int = HEIGHT, width: int = WIDTH, time: int = TIME) -> tuple[int, ...]:
    return 1, channels, time, height, width


def _wan_family(
    name: str,
    base: str,
    network: str,
    *,
    channels: int = 16,
    latent_channels: int = 16,
    lists: tuple[str, ...] = (),
    height: int = HEIGHT,
    width: int = WIDTH,
    layers: int = 5,
    dim: int = 128,
    conditions: Conditions = _nothing,
    unet_config: Mapping[str, Any] | None = None,
    given_frames: int = 0,
    **settings: Any,
) -> Family:
    sizes = {"in_dim": channels, "dim": dim, "num_heads": dim // 128, "ffn_dim": 4 * dim, "num_layers": layers}
    return Family(
        name=name,
        base=base,
        network=WAN_MODEL.removesuffix("model.") + network,
        settings={**sizes, "out_dim": latent_channels, **settings, **(unet_config or {})},
        lists=("blocks", *lists),
        sizes=(_wan(latent_channels, height, width),),
        text=WAN_TEXT,
        conditions=conditions,
        given_frames=given_frames,
        unet_config=unet_config or {},
    )


def _first_frame(_positive: bool) -> dict[str, Any]:
    mask = torch.ones(1, 1, TIME, HEIGHT, WIDTH)
    mask[:, :, :1] = 0
    return {"concat_latent_image": _normal(*_wan(), seed=31), "concat_mask": mask}


def _image_to_video(positive: bool) -> dict[str, Any]:
    return {**_first_frame(positive), "clip_vision_output": _clip(**CLIP_VISION)}


def _vace(contexts: int) -> Conditions:
    strengths = [0.8, 0.6][:contexts]

    def conditions(_positive: bool) -> dict[str, Any]:
        return {
            "vace_frames": [_normal(*_wan(32), seed=32 + i) for i in range(contexts)],
            "vace_mask": [_normal(*_wan(64), seed=34 + i).sigmoid() for i in range(contexts)],
            "vace_strength": strengths,
        }

    return conditions


FACE_PIXELS = 512
"""Height and width of the face pictures of Wan Animate, for which its motion encoder is built."""


def _animate(positive: bool) -> dict[str, Any]:
    face = _normal(1, 3, 1, FACE_PIXELS, FACE_PIXELS, seed=36).tanh()
    return {
        **_image_to_video(positive),
        "face_video_pixels": face if positive else face * 0.0 - 1.0,
        "pose_video_latent": _normal(*_wan(time=1), seed=37),
    }


def _sound(positive: bool) -> dict[str, Any]:
    audio = _normal(1, 25, 1024, 4 * TIME, seed=38)
    return {
        "audio_embed": audio if positive else audio * 0.0,
        "reference_latents": [_normal(*_wan(time=1, height=8, width=8), seed=39)],
        "reference_motion": _normal(*_wan(time=3, height=8, width=8), seed=40),
        "control_video": _normal(*_wan(height=8, width=8), seed=41),
    }


def _humo(positive: bool) -> dict[str, Any]:
    audio = _normal(1, TIME, 8, 5, 1280, seed=42)
    return {
        "audio_embed": audio if positive else torch.zeros_like(audio),
        "reference_latents": [_normal(*_wan(time=1), seed=43)],
    }


def _camera(positive: bool) -> dict[str, Any]:
    return {**_image_to_video(positive), "camera_conditions": _normal(1, 24, TIME, 8 * HEIGHT, 8 * WIDTH, seed=44)}


def _scail(_positive: bool) -> dict[str, Any]:
    return {
        "clip_vision_output": _clip(**CLIP_VISION),
        "reference_latents": [_normal(*_wan(time=1), seed=45)],
        "pose_video_latent": _normal(*_wan(height=HEIGHT // 2, width=WIDTH), seed=46),
    }


def _flux(positive: bool) -> dict[str, Any]:
    return {"pooled_output": _normal(1, 768, seed=47 + positive), "guidance": 3.5}


def _qwen_edit(_positive: bool) -> dict[str, Any]:
    return {"reference_latents": [_normal(1, 16, 1, HEIGHT, WIDTH, seed=49)]}


def _hunyuan(positive: bool) -> dict[str, Any]:
    return {
        "conditioning_byt5small": _normal(1, 5, 1472, seed=50 + positive),
        "clip_vision_output": _clip(tokens=6, width=1152),
        "concat_latent_image": _normal(1, 32, TIME, 4, 4, seed=52),
        "concat_mask": _first_frame(positive)["concat_mask"][..., :4, :4],
    }


def _ltx(_positive: bool) -> dict[str, Any]:
    return {"frame_rate": 25.0, "unprocessed_ltxav_embeds": True}


HUNYUAN_KEYS = (
    ("txt_in.t_embedder.in_layer.", "txt_in.t_embedder.mlp.0."),
    ("txt_in.t_embedder.out_layer.", "txt_in.t_embedder.mlp.2."),
    ("txt_in.c_embedder.in_layer.", "txt_in.c_embedder.linear_1."),
    ("txt_in.c_embedder.out_layer.", "txt_in.c_embedder.linear_2."),
    ("_in.in_layer.", "_in.mlp.0."),
    ("_in.out_layer.", "_in.mlp.2."),
    ("_mod.lin.", "_mod.linear."),
    ("mlp.0.", "mlp.fc1."),
    ("mlp.2.", "mlp.fc2."),
    ("time_in.mlp.fc1.", "time_in.mlp.0."),
    ("time_in.mlp.fc2.", "time_in.mlp.2."),
    ("txt_in.t_embedder.mlp.fc1.", "txt_in.t_embedder.mlp.0."),
    ("txt_in.t_embedder.mlp.fc2.", "txt_in.t_embedder.mlp.2."),
    ("_attn.norm.query_norm.weight", "_attn_q_norm.weight"),
    ("_attn.norm.key_norm.weight", "_attn_k_norm.weight"),
    ("_attn.qkv.", "_attn_qkv."),
    ("_attn.proj.", "_attn_proj."),
)

WAN_FAMILIES = (
    _wan_family("wan_t2v", "WAN21", "model.WanModel", model_type="t2v", dim=256, layers=4),
    _wan_family("wan_i2v", "WAN21", "model.WanModel", channels=36, model_type="i2v", conditions=_image_to_video),
    _wan_family("wan22_i2v", "WAN21", "model.WanModel", channels=36, model_type="t2v", conditions=_first_frame),
    _wan_family(
        "wan22_ti2v",
        "WAN22",
        "model.WanModel",
        channels=48,
        latent_channels=48,
        model_type="t2v",
        given_frames=1,
    ),
    *(
        _wan_family(
            f"wan_vace{'_twice' * (contexts - 1)}",
            "WAN21_Vace",
            "model.VaceWanModel",
            lists=("vace_blocks",),
            layers=6,
            vace_layers=3,
            vace_in_dim=96,
            conditions=_vace(contexts),
        )
        for contexts in (1, 2)
    ),
    # One face block for every five blocks.
    _wan_family(
        "wan22_animate",
        "WAN22_Animate",
        "model_animate.AnimateWanModel",
        channels=36,
        lists=("face_adapter.fuser_blocks",),
        layers=10,
        conditions=_animate,
    ),
    # The height and the width have to be multiples of 8 for the motion frames.
    _wan_family(
        "wan22_s2v",
        "WAN22_S2V",
        "model.WanModel_S2V",
        lists=("audio_injector.injector", "audio_injector.injector_adain_layers"),
        height=8,
        width=8,
        layers=6,
        conditions=_sound,
        unet_config={"audio_inject_layers": [0, 2, 5]},
    ),
    _wan_family("wan_humo", "WAN21_HuMo", "model.HumoWanModel", channels=36, layers=4, conditions=_humo),
    _wan_family(
        "wan_camera", "WAN21_Camera", "model.CameraWanModel", channels=32, model_type="camera", conditions=_camera
    ),
    _wan_family("wan_scail", "WAN21_SCAIL", "model.SCAILWanModel", channels=20, conditions=_scail),
)

QWEN = {"num_attention_heads": 1, "joint_attention_dim": 256}
LTX = {
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "cross_attention_dim": 128,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 32,
    "audio_cross_attention_dim": 64,
    "caption_channels": 128,
    "connector_num_attention_heads": 2,
    "connector_attention_head_dim": 64,
    "connector_num_layers": 2,
    "positional_embedding_max_pos": [20, 2048, 2048],
    "use_middle_indices_grid": True,
    "causal_temporal_positioning": True,
    "av_ca_timestep_scale_multiplier": 1000.0,
    "rope_type": "split",
    "frequencies_precision": "float64",
}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *WAN_FAMILIES,
        Family(
            name="flux",
            base="Flux",
            network="comfy.ldm.flux.model.Flux",
            settings={
                "in_channels": 16,
                "out_channels": 16,
                "vec_in_dim": 768,
                "context_in_dim": 4096,
                "hidden_size": 128,
                "mlp_ratio": 4.0,
                "num_heads": 1,
                "depth": 3,
                "depth_single_blocks": 5,
                "axes_dim": [16, 56, 56],
                "theta": 10000,
                "patch_size": 2,
                "qkv_bias": True,
                "guidance_embed": True,
                **{name: [] for name in ("txt_ids_dims",) if name in FluxParams.__dataclass_fields__},
            },
            lists=("double_blocks", "single_blocks"),
            sizes=((1, 16, HEIGHT, WIDTH),),
            text=(4096, 12, 12),
            conditions=_flux,
            renames=(("_norm.weight", "_norm.scale"),),
        ),
        Family(
            name="qwen_image",
            base="QwenImage",
            network="comfy.ldm.qwen_image.model.QwenImageTransformer2DModel",
            settings={"num_layers": 4, **QWEN},
            lists=("transformer_blocks",),
            sizes=((1, 16, 1, HEIGHT, WIDTH),),
            text=(QWEN["joint_attention_dim"], 12, 9),
            conditions=_qwen_edit,
            unet_config=QWEN,
        ),
        Family(
            name="hunyuan_video_15",
            base="HunyuanVideo15",
            network="comfy.ldm.hunyuan_video.model.HunyuanVideo",
            settings={
                "in_channels": 65,
                "out_channels": 32,
                "vec_in_dim": None,
                "context_in_dim": 3584,
                "hidden_size": 128,
                "mlp_ratio": 4.0,
                "num_heads": 1,
                "depth": 4,
                "depth_single_blocks": 0,
                "axes_dim": [16, 56, 56],
                "theta": 256,
                "patch_size": [1, 1, 1],
                "qkv_bias": True,
                "guidance_embed": False,
                "byt5": True,
                "meanflow": False,
                "use_cond_type_embedding": True,
                "vision_in_dim": 1152,
                "meanflow_sum": True,
            },
            lists=("double_blocks", "txt_in.individual_token_refiner.blocks"),
            sizes=((1, 32, TIME, 4, 4),),
            text=(3584, 12, 9),
            conditions=_hunyuan,
            renames=HUNYUAN_KEYS,
        ),
        Family(
            name="ltx_2",
            base="LTXAV",
            network="comfy.ldm.lightricks.av_model.LTXAVModel",
            settings={"num_layers": 4},
            lists=(
                "transformer_blocks",
                "video_embeddings_connector.transformer_1d_blocks",
                "audio_embeddings_connector.transformer_1d_blocks",
            ),
            sizes=((1, 128, 2, 4, 3), (1, 8, 6, 16)),
            text=(LTX["caption_channels"], 12, 9),
            conditions=_ltx,
            transformer=LTX,
            prefix="model.diffusion_model.",
        ),
    )
    if family.have
}


@contextmanager
def given_configuration(family: Family) -> Iterator[None]:
    """Add what ComfyUI does not read from the family's files to the configurations that it detects."""
    detect = comfy.model_detection.detect_unet_config

    def detected(*args: Any, **options: Any) -> dict[str, Any] | None:
        found = detect(*args, **options)
        return None if found is None else {**found, **family.unet_config}

    comfy.model_detection.detect_unet_config = detected
    try:
        yield
    finally:
        comfy.model_detection.detect_unet_config = detect


def load_lora(model: Any, path: Path | str) -> Any:
    """Return a clone of a MODEL with a LoRA, as Load LoRA makes it."""
    lora = comfy.utils.load_torch_file(str(path), safe_load=True)
    return comfy.sd.load_lora_for_models(model, None, lora, 1.0, 0)[0]


def native(
    path: Path | str, family: Family, *, weight_dtype: str = "default", loras: Iterable[Path | str] = ()
) -> Any:
    """Return the MODEL that Load Diffusion Model and one Load LoRA for each file make."""
    with given_configuration(family):
        model = comfy.sd.load_diffusion_model(str(path), model_options=dict(WEIGHT_DTYPES[weight_dtype]))
    for lora in loras:
        model = load_lora(model, lora)
    return model


@torch.inference_mode()
def sample(
    model: Any,
    family: Family,
    *,
    sampler: str = "euler",
    scheduler: str = "simple",
    steps: int = 3,
    cfg: float = 3.0,
    seed: int = 7,
    denoise: float = 1.0,
) -> torch.Tensor:
    """Return the latent that KSampler makes, on the CPU; the parts of a nested latent as one vector."""
    latent, mask = family.latent(), family.mask()
    positive, negative = family.conditioning()
    noise = comfy.sample.prepare_noise(latent, seed)
    options = {"denoise": denoise, "noise_mask": mask, "disable_pbar": True, "seed": seed}
    samples = comfy.sample.sample(
        model, noise, steps, cfg, sampler, scheduler, positive, negative, latent, **options
    )
    if getattr(samples, "is_nested", False) and not isinstance(samples, torch.Tensor):
        samples = torch.cat([part.flatten() for part in samples.unbind()])
    return samples.cpu()
