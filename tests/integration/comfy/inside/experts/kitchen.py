"""Runs in ComfyUI's own Python: comfy-kitchen's quantised matrices and operations, on a CPU."""

import importlib.util
import json
from dataclasses import replace
from unittest.mock import patch

import torch
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from safetensors.torch import load_file

from wanstream.block_kernels import EXACT, Int8Linear, choice, int8_attention, multiplication
from wanstream.block_kernels.attention import Kernels
from wanstream.offload.formats import MXFP8, NVFP4, EightBit, decode_tensor, kronecker_factors
from wanstream.offload.sources import read_tensors
from wanstream.testing import TinyShape, make_expert, save_expert_file
from wanstream.testing.experts import native_layer
from wanstream.tests.support.code_layers import loaded
from wanstream.tests.support.wan.int8_attention import quantised_attention
from wanstream.tests.support.wan.number_formats import Encoded
from wanstream.wan.checkpoint import open_expert, write_int8
from wanstream.wan.transformer.block import BlockSettings, WanBlock
from wanstream.wan.transformer.compiled_block import get_compiler

from ..checks import require
from ..families import _difference, _normal

CPU = torch.device("cpu")
NO_CUDA = "its CUDA backend is not available (CUDA not available"
DISABLED = "its CUDA backend is disabled in this process"


def check_values(_):
    """They equal comfy-kitchen's."""
    from comfy_kitchen.backends.eager import quantization as kitchen

    weight = 0.02 * _normal(160, 512, seed=1)
    weight[5, ::64] *= 30
    overall = weight.abs().amax() / (448 * 6)
    simple = kitchen.dequantize_int8_simple
    rotated = kitchen.quantize_int8_convrot_weight(weight, 256)
    mxfp8 = kitchen.quantize_mxfp8(weight)
    nvfp4 = kitchen.quantize_nvfp4(weight, overall)
    fp32 = {"output_type": torch.float32}
    four_bits = kitchen.dequantize_nvfp4(nvfp4[0], overall, nvfp4[1], **fp32)
    by_row = kitchen.quantize_int8_rowwise(weight)
    whole = kitchen.quantize_int8_tensorwise(weight)
    for packing, (codes, scale), expected in (
        (EightBit(), by_row, simple(*by_row)),
        (EightBit(by_row=False), whole, simple(*whole)),
        (EightBit(group=256), rotated, kitchen.dequantize_int8_convrot_weight(*rotated, 256)),
        (MXFP8, mxfp8, kitchen.dequantize_mxfp8(*mxfp8, **fp32)),
        (NVFP4, nvfp4, four_bits),
    ):
        scale = scale.view(torch.uint8) if scale.element_size() == 1 else scale
        tensors = {"weight": codes, "weight_scale": scale}
        if packing == NVFP4:
            tensors["weight_scale_2"] = overall
        stored, scale = Encoded(tensors, {}, expected).in_memory
        decoded = torch.empty(expected.shape)
        decode_tensor(stored, decoded, packing=packing, scale=scale)
        # comfy-kitchen sums scaled, rounded products of rotated codes.
        rounding = {"rtol": 1e-5, "atol": 1e-7} if packing == EightBit(group=256) else {}
        torch.testing.assert_close(decoded, expected, **(rounding or {"rtol": 0, "atol": 0}))
        assert _difference(decoded, weight) < 0.2


def check_products(_):
    """comfy-kitchen's pass our test, and its registry is read."""
    import comfy_kitchen
    from torch._dynamo.utils import counters

    for dtype in (torch.float32, torch.bfloat16):
        code = comfy_kitchen.DTYPE_TO_CODE[dtype]
        code = multiplication.Multiplications(device=CPU, kitchen_dtype=code)
        assert multiplication.product_fault("int8", code, dtype) is None
    with patch.object(multiplication, "kitchen_refusal", lambda *_: None):
        refusal = multiplication.kitchen_int8_refusal(CPU, torch.bfloat16)
    assert refusal == "its registry chooses eager"
    torch.manual_seed(0)
    layer = Int8Linear(torch.nn.Linear(512, 48), group=256).requires_grad_(False)
    codes = torch.randint(-127, 128, (48, 512), dtype=torch.int8)
    layer.weight = torch.nn.Parameter(codes, requires_grad=False)
    layer.weight_scale = torch.full((48, 1), 1e-3)
    layer.kitchen_dtype = comfy_kitchen.DTYPE_TO_CODE[torch.float32]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(1, 40, 512)
    plain = layer(x)
    counters.clear()
    for rank in (0, 2, 5):
        expected = plain
        if rank:
            layer.patch_up = torch.randn(48, rank)
            layer.patch_down = torch.randn(rank, 512)
            expected = plain + x @ layer.patch_down.T @ layer.patch_up.T
        for each in (layer(x), compiled(x)):
            assert (each - expected).norm() < 1e-5 * plain.norm()
    assert counters["stats"]["unique_graphs"] == 1, "another patch compiles the layer again"
    layer.patch_up = layer.patch_down = None
    activated = layer(torch.nn.functional.gelu(x, approximate="tanh"))
    # Codes of the same function, computed in another kernel.
    assert _difference(layer.multiply_gelu(x), activated) < 1e-2


