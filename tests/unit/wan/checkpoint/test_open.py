"""Opened experts: each parameter's location and value in every layout and GGUF, named faults."""

import functools
import json

import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel
from gguf import GGUFReader, GGUFWriter

from wanstream.testing import q4_k_m, save_expert_file, save_expert_gguf
from wanstream.tests.support.offload.edited_files import close_gguf, rewrite, zeros
from wanstream.tests.support.wan.number_formats import json_tensor
from wanstream.tests.support.wan.opened_experts import LAYERWISE, assert_holds, decoded, streamed
from wanstream.tests.support.wan.quantised_files import (
    FP8_E5M2_LAYOUTS,
    FP8_LAYOUTS,
    dequantised,
    in_dtype,
    matrices,
)
from wanstream.wan.checkpoint.files import WEIGHTS, CheckpointError
from wanstream.wan.checkpoint.open import is_merged, open_expert
from wanstream.wan.experts.open import open_experts

PREFIX = "model.diffusion_model."
PATCHES = "patch_embedding.weight"
NORM = "blocks.1.norm3.bias"
TIME = "time_projection.1"
Q = "blocks.1.self_attn.q"
HEADER = "_quantization_metadata"
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
INT32 = torch.int32


def public(config):
    return {name: value for name, value in config.items() if not name.startswith("_")}


@pytest.mark.parametrize(("shards", "in_channels"), [(1, 36), (4, 16)])
def test_diffusers_folder(tiny_expert_folder, make_tiny_expert, shards, in_channels):
    folder = tiny_expert_folder(shards=shards, in_channels=in_channels)
    for path in (folder, folder / WEIGHTS) if shards == 1 else (folder,):
        expert = open_expert(path)
        assert expert.config.in_channels == in_channels
        assert_holds(expert, make_tiny_expert(in_channels=in_channels))


@pytest.mark.parametrize(("dtype", "prefix"), [(torch.float16, PREFIX), (torch.bfloat16, "")])
def test_native_file(tiny_expert_file, make_tiny_expert, dtype, prefix):
    expert = open_expert(tiny_expert_file(dtype=dtype, prefix=prefix))
    assert {tensor.dtype for tensor in expert.weights.values()} == {dtype}
    assert_holds(expert, in_dtype(make_tiny_expert(), dtype).float())


def test_fp8_file(tiny_expert_file, make_tiny_expert, caplog):
    model = make_tiny_expert(dequantised_from=torch.float16, layers=1)
    for layout in FP8_LAYOUTS:
        given = {"fp8": layout, "dtype": torch.float16, "prefix": PREFIX, "layers": 1}
        expert = open_expert(tiny_expert_file(**given))
        assert len(expert.scales) == 10, "the matrices of a block"
        assert_holds(expert, model)
        assert caplog.records == []


def test_fp8_outside_the_blocks(changed_expert, make_tiny_expert):
    codes = (make_tiny_expert().condition_embedder.time_proj.weight * 2).to(E4M3)
    change = {f"{TIME}.weight": codes, f"{TIME}.scale_weight": torch.tensor(0.5)}
    values = decoded(open_expert(changed_expert(change, fp8="scaled_fp8")))
    assert torch.equal(values["condition_embedder.time_proj.weight"], codes.float() * 0.5)


@pytest.mark.parametrize("kind", FP8_E5M2_LAYOUTS)
def test_e5m2_with_scales(tmp_path, make_tiny_expert, caplog, kind):
    model = make_tiny_expert(layers=1)
    path = tmp_path / "expert.safetensors"
    save_expert_file(model, path, dtype=torch.float16, quantised=FP8_E5M2_LAYOUTS[kind])
    expert = open_expert(path)
    assert {expert.weights[name].dtype for name in expert.scales} == {E5M2}
    assert_holds(expert, dequantised(model, dtype=torch.float16, fp8=E5M2))
    assert caplog.records == []


@pytest.mark.parametrize(("dtype", "everything"), [(E4M3, False), (E5M2, True)], ids=str)
def test_plain_cast_is_logged(changed_expert, tmp_path, caplog, dtype, everything):
    """Cast only block matrices, or every tensor in the file."""

    def cast(tensors):
        chosen = [
            key
            for key in tensors
            if everything
            or (key.startswith("blocks.") and key.endswith(".weight") and ".norm" not in key)
        ]
        return {key: tensors[key].to(dtype) for key in chosen}

    path = changed_expert(cast)
    plain = tmp_path / "plain.safetensors"
    rewrite(path, plain, lambda all: {key: each.float() for key, each in all.items()})
    expert = open_expert(path)
    assert expert.scales == {}
    assert_holds(expert, open_expert(plain))
    (note,) = caplog.records
    assert (note.name, note.levelname) == ("wanstream.checkpoint", "WARNING")
    assert all(text in note.getMessage() for text in (str(path), "plain casts", "GGUF"))


