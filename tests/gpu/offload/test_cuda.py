"""The engine on a CUDA device: copying and computing in any order gives the plain result's bits.

Blocks are large enough (25 MB) for a copy to take about a millisecond, and some visits delay the
device for longer: a missing wait shows in the result. `test_scenarios.py` has runs that are cut
short, streams of their own, and changes while the device still computes.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from wanstream.offload import attach_offload
from wanstream.offload.sources.module import ModuleSource
from wanstream.schema import OffloadPolicy
from wanstream.telemetry import Recorder
from wanstream.tests.support.accelerator import HAS_REAL, Accelerator
from wanstream.tests.support.offload.fixtures import SlowSource
from wanstream.tests.support.offload.streaming import (
    IN_RAM,
    LAYERWISE,
    Model,
    attach,
    plainly,
    stream,
)

BLOCKS = 6
WIDTH = 1024 if HAS_REAL else 128
BLOCK_BYTES = 2 * 3 * WIDTH * WIDTH * 4
STEPS = ["high", "high", "low", "low", "high"]
POLICIES = {
    "resident": OffloadPolicy.resident(),
    "layerwise 0": OffloadPolicy.layerwise(0),
    "layerwise 1": LAYERWISE,
    "layerwise 3": OffloadPolicy.layerwise(3),
    "block swap": OffloadPolicy.block_swap(3, 1),
    "layerwise pinned": IN_RAM,
}

Stacks = dict[str, nn.ModuleList]


@pytest.fixture
def stacks(make_stack: Callable[..., nn.ModuleList]) -> Stacks:
    seeds = {"high": 1, "low": 2}
    return {name: make_stack(BLOCKS, seed=seed, width=WIDTH) for name, seed in seeds.items()}


@pytest.fixture
def hidden(gpu: Accelerator) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).to(gpu.device)


@pytest.fixture
def plain(gpu: Accelerator, stacks: Stacks, hidden: torch.Tensor) -> Callable[..., torch.Tensor]:
    """`plain(steps)`: the outputs of the same blocks on the device, before they are attached."""

    def run(steps: Sequence[str] = STEPS) -> torch.Tensor:
        resident = {name: copy.deepcopy(stack).to(gpu.device) for name, stack in stacks.items()}
        return plainly(resident, steps, hidden)

    return run


def streamed(gpu, handle, stacks, value) -> torch.Tensor:
    """Stream one run. Every third visit delays the device before it reads the block."""

    def during(visit: int) -> None:
        gpu.delay(int(visit % 3 == 0))

    with torch.inference_mode():
        value, run = stream(handle, stacks, STEPS, value, during=during)
    assert tuple(run.fetched) == run.program.fetches
    return value


@pytest.mark.parametrize("policy", ["resident", "layerwise 0", "layerwise pinned"])
def test_records_are_those_of_the_device(gpu, stacks, hidden, policy):
    recorder = Recorder(gpu.device)
    during = {"during": lambda visit: gpu.delay(), "recorder": recorder}
    with attach(stacks, POLICIES[policy], device=gpu.device) as handle, torch.inference_mode():
        stream(handle, stacks, ["high"] * 2, hidden, **during)
        loaded_bytes = handle.loaded_bytes
    timeline = recorder.timeline()
    moved = [BLOCKS * BLOCK_BYTES, 0 if policy == "resident" else BLOCKS * BLOCK_BYTES]
    assert [step.bytes_moved for step in timeline.steps] == moved
    assert timeline.first_block_s > 0
    for step in timeline.steps:
        transfers = step.transfers
        memory = step.memory
        assert step.compute_s > 0
        assert step.stall_s >= 0
        assert step.compute_s + step.stall_s <= step.wall_s + 1e-3  # tolerance between two clocks
        assert transfers.copied_bytes == step.bytes_moved, "everything comes out of RAM"
        assert (transfers.copy_s > 0) == (step.bytes_moved > 0)
        assert 0 <= transfers.stall_on_read_s <= step.stall_s + 1e-3
        assert loaded_bytes <= memory.device_bytes <= memory.reserved_bytes
        assert memory.reserved_bytes <= memory.device_used_bytes
        if policy == "layerwise 0":  # one buffer: every visit waits for a copy
            assert step.stall_s > 0
            assert transfers.overlap < 1
    # One stream copies, one block after the other.
    assert timeline.transfers.copy_s <= timeline.wall_s + 1e-3
    assert timeline.steps[0].memory.pinned_bytes > 0, "staging at least"


@pytest.mark.parametrize("inference", [False, True])
def test_a_models_own_forward_is_streamed_and_detached(gpu, stacks, hidden, plain, inference):
    model = Model(stacks["high"])
    expected = plain(["high"])
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    on_cpu = model(hidden.cpu())
    with torch.inference_mode(inference):
        handle = attach_offload(model.blocks, policy=LAYERWISE, device=gpu.device)
        assert not model.blocks[0].norm.weight.is_inference()
        with handle.passes(2):
            assert torch.equal(model(hidden), expected)
            assert torch.equal(model(model(hidden)[:0]), hidden[:0])
    assert torch.equal(model(hidden), expected)
    handle.detach()
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert after.keys() == tensors.keys()
    assert all(after[name] is tensor for name, tensor in tensors.items())
    assert torch.equal(model(hidden.cpu()), on_cpu)


BUFFERS = [("layerwise 0", 1), ("layerwise 1", 2), ("layerwise 3", 4)]
BUFFERS += [("block swap", 5), ("resident", 2 * BLOCKS)]


@pytest.mark.parametrize(("policy", "buffers"), BUFFERS)
def test_memory_follows_the_policy_and_is_given_back(gpu, stacks, hidden, policy, buffers):
    for _ in range(2):  # in the first run, libraries allocate their workspaces
        gc.collect()
        gpu.runtime.reset_peaks()
        before = gpu.runtime.allocated_bytes()
        with attach(stacks, POLICIES[policy], device=gpu.device) as handle:
            streamed(gpu, handle, stacks, hidden)
        peak = gpu.runtime.allocated_bytes(peak=True) - before
    assert abs(peak - buffers * BLOCK_BYTES) < BLOCK_BYTES / 2
    assert gpu.runtime.allocated_bytes() == before


def test_slots_for_reads_are_as_few_as_the_copies_allow(gpu, stacks, hidden, plain):
    """Two slots serve all fetches, and only copies hold the read thread: a missing wait shows."""
    source = SlowSource(ModuleSource(stacks), seed=0, longest_s=0.0)
    expected = plain()
    with attach(stacks, OffloadPolicy.layerwise(3), source=source, device=gpu.device) as handle:
        for _ in range(3):
            assert torch.equal(streamed(gpu, handle, stacks, hidden), expected)
        assert handle.host_bytes == handle.pinned_bytes == 2 * BLOCK_BYTES


def test_pinned_blocks_are_locked_and_read_once(gpu, stacks, hidden, plain):
    expected = plain()
    source = SlowSource(ModuleSource(stacks), seed=0)
    resident = OffloadPolicy.resident(source="pinned")
    with attach(stacks, resident, source=source, device=gpu.device) as handle:
        streamed(gpu, handle, stacks, hidden)
        slots = handle.ram
        assert all(gpu.is_locked(slots[index].memory) for index in slots.contents())
        assert handle.pinned_bytes == 2 * BLOCKS * BLOCK_BYTES
        assert handle.release_memory(2 * BLOCK_BYTES) == 2 * BLOCK_BYTES
        assert torch.equal(streamed(gpu, handle, stacks, hidden), expected)
        before = gpu.runtime.allocated_bytes()
        handle.set_policy(OffloadPolicy.block_swap(3, 1, source="pinned"))
        assert before - gpu.runtime.allocated_bytes() == (2 * BLOCKS - 5) * BLOCK_BYTES
        assert torch.equal(streamed(gpu, handle, stacks, hidden), expected)
        assert sorted(source.reads) == sorted(source.formats)


@pytest.mark.parametrize("policy", ["layerwise 1", "layerwise pinned"])
def test_a_device_that_is_not_the_present_one(gpu, stacks, hidden, plain, policy):
    expected = plain().cpu()
    with attach(stacks, POLICIES[policy], device=gpu.other) as handle:
        assert torch.equal(streamed(gpu, handle, stacks, hidden.to(gpu.other)).cpu(), expected)
