"""VAE on a GPU: decodes stay within the estimate, and a real out-of-memory error leads to smaller tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from wanstream.wan.vae.memory import choose_tiling
from wanstream.wan.vae.tiles import Tiling
from wanstream.wan.vae.vae import WanVae, open_vae, retry_with_smaller_tiles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


@pytest.fixture(params=["Wan2.1", "Wan2.2 5B"])
def vae(request: pytest.FixtureRequest, tiny_pipeline: Callable[[], Path], wan22_vae: Path) -> Iterator[WanVae]:
    """Yield a VAE with its weights on the GPU and its libraries initialised."""
    with open_vae(wan22_vae if request.param == "Wan2.2 5B" else tiny_pipeline()) as opened:
        opened.decode(latents_of(opened)[:, :, :1, :8, :8], device="cuda")
        yield opened


def latents_of(vae: WanVae) -> torch.Tensor:
    """Return random latents of 384 x 512 pixels."""
    size = (384 // vae.space.pixels, 512 // vae.space.pixels)
    return torch.randn(1, vae.space.channels, 3, *size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("share", [1.0, 0.5, 0.2])
def test_a_decode_stays_within_its_budget(vae: WanVae, share: float) -> None:
    latents = latents_of(vae)
    needs = vae.decode_needs(latents)
    budget = int(share * needs.device_bytes(None))
    tiling = choose_tiling(needs, budget, shared=False)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    frames = vae.decode(latents, device="cuda", tiling=tiling)
    assert torch.cuda.max_memory_allocated() - before <= budget
    assert frames.shape == (1, 9, 384, 512, 3)


def test_a_shortage_leads_to_smaller_tiles(vae: WanVae) -> None:
    latents = latents_of(vae)
    needs, changes = vae.decode_needs(latents), []
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + needs.device_bytes(None) // 3) / total)
    try:
        frames = retry_with_smaller_tiles(
            lambda tiling: vae.decode(latents, device="cuda", tiling=tiling), needs, None, changes.append
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert changes
    pixels = int(changes[-1].split()[-2])
    assert torch.allclose(
        frames, vae.decode(latents, device="cuda", tiling=Tiling.of(pixels, needs.per_latent)), atol=1e-4
    )
