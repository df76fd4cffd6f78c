"""Boundaries between pipeline stages."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanstream.distributed.plan.stages import stage_boundaries
from wanstream.schema import MeshError

COSTS = st.sampled_from((0.0, 0.5, 1.0, 3.0, 10.0))


@st.composite
def _runs(draw: st.DrawFn) -> tuple[list[str], list[float]]:
    high = draw(st.integers(0, 6))
    low = draw(st.integers(0, 6))
    experts = ["high"] * high + ["low"] * (low or not high)
    return experts, draw(st.lists(COSTS, min_size=len(experts), max_size=len(experts)))


def _switches(experts):
    return {step for step, (before, now) in enumerate(pairwise(experts), start=1) if before != now}


def _by_trying_all(experts, costs, stages):
    """Return the slowest stage's cost in the best division with a cut at every switch."""
    slowest = []
    for cuts in combinations(range(1, len(experts)), stages - 1):
        if _switches(experts) <= set(cuts):
            slowest.append(max(sum(costs[a:b]) for a, b in pairwise((0, *cuts, len(experts)))))
    return min(slowest)


@given(_runs(), st.data())
def test_stages_cover_the_run_cut_at_the_switch_and_are_balanced(run, data):
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


def test_stages_that_there_cannot_be():
    for experts, stages, message in (
        (["high", "low"], 3, "stage 3 for 2 steps: every stage needs one; use 1 to 2"),
        (["high"], 0, "stage 0 for 1 step: "),
        (["high", "low", "high"], 2, "changes 2 times, .* are 3, not 2: use 1, or 3 to 3"),
    ):
        with pytest.raises(MeshError, match=message):
            stage_boundaries(experts, [1.0] * len(experts), stages)
    with pytest.raises(ValueError, match="1 costs for 2 steps"):
        stage_boundaries(["high", "low"], [1.0], 2)
