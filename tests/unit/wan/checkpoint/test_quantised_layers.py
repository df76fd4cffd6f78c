"""Quantised layers: formats, markers, scales without a marker, mixtures, named errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from wanstream.offload.formats import EightBit, read_header
from wanstream.offload.formats.decode import decode_block
from wanstream.offload.formats.layout import allocate_flat, tensor_views
from wanstream.offload.sources.base import SourceError
from wanstream.plan.programs import BlockKey
from wanstream.testing import TinyShape, make_expert, save_expert_file
from wanstream.tests.support.offload.edited_files import Change, Edits, Tensors, rewrite, zeros
from wanstream.tests.support.wan.number_formats import MixedLayout, json_tensor, mixture
from wanstream.tests.support.wan.opened_experts import assert_holds
from wanstream.tests.support.wan.quantised_files import Form, Fp8Layout, dequantised
from wanstream.wan.checkpoint import open_expert, unmarked_layers
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.checkpoint.key_names import parameter_names
from wanstream.wan.experts.storage import Precision, block_bytes, block_source

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
INT8 = torch.int8
FP32 = torch.float32
BF16 = torch.bfloat16
FP16 = torch.float16
FP64 = torch.float64
BYTES = torch.uint8
Q = "blocks.0.self_attn.q"
BLOCK = BlockKey("high", 0)
INT8_MARKER = {"format": "int8_tensorwise"}


@pytest.fixture(scope="module")
def model():
    return make_expert(seed=1, shape=TinyShape(layers=1))


@pytest.fixture
def save(model, tmp_path):
    """`save(layout, change={}, metadata=None)`: the model in bf16 and this layout, changed."""

    def write(layout, change, metadata=None):
        path = tmp_path / "a.safetensors"
        save_expert_file(model, path, dtype=BF16, quantised=layout)
        return rewrite(path, path, change, metadata)

    return write


def _all_in(name: str, markers: str = "tensors") -> MixedLayout:
    return MixedLayout(format_of=lambda _: name, markers=markers)


def _only_q_in(name: str) -> MixedLayout:
    return MixedLayout(format_of=lambda layer: name if layer == Q else None)


def _flat_scale(tensors: Tensors) -> Edits:
    return {f"{Q}.weight_scale": tensors[f"{Q}.weight_scale"].reshape(256)}


def _scales_as(dtype: torch.dtype) -> Callable[[Tensors], Edits]:
    return lambda all: {k: v.view(dtype) for k, v in all.items() if k.endswith(".weight_scale")}


LEGACY = {"scaled_fp8": zeros(2)}
HEADER = {"_quantization_metadata": json.dumps({"layers": {Q: INT8_MARKER}})}
LAYOUTS: dict[str, tuple[MixedLayout, Change, Mapping[str, str] | None]] = {
    **{name: (_all_in(name), {}, None) for name in ("int8 ConvRot 64", "nvfp4 LightX2V")},
    "mixture, header": (MixedLayout(format_of=mixture, markers="metadata"), LEGACY, None),
    "mixture, nested": (MixedLayout(format_of=mixture, markers="nested"), {}, None),
    "bare names": (_all_in("mxfp8", "names"), {}, None),
    "marker over header": (_all_in("int8 ConvRot"), {}, HEADER),
    "legacy mark": (MixedLayout(format_of=mixture), LEGACY, None),
    "flat scales, rotated": (_only_q_in("int8 ConvRot"), _flat_scale, None),
    "mxfp8 scales in e8m0": (_all_in("mxfp8"), _scales_as(torch.float8_e8m0fnu), None),
    "nvfp4 scales in bytes": (_all_in("nvfp4"), _scales_as(BYTES), None),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_of_marked_layers(name, model, save):
    layout, change, metadata = LAYOUTS[name]
    expert = open_expert(save(layout, change, metadata))
    assert_holds(expert, dequantised(model, dtype=BF16, fp8=layout))


def _marker(**settings: object) -> Edits:
    return {f"{Q}.comfy_quant": json_tensor(settings)}


WEIGHT = f"{Q}.weight"
SCALE = f"{Q}.weight_scale"
SCALE_2 = f"{Q}.weight_scale_2"
ROTATED = {**INT8_MARKER, "convrot": True}
WRONG: list[tuple[str, Edits, str]] = [
    ("mxfp8", _marker(format="convrot_w4a4"), "'convrot_w4a4'; float8_e4m3fn, .*nvfp4 are known"),
    ("int8", {SCALE: None}, "its scale .*weight_scale is missing"),
    ("int8", {SCALE: zeros(255)}, r"is torch.float32 \[255\]; .* each of the 256 rows"),
    ("int8 ConvRot", {WEIGHT: zeros(256, 128, dtype=INT8)}, "128 columns, .* no multiple of 256"),
    ("int8", _marker(**ROTATED, convrot_groupsize=128), "in groups of 128; 4, 16"),
    ("int8", _marker(**ROTATED, convrot_groupsize="x"), "in groups of 'x'; 4, 16"),
    ("int8", _marker(format="mxfp8"), "is torch.int8 .*; mxfp8 in torch.float8_e4m3fn is marked"),
    ("mxfp8", {SCALE: zeros(256, 7, dtype=BYTES)}, r"\[256, 7\]; .* are bytes \[256, 8\]"),
    ("mxfp8", {SCALE: zeros(256, 8)}, r"float32 \[256, 8\]; .* are bytes \[256, 8\]"),
    ("mxfp8", {WEIGHT: zeros(256, 40, dtype=E4M3)}, "40 columns, which is no multiple of the 32"),
    ("nvfp4", {SCALE_2: None}, "its scale .*weight_scale_2 is missing"),
    ("nvfp4", {SCALE_2: zeros(256)}, r"scale_2 is torch.float32 \[256\]; a scale is one number"),
    ("nvfp4", {f"{Q}.pre_quant_scale": zeros(256)}, "multiplies the input .* not supported"),
    ("nvfp4 LightX2V", {f"{Q}.alpha": None}, "its scale .*alpha is missing"),
    ("nvfp4", {WEIGHT: zeros(256, 64, dtype=BYTES)}, r"\[256, 16\]; .* are bytes \[256, 8\]"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG, ids=[row[2] for row in WRONG])
def test_wrong_marked_layer_is_refused(name, change, message, save):
    with pytest.raises(CheckpointError, match=message):
        open_expert(save(_only_q_in(name), change))


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("int8 rows", float("nan"), "the scale of attn1.to_q.weight is NaN or infinite"),
        ("int8 rows", float("inf"), "the scale of attn1.to_q.weight is NaN or infinite"),
        ("mxfp8", 0xFF, "a scale of attn1.to_q.weight is NaN: download the file"),
        ("nvfp4", 0x7F, "a scale of attn1.to_q.weight is NaN: download the file"),
        ("nvfp4 LightX2V", 0xFF, "a scale of attn1.to_q.weight is NaN: download the file"),
    ],
)
def test_scale_that_is_no_number_is_refused(name, bad, message, save):
    """Queries and keys with NaN in a few channels may give finite latents."""

    def spoil(tensors: Tensors) -> Edits:
        scale = tensors[f"{Q}.weight_scale"]
        (scale if name == "int8 rows" else scale.view(BYTES)).view(-1)[7] = bad
        return {f"{Q}.weight_scale": scale}

    experts = {"high": open_expert(save(_all_in(name), spoil))}
    source = block_source(experts, Precision(compute_dtype=BF16), direct=False)
    with pytest.raises(SourceError, match=f"a.safetensors: {message}"):
        source.scales(BLOCK)
    source.close()


def _full_precision_int8(tensors: Tensors) -> Edits:
    marker = json_tensor({**INT8_MARKER, "full_precision_matrix_mult": True})
    return {key: marker.clone() for key in tensors if key.endswith(".comfy_quant")}


@pytest.mark.parametrize(
    ("layout", "change"),
    [
        (Fp8Layout(full_precision=True), {}),
        (Fp8Layout(kind="comfy_quant", full_precision=True), {}),
        (Fp8Layout(kind="metadata", full_precision=True), {}),
        (_all_in("int8 rows"), _full_precision_int8),
    ],
    ids=["scaled_fp8", "comfy_quant", "metadata", "int8 rows"],
)
def test_full_precision_layers_are_decoded(layout, change, save):
    experts = {"high": open_expert(save(layout, change))}
    precision = Precision(compute_dtype=BF16, arithmetic="as stored")
    for storage in ("as stored", "fp8"):
        assert not block_bytes(experts, replace(precision, storage=storage)).multiplied
    expected = {INT8} if isinstance(layout, Fp8Layout) else set()
    assert block_bytes(experts, replace(precision, storage="int8 ConvRot")).multiplied == expected


FORMS = [
    # LightX2V
    Form(),
    Form(dtype=INT8, scale=FP16, shape="[out]"),
    # a lost file marker, ModelOpt, and other spellings
    Form(shape="[]", key="scale_weight"),
    Form(shape="[1, 1]", dtype=E5M2, key="scale_weight"),
    Form(shape="[1]", dtype=INT8, scale=BF16, key="scale_weight"),
    # musubi-tuner: blocks along the input
    Form(shape="[out, n, 1]", key="scale_weight", scale=BF16, marker="scaled_fp8"),
    Form(shape="[out, n, 1]", dtype=INT8, scale=FP16),
    Form(shape="[out, n]", dtype=E5M2, scale=FP64),
    Form(shape="[out, 1, 1]", key="scale_weight", scale=BF16),
    # unquantised weights
    Form(dtype=BF16, key="scale_weight"),
    Form(dtype=FP16, scale=BF16, shape="[]"),
    # scale dtypes next to markers
    Form(scale=BF16, shape="[]", key="scale_weight", marker="scaled_fp8"),
    Form(scale=FP16, marker='{"format": "float8_e4m3fn"}'),
    Form(scale=BF16, dtype=INT8, marker='{"format": "int8_tensorwise"}'),
    # markers in other spellings
    Form(marker='"float8_e4m3fn"'),
    Form(marker="float8_e4m3fn"),
    Form(marker='{"format": "float8_e4m3fn"}\0'),
    Form(dtype=INT8, marker=' {"format": "int8_tensorwise", "params": {}}\n'),
]
Quantised = Callable[..., tuple[Path, Tensors]]


@pytest.fixture
def quantised(tiny_expert_file, tmp_path):
    """`quantised(form, more)`: a file with block matrices in this form and edits, and all values.

    Values are in fp32, by parameter name.
    """

    def write(form: Form, more: Edits | None = None) -> tuple[Path, Tensors]:
        path = tmp_path / "quantised.safetensors"
        values = {}
        is_file = form.marker == "scaled_fp8"

        def quantise(tensors: Tensors) -> Edits:
            edits = {"scaled_fp8": zeros(0, dtype=form.dtype)} if is_file else {}
            for key, tensor in tensors.items():
                values[key] = tensor
                if not key.startswith("blocks.") or tensor.dim() != 2:
                    continue
                layer = key.removesuffix(".weight")
                codes, scale, values[key] = form.quantise(tensor)
                edits |= {key: codes, f"{layer}.{form.key}": scale}
                edits[f"{layer}.scale_input"] = torch.ones(1)
                if form.marker and not is_file:
                    text = torch.tensor(list(form.marker.encode()), dtype=BYTES)
                    edits[f"{layer}.comfy_quant"] = text
            return {**edits, **(more or {})}

        rewrite(tiny_expert_file(layers=1, heads=1, ffn_dim=128, text_dim=64), path, quantise)
        return path, {parameter_names(path, values)[key]: value for key, value in values.items()}

    return write


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_values_of_unmarked_layers(quantised, form):
    path, values = quantised(form)
    assert_holds(open_expert(path), values)


@pytest.mark.parametrize("arithmetic", ["decoded", "as stored"])
@pytest.mark.parametrize(
    ("form", "multiplied"),
    [
        (Form(scale=FP64), True),
        (Form(dtype=INT8, scale=FP16, shape="[1]"), True),
        (Form(shape="[out, n, 1]", scale=BF16), False),
        (Form(dtype=BF16), False),
    ],
    ids=str,
)
def test_unmarked_blocks_stream_with_their_scales(quantised, form, multiplied, arithmetic):
    """Blocks decoded to bf16 have rounded values, and multiplied codes come with fp32 scales."""
    path, values = quantised(form)
    precision = Precision(compute_dtype=BF16, arithmetic=arithmetic)
    source = block_source({"high": open_expert(path)}, precision, direct=False)
    layout = source.formats[BLOCK]
    raw, computed = (allocate_flat(part.nbytes, "cpu") for part in (layout.stored, layout.computed))
    source.read_block(BLOCK, raw)
    decode_block(raw, computed, layout, source.scales(BLOCK))
    source.close()
    views = tensor_views(computed, layout.computed)
    for tensor in layout.computed.tensors:
        expected = values[f"blocks.0.{tensor.name}"]
        assert isinstance(tensor.packing, EightBit) == (multiplied and arithmetic == "as stored")
        if isinstance(tensor.packing, EightBit):
            codes, scales = tensor.packing.split(views[tensor.name], tensor.shape)
            assert scales.dtype == FP32
            assert torch.equal(codes.float() * scales, expected)
        else:
            assert torch.equal(views[tensor.name], expected.bfloat16())


OTHER_FORMATS = {
    ".qweight": "GPTQ or AWQ",
    ".wscales": "SVDQuant",
    ".weight.absmax": "bitsandbytes",
    ".weight.quant_state.bitsandbytes__nf4": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".weight._data": "quanto",
    "._weight_qdata": "torchao",
    ".zero_point": "SDNQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale_inv": "fp8 in blocks of rows and columns",
    ".weight_s_rel": "asym_w4a8_int8",
}
ROTATED_FFN = json_tensor({**ROTATED, "convrot_groupsize": 64})
REFUSED: list[tuple[Form, Edits, str]] = [
    (Form(dtype=INT8), {"blocks.0.ffn.0.comfy_quant": ROTATED_FFN}, "int8 next to rotated layers"),
    (Form(), {SCALE: zeros(128, 4, dtype=BYTES)}, "scales in torch.uint8, as"),
    (Form(), {WEIGHT: zeros(128, 64, dtype=BYTES)}, "is torch.uint8 with a scale, and nothing"),
    (Form(), {SCALE: zeros(127)}, r"is torch.float32 \[127\]; .* each of the 128"),
    (Form(), {SCALE: zeros(128, 3, 1)}, r"\[128, 3, 1\]; a scale is .* block of their 128 colu"),
    (Form(), {SCALE: zeros(128, 2, 2)}, r"\[128, 2, 2\]; a scale is"),
    (Form(dtype=BF16, shape="[out, n, 1]"), {}, "is bfloat16 and has 2 scales for each row"),
    (Form(), {f"{Q}.scale_weight": zeros(1)}, f"{Q} has two scales, "),
    (Form(), {"blocks.0.extra.weight_scale": zeros(1)}, "blocks.0.extra.weight is missing"),
    (Form(), {"head.head.weight": zeros(64, 128, dtype=E4M3)}, "fp8 without a scale, though"),
    *(
        (Form(), {Q + ending: zeros(4)}, f"is quantised as {name}.*: it holds {Q}{ending}")
        for ending, name in OTHER_FORMATS.items()
    ),
    *(
        (Form(key=key), {}, rf"\.{key} has the name of a scale of blocks\.0\.\S+ in an unknown")
        for key in ("scale", "scale_w", "weight.scale", "weight_scales", "weight_scaling")
    ),
]


@pytest.mark.parametrize(("form", "more", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_unreadable_layer_is_refused(quantised, form, more, message):
    with pytest.raises(CheckpointError, match=message):
        open_expert(quantised(form, more)[0])


OUTPUT_SCALE = {f"{Q}.scale_weight": zeros(1), f"{Q}.out_scale": zeros(1)}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({}, f"{WEIGHT} is torch.float8_e4m3fn without a scale, though others have"),
        ({f"{Q}.scale": zeros(1)}, "in an unknown spelling"),
        ({WEIGHT: zeros(8, 8, dtype=INT8)}, "is torch.int8 without a"),
        ({"scaled_fp8": zeros(0, dtype=E4M3)}, ""),
        (OUTPUT_SCALE, ""),
    ],
    ids=["one of many", "spelling", "int8", "scaled_fp8", "of the output"],
)
def test_codes_without_a_scale_in_a_model_of_any_family(quantised, edit, message):
    """Next to `scaled_fp8`, ComfyUI takes layers without a scale as a plain cast.

    Next to a known scale, others belong to inputs and outputs. ComfyUI ignores them.
    """
    path, _ = quantised(Form(shape="[]"), {SCALE: None, **edit})
    with pytest.raises(CheckpointError, match=message) if message else nullcontext():
        found = unmarked_layers(path, read_header(path).tensors, ())
        assert (Q in found) == (edit is OUTPUT_SCALE)
