"""A GPU that runs out of memory, and steps repeated under smaller policies.

Torch may use only a part of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.devices import free_bytes
from wanstream.sampling import denoise
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import InsufficientMemoryError
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.accelerator import DTYPE, HAS_REAL, Accelerator
from wanstream.wan import ExpertPair
from wanstream.wan.experts.open import open_experts

SHAPE = {"layers": 8, "heads": 8, "ffn_dim": 4096} if HAS_REAL else {"layers": 6}
RESIDENT = OffloadPolicy.resident()


@pytest.fixture
def pair(tiny_expert_folder: Callable[..., Path]) -> Iterator[ExpertPair]:
    folders = [tiny_expert_folder(seed=seed, dtype=DTYPE, **SHAPE) for seed in (1, 2)]
    with open_experts(*folders, compute_dtype=DTYPE) as opened:
        yield opened


@pytest.fixture
def limit(gpu: Accelerator) -> Iterator[Callable[[int], None]]:
    """`limit(nbytes)`: let torch allocate at most so many device bytes during the test."""

    yield gpu.runtime.limit_memory
    gpu.runtime.limit_memory(None)


@pytest.fixture
def wide(make_request: Callable[..., DenoiseRequest]) -> DenoiseRequest:
    """Latents with 7680 tokens: a step needs many times the memory of a block."""
    draw = torch.Generator().manual_seed(10)
    return make_request(
        noise=torch.randn(*((1, 16, 5, 64, 96) if HAS_REAL else (1, 16, 3, 16, 24)), generator=draw)
    )


def _run(
    gpu: Accelerator, pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy = RESIDENT
) -> Any:
    return denoise(pair, request, policy=policy, device=gpu.device)


def _peak(
    gpu: Accelerator, pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy
) -> int:
    """Bytes allocated by torch on the device for a run under `policy`."""
    pair.close()
    gpu.empty_cache()
    gpu.runtime.reset_peaks()
    _run(gpu, pair, request, policy)
    peak = gpu.runtime.reserved_bytes(peak=True)
    pair.close()
    return peak


def test_a_run_that_does_not_fit_as_asked_ends_with_the_same_bits(
    gpu: Accelerator, pair: ExpertPair, wide: DenoiseRequest, limit: Callable[[int], None]
) -> None:
    whole = _run(gpu, pair, wide).latents
    least = _peak(gpu, pair, wide, OffloadPolicy.layerwise(1))
    most = _peak(gpu, pair, wide, RESIDENT)
    assert most > least
    limit((least + most) // 2)
    disturbed = _run(gpu, pair, wide)
    assert torch.equal(disturbed.latents, whole)
    assert disturbed.timeline.changes
    assert all(
        change.startswith("out of memory in step 0 ") for change in disturbed.timeline.changes
    )
    assert len(disturbed.timeline.changes) <= 5, "16 buffers are not given up one by one"
    assert pair.loaded_bytes < pair.device_bytes(RESIDENT, device=gpu.device)


def test_where_two_buffers_do_not_fit_the_device_is_free_afterwards(
    gpu: Accelerator, pair: ExpertPair, wide: DenoiseRequest, limit: Callable[[int], None]
) -> None:
    whole = _run(gpu, pair, wide).latents
    pair.close()
    gpu.empty_cache()
    before = gpu.runtime.allocated_bytes()
    weights = pair.device_bytes(OffloadPolicy.layerwise(1), device=gpu.device)
    limit(before + weights + 2**21)
    with pytest.raises(InsufficientMemoryError, match="no smaller policy is left") as refused:
        _run(gpu, pair, wide)
    assert " GB are free" in str(refused.value) or " MB are free" in str(refused.value)
    assert gpu.runtime.allocated_bytes() - before <= weights, "nothing of the failed steps is left"
    pair.close()
    gpu.runtime.limit_memory(None)
    assert torch.equal(_run(gpu, pair, wide).latents, whole)


def test_what_torch_can_give_out_is_what_is_free_and_what_it_keeps(gpu) -> None:
    gpu.need_alone("they change its free memory")
    device = gpu.device
    before = free_bytes(device)
    assert before is not None
    held = torch.empty(2**28, dtype=torch.uint8, device=device)
    with_it = free_bytes(device)
    del held
    after = free_bytes(device)
    assert with_it is not None
    assert after is not None
    assert before - with_it >= 2**28
    assert after - with_it >= 2**28
