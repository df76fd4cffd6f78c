"""Sharded blocks, with ranks as threads: equal bits, and an equal share per rank."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from wanstream.offload import BlockPatch, WeightPatch, attach_offload
from wanstream.offload.formats.safetensors_header import read_header
from wanstream.offload.sharding.group import (
    GatherBrokenError,
    GatheringState,
    ProgramMismatchError,
    Sharded,
    StoppedTogether,
    shard_bytes,
)
from wanstream.offload.sources.file import FileSource
from wanstream.offload.sources.quantised import QuantisedSource
from wanstream.plan.programs import BlockKey, step_visits
from wanstream.schema import OffloadPolicy

BLOCKS = 6
WIDTH = 40
WEIGHTS = ("up.weight", "down.weight")
BLOCK_BYTES = 2 * 3 * WIDTH * WIDTH * 4
POLICIES = {
    "resident": OffloadPolicy.resident(),
    "layerwise": OffloadPolicy.layerwise(1),
    "block swap": OffloadPolicy.block_swap(3, 2),
    "pinned": OffloadPolicy.layerwise(1, source="pinned"),
    "some at home": OffloadPolicy(
        kind="layerwise", prefetch_blocks=1, blocks_to_swap=0, source="pinned", ram_blocks=2
    ),
}
STEPS = ("high", "high", "low")


@pytest.fixture
def stack(make_stack: Callable[..., nn.ModuleList]) -> nn.ModuleList:
    return make_stack(2 * BLOCKS, width=WIDTH)


@pytest.fixture
def path(stack: nn.ModuleList, tmp_path: Path) -> Path:
    tensors = {f"{i}.{w}": stack[i].get_parameter(w) for i in range(2 * BLOCKS) for w in WEIGHTS}
    save_file(tensors, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


class Stopped(StoppedTogether):
    """All ranks were requested to stop."""


MADE: list[Rank] = []


@pytest.fixture(autouse=True)
def detached_ranks() -> Iterator[None]:
    """Detach a test's ranks, so their reader threads end with the test."""
    yield
    while MADE:
        MADE.pop().handle.detach()


class Rank:
    """Two copied stacks, streamed from their file."""

    def __init__(
        self,
        stack: nn.ModuleList,
        path: Path,
        policy: OffloadPolicy,
        sharded: Sharded | None,
        *,
        fp8: bool = False,
        device: str = "cpu",
    ) -> None:
        tensors = read_header(path).tensors
        keys = [BlockKey(name, i) for name in ("high", "low") for i in range(BLOCKS)]
        places = {key: {w: tensors[f"{n}.{w}"] for w in WEIGHTS} for n, key in enumerate(keys)}
        self.files = FileSource(places, computed_dtypes=torch.float32, direct=False)
        source = QuantisedSource(self.files) if fp8 else self.files
        self.device = device
        self.stacks = {"high": copy.deepcopy(stack[:BLOCKS]), "low": copy.deepcopy(stack[BLOCKS:])}
        self.handle = attach_offload(
            self.stacks,
            policy=policy,
            device=device,
            source=source,
            follow_forward=False,
            sharded=sharded,
        )
        MADE.append(self)

    def run(
        self, steps: Sequence[str] = STEPS, *, before: Callable[[int], None] = lambda visit: None
    ) -> torch.Tensor:
        hidden = torch.ones(3, WIDTH, device=self.device)
        visits = step_visits(steps, self.handle.block_counts)
        with self.handle.run(visits) as run:
            for number, visit in enumerate(visits):
                before(number)
                with run.visit(*visit):
                    hidden = self.stacks[visit.expert][visit.block](hidden) / 2
        self.fetched = len(run.fetched)
        return hidden.cpu()


def patches() -> dict[BlockKey, BlockPatch]:
    generator = torch.Generator().manual_seed(3)
    up, down = (
        torch.randn(3 * WIDTH, 2, generator=generator),
        torch.randn(2, WIDTH, generator=generator),
    )
    return {
        BlockKey("high", 1): BlockPatch(
            identity="lora", weights={"up.weight": WeightPatch(up=up, down=down)}
        )
    }


