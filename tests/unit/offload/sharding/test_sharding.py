"""Sharded blocks, with ranks as threads: equal bits, and an equal share per rank."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from wanstream.offload import BlockPatch, GatherBrokenError, Sharded, WeightPatch, shard_bytes
from wanstream.offload.formats.safetensors_header import read_header
from wanstream.offload.sharding.group import GatheringState, ProgramMismatchError, StoppedTogether
from wanstream.offload.sources.file import FileSource
from wanstream.offload.sources.quantised import QuantisedSource
from wanstream.plan.programs import BlockKey, step_visits
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.offload.fixtures import ThreadGroup, in_threads
from wanstream.tests.support.offload.streaming import BLOCKS, IN_RAM, LAYERWISE, attach

WIDTH = 40
WEIGHTS = ("up.weight", "down.weight")
BLOCK_BYTES = 2 * 3 * WIDTH * WIDTH * 4
POLICIES = {
    "resident": OffloadPolicy.resident(),
    "layerwise": LAYERWISE,
    "block swap": OffloadPolicy.block_swap(3, 2),
    "pinned": IN_RAM,
    "some in RAM": replace(IN_RAM, ram_blocks=2),
}
STEPS = ("high", "high", "low")


class Stopped(StoppedTogether):
    """All ranks were requested to stop."""


class Rank:
    """Two copied stacks, streamed from their file."""

    def __init__(self, stack, path, policy, sharded, *, fp8=False) -> None:
        tensors = read_header(path).tensors
        keys = [BlockKey(name, i) for name in ("high", "low") for i in range(BLOCKS)]
        places = {key: {w: tensors[f"{n}.{w}"] for w in WEIGHTS} for n, key in enumerate(keys)}
        self.files = FileSource(places, computed_dtypes=torch.float32, direct=False)
        source = QuantisedSource(self.files) if fp8 else self.files
        self.stacks = {"high": copy.deepcopy(stack[:BLOCKS]), "low": copy.deepcopy(stack[BLOCKS:])}
        self.engine = attach(self.stacks, POLICIES[policy], source=source, sharded=sharded)

    def run(self, steps=STEPS, *, before=lambda visit: None) -> torch.Tensor:
        hidden = torch.ones(3, WIDTH)
        visits = step_visits(steps, self.engine.block_counts)
        with self.engine.run(visits) as run:
            for number, visit in enumerate(visits):
                before(number)
                with run.visit(*visit):
                    hidden = self.stacks[visit.expert][visit.block](hidden) / 2
        return hidden

    def patch(self) -> None:
        generator = torch.Generator().manual_seed(3)
        shapes = ((3 * WIDTH, 2), (2, WIDTH))
        up, down = (torch.randn(shape, generator=generator) for shape in shapes)
        patch = BlockPatch(identity="lora", weights={"up.weight": WeightPatch(up=up, down=down)})
        self.engine.set_patches({BlockKey("high", 1): patch})


@pytest.fixture
def make_rank(make_stack, tmp_path) -> Iterator[Callable[..., Rank]]:
    """Make ranks, and detach them at the end: their reader threads end with the test."""
    stack = make_stack(2 * BLOCKS, width=WIDTH)
    path = tmp_path / "x.safetensors"
    made = []
    tensors = {f"{i}.{w}": stack[i].get_parameter(w) for i in range(2 * BLOCKS) for w in WEIGHTS}
    save_file(tensors, path)

    def make(policy: str, sharded: Sharded | None = None, **how: Any) -> Rank:
        made.append(Rank(stack, path, policy, sharded, **how))
        return made[-1]

    yield make
    for rank in made:
        rank.engine.detach()


def run_all(ranks: Sequence[Rank], *steps: Sequence[str], **how: Any) -> list[Any]:
    return in_threads([partial(rank.run, *steps, **how) for rank in ranks])


def all_equal(results: Sequence[torch.Tensor], expected: torch.Tensor) -> bool:
    return all(torch.equal(result, expected) for result in results)


# Shards in RAM and on the device, raw and as fp8.
CASES = [(policy, at in (2, 3), at % 2 == 1) for at, policy in enumerate(POLICIES)]


@pytest.mark.parametrize(("policy", "fp8", "on_device"), CASES)
def test_gathered_blocks_are_whole_blocks(make_rank, policy, fp8, on_device):
    alone = make_rank(policy, fp8=fp8)
    group = ThreadGroup(3)
    ranks = [make_rank(policy, each, fp8=fp8) for each in group.ranks(on_device=on_device)]
    for rank in (alone, *ranks):
        rank.patch()
    for steps in (STEPS, ("low",)):
        assert all_equal(run_all(ranks, steps), alone.run(steps))
    assert len(set(group.gathers)) == 1


SHARES = [("layerwise", False, 2, 2), ("pinned", False, 1, 4), ("layerwise", True, 1, 4)]


@pytest.mark.parametrize(("policy", "on_device", "passes", "size"), SHARES)
def test_each_rank_reads_its_share(make_rank, policy, on_device, passes, size):
    ranks = [make_rank(policy, each) for each in ThreadGroup(size).ranks(on_device=on_device)]
    for _ in range(2):
        run_all(ranks, ("high",))
    read = [rank.files.reader.bytes_read for rank in ranks]
    whole = BLOCKS * BLOCK_BYTES
    ahead = whole if passes > 1 else 0  # at most: prefetched for the expected next run
    assert passes * whole <= sum(read) <= passes * whole + ahead
    assert max(read) - min(read) <= passes * BLOCKS * size * 256 + ahead
    if on_device:
        assert ranks[0].engine.ram.device_bytes == BLOCKS * shard_bytes(BLOCK_BYTES, size)


@pytest.mark.parametrize(("policy", "stop"), [*zip(POLICIES, (0, 1, 5, 11, 5), strict=True)])
def test_ranks_that_stop_together_go_on_together(make_rank, policy, stop):
    expected = make_rank(policy).run()
    group = ThreadGroup(2)
    ranks = [make_rank(policy, each) for each in group.ranks()]

    def halt(visit: int) -> None:
        if visit == stop:
            raise Stopped

    for _ in range(2):
        stopped = run_all(ranks, before=halt)
        assert [type(result) for result in stopped] == [Stopped, Stopped]
        assert group.gathers[0] == group.gathers[1]
        assert [rank.engine.route.gathering.state for rank in ranks] == [GatheringState.IDLE] * 2
    assert all_equal(run_all(ranks), expected)


def test_a_failure_on_one_rank_breaks_the_group_until_they_meet(make_rank):
    expected = make_rank("pinned").run()
    ranks = [make_rank("pinned", each) for each in ThreadGroup(2).ranks()]

    def fail(visit: int) -> None:
        if visit == 4:
            raise MemoryError("no room")

    first, second = in_threads([lambda: ranks[0].run(before=fail), ranks[1].run])
    assert isinstance(first, MemoryError)
    assert isinstance(second, GatherBrokenError)
    for rank in ranks:
        assert rank.engine.route.gathering.state is GatheringState.BROKEN
        with pytest.raises(GatherBrokenError, match="restart the worker group"):
            rank.run()
    for rank, sharded in zip(ranks, ThreadGroup(2).ranks(), strict=True):
        rank.engine.meet(sharded)
    assert all_equal(run_all(ranks), expected)
    read = sum(rank.files.reader.bytes_read for rank in ranks)
    assert read == 2 * BLOCKS * BLOCK_BYTES, "shards that were read stay"


def test_a_new_rank_finds_the_others_with_empty_buffers(make_rank):
    expected = make_rank("resident").run()
    ranks = [make_rank("resident", each) for each in ThreadGroup(2).ranks()]
    run_all(ranks)
    sharded = ThreadGroup(2).ranks()
    ranks[1] = make_rank("resident", sharded[1])
    ranks[0].engine.meet(sharded[0])
    assert all_equal(run_all(ranks), expected)


def test_ranks_with_other_programs_are_refused_before_a_gather(make_rank):
    group = ThreadGroup(2)
    one, other = group.ranks()
    ranks = [make_rank("layerwise", one), make_rank("resident", other)]
    for number, error in enumerate(run_all(ranks)):
        assert isinstance(error, ProgramMismatchError)
        words = f"rank {number} of 2 is about to stream other blocks than rank {1 - number}"
        assert words in str(error)
    assert group.gathers == [0, 0]
    errors = in_threads([partial(ranks[0].run, ("high",)), partial(ranks[1].run, ("low",))])
    assert all(isinstance(error, ProgramMismatchError) for error in errors)


def test_no_gather_is_more_than_a_few_blocks_ahead(make_rank):
    group = ThreadGroup(2)
    seen = list[int]()

    def look(visit: int) -> None:
        if visit in (0, 4):
            time.sleep(0.2)  # time for all ranks to go as far as they can
        seen.append(max(group.gathers) - visit)

    run_all([make_rank("resident", each) for each in group.ranks()], before=look)
    assert max(seen) <= 3
