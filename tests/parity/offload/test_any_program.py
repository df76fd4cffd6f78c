"""Any visits, policy, RAM residency and read times: bit-equal results, planned transfers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from wanstream.offload.core.pages import host_bytes
from wanstream.offload.formats.layout import BlockFormat, block_format, tensor_views
from wanstream.offload.sources.module import ModuleSource
from wanstream.plan.programs import DIRECT, BlockKey, Visit
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.offload.streaming import attach

BLOCKS, WIDTH = 3, 16
NAMES = ("high", "low")
HIDDEN = torch.linspace(-1, 1, WIDTH)[None]

Stacks = dict[str, nn.ModuleList]


class HalfSource(ModuleSource):
    """Source with some blocks stored in bf16, to be decoded to exact fp32 weights."""

    def __init__(self, stacks: Stacks, decoded: frozenset[BlockKey]) -> None:
        super().__init__(stacks)
        self._halves: dict[BlockKey, BlockFormat] = {}
        for key in decoded:
            stored = {
                name: (tuple(w.shape), torch.bfloat16) for name, w in self._weights[key].items()
            }
            self._halves[key] = block_format(stored, torch.float32)
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
VISITS = st.lists(
    st.lists(st.integers(0, 2 * BLOCKS - 1), max_size=2 * BLOCKS), min_size=1, max_size=4
).map(
    lambda steps: tuple(
        Visit(step, *KEYS[number]) for step, numbers in enumerate(steps) for number in numbers
    )
)
DEVICE = st.one_of(
    st.just(OffloadPolicy.resident()),
    st.builds(OffloadPolicy.layerwise, st.integers(0, 3)),
    st.builds(OffloadPolicy.block_swap, st.integers(0, BLOCKS), st.integers(0, 2)),
)
HOMES = st.one_of(
    st.just({"source": "file"}),
    st.just({"source": "pinned"}),
    st.builds(
        lambda blocks: {"source": "pinned", "ram_blocks": blocks}, st.integers(0, 2 * BLOCKS + 1)
    ),
)
POLICIES = st.builds(lambda policy, homes: replace(policy, **homes), DEVICE, HOMES)
DECODED = st.sampled_from(
    [frozenset(), frozenset(KEYS), frozenset(KEYS[::2]), frozenset(KEYS[:BLOCKS])]
)


@pytest.fixture
def stacks(make_stack: Callable[..., nn.ModuleList]) -> Stacks:
    stacks = {name: make_stack(BLOCKS, seed=seed, width=WIDTH) for seed, name in enumerate(NAMES)}
    for stack in stacks.values():
        for block in stack:
            for weight in (block.up.weight, block.down.weight):
                weight.copy_(weight.bfloat16())
    return stacks


def through(stacks: Stacks, visits: Sequence[Visit]) -> torch.Tensor:
    value = HIDDEN
    for visit in visits:
        value = stacks[visit.expert][visit.block](value)
    return value


@pytest.mark.parity
@pytest.mark.slow  # compares with runs of diffusers
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    runs=st.lists(st.tuples(VISITS, POLICIES), min_size=1, max_size=4),
    decoded=DECODED,
    seed=st.integers(0, 1000),
)
def test_bits_fetches_and_reads(stacks, slow_source, runs, decoded, seed):
    plain = copy.deepcopy(stacks)
    source = slow_source(HalfSource(stacks, decoded), seed=seed, longest_s=0.001)
    with attach(stacks, runs[0][1], source=source) as engine:
        for visits, policy in runs:
            engine.set_policy(policy)
            before = len(source.reads)
            value = HIDDEN
            with engine.run(visits) as run:
                for visit in visits:
                    with run.visit(*visit):
                        value = stacks[visit.expert][visit.block](value)
            assert torch.equal(value, through(plain, visits))
            assert tuple(run.fetched) == run.program.fetches
            ram = run.programs.ram
            assert tuple(run.reads) == ram.program.fetches
            places = zip(run.fetched, ram.visit_of_fetch, strict=True)
            direct = [fetch.block for fetch, visit in places if visit == DIRECT]
            read = [fetch.block for fetch in run.reads]
            assert sorted(source.reads[before:]) == sorted(read + direct)
            last = {fetch.buffer: fetch.block for fetch in run.reads}
            assert last.items() <= engine.ram.contents().items()
