"""Steps skipped by a cache: by hand, against diffusers' own rule, and by properties."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from diffusers import MagCacheConfig, WanTransformer3DModel
from hypothesis import given, settings
from hypothesis import strategies as st

from wanstream.plan.programs.visits import SkipRule, skipped_steps
from wanstream.testing.weights import TinyShape, make_expert


def one_stage(ratios: list[float], **rule: Any) -> list[int]:
    steps = range(len(ratios))
    return sorted(skipped_steps(steps, steps, [ratios], SkipRule(retention=0.0, **rule)))


@pytest.mark.parametrize(
    ("ratios", "threshold", "most", "skipped"),
    [
        (
            [1.0, 0.98, 0.98, 0.98],
            0.05,
            9,
            [1, 3],
        ),  # errors 0.02, then 0.02 + 0.0396: computed, and 0.02 again
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
    found = skipped_steps(
        steps, steps, [[1.0] * 20], SkipRule(threshold=1.0, max_consecutive_skips=9, retention=0.3)
    )
    assert sorted(found) == list(range(13, 20))


def test_a_run_that_starts_late_computes_its_first_step() -> None:
    found = skipped_steps(
        range(10), range(6, 10), [[1.0] * 10], SkipRule(threshold=1.0, max_consecutive_skips=9)
    )
    assert sorted(found) == [7, 8, 9]


def test_every_kind_of_lane_has_a_veto() -> None:
    ratios = [[1.0, 1.0, 1.0], [1.0, 1.0, 0.5]]
    assert skipped_steps(range(3), range(3), ratios, SkipRule(threshold=0.1, retention=0.0)) == {1}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"threshold": -1.0}, "threshold"),
        ({"threshold": math.nan}, "threshold"),
        ({"retention": 1.5}, "retention"),
    ],
)
def test_rules_that_are_none_are_refused(values: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SkipRule(**{"threshold": 0.1, **values})


@pytest.fixture(scope="module")
def model() -> WanTransformer3DModel:
    return make_expert(TinyShape(layers=2, heads=1, ffn_dim=64), seed=0)


def diffusers_skips(model: WanTransformer3DModel, ratios: list[float], rule: SkipRule) -> list[int]:
    """Return the steps without the first block in diffusers' MagCache."""
    config = MagCacheConfig(
        threshold=rule.threshold,
        max_skip_steps=rule.max_consecutive_skips,
        retention_ratio=rule.retention,
        num_inference_steps=len(ratios),
        mag_ratios=torch.tensor(ratios, dtype=torch.float64),
    )
    skipped = []
    computed: list[object] = []
    hook = model.blocks[0].attn1.register_forward_hook(lambda *given: computed.append(given))
    model.enable_cache(config)
    with torch.inference_mode(), model.cache_context("lane"):
        for step in range(len(ratios)):
            computed.clear()
            model(torch.ones(1, 16, 1, 2, 2), torch.ones(1), torch.ones(1, 1, 4096))
            if not computed:
                skipped.append(step)
    model.disable_cache()
    hook.remove()
    return skipped


@settings(max_examples=40)
@given(
    ratios=st.lists(st.floats(0.8, 1.2), min_size=1, max_size=20),
    threshold=st.floats(0.001, 0.5),
    most=st.integers(0, 5),
    retention=st.sampled_from([0.0, 0.1, 0.2, 0.5]),
)
def test_the_rule_is_that_of_diffusers(
    model: WanTransformer3DModel, ratios: list[float], threshold: float, most: int, retention: float
) -> None:
    rule = SkipRule(threshold=threshold, max_consecutive_skips=most, retention=retention)
    steps = range(len(ratios))
    assert sorted(skipped_steps(steps, steps, [ratios], rule)) == diffusers_skips(
        model, ratios, rule
    )
