"""The engine on a CUDA device: copying and computing in any order gives the plain result's bits.

Blocks are large enough (25 MB) for a copy to take about a millisecond, and some visits delay the
device for longer: a missing wait shows in the result. `test_scenarios.py` has runs that are cut
short, streams of their own, and changes while the device still computes.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn

from wanstream.devices import PageLockError
from wanstream.offload import BlockPatch, OffloadEngine, WeightPatch, attach_offload
from wanstream.offload.sources.module import ModuleSource
from wanstream.plan.programs import BlockKey, step_visits
from wanstream.schema import OffloadPolicy
from wanstream.telemetry import Recorder
from wanstream.tests.support.accelerator import HAS_REAL, Accelerator

BLOCKS, WIDTH = 6, 1024 if HAS_REAL else 128
BLOCK_BYTES = 2 * 3 * WIDTH * WIDTH * 4
STEPS = ["high", "high", "low", "low", "high"]
LAYERWISE = OffloadPolicy.layerwise(1)
RESIDENT = OffloadPolicy.resident()
PINNED = OffloadPolicy.layerwise(1, source="pinned")
SWAP_PINNED = OffloadPolicy.block_swap(3, 2, source="pinned")
POLICIES = {
    "resident": RESIDENT,
    "layerwise 0": OffloadPolicy.layerwise(0),
    "layerwise 1": LAYERWISE,
    "layerwise 3": OffloadPolicy.layerwise(3),
    "block swap": OffloadPolicy.block_swap(3, 1),
    "block swap deep": OffloadPolicy.block_swap(4, 2),
    "layerwise pinned": PINNED,
    "block swap pinned": SWAP_PINNED,
    "some at home": replace(PINNED, ram_blocks=5),
    "some residents at home": replace(SWAP_PINNED, blocks_to_swap=4, ram_blocks=3),
}
SPEEDS = [1, 3, 1000]
"""The device is slow, in turns, or the bus is slow."""
TWO_STEPS = ["high"] * 2

Stacks = dict[str, nn.ModuleList]
Patches = dict[BlockKey, BlockPatch]


@pytest.fixture
def stacks(make_stack: Callable[..., nn.ModuleList]) -> Stacks:
    seeds = {"high": 1, "low": 2}
    return {name: make_stack(BLOCKS, seed=seed, width=WIDTH) for name, seed in seeds.items()}


@pytest.fixture
def hidden(gpu: Accelerator) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).to(gpu.device)


@pytest.fixture
def plain(gpu: Accelerator, stacks: Stacks, hidden: torch.Tensor) -> Iterator[Callable[..., Any]]:
    """`plain(steps, patches)`: the outputs of the same blocks on the device, patched there."""
    originals = copy.deepcopy(stacks)

    def run(steps: Sequence[str] = STEPS, patches: Patches | None = None) -> torch.Tensor:
        resident = {name: copy.deepcopy(stack).to(gpu.device) for name, stack in originals.items()}
        for key, patch in (patches or {}).items():
            for name, weight in patch.weights.items():
                add_plainly(resident[key.expert][key.block].get_parameter(name), weight)
        value = hidden
        for block in (block for name in steps for block in resident[name]):
            value = block(value)
        return value

    yield run
    originals.clear()


def streamed(
    gpu: Accelerator, handle: OffloadEngine, stacks: Stacks, value: torch.Tensor, *, slow: int = 3
) -> torch.Tensor:
    """Stream one run. Every `slow`-th visit delays the device before it reads the block."""
    with torch.inference_mode(), handle.run(step_visits(STEPS, handle.block_counts)) as run:
        for number, visit in enumerate(run.program.visits):
            with run.visit(*visit):
                if number % slow == 0:
                    gpu.delay()
                value = stacks[visit.expert][visit.block](value)
        assert tuple(run.fetched) == run.program.fetches
    return value


def attach(gpu: Accelerator, stacks: Any, policy: OffloadPolicy, **how: Any) -> OffloadEngine:
    given = {"device": gpu.device, "follow_forward": False, **how}
    return attach_offload(stacks, policy=policy, **given)


def some_patches(strength: float, *, rank: int = 16) -> Patches:
    """Patches for every second block in one expert and every third in the other.

    One has a full difference.
    """
    random = torch.Generator().manual_seed(rank)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) * 0.05

    patches = {}
    for name, block in (
        *(("high", block) for block in range(0, BLOCKS, 2)),
        *(("low", block) for block in range(0, BLOCKS, 3)),
    ):
        up = WeightPatch(up=strength * draw(3 * WIDTH, rank), down=draw(rank, WIDTH))
        more = rank + block
        down = WeightPatch(up=strength * draw(WIDTH, more), down=draw(more, 3 * WIDTH))
        if block == 0:
            up = replace(up, full=strength * draw(3 * WIDTH, WIDTH))
        weights = {"up.weight": up, "down.weight": down}
        patches[BlockKey(name, block)] = BlockPatch(identity=(rank, strength), weights=weights)
    return patches


def add_plainly(matrix: torch.Tensor, weight: WeightPatch) -> None:
    """Add a patch to a matrix on the device, as on arrival."""
    if weight.full is not None:
        matrix.add_(weight.full.to(matrix))
    matrix.copy_(torch.addmm(matrix, weight.up.to(matrix), weight.down.to(matrix)))


@pytest.mark.parametrize(("policy", "slow"), list(zip(POLICIES, cycle(SPEEDS))))
def test_streamed_equals_plain(gpu, stacks, hidden, plain, slow_source, policy, slow):
    expected = plain()
    source = slow_source(ModuleSource(stacks), seed=slow)
    with attach(gpu, stacks, POLICIES[policy], source=source) as handle:
        for _ in range(2):  # the second run starts from buffers that are possibly still in use
            value = streamed(gpu, handle, stacks, hidden, slow=slow)
        assert torch.equal(value, expected)


@pytest.mark.parametrize(
    ("policy", "slow"),
    [("resident", 1), ("layerwise 0", 3), ("layerwise 3", 1000), ("block swap pinned", 3)],
)
def test_patched_on_arrival_equals_patched_before(
    gpu, stacks, hidden, plain, slow_source, policy, slow
):
    """One slot holds all fetches' factors: a copy that does not wait changes the result."""
    source = slow_source(ModuleSource(stacks), seed=slow)
    changes = [some_patches(1.0), some_patches(-0.5, rank=8), {}, some_patches(1.0)]
    expected = [plain(patches=patches) for patches in changes]
    with attach(gpu, stacks, POLICIES[policy], source=source) as handle:
        for patches, wanted in zip(changes, expected, strict=True):
            handle.set_patches(patches)
            for _ in range(2):
                assert torch.equal(streamed(gpu, handle, stacks, hidden, slow=slow), wanted)


