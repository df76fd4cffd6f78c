"""Runs in ComfyUI's own Python: the loader on real architectures' headers.

The files are as large as bf16 models, without content, and none is read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import comfy.model_base
import comfy.ops
import torch
from further_families import CHROMA, FLUX_2, LUMINA
from installed_pack import load_pack
from native_families import results_of

load_pack()
from wanstream.host.comfy.native.streamed import model as native_model  # noqa: E402


@dataclass(frozen=True)
class Architecture:
    """A diffusion model in real size."""

    base: str
    """The detected class in `comfy.model_base`."""
    network: str
    """The class below `comfy.ldm`."""
    settings: Mapping[str, Any]
    """Class arguments."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Configuration in a file's metadata."""


LTX_2_3 = {
    "apply_gated_attention": True,
    "caption_proj_before_connector": True,
    "cross_attention_adaln": True,
}
"""LTX-2.3 settings in addition to LTX-2."""


def _wan(
    base: str, network: str, model_type: str = "t2v", channels: int = 16, **more: Any
) -> Architecture:
    sizes = {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40}
    settings = {**sizes, "in_dim": channels, "model_type": model_type, **more}
    return Architecture(base, f"wan.{network}", settings)


def _flux_2(width: int, text: int, depth: int, single: int, **more: Any) -> Architecture:
    heads = width // 128
    sizes = {"hidden_size": width, "context_in_dim": text, "num_heads": heads}
    depths = {"depth": depth, "depth_single_blocks": single}
    return Architecture("Flux2", "flux.model.Flux", {**FLUX_2, **sizes, **depths, **more})


ARCHITECTURES: dict[str, Architecture] = {
    "Wan 14B T2V": _wan("WAN21", "model.WanModel"),
    "Wan2.1 14B I2V": _wan("WAN21", "model.WanModel", "i2v", 36),
    "Wan2.2 14B I2V": _wan("WAN21", "model.WanModel", channels=36),
    "Wan Bernini 14B": _wan("WAN21", "model.WanModel"),
    "Wan2.2 TI2V-5B": _wan(
        "WAN22", "model.WanModel", channels=48, out_dim=48, dim=3072, ffn_dim=14336, num_heads=24,
        num_layers=30,
    ),
    "Wan VACE 14B": _wan("WAN21_Vace", "model.VaceWanModel", "vace", vace_layers=8, vace_in_dim=96),
    "Wan2.2 Animate 14B": _wan("WAN22_Animate", "model_animate.AnimateWanModel", "animate", 36),
    "Wan Animate 2 14B": Architecture(
        "WAN_Animate2", "wan.model_animate2.WanAnimate2Model", {"in_dim": 36},
        {"model_type": "animate2"},
    ),
    "Wan2.2 S2V 14B": _wan("WAN22_S2V", "model.WanModel_S2V", "s2v"),
    "Wan HuMo 17B": _wan("WAN21_HuMo", "model.HumoWanModel", "humo", 36),
    "Wan 14B camera control": _wan("WAN21_Camera", "model.CameraWanModel", "camera", 32),
    "Wan SCAIL 14B": _wan("WAN21_SCAIL", "model.SCAILWanModel", "scail", 20),
    "Wan SCAIL-2 14B": _wan("WAN21_SCAIL2", "model.SCAIL2WanModel", "scail2", 20),
    "Wan Dancer 14B": _wan("WAN22_WanDancer", "model_wandancer.WanDancerModel", "wandancer", 36),
    "Flux dev": Architecture(
        "Flux", "flux.model.Flux",
        {
            "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096,
            "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "depth": 19,
            "depth_single_blocks": 38, "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2,
            "qkv_bias": True, "guidance_embed": True, "txt_ids_dims": [],
        },
    ),
    "FLUX.2 dev": _flux_2(6144, 15360, 8, 48),
    "FLUX.2 Klein 9B": _flux_2(4096, 12288, 8, 24, guidance_embed=False),
    "Chroma": Architecture(
        "Chroma", "chroma.model.Chroma",
        {
            **CHROMA, "context_in_dim": 4096, "hidden_size": 3072, "num_heads": 24, "depth": 19,
            "depth_single_blocks": 38, "out_dim": 3072, "hidden_dim": 5120, "n_layers": 5,
        },
    ),
    "Qwen-Image": Architecture(
        "QwenImage", "qwen_image.model.QwenImageTransformer2DModel", {"num_layers": 60}
    ),
    "HunyuanVideo 1.5": Architecture(
        "HunyuanVideo15", "hunyuan_video.model.HunyuanVideo",
        {
            "in_channels": 65, "out_channels": 32, "vec_in_dim": None, "context_in_dim": 3584,
            "hidden_size": 2048, "mlp_ratio": 4.0, "num_heads": 16, "depth": 54,
            "depth_single_blocks": 0, "axes_dim": [16, 56, 56], "theta": 256,
            "patch_size": [1, 1, 1], "qkv_bias": True, "guidance_embed": False, "byt5": True,
            "meanflow": False, "use_cond_type_embedding": True, "vision_in_dim": 1152,
            "meanflow_sum": True,
        },
    ),
    "LTX-2": Architecture("LTXAV", "lightricks.av_model.LTXAVModel", {"num_layers": 48}),
    "LTX-2.3": Architecture(
        "LTXAV", "lightricks.av_model.LTXAVModel", {"num_layers": 48, **LTX_2_3}, LTX_2_3
    ),
    "MiniMax-H3": Architecture("MiniMaxH3", "minimax.model.MiniMaxH3Model", {}),
    "Z-Image Turbo": Architecture(
        "Lumina2", "lumina.model.NextDiT",
        {**LUMINA, "dim": 3840, "n_layers": 30, "n_heads": 30, "n_kv_heads": 30,
         "cap_feat_dim": 2560},
    ),
    "Krea 2": Architecture("Krea2", "krea2.model.SingleStreamDiT", {}),
    "SD3.5 large": Architecture(
        "SD3", "modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper",
        {
            "patch_size": 2, "in_channels": 16, "depth": 38, "adm_in_channels": 2048,
            "input_size": None, "num_patches": 192 * 192, "pos_embed_max_size": 192,
            "qk_norm": "rms", "pos_embed_scaling_factor": None,
            "context_embedder_config": {
                "target": "torch.nn.Linear",
                "params": {"in_features": 4096, "out_features": 2432},
            },
        },
    ),
    "HiDream I1": Architecture(
        "HiDream", "hidream.model.HiDreamImageTransformer2DModel",
        {
            "attention_head_dim": 128, "axes_dims_rope": [64, 32, 32],
            "caption_channels": [4096, 4096], "in_channels": 16, "llama_layers": [*range(48)],
            "num_attention_heads": 20, "out_channels": 16, "patch_size": 2, "num_layers": 16,
            "num_single_layers": 32,
        },
    ),
    "Kandinsky 5 pro": Architecture(
        "Kandinsky5", "kandinsky5.model.Kandinsky5",
        {
            "model_dim": 4096, "ff_dim": 16384, "time_dim": 1024, "num_text_blocks": 4,
            "num_visual_blocks": 60, "axes_dims": (32, 48, 48),
        },
    ),
    "Ernie-Image": Architecture("ErnieImage", "ernie.model.ErnieImageModel", {}),
    "Cosmos-Predict2 14B": Architecture(
        "CosmosPredict2", "cosmos.predict2.MiniTrainDIT",
        {
            "max_img_h": 240, "max_img_w": 240, "max_frames": 128, "in_channels": 16,
            "out_channels": 16, "patch_spatial": 2, "patch_temporal": 1, "model_channels": 5120,
            "num_blocks": 36, "num_heads": 40, "crossattn_emb_channels": 1024,
            "pos_emb_cls": "rope3d", "pos_emb_learnable": True, "use_adaln_lora": True,
            "adaln_lora_dim": 256,
        },
    ),
}  # fmt: skip
"""Architectures in real sizes, by ComfyUI's model class."""


