"""The planner's run for an expert pair: estimates equal the engine's figures."""

from __future__ import annotations

import pytest
import torch

from wanstream.offload.core.pages import in_pages
from wanstream.plan.programs import step_visits
from wanstream.sampling import lane_names, run_shape
from wanstream.sampling.cache import Stage
from wanstream.sampling.steps import Side
from wanstream.schema import OffloadPolicy
from wanstream.shapes import VideoShape
from wanstream.wan.experts.open import open_experts, open_single_model

UNGUIDED = {"high": (0,), "low": (0,)}
LANES = (Stage("high"), lane_names(1, (Side.POSITIVE,)))
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("stored", "storage", "decodes"),
    [
        (torch.bfloat16, "as stored", False),
        (torch.float16, "as stored", True),
        (torch.float32, "as stored", True),
        (torch.bfloat16, "fp8", True),
    ],
)
def test_the_planner_knows_which_files_are_decoded_on_arrival(
    tiny_expert_file, stored, storage, decodes
):
    path = tiny_expert_file(dtype=stored)
    with open_experts(path, path, compute_dtype=torch.bfloat16, storage=storage) as pair:
        on_cpu, on_gpu = (
            run_shape(pair, (1, 16, 1, 4, 4), device, lanes={0: LANES}, sides=UNGUIDED)
            for device in (CPU, GPU)
        )
        assert on_cpu.blocks.decodes == on_gpu.blocks.decodes == decodes
        # A CPU decodes from RAM slots, or reads straight into buffers with nothing to decode.
        engine = pair.engine(OffloadPolicy.layerwise(1), CPU)
        visits = step_visits(["high"], engine.block_counts)
        with engine.run(visits) as run:
            for visit in visits:
                with run.visit(*visit):
                    pass
        assert pair.host_bytes == (2 * in_pages(on_cpu.blocks.stored_bytes) if decodes else 0)
        # A GPU's memory is counted once: resident tensors, two buffers, and two blocks during
        # decoding.
        device_bytes = pair.device_bytes(OffloadPolicy.layerwise(1), device=GPU)
        raw = 2 * on_gpu.blocks.stored_bytes if decodes else 0
        assert 2 * on_gpu.blocks.computed_bytes + raw + on_gpu.blocks.outside_bytes == device_bytes


def test_the_planner_hears_of_the_5b_model_what_it_is(tiny_expert_file):
    """Widths, channels and bytes from file headers, 16 pixels per latent pixel, one model."""
    path = tiny_expert_file(dtype=torch.bfloat16, in_channels=48, heads=3, ffn_dim=640, layers=2)
    with open_single_model(path, compute_dtype=torch.bfloat16) as pair:
        sides = {"high": (0, 0), "low": (0, 0)}
        run = run_shape(pair, (1, 48, 31, 44, 80), GPU, lanes={0: LANES, 1: LANES}, sides=sides)
        expert = run.expert
        assert (expert.width, expert.ffn_width, expert.blocks) == (384, 640, 2)
        assert (expert.in_channels, expert.out_channels) == (48, 48)
        assert (
            run.tokens
            == VideoShape(width=1280, height=704, frames=121, per_latent=16).tokens
            == 27_280
        )
        assert dict(run.lanes) == {"high": 2}
        assert run.blocks.computed_bytes == expert.streamed_bytes()
        assert 2 * run.blocks.computed_bytes + run.blocks.outside_bytes == pair.device_bytes(
            OffloadPolicy.layerwise(1), device=GPU
        )
