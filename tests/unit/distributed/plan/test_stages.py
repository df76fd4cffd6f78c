"""Boundaries between pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanstream.distributed.plan.stages import stage_boundaries
from wanstream.schema import MeshError

COSTS = st.sampled_from((0.0, 0.5, 1.0, 3.0, 10.0))


@st.composite
def _runs(draw: st.DrawFn) -> tuple[list[str], list[float]]:
    high, low = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    experts = ["high"] * high + ["low"] * (low or not high)
    return experts, draw(st.lists(COSTS, min_size=len(experts), max_size=len(experts)))


def _switches(experts: Sequence[str]) -> set[int]:
    return {step for step, (before, now) in enumerate(pairwise(experts), start=1) if before != now}


def _by_trying_all(experts: Sequence[str], costs: Sequence[float], stages: int) -> float:
    """Return the slowest stage's cost in the best division with a cut at every switch."""
    slowest = []
    for cuts in combinations(range(1, len(experts)), stages - 1):
        if _switches(experts) <= set(cuts):
            slowest.append(max(sum(costs[a:b]) for a, b in pairwise((0, *cuts, len(experts)))))
    return min(slowest)


@given(_runs(), st.data())
def test_stages_cover_the_run_cut_at_the_switch_and_are_balanced(
    run: tuple[list[str], list[float]], data: st.DataObject
) -> None:
    experts, costs = run
    stages = data.draw(st.integers(1, len(experts)))
    parts = stage_boundaries(experts, costs, stages)
    assert [step for part in parts for step in part] == list(range(len(experts)))
    assert len(parts) == stages
    assert all(parts)
    if stages > 1:
        assert all(len({experts[step] for step in part}) == 1 for part in parts)
        slowest = max(sum(costs[step] for step in part) for part in parts)
        assert slowest == pytest.approx(_by_trying_all(experts, costs, stages))


@pytest.mark.parametrize(
    ("high", "low", "stages", "cuts"),
    [
        (26, 14, 1, []),
        (26, 14, 2, [26]),
        (26, 14, 3, [13, 26]),
        (26, 14, 6, [7, 14, 20, 26, 33]),
        (1, 9, 2, [1]),
        (0, 8, 2, [4]),
        (8, 0, 4, [2, 4, 6]),
    ],
)
def test_steps_of_equal_cost(high: int, low: int, stages: int, cuts: list[int]) -> None:
    parts = stage_boundaries(["high"] * high + ["low"] * low, [1.0] * (high + low), stages)
    slowest = max(len(part) for part in parts)
    wanted = [b - a for a, b in pairwise([0, *cuts, high + low])]
    assert (len(parts), slowest) == (stages, max(wanted))
    if stages <= 3:
        assert [part.start for part in parts[1:]] == cuts


def test_dear_steps_weigh_more() -> None:
    assert stage_boundaries(["low"] * 5, [9.0, 1.0, 1.0, 1.0, 1.0], 2) == (range(1), range(1, 5))


@pytest.mark.parametrize(
    ("experts", "stages", "message"),
    [
        (["high", "low"], 3, "stage 3 for 2 steps: every stage needs one; use 1 to 2"),
        (["high"], 0, "stage 0 for 1 step: "),
        (
            ["high", "low", "high"],
            2,
            "the expert changes 2 times, so stages of one expert each are 3, not 2: use 1, or 3 to "
            "3",
        ),
    ],
)
def test_stages_that_there_cannot_be(experts: list[str], stages: int, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        stage_boundaries(experts, [1.0] * len(experts), stages)


def test_a_cost_for_each_step() -> None:
    with pytest.raises(ValueError, match="1 costs for 2 steps"):
        stage_boundaries(["high", "low"], [1.0], 2)
