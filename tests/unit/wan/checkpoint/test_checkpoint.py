"""Opened experts: each parameter's location and value in every layout, and named faults."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from wanstream.offload.formats import decode_tensor
from wanstream.offload.sources import read_scales, read_tensors
from wanstream.testing.experts import block_linears, save_expert_file
from wanstream.tests.support.quantised_files import FP8_E5M2_LAYOUTS
from wanstream.tests.support.quantised_files import dequantised as dequantised_model
from wanstream.wan.checkpoint.files import INDEX, WEIGHTS, CheckpointError
from wanstream.wan.checkpoint.open import open_expert

PREFIX = "model.diffusion_model."
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def dequantised(expert):
    """Return an opened expert's parameters in fp32."""
    stored, scales, values = read_tensors(expert.weights), read_scales(expert.scales), {}
    for name, weight in expert.weights.items():
        values[name] = torch.empty(weight.shape)
        decode_tensor(stored[name], values[name], packing=weight.packing, scale=scales.get(name))
    return values


def assert_holds(expert, model):
    """Compare the expert's files with the parameters in `model`, no more and no fewer."""
    values, expected = dequantised(expert), model.state_dict()
    assert values.keys() == expected.keys()
    for name, value in values.items():
        assert torch.equal(value, expected[name]), name


def public(config):
    return {name: value for name, value in config.items() if not name.startswith("_")}


def in_dtype(model, dtype):
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    return model


def rounded_matrices(model, dtype):
    for linear in block_linears(model).values():
        linear.weight.data = linear.weight.data.to(dtype).float()
    return model


@pytest.fixture
def edited(tiny_expert_file, tmp_path):
    """`edited(change, **file)`: a tiny file after `change(tensors, metadata)`.

    Keys are ComfyUI's.
    """

    def edit(change, **file):
        source, path = tiny_expert_file(**file), tmp_path / "edited.safetensors"
        with safe_open(source, framework="pt") as opened:
            metadata = opened.metadata()
        tensors = load_file(source)
        change(tensors, metadata)
        save_file(tensors, path, metadata)
        return path

    return edit


class TestLayouts:
    @pytest.mark.parametrize("in_channels", [16, 36])
    @pytest.mark.parametrize("shards", [1, 4])
    def test_diffusers_folder(self, tiny_expert_folder, make_tiny_expert, shards, in_channels):
        expert = open_expert(tiny_expert_folder(shards=shards, in_channels=in_channels))
        assert expert.config.in_channels == in_channels
        assert_holds(expert, make_tiny_expert(in_channels=in_channels))

    def test_diffusers_keys_in_a_single_file(self, tiny_expert_folder, make_tiny_expert):
        assert_holds(open_expert(tiny_expert_folder() / WEIGHTS), make_tiny_expert())

    @pytest.mark.parametrize("prefix", ["", PREFIX])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_native_file(self, tiny_expert_file, make_tiny_expert, dtype, prefix):
        expert = open_expert(tiny_expert_file(dtype=dtype, prefix=prefix))
        assert {tensor.dtype for tensor in expert.weights.values()} == {dtype}
        assert_holds(expert, in_dtype(make_tiny_expert(), dtype))

    def test_fp8_file(self, tiny_expert_file, make_tiny_expert, fp8_layout):
        expert = open_expert(tiny_expert_file(fp8=fp8_layout, dtype=torch.float16, prefix=PREFIX))
        assert len(expert.scales) == 40  # four blocks with ten matrices
        assert_holds(expert, make_tiny_expert(dequantised_from=torch.float16))

    def test_fp8_metadata_may_name_layers_with_the_prefix(self, edited, make_tiny_expert):
        def prefix_layers(tensors, metadata):
            layers = json.loads(metadata["_quantization_metadata"])["layers"]
            prefixed = {PREFIX + layer: settings for layer, settings in layers.items()}
            metadata["_quantization_metadata"] = json.dumps({"layers": prefixed})

        expert = open_expert(edited(prefix_layers, fp8="metadata"))
        assert_holds(expert, make_tiny_expert(dequantised_from=torch.float32))

    def test_fp8_outside_the_blocks(self, edited, make_tiny_expert):
        def quantise(tensors, metadata):
            tensors["time_projection.1.weight"] = (tensors["time_projection.1.weight"] * 2).to(
                torch.float8_e4m3fn
            )
            tensors["time_projection.1.scale_weight"] = torch.tensor(0.5)

        values = dequantised(open_expert(edited(quantise, fp8="scaled_fp8")))
        original = make_tiny_expert().condition_embedder.time_proj.weight
        name = "condition_embedder.time_proj.weight"
        assert torch.equal(values[name], (original * 2).to(torch.float8_e4m3fn).float() * 0.5)

    def test_config_is_that_of_the_model(self, tiny_expert_file, make_tiny_expert):
        shape = {"layers": 3, "heads": 3, "ffn_dim": 256, "in_channels": 36}
        expert = open_expert(tiny_expert_file(**shape))
        rebuilt, original = (
            WanTransformer3DModel(**expert.config.model_arguments()),
            make_tiny_expert(**shape),
        )
        assert public(rebuilt.config) == public(original.config)
        assert expert.config.family == "i2v"


