"""Decoding by torch: casts, scaled fp8, and every packing, whole and in chunks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from wanstream.offload.formats import MXFP8, NVFP4, EightBit, Microscaled, Packing, chunk_size
from wanstream.offload.formats.decode import FP8_DTYPES, decode_block, decode_tensor
from wanstream.offload.formats.layout import BlockFormat, allocate_flat, block_format, tensor_views
from wanstream.offload.formats.packing import QUANT_FORMATS
from wanstream.testing.quantised import random_groups
from wanstream.tests.support.wan.number_formats import ENCODERS, Encoded

F32 = torch.float32
BF16 = torch.bfloat16
WIDE = [F32, torch.float16, BF16]
E4M3 = torch.float8_e4m3fn
EVERY = torch.arange(256, dtype=torch.int16).to(torch.uint8)
ROWS = 33
COLUMNS = 512
LOW_FIRST = Microscaled(name="nvfp4", values=16, bits=4, high_first=False)
PACKINGS: dict[str, Packing] = {
    "int8": EightBit(by_row=False),
    "int8 rows": EightBit(),
    "int8 ConvRot": EightBit(group=256),
    "int8 ConvRot 64": EightBit(group=64),
    "mxfp8": MXFP8,
    "nvfp4": NVFP4,
    "nvfp4 LightX2V": LOW_FIRST,
}

Tensors = dict[str, torch.Tensor]


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare values and signs. All NaNs are equal."""
    assert torch.equal(found.isnan(), expected.isnan())
    there = ~expected.isnan()
    assert torch.equal(found[there], expected[there])
    assert torch.equal(found[there].signbit(), expected[there].signbit())


def flats(both: BlockFormat) -> tuple[torch.Tensor, torch.Tensor]:
    return allocate_flat(both.stored.nbytes, "cpu"), allocate_flat(both.computed.nbytes, "cpu")


