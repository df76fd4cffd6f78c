from __future__ import annotations

import math

import pytest
import torch

from wanstream.offload.formats import quantise
from wanstream.offload.formats.quantise import NotFiniteError, quantise_rows, row_scales

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def plainly(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with the formula on whole tensors."""
    scales = (values.float().abs().amax(1, keepdim=True) / 448.0).clamp(
        min=torch.finfo(torch.float32).tiny
    )
    return (values.float() / scales).to(torch.float8_e4m3fn), scales


def quantised(
    values: torch.Tensor, *, work: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    into = torch.full(values.shape, 0x55, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.full((len(values), 1), math.nan)
    memory = quantise.work_memory(values.shape[1]) if work is None else torch.empty(work)
    quantise_rows(values, into, scales, memory)
    return into, scales


def heavy_tailed(rows: int, columns: int) -> torch.Tensor:
    """Return rows with very different magnitudes, each with a few large outliers."""
    torch.manual_seed(0)
    sizes = torch.logspace(-6, 1, rows).unsqueeze(1)
    return torch.randn(rows, columns).pow(5) * sizes


def assert_same(values: torch.Tensor, into: torch.Tensor, scales: torch.Tensor) -> None:
    expected, expected_scales = plainly(values)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(into.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("work", [None, 37, 37 * 3, 37 * 8 + 5])
def test_values_and_scales_are_those_of_the_formula(dtype, work):
    values = heavy_tailed(23, 37).to(dtype)
    assert_same(values, *quantised(values, work=work))


def test_values_are_divided_by_the_scale_and_not_multiplied_with_its_reciprocal():
    torch.manual_seed(0)
    values = torch.randn(128, 2048).bfloat16()
    into, scales = quantised(values)
    assert_same(values, into, scales)
    by_reciprocal = (values * scales.reciprocal()).to(torch.float8_e4m3fn)
    assert not torch.equal(into.view(torch.uint8), by_reciprocal.view(torch.uint8))


def test_every_bf16_number_is_quantised_as_the_formula_says():
    """All values in the scale's range, next to a large one, with subnormal results and ties."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    for largest in (448.0, 3.0, 0.0173, 1e-30):
        values = every[every.float().abs() <= largest]
        rows = (
            torch.cat([values, torch.full((-values.numel() % 64,), largest).bfloat16()])
            .view(-1, 64)
            .clone()
        )
        rows[:, 0] = largest
        assert_same(rows, *quantised(rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_nothing_and_of_next_to_nothing_stay_finite(dtype):
    smallest = torch.finfo(dtype).smallest_normal
    values = torch.zeros(5, 8, dtype=dtype)
    values[1, 3] = smallest
    values[2] = torch.tensor(1e-45).to(dtype)  # subnormal in fp32 and bf16
    values[3, 0] = torch.finfo(dtype).max
    values[4] = -0.0
    into, scales = quantised(values)
    assert_same(values, into, scales)
    decoded = into.float() * scales
    assert decoded.isfinite().all()
    assert (decoded[[0, 4]] == 0).all()
    assert (scales >= torch.finfo(torch.float32).tiny).all()
    assert decoded[3, 0].item() == pytest.approx(torch.finfo(dtype).max, rel=1e-6)


def test_a_row_does_not_depend_on_the_others_nor_on_the_cut():
    values = heavy_tailed(40, 64).bfloat16()
    whole, scales = quantised(values)
    for start, stop in ((0, 1), (1, 17), (17, 40)):
        part, part_scales = quantised(values[start:stop])
        assert torch.equal(part.view(torch.uint8), whole[start:stop].view(torch.uint8))
        assert torch.equal(part_scales, scales[start:stop])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("work", [None, 16 * 2])
def test_the_first_row_that_is_not_finite_is_named(dtype, bad, work):
    values = torch.randn(20, 16).to(dtype)
    values[11, 5] = values[17, 0] = bad
    with pytest.raises(NotFiniteError, match="row 11 ") as caught:
        quantised(values, work=work)
    assert caught.value.row == 11
    with pytest.raises(NotFiniteError):
        row_scales(values, torch.empty(20, 1), torch.empty(1000))


def test_scales_alone_are_those_of_the_whole():
    values = heavy_tailed(23, 37).bfloat16()
    scales = torch.empty(23, 1)
    row_scales(values, scales, torch.empty(100))
    assert torch.equal(scales, plainly(values)[1])


def test_each_row_keeps_the_precision_of_fp8():
    """The error is at most half a unit in the last place.

    With 3 mantissa bits it is 1/16 of the value. Below 2^-6 scales it is half the smallest step.
    """
    values = heavy_tailed(64, 512)
    into, scales = quantised(values)
    error = (into.float() * scales - values).abs()
    assert (error <= torch.maximum(values.abs() / 16, scales * 2**-10) * 1.0001).all()
    one = values.abs().max() / 448
    of_one_scale = (values / one).to(torch.float8_e4m3fn).float() * one - values
    per_row = (error.norm(dim=1) / values.norm(dim=1)).max()
    assert per_row < 0.04
    assert (
        of_one_scale.norm(dim=1) / values.norm(dim=1)
    ).max() > 0.9  # one scale per tensor would lose small rows