def without(key):
    return lambda tensors, metadata: tensors.pop(key)


def with_tensor(key, *shape, dtype=torch.float32):
    return lambda tensors, metadata: tensors.update({key: torch.zeros(shape, dtype=dtype)})


def with_metadata(key, value):
    return lambda tensors, metadata: metadata.update({key: json.dumps(value)})


def with_json(key, value):
    text = json.dumps(value).encode()
    return lambda tensors, metadata: tensors.update(
        {key: torch.tensor(list(text), dtype=torch.uint8)}
    )


Q = "blocks.1.self_attn.q"

WRONG_TENSORS = [
    (without("blocks.2.ffn.0.weight"), "blocks.2.ffn.net.0.proj.weight .*is missing"),
    (without("blocks.0.ffn.0.weight"), "blocks.0.ffn.net.0.proj.weight .*is missing"),
    (without("head.head.weight"), r"proj_out.weight \(natively head.head.weight\) is missing"),
    (without("head.head.bias"), r"proj_out.bias \(natively head.head.bias\) \[64\] is missing"),
    (without("patch_embedding.weight"), "patch_embedding.weight .*is missing"),
    (
        with_tensor("blocks.1.norm3.bias", 255),
        r"blocks.1.norm3.bias .*is \[255\]; \[256\] is expected",
    ),
    (
        with_tensor("patch_embedding.weight", 256, 64),
        r"patch_embedding.weight is \[256, 64\]; 5 sizes",
    ),
    (with_tensor("patch_embedding.weight", 200, 16, 1, 2, 2), "200 wide"),
    (with_tensor("patch_embedding.weight", 256, 24, 1, 2, 2), "24 channels"),
    (
        with_tensor("blocks.1.norm3.bias", 256, dtype=torch.int8),
        "blocks.1.norm3.bias .*is torch.int8",
    ),
    (
        with_tensor("blocks.1.norm3.bias", 256, dtype=torch.float64),
        "blocks.1.norm3.bias .*is torch.float64",
    ),
    (with_tensor("something.else", 3), "something.else .*does not belong"),
    (
        with_tensor("blocks.1.self_attn.extra.weight", 3),
        "blocks.1.self_attn.extra.weight .*does not belong",
    ),
    (
        with_tensor("blocks.9.norm3.bias", 256),
        "blocks.9.norm3.bias .*does not belong|blocks.4.* is missing",
    ),
    (
        with_tensor("first_stage_model.encoder.weight", 3),
        "first_stage_model.encoder.weight .*does not belong",
    ),
    (with_tensor(f"{PREFIX}head.head.bias", 64), "head.head.bias means the same parameter"),
    (with_tensor("proj_out.bias", 64), "means the same parameter"),
    (with_tensor("img_emb.proj.0.weight", 3), r"natively img_emb.proj.1.weight\) is missing"),
    (with_tensor("img_emb.proj.1.weight", 80, 80), "has an image branch, but takes 16 channels"),
    (
        with_tensor("img_emb.emb_pos", 1, 514, 80),
        "first and last frame model of Wan2.1.*img_emb.emb_pos",
    ),
    (with_tensor("vace_blocks.0.after_proj.weight", 3), "VACE.*vace_blocks.0"),
    (with_tensor("control_adapter.conv.weight", 3), "camera control.*control_adapter.conv.weight"),
    (
        with_tensor("ref_conv.weight", 256, 48, 2, 2),
        "takes 48 channels, and the latents of this model have 16",
    ),
    (with_tensor("ref_conv.weight", 3), r"ref_conv.weight is \[3\]; 4 sizes"),
    (
        with_tensor("casual_audio_encoder.encoder.final_linear.weight", 3),
        "speech-to-video.*casual_audio",
    ),
    (with_tensor("face_adapter.fuser_blocks.0.k_norm.weight", 3), "Animate.*face_adapter"),
    (with_tensor("motion_encoder.enc.net_app.convs.0.1.bias", 3), "Animate.*motion_encoder"),
    (lambda tensors, metadata: tensors.clear(), "not a Wan transformer: it holds no tensors"),
    (
        lambda tensors, metadata: tensors.clear() or tensors.update(x=torch.zeros(1)),
        "not a Wan transformer.*x first",
    ),
]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def without_scales_and_marks(tensors, metadata):
    """Remove an fp8 file's layer metadata and scales."""
    metadata["_quantization_metadata"] = json.dumps({"layers": {}})
    for key in [key for key in tensors if key.endswith(".weight_scale")]:
        del tensors[key]


