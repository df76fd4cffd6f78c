"""RAM-resident blocks: reads follow the policy, also after errors and interrupts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from wanstream.offload.core.pages import in_pages
from wanstream.offload.formats.layout import block_format
from wanstream.offload.sources.base import SourceError
from wanstream.offload.sources.module import ModuleSource
from wanstream.plan.programs import BlockKey, step_visits
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.offload.fixtures import GatedSource
from wanstream.tests.support.offload.streaming import (
    BLOCK_BYTES,
    BLOCKS,
    IN_RAM,
    LAYERWISE,
    STEPS,
    attach,
    plainly,
    stream,
)


def some(blocks: int | None, **settings: int) -> OffloadPolicy:
    policy = OffloadPolicy.block_swap(**settings) if settings else LAYERWISE
    return replace(policy, source="pinned", ram_blocks=blocks)


@pytest.mark.parametrize(
    ("policy", "reads"),
    [
        (LAYERWISE, [36, 36]),
        (some(0), [36, 36]),
        # Three per expert. The other three are read in each step.
        (some(6), [6 + 18, 18]),
        (some(12), [12, 0]),
        # Streamed blocks. Residents are read once a stage.
        (some(6, blocks_to_swap=3), [6 + 6, 6]),
    ],
    ids=str,
)
def test_reads_of_two_runs(stacks, slow, policy, reads):
    steps = ["high"] * 3 + ["low"] * 3
    expected = plainly(stacks, steps)
    with attach(stacks, policy, source=slow) as engine:
        for count in reads:
            slow.reads.clear()
            value, run = stream(engine, stacks, steps)
            assert torch.equal(value, expected)
            assert len(slow.reads) == count
        assert run.reads == [], "other raw blocks are read straight into their buffer"
        assert engine.host_bytes == (policy.ram_blocks or 0) * in_pages(BLOCK_BYTES)
        assert engine.pinned_bytes == 0
    assert engine.host_bytes == 0


@pytest.mark.parametrize(("policy", "fail_at"), [(IN_RAM, 7), (some(5), 0), (LAYERWISE, 3)])
def test_a_failing_read_reaches_the_visit_that_needs_it(stacks, slow, policy, fail_at):
    """Earlier visits succeed: their blocks were read before."""
    expected = plainly(stacks)
    with attach(stacks, policy, source=slow) as engine:
        slow.fail_at = fail_at
        reached: list[int] = []
        with pytest.raises(SourceError, match="the disk went away at") as failed:
            stream(engine, stacks, during=reached.append)
        if policy.ram_blocks is None:  # the order of reads is the order of visits
            key = BlockKey(STEPS[len(reached) // BLOCKS], len(reached) % BLOCKS)
            assert str(key) in str(failed.value)
        contents = set(engine.ram.contents().values())
        assert contents <= set(slow.reads)
        slow.fail_at = None
        slow.reads.clear()
        assert torch.equal(stream(engine, stacks)[0], expected)
        assert not (contents if policy == IN_RAM else set()) & set(slow.reads)


def test_an_early_end_wakes_every_wait(stacks):
    """The read thread waits for a slot and the fetch thread for a visit. Both are woken."""
    source = GatedSource(stacks)
    with attach(stacks, some(2), source=source) as engine:
        visits = step_visits(STEPS, engine.block_counts)
        with engine.run(visits):
            source.opened.set()
        with engine.run(visits) as run, run.visit(0, "high", 0):
            pass


def test_too_much_ram_is_refused_before_anything_changes(stacks):
    source = ModuleSource(stacks)
    weight = stacks["high"][0].up.weight
    shapes = {"up.weight": ((1 << 44,), torch.uint8), "down.weight": ((1,), torch.uint8)}
    source.formats = dict.fromkeys(source.formats, block_format(shapes, torch.uint8))
    with pytest.raises(SourceError, match=r"GB of RAM for 12 blocks, .* GB are available"):
        attach(stacks, IN_RAM, source=source)
    assert stacks["high"][0].up.weight is weight