def test_config_is_that_of_the_model(tiny_expert_file, make_tiny_expert):
    shape = {"layers": 3, "heads": 3, "ffn_dim": 256, "in_channels": 36}
    expert = open_expert(tiny_expert_file(**shape))
    rebuilt = WanTransformer3DModel(**expert.config.model_arguments())
    assert public(rebuilt.config) == public(make_tiny_expert(**shape).config)
    assert expert.config.family == "i2v"


WRONG = [
    ({"blocks.2.ffn.0.weight": None}, "blocks.2.ffn.net.0.proj.weight .*is missing"),
    ({"head.head.weight": None}, r"proj_out.weight \(natively head.head.weight\) is missing"),
    ({"head.head.bias": None}, r"proj_out.bias \(natively head.head.bias\) \[64\] is missing"),
    ({NORM: zeros(255)}, r"blocks.1.norm3.bias .*is \[255\]; \[256\] is expected"),
    ({NORM: zeros(256, dtype=torch.int8)}, "blocks.1.norm3.bias .*is torch.int8"),
    ({PATCHES: zeros(256, 64)}, r"patch_embedding.weight is \[256, 64\]; 5 sizes"),
    ({PATCHES: zeros(200, 16, 1, 2, 2)}, "200 wide"),
    ({PATCHES: zeros(256, 24, 1, 2, 2)}, "24 channels"),
    ({PATCHES: zeros(256, 20, 1, 2, 2)}, "is a SCAIL model.* takes 20 channels"),
    ({PATCHES: zeros(256, 32, 1, 2, 2)}, "is a camera control model .* takes 32 channels"),
    ({"something.else": zeros(3)}, "something.else .*does not belong"),
    ({"blocks.9.norm3.bias": zeros(256)}, "does not belong|blocks.4.* is missing"),
    ({f"{PREFIX}head.head.bias": zeros(64)}, "head.head.bias means the same parameter"),
    ({"img_emb.proj.0.weight": zeros(3)}, r"natively img_emb.proj.1.weight\) is missing"),
    ({"img_emb.proj.1.weight": zeros(80, 80)}, "has an image branch, but takes 16 channels"),
    ({"vace_blocks.0.after_proj.weight": zeros(3)}, "VACE.*vace_blocks.0"),
    ({"ref_conv.weight": zeros(256, 48, 2, 2)}, "takes 48 channels, and the latents .* have 16"),
    ({"ref_conv.weight": zeros(3)}, r"ref_conv.weight is \[3\]; 4 sizes"),
    (dict.fromkeys, "not a Wan transformer: it holds no tensors"),
    (lambda all: {**dict.fromkeys(all), "x": zeros(1)}, "not a Wan transformer.*x first"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[row[1] for row in WRONG])
def test_wrong_tensors_are_refused(changed_expert, change, message):
    path = changed_expert(change)
    with pytest.raises(CheckpointError, match=message) as error:
        open_expert(path)
    assert str(path) in str(error.value)


LAYER = "comfy_quant"
FILE = "scaled_fp8"
SCALE = f"{Q}.scale_weight"
MARKER = f"{Q}.comfy_quant"
WEIGHT = f"{Q}.weight"
TIME_FP8 = zeros(1536, 256, dtype=E4M3)
TEXT = torch.uint8
WRONG_FP8 = [
    (FILE, {SCALE: None}, f"{Q} is marked as quantised, but its scale {SCALE} is missing"),
    (FILE, {SCALE: zeros(dtype=INT32)}, f"{SCALE} is torch.int32"),
    (FILE, {"absent.scale_weight": zeros()}, "is a scale, but absent.weight is missing"),
    (LAYER, {WEIGHT: None}, f"{Q} is marked as quantised, but {WEIGHT} is missing"),
    (LAYER, {WEIGHT: zeros(256, 256)}, f"{WEIGHT} is torch.float32 .* is marked"),
    (LAYER, {MARKER: json_tensor({"format": ["float8_e5m2"]})}, "the quantisation format"),
    (LAYER, {MARKER: json_tensor({"format": "float8_e5m2"})}, "torch.float8_e4m3fn .*; .*e5m2 is"),
    (LAYER, {MARKER: json_tensor(None)}, f"{MARKER} is not a JSON object"),
    (LAYER, {MARKER: zeros(0, dtype=TEXT)}, f"{MARKER} is not JSON"),
    (LAYER, {MARKER: torch.full((4096,), ord("["), dtype=TEXT)}, f"{MARKER} is not JSON"),
    (LAYER, {MARKER: zeros(5)}, f"{MARKER} is torch.float32"),
    (LAYER, {MARKER: zeros(5000, dtype=TEXT)}, f"{MARKER} is torch.uint8"),
    (LAYER, {f"{TIME}.weight": TIME_FP8.to(E5M2)}, "fp8 without a scale, though"),
    (FILE, {f"{TIME}.weight": TIME_FP8}, "its scale .* is missing"),
    (FILE, {"scaled_fp8": zeros(0, dtype=E5M2)}, "is torch.float8_e4m3fn .*; .*e5m2 is marked"),
]


@pytest.mark.parametrize(("fp8", "change", "message"), WRONG_FP8, ids=[row[2] for row in WRONG_FP8])
def test_wrong_fp8_is_refused(changed_expert, fp8, change, message):
    with pytest.raises(CheckpointError, match=message):
        open_expert(changed_expert(change, fp8=fp8))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"layers": {Q: None}}, f"has None for the layer {Q}, not"),
        ({"layers": {Q: "float9"}}, f"{Q} is stored in .* format"),
        ({}, f"{HEADER} has no layers"),
        ({"layers": [Q]}, f"{HEADER} has no layers"),
        ([Q], f"{HEADER} is not a JSON object"),
        ("{", f"{HEADER} is not JSON"),
    ],
)
def test_wrong_fp8_header_is_refused(changed_expert, header, message):
    text = header if isinstance(header, str) else json.dumps(header)
    with pytest.raises(CheckpointError, match=message):
        open_expert(changed_expert({}, {HEADER: text}, fp8="metadata"))


