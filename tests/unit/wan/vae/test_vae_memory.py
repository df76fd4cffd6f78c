"""Estimated memory for a decode and an encode against the tensors allocated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan
from hypothesis import given, settings
from hypothesis import strategies as st

from wanstream.wan.latents.space import WAN22
from wanstream.wan.vae.memory import TensorMemoryTracker, decode_pixel_bytes, encode_pixel_bytes
from wanstream.wan.vae.tiles import decoded_frames
from wanstream.wan.vae.weights import family_of

REAL_WIDTH = 96


def _on_meta(base_dim: int) -> AutoencoderKLWan:
    with torch.device("meta"):
        return AutoencoderKLWan(base_dim=base_dim).eval().requires_grad_(False)


def _wan22_on_meta(base_dim: int, decoder_base_dim: int) -> AutoencoderKLWan:
    widths = {"base_dim": base_dim, "decoder_base_dim": decoder_base_dim}
    with torch.device("meta"):
        return (
            AutoencoderKLWan.from_config({**family_of(WAN22).config, **widths})
            .eval()
            .requires_grad_(False)
        )


def _peak(vae: AutoencoderKLWan, latents: torch.Tensor) -> int:
    with TensorMemoryTracker() as tracker:
        for frames in decoded_frames(vae, latents):
            del frames
    return tracker.convolution_peak


THIN = _on_meta(8)
THIN_WAN22 = _wan22_on_meta(8, 8)


@pytest.mark.slow  # decodes several sizes
# Sizes are small because the middle block's attention needs quadratic memory on `meta`, which
# has no fused kernel.
@given(st.integers(8, 20), st.integers(8, 20), st.integers(1, 6))
@settings(max_examples=4, deadline=None)
def test_a_decode_takes_at_most_the_estimate_and_little_less(
    height: int, width: int, count: int
) -> None:
    peak = _peak(THIN, torch.empty(1, 16, count, height, width, device="meta"))
    estimate = decode_pixel_bytes(THIN.config, count) * height * width
    assert 0.9 * estimate <= peak <= estimate


def test_the_real_width_takes_23_kilobytes_for_a_pixel() -> None:
    """Tooltips and help pages state 21 GB for full 1280x720 frames, 1.5 GB for a 256-pixel tile."""
    pixel = decode_pixel_bytes(_on_meta(REAL_WIDTH).config, 21)
    assert 20.5e9 < pixel * 90 * 160 < 21.5e9
    assert 1.45e9 < pixel * 32 * 32 < 1.55e9


def test_inference_mode_does_not_change_the_estimate() -> None:
    with torch.inference_mode():
        inside = decode_pixel_bytes(_on_meta(12).config, 3)
    assert inside == pytest.approx(1.5 * decode_pixel_bytes(THIN.config, 3), rel=0.02)


def test_the_first_frames_take_less() -> None:
    one, two, three, many = (decode_pixel_bytes(THIN.config, count) for count in (1, 2, 3, 21))
    assert one < two < three == many


def test_the_same_is_counted_on_a_device_that_computes(tiny_pipeline: Callable[[], Path]) -> None:
    vae = AutoencoderKLWan.from_pretrained(tiny_pipeline() / "vae").eval()
    latents = torch.zeros(1, 16, 3, 8, 8)
    with torch.no_grad():
        peak = _peak(vae, latents)
    assert peak == pytest.approx(decode_pixel_bytes(vae.config, 3) * 64, rel=0.01)


@given(st.integers(8, 20), st.integers(8, 20), st.integers(1, 4))
@settings(max_examples=4, deadline=None)
def test_an_encode_takes_at_most_the_estimate(height: int, width: int, count: int) -> None:
    video = torch.empty(1, 3, 4 * (count - 1) + 1, 8 * height, 8 * width, device="meta")
    with torch.no_grad(), TensorMemoryTracker() as tracker:
        THIN.encode(video)
    estimate = encode_pixel_bytes(THIN.config, count) * height * width
    assert 0.85 * estimate <= tracker.convolution_peak <= estimate


@given(st.integers(8, 14), st.integers(8, 14), st.integers(1, 4))
@settings(max_examples=3, deadline=None)
@pytest.mark.slow
def test_the_vae_of_wan22_takes_at_most_the_estimate(height: int, width: int, count: int) -> None:
    peak = _peak(THIN_WAN22, torch.empty(1, 48, count, height, width, device="meta"))
    estimate = decode_pixel_bytes(THIN_WAN22.config, count) * height * width
    assert 0.9 * estimate <= peak <= estimate
    video = torch.empty(1, 3, 4 * (count - 1) + 1, 16 * height, 16 * width, device="meta")
    with torch.no_grad(), TensorMemoryTracker() as tracker:
        THIN_WAN22.encode(video)
    # This VAE first copies the whole video into patches. `encode_needs` counts them as a second
    # copy.
    patches = video.numel() * 4
    estimate = encode_pixel_bytes(THIN_WAN22.config, count) * height * width
    assert 0.85 * estimate - patches <= tracker.convolution_peak <= estimate + patches


def test_the_real_widths_of_wan22_take_6_megabytes_for_a_pixel_of_16() -> None:
    """Help pages state 22 GB for full 1280x704 frames, 1.6 GB for a 256-pixel tile."""
    pixel = decode_pixel_bytes(_wan22_on_meta(160, 256).config, 31)
    assert 21.0e9 < pixel * 44 * 80 < 22.0e9
    assert 1.55e9 < pixel * 16 * 16 < 1.6e9
