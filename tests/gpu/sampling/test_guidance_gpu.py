"""Context windows, NAG and noise per step on a GPU: same results, memory within the estimate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from wanstream.sampling import denoise, working_bytes
from wanstream.sampling.cache.settings import FirstBlockCache
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.schema import OffloadPolicy
from wanstream.shapes.context_windows import ContextWindows
from wanstream.tests.support.accelerator import DTYPE, HAS_REAL, Accelerator
from wanstream.tests.support.sampling_fixtures import changed_request
from wanstream.wan import ExpertPair, Nag
from wanstream.wan.experts.open import open_experts

SHAPE = {"layers": 4, "heads": 8, "ffn_dim": 4096} if HAS_REAL else {"layers": 2}
LATENT = (1, 16, 9, 32, 48) if HAS_REAL else (1, 16, 9, 8, 12)
LAYERWISE = OffloadPolicy.layerwise(1)

Request = Callable[..., DenoiseRequest]


@pytest.fixture
def pair(tiny_expert_folder: Callable[..., Path]) -> Iterator[ExpertPair]:
    folders = [tiny_expert_folder(seed=seed, dtype=DTYPE, **SHAPE) for seed in (1, 2)]
    with open_experts(*folders, compute_dtype=DTYPE) as opened:
        yield opened


@pytest.fixture
def long(make_request: Request) -> DenoiseRequest:
    return make_request(noise=torch.randn(LATENT, generator=torch.Generator().manual_seed(20)))


def latents_of(gpu: Accelerator, pair: ExpertPair, request: DenoiseRequest) -> torch.Tensor:
    return denoise(pair, request, policy=LAYERWISE, device=gpu.device).latents


def test_one_window_of_all_frames_is_no_window_to_the_bit(
    gpu: Accelerator, pair: ExpertPair, long: DenoiseRequest
) -> None:
    one = changed_request(long, windows=ContextWindows(frames=9, overlap=4, blend="pyramid"))
    assert torch.equal(latents_of(gpu, pair, one), latents_of(gpu, pair, long))


def test_weights_move_once_for_all_windows(
    gpu: Accelerator, pair: ExpertPair, long: DenoiseRequest
) -> None:
    each = [
        changed_request(long, windows=windows)
        for windows in (None, ContextWindows(frames=3, overlap=1))
    ]
    moved = [
        [
            step.bytes_moved
            for step in denoise(pair, request, policy=LAYERWISE, device=gpu.device).timeline.steps[
                1:
            ]
        ]
        for request in each
    ]
    assert moved[0] == moved[1]


def test_an_alpha_of_zero_is_a_run_without_nag_to_the_bit(
    gpu: Accelerator, pair: ExpertPair, long: DenoiseRequest
) -> None:
    off = changed_request(long, guidance=(1.0, 1.0))
    assert torch.equal(
        latents_of(gpu, pair, changed_request(off, nag=Nag(alpha=0.0))), latents_of(gpu, pair, off)
    )


@pytest.mark.parametrize("chunk", [None, 512])
def test_windows_and_nag_take_the_estimated_memory(
    gpu: Accelerator, chunk: int | None, pair: ExpertPair, long: DenoiseRequest
) -> None:
    policy = replace(LAYERWISE, chunk_tokens=chunk)
    request = changed_request(
        long, guidance=(4.0, 1.0), nag=Nag(), windows=ContextWindows(frames=5, overlap=2)
    )
    denoise(
        pair, request, policy=policy, device=gpu.device
    )  # libraries have allocated their workspaces now
    before = gpu.runtime.allocated_bytes()
    gpu.runtime.reset_peaks()
    denoise(pair, request, policy=policy, device=gpu.device)
    taken = gpu.runtime.allocated_bytes(peak=True) - before
    assert taken <= 1.15 * working_bytes(
        pair, request.computed_shape, sides=(0, 0), chunk_tokens=chunk
    )


def test_a_cache_in_windows_takes_the_estimated_memory(
    gpu: Accelerator, pair: ExpertPair, long: DenoiseRequest
) -> None:
    still = changed_request(long, windows=ContextWindows(frames=5, overlap=1, shift_windows=False))
    nothing = changed_request(still, cache=FirstBlockCache(threshold=0.0))
    assert torch.equal(latents_of(gpu, pair, nothing), latents_of(gpu, pair, still))
    always = changed_request(still, cache=FirstBlockCache(threshold=1e9))
    steps = denoise(pair, always, policy=LAYERWISE, device=gpu.device).timeline.steps
    lanes = 2 * len(always.options.windows.at(0, LATENT[2]))
    assert [step.skipped_lanes for step in steps] == [0, lanes, 0, lanes, lanes]
    before = gpu.runtime.allocated_bytes()
    gpu.runtime.reset_peaks()
    denoise(pair, always, policy=LAYERWISE, device=gpu.device)
    taken = gpu.runtime.allocated_bytes(peak=True) - before
    assert taken <= 1.15 * working_bytes(
        pair, always.computed_shape, sides=(0, 0), cache=always.options.cache
    )


def test_the_noise_of_steps_is_drawn_as_on_a_cpu(
    gpu: Accelerator, pair: ExpertPair, long: DenoiseRequest
) -> None:
    request = changed_request(long, solver="lcm", guidance=(1.0, 1.0))
    on_cpu = denoise(pair, request, policy=LAYERWISE, device="cpu").latents
    torch.testing.assert_close(latents_of(gpu, pair, request), on_cpu, rtol=0.1, atol=0.1)
