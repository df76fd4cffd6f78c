"""Steps that a cache skips: by hand, against diffusers' own rule, and by properties."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.hooks.mag_cache import MagCacheConfig, MagCacheHeadHook, MagCacheState
from hypothesis import given
from hypothesis import strategies as st

from wanstream.plan.visits import SkipRule, skipped_steps


def one_stage(ratios: list[float], **rule: Any) -> list[int]:
    steps = range(len(ratios))
    return sorted(skipped_steps(steps, steps, [ratios], SkipRule(retention=0.0, **rule)))


@pytest.mark.parametrize(
    ("ratios", "threshold", "most", "skipped"),
    [
        ([1.0, 0.98, 0.98, 0.98], 0.05, 9, [1, 3]),  # errors 0.02, then 0.02 + 0.0396: computed, and 0.02 again
        ([1.0, 0.98, 0.98, 0.98], 0.06, 9, [1, 2]),
        ([1.0, 0.98, 0.98, 0.98], 1.0, 1, [1, 3]),
        ([1.0, 0.5, 1.0, 1.0], 0.1, 9, [2, 3]),
        ([1.0, 1.0, 1.0, 1.0], 0.0, 9, []),
        ([1.0], 1.0, 9, []),
    ],
)
def test_errors_add_up_until_a_step_is_computed(
    ratios: list[float], threshold: float, most: int, skipped: list[int]
) -> None:
    assert one_stage(ratios, threshold=threshold, max_consecutive_skips=most) == skipped


def test_the_first_share_of_an_expert_is_computed() -> None:
    steps = range(10, 20)
    found = skipped_steps(steps, steps, [[1.0] * 20], SkipRule(threshold=1.0, max_consecutive_skips=9, retention=0.3))
    assert sorted(found) == list(range(13, 20))


def test_a_run_that_starts_late_computes_its_first_step() -> None:
    found = skipped_steps(range(10), range(6, 10), [[1.0] * 10], SkipRule(threshold=1.0, max_consecutive_skips=9))
    assert sorted(found) == [7, 8, 9]


def test_every_kind_of_lane_has_a_veto() -> None:
    ratios = [[1.0, 1.0, 1.0], [1.0, 1.0, 0.5]]
    assert skipped_steps(range(3), range(3), ratios, SkipRule(threshold=0.1, retention=0.0)) == {1}


@pytest.mark.parametrize(
    ("values", "said"),
    [({"threshold": -1.0}, "threshold"), ({"threshold": math.nan}, "threshold"), ({"retention": 1.5}, "retention")],
)
def test_rules_that_are_none_are_refused(values: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SkipRule(**{"threshold": 0.1, **values})


class _State:
    """A state manager of one state."""

    def __init__(self) -> None:
        self.state, self._current_context = MagCacheState(), "one"

    def get_state(self) -> MagCacheState:
        return self.state


def diffusers_skips(ratios: list[float], rule: SkipRule) -> list[int]:
    """Return the decision of the head hook of diffusers' MagCache for every step."""
    config = MagCacheConfig(
        threshold=rule.threshold,
        max_skip_steps=rule.max_consecutive_skips,
        retention_ratio=rule.retention,
        num_inference_steps=len(ratios),
        mag_ratios=torch.tensor(ratios, dtype=torch.float64),
    )
    manager = _State()
    hook = MagCacheHeadHook(manager, config)
    hook._metadata = SimpleNamespace(
        hidden_states_argument_name="hidden_states",
        return_encoder_hidden_states_index=None,
        _get_parameter_from_args_kwargs=lambda name, args, kwargs: args[0],
    )
    hook.fn_ref = SimpleNamespace(original_forward=lambda tokens: tokens)
    tokens, found = torch.zeros(1, 2, 4), []
    for step in range(len(ratios)):
        hook.new_forward(None, tokens)
        if not manager.state.should_compute:
            found.append(step)
        manager.state.previous_residual = tokens
        manager.state.step_index += 1
    return found


@given(
    ratios=st.lists(st.floats(0.8, 1.2), min_size=1, max_size=40),
    threshold=st.floats(0.001, 0.5),
    most=st.integers(0, 5),
    retention=st.sampled_from([0.0, 0.1, 0.2, 0.5]),
)
def test_the_rule_is_that_of_diffusers(ratios: list[float], threshold: float, most: int, retention: float) -> None:
    rule = SkipRule(threshold=threshold, max_consecutive_skips=most, retention=retention)
    steps = range(len(ratios))
    assert sorted(skipped_steps(steps, steps, [ratios], rule)) == diffusers_skips(ratios, rule)
