from __future__ import annotations

import pytest
import torch

from wanstream.offload.formats import chunk_size
from wanstream.offload.formats.decode import decode_block
from wanstream.offload.formats.layout import BlockFormat, allocate_flat, block_format, tensor_views

WIDE = [torch.float32, torch.float16, torch.bfloat16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def decoded(
    stored: dict[str, torch.Tensor], computed: torch.dtype, scales: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    both = block_format(
        {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()},
        computed,
        scaled=scales,
    )
    raw = allocate_flat(both.stored.nbytes, "cpu")
    for name, view in tensor_views(raw, both.stored).items():
        view.copy_(stored[name])
    into = allocate_flat(both.computed.nbytes, "cpu")
    decode_block(raw, into, both, scales)
    return tensor_views(into, both.computed)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values over the dtype's whole range, subnormals included, without NaN."""
    return (torch.randn(shape) * torch.exp2(torch.randint(-20, 6, shape).float())).to(dtype)


@pytest.mark.parametrize("computed", WIDE)
@pytest.mark.parametrize("dtype", [*WIDE, *FP8])
def test_a_tensor_without_scale_is_cast(dtype, computed):
    torch.manual_seed(0)
    stored = {
        "a": random(33, 50, dtype=dtype),
        "b": random(7, dtype=dtype),
        "c": random(1, 1, dtype=dtype),
    }
    for name, tensor in decoded(stored, computed, {}).items():
        assert torch.equal(bits(tensor), bits(stored[name].to(computed)))


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("computed", WIDE)
@pytest.mark.parametrize("dtype", [*FP8, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_a_scaled_tensor_is_the_formula_bit_for_bit(dtype, computed, by_row, rows):
    torch.manual_seed(rows)
    stored = {"a": random(rows, 50, dtype=dtype), "plain": random(4, 4, dtype=dtype)}
    scale = torch.rand(rows, 1) * 0.01 if by_row else torch.rand(()) * 0.01
    result = decoded(stored, computed, {"a": scale})
    assert torch.equal(bits(result["a"]), bits((stored["a"].float() * scale.float()).to(computed)))
    assert torch.equal(bits(result["plain"]), bits(stored["plain"].to(computed)))


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("chunk", [1, 50, 99, 500, 1649, 1650, 10_000])
def test_the_size_of_a_chunk_changes_no_bit(monkeypatch, chunk, by_row):
    torch.manual_seed(1)
    monkeypatch.setattr(chunk_size, "CHUNK_VALUES", chunk)
    stored = {"a": random(33, 50, dtype=torch.float8_e4m3fn)}
    scale = torch.rand(33, 1) if by_row else torch.rand(())
    result = decoded(stored, torch.bfloat16, {"a": scale})["a"]
    assert torch.equal(bits(result), bits((stored["a"].float() * scale).bfloat16()))


def test_nan_of_fp8_stays_nan():
    stored = {"a": torch.tensor([[0x7F, 0xFF, 0x38]], dtype=torch.uint8).view(torch.float8_e4m3fn)}
    assert decoded(stored, torch.bfloat16, {"a": torch.tensor(0.5)})["a"].isnan().tolist() == [
        [True, True, False]
    ]


def test_extra_memory_does_not_grow_with_the_matrix():
    def largest_temporary(rows: int) -> int:
        both = block_format({"a": ((rows, 512), torch.float8_e4m3fn)}, torch.bfloat16, scaled=["a"])
        raw = allocate_flat(both.stored.nbytes, "cpu").zero_()
        into = allocate_flat(both.computed.nbytes, "cpu")
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            decode_block(raw, into, both, {"a": torch.rand(rows, 1)})
        return max(event.cpu_memory_usage for event in profile.events())

    assert 0 < largest_temporary(4096) <= largest_temporary(3 * 4096) <= 4 * chunk_size.CHUNK_VALUES


@pytest.mark.parametrize("given", [{}, {"a": torch.ones(()), "b": torch.ones(())}])
def test_scales_must_be_those_of_the_format(given):
    both = block_format({"a": ((2, 2), torch.float8_e4m3fn)}, torch.float32, scaled=["a"])
    assert isinstance(both, BlockFormat)
    with pytest.raises(AssertionError, match="scales of"):
        decode_block(allocate_flat(256, "cpu"), allocate_flat(256, "cpu"), both, given)
