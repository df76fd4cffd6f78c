"""Matrices quantised by comfy-kitchen, and comfy-kitchen's operations in our blocks, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from wanstream.block_kernels.int8_linear import Int8Linear
from wanstream.offload.formats import (
    MXFP8,
    NVFP4,
    EightBit,
    Packing,
    decode_tensor,
    kronecker_factors,
)
from wanstream.offload.sources import read_tensors
from wanstream.testing import TinyShape, make_expert, save_expert_file
from wanstream.testing.experts import native_layer
from wanstream.tests.support.code_layers import loaded
from wanstream.tests.support.number_formats import Encoded
from wanstream.wan.checkpoint import open_expert, write_int8

pytestmark = pytest.mark.comfy

QUANTISE = """
import importlib.util, torch
from safetensors.torch import save_file

answer = importlib.util.find_spec("comfy_kitchen") is not None
if answer:
    from comfy_kitchen.backends.eager import quantization as kitchen

    weight = torch.randn(160, 512, generator=torch.Generator().manual_seed(1)) * 0.02
    weight[5, ::64] *= 30
    overall = weight.abs().amax() / (448 * 6)
    of = {
        "int8 rows": kitchen.quantize_int8_rowwise(weight),
        "int8": kitchen.quantize_int8_tensorwise(weight),
        "int8 ConvRot": kitchen.quantize_int8_convrot_weight(weight, 256),
        "mxfp8": kitchen.quantize_mxfp8(weight),
        "nvfp4": kitchen.quantize_nvfp4(weight, overall),
    }
    values = {
        "int8 rows": kitchen.dequantize_int8_simple(*of["int8 rows"]),
        "int8": kitchen.dequantize_int8_simple(*of["int8"]),
        "int8 ConvRot": kitchen.dequantize_int8_convrot_weight(*of["int8 ConvRot"], 256),
        "mxfp8": kitchen.dequantize_mxfp8(*of["mxfp8"], output_type=torch.float32),
        "nvfp4": kitchen.dequantize_nvfp4(
            of["nvfp4"][0], overall, of["nvfp4"][1], output_type=torch.float32
        ),
    }
    tensors = {"weight": weight, "weight_scale_2": overall}
    for name, (codes, scale) in of.items():
        scale = scale.view(torch.uint8) if scale.element_size() == 1 else scale
        tensors |= {
            f"{name}/weight": codes,
            f"{name}/weight_scale": scale,
            f"{name}/values": values[name],
        }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, arguments[0])
"""
PACKINGS: dict[str, Packing] = {
    "int8 rows": EightBit(),
    "int8": EightBit(by_row=False),
    "int8 ConvRot": EightBit(group=256),
    "mxfp8": MXFP8,
    "nvfp4": NVFP4,
}


@pytest.fixture(scope="module")
def quantised(
    in_comfyui: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    file: Path = tmp_path_factory.mktemp("kitchen") / "quantised.safetensors"
    if not in_comfyui(QUANTISE, str(file)):
        pytest.skip("this ComfyUI has no comfy-kitchen")
    return load_file(file)


@pytest.mark.parametrize("name", PACKINGS)
def test_values_equal_those_of_comfy_kitchen(quantised: dict[str, torch.Tensor], name: str) -> None:
    tensors = {ending: quantised[f"{name}/{ending}"] for ending in ("weight", "weight_scale")}
    if name == "nvfp4":
        tensors["weight_scale_2"] = quantised["weight_scale_2"]
    expected = quantised[f"{name}/values"]
    stored, scale = Encoded(tensors, {}, expected).in_memory
    decoded = torch.empty(expected.shape)
    decode_tensor(stored, decoded, packing=PACKINGS[name], scale=scale)
    if name == "int8 ConvRot":  # comfy-kitchen sums scaled, rounded products
        assert torch.allclose(decoded, expected, rtol=1e-5, atol=1e-7)
    else:
        assert torch.equal(decoded, expected)
    weight = quantised["weight"]
    assert (decoded - weight).norm() < 0.2 * weight.norm()


MULTIPLY = """
import importlib.util, torch
from installed_pack import load_pack

