"""Sizes against diffusers' parameter lists, FLOPs against sums over layers."""

import pytest

from wanstream.shapes import T2V_A14B, TI2V_5B, ExpertShape, VideoShape

WAN21_I2V = ExpertShape(in_channels=36, image_width=1280)


@pytest.mark.parametrize(
    ("expert", "sizes"),
    [
        (T2V_A14B, (14_288_491_584, 702_788_608, 465_438_848, 14_346_368)),
        (ExpertShape(in_channels=36), (14_288_901_184, 702_788_608, 466_258_048, 15_165_568)),
        (WAN21_I2V, (16_394_878_784, 807_676_928, 482_680_448, 32_842_368)),
        (TI2V_5B, (4_999_787_712, 327_313_408, 180_173_184, 8_595_840)),
    ],
    ids=["T2V-A14B", "I2V-A14B", "Wan2.1-I2V-14B", "TI2V-5B"],
)
def test_sizes_are_those_of_the_real_models(expert, sizes):
    """Parameters, and bytes for a block, outside the blocks and always resident."""
    in_block = expert.streamed_parameters + expert.small_parameters
    parameters = expert.blocks * in_block + expert.non_block_parameters
    outer = 2 * expert.non_block_parameters
    assert (parameters, 2 * in_block, outer, expert.resident_bytes()) == sizes


def test_ten_matrices_are_nearly_the_whole_block():
    assert T2V_A14B.streamed_bytes() == 702_545_920
    assert 2 * T2V_A14B.small_parameters == 242_688
    fp8 = T2V_A14B.streamed_bytes(bytes_per_weight=1)
    assert fp8 + 242_688 == 351_515_648, "fp8 weights, bf16 rest"


@pytest.mark.parametrize(
    ("video", "latent", "tokens", "tflop"),
    [
        ((832, 480, 17), (5, 60, 104), 7_800, (4.7, 1.3)),
        ((832, 480, 81), (21, 60, 104), 32_760, (19.6, 22.3)),
        ((1280, 720, 81), (21, 90, 160), 75_600, (45.2, 117.8)),
        ((16, 16, 1), (1, 2, 2), 1, (0.0, 0.0)),
        ((1280, 704, 121, 16), (31, 44, 80), 27_280, (16.4, 15.5)),
    ],
)
def test_work_of_a_video(video, latent, tokens, tflop):
    names = ("width", "height", "frames", "per_latent")
    shape = VideoShape(**dict(zip(names, video, strict=False)))
    assert (shape.latent, shape.tokens) == (latent, tokens)
    work = (T2V_A14B.linear_flops(tokens), T2V_A14B.attention_flops(tokens))
    assert [flops / 1e12 for flops in work] == pytest.approx(tflop, rel=0.01, abs=0.06)
    assert sum(work) == T2V_A14B.block_flops(tokens)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((840, 480, 81, 8), "width is 840, it must be a multiple of 16: use 848"),
        ((832, 479, 81, 8), "height is 479, it must be a multiple of 16: use 480"),
        ((0, 480, 81, 8), "width is 0, it must be a multiple of 16: use 16"),
        ((832, -16, 81, 8), "height is -16, it must be a multiple of 16: use 16"),
        ((832, 480, 80, 8), "frames is 80, it must be a multiple of 4 plus 1: use 81"),
        ((832, 480, -3, 8), "frames is -3, it must be a multiple of 4 plus 1: use 1"),
        ((1280, 720, 121, 16), "height is 720, it must be a multiple of 32: use 736"),
    ],
)
def test_sizes_that_the_vae_cannot_make_are_refused(size, message):
    width, height, frames, per_latent = size
    with pytest.raises(ValueError, match=message):
        VideoShape(width=width, height=height, frames=frames, per_latent=per_latent)


TOKENS_720P = VideoShape(width=1280, height=720, frames=81).tokens

# 512 bytes are the rotary embedding.
LANES = [(2, 1, 20 * 5120 + 512), (2, 3, 24 * 5120 + 512), (4, 1, 30 * 5120 + 512)]


@pytest.mark.parametrize(("value_bytes", "lanes", "per_token"), LANES)
def test_working_bytes_include_waiting_lanes(value_bytes, lanes, per_token):
    text = (2 * lanes + 2) * 512 * 5120 * value_bytes
    found = T2V_A14B.working_bytes([TOKENS_720P] * lanes, value_bytes=value_bytes)
    assert found == TOKENS_720P * per_token + text


def test_chunks_bound_the_working_memory_at_720p():
    """Attention takes 5 x 774 MB: input, q, k, v and output.

    Two blocks and another lane still fit in 8 GB.
    """
    cases = [(4096, 1, 3.97), (8192, 2, 4.76), (65536, 2, 9.31), (10**6, 2, 8.59), (None, 2, 8.59)]
    for chunk, lanes, gigabytes in cases:
        needed = T2V_A14B.working_bytes([TOKENS_720P] * lanes, chunk_tokens=chunk)
        assert needed == pytest.approx(gigabytes * 1e9, rel=1e-2)
    attention = 5 * TOKENS_720P * 5120 * 2
    beside = TOKENS_720P * 512 + TOKENS_720P * 5120 * 2 + 6 * 512 * 5120 * 2
    needed = T2V_A14B.working_bytes([TOKENS_720P] * 2, chunk_tokens=4096)
    assert needed == attention + beside
    assert needed + 2 * T2V_A14B.streamed_bytes() < 8e9
