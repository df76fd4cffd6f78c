"""Fp8 and int8 linear layers against definitions in float64: codes, scales and results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from wanstream.block_kernels import Fp8Linear, ScaledLinear, quantise_tokens_fp8, scaled_linear
from wanstream.block_kernels.fp8_linear import LARGEST
from wanstream.block_kernels.int8_linear import Int8Linear, quantise_tokens
from wanstream.block_kernels.multiplication import multiplications
from wanstream.offload.formats import quantise_int8
from wanstream.testing.quantised import quantise
from wanstream.tests.support.code_layers import loaded
from wanstream.tests.support.wan.number_formats import ENCODERS, rotated

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROWS = 48
COLUMNS = 512


def multiplies_fp8(*scales: torch.Tensor) -> bool:
    codes = torch.ones(32, 32, dtype=FP8)
    try:
        torch._scaled_mm(codes, codes.t(), *scales, out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


# By torch alone: a fault of ours fails the tests.
LARGEST_CODES = torch.full((32, 32), 127, dtype=torch.int8)
SATURATES = int(torch._int_mm(LARGEST_CODES, LARGEST_CODES)[0, 0]) != 32 * 127**2
EXACT_SUMS = pytest.mark.skipif(SATURATES, reason="sums of int8 products saturate at 16 bits")
NO_PLAIN = not multiplies_fp8(torch.ones(()), torch.ones(()))
PLAIN_FP8 = pytest.mark.skipif(NO_PLAIN, reason="multiplies fp8 codes with their scales only")
NO_SCALES = not multiplies_fp8(torch.ones(32, 1), torch.ones(1, 32))
SCALES_INSIDE = pytest.mark.skipif(NO_SCALES, reason="multiplies with one scale only on a CPU")
ENDS = {"": PLAIN_FP8, ", inside": SCALES_INSIDE}
KINDS = [(kind + end, mark) for end, mark in ENDS.items() for kind in ("fp8", "fp8 rows")]
FP8_KINDS = [pytest.param(kind, marks=mark) for kind, mark in KINDS]
INT8 = {"int8 rows": 0, "int8 ConvRot 64": 64, "int8 ConvRot": 256}
every_kind = pytest.mark.parametrize("kind", [*FP8_KINDS, *INT8])


def random(*shape: int, seed: int = 0, outliers: bool = False) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if outliers:
        values[..., ::64] *= 20
    return values


def codes_of(kind: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if kind in INT8:
        tensors = ENCODERS[kind](weight).tensors
        return tensors["weight"], tensors["weight_scale"]
    if kind.startswith("fp8 rows"):
        return quantise_tokens_fp8(weight)[:2]
    codes, scale = quantise(weight)
    return codes, scale.view(1, 1)


def layer_of(kind: str, weight: torch.Tensor, *tensors: Any) -> ScaledLinear:
    linear = nn.Linear(COLUMNS, ROWS)
    layer = Int8Linear(linear, group=INT8[kind]) if kind in INT8 else Fp8Linear(linear)
    multiplications(["int8"], CPU, torch.float32).prepare([layer])
    if kind not in INT8:
        layer.scales_inside = kind.endswith("inside")
    return loaded(layer, *codes_of(kind, weight), *tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", FP8_KINDS)
def test_fp8_results_are_those_of_the_definition(kind, dtype):
    weight = random(ROWS, COLUMNS)
    bias = random(ROWS, seed=2).to(dtype)
    codes, scale = codes_of(kind, weight)
    x = (200 * random(2, 40, COLUMNS, seed=1)).to(dtype)
    token_scale = (x.abs().amax(-1, keepdim=True).double() / LARGEST).float()
    token_codes = (x.float() / token_scale).to(FP8).double()
    expected = token_codes @ codes.double().T * scale.view(1, -1) * token_scale + bias.double()
    result = layer_of(kind, weight, bias).compute(x)
    assert result.dtype == dtype
    within = 3 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
    assert (result.double() - expected).norm() <= within * expected.norm()
    # Tokens above 448 are not cut off, as they would be with a scale of 1.
    exact = x.double() @ (codes.double() * scale).T + bias.double()
    assert (result.double() - exact).norm() < 0.04 * exact.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", INT8)
@pytest.mark.parametrize("tokens", [1, 40])
def test_int8_results_are_those_of_the_definition(dtype, kind, tokens):
    weight = random(ROWS, COLUMNS, outliers=True)
    group = INT8[kind]
    bias = random(ROWS, seed=2).to(dtype)
    codes, scale = codes_of(kind, weight)
    x = random(2, tokens, COLUMNS, seed=1, outliers=True).to(dtype)
    turned = rotated(x.float(), group).float() if group else x.float()
    token_scale = (turned.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    products = (turned / token_scale).round().double() @ codes.double().T
    expected = (products * (token_scale * scale.T).double() + bias.double()).to(dtype)
    result = layer_of(kind, weight, bias).compute(x)
    assert result.dtype == dtype
    # The rotation sums in fp32: a code in some thousands is another one than in float64.
    within = 5e-3 if group else 2 * torch.finfo(dtype).eps
    assert (result.float() - expected.float()).abs().max() <= within * expected.float().abs().max()
    if dtype == torch.bfloat16 and not group:
        units = (result.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
        assert units.max() <= 1, "units in the last place"
        assert (units > 0).float().mean() < 1e-3
    exact = x.double() @ weight.double().T + bias.double()
    error = (result.double() - exact).norm() / exact.norm()
    assert error < (0.02 if group else 0.06), "outliers cost less after the rotation"


@every_kind
def test_a_patch_is_added_exactly(kind):
    weight = random(ROWS, COLUMNS)
    x = random(2, 40, COLUMNS, seed=1)
    up = 0.001 * random(ROWS, 4, seed=2)
    down = random(4, COLUMNS, seed=3)
    patched = layer_of(kind, weight, None, (up, down)).compute(x).double()
    change = patched - layer_of(kind, weight).compute(x).double()
    expected = x.double() @ (up.double() @ down.double()).T
    assert torch.allclose(change, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@every_kind
def test_pieces_of_tokens_have_the_same_bits(kind, monkeypatch):
    layer = layer_of(kind, random(ROWS, COLUMNS))
    x = random(200, COLUMNS, seed=1).bfloat16()
    whole = layer.compute(x)
    tokens = 37 if kind in INT8 else 64  # sums in fp32 depend on the number of rows
    monkeypatch.setattr(scaled_linear, "piece_tokens", lambda rows, columns: tokens)
    assert torch.equal(layer.compute(x), whole)


@pytest.mark.parametrize("kind", [*FP8_KINDS, "int8 ConvRot"])
def test_a_layer_compiles_into_one_graph(kind):
    layer = layer_of(kind, random(ROWS, COLUMNS))
    x = random(1, 40, COLUMNS)
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))


def test_small_tokens_keep_their_bits():
    """A scale of 1 would round such small tokens to zeros.

    ComfyUI takes it for files without a scale.
    """
    x = 1e-4 * random(8, COLUMNS)
    codes, scale = quantise_tokens_fp8(x)[:2]
    assert (codes.float() * scale - x).norm() < 0.04 * x.norm()
    assert not (x.to(FP8).float()).any()


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_zeros_stay_zeros_and_nan_stays_nan(kind):
    x = torch.zeros(4, COLUMNS)
    x[2, 5] = torch.nan
    result = layer_of(kind, random(ROWS, COLUMNS)).compute(x)
    assert result.isnan().all(1).tolist() == [False, False, True, False]
    assert not result[:2].any()
    codes, scale = quantise_int8(torch.zeros(2, 8))
    assert not codes.any()
    assert scale.tolist() == [[pytest.approx(1e-30)]] * 2


def test_int8_codes_and_scales_are_exact():
    x = random(40, COLUMNS)
    x[7] = 0
    codes, scale = quantise_tokens(x, [])
    expected = (x.double().abs().amax(1, keepdim=True).float() / 127).clamp(min=1e-30)
    assert torch.equal(scale, expected)
    assert torch.equal(codes.double(), (x / expected).double().round())
    assert codes.abs().amax(1).tolist() == [127] * 7 + [0] + [127] * 32


@pytest.mark.parametrize("halves", [pytest.param(False, marks=EXACT_SUMS), True])
def test_sums_of_the_largest_codes_are_exact(halves):
    largest = torch.full((33, 13824), 127, dtype=torch.int8)
    layer = Int8Linear(nn.Linear(13824, 8, device="meta"))
    layer.halves = halves
    for weight in (largest[:8], -largest[:8], -largest[:8] - 1):
        sums = loaded(layer, weight, torch.ones(8, 1)).code_sums(largest)
        assert torch.equal(sums.double(), largest.double() @ weight.double().T)