def decoded(stored, computed, scales, packings=None) -> Tensors:
    """Decode a block. Packed tensors are groups of matrices with `COLUMNS`."""
    packings = packings or {}
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()}
    for name, packing in packings.items():
        shapes[name] = ((len(stored[name]) * packing.values // COLUMNS, COLUMNS), torch.uint8)
    both = block_format(shapes, computed, scaled=scales, packings=packings)
    raw, into = flats(both)
    for name, view in tensor_views(raw, both.stored).items():
        view.copy_(stored[name])
    decode_block(raw, into, both, scales)
    return tensor_views(into, both.computed)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values over the dtype's whole range, subnormals included, without NaN."""
    return (torch.randn(shape) * torch.exp2(torch.randint(-20, 6, shape).float())).to(dtype)


@pytest.mark.parametrize(("rows", "by_row"), [(1, False), (33, True)])
@pytest.mark.parametrize("computed", WIDE)
@pytest.mark.parametrize("dtype", [*WIDE, *FP8_DTYPES])
def test_a_tensor_is_cast_and_a_scaled_one_is_the_formula(dtype, computed, by_row, rows):
    torch.manual_seed(rows)
    shapes = {"a": (rows, 50), "plain": (rows, 50), "b": (7,), "c": (1, 1)}
    stored = {name: random(*shape, dtype=dtype) for name, shape in shapes.items()}
    scale = torch.rand(rows, 1) * 0.01 if by_row else torch.rand(()) * 0.01
    result = decoded(stored, computed, {"a": scale})
    assert_same(result.pop("a"), (stored["a"].float() * scale).to(computed))
    for name, tensor in result.items():
        assert_same(tensor, stored[name].to(computed))


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("computed", WIDE, ids=str)
@pytest.mark.parametrize(
    "scale", [None, torch.tensor(0.0173), torch.rand(16, 1) * 1e-3], ids=["none", "one", "rows"]
)
def test_decoding_is_the_formula_also_with_nan(dtype, computed, scale):
    every = EVERY.view(dtype).view(16, 16)
    # A NaN changes the code path for all other values.
    for stored in (every, every.float().nan_to_num(1.5).to(dtype)):
        into = torch.empty(16, 16, dtype=computed)
        decode_tensor(stored, into, scale=scale)
        exact = stored.float() if scale is None else stored.float() * scale
        assert_same(into.float(), exact.to(computed).float())


@pytest.mark.parametrize("chunk", [1, 99, 1649, 10_000])
def test_the_size_of_a_chunk_changes_no_bit(monkeypatch, chunk):
    torch.manual_seed(1)
    monkeypatch.setattr(chunk_size, "CHUNK_VALUES", chunk)
    stored = {name: random(33, 50, dtype=E4M3) for name in "ab"}
    scales = {"a": torch.rand(33, 1), "b": torch.rand(())}
    for name, values in decoded(stored, BF16, scales).items():
        assert_same(values, (stored[name].float() * scales[name]).bfloat16())


@pytest.mark.parametrize(
    ("name", "computed"), [("fp8", BF16), ("Q8_0", F32), ("Q6_K", BF16), ("IQ4_XS", F32)], ids=str
)
def test_extra_memory_does_not_grow_with_the_matrix(name, computed):
    def largest_temporary(rows: int) -> int:
        scales = {"a": torch.rand(rows, 1)} if name == "fp8" else {}
        packings = {} if name == "fp8" else {"a": QUANT_FORMATS[name]}
        shapes = {"a": ((rows, COLUMNS), E4M3 if name == "fp8" else torch.uint8)}
        both = block_format(shapes, computed, scaled=scales, packings=packings)
        raw, into = flats(both)
        raw.zero_()
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            decode_block(raw, into, both, scales)
        return max(event.cpu_memory_usage for event in profile.events())

    assert largest_temporary(4096) <= largest_temporary(3 * 4096) <= 4 * chunk_size.CHUNK_VALUES


def groups_of(name: str, seed: int = 0) -> torch.Tensor:
    """Return groups [n, bytes] for a matrix with 512 values per row."""
    count = ROWS * COLUMNS // QUANT_FORMATS[name].values
    generator = np.random.default_rng(seed)
    return torch.from_numpy(random_groups(GGMLQuantizationType[name], count, generator, scale=0.01))


def reference(name: str, seed: int = 0) -> torch.Tensor:
    """Dequantise to fp32 [rows, 512] with the gguf package."""
    values = gguf.quants.dequantize(groups_of(name, seed).numpy(), GGMLQuantizationType[name])
    return torch.from_numpy(values).reshape(-1, COLUMNS)


@pytest.mark.parametrize("computed", WIDE, ids=str)
def test_all_gguf_formats_in_one_block(computed):
    stored = {name: groups_of(name) for name in QUANT_FORMATS}
    stored |= {"plain": torch.randn(7, 5).half(), "scaled": torch.randn(4, 6).to(E4M3)}
    result = decoded(stored, computed, {"scaled": torch.tensor(0.25)}, QUANT_FORMATS)
    for name in QUANT_FORMATS:
        assert torch.equal(result[name], reference(name).to(computed)), name
    assert torch.equal(result["plain"], stored["plain"].to(computed))
    assert torch.equal(result["scaled"], (stored["scaled"].float() * 0.25).to(computed))
    into = torch.empty(3, 11, 2, 256, dtype=computed)
    decode_tensor(stored["Q6_K"], into, packing=QUANT_FORMATS["Q6_K"])
    assert torch.equal(into.view(ROWS, COLUMNS), reference("Q6_K").to(computed)), "any shape"


@pytest.mark.parametrize("computed", [F32, BF16], ids=str)
@pytest.mark.parametrize("chunk", [1, 255, 256, 300, 5000, ROWS * COLUMNS - 1, ROWS * COLUMNS])
@pytest.mark.parametrize("name", ["Q5_K", "IQ4_NL"])
def test_the_size_of_a_chunk_of_groups_changes_no_bit(monkeypatch, name, chunk, computed):
    monkeypatch.setattr(chunk_size, "CHUNK_VALUES", chunk)
    result = decoded({"a": groups_of(name)}, computed, {}, {"a": QUANT_FORMATS[name]})["a"]
    assert torch.equal(result, reference(name).to(computed))


def decoded_matrix(encoded: Encoded, packing: Packing, dtype: torch.dtype) -> torch.Tensor:
    stored, scale = encoded.in_memory
    into = torch.empty(encoded.values.shape, dtype=dtype)
    decode_tensor(stored, into, packing=packing, scale=scale)
    return into


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("name", PACKINGS)
def test_values_are_those_of_the_definition(name, dtype, monkeypatch):
    weight = torch.randn(160, 512, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    weight[5, ::64] *= 30
    encoded = ENCODERS[name](weight)
    packing = PACKINGS[name]
    whole = decoded_matrix(encoded, packing, dtype)
    assert torch.equal(whole, encoded.values.to(dtype))
    error = (encoded.values - weight).norm() / weight.norm()
    assert 0 < error < (0.2 if name in ("int8", "nvfp4", "nvfp4 LightX2V") else 0.05)
    monkeypatch.setattr(chunk_size, "CHUNK_VALUES", 5 * 512)
    assert torch.equal(decoded_matrix(encoded, packing, dtype), whole), "in pieces of rows"
