"""Any visits, policies, RAM residency, read times, patches, stops and released memory in any order.

The results are bit-equal to those of plain blocks, and the transfers are the planned ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from wanstream.offload import BlockPatch, WeightPatch, host_bytes
from wanstream.offload.formats.layout import BlockFormat, block_format, tensor_views
from wanstream.offload.sources.module import ModuleSource
from wanstream.plan.programs import DIRECT, BlockKey, Visit
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.offload.fixtures import SlowSource
from wanstream.tests.support.offload.streaming import attach, patched

BLOCKS = 3
WIDTH = 16
NAMES = ("high", "low")
HIDDEN = torch.linspace(-1, 1, WIDTH)[None]

Stacks = dict[str, nn.ModuleList]


class HalfSource(ModuleSource):
    """Source with some blocks stored in bf16, to be decoded to exact fp32 weights."""

    def __init__(self, stacks: Stacks, decoded: frozenset[BlockKey]) -> None:
        super().__init__(stacks)
        self._halves: dict[BlockKey, BlockFormat] = {}
        for key in decoded:
            low = {name: (tuple(w.shape), torch.bfloat16) for name, w in self._weights[key].items()}
            self._halves[key] = block_format(low, torch.float32)
        self.formats |= self._halves

    def file_bytes(self, key: BlockKey) -> int:
        return self.formats[key].stored.nbytes

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        if key not in self._halves:
            super().read_block(key, into)
            return
        for name, view in tensor_views(into, self._halves[key].stored).items():
            host_bytes(view)[:] = host_bytes(self._weights[key][name].bfloat16())


KEYS = [BlockKey(name, block) for name in NAMES for block in range(BLOCKS)]
VISITS = st.lists(st.lists(st.sampled_from(KEYS), max_size=2 * BLOCKS), min_size=1, max_size=4).map(
    lambda steps: tuple(Visit(step, *key) for step, keys in enumerate(steps) for key in keys)
)
DEVICE = st.one_of(
    st.just(OffloadPolicy.resident()),
    st.builds(OffloadPolicy.layerwise, st.integers(0, 3)),
    st.builds(OffloadPolicy.block_swap, st.integers(0, BLOCKS), st.integers(0, 2)),
)
HOMES = st.one_of(
    st.just({"source": "file"}),
    st.just({"source": "pinned"}),
    st.builds(lambda n: {"source": "pinned", "ram_blocks": n}, st.integers(0, 2 * BLOCKS + 1)),
)
POLICIES = st.builds(lambda policy, homes: replace(policy, **homes), DEVICE, HOMES)


class Run(NamedTuple):
    """Changes before a run, and the run."""

    policy: OffloadPolicy
    strengths: tuple[int, ...]
    """Patch strength for each of `KEYS`, 0 for no patch."""
    released: int
    """Bytes to release."""
    visits: tuple[Visit, ...]
    stop_at: int
    """Visit before whose end the run stops."""
    leave: bool
    """Stop without an error, before the visit."""


RUNS = st.builds(
    Run,
    POLICIES,
    st.tuples(*[st.integers(0, 2)] * len(KEYS)),
    st.sampled_from([0, 0, 1, 1 << 60]),
    VISITS,
    st.integers(0, 24),
    st.booleans(),
)
DECODED = st.sampled_from([*map(frozenset, ((), KEYS, KEYS[::2], KEYS[:BLOCKS]))])


def patch_of(strength: float) -> BlockPatch:
    up = torch.full((3 * WIDTH, 2), 0.1 * strength)
    full = torch.full((WIDTH, 3 * WIDTH), 0.1 * strength)
    product = WeightPatch(up=up, down=torch.ones(2, WIDTH))
    weights = {"up.weight": product, "down.weight": WeightPatch(full=full)}
    return BlockPatch(identity=strength, weights=weights)


@pytest.fixture
def stacks(make_stack):
    stacks = {name: make_stack(BLOCKS, seed=seed, width=WIDTH) for seed, name in enumerate(NAMES)}
    for stack in stacks.values():
        for block in stack:
            for weight in (block.up.weight, block.down.weight):
                weight.copy_(weight.bfloat16())
    return stacks


def set_patches(engine, before, after):
    """Patch the blocks. All others are kept."""
    held = set(engine.contents().values())
    pairs = zip(KEYS, before, after, strict=True)
    changed = {key for key, *strengths in pairs if len(set(strengths)) == 2}
    strengths = zip(KEYS, after, strict=True)
    engine.set_patches({key: patch_of(each) for key, each in strengths if each})
    assert set(engine.contents().values()) == held - changed


def compute(engine, stacks, given, reads):
    """Run until the stop. Compare the transfers of a run without one with the plan."""
    value = HIDDEN
    before = len(reads)
    with engine.run(given.visits) as run:
        for number, visit in enumerate(given.visits):
            if number == given.stop_at and given.leave:
                run.leave()
                break
            with run.visit(*visit):
                if number == given.stop_at:
                    raise KeyboardInterrupt(value)
                value = stacks[visit.expert][visit.block](value)
    last = {fetch.buffer: fetch.block for fetch in run.fetched}
    assert last.items() <= engine.contents().items(), "issued blocks are there"
    if given.stop_at < len(given.visits):
        return value
    ram = run.programs.ram
    assert tuple(run.fetched) == run.program.fetches
    assert tuple(run.reads) == ram.program.fetches
    places = zip(run.fetched, ram.visit_of_fetch, strict=True)
    direct = [fetch.block for fetch, visit in places if visit == DIRECT]
    assert sorted(reads[before:]) == sorted(direct + [each.block for each in run.reads])
    last = {fetch.buffer: fetch.block for fetch in run.reads}
    assert last.items() <= engine.ram.contents().items()
    return value


@pytest.mark.parity
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs=st.lists(RUNS, min_size=1, max_size=5), decoded=DECODED, seed=st.integers(0, 1000))
def test_bits_and_transfers(stacks, runs, decoded, seed):
    patches = [{}, *(dict.fromkeys(KEYS, patch_of(strength)) for strength in (1, 2))]
    plain = [patched(stacks, each) for each in patches]
    source = SlowSource(HalfSource(stacks, decoded), seed=seed, longest_s=0.001)
    strengths = (0,) * len(KEYS)
    with attach(stacks, runs[0].policy, source=source) as engine:
        for given in runs:
            engine.set_policy(given.policy)
            set_patches(engine, strengths, given.strengths)
            strengths = given.strengths
            loaded = engine.loaded_bytes
            assert engine.release_memory(given.released) == loaded - engine.loaded_bytes
            try:
                value = compute(engine, stacks, given, source.reads)
            except KeyboardInterrupt as stopped:
                (value,) = stopped.args
            expected = HIDDEN
            for visit in given.visits[: given.stop_at]:
                strength = strengths[KEYS.index(visit.key)]
                expected = plain[strength][visit.expert][visit.block](expected)
            assert torch.equal(value, expected)
