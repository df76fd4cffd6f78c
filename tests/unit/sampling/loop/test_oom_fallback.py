"""Runs that run out of device memory at chosen visits: module hooks raise torch's errors."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import UniPCMultistepScheduler

from wanstream.devices.oom import forget, is_out_of_memory
from wanstream.offload.engine.run import EngineRun
from wanstream.sampling.steps import InsufficientMemoryError, SamplingCancelled
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.sampling.runs import latents_of, normal, run
from wanstream.tests.support.sampling.short_memory import ShortPair, once
from wanstream.wan import ExpertPair

LAYERS = 4
LAYERWISE = OffloadPolicy.layerwise
BLOCK_SWAP = OffloadPolicy.block_swap
RESIDENT = OffloadPolicy.resident()


@contextmanager
def _no_collector():
    """Memory in a reference cycle is not free when the next step needs it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_shortage_changes_no_bit(open_pair, make_request):
    request = make_request(steps=3, switch_step=1)
    whole = run(open_pair(), request, RESIDENT)
    assert whole.timeline.changes == ()
    for policy, uses in (
        (RESIDENT, [0]),  # the very first use
        (RESIDENT, [2 * LAYERS - 1]),  # a step's last use
        (RESIDENT, [21, 22]),  # twice in one step
        (BLOCK_SWAP(1, 2), [5, 18]),  # before and after the switch
    ):
        pair = ShortPair(open_pair(), once(*uses))
        with _no_collector():
            disturbed = run(pair, request, policy)
        assert torch.equal(disturbed.latents, whole.latents)
        assert len(disturbed.timeline.changes) == len(pair.policies) - 1 == len(uses)
        assert [step.index for step in disturbed.timeline.steps] == [0, 1, 2]
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if name.startswith("wanstream-fetch")]


def test_the_smaller_policy_stays_and_is_reported(open_pair, make_request, caplog):
    pair = ShortPair(open_pair(), once(2 * 2 * LAYERS))
    with caplog.at_level(logging.WARNING, "wanstream.sampling"):
        result = run(pair, make_request(), BLOCK_SWAP(2, 1))
    assert pair.policies == [BLOCK_SWAP(2, 1), BLOCK_SWAP(3, 1)]
    (change,) = result.timeline.changes
    assert change.startswith("out of memory in step 2 (low-noise expert): ")
    assert "3 of 4 stream, 1 ahead" in change
    assert "instead of" in change
    (warning,) = caplog.messages
    assert warning.startswith(change)
    assert "computed again, and the result is the same (out of memory at use 16" in warning
    moved = [step.bytes_moved for step in result.timeline.steps]
    assert moved[1] < moved[3] == moved[4], "three blocks stream instead of two from step 2 on"


class DeviceError(RuntimeError):
    """Stand-in for torch.AcceleratorError. Python code cannot construct the real one."""

    error_code = 2


class OtherDeviceError(DeviceError):
    error_code = 700