@pytest.mark.parametrize("policy", ["resident", "layerwise 0", "layerwise pinned"])
def test_records_are_those_of_the_device(gpu, stacks, hidden, policy):
    recorder = Recorder(gpu.device)
    value = hidden
    with attach(gpu, stacks, POLICIES[policy]) as handle:
        visits = step_visits(TWO_STEPS, handle.block_counts)
        with torch.inference_mode(), handle.run(visits, recorder=recorder) as run:
            for step in range(2):
                with recorder.step(step, "high", sigma=0.5):
                    for block in range(BLOCKS):
                        with run.visit(step, "high", block):
                            gpu.delay()
                            value = stacks["high"][block](value)
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


class Model(nn.Module):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@pytest.mark.parametrize("inference", [False, True])
def test_a_models_own_forward_is_streamed_and_detached(gpu, stacks, hidden, plain, inference):
    model = Model(stacks["high"])
    expected = plain(["high"])
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    on_cpu = model(hidden.cpu())
    with torch.inference_mode(inference):
        handle = attach_offload(model.blocks, policy=LAYERWISE, device=gpu.device)
        with handle.passes(2):
            assert torch.equal(model(hidden), expected)
            assert torch.equal(model(model(hidden)[:0]), hidden[:0])
    assert torch.equal(model(hidden), expected)
    handle.detach()
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert after.keys() == tensors.keys()
    assert all(after[name] is tensor for name, tensor in tensors.items())
    assert torch.equal(model(hidden.cpu()), on_cpu)


@pytest.mark.parametrize(
    ("policy", "buffers"),
    [
        ("layerwise 0", 1),
        ("layerwise 1", 2),
        ("layerwise 3", 4),
        ("block swap", 5),
        ("resident", 2 * BLOCKS),
    ],
)
def test_memory_follows_the_policy_and_is_given_back(gpu, stacks, hidden, policy, buffers):
    for _ in range(2):  # in the first run, libraries allocate their workspaces
        gc.collect()
        gpu.runtime.reset_peaks()
        before = gpu.runtime.allocated_bytes()
        with attach(gpu, stacks, POLICIES[policy]) as handle:
            streamed(gpu, handle, stacks, hidden)
        peak = gpu.runtime.allocated_bytes(peak=True) - before
    assert abs(peak - buffers * BLOCK_BYTES) < BLOCK_BYTES / 2
    assert gpu.runtime.allocated_bytes() == before


@pytest.mark.parametrize("in_place", [True, False])
def test_memory_that_could_not_be_locked_only_costs_time(
    gpu, stacks, hidden, plain, slow_source, monkeypatch, in_place
):
    def refuse(self: Any, memory: torch.Tensor) -> None:
        raise PageLockError("no more pages")

    expected = plain()
    monkeypatch.setattr(type(gpu.runtime), "lock_pages", refuse)
    source = ModuleSource(stacks) if in_place else slow_source(ModuleSource(stacks), seed=0)
    with attach(gpu, stacks, replace(PINNED, prefetch_blocks=2), source=source) as handle:
        for _ in range(2):
            assert torch.equal(streamed(gpu, handle, stacks, hidden), expected)
        assert handle.pinned_bytes == 0
        assert handle.host_bytes == (0 if in_place else 2 * BLOCKS * BLOCK_BYTES)


def test_slots_for_reads_are_as_few_as_the_copies_allow(gpu, stacks, hidden, plain, slow_source):
    """Two slots serve all fetches, and only copies hold the read thread: a missing wait shows."""
    source = slow_source(ModuleSource(stacks), seed=0, longest_s=0.0)
    expected = plain()
    with attach(gpu, stacks, OffloadPolicy.layerwise(3), source=source) as handle:
        for _ in range(3):
            assert torch.equal(streamed(gpu, handle, stacks, hidden), expected)
        assert handle.host_bytes == handle.pinned_bytes == 2 * BLOCK_BYTES


def test_pinned_blocks_are_locked_and_read_once(gpu, stacks, hidden, plain, slow_source):
    expected = plain()
    source = slow_source(ModuleSource(stacks), seed=0)
    resident = OffloadPolicy.resident(source="pinned")
    with attach(gpu, stacks, resident, source=source) as handle:
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
    with attach(gpu, stacks, POLICIES[policy], device=gpu.other) as handle:
        assert torch.equal(streamed(gpu, handle, stacks, hidden.to(gpu.other)).cpu(), expected)
