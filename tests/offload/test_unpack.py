"""Packs of every kind, against the gguf package's own arithmetic: bit for bit in fp32."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from wanstream.offload.formats.gguf_dequant import QUANT_FORMATS, dequantise
from wanstream.testing.gguf import random_packs

REFERENCE_HAS_QUANTISERS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def unpacked(packs, packing):
    into = torch.full((len(packs), packing.values), torch.nan)
    dequantise(torch.from_numpy(packs), packing, into)
    return into


def reference(packs, packing):
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(packs, GGMLQuantizationType[packing.name]))


def assert_same_bits(values, expected):
    """NaN is NaN, whatever its payload."""
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
    packs = random_packs(GGMLQuantizationType[packing.name], 500, random, scale=min(scale, 4000.0))
    values = unpacked(packs, packing)
    assert values.isfinite().all()
    assert len(values.unique()) > 10
    assert_same_bits(values, reference(packs, packing))


def test_random_bytes(packing):
    """Scales of any size and sign, infinite and no number as well."""
    packs = np.random.default_rng(2).integers(0, 256, (3000, packing.nbytes), dtype=np.uint8)
    assert_same_bits(unpacked(packs, packing), reference(packs, packing))


def test_every_integer_takes_every_place(packing):
    """One byte of the pack at a time runs through its 256 values while the others stay as they are."""
    random = np.random.default_rng(3)
    base = random_packs(GGMLQuantizationType[packing.name], 1, random, scale=0.5)
    packs = np.repeat(base, packing.nbytes * 256, axis=0).reshape(packing.nbytes, 256, packing.nbytes)
    for place in range(packing.nbytes):
        packs[place, :, place] = np.arange(256)
    packs = packs.reshape(-1, packing.nbytes)
    assert_same_bits(unpacked(packs, packing), reference(packs, packing))


@pytest.mark.parametrize("name", REFERENCE_HAS_QUANTISERS)
def test_what_the_package_quantised(name):
    weights = np.random.default_rng(4).standard_normal((64, 256), dtype=np.float32)
    packing = QUANT_FORMATS[name]
    packs = gguf.quants.quantize(weights, GGMLQuantizationType[name]).reshape(-1, packing.nbytes)
    values = unpacked(packs, packing)
    assert_same_bits(values, reference(packs, packing))
    assert (values.view(64, 256) - torch.from_numpy(weights)).abs().max() < 0.5


def test_packs_may_lie_anywhere_at_an_even_address(packing):
    packs = random_packs(GGMLQuantizationType[packing.name], 40, np.random.default_rng(5))
    memory = torch.zeros(packs.size + 64, dtype=torch.uint8)
    for offset in (0, 2, 34):
        moved = memory[offset : offset + packs.size].view(packs.shape)
        moved.copy_(torch.from_numpy(packs))
        into = torch.empty(40, packing.values)
        dequantise(moved, packing, into)
        assert_same_bits(into, reference(packs, packing))
