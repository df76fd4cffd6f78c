"""VAE on a GPU: decodes stay within the estimate, and a real out-of-memory error shrinks tiles."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from wanstream.testing.weights import make_tiny_vae
from wanstream.tests.support.accelerator import HAS_REAL
from wanstream.tests.support.sampling.runs import normal
from wanstream.wan.latents import WAN21
from wanstream.wan.vae import Tiling, WanVae, choose_tiling, open_vae, retry_with_smaller_tiles

HEIGHT, WIDTH = (384, 512) if HAS_REAL else (192, 256)


@pytest.fixture(params=["Wan2.1", "Wan2.2 5B", "tiny"])
def vae(gpu, request, tiny_pipeline, wan22_vae, tmp_path):
    """Yield a VAE with weights on the GPU and initialised libraries."""
    path = wan22_vae if request.param == "Wan2.2 5B" else tiny_pipeline()
    if request.param == "tiny":
        path = tmp_path / "taew2_1.safetensors"
        save_file(make_tiny_vae(WAN21, seed=0), path)
    with open_vae(path) as opened:
        opened.decode(latents_of(opened)[:, :, :1, :8, :8], device=gpu.device)
        yield opened


def latents_of(vae: WanVae) -> torch.Tensor:
    """Return random latents for `HEIGHT` x `WIDTH` pixels."""
    space = vae.space
    return normal(1, space.channels, 3, HEIGHT // space.pixels, WIDTH // space.pixels, seed=0)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.2 if HAS_REAL else 0.4])
def test_a_decode_stays_within_its_budget(gpu, vae, share):
    latents = latents_of(vae)
    needs = vae.decode_needs(latents)
    budget = int(share * needs.device_bytes(None))
    tiling = choose_tiling(needs, budget, shared=False)
    before = gpu.runtime.allocated_bytes()
    gpu.runtime.reset_peaks()
    frames = vae.decode(latents, device=gpu.device, tiling=tiling)
    assert gpu.runtime.allocated_bytes(peak=True) - before <= budget
    assert frames.shape == (1, 9, HEIGHT, WIDTH, 3)


def test_a_shortage_leads_to_smaller_tiles(gpu, vae):
    latents = latents_of(vae)
    changes = list[str]()
    needs = vae.decode_needs(latents)

    def decode(tiling: Tiling | None) -> torch.Tensor:
        return vae.decode(latents, device=gpu.device, tiling=tiling)

    gpu.empty_cache()
    gpu.runtime.limit_memory(gpu.runtime.reserved_bytes() + needs.device_bytes(None) // 3)
    try:
        frames = retry_with_smaller_tiles(decode, needs, None, changes.append)
    finally:
        gpu.runtime.limit_memory(None)
    pixels = int(changes[-1].split()[-2])
    assert torch.allclose(frames, decode(Tiling.of(pixels, needs.per_latent)), atol=1e-4)