def test_fp8_next_to_a_header_without_layers_is_refused(changed_expert):
    """Without marks and scales, the matrices would look like a plain cast."""

    def drop_scales(tensors):
        return {key: None for key in tensors if key.endswith(".weight_scale")}

    with pytest.raises(CheckpointError, match="fp8 without a scale, though"):
        open_expert(changed_expert(drop_scales, {HEADER: '{"layers": {}}'}, fp8="metadata"))


LAYERS = 2
TYPES = {
    **{name: matrices(name) for name in ("BF16", "Q4_K", "Q8_0")},
    "Q4_K_M": q4_k_m,
    "everything BF16": lambda name: "BF16",
    "Q8_0, others F16": matrices("Q8_0", others="F16"),
}


@pytest.fixture(scope="module")
def gguf_expert(tmp_path_factory, make_tiny_expert):
    """`gguf_expert(types="Q4_K_M", seed=0, ...)`: a path, and the fp32 model with its values."""

    @functools.cache
    def write(*, types="Q4_K_M", seed=0, in_channels=16, **how):
        path = tmp_path_factory.mktemp("gguf") / "expert.gguf"
        model = make_tiny_expert(seed=seed, in_channels=in_channels, layers=LAYERS)
        return path, save_expert_gguf(model, path, types=TYPES[types], seed=seed, **how)

    return write


@pytest.fixture
def edited(gguf_expert, tmp_path):
    """`edited(changes, architecture="wan", **fields)`: a Q8_0 file with these tensors and texts.

    None leaves a tensor out.
    """

    def write(changes, architecture="wan", **fields):
        path = tmp_path / "edited.gguf"
        writer = GGUFWriter(path, architecture or "wan")
        if architecture is None:
            writer.kv_data[0].clear()
        for field, text in fields.items():
            writer.add_string(field, text)
        whole = GGUFReader(gguf_expert(types="Q8_0")[0])
        if PATCHES not in changes:
            shape = f"comfy.gguf.orig_shape.{PATCHES}"
            writer.add_array(shape, whole.get_field(shape).contents())
        for tensor in whole.tensors:
            if tensor.name not in changes:
                writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        for name, tensor in changes.items():
            if tensor is not None:
                writer.add_tensor(name, tensor.detach().numpy())
        close_gguf(writer)
        return path

    return write


@pytest.mark.parametrize("types", TYPES)
def test_values_of_every_type_of_gguf(gguf_expert, types):
    path, model = gguf_expert(types=types)
    expert = open_expert(path)
    assert_holds(expert, model)
    assert expert.scales == {}
    assert (expert.config.family, expert.config.num_layers) == ("t2v", LAYERS)


@pytest.mark.parametrize(
    ("patches", "prefix", "in_channels"),
    [("shape field", "", 16), ("five dimensions", PREFIX, 36), ("merged", "", 36)],
)
def test_five_dimensions_in_gguf(gguf_expert, patches, prefix, in_channels):
    path, model = gguf_expert(patches=patches, prefix=prefix, in_channels=in_channels)
    expert = open_expert(path)
    assert expert.weights[PATCHES].shape == (256, in_channels, 1, 2, 2)
    assert_holds(expert, model)


@pytest.mark.parametrize("architecture", ["pig", None])
def test_architectures_of_gguf(edited, gguf_expert, architecture):
    assert_holds(open_expert(edited({}, architecture)), gguf_expert(types="Q8_0")[1])


