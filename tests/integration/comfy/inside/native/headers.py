"""Runs in ComfyUI's own Python: the loader on real architectures' headers.

It finds ComfyUI's class and the blocks in the docs. The files are as large as bf16 models, without
content, and none is read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import comfy.model_base
import torch

from wanstream.host.comfy.native.streamed import model as native_model

from ..checks import for_each, require
from ..families import FLUX, HUNYUAN_15
from ..further_families import CHROMA, COSMOS_2, FLUX_2, LUMINA, LUMINA_2, SD3
from ..pack import ROOT
from ..tiny_models import Files, empty_network, write_header

setup = Files


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


def _wan(base, network, model_type="t2v", channels=16, **more):
    sizes = {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40}
    settings = {**sizes, "in_dim": channels, "model_type": model_type, **more}
    return Architecture(base, f"wan.{network}", settings)


def _flux_2(width, text, depth, single, **more):
    heads = width // 128
    sizes = {"hidden_size": width, "context_in_dim": text, "num_heads": heads}
    depths = {"depth": depth, "depth_single_blocks": single}
    return Architecture("Flux2", "flux.model.Flux", {**FLUX_2, **sizes, **depths, **more})


ARCHITECTURES = {
    "Wan 14B T2V": _wan("WAN21", "model.WanModel"),
    "Wan2.1 14B I2V": _wan("WAN21", "model.WanModel", "i2v", 36),
    "Wan2.2 14B I2V": _wan("WAN21", "model.WanModel", channels=36),
    "Wan Bernini 14B": _wan("WAN21", "model.WanModel"),
    "Wan2.2 TI2V-5B": _wan("WAN22", "model.WanModel", channels=48, out_dim=48, dim=3072,
        ffn_dim=14336, num_heads=24, num_layers=30),
    "Wan VACE 14B": _wan("WAN21_Vace", "model.VaceWanModel", "vace", vace_layers=8, vace_in_dim=96),
    "Wan2.2 Animate 14B": _wan("WAN22_Animate", "model_animate.AnimateWanModel", "animate", 36),
    "Wan Animate 2 14B": Architecture("WAN_Animate2", "wan.model_animate2.WanAnimate2Model",
        {"in_dim": 36}, {"model_type": "animate2"}),
    "Wan2.2 S2V 14B": _wan("WAN22_S2V", "model.WanModel_S2V", "s2v"),
    "Wan HuMo 17B": _wan("WAN21_HuMo", "model.HumoWanModel", "humo", 36),
    "Wan 14B camera control": _wan("WAN21_Camera", "model.CameraWanModel", "camera", 32),
    "Wan SCAIL 14B": _wan("WAN21_SCAIL", "model.SCAILWanModel", "scail", 20),
    "Wan SCAIL-2 14B": _wan("WAN21_SCAIL2", "model.SCAIL2WanModel", "scail2", 20),
    "Wan Dancer 14B": _wan("WAN22_WanDancer", "model_wandancer.WanDancerModel", "wandancer", 36),
    "Flux dev": Architecture("Flux", "flux.model.Flux", {**FLUX, "hidden_size": 3072,
        "num_heads": 24, "depth": 19, "depth_single_blocks": 38}),
    "FLUX.2 dev": _flux_2(6144, 15360, 8, 48),
    "FLUX.2 Klein 9B": _flux_2(4096, 12288, 8, 24, guidance_embed=False),
    "FLUX.2 Klein 4B": _flux_2(3072, 7680, 5, 20, guidance_embed=False),
    "Chroma": Architecture("Chroma", "chroma.model.Chroma", {**CHROMA, "context_in_dim": 4096,
        "hidden_size": 3072, "num_heads": 24, "depth": 19, "depth_single_blocks": 38,
        "out_dim": 3072, "hidden_dim": 5120, "n_layers": 5}),
    "Qwen-Image": Architecture("QwenImage", "qwen_image.model.QwenImageTransformer2DModel",
        {"num_layers": 60}),
    "HunyuanVideo 1.5": Architecture("HunyuanVideo15", "hunyuan_video.model.HunyuanVideo",
        {**HUNYUAN_15, "hidden_size": 2048, "num_heads": 16, "depth": 54}),
    "LTXV 2B": Architecture("LTXV", "lightricks.model.LTXVModel", {}),
    "LTXV 13B": Architecture("LTXV", "lightricks.model.LTXVModel",
        {"num_layers": 48, "attention_head_dim": 128, "cross_attention_dim": 4096}),
    "LTX-2": Architecture("LTXAV", "lightricks.av_model.LTXAVModel", {"num_layers": 48}),
    "LTX-2.3": Architecture("LTXAV", "lightricks.av_model.LTXAVModel",
        {"num_layers": 48, **LTX_2_3}, LTX_2_3),
    "MiniMax-H3": Architecture("MiniMaxH3", "minimax.model.MiniMaxH3Model", {}),
    "MiniMax-H3 with a time curve": Architecture("MiniMaxH3", "minimax.model.MiniMaxH3Model",
        {"adaln_curve_grid": 1025, "time_embed_dim": 16}),
    "Lumina 2": Architecture("Lumina2", "lumina.model.NextDiT", {**LUMINA_2, "dim": 2304,
        "n_layers": 26, "n_heads": 24, "n_kv_heads": 8, "cap_feat_dim": 2304,
        "axes_dims": [32, 32, 32], "ffn_dim_multiplier": 4.0}),
    "Omnigen2": Architecture("Omnigen2", "omnigen.omnigen2.OmniGen2Transformer2DModel",
        {"hidden_size": 2520, "num_layers": 32, "num_attention_heads": 21, "num_kv_heads": 7,
        "text_feat_dim": 2048, "timestep_scale": 1000.0, "axes_dim_rope": (40, 40, 40)}),
    "Ideogram 4": Architecture("Ideogram4", "ideogram4.model.Ideogram4Transformer2DModel", {}),
    "Z-Image Turbo": Architecture("Lumina2", "lumina.model.NextDiT", {**LUMINA, "dim": 3840,
        "n_layers": 30, "n_heads": 30, "n_kv_heads": 30, "cap_feat_dim": 2560}),
    "Krea 2": Architecture("Krea2", "krea2.model.SingleStreamDiT", {}),
    "SD3.5 large": Architecture("SD3", "modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper",
        {**SD3, "depth": 38, "adm_in_channels": 2048, "x_block_self_attn_layers": [],
        "context_embedder_config": {"target": "torch.nn.Linear",
        "params": {"in_features": 4096, "out_features": 2432}}}),
    "HiDream I1": Architecture("HiDream", "hidream.model.HiDreamImageTransformer2DModel",
        {"attention_head_dim": 128, "axes_dims_rope": [64, 32, 32], "in_channels": 16,
        "caption_channels": [4096, 4096], "llama_layers": [*range(48)], "num_attention_heads": 20,
        "out_channels": 16, "patch_size": 2, "num_layers": 16, "num_single_layers": 32}),
    "Kandinsky 5 pro": Architecture("Kandinsky5", "kandinsky5.model.Kandinsky5", {"model_dim": 4096,
        "ff_dim": 16384, "time_dim": 1024, "num_text_blocks": 4, "num_visual_blocks": 60,
        "axes_dims": (32, 48, 48)}),
    "Ernie-Image": Architecture("ErnieImage", "ernie.model.ErnieImageModel", {}),
    "Cosmos-Predict2 14B": Architecture("CosmosPredict2", "cosmos.predict2.MiniTrainDIT",
        {**COSMOS_2, "model_channels": 5120, "num_blocks": 36, "num_heads": 40,
        "crossattn_emb_channels": 1024, "adaln_lora_dim": 256}),
}  # fmt: skip
"""Architectures in real sizes, by ComfyUI's model class."""


