"""Visits in steps and forward passes, and steps skipped by a cache, as in diffusers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from wanstream.plan.programs import Visit, predict_visits, split_at_boundary, step_visits
from wanstream.plan.programs.visits import BlockKey, PassOrders, SkipRule, skipped_steps


def test_a_step_passes_once_through_the_blocks_of_its_expert():
    visits = step_visits(["high", "high", "low"], {"high": 2, "low": 3}, first_step=7, skipped={8})
    high = [Visit(7, "high", block) for block in range(2)]
    assert visits == (*high, *(Visit(9, "low", block) for block in range(3)))
    assert visits[3].key == BlockKey("low", 1)
    assert step_visits([], {"high": 40}) == ()
    with pytest.raises(ValueError, match="no block count for 'low'"):
        step_visits(["high", "low"], {"high": 40})


# --- boundary -------------------------------------------------------------------------------------


SWITCHES = [([999.0, 875.0, 874.9999, 500.0], 0.875, 2), ([999.0, 999.0, 999.0, 10.0], 0.9, 3)]
SWITCHES += [([], 0.875, 0), ([1000.0], 1.0, 1), ([999.0, 500.0], 1.0, 0), ([999.0, 0.0], 0.0, 2)]


@pytest.mark.parametrize(("timesteps", "boundary_ratio", "switch"), SWITCHES)
def test_step_at_the_boundary_is_high_noise(timesteps, boundary_ratio, switch):
    assert split_at_boundary(timesteps, boundary_ratio) == switch


@pytest.mark.parametrize(
    ("timesteps", "boundary_ratio", "message"),
    [
        ([999.0], -0.1, r"must lie in 0\.\.1"),
        ([999.0], 1.001, r"must lie in 0\.\.1"),
        ([999.0], math.nan, r"must lie in 0\.\.1"),
        ([500.0, 999.0], 0.875, "must not rise: step 0"),
        ([999.0, math.nan, 3.0], 0.875, "must not rise: step 0"),
    ],
)
def test_a_wrong_boundary_and_rising_timesteps_are_refused(timesteps, boundary_ratio, message):
    with pytest.raises(ValueError, match=message):
        split_at_boundary(timesteps, boundary_ratio)


# --- steps skipped by a cache ---------------------------------------------------------------------


def always(**rule: Any) -> SkipRule:
    return SkipRule(**{"threshold": 1.0, "max_consecutive_skips": 9, **rule})


@pytest.mark.parametrize(
    ("stage", "taken", "ratios", "rule", "skipped"),
    [
        # Errors 0.02, then 0.02 + 0.0396: computed, and 0.02 again.
        ((0, 4), (0, 4), [[1.0, 0.98, 0.98, 0.98]], always(threshold=0.05, retention=0), [1, 3]),
        # With a threshold of 0 nothing is skipped.
        ((0, 4), (0, 4), [[1.0] * 4], always(threshold=0, retention=0), []),
        # The first share of an expert is computed, and the first step of a run that starts late.
        ((10, 20), (10, 20), [[1.0] * 20], always(retention=0.3), list(range(13, 20))),
        ((0, 10), (6, 10), [[1.0] * 10], always(), [7, 8, 9]),
        # Half a step counts as a whole one, as in diffusers.
        ((0, 5), (0, 5), [[1.0] * 5], always(retention=0.5), [3, 4]),
        # Some in a row, and none after a residual that grew.
        ((0, 6), (0, 6), [[1.0] * 6], always(max_consecutive_skips=2, retention=0), [1, 2, 4, 5]),
        ((0, 2), (0, 2), [[1.0, 1.1]], always(threshold=0.05, retention=0), []),
        # Every kind of lane has a veto.
        ((0, 3), (0, 3), [[1.0] * 3, [1.0, 1.0, 0.5]], always(threshold=0.1, retention=0), [1]),
    ],
)
def test_skipped_steps(stage, taken, ratios, rule, skipped):
    assert sorted(skipped_steps(range(*stage), range(*taken), ratios, rule)) == skipped


VALUES = [("threshold", -1.0), ("threshold", math.nan)]
VALUES += [("retention", 1.5), ("max_consecutive_skips", -1)]


@pytest.mark.parametrize(("name", "value"), VALUES)
def test_rules_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is "):
        SkipRule(**{"threshold": 0.1, name: value})


# --- forward passes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("orders", "visited", "number", "rest"),
    [
        # Unknown passes are expected in the order of the stack, or lists in turns.
        (PassOrders(blocks=4), [0, 2], 0, (1, 3)),
        (PassOrders(blocks=4), [2], 0, (3, 0, 1)),
        (PassOrders(blocks=4), [2, 3, 0], 0, (1,)),
        # An order is recognised by its start.
        (PassOrders(blocks=5, seen=((0, 1), (0, 3, 1, 4, 2))), [0, 3], 0, (1, 4, 2)),
        (PassOrders(blocks=5, seen=((0, 1), (0, 3, 1, 4, 2))), [0, 1], 0, ()),
        (PassOrders(blocks=5, seen=((0, 1), (0, 3, 1, 4, 2))), [], 0, (0, 1)),
        (PassOrders(blocks=5, seen=((0, 1),)), [4], 0, (0, 1, 2, 3)),
        # Lists 0, 1 to 2, 3 to 4 and 5: the second runs outside the pass, or its blocks come later.
        (PassOrders(blocks=6, lists=(0, 1, 3, 5)), [0, 3], 0, (4, 5, 1, 2)),
        (PassOrders(blocks=6, lists=(0, 1, 3, 5)), [0, 1, 3], 0, (2, 4, 5)),
        (PassOrders(blocks=6, lists=(0, 1, 3, 5)), [0, 5, 1], 0, (2, 3, 4)),
        # Lists 0 to 5 and 6 to 8: behind every second block one of the other list, or two.
        (PassOrders(blocks=9, lists=(0, 6)), [0, 6], 0, (1, 2, 3, 4, 5, 7, 8)),
        (PassOrders(blocks=9, lists=(0, 6)), [0, 6, 1, 2, 7], 0, (3, 4, 8, 5)),
        (PassOrders(blocks=9, lists=(0, 6)), [0, 6, 1, 2, 7, 3, 4], 0, (8, 5)),
        (PassOrders(blocks=9, lists=(0, 6)), [0, 6, 1, 2, 7, 3, 4, 5], 0, (8,)),
        (PassOrders(blocks=9, lists=(0, 6)), [0, 6, 6, 1, 2, 7], 0, (7, 3, 4, 8, 8, 5)),
        (PassOrders(blocks=9, lists=(0, 6)), [0, 6, 1, 7, 2], 0, (8, 3, 4, 5)),
        # It is at an end, returns to the same block, or did not come as before.
        (PassOrders(blocks=8, lists=(0, 6)), [0, 6, 1, 2, 7], 0, (3, 4, 5)),
        (PassOrders(blocks=8, lists=(0, 6)), [0, 6, 1, 2, 6], 0, (3, 4, 6, 5, 7)),
        (PassOrders(blocks=9, lists=(0, 6)), [0, 6, 1, 2, 7, 8], 0, (3, 4, 5)),
        # A run is expected to go like the one before, unless it goes another way.
        (PassOrders(blocks=3, seen=((0,),), course=((0, 1, 2), (0,))), [0], 0, (1, 2)),
        (PassOrders(blocks=3, seen=((0,),), course=((0, 1, 2), (0,))), [0], 1, ()),
        (PassOrders(blocks=3, seen=((0,),), course=((0, 1, 2), (2, 0))), [2], 0, (0, 1)),
    ],
)
def test_rest_of_a_pass(orders, visited, number, rest):
    assert orders.rest_of(visited, number) == rest


def test_the_longest_of_a_few_learnt_orders_is_expected():
    orders = PassOrders(blocks=9)
    assert orders.expected == tuple(range(9))
    assert orders.learn(()) == orders, "a skipped pass teaches nothing"
    for last in range(9):
        orders = orders.learn(tuple(range(last)))
    assert [len(order) for order in orders.seen] == [8, 7, 6, 5]
    again = orders.learn((0, 1, 2, 3, 4, 5, 6))
    assert [len(order) for order in again.seen] == [7, 8, 6, 5]
    assert again.expected == tuple(range(8))


@pytest.mark.parametrize(
    ("orders", "visited", "passes_after", "expected"),
    [
        (PassOrders(blocks=2).learn((1, 0)), [1], 1, [(3, 0), (4, 1), (4, 0)]),
        # Passes after the first of all are like it.
        (PassOrders(blocks=3), [2, 0], 1, [(3, 1), (4, 2), (4, 0), (4, 1)]),
        (PassOrders(blocks=3, seen=((0,),), course=((),) * 4), [0], 1, [(4, 0)]),
    ],
)
def test_predicted_visits(orders, visited, passes_after, expected):
    visits = predict_visits(orders, "m", visited, passes_after=passes_after, number=3)
    assert visits == tuple(Visit(step, "m", block) for step, block in expected)


def test_predicted_visits_follow_the_course_of_an_earlier_run():
    orders = PassOrders(blocks=3, seen=((0,),), course=((0, 1, 2), (0,), (), (0, 1, 2)))
    visits = predict_visits(orders, "m", [0], passes_after=4, number=0)
    found = [(visit.step, visit.block) for visit in visits]
    assert found == [(0, 1), (0, 2), (1, 0), (3, 0), (3, 1), (3, 2), (4, 0)]
