"""Wan variants, refused by class name, header or tensors."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from wanstream.wan.checkpoint.detect import OTHER_MODELS, refuse_other_models
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.checkpoint.open import open_expert


def _config(**transformer):
    return json.dumps({"transformer": transformer})


CLASS = "_class_name"
# ComfyUI cannot load a non-object config either.
HEADERS = [
    (_config(model_type="animate2"), "its header says that model_type is 'animate2'"),
    (_config(model_type=["t2v"]), r"model_type is \['t2v'\]"),
    (_config(model_type="t2v", causal_ar=True), "is a causal model"),
    (_config(image_model="flux"), "image_model is 'flux'"),
    ("[" * 100_000, "has a config in its header that is not JSON"),
    ("[]", "is not a JSON object"),
    (json.dumps({"transformer": None}), "is not a JSON object"),
    (_config(model_type="t2v", causal_ar=False), None),
    (_config(model_type="ti2v", dim=5120), None),
    (_config(image_model="wan2.1"), None),
    (json.dumps({"vae": {"model_type": "animate2"}}), None),
]


@pytest.mark.parametrize(("config", "refusal"), HEADERS, ids=[row[0][:60] for row in HEADERS])
def test_config_in_the_header(changed_expert, config, refusal):
    with pytest.raises(CheckpointError, match=refusal) if refusal else nullcontext():
        open_expert(changed_expert({}, {"config": config}))


@pytest.mark.parametrize(
    ("config", "refusal"),
    [
        ({CLASS: "WanVACETransformer3DModel"}, "is a WanVACE.*, not a WanTransformer3DModel"),
        ({CLASS: "WanAnimateModel"}, "is a WanAnimateModel, not .* or WanModel"),
        ({CLASS: None}, "is a None, not a WanTransformer3DModel"),
        ({CLASS: "WanModel", "model_type": "vace"}, "has the model_type 'vace'"),
        ({CLASS: "WanModel", "model_type": ["t2v"]}, r"has the model_type \['t2v'\]"),
        ({CLASS: "WanModel", "model_type": "t2v", "dim": 128}, None),
        ({CLASS: "WanModel"}, None),
        ({CLASS: "WanTransformer3DModel", "model_type": "vace"}, None),
        ({}, None),
    ],
)
def test_class_in_a_folder(tiny_expert_file, tmp_path, config, refusal):
    shutil.copy(tiny_expert_file(), tmp_path / "diffusion_pytorch_model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=refusal) if refusal else nullcontext():
        open_expert(tmp_path)


# Tensors by which ComfyUI detects variants (comfy/model_detection.py), and names in our refusal.
VARIANTS = {
    "vace_patch_embedding.weight": "VACE",
    "vace_blocks.0.after_proj.weight": "VACE",
    "control_adapter.conv.weight": "camera control",
    "casual_audio_encoder.encoder.final_linear.weight": "speech-to-video",
    "audio_proj.audio_proj_glob_1.layer.bias": "HuMo",
    "audio_proj.proj1.weight": "InfiniteTalk",
    "face_adapter.fuser_blocks.0.k_norm.weight": "Animate",
    "motion_encoder.enc.net_app.convs.0.1.bias": "Animate",
    "patch_embedding_mask.weight": "SCAIL-2",
    "patch_embedding_pose.weight": "SCAIL model",
    "patch_embedding_global.weight": "WanDancer",
    "img_emb.emb_pos": "first and last frame",
}


@pytest.mark.parametrize(("key", "name"), VARIANTS.items())
def test_variant_is_named_by_its_tensor(key, name):
    with pytest.raises(CheckpointError, match=name) as refused:
        refuse_other_models(Path("x"), ["blocks.0.ffn.0.weight", key])
    assert key in str(refused.value)


def test_every_variant_is_in_the_table():
    starts = {start for found, model in OTHER_MODELS for start in found if "LoRA" not in model}
    # Further tensors of variants that are in the table.
    further = {"pose_patch_embedding.", "audio_injector.", "trainable_cond_mask."}
    further |= {"condition_embedder.image_embedder.pos_embed"}
    known = {start for start in starts if any(key.startswith(start) for key in VARIANTS)}
    assert starts - known == further
