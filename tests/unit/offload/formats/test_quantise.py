"""Quantised rows: codes and scales of the formula, bit for bit, in any pieces."""

from __future__ import annotations

import math

import pytest
import torch

from wanstream.offload.formats import quantise
from wanstream.offload.formats.quantise import NotFiniteError, quantise_rows, row_scales

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
E4M3 = torch.float8_e4m3fn
SMALLEST = torch.finfo(torch.float32).tiny

Quantised = tuple[torch.Tensor, torch.Tensor]


def plainly(values: torch.Tensor) -> Quantised:
    """Quantise with the formula on whole tensors."""
    scales = (values.float().abs().amax(1, keepdim=True) / 448.0).clamp(min=SMALLEST)
    return (values.float() / scales).to(E4M3), scales


def quantised(values: torch.Tensor, *, work: int | None = None) -> Quantised:
    into = torch.full(values.shape, 0x55, dtype=torch.uint8).view(E4M3)
    scales = torch.full((len(values), 1), math.nan)
    memory = quantise.work_memory(values.shape[1]) if work is None else torch.empty(work)
    quantise_rows(values, into, scales, memory)
    return into, scales


def assert_same(found: Quantised, expected: Quantised) -> None:
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1], expected[1])


def heavy_tailed(rows: int, columns: int) -> torch.Tensor:
    """Return rows with very different magnitudes, each with a few large outliers."""
    torch.manual_seed(0)
    return torch.randn(rows, columns).pow(5) * torch.logspace(-6, 1, rows).unsqueeze(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("work", [None, 37, 37 * 3, 37 * 8 + 5])
def test_values_and_scales_are_those_of_the_formula(dtype, work):
    values = heavy_tailed(23, 37).to(dtype)
    expected = plainly(values)
    assert_same(quantised(values, work=work), expected)
    part = slice(5, 17)  # a row does not depend on the others
    assert_same(quantised(values[part], work=work), (expected[0][part], expected[1][part]))
    scales = torch.empty(23, 1)
    row_scales(values, scales, torch.empty(100))
    assert torch.equal(scales, expected[1])


@pytest.mark.parametrize("largest", [448.0, 3.0, 0.0173, 1e-30])
def test_every_bf16_number_is_quantised_by_the_formula(largest):
    """All values in the scale's range, next to a large one, with subnormal results and ties."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = every[every.isfinite() & (every.float().abs() <= largest)]
    filling = torch.full((-values.numel() % 64,), largest).bfloat16()
    rows = torch.cat([values, filling]).view(-1, 64).clone()
    rows[:, 0] = largest
    assert_same(quantised(rows), plainly(rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_and_extremes_stay_finite(dtype):
    info = torch.finfo(dtype)
    values = torch.zeros(5, 8, dtype=dtype)
    values[1, 3] = info.smallest_normal
    values[2] = torch.tensor(1e-45).to(dtype)  # subnormal in fp32 and bf16
    values[3, 0] = info.max
    values[4] = -0.0
    codes, scales = quantised(values)
    assert_same((codes, scales), plainly(values))
    decoded = codes.float() * scales
    assert decoded.isfinite().all()
    assert (decoded[[0, 4]] == 0).all()
    assert (scales >= SMALLEST).all()
    assert decoded[3, 0].item() == pytest.approx(info.max, rel=1e-6)


NOT_FINITE = [*zip(DTYPES, [math.nan, math.inf, -math.inf], [None, 32, 32], strict=True)]


@pytest.mark.parametrize(("dtype", "bad", "work"), NOT_FINITE)
def test_the_first_row_that_is_not_finite_is_named(dtype, bad, work):
    values = torch.randn(20, 16).to(dtype)
    values[11, 5] = values[17, 0] = bad
    with pytest.raises(NotFiniteError, match="row 11 ") as caught:
        quantised(values, work=work)
    assert caught.value.row == 11
    with pytest.raises(NotFiniteError):
        row_scales(values, torch.empty(20, 1), torch.empty(1000))