def test_leading_ones_may_be_gone(edited, gguf_expert):
    """ggml counts dimensions from the other end and so drops leading ones in files."""
    model = gguf_expert(types="Q8_0")[1]
    tables = {f"blocks.{i}.modulation": b.scale_shift_table for i, b in enumerate(model.blocks)}
    tables["head.modulation"] = model.scale_shift_table
    assert_holds(open_expert(edited({name: table[0] for name, table in tables.items()})), model)


@pytest.mark.parametrize("shape", [(256, 16, 2, 2), (256, 64), (256 * 64,)])
def test_merged_patch_embeddings(edited, gguf_expert, shape):
    model = gguf_expert(types="Q8_0")[1]
    assert_holds(open_expert(edited({PATCHES: model.patch_embedding.weight.reshape(shape)})), model)


@pytest.mark.parametrize(
    ("stored", "original", "merged"),
    [
        ((6, 5), (1, 6, 5), True),
        ((30,), (1, 6, 5), True),
        ((5, 6), (6, 5), False),
        ((3, 10), (6, 5), False),
        ((6, 5, 1), (6, 5), True),
        ((4096, 1, 2, 2), (256, 16, 1, 2, 2), True),
        ((16, 256, 1, 2, 2), (256, 16, 1, 2, 2), False),
        ((256, 16, 2), (256, 16, 1, 2, 2), False),
        ((256,), (256, 16), False),
        ((256, 16), (256,), False),
        ((), (1,), True),
        ((0, 3), (0, 3), True),
        ((0,), (0, 3), False),
        ((0, 5), (6, 5), False),
    ],
)
def test_merged_shapes(stored, original, merged):
    assert is_merged(stored, original) is merged


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({PATCHES: None}, "patch_embedding.weight is missing"),
        ({"patch_embedding.bias": None, PATCHES: zeros(256, 64)}, r"weight is \[256, 64\]"),
        ({PATCHES: zeros(256, 63)}, r"patch_embedding.weight is \[256, 63\]; 5 sizes"),
        ({PATCHES: zeros(64, 256)}, r"patch_embedding.weight is \[64, 256\]; 5 sizes"),
        ({"blocks.1.ffn.0.weight": zeros(256, 512)}, r"\[256, 512\]; \[512, 256\] is expected"),
        ({"blocks.1.modulation": zeros(5, 256)}, r"\[5, 256\]; \[1, 6, 256\] is expected"),
        ({NORM: zeros(256, dtype=INT32)}, "norm3.bias is torch.int32; weights are"),
        ({f"{PREFIX}head.head.bias": zeros(64)}, "head.head.bias means the same parameter"),
    ],
)
def test_wrong_tensors_of_gguf_are_refused(edited, changes, message):
    with pytest.raises(CheckpointError, match=message):
        open_expert(edited(changes))


def test_config_in_the_header_of_gguf_is_read(edited):
    with pytest.raises(CheckpointError, match="model_type is 'animate2'"):
        open_expert(edited({}, config='{"transformer": {"model_type": "animate2"}}'))


@pytest.mark.parametrize("architecture", ["llama", "Wan"])
def test_other_architectures_are_refused(edited, architecture):
    with pytest.raises(CheckpointError, match=f"is a GGUF of '{architecture}', not of 'wan'"):
        open_expert(edited({}, architecture))


def test_streamed_bytes_are_those_of_the_file_and_the_compute_dtype(gguf_expert, lane):
    path = gguf_expert(types="Q4_K")[0]
    with open_experts(path, path, compute_dtype=torch.bfloat16) as pair:
        streamed(pair, LAYERWISE, lane, steps=["high", "low"])
        assert pair.loaded_bytes == pair.device_bytes(LAYERWISE, device="cpu")
        weights = pair.high.weights.values()
        assert 512 * 144 in {each.nbytes for each in weights if each.shape == (512, 256)}
        in_blocks = LAYERS * (8 * 256 * 256 + 2 * 256 * 512) // 256 * 144
        outside = sum(tensor.nbytes for tensor in weights) - in_blocks
        assert pair.engine(LAYERWISE, "cpu").models.non_block_bytes == 2 * outside


@pytest.mark.parametrize(("types", "same"), [("Q4_K_M", True), ("BF16", False)])
def test_fp8_storage_changes_only_what_is_not_packed(gguf_expert, lane, types, same):
    path = gguf_expert(types=types)[0]
    with open_experts(path, path) as plain, open_experts(path, path, storage="fp8") as kept:
        assert (kept.block_bytes.stored == plain.block_bytes.stored) is same
        both = [streamed(pair, LAYERWISE, lane) for pair in (plain, kept)]
        assert all(map(torch.equal, *both)) is same
