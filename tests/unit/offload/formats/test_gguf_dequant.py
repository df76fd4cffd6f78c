"""GGUF groups in every format, bit-equal in fp32 to the gguf package's arithmetic."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from wanstream.offload.formats.gguf_dequant import dequantise
from wanstream.offload.formats.packing import QUANT_FORMATS, QuantFormat
from wanstream.testing.quantised import random_groups


@pytest.fixture(params=QUANT_FORMATS)
def packing(request) -> QuantFormat:
    return QUANT_FORMATS[request.param]


def assert_equal_bits(groups: np.ndarray, packing: QuantFormat, stored=None) -> None:
    """Compare the values' bits with the package's. NaNs with different payloads are equal."""
    values = torch.full((len(groups), packing.values), torch.nan)
    dequantise(torch.from_numpy(groups) if stored is None else stored, packing, values)
    with np.errstate(all="ignore"):
        kind = GGMLQuantizationType[packing.name]
        expected = torch.from_numpy(gguf.quants.dequantize(groups, kind))
    nan = expected.isnan()
    assert torch.equal(values.isnan(), nan)
    assert torch.equal(values[~nan].view(torch.int32), expected[~nan].view(torch.int32))


def test_sizes_are_those_of_ggml(packing):
    sizes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[packing.name]]
    assert sizes == (packing.values, packing.nbytes)


def test_random_bytes(packing):
    """The scales have any size and sign, infinity and NaN included."""
    groups = np.random.default_rng(2).integers(0, 256, (3000, packing.nbytes), dtype=np.uint8)
    assert_equal_bits(groups, packing)


@pytest.mark.parametrize("offset", [2, 34])
def test_groups_may_lie_at_any_even_address(packing, offset):
    groups = random_groups(GGMLQuantizationType[packing.name], 40, np.random.default_rng(5))
    moved = torch.zeros(groups.size + 64, dtype=torch.uint8)[offset : offset + groups.size]
    moved.view(groups.shape).copy_(torch.from_numpy(groups))
    assert_equal_bits(groups, packing, moved.view(groups.shape))
