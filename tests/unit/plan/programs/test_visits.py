from __future__ import annotations

import pytest

from wanstream.plan.programs import BlockKey, Visit, step_visits


def test_a_step_passes_once_through_the_blocks_of_its_expert() -> None:
    visits = step_visits(["high", "low"], {"high": 2, "low": 3}, first_step=7)
    assert visits == (
        Visit(7, "high", 0),
        Visit(7, "high", 1),
        Visit(8, "low", 0),
        Visit(8, "low", 1),
        Visit(8, "low", 2),
    )
    assert visits[3].key == BlockKey("low", 1)


def test_steps_that_need_no_block_have_no_visits() -> None:
    visits = step_visits(["high", "high", "low"], {"high": 2, "low": 1}, first_step=3, skipped={4})
    assert visits == (Visit(3, "high", 0), Visit(3, "high", 1), Visit(5, "low", 0))


def test_no_steps_make_no_visits() -> None:
    assert step_visits([], {"high": 40}) == ()


def test_an_expert_without_a_block_count_is_refused() -> None:
    with pytest.raises(ValueError, match="no block count for 'low'"):
        step_visits(["high", "low"], {"high": 40})