def check_written_files(folder):
    """The layout that newer ComfyUIs read int8 into reads what `quantise` writes."""
    from comfy_kitchen.tensor import QuantizedTensor, TensorWiseINT8Layout

    model = make_expert(TinyShape(layers=1), seed=1)
    save_expert_file(model, folder / "source.safetensors", dtype=torch.float32)
    write_int8(open_expert(folder / "source.safetensors"), folder / "int8.safetensors")
    tensors = load_file(folder / "int8.safetensors")
    expert = open_expert(folder / "int8.safetensors")
    weights = expert.weights.items()
    packed = {name: each for name, each in weights if isinstance(each.packing, EightBit)}
    assert len(packed) == 10
    assert len([key for key in tensors if key.endswith(".comfy_quant")]) == 10
    for name, stored in read_tensors(packed).items():
        layer = native_layer(name.removesuffix(".weight"))
        # As ComfyUI's mixed-precision layers read it.
        settings = json.loads(tensors[f"{layer}.comfy_quant"].numpy().tobytes())
        assert settings.pop("format") == "int8_tensorwise"
        codes = tensors[f"{layer}.weight"]
        scale = tensors[f"{layer}.weight_scale"]
        settings |= {"orig_dtype": torch.float32, "orig_shape": tuple(codes.shape)}
        parameters = TensorWiseINT8Layout.Params(scale=scale, **settings)
        theirs = QuantizedTensor(codes, "TensorWiseINT8Layout", parameters)
        keys = [f"{layer}.weight", f"{layer}.weight_scale"]
        assert [*theirs.state_dict(f"{layer}.weight")] == keys
        values = torch.empty(packed[name].shape)
        packing = packed[name].packing
        decode_tensor(stored, values, packing=packing)
        torch.testing.assert_close(values, theirs.dequantize(), rtol=1e-5, atol=1e-6)
        weight = model.get_parameter(name)
        assert _difference(values, weight) < 0.01
        bias = model.get_parameter(f"{name.removesuffix('weight')}bias")
        linear = Int8Linear(torch.nn.Linear(*weight.T.shape), group=256)
        linear = loaded(linear, *EightBit(group=256).split(stored, packed[name].shape), bias)
        linear.rotation = list(kronecker_factors(256, CPU))
        tokens = _normal(40, codes.shape[1], seed=2)
        expected = torch.nn.functional.linear(tokens, theirs, tensors[f"{layer}.bias"].float())
        # Rotation sums differ in their last bits, and so does one token code in many.
        assert _difference(linear.compute(tokens), expected) < 2e-3


def check_attention(_):
    """comfy-kitchen's fits into our blocks."""
    import comfy_kitchen

    def fault(dtype):
        operation = comfy_kitchen.int8_attention
        results = int8_attention._test_results(operation, CPU, dtype)
        return choice.fault_of(lambda: results, int8_attention.LARGEST_ERROR)

    on_cpu = "fails (ValueError: q, k, and v must be on the same CUDA device)"
    assert fault(torch.bfloat16) == on_cpu
    # The operation of comfy-kitchen has no code for a CPU: it gets the definition of its roundings.
    operation = comfy_kitchen.sage_attention._op_int8_attention
    operation.register_kernel("cpu")(lambda *given: quantised_attention(*given).contiguous())
    assert [fault(dtype) for dtype in (torch.float32, torch.bfloat16)] == [None, None]
    torch.manual_seed(0)
    block = WanTransformerBlock(256, 256, 2, cross_attn_norm=True).eval().requires_grad_(False)
    angles = torch.randn(1, 300, 1, 128)
    given = torch.randn(1, 300, 256), torch.randn(1, 3, 256), torch.randn(1, 6, 256)
    rotation = EXACT.rotation(angles.cos(), angles.sin())
    settings = BlockSettings()
    found = []
    int8 = Kernels(attention="int8")
    ours = WanBlock(block, settings)
    compiled = replace(int8, compiler="eager")
    for kernels, chunk in ((Kernels(), None), (int8, None), (int8, 64), (compiled, None)):
        settings.set(kernels, EXACT, chunk)
        found.append(ours(*given, rotation))
    differences = [_difference(each, found[0]) for each in found[1:]]
    assert all(0 < each < 0.01 for each in differences)
    assert max(differences) - min(differences) < 1e-5
    assert get_compiler("eager").graphs == 1


def check_registry(_):
    """The last case: it registers backends."""
    import comfy_kitchen

    def refusal(dtype=torch.bfloat16):
        return int8_attention.int8_attention_refusal(torch.device("cuda", 0), dtype)

    def refusals(*names):
        return choice.backend_refusal(comfy_kitchen, *names)

    registry = comfy_kitchen.registry
    eager = comfy_kitchen.backends.eager
    assert refusals().startswith(NO_CUDA)
    assert refusals("int8_linear").startswith(NO_CUDA)
    with patch.object(int8_attention, "kitchen_refusal", lambda _: refusals()):
        registry.register("cuda", eager, {})
        needed = "its int8_attention needs a GPU of compute capability 7.5 or later"
        assert refusal() == needed
        registry.register("cuda", eager, dict.fromkeys(registry._capabilities["eager"]))
        assert refusals("int8_linear") is None
        registry.disable("cuda")  # as core does where torch is older than CUDA 13
        assert refusals("int8_linear") == DISABLED
        assert refusal(torch.float16) == DISABLED


def setup(folder):
    require(importlib.util.find_spec("comfy_kitchen"), "comfy-kitchen")
    importlib.import_module("comfy.quant_ops")  # as in core, before comfy-kitchen
    return folder
