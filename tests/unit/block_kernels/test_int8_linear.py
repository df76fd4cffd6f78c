"""Int8 linear layers against a definition in float64: codes, scales, sums and results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from wanstream.block_kernels import Int8Linear, scaled_linear
from wanstream.block_kernels import int8_linear as module
from wanstream.block_kernels.int8_linear import quantise_tokens
from wanstream.block_kernels.multiplication import Multiplications
from wanstream.offload.formats import quantise_int8
from wanstream.tests.support.code_layers import loaded
from wanstream.tests.support.number_formats import Encoded, int8, int8_convrot, rotated

CPU = torch.device("cpu")
ROWS, COLUMNS = 48, 512


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    values[..., ::64] *= 20
    return values


def layer_of(encoded: Encoded, *tensors: Any, group: int = 0) -> Int8Linear:
    codes, scale = (encoded.tensors[ending] for ending in ("weight", "weight_scale"))
    layer = Int8Linear(nn.Linear(COLUMNS, ROWS), group=group)
    Multiplications(device=CPU).prepare([layer])
    return loaded(layer, codes, scale, *tensors)


def defined(
    tokens: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Return the result in float64 for rotated tokens, without the last rounding."""
    token_scale = (tokens.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30).float()
    token_codes = (tokens.float() / token_scale).round().double()
    return token_codes @ codes.double().T * (token_scale * scale.T).double() + bias.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [0, 64, 256])
@pytest.mark.parametrize("tokens", [1, 40])
def test_the_result_is_that_of_the_definition(dtype: torch.dtype, group: int, tokens: int) -> None:
    weight, bias = random(ROWS, COLUMNS), random(ROWS, seed=2).to(dtype)
    encoded = int8_convrot(weight, group=group) if group else int8(weight)
    codes, scale = encoded.tensors["weight"], encoded.tensors["weight_scale"]
    x = random(2, tokens, COLUMNS, seed=1).to(dtype)
    turned = rotated(x.float(), group) if group else x.double()
    expected = defined(turned.float(), codes, scale, bias).to(dtype)
    result = layer_of(encoded, bias, group=group).compute(x)
    assert result.dtype == dtype
    # The rotation sums in fp32: a code in some thousands is another one than in float64.
    within = 5e-3 if group else 2 * torch.finfo(dtype).eps
    assert (result.float() - expected.float()).abs().max() <= within * expected.float().abs().max()
    exact = x.double() @ weight.double().T + bias.double()
    error = (result.double() - exact).norm() / exact.norm()
    assert error < (0.02 if group else 0.06)


def test_the_result_in_bf16_is_within_one_unit_of_its_last_place() -> None:
    weight, bias, x = (
        random(ROWS, COLUMNS),
        random(ROWS, seed=2).bfloat16(),
        random(200, COLUMNS, seed=1).bfloat16(),
    )
    encoded = int8(weight)
    codes, scale = (encoded.tensors[ending] for ending in ("weight", "weight_scale"))
    result, expected = (
        layer_of(encoded, bias).compute(x),
        defined(x.float(), codes, scale, bias).bfloat16(),
    )
    units = (result.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    assert torch.equal(result.signbit(), expected.signbit())
    assert units.max() <= 1
    assert (units > 0).float().mean() < 1e-3


def test_a_patch_is_added_exactly() -> None:
    encoded, x = int8(random(ROWS, COLUMNS)), random(2, 40, COLUMNS, seed=1)
    up, down = 0.001 * random(ROWS, 4, seed=2), random(4, COLUMNS, seed=3)
    patched = layer_of(encoded, None, (up, down)).compute(x)
    change = patched.double() - layer_of(encoded).compute(x).double()
    expected = x.double() @ (up.double() @ down.double()).T
    assert torch.allclose(change, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_codes_and_scales_are_those_of_float64() -> None:
    x = random(40, COLUMNS)
    x[7] = 0
    codes, scale = quantise_tokens(x, [])
    expected = (x.double().abs().amax(1, keepdim=True).float() / 127).clamp(min=1e-30)
    assert torch.equal(scale, expected)
    assert torch.equal(codes.double(), (x / expected).double().round())
    assert codes.abs().amax(1).tolist() == [127] * 7 + [0] + [127] * 32


def test_sums_are_exact() -> None:
    codes = torch.full((33, 13824), 127, dtype=torch.int8)
    weight = torch.full((8, 13824), -127, dtype=torch.int8)
    assert torch.equal(
        module._multiply(codes, weight), torch.full((33, 8), -127 * 127 * 13824, dtype=torch.int32)
    )


@pytest.mark.parametrize("group", [0, 256])
def test_pieces_of_tokens_have_the_same_bits(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(ROWS, COLUMNS)
    encoded = int8_convrot(weight, group=group) if group else int8(weight)
    layer = layer_of(encoded, group=group)
    x = random(200, COLUMNS, seed=1).bfloat16()
    whole = layer.compute(x)
    monkeypatch.setattr(scaled_linear, "piece_tokens", lambda rows, columns: 37)
    assert torch.equal(layer.compute(x), whole)


def test_outliers_of_tokens_cost_less_after_the_rotation() -> None:
    weight, x = torch.randn(ROWS, COLUMNS) * 0.02, random(64, COLUMNS, seed=1)
    exact = x.double() @ weight.double().T
    errors = []
    for encoded, group in ((int8(weight), 0), (int8_convrot(weight), 256)):
        result = layer_of(encoded, group=group).compute(x)
        errors.append((result.double() - exact).norm() / exact.norm())
    assert errors[1] < 0.5 * errors[0]


def test_a_layer_compiles_into_one_graph() -> None:
    layer = layer_of(int8_convrot(random(ROWS, COLUMNS)), group=256)
    x = random(1, 40, COLUMNS)
    with torch.no_grad():
        plain = layer(x)
        assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), plain)


def test_zeros_stay_zeros() -> None:
    codes, scale = quantise_int8(torch.zeros(2, 8))
    assert not codes.any()
    assert scale.tolist() == [[pytest.approx(1e-30)]] * 2
