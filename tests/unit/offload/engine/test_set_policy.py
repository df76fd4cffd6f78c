"""Policy changes between runs: common residents are not moved again, former residents are freed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from wanstream.offload import OffloadEngine, attach_offload
from wanstream.offload.core.pages import in_pages
from wanstream.offload.host_memory.ram_slots import RamSlots
from wanstream.offload.sources.module import ModuleSource
from wanstream.plan.programs import BlockKey, RamResidency, step_visits
from wanstream.schema import OffloadPolicy, plan_residency

CPU = torch.device("cpu")
BLOCKS, WIDTH = 6, 32
BLOCK_BYTES = 2 * 3 * WIDTH * WIDTH * 4
STEPS = ["high", "low"]
ONES = torch.ones(1, WIDTH)

Stacks = dict[str, nn.ModuleList]


@pytest.fixture
def stacks(make_stack: Callable[..., nn.ModuleList]) -> Stacks:
    return {"high": make_stack(BLOCKS, seed=1), "low": make_stack(BLOCKS, seed=2)}


@pytest.fixture
def source(stacks: Stacks, slow_source):
    return slow_source(ModuleSource(stacks), seed=0, longest_s=0.001)


def attach(stacks: Stacks, policy: OffloadPolicy, source) -> OffloadEngine:
    return attach_offload(stacks, policy=policy, device=CPU, source=source, follow_forward=False)


def run(
    handle: OffloadEngine,
    stacks: Stacks,
    steps: Sequence[str] = STEPS,
    value: torch.Tensor = ONES,
) -> tuple[torch.Tensor, list[BlockKey]]:
    """Return the output and the fetched blocks."""
    with handle.run(step_visits(steps, handle.block_counts)) as going:
        for visit in going.program.visits:
            with going.visit(*visit):
                value = stacks[visit.expert][visit.block](value)
    return value, [fetch.block for fetch in going.fetched]


def plainly(
    stacks: Stacks, steps: Sequence[str] = STEPS, value: torch.Tensor = ONES
) -> torch.Tensor:
    for name in steps:
        for block in copy.deepcopy(stacks)[name]:
            value = block(value)
    return value


WIDTHS = [32, 128, 32, 128, 64]
BYTES = [2 * 8 * width * 4 for width in WIDTHS]


@pytest.mark.parametrize(
    ("policy", "counts", "nbytes"),
    [
        (OffloadPolicy.block_swap(3), [3, 1, 3, 1, 3], 2 * BYTES[1] + 2 * BYTES[4]),
        (OffloadPolicy.layerwise(1), [3] * 5, 2 * BYTES[1]),
        (OffloadPolicy.resident(), [1] * 5, sum(BYTES)),
    ],
    ids=["the largest are resident", "layerwise", "resident"],
)
@pytest.mark.parametrize("ram_blocks", [0, 3, 5])
def test_buffers_and_slots_have_the_sizes_of_their_blocks(
    slow_source, policy: OffloadPolicy, counts: list[int], nbytes: int, ram_blocks: int
) -> None:
    blocks = [nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)) for width in WIDTHS]
    expected = plainly({"model": blocks}, ["model"] * 3, torch.ones(1, 8))
    stacks = {"model": nn.ModuleList(blocks)}
    before = OffloadPolicy.block_swap(2, 2, source="pinned")
    source = slow_source(ModuleSource(stacks), seed=0, longest_s=0.001)
    with attach(stacks, before, source) as engine, torch.no_grad():
        run(engine, stacks, ["model"], torch.ones(1, 8))
        engine.set_policy(replace(policy, source="pinned", ram_blocks=ram_blocks))
        engine.release_memory(engine.loaded_bytes)
        value, fetched = run(engine, stacks, ["model"] * 3, torch.ones(1, 8))
        assert torch.equal(value, expected)
        assert [sum(key.block == block for key in fetched) for block in range(5)] == counts
        assert engine.loaded_bytes == nbytes
        in_ram = engine.ram.contents().values()
        assert engine.host_bytes == sum(in_pages(BYTES[key.block]) for key in in_ram)
        assert len(in_ram) == ram_blocks


def test_residents_that_both_keep_are_not_fetched_again(stacks, source):
    expected = plainly(stacks)
    with attach(stacks, OffloadPolicy.resident(), source) as handle:
        run(handle, stacks)
        assert len(source.reads) == 2 * BLOCKS
        handle.set_policy(OffloadPolicy.block_swap(3, 1))
        assert handle.loaded_bytes == 5 * BLOCK_BYTES
        kept = set(handle.contents().values())
        assert {BlockKey("high", number) for number in (0, 2, 4)} <= kept
        value, fetched = run(handle, stacks)
        assert torch.equal(value, expected)
        assert len(fetched) == 2 * BLOCKS - len([key for key in kept if key.expert == "high"])
        handle.set_policy(OffloadPolicy.resident())
        before = set(handle.contents().values())
        value, fetched = run(handle, stacks)
        assert torch.equal(value, expected)
        assert set(fetched) == set(source.formats) - before
        assert handle.loaded_bytes == 2 * BLOCKS * BLOCK_BYTES


def test_new_buffers_take_memory_when_they_are_used(stacks, source):
    with attach(stacks, OffloadPolicy.layerwise(0), source) as handle:
        run(handle, stacks)
        handle.set_policy(OffloadPolicy.layerwise(3))
        assert handle.loaded_bytes == BLOCK_BYTES
        run(handle, stacks)
        assert handle.loaded_bytes == 4 * BLOCK_BYTES
        assert not any(buffer.memory.is_inference() for buffer in handle.buffers)


def test_homes_that_both_keep_are_not_read_again(stacks, source):
    expected = plainly(stacks)
    pinned = OffloadPolicy.layerwise(1, source="pinned")
    with attach(stacks, pinned, source) as handle:
        run(handle, stacks)
        source.reads.clear()
        for policy in (
            replace(pinned, prefetch_blocks=3),
            OffloadPolicy.block_swap(2, 1, source="pinned"),
            pinned,
        ):
            handle.set_policy(policy)
            assert torch.equal(run(handle, stacks)[0], expected)
        assert source.reads == []
        assert handle.host_bytes == 2 * BLOCKS * in_pages(BLOCK_BYTES)
        handle.set_policy(replace(pinned, ram_blocks=4))
        assert handle.host_bytes == 4 * in_pages(BLOCK_BYTES)
        assert torch.equal(run(handle, stacks)[0], expected)
        assert len(source.reads) == 2 * BLOCKS - 4, "four blocks stayed"
        handle.set_policy(OffloadPolicy.layerwise(1))
        assert handle.host_bytes == 0
        assert torch.equal(run(handle, stacks)[0], expected)


@pytest.mark.parametrize(
    "wrong", [OffloadPolicy.block_swap(BLOCKS + 1), OffloadPolicy.block_swap(99, source="pinned")]
)
def test_a_policy_that_does_not_fit_changes_nothing(stacks, source, wrong):
    expected = plainly(stacks)
    with attach(stacks, OffloadPolicy.resident(source="pinned"), source) as handle:
        run(handle, stacks)
        held, in_ram = handle.contents(), handle.ram.contents()
        with pytest.raises(ValueError, match="blocks_to_swap"):
            handle.set_policy(wrong)
        assert (handle.contents(), handle.ram.contents()) == (held, in_ram)
        value, fetched = run(handle, stacks)
        assert torch.equal(value, expected)
        assert fetched == []


def test_only_between_runs_and_while_attached(stacks, source):
    expected = plainly(stacks)
    value = torch.ones(1, WIDTH)
    with attach(stacks, OffloadPolicy.layerwise(1), source) as handle:
        with handle.run(step_visits(STEPS, handle.block_counts)) as going:
            for visit in going.program.visits:
                with going.visit(*visit):
                    with pytest.raises(RuntimeError, match="already running"):
                        handle.set_policy(OffloadPolicy.layerwise(2))
                    value = stacks[visit.expert][visit.block](value)
        assert torch.equal(value, expected)
    with pytest.raises(RuntimeError, match="detached"):
        handle.set_policy(OffloadPolicy.layerwise(2))


def test_a_run_that_was_planned_before_cannot_begin_after(stacks, source):
    expected = plainly(stacks)
    with attach(stacks, OffloadPolicy.layerwise(3), source) as handle:
        stale = handle.run(step_visits(STEPS, handle.block_counts))
        handle.set_policy(OffloadPolicy.layerwise(1))
        with (
            pytest.raises(ValueError, match="needs 4 buffers, the engine has 2: compile it again"),
            stale,
        ):
            pass
        assert torch.equal(run(handle, stacks)[0], expected)


@pytest.mark.parametrize("stop_at", [0, 3, 7])
def test_the_rest_of_a_run_under_a_smaller_policy(stacks, source, stop_at):
    """After running out of memory, the failed visit is repeated with fewer resident blocks."""
    expected = plainly(stacks)
    with attach(stacks, OffloadPolicy.block_swap(2, 2, source="pinned"), source) as handle:
        visits, value = step_visits(STEPS, handle.block_counts), torch.ones(1, WIDTH)
        with pytest.raises(torch.OutOfMemoryError), handle.run(visits) as going:
            for number, visit in enumerate(visits):
                with going.visit(*visit):
                    if number == stop_at:
                        raise torch.OutOfMemoryError("no more")
                    value = stacks[visit.expert][visit.block](value)
        smaller = OffloadPolicy.block_swap(5, 1, source="pinned")
        handle.set_policy(smaller)
        _, buffers = plan_residency(smaller, handle.block_counts)
        assert handle.loaded_bytes <= buffers * BLOCK_BYTES
        with handle.run(visits[stop_at:]) as going:
            for visit in visits[stop_at:]:
                with going.visit(*visit):
                    value = stacks[visit.expert][visit.block](value)
        assert torch.equal(value, expected)
        assert set(source.reads) == set(source.formats)
        again = len(source.reads) - len(source.formats)
        assert again <= handle.ram.in_flight, "only reads that the error has cut short are repeated"


def test_buffers_that_go_on_a_cpu_make_room_for_homes(stacks, source):
    class RecordingSlots(RamSlots):
        freed = -1

        def check_available(self, residents: RamResidency, staging: int, *, freed: int = 0) -> None:
            self.freed = freed
            super().check_available(residents, staging, freed=freed)

    expected = plainly(stacks)
    with attach(stacks, OffloadPolicy.resident(), source) as handle:
        run(handle, stacks)
        sizes = {key: fmt.stored.nbytes for key, fmt in handle.formats.items()}
        handle.ram = RecordingSlots(sizes, lock=None)
        handle.set_policy(OffloadPolicy.layerwise(1, source="pinned"))
        assert handle.ram.freed == (2 * BLOCKS - 2) * BLOCK_BYTES
        value, _ = run(handle, stacks)
        assert torch.equal(value, expected)