WRONG_FP8 = [
    (
        "scaled_fp8",
        without(f"{Q}.scale_weight"),
        f"{Q} is marked as quantised, but its scale {Q}.scale_weight is missing",
    ),
    (
        "scaled_fp8",
        with_tensor(f"{Q}.scale_weight", 255),
        rf"{Q}.scale_weight is torch.float32 \[255\]",
    ),
    (
        "scaled_fp8",
        with_tensor(f"{Q}.scale_weight", dtype=torch.int32),
        f"{Q}.scale_weight is torch.int32",
    ),
    (
        "scaled_fp8",
        with_tensor("absent.scale_weight"),
        "absent.scale_weight is a scale, but absent.weight is missing",
    ),
    ("scaled_fp8", with_tensor(f"{Q}.weight_scale"), f"{Q} has two scales, "),
    ("comfy_quant", without(f"{Q}.weight_scale"), f"{Q}.weight_scale is missing"),
    (
        "comfy_quant",
        without(f"{Q}.weight"),
        f"{Q} is marked as quantised, but {Q}.weight is missing",
    ),
    (
        "comfy_quant",
        with_tensor(f"{Q}.weight", 256, 256),
        f"{Q}.weight is torch.float32 .* is marked",
    ),
    (
        "comfy_quant",
        with_json(f"{Q}.comfy_quant", {"format": "awq_w4a16"}),
        f"{Q} is stored in .* 'awq_w4a16'",
    ),
    ("comfy_quant", with_json(f"{Q}.comfy_quant", None), f"{Q}.comfy_quant is not a JSON object"),
    (
        "comfy_quant",
        with_json(f"{Q}.comfy_quant", ["float8_e4m3fn"]),
        f"{Q}.comfy_quant is not a JSON object",
    ),
    ("comfy_quant", with_json(f"{Q}.comfy_quant", 8), f"{Q}.comfy_quant is not a JSON object"),
    (
        "comfy_quant",
        with_tensor(f"{Q}.comfy_quant", 0, dtype=torch.uint8),
        f"{Q}.comfy_quant is not JSON",
    ),
    (
        "metadata",
        with_metadata("_quantization_metadata", {"layers": {Q: None}}),
        f"has None for the layer {Q}, not",
    ),
    (
        "metadata",
        with_metadata("_quantization_metadata", {"layers": [Q]}),
        "_quantization_metadata has no layers",
    ),
    (
        "metadata",
        with_metadata("_quantization_metadata", [Q]),
        "_quantization_metadata is not a JSON object",
    ),
    ("comfy_quant", with_json(f"{Q}.comfy_quant", {}), f"{Q} is stored in .* None"),
    (
        "comfy_quant",
        with_tensor(f"{Q}.comfy_quant", 5, dtype=torch.uint8),
        f"{Q}.comfy_quant is not JSON",
    ),
    (
        "comfy_quant",
        lambda tensors, metadata: tensors.update(
            {f"{Q}.comfy_quant": torch.full((4096,), ord("["), dtype=torch.uint8)}
        ),
        f"{Q}.comfy_quant is not JSON",
    ),
    ("comfy_quant", with_tensor(f"{Q}.comfy_quant", 5), f"{Q}.comfy_quant is torch.float32"),
    (
        "comfy_quant",
        with_tensor(f"{Q}.comfy_quant", 5000, dtype=torch.uint8),
        f"{Q}.comfy_quant is torch.uint8",
    ),
    (
        "metadata",
        with_metadata("_quantization_metadata", {}),
        "_quantization_metadata has no layers",
    ),
    (
        "metadata",
        with_metadata("_quantization_metadata", {"layers": {Q: "float9"}}),
        f"{Q} is stored in .* format",
    ),
    (
        "metadata",
        lambda tensors, metadata: metadata.update(_quantization_metadata="{"),
        "_quantization_metadata is not JSON",
    ),
    (
        "comfy_quant",
        with_tensor("time_projection.1.weight", 1536, 256, dtype=E5M2),
        "fp8 without a scale, though",
    ),
    (
        "metadata",
        with_tensor("time_projection.1.weight", 1536, 256, dtype=E4M3),
        "fp8 without a scale, though",
    ),
    ("metadata", without_scales_and_marks, "fp8 without a scale, though"),
    (
        "scaled_fp8",
        with_tensor("time_projection.1.weight", 1536, 256, dtype=E4M3),
        "its scale .* is missing",
    ),
    (
        "scaled_fp8",
        with_tensor(f"{Q}.weight", 256, 256, dtype=E5M2),
        f"{Q}.weight is torch.float8_e5m2 .*; .*e4m3fn is marked",
    ),
    (
        "scaled_fp8",
        with_tensor("scaled_fp8", 0, dtype=E5M2),
        "is torch.float8_e4m3fn .*; .*e5m2 is marked",
    ),
    (
        "comfy_quant",
        with_json(f"{Q}.comfy_quant", {"format": "float8_e5m2"}),
        "is torch.float8_e4m3fn .*; .*e5m2 is marked",
    ),
    (
        "comfy_quant",
        with_json(f"{Q}.comfy_quant", {"format": ["float8_e5m2"]}),
        "is stored in the quantisation format",
    ),
]


