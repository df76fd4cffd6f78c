"""Wan2.2 TI2V-5B with workers that share tokens.

Each worker uses the right timesteps for its tokens, also within a frame.
"""

from dataclasses import replace

import pytest
import torch

from wanstream.schema import Mesh, OffloadPolicy
from wanstream.schema.refs import ExpertsRef
from wanstream.shapes.context_windows import ContextWindows
from wanstream.tests.support.distributed.fixtures import normal
from wanstream.tests.support.distributed.split_jobs import job_run_compiled
from wanstream.tests.support.rounding import ROUNDING, difference

LAYERWISE = OffloadPolicy.layerwise(1)
CHUNKED = replace(LAYERWISE, chunk_tokens=8)
SHAPE = (1, 48, 3, 4, 8)
"""8 tokens in each of 3 frames: two workers have one frame and a half."""


@pytest.fixture
def given(make_task, tiny_expert_folder):
    """`given(**changes)`: the model with four heads, and a request with a first frame."""

    def make(**changes):
        mask = torch.ones(1, 1, *SHAPE[2:])
        mask[:, :, 0] = 0
        start = {"mask": mask, "latent": normal(*SHAPE, seed=21) * (1 - mask)}
        steps = {"switch_step": None, "boundary_ratio": 0.0}
        request = {"noise": normal(*SHAPE, seed=20), **start, **steps, **changes}
        folder = tiny_expert_folder(heads=4, in_channels=48, layers=2)
        ref = ExpertsRef(high_noise=folder, single=True, compute_dtype="float32")
        return ref, make_task(request=request).request

    return make


@pytest.mark.parametrize("policy", [LAYERWISE, CHUNKED], ids=["whole", "chunked"])
@pytest.mark.parametrize("mesh", [Mesh(ulysses=2), Mesh(cfg=2)], ids=str)
def test_two_workers_give_what_one_gives(mesh, policy, split, given, check_split):
    split.join(mesh)
    check_split(*given(), policy)
    alone, _ = check_split(*given(windows=ContextWindows(frames=2, overlap=1)), policy)
    assert difference(split.alone(*given(mask=None), policy), alone) > 1e-3


def test_compiled_blocks_of_two_workers(split, given):
    """One graph for all blocks and steps, with both timesteps among a worker's tokens or not."""
    split.join(Mesh(ulysses=2))
    results = split.all(job_run_compiled, *given(), LAYERWISE)
    for plain, compiled, again in results:
        assert difference(compiled["latents"], plain["latents"]) <= ROUNDING
        assert torch.equal(again["latents"], compiled["latents"])
        assert again["graphs"] == 0
    assert results[0][1]["graphs"] == results[1][1]["graphs"]
