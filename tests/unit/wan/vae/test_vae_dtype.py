"""VAE in bf16: diffusers' frames in half the memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan

from wanstream.wan.vae.memory import TensorMemoryTracker, decode_pixel_bytes, encode_pixel_bytes
from wanstream.wan.vae.tiles import Tiling, decoded_frames
from wanstream.wan.vae.vae import open_vae

BF16 = torch.bfloat16


def _latents() -> torch.Tensor:
    return 3 * torch.randn(1, 16, 2, 9, 5, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def own_vae(tiny_pipeline: Callable[[], Path]) -> AutoencoderKLWan:
    return AutoencoderKLWan.from_pretrained(tiny_pipeline() / "vae", torch_dtype=BF16).eval()


def test_whole_frames_and_latents_are_those_of_diffusers(
    tiny_pipeline: Callable[[], Path], own_vae: AutoencoderKLWan
) -> None:
    video = torch.rand(5, 16, 8, 3, generator=torch.Generator().manual_seed(0))
    with open_vae(tiny_pipeline(), BF16) as vae, torch.no_grad():
        frames, latents = vae.decode(_latents(), device="cpu"), vae.encode(video, device="cpu")
        expected = own_vae.decode(_latents().to(BF16)).sample[0].movedim(0, -1).float()
        encoded = own_vae.encode(video.to(BF16).movedim(-1, 0)[None] * 2 - 1).latent_dist.mode()
    assert torch.equal(frames[0], (expected + 1) / 2)
    assert torch.equal(latents, encoded.float())
    assert frames.dtype == latents.dtype == torch.float32


@pytest.mark.parametrize("tile", [0, 64])
def test_frames_are_close_to_those_of_fp32(tiny_pipeline: Callable[[], Path], tile: int) -> None:
    tiling = Tiling.of(tile) if tile else None
    with open_vae(tiny_pipeline()) as exact, open_vae(tiny_pipeline(), BF16) as vae:
        expected, frames = (
            each.decode(_latents(), device="cpu", tiling=tiling) for each in (exact, vae)
        )
        shown = torch.cat(list(vae.stream(_latents(), device="cpu", tiling=tiling)))
    assert 0 < (frames - expected).norm() / expected.norm() < 0.02
    assert torch.equal(shown, frames[0].mul(255).round().to(torch.uint8))


@pytest.mark.slow  # decodes whole videos
def test_it_takes_half_the_memory(
    tiny_pipeline: Callable[[], Path], own_vae: AutoencoderKLWan
) -> None:
    with open_vae(tiny_pipeline()) as exact, open_vae(tiny_pipeline(), BF16) as vae:
        whole, half = exact.decode_needs(_latents()), vae.decode_needs(_latents())
        assert vae.weight_bytes * 2 == exact.weight_bytes
        vae.decode(_latents()[:, :, :1, :2, :2], device="cpu")
        assert vae._loaded is not None
        assert {weight.dtype for weight in vae._loaded.parameters()} == {BF16}
    assert half.pixel_bytes * 2 == pytest.approx(whole.pixel_bytes, rel=0.01)
    assert half.host_bytes(None) == whole.host_bytes(None), "frames are fp32"
    assert encode_pixel_bytes(own_vae.config, 2, BF16) * 2 == pytest.approx(
        encode_pixel_bytes(own_vae.config, 2), rel=0.01
    )


@pytest.mark.slow  # decodes whole videos
def test_it_takes_the_estimated_memory(own_vae: AutoencoderKLWan) -> None:
    with torch.no_grad(), TensorMemoryTracker() as tracker:
        for frames in decoded_frames(own_vae, torch.zeros(1, 16, 3, 6, 6, dtype=BF16)):
            del frames
    assert tracker.convolution_peak == pytest.approx(
        decode_pixel_bytes(own_vae.config, 3, BF16) * 36, rel=0.01
    )
