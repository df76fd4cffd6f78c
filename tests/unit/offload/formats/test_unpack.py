"""GGUF groups in every format, bit-equal in fp32 to the gguf package's arithmetic."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from wanstream.offload.formats.gguf_dequant import dequantise
from wanstream.offload.formats.packing import QUANT_FORMATS
from wanstream.testing.quantised import random_groups

REFERENCE_HAS_QUANTISERS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def unpacked(groups, packing):
    into = torch.full((len(groups), packing.values), torch.nan)
    dequantise(torch.from_numpy(groups), packing, into)
    return into


def reference(groups, packing):
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(groups, GGMLQuantizationType[packing.name]))


def assert_same_bits(values, expected):
    """Compare bits. NaNs with different payloads are equal."""
    nan = expected.isnan()
    assert torch.equal(values.isnan(), nan)
    assert torch.equal(values[~nan].view(torch.int32), expected[~nan].view(torch.int32))


@pytest.fixture(params=QUANT_FORMATS)
def packing(request):
    return QUANT_FORMATS[request.param]


def test_sizes_are_those_of_ggml(packing):
    kind = GGMLQuantizationType[packing.name]
    assert gguf.GGML_QUANT_SIZES[kind] == (packing.values, packing.nbytes)


@pytest.mark.parametrize("scale", [1.0, 0.0037, -2.5, 6e-8, 60000.0])
def test_random_integers_under_a_sound_scale(packing, scale):
    random = np.random.default_rng(1)
    groups = random_groups(
        GGMLQuantizationType[packing.name], 500, random, scale=min(scale, 4000.0)
    )
    values = unpacked(groups, packing)
    assert values.isfinite().all()
    assert len(values.unique()) > 10
    assert_same_bits(values, reference(groups, packing))


def test_random_bytes(packing):
    """The scales have any size and sign, infinity and NaN included."""
    groups = np.random.default_rng(2).integers(0, 256, (3000, packing.nbytes), dtype=np.uint8)
    assert_same_bits(unpacked(groups, packing), reference(groups, packing))


def test_every_integer_takes_every_place(packing):
    """Vary one byte at a time over all 256 values, with the others constant."""
    random = np.random.default_rng(3)
    base = random_groups(GGMLQuantizationType[packing.name], 1, random, scale=0.5)
    groups = np.repeat(base, packing.nbytes * 256, axis=0).reshape(
        packing.nbytes, 256, packing.nbytes
    )
    for place in range(packing.nbytes):
        groups[place, :, place] = np.arange(256)
    groups = groups.reshape(-1, packing.nbytes)
    assert_same_bits(unpacked(groups, packing), reference(groups, packing))


@pytest.mark.parametrize("name", REFERENCE_HAS_QUANTISERS)
def test_what_the_package_quantised(name):
    weights = np.random.default_rng(4).standard_normal((64, 256), dtype=np.float32)
    packing = QUANT_FORMATS[name]
    groups = gguf.quants.quantize(weights, GGMLQuantizationType[name]).reshape(-1, packing.nbytes)
    values = unpacked(groups, packing)
    assert_same_bits(values, reference(groups, packing))
    assert (values.view(64, 256) - torch.from_numpy(weights)).abs().max() < 0.5


def test_packs_may_lie_anywhere_at_an_even_address(packing):
    groups = random_groups(GGMLQuantizationType[packing.name], 40, np.random.default_rng(5))
    memory = torch.zeros(groups.size + 64, dtype=torch.uint8)
    for offset in (0, 2, 34):
        moved = memory[offset : offset + groups.size].view(groups.shape)
        moved.copy_(torch.from_numpy(groups))
        into = torch.empty(40, packing.values)
        dequantise(moved, packing, into)
        assert_same_bits(into, reference(groups, packing))