answer = importlib.util.find_spec("comfy_kitchen") is not None
if answer:
    load_pack()
    from wanstream.block_kernels import choice, multiplication

    cpu = torch.device("cpu")
    import comfy.quant_ops, comfy_kitchen

    def fault(dtype):
        code = multiplication.Multiplications(
            device=cpu, kitchen_dtype=comfy_kitchen.DTYPE_TO_CODE[dtype]
        )
        return multiplication.product_fault("int8", code, dtype)

    multiplication.kitchen_refusal = lambda device, *names: None
    answer = {
        "unavailable": choice.backend_refusal(comfy_kitchen, "int8_linear"),
        "products": [fault(dtype) for dtype in (torch.float32, torch.bfloat16)],
        "backend": multiplication.kitchen_int8_refusal(cpu, torch.bfloat16),
    }
    from torch._dynamo.utils import counters
    from wanstream.block_kernels.int8_linear import Int8Linear

    torch.manual_seed(0)
    layer, x = (
        Int8Linear(torch.nn.Linear(512, 48), group=256).requires_grad_(False),
        torch.randn(1, 40, 512),
    )
    answer["differences"] = []
    layer.weight = torch.nn.Parameter(
        torch.randint(-127, 128, (48, 512), dtype=torch.int8), requires_grad=False
    )
    layer.weight_scale, layer.kitchen_dtype = (
        torch.full((48, 1), 1e-3),
        comfy_kitchen.DTYPE_TO_CODE[torch.float32],
    )
    whole = torch.compile(layer, backend="aot_eager", fullgraph=True)
    plain = layer(x)
    counters.clear()
    for rank in (0, 2, 5):
        if rank:
            layer.patch_up, layer.patch_down = torch.randn(48, rank), torch.randn(rank, 512)
        expected = plain + (x @ layer.patch_down.T @ layer.patch_up.T if rank else 0)
        answer["differences"].append(
            [float((each - expected).norm() / plain.norm()) for each in (layer(x), whole(x))]
        )
    answer["graphs"] = counters["stats"]["unique_graphs"]
    layer.patch_up = layer.patch_down = None
    activated = layer(torch.nn.functional.gelu(x, approximate="tanh"))
    answer["activated"] = float((layer.multiply_gelu(x) - activated).norm() / activated.norm())

    registry = comfy_kitchen.registry
    registry.register(
        "cuda", comfy_kitchen.backends.eager, dict.fromkeys(registry._capabilities["eager"])
    )
    answer["active"] = choice.backend_refusal(comfy_kitchen, "int8_linear")
    registry.disable("cuda")  # as core does where torch is older than CUDA 13
    answer["disabled"] = choice.backend_refusal(comfy_kitchen, "int8_linear")
"""


def test_products_of_comfy_kitchen_pass_and_its_registry_is_read(
    in_comfyui: Callable[..., Any],
) -> None:
    found = in_comfyui(MULTIPLY)
    if not found:
        pytest.skip("this ComfyUI has no comfy-kitchen")
    assert found["products"] == [None, None]
    assert found["activated"] < 1e-2, "codes of the same function, computed in another kernel"
    assert found["backend"] == "its registry chooses eager"
    assert found["unavailable"].startswith("its CUDA backend is not available (CUDA not available")
    assert found["disabled"] == "its CUDA backend is disabled in this process"
    assert found["active"] is None
    assert all(difference < 1e-5 for pair in found["differences"] for difference in pair)
    assert found["graphs"] == 1, "another patch compiles the layer again"


LOAD = """
import importlib.util, torch
from safetensors.torch import load_file, save_file

answer = importlib.util.find_spec("comfy_kitchen") is not None
if answer:
    from comfy_kitchen.tensor import QuantizedTensor, TensorWiseINT8Layout

    file, results = arguments
    tensors, found = load_file(file), {}
    for key in [key for key in tensors if key.endswith(".comfy_quant")]:
        layer = key.removesuffix(".comfy_quant")
        # As ComfyUI's mixed-precision layers read it.
        settings = json.loads(tensors[key].numpy().tobytes())
        assert settings.pop("format") == "int8_tensorwise"
        codes, scale = tensors[f"{layer}.weight"], tensors[f"{layer}.weight_scale"]
        parameters = TensorWiseINT8Layout.Params(
            scale=scale, orig_dtype=torch.float32, orig_shape=tuple(codes.shape), **settings
        )
        weight = QuantizedTensor(codes, "TensorWiseINT8Layout", parameters)
        assert list(weight.state_dict(f"{layer}.weight")) == [
            f"{layer}.weight",
            f"{layer}.weight_scale",
        ]
        tokens = torch.randn(
            40, codes.shape[1], generator=torch.Generator().manual_seed(len(found))
        )
        found[f"{layer}/values"], found[f"{layer}/tokens"] = weight.dequantize(), tokens
        found[f"{layer}/result"] = torch.nn.functional.linear(
            tokens, weight, tensors[f"{layer}.bias"].float()
        )
    save_file(found, results)
