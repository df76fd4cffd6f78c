"""RAM-resident blocks: reads follow the policy, also after errors, interrupts and changes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from wanstream.offload import BlockPatch, OffloadEngine, WeightPatch, attach_offload
from wanstream.offload.core.pages import in_pages
from wanstream.offload.engine.run import EngineRun
from wanstream.offload.formats import read_header
from wanstream.offload.formats.layout import block_format
from wanstream.offload.sources import FileSource
from wanstream.offload.sources.base import SourceError
from wanstream.offload.sources.module import ModuleSource
from wanstream.plan.programs import BlockKey, Visit, step_visits
from wanstream.schema import OffloadPolicy
from wanstream.telemetry import Recorder

CPU = torch.device("cpu")
BLOCKS, WIDTH = 6, 32
BLOCK_BYTES = 2 * 3 * WIDTH * WIDTH * 4
ALL_IN_RAM = OffloadPolicy.layerwise(1, source="pinned")

Stacks = dict[str, nn.ModuleList]


@pytest.fixture
def stacks(make_stack: Callable[..., nn.ModuleList]) -> Stacks:
    return {"high": make_stack(BLOCKS, seed=1), "low": make_stack(BLOCKS, seed=2)}


@pytest.fixture
def source(stacks: Stacks, slow_source):
    return slow_source(ModuleSource(stacks), seed=0, longest_s=0.001)


def some(blocks: int, **settings: int) -> OffloadPolicy:
    policy = OffloadPolicy.block_swap(**settings) if settings else OffloadPolicy.layerwise(1)
    return replace(policy, source="pinned", ram_blocks=blocks)


def attach(stacks: Stacks, policy: OffloadPolicy, source) -> OffloadEngine:
    return attach_offload(stacks, policy=policy, device=CPU, source=source, follow_forward=False)


def run_through(
    handle: OffloadEngine, stacks: Stacks, steps: Sequence[str]
) -> tuple[torch.Tensor, EngineRun]:
    value = torch.ones(1, WIDTH)
    with handle.run(step_visits(steps, handle.block_counts)) as run:
        for visit in run.program.visits:
            with run.visit(*visit):
                value = stacks[visit.expert][visit.block](value)
    return value, run


def plainly(stacks: Stacks, steps: Sequence[str]) -> torch.Tensor:
    value = torch.ones(1, WIDTH)
    for name in steps:
        for block in copy.deepcopy(stacks)[name]:
            value = block(value)
    return value


def test_a_home_that_is_kept_is_read_once_and_never_again(stacks, source):
    steps = ["high", "high", "low"]
    expected = plainly(stacks, steps)
    other = BlockPatch(
        identity=1, weights={"up.weight": WeightPatch(full=torch.zeros(3 * WIDTH, WIDTH))}
    )
    with attach(stacks, ALL_IN_RAM, source) as handle:
        for change in range(3):
            assert torch.equal(run_through(handle, stacks, steps)[0], expected)
            handle.set_patches({BlockKey("high", change): other})
            handle.release_memory(1 << 60)
            handle.set_policy(replace(ALL_IN_RAM, prefetch_blocks=change))
        assert sorted(source.reads) == sorted(source.formats)
        assert handle.host_bytes == 2 * BLOCKS * in_pages(BLOCK_BYTES) + in_pages(
            3 * WIDTH * WIDTH * 4
        )


@pytest.mark.parametrize(
    ("policy", "reads"),
    [
        (OffloadPolicy.layerwise(1), [36, 36]),
        (some(0), [36, 36]),
        (
            some(6),
            [6 + 18, 18],
        ),  # three per expert. The other three are read in each step.
        (some(12), [12, 0]),
        (
            some(6, blocks_to_swap=3),
            [6 + 6, 6],
        ),  # streamed blocks. Residents are read once a stage.
    ],
    ids=str,
)
def test_reads_of_two_runs(stacks, source, policy, reads):
    steps = ["high"] * 3 + ["low"] * 3
    expected = plainly(stacks, steps)
    with attach(stacks, policy, source) as handle:
        for count in reads:
            source.reads.clear()
            assert torch.equal(run_through(handle, stacks, steps)[0], expected)
            assert len(source.reads) == count
        resident = policy.ram_blocks or 0
        assert handle.host_bytes == resident * in_pages(BLOCK_BYTES)
        assert handle.pinned_bytes == 0
    assert handle.host_bytes == 0


@pytest.mark.parametrize("fail_at", [0, 3, 7])
@pytest.mark.parametrize("policy", [ALL_IN_RAM, some(5)], ids=str)
def test_a_failing_read_reaches_the_visit_that_needs_it(stacks, source, policy, fail_at):
    """Earlier visits succeed: their blocks were read before."""
    steps = ["high", "low"]
    expected = plainly(stacks, steps)
    with attach(stacks, policy, source) as handle:
        source.fail_at = fail_at
        reached: list[Visit] = []
        with pytest.raises(SourceError, match="the disk went away at") as failed:
            with handle.run(step_visits(steps, handle.block_counts)) as run:
                for visit in run.program.visits:
                    with run.visit(*visit):
                        reached.append(visit)
        if policy == ALL_IN_RAM:
            assert str(run.program.visits[len(reached)].key) in str(failed.value)
        contents = set(handle.ram.contents().values())
        assert contents <= set(source.reads)
        source.fail_at = None
        source.reads.clear()
        assert torch.equal(run_through(handle, stacks, steps)[0], expected)
        assert not (contents if policy == ALL_IN_RAM else set()) & set(source.reads)


@pytest.mark.parametrize("policy", [ALL_IN_RAM, some(5)], ids=str)
@pytest.mark.parametrize("stop_at", [0, 1, 5, 8])
def test_what_had_not_arrived_in_an_interrupted_run_is_forgotten(stacks, source, policy, stop_at):
    steps = ["high", "low"]
    expected = plainly(stacks, steps)
    with attach(stacks, policy, source) as handle:
        with (
            pytest.raises(KeyboardInterrupt),
            handle.run(step_visits(steps, handle.block_counts)) as run,
        ):
            for number, visit in enumerate(run.program.visits):
                with run.visit(*visit):
                    if number == stop_at:
                        raise KeyboardInterrupt
        contents = handle.ram.contents()
        last = {fetch.buffer: fetch.block for fetch in run.reads}
        assert {index: contents.get(index) for index in last} == last, (
            "every read that ended left its block whole"
        )
        assert torch.equal(run_through(handle, stacks, steps)[0], expected)
    assert [
        t.name
        for t in threading.enumerate()
        if t.name.startswith(("wanstream-fetch", "wanstream-ram", "wanstream-read"))
    ] == []


def test_an_early_end_wakes_every_wait(stacks):
    """The read thread waits for a slot and the fetch thread for a visit. Both are woken."""
    gate = threading.Event()

    class Gate(ModuleSource):
        def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
            gate.wait(60)
            super().read_block(key, into)

    with attach(stacks, some(2), Gate(stacks)) as handle:
        with handle.run(step_visits(["high", "low"], handle.block_counts)):
            gate.set()
        with handle.run(step_visits(["high", "low"], handle.block_counts)) as run:
            with run.visit(0, "high", 0):
                pass


@pytest.fixture
def fp16_file(tmp_path: Path) -> Callable[[], FileSource]:
    """One-matrix blocks, decoded to fp32 on arrival."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"{i}": torch.randn(WIDTH, WIDTH, generator=generator).half() for i in range(BLOCKS)}
    save_file(weights, tmp_path / "blocks.safetensors")
    places = read_header(tmp_path / "blocks.safetensors").tensors
    blocks = {BlockKey("high", i): {"weight": places[f"{i}"]} for i in range(BLOCKS)}
    return lambda: FileSource(blocks, computed_dtypes=torch.float32)


