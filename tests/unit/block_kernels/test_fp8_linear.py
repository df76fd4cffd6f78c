"""Fp8 linear layers against a definition in float64: codes, scales and results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from wanstream.block_kernels import (
    Fp8Linear,
    choose_multiplication,
    quantise_tokens_fp8,
    scaled_linear,
)
from wanstream.block_kernels.fp8_linear import LARGEST
from wanstream.block_kernels.multiplication import Multiplications
from wanstream.testing.quantised import quantise
from wanstream.tests.support.code_layers import loaded

CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn
ROWS, COLUMNS = 48, 512
SCALES_INSIDE = pytest.mark.skipif(
    choose_multiplication("fp8", CPU, torch.float32).name != "torch, scales inside",
    reason="this torch multiplies with one scale only on a CPU",
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrix(by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if by_row:
        return quantise_tokens_fp8(random(ROWS, COLUMNS))[:2]
    codes, scale = quantise(random(ROWS, COLUMNS))
    return codes, scale.view(1, 1)


def product(x: torch.Tensor, *tensors: Any, inside: bool = False) -> torch.Tensor:
    layer = loaded(Fp8Linear(nn.Linear(COLUMNS, ROWS)), *tensors)
    layer.scales_inside = inside
    return layer.compute(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=SCALES_INSIDE)])
def test_the_result_is_that_of_the_definition(
    inside: bool, by_row: bool, dtype: torch.dtype
) -> None:
    (codes, scale), bias = matrix(by_row), random(ROWS, seed=2).to(dtype)
    x = (200 * random(2, 40, COLUMNS, seed=1)).to(dtype)
    token_scale = (x.abs().amax(-1, keepdim=True).double() / LARGEST).float()
    token_codes = (x.float() / token_scale).to(FP8)
    expected = (
        token_codes.double() @ codes.double().T * scale.view(1, -1) * token_scale + bias.double()
    )
    result = product(x, codes, scale, bias, inside=inside)
    assert result.dtype == dtype
    within = 3 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
    assert (result.double() - expected).norm() <= within * expected.norm()
    # Tokens above 448 are not cut off, as they would be with a scale of 1.
    exact = x.double() @ (codes.double() * scale).T + bias.double()
    assert (result.double() - exact).norm() < 0.04 * exact.norm()


def test_small_tokens_keep_their_bits() -> None:
    """A scale of 1 would round such small tokens to zeros.

    ComfyUI takes it for files without a scale.
    """
    x = 1e-4 * random(8, COLUMNS)
    codes, scale = quantise_tokens_fp8(x)[:2]
    assert (codes.float() * scale - x).norm() < 0.04 * x.norm()
    assert not (x.to(FP8).float()).any()


def test_zeros_stay_zeros_and_nan_stays_nan() -> None:
    codes, scale = matrix(by_row=True)
    x = torch.zeros(4, COLUMNS)
    x[2, 5] = torch.nan
    result = product(x, codes, scale)
    assert result.isnan().all(1).tolist() == [False, False, True, False]
    assert not result[:2].any()


@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=SCALES_INSIDE)])
def test_a_patch_is_added_exactly(inside: bool) -> None:
    (codes, scale), x = matrix(by_row=True), random(2, 40, COLUMNS, seed=1)
    up, down = 0.001 * random(ROWS, 4, seed=2), random(4, COLUMNS, seed=3)
    patched = product(x, codes, scale, None, (up, down), inside=inside)
    change = patched.double() - product(x, codes, scale, inside=inside)
    expected = x.double() @ (up.double() @ down.double()).T
    assert torch.allclose(change, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=SCALES_INSIDE)])
def test_pieces_of_tokens_have_the_same_bits(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (codes, scale), x = matrix(by_row=False), random(200, COLUMNS, seed=1).bfloat16()
    whole = product(x, codes, scale, inside=inside)
    monkeypatch.setattr(scaled_linear, "piece_tokens", lambda rows, columns: 64)
    assert torch.equal(product(x, codes, scale, inside=inside), whole)


def test_a_layer_compiles_into_one_graph() -> None:
    layer = loaded(Fp8Linear(nn.Linear(COLUMNS, ROWS)), *matrix(by_row=True))
    Multiplications(device=CPU).prepare([layer])
    x = random(1, 40, COLUMNS)
    with torch.no_grad():
        plain = layer(x)
        assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), plain)