"""


def test_the_layout_of_comfy_kitchen_reads_what_quantise_writes(
    in_comfyui: Callable[..., Any], tmp_path: Path
) -> None:
    """ComfyUI 0.18.1 has no int8, newer ones read it into this class."""
    source, file, results = (
        tmp_path / f"{name}.safetensors" for name in ("source", "int8", "results")
    )
    model = make_expert(TinyShape(layers=1), seed=1)
    save_expert_file(model, source, dtype=torch.float32)
    write_int8(open_expert(source), file)
    if not in_comfyui(LOAD, str(file), str(results)):
        pytest.skip("this ComfyUI has no comfy-kitchen")
    expert, found, rotation = (
        open_expert(file),
        load_file(results),
        list(kronecker_factors(256, torch.device("cpu"))),
    )
    packed = {
        name: tensor
        for name, tensor in expert.weights.items()
        if isinstance(tensor.packing, EightBit)
    }
    assert len(packed) == 10
    assert len(found) == 3 * len(packed)
    for name, stored in read_tensors(packed).items():
        layer, values = native_layer(name.removesuffix(".weight")), torch.empty(packed[name].shape)
        decode_tensor(stored, values, packing=packed[name].packing)
        assert torch.allclose(values, found[f"{layer}/values"], rtol=1e-5, atol=1e-6), name
        weight, bias = (
            model.get_parameter(name),
            model.get_parameter(f"{name.removesuffix('weight')}bias"),
        )
        assert (values - weight).norm() < 0.01 * weight.norm()
        codes, scale = EightBit(group=256).split(stored, packed[name].shape)
        linear = loaded(Int8Linear(torch.nn.Linear(*weight.T.shape), group=256), codes, scale, bias)
        linear.rotation = rotation
        result = linear.compute(found[f"{layer}/tokens"])
        # Rotation sums differ in their last bits, and so does one token code in many.
        assert (result - found[f"{layer}/result"]).norm() < 2e-3 * result.norm(), name


ATTEND = """
import importlib.util, torch
from dataclasses import replace
from installed_pack import load_pack

answer = importlib.util.find_spec("comfy_kitchen") is not None
if answer:
    load_pack()
    import comfy.quant_ops, comfy_kitchen
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock
    from wanstream.tests.support.int8_attention import quantised_attention
    from wanstream.block_kernels import choice, int8_attention
    from wanstream.block_kernels.block_math import EXACT
    from wanstream.wan.transformer.block import BlockSettings, WanBlock
    from wanstream.wan.transformer.compiled_block import get_compiler
    from wanstream.block_kernels.attention import Kernels

    def fault(dtype):
        results = int8_attention._test_results(
            comfy_kitchen.int8_attention, torch.device("cpu"), dtype
        )
        return choice.fault_of(lambda: results, int8_attention.LARGEST_ERROR)

    answer = {
        "unavailable": choice.backend_refusal(comfy_kitchen),
        "on a CPU": fault(torch.bfloat16),
    }
    registry = comfy_kitchen.registry
    registry.register("cuda", comfy_kitchen.backends.eager, {})
    int8_attention.kitchen_refusal = lambda device: choice.backend_refusal(comfy_kitchen)
    answer["incapable"] = int8_attention.int8_attention_refusal(
        torch.device("cuda", 0), torch.bfloat16
    )
    registry.disable("cuda")
    answer["disabled"] = int8_attention.int8_attention_refusal(
        torch.device("cuda", 0), torch.float16
    )

    # The operation of comfy-kitchen has no code for a CPU: it gets the definition of its roundings.
    operation = comfy_kitchen.sage_attention._op_int8_attention
    operation.register_kernel("cpu")(
        lambda q, k, v, scale: quantised_attention(q, k, v, scale).contiguous()
    )
    answer["faults"] = [fault(dtype) for dtype in (torch.float32, torch.bfloat16)]
    torch.manual_seed(0)
    block = WanTransformerBlock(256, 256, 2, cross_attn_norm=True).eval().requires_grad_(False)
    angles = torch.randn(1, 300, 1, 128)
    given = torch.randn(1, 300, 256), torch.randn(1, 3, 256), torch.randn(1, 6, 256)
    rotation = EXACT.rotation(angles.cos(), angles.sin())
    settings, found = BlockSettings(), []
    ours = WanBlock(block, settings)
    int8 = Kernels(attention="int8")
    with torch.no_grad():
        for chosen, chunk in (
            (Kernels(), None),
            (int8, None),
            (int8, 64),
            (replace(int8, compiler="eager"), None),
        ):
            settings.set(chosen, EXACT, chunk)
            found.append(ours(*given, rotation))
    answer["differences"] = [
        float((each - found[0]).norm() / found[0].norm()) for each in found[1:]
    ]
    answer["graphs"] = get_compiler("eager").graphs
"""


def test_the_attention_of_comfy_kitchen_fits_into_our_blocks(
    in_comfyui: Callable[..., Any],
) -> None:
    found = in_comfyui(ATTEND)
    if not found:
        pytest.skip("this ComfyUI has no comfy-kitchen")
    assert found["unavailable"].startswith("its CUDA backend is not available (CUDA not available")
    assert found["incapable"] == "its int8_attention needs a GPU of compute capability 7.5 or later"
    assert found["disabled"] == "its CUDA backend is disabled in this process"
    assert found["on a CPU"] == "fails (ValueError: q, k, and v must be on the same CUDA device)"
    assert found["faults"] == [None, None]
    assert all(0 < each < 0.01 for each in found["differences"])
    assert max(found["differences"]) - min(found["differences"]) < 1e-5
    assert found["graphs"] == 1