def write_header(path: Path, architecture: Architecture) -> int:
    """Write a safetensors header and a tensor-sized hole. Return the hole's bytes."""
    module, _, name = architecture.network.rpartition(".")
    with torch.device("meta"):
        model = getattr(import_module(f"comfy.ldm.{module}"), name)(
            **architecture.settings,
            dtype=torch.bfloat16,
            device="meta",
            operations=comfy.ops.disable_weight_init,
        )
    header: dict[str, Any] = {}
    if architecture.metadata:
        transformer = dict(architecture.metadata)
        header["__metadata__"] = {"config": json.dumps({"transformer": transformer})}
    end = 0
    for key, tensor in model.state_dict().items():
        begin, end = end, end + 2 * tensor.numel()
        shape = list(tensor.shape)
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(file.tell() + end)
    return end


def opened(folder: Path, architecture: Architecture) -> dict[str, Any]:
    """Return the loader's findings in a file for an architecture."""
    path = folder / "model.safetensors"
    total = write_header(path, architecture)

    def unread(places: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {
            name: torch.empty(place.shape, dtype=place.dtype, device="meta")
            for name, place in places.items()
        }

    with patch.object(native_model, "read_tensors", unread):
        model: Any = native_model.open_native(path, loader="Load Diffusion Model")
    path.unlink()
    blocks = [each.stored.nbytes for each in model.weights.formats.values()]
    sizes = Counter(round(nbytes / 1e6) for nbytes in blocks)
    return {
        "class": type(model).__name__ == architecture.base,
        "figures": [
            f"{total / 1e9:.1f} GB",
            f"{100 * sum(blocks) / total:.1f} %",
            ", ".join(f"{sizes[size]} x {size} MB" for size in sorted(sizes, reverse=True)),
        ],
    }


@torch.inference_mode()
def answers(folder: str) -> dict[str, object]:
    """Return one value per architecture, or none in versions that lack some."""
    if not hasattr(comfy.model_base, "WAN_Animate2"):
        return {}
    return results_of(
        {
            name: partial(opened, Path(folder), architecture)
            for name, architecture in ARCHITECTURES.items()
        }
    )
