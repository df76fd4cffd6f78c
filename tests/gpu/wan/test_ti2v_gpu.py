"""TI2V-5B on a GPU: per-frame timesteps against the model's forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from wanstream.block_kernels import INDUCTOR, Kernels
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.accelerator import Accelerator
from wanstream.wan import Lane, forward_lanes
from wanstream.wan.experts.open import open_single_model

FREEDOM = (0.0, 1.0, 1.0, 0.5)
TIME = 900.0


@pytest.mark.parametrize(
    "kernels", [Kernels(), Kernels(compiler=INDUCTOR)], ids=["plain", "compiled"]
)
@pytest.mark.parametrize("chunk", [None, 64])
def test_streamed_forward_is_the_models_own(
    gpu: Accelerator, kernels: Kernels, chunk: int | None, tiny_expert_folder: Callable[..., Path]
) -> None:
    if kernels.compiler is not None:
        gpu.need_kernels("torch.compile")
    folder = tiny_expert_folder(in_channels=48, layers=3)
    draw = torch.Generator().manual_seed(1)
    latents = torch.randn(1, 48, 4, 16, 16, generator=draw).to(gpu.device)
    text = torch.randn(1, 9, 4096, generator=draw).to(gpu.device)
    model = WanTransformer3DModel.from_pretrained(folder).requires_grad_(False).to(gpu.device)
    times = (torch.tensor(FREEDOM) * TIME).repeat_interleave(64)[None].to(gpu.device)
    with open_single_model(folder, compute_dtype=torch.float32) as pair, torch.inference_mode():
        expected = model(latents, times, text, return_dict=False)[0]
        pair.kernels = kernels
        engine = pair.engine(
            OffloadPolicy(
                kind="layerwise", prefetch_blocks=1, blocks_to_swap=0, chunk_tokens=chunk
            ),
            gpu.device,
        )
        with engine.run(step_visits(["high"], engine.block_counts)) as run:
            (found,) = forward_lanes(
                engine.models["high"],
                [Lane(latents=latents, text=text, timestep_scales=FREEDOM)],
                torch.tensor([TIME]),
                lambda block: run.visit(0, "high", block),
            )
    assert (found - expected).norm() / expected.norm() < 1e-3
