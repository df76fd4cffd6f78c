"""Device memory released between runs is really free, and the next run's results are equal."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from wanstream.offload import (
    AbsentWeightError,
    BlockPatch,
    OffloadEngine,
    WeightPatch,
    attach_offload,
)
from wanstream.offload.formats.layout import block_format
from wanstream.offload.sources.module import ModuleSource
from wanstream.plan.programs import BlockKey, step_visits
from wanstream.schema import OffloadPolicy, StateError

CPU = torch.device("cpu")
BLOCKS, WIDTH = 6, 32
BLOCK_BYTES = 2 * 3 * WIDTH * WIDTH * 4
STEPS = ["high", "low"]
POLICIES = {
    "resident": (OffloadPolicy.resident(), 2 * BLOCKS),
    "layerwise 0": (OffloadPolicy.layerwise(0), 1),
    "layerwise 2": (OffloadPolicy.layerwise(2), 3),
    "block swap": (OffloadPolicy.block_swap(3, 1), 5),
}

Stacks = dict[str, nn.ModuleList]


@pytest.fixture
def stacks(make_stack: Callable[..., nn.ModuleList]) -> Stacks:
    return {"high": make_stack(BLOCKS, seed=1), "low": make_stack(BLOCKS, seed=2)}


@pytest.fixture
def expected(stacks: Stacks) -> torch.Tensor:
    value = torch.ones(1, WIDTH)
    for name in STEPS:
        for block in copy.deepcopy(stacks[name]):
            value = block(value)
    return value


def attach(stacks: Stacks, policy: OffloadPolicy, **how: object) -> OffloadEngine:
    return attach_offload(stacks, policy=policy, device=CPU, follow_forward=False, **how)


def run(
    handle: OffloadEngine, stacks: Stacks, steps: list[str] = STEPS
) -> tuple[torch.Tensor, list[BlockKey]]:
    """Return the output and the fetched blocks."""
    value = torch.ones(1, WIDTH)
    with handle.run(step_visits(steps, handle.block_counts)) as going:
        for visit in going.program.visits:
            with going.visit(*visit):
                value = stacks[visit.expert][visit.block](value)
    assert tuple(going.fetched) == going.program.fetches
    return value, [fetch.block for fetch in going.fetched]


def storages(handle: OffloadEngine) -> list[StorageWeakRef]:
    return [StorageWeakRef(buffer.memory.untyped_storage()) for buffer in handle.buffers]


def blocks(name: str, *numbers: int) -> set[BlockKey]:
    return {BlockKey(name, number) for number in numbers}


@pytest.mark.parametrize("policy", POLICIES)
def test_everything_is_given_back_and_comes_again(stacks, expected, policy):
    settings, buffers = POLICIES[policy]
    with attach(stacks, settings) as handle:
        assert handle.loaded_bytes == 0
        _, cold = run(handle, stacks)
        assert handle.loaded_bytes == buffers * BLOCK_BYTES
        for _ in range(2):
            memory = storages(handle)
            assert handle.release_memory(1 << 60) == buffers * BLOCK_BYTES
            assert all(storage.expired() for storage in memory), (
                "somebody keeps the memory of a buffer"
            )
            assert handle.loaded_bytes == 0
            assert handle.contents() == {}
            assert handle.release_memory(1) == 0
            value, fetched = run(handle, stacks)
            assert torch.equal(value, expected)
            assert fetched == cold
            assert handle.loaded_bytes == buffers * BLOCK_BYTES
    assert handle.loaded_bytes == 0
    assert handle.release_memory(1) == 0


def test_neither_a_run_that_was_kept_nor_one_that_failed_holds_the_memory(stacks, slow_source):
    source = slow_source(ModuleSource(stacks), seed=0)
    with attach(stacks, OffloadPolicy.layerwise(1), source=source) as handle:
        visits = step_visits(["high"], handle.block_counts)
        with handle.run(visits) as whole:
            memory = storages(handle)
            contexts = [whole.visit(*visit) for visit in visits]
            for context in contexts:
                with context:
                    pass
        with pytest.raises(KeyboardInterrupt), handle.run(visits) as cut:
            with cut.visit(*visits[0]):
                raise KeyboardInterrupt
        handle.release_memory(1 << 60)
        assert all(storage.expired() for storage in memory)
        assert (len(contexts), whole.fetched[0].block, cut.fetched[0].block) == (
            BLOCKS,
            *[BlockKey("high", 0)] * 2,
        )


def test_detached_blocks_hold_no_memory_either(stacks):
    handle = attach(stacks, OffloadPolicy.layerwise(1))
    run(handle, stacks)
    buffers, memory = handle.buffers, storages(handle)
    handle.detach()
    assert all(storage.expired() for storage in memory)
    assert len(buffers) == 2


def test_empty_buffers_go_first_then_streamed_blocks_then_residents(stacks):
    with attach(stacks, OffloadPolicy.block_swap(3, 1)) as handle:  # residents: 0, 2 and 4
        run(handle, stacks, ["high"])
        assert set(handle.contents().values()) == blocks("high", 1, 2, 3, 4, 5)
        other = BlockPatch(
            identity=1, weights={"up.weight": WeightPatch(full=torch.zeros(3 * WIDTH, WIDTH))}
        )
        handle.set_patches({BlockKey("high", 2): other})
        left = []
        for _ in range(5):
            assert handle.release_memory(1) == BLOCK_BYTES
            left.append(set(handle.contents().values()))
        assert left == [
            blocks("high", 1, 3, 4, 5),
            blocks("high", 1, 3, 4),
            blocks("high", 1, 4),
            blocks("high", 4),
            set(),
        ]


def test_a_part_is_given_back_in_whole_buffers_and_only_that_is_fetched_again(stacks, expected):
    with attach(stacks, OffloadPolicy.resident()) as handle:
        run(handle, stacks)
        assert handle.release_memory(2 * BLOCK_BYTES + 1) == 3 * BLOCK_BYTES
        assert handle.loaded_bytes == (2 * BLOCKS - 3) * BLOCK_BYTES
        value, fetched = run(handle, stacks)
        assert torch.equal(value, expected)
        assert set(fetched) == blocks("low", 3, 4, 5)
        assert run(handle, stacks)[1] == []


def test_residents_survive_as_long_as_streamed_blocks_are_enough(stacks, expected):
    with attach(stacks, OffloadPolicy.block_swap(3, 1)) as handle:
        run(handle, stacks, ["high"])
        assert handle.release_memory(3 * BLOCK_BYTES) == 3 * BLOCK_BYTES
        _, fetched = run(handle, stacks, ["high"])
        assert fetched == [BlockKey("high", number) for number in (0, 1, 3, 5)], "2 and 4 stayed"
        assert torch.equal(run(handle, stacks)[0], expected)


@pytest.mark.parametrize("fresh", [True, False])
def test_only_what_a_run_fetches_into_is_allocated(stacks, fresh):
    with attach(stacks, OffloadPolicy.resident()) as handle:
        if not fresh:
            run(handle, stacks)
            handle.release_memory(1 << 60)
        run(handle, stacks, ["high"])
        assert handle.loaded_bytes == BLOCKS * BLOCK_BYTES
        run(handle, stacks)
        assert handle.loaded_bytes == 2 * BLOCKS * BLOCK_BYTES


def test_a_device_without_room_for_the_buffers_says_so_when_a_run_begins():
    width = 1 << 25
    with torch.device("meta"):
        blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))

    class Endless:
        def __init__(self) -> None:
            large = block_format({"weight": ((width, width), torch.float32)}, torch.float32)
            self.formats = {BlockKey("blocks", 0): large, BlockKey("blocks", 1): large}

        def close(self):
            pass

    with attach_offload(
        blocks, policy=OffloadPolicy.resident(), device="cpu", source=Endless()
    ) as handle:
        for _ in range(2):
            with (
                pytest.raises(RuntimeError, match="memory"),
                handle.run(step_visits(["blocks"], handle.block_counts)),
            ):
                raise AssertionError("it has begun")
            assert (handle.running, handle.loaded_bytes) == (False, 0)
        with pytest.raises(RuntimeError, match="memory"):
            handle.allocate_buffers()
        assert not handle.running


def test_all_buffers_are_allocated_at_once(stacks, expected):
    with attach(stacks, OffloadPolicy.block_swap(3, 1)) as handle:
        handle.allocate_buffers()
        memory = storages(handle)
        assert handle.loaded_bytes == len(memory) * BLOCK_BYTES == 5 * BLOCK_BYTES
        assert torch.equal(run(handle, stacks)[0], expected)
        handle.allocate_buffers()
        assert [storage.expired() for storage in memory] == [False] * 5, "those that are there stay"
        with (
            handle.run(step_visits(["high"], handle.block_counts)),
            pytest.raises(RuntimeError, match="already running"),
        ):
            handle.allocate_buffers()
    assert all(storage.expired() for storage in memory)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_is_asked_and_nothing_is_given(stacks, nbytes):
    with attach(stacks, OffloadPolicy.layerwise(1)) as handle:
        run(handle, stacks)
        assert handle.release_memory(nbytes) == 0
        assert handle.loaded_bytes == 2 * BLOCK_BYTES


def test_a_running_engine_gives_nothing_back(stacks, expected):
    value = torch.ones(1, WIDTH)
    with attach(stacks, OffloadPolicy.layerwise(1)) as handle:
        with handle.run(step_visits(STEPS, handle.block_counts)) as going:
            for visit in going.program.visits:
                with going.visit(*visit):
                    with pytest.raises(RuntimeError, match="already running"):
                        handle.release_memory(1)
                    value = stacks[visit.expert][visit.block](value)
        assert handle.loaded_bytes == 2 * BLOCK_BYTES
    assert torch.equal(value, expected)


def test_a_run_that_was_planned_before_cannot_begin_after(stacks, expected):
    with attach(stacks, OffloadPolicy.resident()) as handle:
        run(handle, stacks)
        stale = handle.run(step_visits(STEPS, handle.block_counts))
        handle.release_memory(BLOCK_BYTES)
        with (
            pytest.raises(StateError, match=r"is absent with None: keep needs it to be done"),
            stale,
        ):
            pass
        value, fetched = run(handle, stacks)
        assert torch.equal(value, expected)
        assert fetched == [BlockKey("low", 5)]


def test_memory_that_came_again_in_inference_mode_serves_other_threads(stacks, expected):
    values = []
    with attach(stacks, OffloadPolicy.block_swap(3, 1)) as handle:
        handle.release_memory(1 << 60)
        with torch.inference_mode():
            values.append(run(handle, stacks)[0])
        assert not any(buffer.memory.is_inference() for buffer in handle.buffers)
        thread = threading.Thread(target=lambda: values.append(run(handle, stacks)[0]))
        thread.start()
        thread.join()
    assert len(values) == 2
    assert all(torch.equal(value, expected) for value in values)


def test_between_forwards_of_a_model_memory_may_go(make_stack, run_plain):
    stack = make_stack(BLOCKS)
    plain = copy.deepcopy(stack)
    hidden = torch.ones(1, WIDTH)
    with attach_offload(stack, policy=OffloadPolicy.layerwise(1), device=CPU) as handle:
        for _ in range(2):
            assert torch.equal(run_plain(stack, hidden), run_plain(plain, hidden))
            assert handle.release_memory(1 << 60) == 2 * BLOCK_BYTES
        with pytest.raises(AbsentWeightError, match=r"up\.weight of block 0 of 'blocks'"):
            stack[0].up(hidden)  # no parameter is bound to released memory


NO_MEMORY = """
import resource
import torch
from torch import nn
from wanstream.offload import attach_offload
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy

