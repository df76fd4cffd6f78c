"""Sizes against diffusers' parameter lists, FLOPs against sums over layers."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from wanstream.shapes import T2V_A14B, TI2V_5B, ExpertShape, VideoShape


class Sizes(NamedTuple):
    parameters: int
    block: int
    outer: int
    resident: int


@pytest.mark.parametrize(
    ("expert", "sizes"),
    [
        pytest.param(
            T2V_A14B,
            Sizes(14_288_491_584, 702_788_608, 465_438_848, 14_346_368),
            id="T2V-A14B",
        ),
        pytest.param(
            ExpertShape(in_channels=36),
            Sizes(14_288_901_184, 702_788_608, 466_258_048, 15_165_568),
            id="I2V-A14B",
        ),
        pytest.param(
            ExpertShape(in_channels=36, image_width=1280),
            Sizes(16_394_878_784, 807_676_928, 482_680_448, 32_842_368),
            id="Wan2.1-I2V-14B",
        ),
        pytest.param(
            TI2V_5B,
            Sizes(4_999_787_712, 327_313_408, 180_173_184, 8_595_840),
            id="TI2V-5B",
        ),
    ],
)
def test_sizes_are_those_of_the_real_models(expert: ExpertShape, sizes: Sizes) -> None:
    in_block = expert.streamed_parameters + expert.small_parameters
    parameters = expert.blocks * in_block + expert.non_block_parameters
    assert sizes == Sizes(
        parameters, 2 * in_block, 2 * expert.non_block_parameters, expert.resident_bytes()
    )


def test_ten_matrices_are_nearly_the_whole_block() -> None:
    assert T2V_A14B.streamed_bytes() == 702_545_920
    assert 2 * T2V_A14B.small_parameters == 242_688
    assert (
        T2V_A14B.streamed_bytes(bytes_per_weight=1) + 242_688 == 351_515_648
    )  # fp8 weights, bf16 rest


@pytest.mark.parametrize(
    ("video", "latent", "tokens", "tflop"),
    [
        (VideoShape(width=832, height=480, frames=17), (5, 60, 104), 7_800, 6.04),
        (VideoShape(width=832, height=480, frames=81), (21, 60, 104), 32_760, 42.0),
        (VideoShape(width=1280, height=720, frames=81), (21, 90, 160), 75_600, 163.1),
        (VideoShape(width=16, height=16, frames=1), (1, 2, 2), 1, None),
        (VideoShape(width=1280, height=704, frames=121, per_latent=16), (31, 44, 80), 27_280, None),
    ],
)
def test_work_of_a_video(
    video: VideoShape, latent: tuple[int, int, int], tokens: int, tflop: float | None
) -> None:
    assert video.latent == latent
    assert video.tokens == tokens
    if tflop is not None:
        digits = 2 if tflop < 10 else 1
        assert round(T2V_A14B.block_flops(tokens) / 1e12, digits) == tflop


@pytest.mark.parametrize(
    ("tokens", "linear", "attention"),
    [(7_800, 4.7, 1.3), (32_760, 19.6, 22.3), (75_600, 45.2, 117.8)],
)
def test_linear_layers_and_attention(tokens: int, linear: float, attention: float) -> None:
    assert T2V_A14B.linear_flops(tokens) / 1e12 == pytest.approx(linear, rel=0.01)
    assert T2V_A14B.attention_flops(tokens) / 1e12 == pytest.approx(attention, abs=0.06)
    assert T2V_A14B.linear_flops(tokens) + T2V_A14B.attention_flops(tokens) == T2V_A14B.block_flops(
        tokens
    )


@pytest.mark.parametrize(
    ("width", "height", "frames", "message"),
    [
        (840, 480, 81, "width is 840, it must be a multiple of 16: use 848"),
        (832, 479, 81, "height is 479, it must be a multiple of 16: use 480"),
        (0, 480, 81, "width is 0, it must be a multiple of 16: use 16"),
        (832, -16, 81, "height is -16, it must be a multiple of 16: use 16"),
        (832, 480, 80, "frames is 80, it must be a multiple of 4 plus 1: use 81"),
        (832, 480, 0, "frames is 0, it must be a multiple of 4 plus 1: use 1"),
        (832, 480, -3, "frames is -3, it must be a multiple of 4 plus 1: use 1"),
    ],
)
def test_sizes_that_the_vae_cannot_make_are_refused(
    width: int, height: int, frames: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        VideoShape(width=width, height=height, frames=frames)


def test_the_5b_model_makes_multiples_of_32() -> None:
    with pytest.raises(ValueError, match="height is 720, it must be a multiple of 32: use 736"):
        VideoShape(width=1280, height=720, frames=121, per_latent=16)


@pytest.mark.parametrize(
    ("value_bytes", "lanes", "per_token"),
    [
        # The rotary embedding.
        (2, 1, 20 * 5120 + 512),
        (2, 3, 24 * 5120 + 512),
        (4, 1, 30 * 5120 + 512),
    ],
)
def test_working_bytes_are_those_of_the_widest_moment_and_of_the_lanes_that_wait(
    value_bytes: int, lanes: int, per_token: int
) -> None:
    tokens = VideoShape(width=1280, height=720, frames=81).tokens
    text = (2 * lanes + 2) * 512 * 5120 * value_bytes
    assert (
        T2V_A14B.working_bytes([tokens] * lanes, value_bytes=value_bytes)
        == tokens * per_token + text
    )


@pytest.mark.parametrize(
    ("chunk", "lanes", "gigabytes"),
    [
        (4096, 1, 3.97),
        (4096, 2, 4.76),
        (8192, 2, 4.76),
        (65536, 2, 9.31),
        (10**6, 2, 8.59),
        (None, 2, 8.59),
    ],
)
def test_chunks_bound_the_working_memory_at_720p(
    chunk: int | None, lanes: int, gigabytes: float
) -> None:
    tokens = VideoShape(width=1280, height=720, frames=81).tokens
    needed = T2V_A14B.working_bytes([tokens] * lanes, chunk_tokens=chunk)
    assert needed == pytest.approx(gigabytes * 1e9, rel=1e-2)


def test_with_chunks_attention_takes_the_most_memory() -> None:
    """Attention takes 5 x 774 MB at 1280x720x81: input, q, k, v and output.

    Two blocks and another lane still fit in 8 GB.
    """
    tokens = VideoShape(width=1280, height=720, frames=81).tokens
    attention = 5 * tokens * 5120 * 2
    beside = tokens * 512 + tokens * 5120 * 2 + 6 * 512 * 5120 * 2
    needed = T2V_A14B.working_bytes([tokens] * 2, chunk_tokens=4096)
    assert needed == attention + beside
    assert needed + 2 * T2V_A14B.streamed_bytes() < 8e9