def in_threads(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run each job on a separate thread, and return results or errors."""
    results: list[Any] = [None] * len(jobs)

    def do(number: int) -> None:
        try:
            results[number] = jobs[number]()
        except (Stopped, MemoryError, GatherBrokenError, ProgramMismatchError) as err:
            results[number] = err

    threads = [
        threading.Thread(target=do, args=(number,), daemon=True) for number in range(len(jobs))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return results


@pytest.fixture
def make_ranks(stack: nn.ModuleList, path: Path) -> Callable[..., list[Rank]]:
    def make(ranks: Sequence[Sharded], policy: str, **how: Any) -> list[Rank]:
        return [Rank(stack, path, POLICIES[policy], sharded, **how) for sharded in ranks]

    return make


@pytest.mark.parametrize(
    ("policy", "fp8", "on_device"),
    # Shards in RAM and on the device with every policy, and both with fp8.
    [
        (policy, at % 2 == on_device, on_device)
        for at, policy in enumerate(POLICIES)
        for on_device in (False, True)
    ],
)
def test_gathered_blocks_are_whole_blocks_bit_for_bit(
    stack, path, make_ranks, thread_group, policy, fp8, on_device
):
    alone = Rank(stack, path, POLICIES[policy], None, fp8=fp8)
    alone.handle.set_patches(patches())
    expected = [alone.run(), alone.run(("low",))]
    group = thread_group(3)
    ranks = make_ranks(group.ranks(on_device=on_device), policy, fp8=fp8)
    for rank in ranks:
        rank.handle.set_patches(patches())
    for steps, value in zip((STEPS, ("low",)), expected, strict=True):
        for result in in_threads(
            [lambda rank=rank, steps=steps: rank.run(steps) for rank in ranks]
        ):
            assert torch.equal(result, value)
    assert len(set(group.gathers)) == 1
    for rank in ranks:
        rank.handle.detach()
    alone.handle.detach()


@pytest.mark.parametrize(
    ("policy", "on_device", "passes"),
    [("layerwise", False, 2), ("pinned", False, 1), ("layerwise", True, 1)],
)
@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_reads_its_share_of_the_file(
    make_ranks, thread_group, policy, on_device, passes, size
):
    group = thread_group(size)
    ranks = make_ranks(group.ranks(on_device=on_device), policy)
    for _ in range(2):
        in_threads([lambda rank=rank: rank.run(("high",)) for rank in ranks])
    read = [rank.files.reader.bytes_read for rank in ranks]
    ahead = (
        BLOCKS * BLOCK_BYTES if passes > 1 else 0
    )  # at most: prefetched for the expected next run
    assert passes * BLOCKS * BLOCK_BYTES <= sum(read) <= passes * BLOCKS * BLOCK_BYTES + ahead
    assert max(read) - min(read) <= passes * BLOCKS * size * 256 + ahead
    shard = shard_bytes(BLOCK_BYTES, size)
    kept = ranks[0].handle.ram
    assert (kept.device_bytes if on_device else 0) == (BLOCKS * shard if on_device else 0)
    for rank in ranks:
        rank.handle.detach()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stop", [0, 1, 5, 11])
def test_ranks_that_stop_before_the_same_visit_go_on_together(
    stack, path, make_ranks, thread_group, policy, stop
):
    alone = Rank(stack, path, POLICIES[policy], None)
    expected = alone.run()
    group = thread_group(2)
    ranks = make_ranks(group.ranks(), policy)

    def halt(visit: int) -> None:
        if visit == stop:
            raise Stopped

    for _ in range(2):
        stopped = in_threads([lambda rank=rank: rank.run(before=halt) for rank in ranks])
        assert [type(result) for result in stopped] == [Stopped, Stopped]
        assert group.gathers[0] == group.gathers[1]
        assert [rank.handle.route.gathering.state for rank in ranks] == [GatheringState.IDLE] * 2
    for result in in_threads([rank.run for rank in ranks]):
        assert torch.equal(result, expected)


def test_a_run_that_fails_on_one_rank_breaks_the_group_until_they_meet_anew(
    stack, path, make_ranks, thread_group
):
    alone = Rank(stack, path, POLICIES["pinned"], None)
    expected = alone.run()
    ranks = make_ranks(thread_group(2).ranks(), "pinned")

    def fail(visit: int) -> None:
        if visit == 4:
            raise MemoryError("no room")

    first, second = in_threads([lambda: ranks[0].run(before=fail), ranks[1].run])
    assert isinstance(first, MemoryError)
    assert isinstance(second, GatherBrokenError)
    for rank in ranks:
        assert rank.handle.route.gathering.state is GatheringState.BROKEN
        with pytest.raises(GatherBrokenError, match="restart the worker group"):
            rank.run()
    for rank, sharded in zip(ranks, thread_group(2).ranks(), strict=True):
        rank.handle.meet(sharded)
    for result in in_threads([rank.run for rank in ranks]):
        assert torch.equal(result, expected)
    assert sum(rank.files.reader.bytes_read for rank in ranks) == 2 * BLOCKS * BLOCK_BYTES, (
        "shards that were read stay"
    )


def test_a_rank_that_comes_anew_finds_the_others_with_empty_buffers(
    stack, path, make_ranks, thread_group
):
    expected = Rank(stack, path, POLICIES["resident"], None).run()
    ranks = make_ranks(thread_group(2).ranks(), "resident")
    in_threads([rank.run for rank in ranks])
    sharded = thread_group(2).ranks()
    ranks[1] = Rank(stack, path, POLICIES["resident"], sharded[1])
    ranks[0].handle.meet(sharded[0])
    for result in in_threads([rank.run for rank in ranks]):
        assert torch.equal(result, expected)


def test_ranks_with_other_programs_are_told_so_before_anything_is_gathered(
    stack, path, thread_group
):
    group = thread_group(2)
    policies = ("layerwise", "resident")
    ranks = [
        Rank(stack, path, POLICIES[p], s) for p, s in zip(policies, group.ranks(), strict=True)
    ]
    for number, error in enumerate(in_threads([rank.run for rank in ranks])):
        assert isinstance(error, ProgramMismatchError)
        assert f"rank {number} of 2 is about to stream other blocks than rank {1 - number}" in str(
            error
        )
    assert group.gathers == [0, 0]
    steps = [("high",), ("low",)]
    errors = in_threads(
        [lambda rank=rank, s=s: rank.run(s) for rank, s in zip(ranks, steps, strict=True)]
    )
    assert all(isinstance(error, ProgramMismatchError) for error in errors)


def test_no_gather_is_more_than_a_few_blocks_ahead(make_ranks, thread_group):
    group = thread_group(2)
    ranks = make_ranks(group.ranks(), "resident")
    seen: list[int] = []

    def look(visit: int) -> None:
        if visit in (0, 4):
            time.sleep(0.2)  # time for all ranks to go as far as they can
        seen.append(max(group.gathers) - visit)

    in_threads([lambda rank=rank: rank.run(before=look) for rank in ranks])
    assert max(seen) <= 3


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_on_a_gpu_too(gpu, stack, path, make_ranks, thread_group, policy, fp8, on_device):
    def run(rank):
        gpu.runtime.enter_thread()
        return rank.run()

    alone = Rank(stack, path, POLICIES[policy], None, fp8=fp8, device=gpu.device)
    alone.handle.set_patches(patches())
    expected = alone.run()
    alone.handle.detach()
    ranks = make_ranks(
        thread_group(2).ranks(on_device=on_device), policy, fp8=fp8, device=gpu.device
    )
    for rank in ranks:
        rank.handle.set_patches(patches())
    for _ in range(2):
        for result in in_threads([partial(run, rank) for rank in ranks]):
            assert torch.equal(result, expected)
    for rank in ranks:
        rank.handle.detach()
    MADE.clear()  # the device is checked before `detached_ranks` ends