def _rows():
    """Return sizes in the docs' tables by family."""
    rows = {}
    for line in (ROOT / "docs" / "native-families.md").read_text(encoding="utf-8").splitlines():
        _, *cells, _ = line.split(" | ") if line.startswith("| ") else ("", "")
        if cells and cells[0].endswith(" GB"):
            name = line.split(" | ")[0].removeprefix("| ")
            rows[name.partition(",")[0].partition(" (")[0]] = cells[:3]
    return rows


def _opened(path, architecture):
    """Return the loader's findings in a file for an architecture, as the docs have them."""
    shapes = empty_network(f"comfy.ldm.{architecture.network}", **architecture.settings)
    config = {"config": json.dumps({"transformer": dict(architecture.metadata)})}
    tensors = {key: ("BF16", shape, 2) for key, shape in shapes.items()}
    total = write_header(path, tensors, config if architecture.metadata else {})

    def unread(places):
        return {
            name: torch.empty(place.shape, dtype=place.dtype, device="meta")
            for name, place in places.items()
        }

    with patch.object(native_model, "read_tensors", unread):
        model = native_model.open_native(path, loader="Load Diffusion Model")
    assert type(model).__name__ == architecture.base
    blocks = [each.stored.nbytes for each in model.weights.formats.values()]
    sizes = Counter(round(nbytes / 1e6) for nbytes in blocks)
    return [
        f"{total / 1e9:.1f} GB",
        f"{100 * sum(blocks) / total:.1f} %",
        ", ".join(f"{sizes[size]} x {size} MB" for size in sorted(sizes, reverse=True)),
    ]


@for_each(*ARCHITECTURES)
def check_the_loader_finds_the_blocks_that_the_docs_list(files, name):
    require(hasattr(comfy.model_base, "WAN_Animate2"), "newer architectures")
    assert _opened(files.folder / "model.safetensors", ARCHITECTURES[name]) == _rows()[name]


def check_the_docs_list_no_others(_):
    assert _rows().keys() == ARCHITECTURES.keys()
