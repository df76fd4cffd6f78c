"""Wan variants, refused by class name, header or tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file, save_file

from wanstream.wan.checkpoint.detect import OTHER_MODELS, refuse_other_models
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.checkpoint.open import open_expert

Write = Callable[..., Path]


def _config(**transformer: Any) -> str:
    return json.dumps({"transformer": transformer})


REFUSED = {
    "animate2": (
        _config(model_type="animate2"),
        "is another model: its header says that model_type is 'animate2'",
    ),
    "flow_rvs": (_config(model_type="flow_rvs"), "model_type is 'flow_rvs'"),
    "vace": (_config(model_type="vace", vace_layers=8), "model_type is 'vace'"),
    "a list": (_config(model_type=["t2v"]), r"model_type is \['t2v'\]"),
    "causal": (_config(model_type="t2v", causal_ar=True), "is a causal model"),
    "another family": (_config(image_model="flux"), "image_model is 'flux'"),
    "no JSON": ("{", "has a config in its header that is not JSON"),
    "deep JSON": ("[" * 100_000, "has a config in its header that is not JSON"),
    "no object": ("[]", "is not a JSON object"),
    "no object within": (json.dumps({"transformer": "t2v"}), "is not a JSON object"),
    "nothing within": (json.dumps({"transformer": None}), "is not a JSON object"),
}
"""Header config, and the refusal. ComfyUI cannot load a non-object config either."""

ACCEPTED = {
    "t2v": _config(model_type="t2v"),
    "i2v": _config(model_type="i2v", image_model="wan2.1"),
    "ti2v": _config(model_type="ti2v"),
    "not causal": _config(causal_ar=False),
    "sizes": _config(dim=5120, num_layers=40, eps=1e-6),
    "a VAE": json.dumps({"vae": {"model_type": "animate2"}}),
    "nothing": "{}",
}


@pytest.fixture
def with_config(tiny_expert_file: Write, tmp_path: Path) -> Write:
    """`with_config(config, in_channels=16)`: a tiny expert file with this config in the header."""

    def write(config: str, **shape: int) -> Path:
        path = tmp_path / "expert.safetensors"
        save_file(load_file(tiny_expert_file(**shape)), path, {"format": "pt", "config": config})
        return path

    return write


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("in_channels", [16, 36])
def test_a_header_that_declares_another_model_is_refused(
    with_config: Write, config: str, message: str, in_channels: int
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_expert(with_config(config, in_channels=in_channels))


@pytest.mark.parametrize("config", ACCEPTED.values(), ids=ACCEPTED)
def test_a_header_that_declares_one_of_ours_is_opened(with_config: Write, config: str) -> None:
    assert open_expert(with_config(config)).config.family == "t2v"


def test_the_field_of_a_gguf_file_counts_as_well(tiny_expert_file: Write, tmp_path: Path) -> None:
    path = tmp_path / "expert.gguf"
    writer = GGUFWriter(path, "wan")
    writer.add_string("config", _config(model_type="animate2"))
    for name, tensor in load_file(tiny_expert_file()).items():
        writer.add_tensor(name, tensor.flatten(2).numpy() if tensor.ndim == 5 else tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "config" in GGUFReader(path).fields
    with pytest.raises(CheckpointError, match="model_type is 'animate2'"):
        open_expert(path)


@pytest.mark.parametrize(
    "named", ["WanAnimate2Transformer3DModel", "WanVACETransformer3DModel", None]
)
def test_a_folder_of_another_class_is_refused(
    tiny_expert_folder: Write, tmp_path: Path, named: str | None
) -> None:
    folder = tmp_path / "transformer"
    shutil.copytree(tiny_expert_folder(), folder)
    config = json.loads((folder / "config.json").read_text())
    assert open_expert(folder).config.family == "t2v"
    (folder / "config.json").write_text(json.dumps({**config, "_class_name": named}))
    with pytest.raises(CheckpointError, match=f"is a {named}, not a WanTransformer3DModel"):
        open_expert(folder)
    del config["_class_name"]
    (folder / "config.json").write_text(json.dumps(config))
    assert open_expert(folder).config.family == "t2v"


@pytest.mark.parametrize(
    ("class_name", "kind", "refusal"),
    [
        ("WanModel", "t2v", None),
        ("WanModel", None, None),
        ("WanModel", "vace", "has the model_type 'vace'"),
        ("WanModel", ["t2v"], r"has the model_type \['t2v'\]"),
        (
            "WanAnimateModel",
            "animate",
            "is a WanAnimateModel, not a WanTransformer3DModel or WanModel",
        ),
    ],
)
def test_a_folder_of_the_original_class_is_opened_where_its_type_can_run(
    tiny_expert_file: Write, tmp_path: Path, class_name: str, kind: object, refusal: str | None
) -> None:
    shutil.copy(tiny_expert_file(), tmp_path / "diffusion_pytorch_model.safetensors")
    config = {"_class_name": class_name, "dim": 128, "num_layers": 2} | (
        {} if kind is None else {"model_type": kind}
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    if refusal is None:
        assert open_expert(tmp_path).config.family == "t2v"
    else:
        with pytest.raises(CheckpointError, match=refusal):
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
    "patch_embedding_mask.weight": "SCAIL-2",
    "patch_embedding_pose.weight": "SCAIL model",
    "patch_embedding_global.weight": "WanDancer",
    "img_emb.emb_pos": "first and last frame",
}


@pytest.mark.parametrize(("key", "name"), VARIANTS.items())
def test_a_variant_is_named_by_its_tensor(key: str, name: str) -> None:
    with pytest.raises(CheckpointError, match=name) as refused:
        refuse_other_models(Path("x"), ["blocks.0.ffn.0.weight", key])
    assert key in str(refused.value)


def test_every_variant_that_is_known_by_a_tensor_is_in_the_table() -> None:
    starts = [start for found, model in OTHER_MODELS for start in found if "LoRA" not in model]
    known = [start for start in starts if any(key.startswith(start) for key in VARIANTS)]
    assert set(starts) - set(known) == {
        "motion_encoder.",
        "pose_patch_embedding.",
        "audio_injector.",
        "trainable_cond_mask.",
        "condition_embedder.image_embedder.pos_embed",
    }, "other tensors of variants that are in the table"


@pytest.mark.parametrize(
    ("channels", "name"),
    [
        (20, "SCAIL model"),
        (32, "camera control model of Wan2.1"),
    ],
)
def test_a_variant_is_named_by_its_channels(
    tiny_expert_file: Write, tmp_path: Path, channels: int, name: str
) -> None:
    tensors = load_file(tiny_expert_file())
    old = tensors["patch_embedding.weight"]
    tensors["patch_embedding.weight"] = torch.zeros(len(old), channels, 1, 2, 2)
    save_file(tensors, tmp_path / "expert.safetensors")
    with pytest.raises(
        CheckpointError, match=f"is a {name}.*: patch_embedding.weight takes {channels} channels"
    ):
        open_expert(tmp_path / "expert.safetensors")
