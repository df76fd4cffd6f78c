"""Whole runs on a GPU: lanes, windows and tokens next to the video, and memory that runs out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from wanstream.devices import free_bytes
from wanstream.sampling import FirstBlockCache, check_room, denoise, working_bytes
from wanstream.sampling.inputs import DenoiseRequest, ExtraTokens, merge_requests
from wanstream.sampling.steps import DenoiseResult, InsufficientMemoryError
from wanstream.schema import OffloadPolicy
from wanstream.shapes.context_windows import ContextWindows
from wanstream.tests.support.accelerator import DTYPE, HAS_REAL
from wanstream.tests.support.rounding import difference
from wanstream.tests.support.sampling.runs import LAYERWISE, changed_request, normal
from wanstream.wan import Nag

SIZE = {"heads": 8, "ffn_dim": 4096} if HAS_REAL else {}
LATENT = (1, 16, 9, 32, 48) if HAS_REAL else (1, 16, 9, 8, 12)
WIDE = (1, 16, 5, 64, 96) if HAS_REAL else (1, 16, 3, 16, 24)
"""With 7680 tokens, a step needs many times the memory of a block."""
RESIDENT = OffloadPolicy.resident()
DEEP = pytest.mark.parametrize("pair", [8 if HAS_REAL else 6], indirect=True)
STILL = ContextWindows(frames=5, overlap=1, shift_windows=False)


@pytest.fixture
def pair(gpu, request, open_pair):
    """A pair with few layers, or with as many as the test's parameter says.

    It is closed while the device exists, and so needs `gpu` first.
    """
    layers = getattr(request, "param", 4 if HAS_REAL else 2)
    return open_pair(dtype=DTYPE, layers=layers, **SIZE)


@pytest.fixture
def run(gpu, pair):
    def run(request: DenoiseRequest, policy: OffloadPolicy = LAYERWISE) -> DenoiseResult:
        return denoise(pair, request, policy=policy, device=gpu.device)

    return run


@pytest.fixture
def long(make_request):
    return make_request(noise=normal(*LATENT, seed=20))


@pytest.fixture
def wide(make_request):
    return make_request(noise=normal(*WIDE, seed=10))


@pytest.fixture
def lanes(make_request):
    """Four requests with different noise and texts, in different lengths."""
    return [
        make_request(
            noise=normal(*LATENT[:2], 5, *LATENT[3:], seed=number),
            positive=normal(1, 7 + 40 * number, 4096, seed=10 + number),
            negative=normal(1, 90 - 20 * number, 4096, seed=20 + number),
        )
        for number in range(4)
    ]


@pytest.fixture
def check_peak(gpu, pair, run):
    """`check_peak(request, policy)`: a run takes no more memory than estimated."""

    def check(request: DenoiseRequest, policy: OffloadPolicy = LAYERWISE) -> None:
        run(request, policy)  # libraries have allocated their workspaces now
        before = gpu.runtime.allocated_bytes()
        gpu.runtime.reset_peaks()
        run(request, policy)
        given = {"chunk_tokens": policy.chunk_tokens, "cache": request.options.cache}
        estimated = working_bytes(pair, request.computed_shape, sides=(0, 0), **given)
        assert gpu.runtime.allocated_bytes(peak=True) - before <= 1.15 * estimated

    return check


def moved(result: DenoiseResult) -> list[int]:
    return [step.bytes_moved for step in result.timeline.steps]


@pytest.mark.parametrize("source", ["file", "pinned"])
def test_lanes_are_single_runs_to_the_bit_and_move_a_quarter(source, run, lanes):
    policy = OffloadPolicy.layerwise(1, source=source)
    alone = [run(request, policy) for request in lanes]
    together = run(merge_requests(lanes), policy)
    assert torch.equal(together.latents, torch.cat([each.latents for each in alone]))
    assert moved(together) == moved(alone[-1])


@pytest.mark.parametrize("chunk", [None, 512])
def test_windows_and_nag_take_the_estimated_memory(chunk, long, check_peak):
    windows = ContextWindows(frames=5, overlap=2)
    request = changed_request(long, guidance=(4.0, 1.0), nag=Nag(), windows=windows)
    check_peak(request, replace(LAYERWISE, chunk_tokens=chunk))


def test_lanes_take_the_estimated_memory(lanes, check_peak):
    check_peak(merge_requests(lanes))


def test_a_cache_in_windows_takes_the_estimated_memory(run, long, check_peak):
    always = changed_request(long, windows=STILL, cache=FirstBlockCache(threshold=1e9))
    skipped = [step.skipped_lanes for step in run(always).timeline.steps]
    lanes = 2 * len(STILL.at(0, LATENT[2]))
    assert skipped == [0, lanes, 0, lanes, lanes]
    check_peak(always)


def test_the_noise_of_steps_is_drawn_as_on_a_cpu(pair, run, long):
    request = changed_request(long, solver="lcm", guidance=(1.0, 1.0))
    on_cpu = denoise(pair, request, policy=LAYERWISE, device="cpu").latents
    torch.testing.assert_close(run(request).latents, on_cpu, rtol=0.1, atol=0.1)


CONTEXT = (normal(1, 16, 2, 8, 8, seed=1), normal(1, 16, 1, 4, 12, seed=2))
BESIDE = {"tokens": ExtraTokens(context=CONTEXT)}
CONTROLLED = {
    "image_condition": normal(1, 36, 2, 8, 8, seed=3),
    "tokens": ExtraTokens(reference=normal(1, 16, 1, 8, 8, seed=4)),
}


@pytest.mark.parametrize(
    ("shape", "changes"), [({}, BESIDE), ({"in_channels": 52, "reference": True}, CONTROLLED)]
)
def test_tokens_next_to_the_video(shape, changes, gpu, open_pair, make_request):
    """Streamed runs equal the resident one, and are close to a CPU."""
    pair = open_pair(**shape)
    request = make_request(noise=normal(1, 16, 2, 8, 8, seed=10), **changes)

    def latents(policy, device=gpu.device):
        return denoise(pair, request, policy=policy, device=device).latents

    resident = latents(RESIDENT)
    for policy in (LAYERWISE, OffloadPolicy.block_swap(2)):
        assert torch.equal(latents(policy), resident)
    assert difference(resident, latents(RESIDENT, "cpu")) < 1e-3


def test_lanes_that_do_not_fit_are_refused(gpu, pair, lanes):
    request = merge_requests(lanes)
    check_room(pair, request, LAYERWISE, gpu.device)
    needed = working_bytes(pair, request.noise.shape, sides=(0, 0))
    needed += pair.device_bytes(LAYERWISE, device=gpu.device)
    size = free_bytes(gpu.device) - needed // 4
    others = torch.empty(size, dtype=torch.uint8, device=gpu.device)
    with pytest.raises(InsufficientMemoryError, match="4 videos at once need"):
        check_room(pair, request, LAYERWISE, gpu.device)
    del others
    gpu.empty_cache()
    check_room(pair, request, LAYERWISE, gpu.device)


@pytest.fixture
def limit(gpu):
    """`limit(nbytes)`: let torch allocate at most so many device bytes during the test."""
    yield gpu.runtime.limit_memory
    gpu.runtime.limit_memory(None)


@DEEP
def test_run_under_a_smaller_policy_has_the_same_bits(gpu, pair, run, wide, limit):
    whole = run(wide, RESIDENT).latents
    peaks = []
    for policy in (LAYERWISE, RESIDENT):
        pair.close()
        gpu.empty_cache()
        gpu.runtime.reset_peaks()
        run(wide, policy)
        peaks.append(gpu.runtime.reserved_bytes(peak=True))
    pair.close()
    least, most = peaks
    assert most > least
    limit((least + most) // 2)
    disturbed = run(wide, RESIDENT)
    assert torch.equal(disturbed.latents, whole)
    changes = disturbed.timeline.changes
    assert 1 <= len(changes) <= 5, "16 buffers are not given up one by one"
    assert all(change.startswith("out of memory in step 0 ") for change in changes)
    assert pair.loaded_bytes < pair.device_bytes(RESIDENT, device=gpu.device)


@DEEP
def test_device_is_free_after_a_failed_run(gpu, pair, run, wide, limit):
    whole = run(wide, RESIDENT).latents
    pair.close()
    gpu.empty_cache()
    before = gpu.runtime.allocated_bytes()
    weights = pair.device_bytes(LAYERWISE, device=gpu.device)
    limit(before + weights + 2**21)
    with pytest.raises(InsufficientMemoryError, match="no smaller policy is left") as refused:
        run(wide, RESIDENT)
    assert " GB are free" in str(refused.value) or " MB are free" in str(refused.value)
    assert gpu.runtime.allocated_bytes() - before <= weights, "nothing of the failed steps is left"
    pair.close()
    gpu.runtime.limit_memory(None)
    assert torch.equal(run(wide, RESIDENT).latents, whole)


def test_free_memory_is_what_torch_can_give_out(gpu):
    gpu.need_alone("they change its free memory")
    before = free_bytes(gpu.device)
    held = torch.empty(2**28, dtype=torch.uint8, device=gpu.device)
    with_it = free_bytes(gpu.device)
    del held
    assert before - with_it >= 2**28
    assert free_bytes(gpu.device) - with_it >= 2**28
