"""Int8 and microscaled layers: formats, markers, mixtures in one block, named errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from wanstream.offload.sources.base import SourceError
from wanstream.plan.programs import BlockKey
from wanstream.schema.refs import Storage
from wanstream.testing import TinyShape, make_expert, save_expert_file
from wanstream.tests.support.number_formats import ENCODERS, MixedLayout, mixture
from wanstream.tests.support.quantised_files import Fp8Layout, dequantised
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.checkpoint.open import open_expert
from wanstream.wan.experts.storage import Precision, block_bytes, block_source

from .test_checkpoint import assert_holds

SHAPE = TinyShape(layers=1)
Q = "blocks.0.self_attn.q"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model() -> WanTransformer3DModel:
    return make_expert(seed=1, shape=SHAPE)


@pytest.mark.parametrize("name", ENCODERS)
def test_every_format(name: str, model: WanTransformer3DModel, tmp_path: Path) -> None:
    layout = MixedLayout(format_of=lambda _: name)
    save_expert_file(model, tmp_path / "a.safetensors", dtype=torch.float16, quantised=layout)
    expert = open_expert(tmp_path / "a.safetensors")
    assert_holds(expert, dequantised(model, dtype=torch.float16, fp8=layout))


@pytest.mark.parametrize("markers", ["tensors", "metadata", "nested"])
def test_formats_are_mixed(markers: str, model: WanTransformer3DModel, tmp_path: Path) -> None:
    layout = MixedLayout(format_of=mixture, markers=markers)
    save_expert_file(model, tmp_path / "a.safetensors", dtype=torch.bfloat16, quantised=layout)
    expert = open_expert(tmp_path / "a.safetensors")
    assert_holds(expert, dequantised(model, dtype=torch.bfloat16, fp8=layout))


def test_metadata_with_bare_names(model: WanTransformer3DModel, tmp_path: Path) -> None:
    layout = MixedLayout(format_of=lambda _: "mxfp8", markers="names")
    save_expert_file(model, tmp_path / "a.safetensors", dtype=torch.bfloat16, quantised=layout)
    expert = open_expert(tmp_path / "a.safetensors")
    assert_holds(expert, dequantised(model, dtype=torch.bfloat16, fp8=layout))


def test_a_marker_of_a_layer_overrides_the_header(
    model: WanTransformer3DModel, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    layout = MixedLayout(format_of=lambda _: "int8 ConvRot")
    save_expert_file(model, path, dtype=torch.bfloat16, quantised=layout)
    tensors, settings = load_file(path), {Q: {"format": "int8_tensorwise"}}
    save_file(tensors, path, {"_quantization_metadata": json.dumps({"layers": settings})})
    assert_holds(open_expert(path), dequantised(model, dtype=torch.bfloat16, fp8=layout))


@pytest.mark.parametrize("markers", ["tensors", "metadata"])
def test_a_marker_of_the_old_layout_means_nothing_beside_others(
    markers: str, model: WanTransformer3DModel, tmp_path: Path
) -> None:
    path, layout = tmp_path / "a.safetensors", MixedLayout(format_of=mixture, markers=markers)
    save_expert_file(model, path, dtype=torch.bfloat16, quantised=layout)
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    save_file({**load_file(path), "scaled_fp8": torch.zeros(2)}, path, metadata)
    assert_holds(open_expert(path), dequantised(model, dtype=torch.bfloat16, fp8=layout))


@pytest.mark.parametrize("shape", [(256,), (256, 1)], ids=str)
@pytest.mark.parametrize("name", ["int8 rows", "int8 ConvRot"])
def test_scales_of_rows_may_be_a_vector(
    shape: tuple[int, ...], name: str, model: WanTransformer3DModel, tmp_path: Path
) -> None:
    path, layout = (
        tmp_path / "a.safetensors",
        MixedLayout(format_of=lambda layer: name if layer == Q else None),
    )
    save_expert_file(model, path, dtype=torch.bfloat16, quantised=layout)
    tensors = load_file(path)
    tensors[f"{Q}.weight_scale"] = tensors[f"{Q}.weight_scale"].reshape(shape)
    save_file(tensors, path)
    assert_holds(open_expert(path), dequantised(model, dtype=torch.bfloat16, fp8=layout))


@pytest.mark.parametrize(
    ("name", "dtype"), [("mxfp8", torch.float8_e8m0fnu), ("nvfp4", torch.uint8)], ids=str
)
def test_scales_may_be_bytes_or_have_the_dtype_of_their_format(
    name: str, dtype: torch.dtype, model: WanTransformer3DModel, tmp_path: Path
) -> None:
    path, layout = tmp_path / "a.safetensors", MixedLayout(format_of=lambda _: name)
    save_expert_file(model, path, dtype=torch.bfloat16, quantised=layout)
    tensors = load_file(path)
    for key, tensor in tensors.items():
        if key.endswith(".weight_scale"):
            assert tensor.dtype != dtype
            tensors[key] = tensor.view(dtype)
    save_file(tensors, path)
    assert_holds(open_expert(path), dequantised(model, dtype=torch.bfloat16, fp8=layout))


def without(ending: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(f"{Q}.{ending}")


def with_tensor(
    ending: str, *shape: int, dtype: torch.dtype = torch.float32
) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({f"{Q}.{ending}": torch.zeros(shape, dtype=dtype)})


def with_marker(**settings: object) -> Callable[[Tensors], object]:
    marker = torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)
    return lambda tensors: tensors.update({f"{Q}.comfy_quant": marker})


WRONG: list[tuple[str, Callable[[Tensors], object], str]] = [
    (
        "mxfp8",
        with_marker(format="convrot_w4a4"),
        "quantisation format 'convrot_w4a4'; float8_e4m3fn, .*nvfp4 are known",
    ),
    ("int8", without("weight_scale"), "its scale .*weight_scale is missing"),
    (
        "int8",
        with_tensor("weight_scale", 255),
        r"weight_scale is torch.float32 \[255\]; .* each of the 256 rows",
    ),
    (
        "int8 ConvRot",
        with_tensor("weight", 256, 128, dtype=torch.int8),
        "128 columns, which is no multiple of 256",
    ),
    (
        "int8",
        with_marker(format="int8_tensorwise", convrot=True, convrot_groupsize=128),
        "in groups of 128; 4, 16",
    ),
    (
        "int8",
        with_marker(format="int8_tensorwise", convrot=True, convrot_groupsize="x"),
        "in groups of 'x'; 4, 16",
    ),
    (
        "int8",
        with_marker(format="mxfp8"),
        "weight is torch.int8 .*; mxfp8 in torch.float8_e4m3fn is marked",
    ),
    (
        "mxfp8",
        with_tensor("weight_scale", 256, 7, dtype=torch.uint8),
        r"\[256, 7\]; .* are bytes \[256, 8\]",
    ),
    ("mxfp8", with_tensor("weight_scale", 256, 8), r"float32 \[256, 8\]; .* are bytes \[256, 8\]"),
    (
        "mxfp8",
        with_tensor("weight", 256, 40, dtype=torch.float8_e4m3fn),
        "40 columns, which is no multiple of the 32",
    ),
    ("nvfp4", without("weight_scale_2"), "its scale .*weight_scale_2 is missing"),
    (
        "nvfp4",
        with_tensor("weight_scale_2", 256),
        r"weight_scale_2 is torch.float32 \[256\]; a scale is one number",
    ),
    (
        "nvfp4",
        with_tensor("pre_quant_scale", 256),
        "pre_quant_scale multiplies the input .* not supported",
    ),
    ("nvfp4 LightX2V", without("alpha"), "its scale .*alpha is missing"),
    (
        "nvfp4",
        with_tensor("weight", 256, 64, dtype=torch.uint8),
        r"\[256, 16\]; .* are bytes \[256, 8\]",
    ),
]


@pytest.mark.parametrize(
    ("name", "change", "message"), WRONG, ids=[message for _, _, message in WRONG]
)
def test_a_wrong_file_is_refused(
    name: str,
    change: Callable[[Tensors], object],
    message: str,
    model: WanTransformer3DModel,
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.safetensors"
    save_expert_file(
        model,
        path,
        dtype=torch.bfloat16,
        quantised=MixedLayout(format_of=lambda layer: name if layer == Q else None),
    )
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)
    with pytest.raises(CheckpointError, match=message) as error:
        open_expert(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_refused(
    bad: float, model: WanTransformer3DModel, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    save_expert_file(
        model, path, dtype=torch.bfloat16, quantised=MixedLayout(format_of=lambda _: "int8 rows")
    )
    tensors = load_file(path)
    tensors[f"{Q}.weight_scale"][7] = bad
    save_file(tensors, path)
    experts = {"high": open_expert(path)}
    source = block_source(experts, Precision(compute_dtype=torch.bfloat16), direct=False)
    with pytest.raises(
        SourceError, match=r"a.safetensors: the scale of attn1.to_q.weight is NaN or infinite"
    ):
        source.scales(BlockKey("high", 0))
    source.close()


@pytest.mark.parametrize(
    ("name", "bad"), [("mxfp8", 0xFF), ("nvfp4", 0x7F), ("nvfp4 LightX2V", 0xFF)]
)
def test_a_scale_of_a_group_that_is_no_number_is_refused(
    name: str, bad: int, model: WanTransformer3DModel, tmp_path: Path
) -> None:
    """Queries and keys with NaN in a few channels may give finite latents."""
    path = tmp_path / "a.safetensors"
    save_expert_file(
        model, path, dtype=torch.bfloat16, quantised=MixedLayout(format_of=lambda _: name)
    )
    tensors = load_file(path)
    tensors[f"{Q}.weight_scale"].view(torch.uint8).view(-1)[0] = bad
    save_file(tensors, path)
    source = block_source(
        {"high": open_expert(path)}, Precision(compute_dtype=torch.bfloat16), direct=False
    )
    with pytest.raises(
        SourceError, match=r"a.safetensors: a scale of attn1.to_q.weight is NaN: download the file"
    ):
        source.scales(BlockKey("high", 0))
    source.close()


@pytest.mark.parametrize(
    "layout",
    [
        Fp8Layout(full_precision=True),
        Fp8Layout(kind="comfy_quant", full_precision=True),
        Fp8Layout(kind="metadata", full_precision=True),
        "int8 rows",
    ],
    ids=str,
)
@pytest.mark.parametrize("storage", ["as stored", "fp8"])
def test_layers_that_demand_full_precision_are_decoded(
    layout: Fp8Layout | str, storage: Storage, model: WanTransformer3DModel, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    if isinstance(layout, Fp8Layout):
        save_expert_file(model, path, dtype=torch.bfloat16, quantised=layout)
    else:
        save_expert_file(
            model, path, dtype=torch.bfloat16, quantised=MixedLayout(format_of=lambda _: layout)
        )
        tensors = load_file(path)
        marker = {"format": "int8_tensorwise", "full_precision_matrix_mult": True}
        text = torch.tensor(list(json.dumps(marker).encode()), dtype=torch.uint8)
        save_file(
            {
                key: text.clone() if key.endswith(".comfy_quant") else each
                for key, each in tensors.items()
            },
            path,
        )
    precision = Precision(compute_dtype=torch.bfloat16, storage=storage, arithmetic="as stored")
    experts = {"high": open_expert(path)}
    assert not block_bytes(experts, precision).multiplied
    assert block_bytes(experts, replace(precision, storage="int8 ConvRot")).multiplied == (
        {torch.int8} if isinstance(layout, Fp8Layout) else set()
    )