class TestFp8:
    @pytest.mark.parametrize("kind", FP8_E5M2_LAYOUTS)
    def test_e5m2_with_scales(self, tmp_path, make_tiny_expert, caplog, kind):
        model, path = make_tiny_expert(), tmp_path / "expert.safetensors"
        save_expert_file(model, path, dtype=torch.float16, quantised=FP8_E5M2_LAYOUTS[kind])
        expert = open_expert(path)
        assert {
            tensor.dtype for name, tensor in expert.weights.items() if name in expert.scales
        } == {E5M2}
        assert len(expert.scales) == 40
        assert_holds(expert, dequantised_model(model, dtype=torch.float16, fp8=E5M2))
        assert caplog.records == []

    @pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
    @pytest.mark.parametrize("everything", [False, True])
    def test_a_plain_cast_is_loaded_with_one_note(
        self, edited, make_tiny_expert, caplog, dtype, everything
    ):
        """Cast only block matrices, or every tensor in the file."""

        def chosen(key):
            return everything or (
                key.startswith("blocks.") and key.endswith(".weight") and ".norm" not in key
            )

        def cast(tensors, metadata):
            tensors.update(
                {key: tensor.to(dtype) for key, tensor in tensors.items() if chosen(key)}
            )

        path = edited(cast)
        expert = open_expert(path)
        assert expert.scales == {}
        assert len([tensor for tensor in expert.weights.values() if tensor.dtype == dtype]) >= 40
        assert_holds(
            expert,
            in_dtype(make_tiny_expert(), dtype)
            if everything
            else rounded_matrices(make_tiny_expert(), dtype),
        )
        (note,) = caplog.records
        assert (note.name, note.levelname) == ("wanstream.checkpoint", "WARNING")
        assert str(path) in note.getMessage()
        assert "plain casts" in note.getMessage()
        assert "GGUF" in note.getMessage()

    def test_other_files_need_no_note(self, tiny_expert_file, caplog, fp8_layout):
        open_expert(tiny_expert_file())
        open_expert(tiny_expert_file(fp8=fp8_layout))
        assert caplog.records == []


