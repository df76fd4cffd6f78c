"""A first step, simulated on a machine with other rates than planned, corrects the plan's rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wanstream.plan import Budgets, Machine, calibrate_machine, plan_offload
from wanstream.schema import OffloadPolicy
from wanstream.shapes import StepShape
from wanstream.tests.support.plan_fixtures import needs_of, predicted, rated, rated_cpu, run_shape
from wanstream.tests.support.sampling.steps import changed_step

FAST_MEMORY = {"read": 0.01, "copy": 0.01}
"""Seconds per block that no step waits for."""


def _corrected(believed, run, chosen, real, ran=None) -> Machine:
    """Return `believed`, corrected by the first step of `ran` (default: `run`) on `real`."""
    first = predicted(ran or run, real, chosen.policy).timeline.steps[0]
    return calibrate_machine(believed, run, chosen, first)


@pytest.mark.parametrize("linear_format", ["", "int8"])
@pytest.mark.parametrize("factor", [0.25, 1.1, 4.0])
def test_the_time_of_computing_gives_its_rate(factor, linear_format):
    run = run_shape(linear_format=linear_format)
    believed = rated(**FAST_MEMORY, linear_speedups={"int8": 3.0})
    chosen = plan_offload(run, believed, Budgets())
    real = replace(believed, flops_per_s=factor * believed.flops_per_s)
    found = _corrected(believed, run, chosen, real)
    assert found.flops_per_s == pytest.approx(real.flops_per_s)
    origin = "made up, corrected by a first step"
    assert replace(found, flops_per_s=1.0) == replace(real, flops_per_s=1.0, origin=origin)
    assert _corrected(found, run, chosen, real).origin == origin, "it is said once"


@pytest.mark.parametrize("speedup", [0.5, 1.8])
def test_unknown_speedup_is_learnt(speedup):
    run = run_shape(linear_format="fp8")
    believed = rated(**FAST_MEMORY, linear_speedups={"int8": 3.0})
    chosen = plan_offload(run, believed, Budgets())
    real = believed.with_figures(linear_speedups={"int8": 3.0, "fp8": speedup})
    found = _corrected(believed, run, chosen, real)
    assert found.flops_per_s == believed.flops_per_s
    assert found.block.linear_speedups == {"int8": 3.0, "fp8": pytest.approx(speedup)}
    # A step faster than its attention alone: the block's rate is another one.
    fast = replace(real, flops_per_s=100 * believed.flops_per_s)
    assert "fp8" not in _corrected(believed, run, chosen, fast).block.linear_speedups


def test_fewer_tokens_are_no_other_rate():
    believed = rated(**FAST_MEMORY)
    plain = run_shape(sides={"high": 2, "low": 1})
    lighter = replace(plain, steps=(StepShape(expert="high", sides=1), *plain.steps[1:]))
    alone = replace(plain, sides={"high": 1, "low": 1})
    short = run_shape(extra_tokens=(600, 0, 600), sides={"high": 3, "low": 1})
    chunked = run_shape(tokens=100_000)
    smallest = needs_of(chunked, believed, replace(OffloadPolicy.layerwise(1), chunk_tokens=2048))
    little = Budgets(vram_bytes=smallest.device_bytes)
    for run, ran, planned, budgets, real in (
        (lighter, alone, plain, Budgets(), believed),
        (short, short, short, Budgets(), believed),
        (short, short, short, Budgets(), replace(believed, flops_per_s=believed.flops_per_s / 3)),
        (chunked, chunked, chunked, little, believed),
    ):
        found = _corrected(believed, run, plan_offload(planned, believed, budgets), real, ran)
        assert found.flops_per_s == pytest.approx(real.flops_per_s, rel=1e-6)
        assert found.disk_bytes_per_s == pytest.approx(believed.disk_bytes_per_s)


ROUTES = [("disk_bytes_per_s", "read", "copy"), ("h2d_bytes_per_s", "copy", "read")]


@pytest.mark.parametrize(("slow_s", "factor"), [(0.5, 0.2), (2.0, 0.5), (4.0, 2.5)])
@pytest.mark.parametrize(("field", "slow", "fast"), ROUTES)
def test_an_unpredicted_stall_corrects_the_slower_rate(field, slow, fast, slow_s, factor):
    run = run_shape()
    believed = rated(**{slow: slow_s, fast: 0.1})
    chosen = plan_offload(run, believed, Budgets())
    real_rate = factor * believed.to_dict()[field]
    real = believed.with_figures(**{field: real_rate})
    found = _corrected(believed, run, chosen, real)
    assert found.to_dict()[field] == pytest.approx(real_rate, rel=0.02)
    assert found.with_figures(**{field: real_rate}) == replace(real, origin=found.origin)


def test_step_without_stalls_shows_fast_links():
    run = run_shape()
    believed = rated(read=4.0)
    chosen = plan_offload(run, believed, Budgets())
    calm = changed_step(chosen.timeline.steps[0], wall_s=8.0, compute_s=8.0, stall_s=0.0)
    found = calibrate_machine(believed, run, chosen, calm)
    assert predicted(run, found, chosen.policy).timeline.steps[0].stall_s < 0.02 * 8
    assert found.disk_bytes_per_s > 3 * believed.disk_bytes_per_s


def test_a_cpu_has_a_disk_and_a_copy():
    run = run_shape()
    believed = rated_cpu(read=0.5)
    chosen = plan_offload(run, believed, Budgets())
    real = replace(believed, disk_bytes_per_s=believed.disk_bytes_per_s / 5)
    found = _corrected(believed, run, chosen, real)
    assert found.disk_bytes_per_s == pytest.approx(real.disk_bytes_per_s, rel=0.02)
    assert found.bus is None


def test_only_the_first_step_of_the_plan_is_taken():
    run = run_shape()
    machine = rated()
    chosen = plan_offload(run, machine, Budgets())
    first, second = chosen.timeline.steps[:2]
    message = "step 1 of the high expert was measured; the plan begins with step 0 of high"
    with pytest.raises(ValueError, match=message):
        calibrate_machine(machine, run, chosen, second)
    with pytest.raises(ValueError, match=r"computed for 0\.0 s"):
        calibrate_machine(machine, run, chosen, replace(first, compute_s=0.0))