@pytest.mark.parametrize(
    ("error", "message", "short"),
    [
        (RuntimeError, "HIP error: out of memory", True),
        (RuntimeError, "HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`", True),
        (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublas...`", True),
        (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        (RuntimeError, "CUDA error: out of memory", True),
        (RuntimeError, "[enforce fail] DefaultCPUAllocator: can't allocate memory: you t", True),
        (DeviceError, "the device said no", True),
        (OtherDeviceError, "the device said no", False),
        (RuntimeError, "CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_errors_that_are_shortages(error, message, short):
    assert is_out_of_memory(error(message)) == short


def test_oom_error_of_a_library_counts(open_pair, make_request):
    request = make_request()
    pair = ShortPair(open_pair(), once(5), RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    assert len(run(pair, request, RESIDENT).timeline.changes) == 1
    pair = ShortPair(open_pair(), once(5), RuntimeError("CUDA error: an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(pair, request, RESIDENT)
    assert pair.uses == 6


@pytest.mark.slow  # several loop runs
def test_oom_without_a_smaller_policy_takes_chunks(open_pair, make_request, caplog):
    noise = normal(1, 16, 5, 42, 40, seed=1)  # 2100 tokens
    request = make_request(noise=noise, steps=1, switch_step=1, guidance=(1.0, 1.0))
    pair = ShortPair(open_pair(), once(LAYERS - 1))
    with caplog.at_level(logging.WARNING, "wanstream.sampling"):
        result = run(pair, request)
    assert pair.policies == [LAYERWISE(1), replace(LAYERWISE(1), chunk_tokens=2048)]
    assert "2048 tokens at once" in result.timeline.changes[0]
    assert "the result is the same" not in caplog.text, "last bits may differ"
    assert torch.allclose(result.latents, latents_of(open_pair(), request), rtol=1e-4, atol=1e-4)


def test_a_step_is_computed_again_with_less_and_less(open_pair, make_request):
    """Only two buffers fit: at least one less than eight, then at least two less than four."""
    pair = ShortPair(open_pair(), lambda _, policy: policy != LAYERWISE(1))
    run(pair, make_request(), RESIDENT)
    assert pair.policies == [RESIDENT, BLOCK_SWAP(0, 1), LAYERWISE(1)]


@pytest.mark.parametrize(("policy", "ahead"), [(RESIDENT, 1), (LAYERWISE(0), 0)])
def test_without_a_smaller_policy_the_error_has_attempts(policy, ahead, open_pair, make_request):
    inner = open_pair()
    still = [True]
    request = make_request(steps=1, switch_step=1)
    pair = ShortPair(inner, lambda use, _: still[0] and use >= 3)
    with _no_collector(), pytest.raises(InsufficientMemoryError) as refused:
        run(pair, request, policy)
    assert all(left() is None for left in pair.left)
    assert pair.policies[-1] == LAYERWISE(ahead)
    assert isinstance(refused.value, ValueError)
    assert isinstance(refused.value, torch.OutOfMemoryError), "a host unloads other models for it"
    message = str(refused.value)
    start = "out of memory in step 0 (high-noise expert), and no smaller policy is left"
    assert message.startswith(start)
    assert message.count(" of weights (") == len(pair.policies)
    assert "Make the video smaller or shorter" in message
    assert "out of memory at use" in message
    still[0] = False
    assert torch.equal(latents_of(inner, request, policy), latents_of(open_pair(), request, policy))


def test_an_interrupt_ends_a_step_that_is_computed_again(open_pair, make_request):
    inner = open_pair()
    polls = list[int]()
    pair = ShortPair(inner, once(2 * LAYERS + 2))

    def should_stop() -> bool:
        polls.append(len(pair.policies))
        return polls.count(2) == 3

    with pytest.raises(SamplingCancelled) as stopped:
        run(pair, make_request(), RESIDENT, should_stop=should_stop)
    assert (stopped.value.step, stopped.value.block) == (1, 2)
    assert not inner.running


def test_a_shortage_of_a_callback_is_none_of_the_step(open_pair, make_request):
    def preview(_: Any) -> None:
        raise torch.OutOfMemoryError("the preview has no room")

    pair = ShortPair(open_pair(), once())
    with pytest.raises(torch.OutOfMemoryError, match="the preview has no room"):
        run(pair, make_request(), RESIDENT, on_step=preview)
    assert pair.policies == [RESIDENT]


@pytest.mark.parametrize(("owner", "name"), [(ExpertPair, "engine"), (EngineRun, "_start")])
def test_pools_and_buffers_without_room_shrink(owner, name, open_pair, make_request, monkeypatch):
    request = make_request(steps=2, switch_step=1)
    pair = ShortPair(open_pair(), once())
    shortages = iter([torch.OutOfMemoryError("no room")])
    real = getattr(owner, name)

    def short(*given: Any) -> Any:
        for error in shortages:
            raise error
        return real(*given)

    monkeypatch.setattr(owner, name, short)
    result = run(pair, request, RESIDENT)
    assert pair.policies[-1].kind == "block_swap"
    (change,) = result.timeline.changes
    assert change.startswith("out of memory in step 0 (high-noise expert)")
    assert torch.equal(result.latents, latents_of(open_pair(), request))


@pytest.mark.parametrize(("before", "after"), [(LAYERWISE(1), BLOCK_SWAP(1)), (RESIDENT, RESIDENT)])
def test_a_revised_policy_holds_from_the_second_step_on(before, after, open_pair, make_request):
    records = list[Any]()
    pair = ShortPair(open_pair(), once())
    request = make_request(steps=3, switch_step=1)

    result = run(pair, request, before, revise=lambda record: records.append(record) or after)
    assert torch.equal(result.latents, latents_of(open_pair(), request, before))
    assert records == [result.timeline.steps[0]]
    assert pair.policies == ([before] if before == after else [before, after])
    assert len(result.timeline.changes) == (before != after)
    assert all(change.startswith("after the first step: ") for change in result.timeline.changes)


# Short in the first step, short later, and a single step.
@pytest.mark.parametrize(("steps", "uses", "revisions"), [(2, [3], 0), (2, [10], 1), (1, [], 0)])
def test_a_disturbed_or_only_step_revises_nothing(steps, uses, revisions, open_pair, make_request):
    records = list[Any]()
    pair = ShortPair(open_pair(), once(*uses))
    run(pair, make_request(steps=steps, switch_step=steps), RESIDENT, revise=records.append)
    assert len(records) == revisions


def test_a_kept_error_holds_no_tensor():
    left = list[Any]()

    def compute() -> None:
        hidden = torch.zeros(4)
        left.append(weakref.ref(hidden))
        raise torch.OutOfMemoryError("no room for 4 values. Of the allocated memory 1 GiB is ours")

    def compute_more() -> None:
        other = torch.zeros(5)
        left.append(weakref.ref(other))
        try:
            compute()
        except torch.OutOfMemoryError as err:
            raise torch.OutOfMemoryError("no room after that either") from err

    with _no_collector():
        try:
            compute_more()
        except torch.OutOfMemoryError as err:
            kept = err
        assert any(ref() is not None for ref in left)
        assert forget(kept) == "no room after that either"
        assert all(ref() is None for ref in left)


def test_a_shortage_in_the_solver_leaves_its_history(pair, make_request, monkeypatch):
    request = make_request()
    steps = iter(range(100))
    whole = latents_of(pair, request, RESIDENT)
    real = UniPCMultistepScheduler.multistep_uni_p_bh_update

    def short(self: Any, *args: Any, **settings: Any) -> torch.Tensor:
        """Called last in a step, after the history was shifted."""
        if next(steps) == 2:
            raise torch.OutOfMemoryError("no room in the solver")
        return real(self, *args, **settings)

    monkeypatch.setattr(UniPCMultistepScheduler, "multistep_uni_p_bh_update", short)
    disturbed = run(pair, request, RESIDENT)
    assert torch.equal(disturbed.latents, whole)
    assert len(disturbed.timeline.changes) == 1
