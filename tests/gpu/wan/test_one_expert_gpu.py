"""Model with an image branch and the CLIP image encoder on a GPU, against plain models there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.testing.model import make_image_encoder, save_image_encoder
from wanstream.tests.support.accelerator import Accelerator
from wanstream.wan import Lane, forward_lanes
from wanstream.wan.experts.open import open_single_model
from wanstream.wan.image_encoder import clip_pixels, open_image_encoder

IMAGE = {"in_channels": 36, "image_dim": 80}


def _normal(gpu: Accelerator, *shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(gpu.device)


@pytest.mark.parametrize("chunk", [None, 256])
def test_an_image_branch_streams(
    gpu: Accelerator, chunk: int | None, tiny_expert_folder: Callable[..., Path]
) -> None:
    folder = tiny_expert_folder(**IMAGE)
    model = (
        WanTransformer3DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
        .requires_grad_(False)
        .to(gpu.device)
    )
    lane = Lane(
        latents=_normal(gpu, 1, 36, 3, 16, 24, seed=1),
        text=_normal(gpu, 1, 512, 4096, seed=2),
        image=_normal(gpu, 1, 17, 80, seed=3),
    )
    assert lane.image is not None
    given = [tensor.bfloat16() for tensor in (lane.latents, lane.text, lane.image)]
    policy = OffloadPolicy(
        kind="layerwise", prefetch_blocks=1, blocks_to_swap=0, chunk_tokens=chunk
    )
    with torch.inference_mode(), open_single_model(folder) as pair:
        latents, text, image = given
        expected = model(
            latents, torch.tensor([937.5]).to(gpu.device), text, image, return_dict=False
        )[0]
        engine = pair.engine(policy, gpu.device)
        with engine.run(step_visits(["high"], engine.block_counts)) as run:
            found = forward_lanes(
                engine.models["high"],
                [lane],
                torch.tensor([937.5]),
                lambda block: run.visit(0, "high", block),
            )[0]
        assert (found - expected).float().norm() / expected.float().norm() < 1e-2


@pytest.mark.parametrize("failing", [2, 3, 5])
def test_an_embedder_stays_locked_until_its_copies_end_if_memory_runs_out(
    gpu: Accelerator, failing: int, tiny_expert_folder: Callable[..., Path]
) -> None:
    device = gpu.need_fake("an allocation fails").devices[0]
    with open_single_model(tiny_expert_folder()) as pair:
        models = pair.engine(OffloadPolicy.layerwise(1), gpu.device).models
        models["high"]
        gpu.delay()
        device.fail_at = device.allocations + failing
        with pytest.raises(torch.OutOfMemoryError):
            models.bare["high"].condition_embedder.time_rows([937.5])


def test_clip_sees_the_same(gpu: Accelerator, tmp_path: Path) -> None:
    encoder = make_image_encoder(seed=1, image_size=28)
    save_image_encoder(encoder, tmp_path / "clip.safetensors", dtype=torch.float32)
    images = torch.rand(1, 40, 56, 3, generator=torch.Generator().manual_seed(0))
    seen = (
        open_image_encoder(tmp_path / "clip.safetensors")
        .encode(images, device=gpu.device)
        .penultimate_hidden_states
    )
    with torch.no_grad():
        expected = encoder(
            pixel_values=clip_pixels(images, 28), output_hidden_states=True
        ).hidden_states[-2]
    assert seen.device.type == "cpu"
    assert (seen - expected).norm() / expected.norm() < 1e-2
