"""Bytes of packed matrices: codes with scales behind them, and rotations."""

from __future__ import annotations

import pytest
import torch

from wanstream.offload.formats import MXFP8, rotation
from wanstream.offload.formats.decode import decode_tensor, group_scales
from wanstream.testing.quantised import quantise
from wanstream.tests.support.wan.number_formats import ENCODERS, rotated, tiled
from wanstream.tests.support.wan.number_formats import rotation as rotation_matrix


def ramp() -> torch.Tensor:
    """Return the byte vectors' row: (j - 16) / 64 for j < 32, then zeros up to 256."""
    row = torch.zeros(1, 256)
    row[0, :32] = (torch.arange(32) - 16) / 64
    return row


@pytest.mark.parametrize(
    ("name", "first", "scale"),
    [
        ("int8 rows", "81899199a1a9", 0.00196850393),
        ("int8 ConvRot", "8191a1b1c0d0", 0.00049212598),
        ("mxfp8", "f8f7f6f5f4f3", 117),
        ("nvfp4", "fffeeeedddcc", 448.0),
    ],
)
def test_writers_have_the_published_bytes(name, first, scale):
    """The vectors were computed with comfy-kitchen 0.2.40."""
    tensors = ENCODERS[name](ramp()).tensors
    assert bytes(tensors["weight"].view(torch.uint8)[0, :6].tolist()).hex() == first
    assert tensors["weight_scale"].view(-1)[0].float().item() == pytest.approx(scale, rel=1e-8)
    if name == "nvfp4":
        assert tensors["weight_scale_2"].item() == pytest.approx(9.3005954e-05, rel=1e-7)


def test_fp8_has_the_published_bytes_and_values():
    codes, scale = quantise(ramp())
    assert bytes(codes.view(torch.uint8)[0, :6].tolist()).hex() == "fefdfcfbfafa"
    assert scale.item() == pytest.approx(0.00055803574, rel=1e-8)
    values = torch.empty(1, 6)
    decode_tensor(codes[:, :6].contiguous(), values, scale=scale)
    assert (values[0] * 1792).tolist() == pytest.approx([-448, -416, -384, -352, -320, -320])


@pytest.mark.parametrize("group", [4, 16, 64, 256, 1024])
def test_the_rotation_is_symmetric_and_its_own_inverse(group):
    matrix = rotation_matrix(group)
    factor = rotation.rotation_factor(group)
    assert torch.equal(rotation.signs(group).double() * factor, matrix)
    assert torch.equal(matrix, matrix.T)
    assert torch.equal(matrix @ matrix, torch.eye(group, dtype=torch.float64))
    assert torch.equal(matrix.sum(1), torch.ones(group, dtype=torch.float64))
    largest = torch.full((3, group), -128.0)
    largest[1, ::2] = 127
    summed = rotation.rotated_sums(largest, rotation.kronecker_factors(group, torch.device("cpu")))
    assert torch.equal(summed.double() * factor, rotated(largest, group))


@pytest.mark.parametrize("shape", [(128, 128), (130, 160), (1, 32), (300, 32)])
def test_scales_leave_their_tiles(shape):
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(1, 255, (shape[0], shape[1] // 32), generator=generator).byte()
    tiles = tiled(codes)
    assert tiles.shape == MXFP8.scale_shape(shape)
    assert torch.equal(group_scales(tiles.view(-1), MXFP8, shape), torch.exp2(codes.float() - 127))
