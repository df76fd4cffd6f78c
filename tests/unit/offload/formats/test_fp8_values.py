from __future__ import annotations

import pytest
import torch

from wanstream.offload.formats.decode import FP8_DTYPES, decode_tensor, widen

EVERY = torch.arange(256, dtype=torch.int16).to(torch.uint8)


def widened(stored: torch.Tensor) -> torch.Tensor:
    into = torch.full(stored.shape, 7.0)
    widen(stored, into, torch.full(stored.shape, 7, dtype=torch.int16))
    return into


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found.isnan(), expected.isnan())
    there = ~expected.isnan()
    assert torch.equal(found[there], expected[there])
    assert torch.equal(found[there].signbit(), expected[there].signbit())


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_every_code_is_the_number_that_torch_makes_of_it(dtype):
    every = EVERY.view(dtype)
    assert_same(widened(every), every.float())
    numbers = every[~every.float().isnan()]
    assert_same(widened(numbers), numbers.float())
    for code in EVERY:  # one at a time: a NaN changes the code path for all other values
        one = code.reshape(1).view(dtype)
        assert_same(widened(one), one.float())


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("computed", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "scale", [None, torch.tensor(0.0173), torch.rand(16, 1) * 1e-3], ids=["none", "one", "rows"]
)
def test_decoding_is_the_formula_also_where_a_nan_is(dtype, computed, scale):
    for stored in (EVERY.view(dtype).view(16, 16), torch.randn(16, 16).to(dtype)):
        into = torch.empty(16, 16, dtype=computed)
        decode_tensor(stored, into, scale=scale)
        exact = stored.float() if scale is None else stored.float() * scale
        assert_same(into.float(), exact.to(computed).float())
