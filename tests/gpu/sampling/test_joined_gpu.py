"""Lanes on a GPU: the bits of single runs, one weight stream, and memory within the estimate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from wanstream.devices import free_bytes
from wanstream.sampling import check_room, denoise, working_bytes
from wanstream.sampling.inputs import DenoiseRequest, merge_requests
from wanstream.sampling.steps import InsufficientMemoryError
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.accelerator import DTYPE, HAS_REAL, Accelerator
from wanstream.wan import ExpertPair
from wanstream.wan.experts.open import open_experts

SHAPE = {"layers": 4, "heads": 8, "ffn_dim": 4096} if HAS_REAL else {"layers": 2}
LATENT = (1, 16, 5, 32, 48) if HAS_REAL else (1, 16, 5, 8, 12)
LAYERWISE = OffloadPolicy.layerwise(1)


@pytest.fixture
def pair(tiny_expert_folder: Callable[..., Path]) -> Iterator[ExpertPair]:
    folders = [tiny_expert_folder(seed=seed, dtype=DTYPE, **SHAPE) for seed in (1, 2)]
    with open_experts(*folders, compute_dtype=DTYPE) as opened:
        yield opened


@pytest.fixture
def lanes(make_request: Callable[..., DenoiseRequest]) -> list[DenoiseRequest]:
    """Four requests with different noise and texts, in different lengths."""

    def normal(*shape: int, seed: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    return [
        make_request(
            noise=normal(*LATENT, seed=number),
            positive=normal(1, 7 + 40 * number, 4096, seed=10 + number),
            negative=normal(1, 90 - 20 * number, 4096, seed=20 + number),
        )
        for number in range(4)
    ]


@pytest.mark.parametrize("source", ["file", "pinned"])
def test_lanes_are_single_runs_to_the_bit_and_move_a_quarter(
    gpu: Accelerator, source: str, pair: ExpertPair, lanes: list[DenoiseRequest]
) -> None:
    policy = OffloadPolicy.layerwise(1, source=source)
    alone = [denoise(pair, request, policy=policy, device=gpu.device) for request in lanes]
    together = denoise(pair, merge_requests(lanes), policy=policy, device=gpu.device)
    for own, single in zip(together.latents.split(1), alone, strict=True):
        assert torch.equal(own, single.latents)
    assert [step.bytes_moved for step in together.timeline.steps] == [
        step.bytes_moved for step in alone[-1].timeline.steps
    ]


def test_lanes_take_the_estimated_memory(
    gpu: Accelerator, pair: ExpertPair, lanes: list[DenoiseRequest]
) -> None:
    request = merge_requests(lanes)
    denoise(
        pair, request, policy=LAYERWISE, device=gpu.device
    )  # libraries have allocated their workspaces now
    before = gpu.runtime.allocated_bytes()
    gpu.runtime.reset_peaks()
    denoise(pair, request, policy=LAYERWISE, device=gpu.device)
    taken = gpu.runtime.allocated_bytes(peak=True) - before
    estimated = working_bytes(pair, request.noise.shape, sides=(0, 0))
    assert taken <= 1.15 * estimated


def test_lanes_that_do_not_fit_are_refused_before_they_are_computed(
    gpu: Accelerator, pair: ExpertPair, lanes: list[DenoiseRequest]
) -> None:
    request = merge_requests(lanes)
    check_room(pair, request, LAYERWISE, gpu.device)
    free = free_bytes(gpu.device)
    assert free is not None
    needed = working_bytes(pair, request.noise.shape, sides=(0, 0)) + pair.device_bytes(
        LAYERWISE, device=gpu.device
    )
    others = torch.empty(free - needed // 4, dtype=torch.uint8, device=gpu.device)
    with pytest.raises(InsufficientMemoryError, match="4 videos at once need"):
        check_room(pair, request, LAYERWISE, gpu.device)
    del others
    gpu.empty_cache()
    check_room(pair, request, LAYERWISE, gpu.device)
