"""Runs, aborted runs, early stops, new patches and released memory in any order.

Results are compared with a fresh engine's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from wanstream.offload import BlockPatch, OffloadEngine, WeightPatch, attach_offload
from wanstream.plan.programs import BlockKey, Visit, step_visits
from wanstream.schema import OffloadPolicy

BLOCKS, WIDTH = 3, 16
POLICIES = [
    OffloadPolicy.resident(),
    OffloadPolicy.layerwise(0),
    OffloadPolicy.layerwise(2),
    OffloadPolicy.block_swap(1, 1),
    OffloadPolicy.block_swap(2, 0, source="pinned"),
]
KEYS = [BlockKey(name, block) for name in ("high", "low") for block in range(BLOCKS)]
HIDDEN = torch.linspace(-1, 1, WIDTH)[None]


class Run(NamedTuple):
    steps: tuple[str, ...]
    stop_at: int | None
    """Visit where the run is interrupted, or None for a complete run."""


class ReleaseSource(NamedTuple):
    steps: tuple[str, ...]
    visits: int
    """Visits before the run stops early."""


class Patch(NamedTuple):
    strengths: tuple[int, ...]
    """Patch strength for each block in both experts, 0 for no patch."""


class GiveBack(NamedTuple):
    buffers: int


STEPS = st.lists(st.sampled_from(["high", "low"]), min_size=1, max_size=3).map(tuple)
ACTIONS = st.one_of(
    st.builds(Run, STEPS, st.none() | st.integers(0, 2 * BLOCKS)),
    st.builds(ReleaseSource, STEPS, st.integers(0, 2 * BLOCKS)),
    st.builds(Patch, st.tuples(*[st.integers(0, 2)] * (2 * BLOCKS))),
    st.builds(GiveBack, st.integers(0, 2 * BLOCKS)),
)


def patches_of(strengths: Sequence[int]) -> dict[BlockKey, BlockPatch]:
    return {
        key: BlockPatch(
            identity=strength,
            weights={
                "up.weight": WeightPatch(
                    up=torch.full((3 * WIDTH, 2), 0.1 * strength), down=torch.ones(2, WIDTH)
                ),
                "down.weight": WeightPatch(full=torch.full((WIDTH, 3 * WIDTH), 0.1 * strength)),
            },
        )
        for key, strength in zip(KEYS, strengths, strict=True)
        if strength
    }


class Stacks:
    """Two stacks, and for every strength the same blocks with the patch merged into the weights."""

    def __init__(self, make_stack: Callable[..., nn.ModuleList]) -> None:
        self.streamed = {
            n: make_stack(BLOCKS, seed=seed, width=WIDTH) for seed, n in enumerate(("high", "low"))
        }
        self._plain = [copy.deepcopy(self.streamed) for _ in range(3)]
        for strength in (1, 2):
            for key, patch in patches_of([strength] * 2 * BLOCKS).items():
                block = self._plain[strength][key.expert][key.block]
                up, down = patch.weights["up.weight"], patch.weights["down.weight"]
                block.up.weight.copy_(torch.addmm(block.up.weight, up.up, up.down))
                block.down.weight.copy_(block.down.weight + down.full)

    def plain(self, visits: Sequence[Visit], strengths: Sequence[int]) -> torch.Tensor:
        value = HIDDEN
        for visit in visits:
            strength = strengths[KEYS.index(visit.key)]
            value = self._plain[strength][visit.expert][visit.block](value)
        return value


@pytest.fixture
def stacks(make_stack: Callable[..., nn.ModuleList]) -> Stacks:
    return Stacks(make_stack)


def carry_out(handle: OffloadEngine, stacks: Stacks, run: Run, strengths: Sequence[int]) -> None:
    value, visits = HIDDEN, step_visits(run.steps, handle.block_counts)
    if run.stop_at is not None and run.stop_at < len(visits):
        with pytest.raises(KeyboardInterrupt), handle.run(visits) as going:
            for number, visit in enumerate(visits):
                with going.visit(*visit):
                    if number == run.stop_at:
                        raise KeyboardInterrupt
        return
    with handle.run(visits) as going:
        for visit in visits:
            with going.visit(*visit):
                value = stacks.streamed[visit.expert][visit.block](value)
    assert torch.equal(value, stacks.plain(visits, strengths))


def leave(
    handle: OffloadEngine, stacks: Stacks, run: ReleaseSource, strengths: Sequence[int]
) -> None:
    value, visits = HIDDEN, step_visits(run.steps, handle.block_counts)
    come = visits[: run.visits]
    with handle.run(visits) as going:
        for visit in come:
            with going.visit(*visit):
                value = stacks.streamed[visit.expert][visit.block](value)
        going.leave()
    assert torch.equal(value, stacks.plain(come, strengths))
    last = {fetch.buffer: fetch.block for fetch in going.fetched}
    assert last.items() <= handle.contents().items(), "what was issued is there"


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(actions=st.lists(ACTIONS, min_size=2, max_size=8))
def test_always_the_bits_of_a_fresh_engine(
    stacks: Stacks, policy: OffloadPolicy, actions: list[NamedTuple]
) -> None:
    strengths = (0,) * 2 * BLOCKS
    with attach_offload(
        stacks.streamed, policy=policy, device="cpu", follow_forward=False
    ) as handle:
        size = handle.loaded_bytes // len(handle.buffers)
        for action in [*actions, Run(("high", "low"), None)]:
            held = set(handle.contents().values())
            if isinstance(action, Run):
                carry_out(handle, stacks, action, strengths)
            elif isinstance(action, ReleaseSource):
                leave(handle, stacks, action, strengths)
            elif isinstance(action, Patch):
                before, strengths = strengths, action.strengths
                handle.set_patches(patches_of(strengths))
                changed = {
                    key
                    for key, *pair in zip(KEYS, before, strengths, strict=True)
                    if len(set(pair)) > 1
                }
                assert set(handle.contents().values()) == held - changed
            elif isinstance(action, GiveBack):
                loaded = handle.loaded_bytes
                freed = handle.release_memory(action.buffers * size)
                assert freed == min(action.buffers * size, loaded)
                assert handle.loaded_bytes == loaded - freed
