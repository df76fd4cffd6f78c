"""Memory of decodes and encodes: tracker, estimates, and tiles that fit a budget."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from diffusers import AutoencoderKLWan
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wanstream.wan.latents.space import WAN22
from wanstream.wan.vae.memory import (
    DecodeNeeds,
    TensorMemoryTracker,
    VaeMemoryError,
    choose_tiling,
    decode_pixel_bytes,
    encode_pixel_bytes,
    shared_tiling,
    smaller_tiling,
)
from wanstream.wan.vae.tiles import Tiling, decoded_frames
from wanstream.wan.vae.weights import family_of

KB = 1024
MB = 1_000_000


@pytest.mark.parametrize("device", ["cpu", "meta"])
class TestTracker:
    def test_freed_tensors_are_not_counted(self, device):
        with TensorMemoryTracker() as tracker:
            first = torch.zeros(KB, device=device)
            second = first + 1
            del first
            third = second * 2
            assert tracker.now == 2 * 4 * KB
        assert tracker.peak == 2 * 4 * KB
        del second, third
        assert tracker.now == 0

    def test_views_earlier_tensors_and_changes_in_place_are_free(self, device):
        given = torch.zeros(4 * KB, device=device)
        with TensorMemoryTracker() as tracker:
            view = given.view(2, -1)[0]
            given.add_(1).mul_(2)
            assert (tracker.now, tracker.peak) == (0, 0)
            made = view.clone()
            part = made[:10]
            del made
            assert tracker.now == 2 * 4 * KB, "a view keeps its storage alive"
            del part
            assert tracker.now == 0

    def test_convolution_may_copy_what_it_reads_and_writes(self, device):
        given = torch.zeros(1, 2, 8, 8, 8, device=device)
        layer = torch.nn.Conv3d(2, 4, 1, device=device).requires_grad_(False)
        with torch.no_grad(), TensorMemoryTracker() as tracker:
            made = layer(given)
        assert tracker.peak == made.nbytes
        assert tracker.convolution_peak == 2 * made.nbytes + given.nbytes


def _on_meta(base_dim: int, **more: object) -> AutoencoderKLWan:
    with torch.device("meta"):
        vae = AutoencoderKLWan.from_config({**more, "base_dim": base_dim})
    return vae.eval().requires_grad_(False)


def _wan22_on_meta(base_dim: int, decoder_base_dim: int) -> AutoencoderKLWan:
    return _on_meta(base_dim, **{**family_of(WAN22).config, "decoder_base_dim": decoder_base_dim})


def _decode_peak(vae: AutoencoderKLWan, latents: torch.Tensor) -> int:
    with torch.no_grad(), TensorMemoryTracker() as tracker:
        for frames in decoded_frames(vae, latents):
            del frames
    return tracker.convolution_peak


def _encode_peak(vae: AutoencoderKLWan, video: torch.Tensor) -> int:
    with torch.no_grad(), TensorMemoryTracker() as tracker:
        vae.encode(video)
    return tracker.convolution_peak


THIN = _on_meta(8)
THIN_WAN22 = _wan22_on_meta(8, 8)


# Sizes are small because the middle block's attention needs quadratic memory on `meta`, which
# has no fused kernel.
@pytest.mark.slow  # decodes several sizes
@pytest.mark.parametrize(("vae", "side"), [(THIN, 8), (THIN_WAN22, 16)], ids=["Wan2.1", "Wan2.2"])
@given(st.integers(8, 14), st.integers(8, 14), st.integers(1, 6))
@example(height=8, width=8, count=6)  # finished latents raise the peak
@settings(max_examples=4, deadline=None)
def test_decode_and_encode_take_little_less_than_the_estimate(vae, side, height, width, count):
    peak = _decode_peak(vae, torch.empty(1, vae.config.z_dim, count, height, width, device="meta"))
    estimate = decode_pixel_bytes(vae.config, count) * height * width
    assert 0.9 * estimate <= peak <= estimate
    frames = 4 * (count - 1) + 1
    video = torch.empty(1, 3, frames, side * height, side * width, device="meta")
    # Wan2.2's VAE first copies the whole video into patches. `encode_needs` counts them as a
    # second copy.
    patches = video.numel() * 4 if vae is THIN_WAN22 else 0
    estimate = encode_pixel_bytes(vae.config, count) * height * width
    assert 0.85 * estimate - patches <= _encode_peak(vae, video) <= estimate + patches


def test_small_encode_takes_little_less_than_the_estimate():
    peak = _encode_peak(THIN, torch.empty(1, 3, 9, 80, 72, device="meta"))
    estimate = encode_pixel_bytes(THIN.config, 3) * 10 * 9
    assert 0.85 * estimate <= peak <= estimate


def test_real_widths_take_the_memory_in_the_help_pages():
    """Wan2.1: 21 GB for full 1280x720 frames, 1.5 GB for a 256-pixel tile.

    Wan2.2 5B: 22 GB for full 1280x704 frames, 1.6 GB for a 256-pixel tile.
    """
    pixel = decode_pixel_bytes(_on_meta(96).config, 21)
    assert 20.5e9 < pixel * 90 * 160 < 21.5e9
    assert 1.45e9 < pixel * 32 * 32 < 1.55e9
    pixel = decode_pixel_bytes(_wan22_on_meta(160, 256).config, 31)
    assert 21.0e9 < pixel * 44 * 80 < 22.0e9
    assert 1.55e9 < pixel * 16 * 16 < 1.6e9


def test_estimates_of_few_frames_and_in_inference_mode():
    one, two, three, many = (decode_pixel_bytes(THIN.config, count) for count in (1, 2, 3, 21))
    assert one < two < three == many
    with torch.inference_mode():
        inside = decode_pixel_bytes(_on_meta(12).config, 3)
    assert inside == pytest.approx(1.5 * three, rel=0.02)


def test_device_that_computes_takes_the_estimate(tiny_pipeline):
    vae = AutoencoderKLWan.from_pretrained(tiny_pipeline() / "vae").eval()
    peak = _decode_peak(vae, torch.zeros(1, 16, 3, 8, 8))
    assert peak == pytest.approx(decode_pixel_bytes(vae.config, 3) * 64, rel=0.01)


def _needs(height, width, frames=81, *, to_file=False, per_latent=8):
    return DecodeNeeds(
        height=height,
        width=width,
        frames=frames,
        pixel_bytes=1_463_000,
        value_bytes=1 if to_file else 4,
        keeps_frames=not to_file,
        per_latent=per_latent,
    )


sizes = st.integers(1, 160)
budgets = st.integers(0, 30_000 * MB)
needs_of_any_size = st.builds(
    _needs,
    sizes,
    sizes,
    st.sampled_from([1, 5, 81]),
    to_file=st.booleans(),
    per_latent=st.sampled_from([8, 16]),
)


@given(needs_of_any_size, budgets, st.booleans())
def test_choice_fits_and_computes_least_of_the_large_ones(needs, budget, shared):
    height = needs.height
    width = needs.width
    side = needs.per_latent
    every = [Tiling.of(side * size, side) for size in range(8, max(height, width), 4)]
    fitting = [tiling for tiling in every if needs.fit(tiling, budget, shared=shared)]
    fits_whole = needs.fit(None, budget, shared=shared)
    if not fitting and not fits_whole:
        with pytest.raises(VaeMemoryError, match=f"{budget / 1e9:.2f} GB given"):
            choose_tiling(needs, budget, shared=shared)
        return
    chosen = choose_tiling(needs, budget, shared=shared)
    if fits_whole:
        assert chosen is None, "whole frames are the VAE's own picture"
        return
    assert chosen.blended * 4 == chosen.pixels
    largest = max(each.pixels for each in fitting)
    large = [tiling for tiling in fitting if tiling.pixels >= 0.75 * largest]
    assert chosen in large
    assert chosen.computed(height, width) == min(each.computed(height, width) for each in large)


@given(sizes, sizes, st.integers(1, 8), st.integers(1, 3), budgets, st.booleans())
def test_each_worker_gets_a_tile_that_fits(height, width, workers, videos, budget, shared):
    needs = _needs(height, width)
    wanted = {"workers": workers, "videos": videos}
    smallest_and_whole = (Tiling.of(64), Tiling.of(8 * max(8, height, width)))
    if not any(needs.fit(each, budget, shared=shared) for each in smallest_and_whole):
        with pytest.raises(VaeMemoryError, match=f"{budget / 1e9:.2f} GB given"):
            shared_tiling(needs, budget, shared=shared, **wanted)
        return
    chosen = shared_tiling(needs, budget, shared=shared, **wanted)
    assert needs.fit(chosen, budget, shared=shared)
    most = videos * len(Tiling.of(64).tiles(height, width))
    assert videos * len(chosen.tiles(height, width)) >= min(workers, most)


def test_picture_is_cut_for_workers_and_not_into_crumbs():
    one, two, eight = (
        shared_tiling(_needs(90, 160), 60_000 * MB, shared=False, workers=workers, videos=videos)
        for workers, videos in ((1, 1), (2, 2), (8, 1))
    )
    assert not one.cuts(90, 160)
    assert not two.cuts(90, 160)
    assert len(eight.tiles(90, 160)) >= 8
    assert eight.pixels >= 256


@given(sizes, sizes)
def test_smaller_tiles_take_about_half_until_there_are_none(height, width):
    needs = _needs(height, width)
    tiling = None
    tries = [needs.device_bytes(None)]
    while (tiling := smaller_tiling(needs, tiling)) is not None:
        tries.append(needs.device_bytes(tiling))
    assert len(tries) <= 12
    for before, after in pairwise(tries):
        assert after < before
        assert after <= 0.5 * before or after == tries[-1], "the smallest tile ends it"
    smallest = needs.pixel_bytes * min(height, 8) * min(width, 8)
    assert tries[-1] == smallest or max(height, width) <= 8


def test_file_takes_no_room_for_whole_frames_that_have_left():
    short, long = (_needs(60, 104, frames, to_file=True) for frames in (5, 801))
    assert short.host_bytes(None) == long.host_bytes(None)
    assert short.host_bytes(Tiling.of(256)) < long.host_bytes(Tiling.of(256))


def test_too_small_budget_is_refused_with_figures():
    said = r"decoding 1280x720 frames in tiles of 64 pixels, .* takes 0\.09 GB of working memory; "
    with pytest.raises(VaeMemoryError, match=said + r"0\.05 GB given: give"):
        choose_tiling(_needs(90, 160), 50 * MB, shared=False)
    said = r"0\.09 GB of working memory and 1\.\d\d GB for its 81 frames; 0\.1"
    with pytest.raises(VaeMemoryError, match=said):
        choose_tiling(_needs(90, 160), 100 * MB, shared=True)
