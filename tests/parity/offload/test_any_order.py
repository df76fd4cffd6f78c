"""Runs, aborted runs, early stops, new patches and released memory in any order.

Results are compared with a fresh engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wanstream.offload import BlockPatch, OffloadEngine, WeightPatch
from wanstream.plan.programs import BlockKey, Visit, step_visits
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.offload.streaming import attach

BLOCKS, WIDTH = 3, 16
BUFFER_BYTES = 2 * 3 * WIDTH * WIDTH * 4
POLICIES = [
    OffloadPolicy.resident(),
    OffloadPolicy.layerwise(0),
    OffloadPolicy.layerwise(2),
    OffloadPolicy.block_swap(1, 1),
    OffloadPolicy.block_swap(2, 0, source="pinned"),
]
KEYS = [BlockKey(name, block) for name in ("high", "low") for block in range(BLOCKS)]
HIDDEN = torch.linspace(-1, 1, WIDTH)[None]
STEPS = st.lists(st.sampled_from(["high", "low"]), min_size=1, max_size=3).map(tuple)
VISITS = st.integers(0, 2 * BLOCKS)


class Run(NamedTuple):
    steps: tuple[str, ...]
    stop_at: int | None
    """Visit where the run is interrupted, or None for a complete run."""


class LeaveEarly(NamedTuple):
    steps: tuple[str, ...]
    visits: int
    """Visits before the run stops early."""


class Patch(NamedTuple):
    strengths: tuple[int, ...]
    """Patch strength for each block in both experts, 0 for no patch."""


class Release(NamedTuple):
    buffers: int


ACTIONS = st.one_of(
    st.builds(Run, STEPS, st.none() | VISITS),
    st.builds(LeaveEarly, STEPS, VISITS),
    st.builds(Patch, st.tuples(*[st.integers(0, 2)] * (2 * BLOCKS))),
    st.builds(Release, VISITS),
)


def patch_of(strength: float) -> BlockPatch:
    up = torch.full((3 * WIDTH, 2), 0.1 * strength)
    down = torch.ones(2, WIDTH)
    full = torch.full((WIDTH, 3 * WIDTH), 0.1 * strength)
    weights = {"up.weight": WeightPatch(up=up, down=down), "down.weight": WeightPatch(full=full)}
    return BlockPatch(identity=strength, weights=weights)


class Engine:
    """An engine, and for every strength the same blocks with the patch merged into the weights."""

    def __init__(self, make_stack, policy: OffloadPolicy) -> None:
        def make() -> dict:
            names = enumerate(("high", "low"))
            return {name: make_stack(BLOCKS, seed=seed, width=WIDTH) for seed, name in names}

        self.stacks = make()
        self.strengths = (0,) * 2 * BLOCKS
        self._plain = [make() for _ in range(3)]
        for strength in (1, 2):
            weights = patch_of(strength).weights
            up = weights["up.weight"]
            down = weights["down.weight"]
            for key in KEYS:
                block = self._plain[strength][key.expert][key.block]
                block.up.weight.copy_(torch.addmm(block.up.weight, up.up, up.down))
                block.down.weight.copy_(block.down.weight + down.full)
        self.engine: OffloadEngine = attach(self.stacks, policy)

    def plain(self, visits: Sequence[Visit]) -> torch.Tensor:
        value = HIDDEN
        for visit in visits:
            strength = self.strengths[KEYS.index(visit.key)]
            value = self._plain[strength][visit.expert][visit.block](value)
        return value

    def run(self, steps: Sequence[str], stop_at: int | None) -> None:
        value = HIDDEN
        visits = step_visits(steps, self.engine.block_counts)
        try:
            with self.engine.run(visits) as run:
                for number, visit in enumerate(visits):
                    with run.visit(*visit):
                        if number == stop_at:
                            raise KeyboardInterrupt
                        value = self.stacks[visit.expert][visit.block](value)
        except KeyboardInterrupt:
            assert stop_at is not None
            visits = visits[:stop_at]
        assert torch.equal(value, self.plain(visits))

    def leave_early(self, steps: Sequence[str], visits: int) -> None:
        value = HIDDEN
        planned = step_visits(steps, self.engine.block_counts)
        with self.engine.run(planned) as run:
            for visit in planned[:visits]:
                with run.visit(*visit):
                    value = self.stacks[visit.expert][visit.block](value)
            run.leave()
        assert torch.equal(value, self.plain(planned[:visits]))
        last = {fetch.buffer: fetch.block for fetch in run.fetched}
        assert last.items() <= self.engine.contents().items(), "issued blocks are there"

    def patch(self, strengths: tuple[int, ...]) -> None:
        held = set(self.engine.contents().values())
        pairs = zip(KEYS, self.strengths, strengths, strict=True)
        changed = {key for key, before, after in pairs if before != after}
        self.strengths = strengths
        patches = zip(KEYS, strengths, strict=True)
        self.engine.set_patches({key: patch_of(each) for key, each in patches if each})
        assert set(self.engine.contents().values()) == held - changed

    def release(self, buffers: int) -> None:
        loaded = self.engine.loaded_bytes
        wanted = buffers * BUFFER_BYTES
        freed = self.engine.release_memory(wanted)
        assert freed == min(wanted, loaded)
        assert self.engine.loaded_bytes == loaded - freed


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(actions=st.lists(ACTIONS, min_size=2, max_size=8))
def test_always_the_bits_of_a_fresh_engine(make_stack, policy, actions):
    tested = Engine(make_stack, policy)
    do = {Run: tested.run, LeaveEarly: tested.leave_early, Patch: tested.patch}
    do[Release] = tested.release
    with tested.engine:
        for action in [*actions, Run(("high", "low"), None)]:
            do[type(action)](*action)