class TestRefused:
    @pytest.mark.parametrize(
        ("change", "message"), WRONG_TENSORS, ids=[message for _, message in WRONG_TENSORS]
    )
    def test_wrong_tensors(self, edited, change, message):
        path = edited(change)
        with pytest.raises(CheckpointError, match=message) as error:
            open_expert(path)
        assert str(path) in str(error.value)

    @pytest.mark.parametrize(
        ("fp8", "change", "message"),
        WRONG_FP8,
        ids=[f"{wrong[0]}: {wrong[2]}" for wrong in WRONG_FP8],
    )
    def test_wrong_fp8(self, edited, fp8, change, message):
        path = edited(change, fp8=fp8)
        with pytest.raises(CheckpointError, match=message) as error:
            open_expert(path)
        assert str(path) in str(error.value)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "No such file"),
            (b"", "is empty: download it again"),
            (b"PK\x03\x04rest of a zip", "pickle"),
            (b"GGUF" * 9, "not a"),
        ],
        ids=["missing", "empty", "pickle", "gguf"],
    )
    def test_wrong_file(self, tmp_path, content, message):
        path = tmp_path / "expert.safetensors"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises((ValueError, OSError), match=message) as error:
            open_expert(path)
        assert str(path) in str(error.value)

    def test_truncated_file(self, tiny_expert_file, tmp_path):
        path = tmp_path / "expert.safetensors"
        whole = tiny_expert_file().read_bytes()
        path.write_bytes(whole[:-1])
        with pytest.raises(ValueError, match="truncated"):
            open_expert(path)


class TestRefusedFolders:
    @pytest.fixture
    def sharded(self, tiny_expert_folder, tmp_path):
        """Return a sharded folder and the parsed index."""
        folder = shutil.copytree(tiny_expert_folder(shards=3), tmp_path / "transformer")
        return folder, json.loads((folder / INDEX).read_text())

    def test_missing_shard(self, sharded):
        folder, index = sharded
        shard = sorted(set(index["weight_map"].values()))[1]
        (folder / shard).unlink()
        with pytest.raises(CheckpointError, match=f"{shard}.*missing"):
            open_expert(folder)

    def test_tensor_that_its_shard_does_not_hold(self, sharded):
        folder, index = sharded
        index["weight_map"]["blocks.0.invented"] = next(iter(index["weight_map"].values()))
        (folder / INDEX).write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=r"does not hold blocks.0.invented"):
            open_expert(folder)

    def test_tensor_that_the_index_does_not_know(self, sharded):
        folder, index = sharded
        del index["weight_map"]["proj_out.bias"]
        (folder / INDEX).write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=r"proj_out.bias"):
            open_expert(folder)

    @pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "/etc/passwd", 7])
    def test_shard_outside_the_folder(self, sharded, shard):
        folder, index = sharded
        index["weight_map"]["proj_out.bias"] = shard
        (folder / INDEX).write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match="in the same folder"):
            open_expert(folder)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "not JSON"),
            ("[" * 100_000, "not JSON"),
            ("[]", "not a JSON object"),
            ("{}", "no weight_map"),
        ],
    )
    def test_damaged_index(self, sharded, text, message):
        folder, _ = sharded
        (folder / INDEX).write_text(text)
        with pytest.raises(CheckpointError, match=message):
            open_expert(folder)

    def test_empty_folder(self, tmp_path):
        with pytest.raises(CheckpointError, match="holds neither"):
            open_expert(tmp_path)

    def test_folder_of_pickles(self, tmp_path):
        (tmp_path / "diffusion_pytorch_model.bin").write_bytes(b"PK\x03\x04")
        with pytest.raises(CheckpointError, match=r"diffusion_pytorch_model\.bin.*never read"):
            open_expert(tmp_path)

    def test_pipeline_folder_in_the_place_of_one_expert(self, tmp_path):
        (tmp_path / "transformer").mkdir()
        with pytest.raises(CheckpointError, match="pipeline folder"):
            open_expert(tmp_path)
