"""Runs with more blocks are simulated from a shorter run's rates."""

from functools import partial

import pytest

from wanstream.benchmarks.offload_case.predict import longer_run
from wanstream.schema.records import StepRecord, Timeline

BLOCKS = 8
VISIT_S = 0.25
OUTSIDE_S = 0.5


def measured(stall_s: float) -> Timeline:
    """Return four steps by two experts, with 8 blocks each."""
    compute_s = BLOCKS * VISIT_S
    times = {"wall_s": compute_s + stall_s + OUTSIDE_S, "compute_s": compute_s, "stall_s": stall_s}
    step = partial(StepRecord.of, sigma=None, bytes_moved=8_000, **times)
    experts = enumerate(("high", "high", "low", "low"))
    steps = tuple(step(index=index, expert=expert) for index, expert in experts)
    return Timeline(steps=steps, kind="measured")


def test_blocks_scale_and_what_is_outside_them_does_not():
    longer = longer_run(measured(0.0).to_dict(), blocks=BLOCKS, longer=40)
    assert longer["step_s"][1:] == [pytest.approx(40 * VISIT_S + OUTSIDE_S, abs=1e-3)] * 3
    assert not longer["bus_was_the_limit"]


def test_bus_that_was_the_limit_stays_the_limit():
    longer = longer_run(measured(2.0).to_dict(), blocks=BLOCKS, longer=40)
    assert longer["bus_was_the_limit"]
    rate = 8_000 / (BLOCKS * VISIT_S + 2.0 + OUTSIDE_S)
    assert longer["step_s"][1] == pytest.approx(40 * 1_000 / rate, rel=0.02)