torch.manual_seed(0)
blocks = nn.ModuleList(nn.Linear(3072, 3072) for _ in range(3)).requires_grad_(False)
hidden = expected = torch.ones(1, 3072)
for block in blocks:
    expected = block(expected)
handle = attach_offload(blocks, policy=OffloadPolicy.resident(), device="cpu", follow_forward=False)
visits = step_visits(["blocks"], handle.block_counts)


def run(value):
    with handle.run(visits) as going:
        for visit in visits:
            with going.visit(*visit):
                value = blocks[visit.block](value)
    return value


assert torch.equal(run(hidden), expected)
handle.release_memory(1 << 60)
used = 1024 * int(
    next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize"))
)
resource.setrlimit(resource.RLIMIT_AS, (used + 56 * 2**20, resource.RLIM_INFINITY))
try:
    run(hidden)
except RuntimeError as err:
    assert "memory" in str(err), err
else:
    raise AssertionError("there was memory for all three blocks")
assert handle.loaded_bytes < 3 * 3072 * 3072 * 4
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert torch.equal(run(hidden), expected)
assert handle.loaded_bytes == 3 * 3072 * 3072 * 4
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process")
@pytest.mark.integration
def test_a_run_that_gets_no_memory_again_leaves_the_engine_usable():
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
