"""Buffers and slots between runs: memory released, allocated again, and kept under a new policy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from wanstream.offload import OffloadEngine
from wanstream.offload.core.pages import in_pages
from wanstream.offload.engine import block_pool
from wanstream.offload.host_memory.ram_slots import RamSlots
from wanstream.offload.sources.module import ModuleSource
from wanstream.plan.programs import BlockKey, step_visits
from wanstream.schema import OffloadPolicy, StateError, plan_residency
from wanstream.tests.support.offload.fixtures import SlowSource, in_threads
from wanstream.tests.support.offload.streaming import (
    BLOCK_BYTES,
    BLOCKS,
    IN_RAM,
    LAYERWISE,
    ONES,
    STEPS,
    attach,
    fetched,
    keys,
    plainly,
    raise_at,
    stream,
)

ALL = 1 << 60
RESIDENT = OffloadPolicy.resident()


def storages(engine: OffloadEngine) -> list[StorageWeakRef]:
    return [StorageWeakRef(buffer.memory.untyped_storage()) for buffer in engine.buffers]


BUFFERS = [(RESIDENT, 2 * BLOCKS), (OffloadPolicy.layerwise(0), 1)]
BUFFERS += [(OffloadPolicy.layerwise(2), 3), (OffloadPolicy.block_swap(3, 1), 5)]


@pytest.mark.parametrize(("policy", "buffers"), BUFFERS)
def test_all_memory_is_released_and_allocated_again(stacks, policy, buffers):
    expected = plainly(stacks)
    with attach(stacks, policy) as engine:
        assert engine.loaded_bytes == 0
        cold = fetched(stream(engine, stacks)[1])
        assert engine.loaded_bytes == buffers * BLOCK_BYTES
        for nothing in (0, -1):
            memory = storages(engine)
            assert engine.release_memory(nothing) == 0
            assert engine.release_memory(ALL) == buffers * BLOCK_BYTES
            assert all(storage.expired() for storage in memory), "something keeps a buffer's memory"
            assert (engine.loaded_bytes, engine.contents()) == (0, {})
            assert engine.release_memory(1) == 0
            value, run = stream(engine, stacks)
            assert torch.equal(value, expected)
            assert fetched(run) == cold
            assert engine.loaded_bytes == buffers * BLOCK_BYTES
        memory = storages(engine)
        kept = engine.buffers
    assert all(storage.expired() for storage in memory)
    assert len(kept) == buffers
    assert (engine.loaded_bytes, engine.release_memory(1)) == (0, 0)


def test_kept_and_failed_runs_hold_no_memory(stacks, slow):
    with attach(stacks, source=slow) as engine:
        visits = step_visits(["high"], engine.block_counts)
        with engine.run(visits) as whole:
            memory = storages(engine)
            contexts = [whole.visit(*visit) for visit in visits]
            for context in contexts:
                with context:
                    pass
        with pytest.raises(KeyboardInterrupt), engine.run(visits) as cut:
            with cut.visit(*visits[0]):
                raise KeyboardInterrupt
        engine.release_memory(ALL)
        assert all(storage.expired() for storage in memory)
        assert len(contexts) == BLOCKS
        assert whole.fetched[0].block == cut.fetched[0].block == BlockKey("high", 0)


def test_only_released_buffers_are_fetched_again(stacks):
    expected = plainly(stacks)
    with attach(stacks, RESIDENT) as engine:
        stream(engine, stacks)
        assert engine.release_memory(2 * BLOCK_BYTES + 1) == 3 * BLOCK_BYTES, "whole buffers"
        assert engine.loaded_bytes == (2 * BLOCKS - 3) * BLOCK_BYTES
        value, run = stream(engine, stacks)
        assert torch.equal(value, expected)
        assert set(fetched(run)) == keys("low", 3, 4, 5)
        assert stream(engine, stacks)[1].fetched == []
    with attach(stacks, OffloadPolicy.block_swap(3, 1)) as engine:
        stream(engine, stacks, ["high"])
        assert engine.release_memory(3 * BLOCK_BYTES) == 3 * BLOCK_BYTES
        _, run = stream(engine, stacks, ["high"])
        assert [key.block for key in fetched(run)] == [0, 1, 3, 5], "residents 2 and 4 stayed"
        assert torch.equal(stream(engine, stacks)[0], expected)


def test_a_run_continues_after_a_failed_allocation(stacks, monkeypatch):
    expected = plainly(stacks)
    allocate = block_pool.allocate_flat
    with attach(stacks, RESIDENT) as engine:

        def scarce(*given: object) -> torch.Tensor:
            if engine.loaded_bytes == 4 * BLOCK_BYTES:
                raise RuntimeError("no memory")
            return allocate(*given)

        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
            patch.setattr(block_pool, "allocate_flat", scarce)
            with pytest.raises(RuntimeError, match="no memory"):
                engine.allocate_buffers()
            stream(engine, stacks)
        assert not engine.running
        assert engine.loaded_bytes == 4 * BLOCK_BYTES
        assert torch.equal(stream(engine, stacks)[0], expected)
        assert engine.loaded_bytes == 2 * BLOCKS * BLOCK_BYTES


def test_all_buffers_are_allocated_at_once(stacks):
    expected = plainly(stacks)
    with attach(stacks, OffloadPolicy.block_swap(3, 1)) as engine:
        engine.allocate_buffers()
        memory = storages(engine)
        assert engine.loaded_bytes == len(memory) * BLOCK_BYTES == 5 * BLOCK_BYTES
        assert torch.equal(stream(engine, stacks)[0], expected)
        engine.allocate_buffers()
        assert [storage.expired() for storage in memory] == [False] * 5, "existing ones stay"


def test_runs_planned_before_a_change_cannot_begin(stacks, slow):
    expected = plainly(stacks)
    with attach(stacks, RESIDENT, source=slow) as engine:
        stream(engine, stacks)
        stale = engine.run(step_visits(STEPS, engine.block_counts))
        engine.release_memory(BLOCK_BYTES)
        with pytest.raises(StateError, match=r"is absent with None: keep needs it to be done"):
            stale.__enter__()
        value, run = stream(engine, stacks)
        assert torch.equal(value, expected)
        assert fetched(run) == [BlockKey("low", 5)]
        engine.set_policy(OffloadPolicy.layerwise(3))
        stale = engine.run(step_visits(STEPS, engine.block_counts))
        engine.set_policy(LAYERWISE)
        with pytest.raises(ValueError, match="needs 4 buffers, the engine has 2: compile it again"):
            stale.__enter__()
        assert torch.equal(stream(engine, stacks)[0], expected)


def test_memory_from_inference_mode_serves_other_threads(stacks):
    expected = plainly(stacks)
    values = []
    with attach(stacks, OffloadPolicy.block_swap(3, 1)) as engine:
        engine.release_memory(ALL)
        with torch.inference_mode():
            values.append(stream(engine, stacks)[0])
        assert not any(buffer.memory.is_inference() for buffer in engine.buffers)
        values += in_threads([lambda: stream(engine, stacks)[0]])
    assert [torch.equal(value, expected) for value in values] == [True, True]


WIDTHS = [32, 128, 32, 128, 64]
BYTES = [2 * 8 * width * 4 for width in WIDTHS]


@pytest.mark.parametrize(
    ("policy", "counts", "nbytes", "ram_blocks"),
    [
        (OffloadPolicy.block_swap(3), [3, 1, 3, 1, 3], 2 * BYTES[1] + 2 * BYTES[4], 0),
        (OffloadPolicy.layerwise(1), [3] * 5, 2 * BYTES[1], 3),
        (RESIDENT, [1] * 5, sum(BYTES), 5),
    ],
    ids=["the largest are resident", "layerwise", "resident"],
)
def test_buffers_and_slots_have_the_sizes_of_their_blocks(policy, counts, nbytes, ram_blocks):
    blocks = [nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)) for width in WIDTHS]
    stacks = {"model": nn.ModuleList(blocks)}
    steps = ["model"] * 3
    ones = torch.ones(1, 8)
    expected = plainly(stacks, steps, ones)
    before = OffloadPolicy.block_swap(2, 2, source="pinned")
    source = SlowSource(ModuleSource(stacks), seed=0, longest_s=0.001)
    with attach(stacks, before, source=source) as engine, torch.no_grad():
        stream(engine, stacks, ["model"], ones)
        engine.set_policy(replace(policy, source="pinned", ram_blocks=ram_blocks))
        engine.release_memory(engine.loaded_bytes)
        value, run = stream(engine, stacks, steps, ones)
        assert torch.equal(value, expected)
        assert [sum(key.block == block for key in fetched(run)) for block in range(5)] == counts
        assert engine.loaded_bytes == nbytes
        in_ram = engine.ram.contents().values()
        assert engine.host_bytes == sum(in_pages(BYTES[key.block]) for key in in_ram)
        assert len(in_ram) == ram_blocks


def test_common_residents_are_not_fetched_again(stacks, slow):
    expected = plainly(stacks)
    with attach(stacks, RESIDENT, source=slow) as engine:
        stream(engine, stacks)
        assert len(slow.reads) == 2 * BLOCKS
        engine.set_policy(OffloadPolicy.block_swap(3, 1))
        assert engine.loaded_bytes == 5 * BLOCK_BYTES
        kept = set(engine.contents().values())
        assert keys("high", 0, 2, 4) <= kept
        value, run = stream(engine, stacks)
        assert torch.equal(value, expected)
        assert len(run.fetched) == 2 * BLOCKS - sum(key.expert == "high" for key in kept)
        engine.set_policy(RESIDENT)
        assert engine.loaded_bytes == 5 * BLOCK_BYTES, "new buffers take memory when they are used"
        before = set(engine.contents().values())
        value, run = stream(engine, stacks)
        assert torch.equal(value, expected)
        assert set(fetched(run)) == set(slow.formats) - before
        assert engine.loaded_bytes == 2 * BLOCKS * BLOCK_BYTES


def test_common_blocks_in_ram_are_not_read_again(stacks, slow):
    expected = plainly(stacks)
    with attach(stacks, IN_RAM, source=slow) as engine:

        def check(policy: OffloadPolicy, ram_blocks: int, reads: int) -> None:
            slow.reads.clear()
            engine.set_policy(policy)
            assert engine.host_bytes == ram_blocks * in_pages(BLOCK_BYTES)
            assert torch.equal(stream(engine, stacks)[0], expected)
            assert len(slow.reads) == reads

        stream(engine, stacks)
        swap = OffloadPolicy.block_swap(2, 1, source="pinned")
        for policy in (replace(IN_RAM, prefetch_blocks=3), swap, IN_RAM):
            check(policy, 2 * BLOCKS, 0)
        check(replace(IN_RAM, ram_blocks=4), 4, 2 * BLOCKS - 4)
        check(LAYERWISE, 0, 2 * BLOCKS)


@pytest.mark.parametrize(
    "wrong", [OffloadPolicy.block_swap(BLOCKS + 1), OffloadPolicy.block_swap(99, source="pinned")]
)
def test_a_policy_that_does_not_fit_changes_nothing(stacks, wrong):
    expected = plainly(stacks)
    with attach(stacks, OffloadPolicy.resident(source="pinned")) as engine:
        stream(engine, stacks)
        held = engine.contents()
        in_ram = engine.ram.contents()
        with pytest.raises(ValueError, match="blocks_to_swap"):
            engine.set_policy(wrong)
        assert (engine.contents(), engine.ram.contents()) == (held, in_ram)
        value, run = stream(engine, stacks)
        assert torch.equal(value, expected)
        assert run.fetched == []


@pytest.mark.parametrize("stop_at", [0, 3, 7])
def test_the_rest_of_a_run_under_a_smaller_policy(stacks, slow, stop_at):
    """After running out of memory, the failed visit is repeated with fewer resident blocks."""
    expected = plainly(stacks)
    values = [ONES]
    with attach(stacks, OffloadPolicy.block_swap(2, 2, source="pinned"), source=slow) as engine:
        visits = step_visits(STEPS, engine.block_counts)

        def go(visits, fail_at=None):
            fail = raise_at(fail_at, torch.OutOfMemoryError("no more"))
            with engine.run(visits) as run:
                for number, visit in enumerate(visits):
                    with run.visit(*visit):
                        fail(number)
                        values.append(stacks[visit.expert][visit.block](values[-1]))

        with pytest.raises(torch.OutOfMemoryError):
            go(visits, stop_at)
        smaller = OffloadPolicy.block_swap(5, 1, source="pinned")
        engine.set_policy(smaller)
        _, buffers = plan_residency(smaller, engine.block_counts)
        assert engine.loaded_bytes <= buffers * BLOCK_BYTES
        go(visits[stop_at:])
        assert torch.equal(values[-1], expected)
        assert set(slow.reads) == set(slow.formats)
        again = len(slow.reads) - len(slow.formats)
        assert again <= engine.ram.in_flight, "only reads that the error has cut short are repeated"


def test_buffers_freed_on_a_cpu_make_room_in_ram(stacks, monkeypatch):
    asked = []
    check = RamSlots.check_available
    expected = plainly(stacks)
    with attach(stacks, RESIDENT) as engine:
        stream(engine, stacks)

        def checked(slots: RamSlots, *needs: object, freed: int = 0) -> None:
            asked.append(freed)
            check(slots, *needs, freed=freed)

        monkeypatch.setattr(RamSlots, "check_available", checked)
        engine.set_policy(IN_RAM)
        assert asked == [(2 * BLOCKS - 2) * BLOCK_BYTES]
        assert torch.equal(stream(engine, stacks)[0], expected)