def test_the_timeline_counts_reads_and_decoding(fp16_file):
    blocks = [nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(BLOCKS)]
    nbytes = WIDTH * WIDTH * 2
    for policy, reads in (
        (OffloadPolicy.layerwise(1), [BLOCKS, BLOCKS]),
        (replace(OffloadPolicy.layerwise(1), source="pinned"), [BLOCKS, 0]),
        (some(2), [BLOCKS, BLOCKS - 2]),
        (OffloadPolicy.resident(), [BLOCKS, 0]),
    ):
        recorder = Recorder(CPU)
        with attach({"high": blocks}, policy, fp16_file()) as handle:
            with handle.run(
                step_visits(["high"] * 2, handle.block_counts), recorder=recorder
            ) as run:
                for step in range(2):
                    with recorder.step(step, "high"):
                        for block in range(BLOCKS):
                            with run.visit(step, "high", block):
                                pass
            steps = recorder.timeline().steps
            assert [step.transfers.read_bytes for step in steps] == [
                count * nbytes for count in reads
            ]
            moved = [BLOCKS, 0 if policy.kind == "resident" else BLOCKS]
            assert [step.bytes_moved for step in steps] == [count * nbytes for count in moved]
            for step, count in zip(steps, moved, strict=True):
                assert (step.decode_s > 0) == (count > 0)
                assert step.wall_s >= step.compute_s + step.stall_s + step.decode_s


def test_raw_blocks_without_a_home_are_read_straight_into_their_buffer(stacks, source):
    with attach(stacks, some(4), source) as handle:
        run_through(handle, stacks, ["high", "low"])
        _, run = run_through(handle, stacks, ["high", "low"])
        assert run.reads == []
        assert handle.host_bytes == 4 * in_pages(BLOCK_BYTES)


def test_more_ram_than_there_is_is_refused_before_anything_changes(stacks):
    source = ModuleSource(stacks)
    huge = block_format(
        {"up.weight": ((1 << 44,), torch.uint8), "down.weight": ((1,), torch.uint8)}, torch.uint8
    )
    source.formats = dict.fromkeys(source.formats, huge)
    before = stacks["high"][0].up.weight
    with pytest.raises(SourceError, match=r"GB of RAM for 12 blocks, .* GB are available"):
        attach(stacks, ALL_IN_RAM, source)
    assert stacks["high"][0].up.weight is before
