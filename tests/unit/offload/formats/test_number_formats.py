"""Decoded int8, rotated and microscaled matrices: bytes, definitions and row pieces."""

from __future__ import annotations

import pytest
import torch

from wanstream.offload.formats import chunk_size, rotation
from wanstream.offload.formats.decode import decode_tensor, group_scales
from wanstream.offload.formats.packing import MXFP8, NVFP4, EightBit, Microscaled, Packing
from wanstream.testing.quantised import quantise
from wanstream.tests.support.number_formats import ENCODERS, Encoded, int8_convrot, rotated, tiled
from wanstream.tests.support.number_formats import rotation as rotation_matrix

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


def ramp() -> torch.Tensor:
    """Return the byte vectors' row: (j - 16) / 64 for j < 32, then zeros up to 256."""
    row = torch.zeros(1, 256)
    row[0, :32] = (torch.arange(32) - 16) / 64
    return row


def decoded(encoded: Encoded, packing: Packing, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    stored, scale = encoded.in_memory
    into = torch.empty(encoded.values.shape, dtype=dtype)
    decode_tensor(stored, into, packing=packing, scale=scale)
    return into


@pytest.mark.parametrize(
    ("name", "first", "scale"),
    [
        ("int8 rows", "81899199a1a9", 0.00196850393),
        ("int8 ConvRot", "8191a1b1c0d0", 0.00049212598),
        ("mxfp8", "f8f7f6f5f4f3", 117),
        ("nvfp4", "fffeeeedddcc", 448.0),
    ],
)
def test_writers_have_the_published_bytes(name: str, first: str, scale: float) -> None:
    """The vectors were computed with comfy-kitchen 0.2.40."""
    tensors = ENCODERS[name](ramp()).tensors
    assert bytes(tensors["weight"].view(torch.uint8)[0, :6].tolist()).hex() == first
    assert tensors["weight_scale"].view(-1)[0].float().item() == pytest.approx(scale, rel=1e-8)
    if name == "nvfp4":
        assert tensors["weight_scale_2"].item() == pytest.approx(9.3005954e-05, rel=1e-7)


def test_fp8_has_the_published_bytes() -> None:
    codes, scale = quantise(ramp())
    assert bytes(codes.view(torch.uint8)[0, :6].tolist()).hex() == "fefdfcfbfafa"
    assert scale.item() == pytest.approx(0.00055803574, rel=1e-8)
    values = torch.empty(1, 6)
    decode_tensor(codes[:, :6].contiguous(), values, scale=scale)
    assert values[0].tolist() == pytest.approx(
        [-448 / 1792, -416 / 1792, -384 / 1792, -352 / 1792, *[-320 / 1792] * 2]
    )


@pytest.mark.parametrize(
    ("packing", "codes", "scale", "overall", "values"),
    [
        (EightBit(), "81899199a1a90000", 0.00196850393, None, [-127, -119, -111, -103, -95, -87]),
        (MXFP8, "f8f7f6f5f4f3", 117, None, [-256, -240, -224, -208, -192, -176]),
        (
            NVFP4,
            "fffeeeedddcc",
            0x7E,
            9.3005954e-05,
            [-6, -6, -6, -4, -4, -4, -4, -3, -3, -3, -2, -2],
        ),
    ],
    ids=["int8 rows", "mxfp8", "nvfp4"],
)
def test_the_published_bytes_are_read(
    packing: Packing, codes: str, scale: float, overall: float | None, values: list[float]
) -> None:
    """The codes by hand.

    int8 by the row's scale, e4m3fn by 2**(117 - 127), e2m1 by 448 (0x7e) and `overall`.
    """
    stored = bytes.fromhex(codes)
    if isinstance(packing, EightBit):
        shape, behind = (1, len(stored)), torch.tensor([scale]).view(torch.uint8)
        factor = scale
    else:
        shape = (1, packing.values)
        stored += bytes(packing.code_bytes(shape) - len(stored))
        behind = tiled(torch.tensor([[scale]]).byte()).view(-1)
        factor = 2.0**-10 if overall is None else 448 * overall
    read = torch.empty(shape)
    whole = torch.cat((torch.frombuffer(bytearray(stored), dtype=torch.uint8), behind))
    decode_tensor(
        whole, read, packing=packing, scale=None if overall is None else torch.tensor(overall)
    )
    assert read[0, : len(values)].tolist() == pytest.approx(
        [factor * value for value in values], rel=1e-6
    )
    assert not read[0, len(values) :].any()


@pytest.mark.parametrize(
    ("packing", "first", "second"),
    [
        (MXFP8, 72_990_720, 72_990_720),
        (NVFP4, 39_813_120, 39_813_120),
        (EightBit(by_row=False), 70_778_884, 70_778_884),
        (EightBit(), 70_834_176, 70_799_360),
        (EightBit(group=256), 70_834_176, 70_799_360),
    ],
    ids=str,
)
def test_bytes_of_the_feed_forward_of_a14b(packing: Packing, first: int, second: int) -> None:
    """The published sums, without the 4-byte scale for a whole nvfp4 matrix."""
    assert packing.bytes_of((13824, 5120)) == first
    assert packing.bytes_of((5120, 13824)) == second


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PACKINGS)
def test_values_are_those_of_the_definition(name: str, dtype: torch.dtype) -> None:
    weight = torch.randn(160, 512, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    weight[5, ::64] *= 30
    encoded = ENCODERS[name](weight)
    assert torch.equal(decoded(encoded, PACKINGS[name], dtype), encoded.values.to(dtype))
    error = (encoded.values - weight).norm() / weight.norm()
    assert 0 < error < (0.2 if name in ("int8", "nvfp4", "nvfp4 LightX2V") else 0.05)


@pytest.mark.parametrize("name", PACKINGS)
def test_pieces_of_rows_have_the_same_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = ENCODERS[name](torch.randn(37, 256, generator=torch.Generator().manual_seed(2)))
    whole = decoded(encoded, PACKINGS[name], torch.bfloat16)
    monkeypatch.setattr(chunk_size, "CHUNK_VALUES", 5 * 256)
    assert torch.equal(decoded(encoded, PACKINGS[name], torch.bfloat16), whole)


@pytest.mark.parametrize("group", [4, 16, 64, 256, 1024])
def test_the_rotation_is_symmetric_and_its_own_inverse(group: int) -> None:
    matrix = rotation_matrix(group)
    assert torch.equal(rotation.signs(group).double() * rotation.rotation_factor(group), matrix)
    assert torch.equal(matrix, matrix.T)
    assert torch.equal(matrix @ matrix, torch.eye(group, dtype=torch.float64))
    assert torch.equal(matrix.sum(1), torch.ones(group, dtype=torch.float64))
    largest = torch.full((3, group), -128.0)
    largest[1, ::2] = 127
    summed = rotation.rotated_sums(largest, rotation.kronecker_factors(group, torch.device("cpu")))
    assert torch.equal(summed.double() * rotation.rotation_factor(group), rotated(largest, group))


def test_one_outlier_becomes_four_equal_parts() -> None:
    assert rotated(torch.tensor([[8.0, 0, 0, 0]]), 4).tolist() == [[4, 4, 4, -4]]


def test_a_rotated_matrix_turns_back() -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(3))
    encoded = int8_convrot(weight)
    turned = rotated(encoded.values, 256)
    codes, scale = encoded.tensors["weight"], encoded.tensors["weight_scale"]
    assert torch.allclose(turned, codes.double() * scale.double(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(128, 128), (130, 160), (1, 32), (300, 32)])
def test_scales_leave_their_tiles(shape: tuple[int, int]) -> None:
    codes = torch.randint(
        1, 255, (shape[0], shape[1] // 32), generator=torch.Generator().manual_seed(4)
    ).byte()
    tiles = tiled(codes)
    assert tiles.shape == MXFP8.scale_shape(shape)
    scales = group_scales(tiles.view(-1), MXFP8, shape)
    assert torch.equal(scales, torch.exp2(codes.float() - 127))


def test_all_bytes_of_both_nibble_orders() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    scales = tiled(torch.full((1, 32), 1.0).to(torch.float8_e4m3fn).view(torch.uint8))
    stored = torch.cat((codes, scales.view(-1)))
    high, low = torch.empty(1, 512), torch.empty(1, 512)
    decode_tensor(stored, high, packing=NVFP4, scale=torch.tensor(1.0))
    decode_tensor(stored, low, packing=LOW_FIRST, scale=torch.tensor(1.0))
    assert high[0, 2 * 0x1F : 2 * 0x1F + 2].tolist() == [0.5, -6.0]
    assert torch.equal(high.view(-1, 2).flip(1), low.view(-1, 2))
