"""A first step, simulated on a machine with other rates than planned, corrects the plan's rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from wanstream.plan import Budgets, Machine, calibrate_machine, plan_offload
from wanstream.schema import OffloadPolicy
from wanstream.schema.records import StepRecord
from wanstream.shapes import RunShape, StepShape
from wanstream.tests.support.plan_fixtures import needs_of, predicted, run_shape
from wanstream.tests.support.steps import changed_step

Rated = Callable[..., Machine]


def _first_step(run: RunShape, machine: Machine, policy: OffloadPolicy) -> StepRecord:
    return predicted(run, machine, policy).timeline.steps[0]


@pytest.mark.parametrize("linear_format", ["", "int8"])
@pytest.mark.parametrize("factor", [0.25, 0.9, 1.1, 4.0])
def test_the_time_of_computing_gives_its_rate(
    rate_machine: Rated, factor: float, linear_format: str
) -> None:
    run = run_shape(linear_format=linear_format)
    believed = rate_machine(read=0.01, copy=0.01, linear_speedups={"int8": 3.0})
    chosen = plan_offload(run, believed, Budgets())
    real = replace(believed, flops_per_s=factor * believed.flops_per_s)
    found = calibrate_machine(believed, run, chosen, _first_step(run, real, chosen.policy))
    assert found.flops_per_s == pytest.approx(real.flops_per_s)
    assert replace(found, flops_per_s=1.0) == replace(
        real, flops_per_s=1.0, origin="made up, corrected by a first step"
    )


@pytest.mark.parametrize("speedup", [0.5, 1.8])
def test_an_unknown_speedup_is_learnt_and_the_rate_of_blocks_is_kept(
    rate_machine: Rated, speedup: float
) -> None:
    run = run_shape(linear_format="fp8")
    believed = rate_machine(read=0.01, copy=0.01, linear_speedups={"int8": 3.0})
    chosen = plan_offload(run, believed, Budgets())
    real = believed.with_figures(linear_speedups={"int8": 3.0, "fp8": speedup})
    found = calibrate_machine(believed, run, chosen, _first_step(run, real, chosen.policy))
    assert found.flops_per_s == believed.flops_per_s
    assert found.block.linear_speedups == {"int8": 3.0, "fp8": pytest.approx(speedup)}
    # A step faster than its attention alone: the block's rate is another one.
    fast = replace(real, flops_per_s=100 * believed.flops_per_s)
    assert (
        "fp8"
        not in calibrate_machine(
            believed, run, chosen, _first_step(run, fast, chosen.policy)
        ).block.linear_speedups
    )


def test_a_first_step_of_fewer_lanes_is_not_taken_for_fast_computing(rate_machine: Rated) -> None:
    run, believed = run_shape(sides={"high": 2, "low": 1}), rate_machine(read=0.01, copy=0.01)
    chosen = plan_offload(run, believed, Budgets())
    alone = replace(run, sides={"high": 1, "low": 1})
    lighter = replace(run, steps=(StepShape(expert="high", sides=1), *run.steps[1:]))
    found = calibrate_machine(
        believed, lighter, chosen, _first_step(alone, believed, chosen.policy)
    )
    assert found.flops_per_s == pytest.approx(believed.flops_per_s, rel=1e-6)
    assert found.disk_bytes_per_s == pytest.approx(believed.disk_bytes_per_s)


def test_a_step_with_short_lanes_is_not_taken_for_fast_computing(rate_machine: Rated) -> None:
    sides = {"extra_tokens": (600, 0, 600), "sides": {"high": 3, "low": 1}}
    run, believed = run_shape(tokens=1000, **sides), rate_machine(read=0.01, copy=0.01)
    chosen = plan_offload(run, believed, Budgets())
    found = calibrate_machine(believed, run, chosen, _first_step(run, believed, chosen.policy))
    assert found.flops_per_s == pytest.approx(believed.flops_per_s, rel=1e-6)
    slow = replace(believed, flops_per_s=believed.flops_per_s / 3)
    found = calibrate_machine(believed, run, chosen, _first_step(run, slow, chosen.policy))
    assert found.flops_per_s == pytest.approx(slow.flops_per_s, rel=1e-6)


def test_a_machine_that_is_corrected_again_says_so_once(rate_machine: Rated) -> None:
    run, machine = run_shape(), rate_machine()
    chosen = plan_offload(run, machine, Budgets())
    first = chosen.timeline.steps[0]
    again = calibrate_machine(calibrate_machine(machine, run, chosen, first), run, chosen, first)
    assert again.origin == "made up, corrected by a first step"


@pytest.mark.parametrize("tokens", [1000, 100_000])
def test_the_cost_of_chunks_is_not_taken_for_slow_compute(rate_machine: Rated, tokens: int) -> None:
    run, believed = run_shape(tokens=tokens), rate_machine(read=0.01, copy=0.01)
    smallest = needs_of(run, believed, replace(OffloadPolicy.layerwise(1), chunk_tokens=2048))
    chosen = plan_offload(run, believed, Budgets(vram_bytes=smallest.device_bytes))
    found = calibrate_machine(believed, run, chosen, _first_step(run, believed, chosen.policy))
    assert found.flops_per_s == pytest.approx(believed.flops_per_s, rel=1e-6)


@pytest.mark.parametrize(
    ("field", "rates", "factor"),
    [
        ("disk_bytes_per_s", {"read": 0.5, "copy": 0.1}, 0.2),
        ("disk_bytes_per_s", {"read": 2.0, "copy": 0.1}, 0.5),
        ("disk_bytes_per_s", {"read": 4.0, "copy": 0.1}, 2.5),
        ("h2d_bytes_per_s", {"read": 0.1, "copy": 0.5}, 0.2),
        ("h2d_bytes_per_s", {"read": 0.1, "copy": 2.0}, 0.5),
        ("h2d_bytes_per_s", {"read": 0.1, "copy": 4.0}, 2.5),
    ],
)
def test_an_unpredicted_stall_corrects_the_slower_rate(
    rate_machine: Rated, field: str, rates: dict[str, float], factor: float
) -> None:
    run, believed = run_shape(), rate_machine(**rates)
    chosen = plan_offload(run, believed, Budgets())
    real_rate = factor * believed.to_dict()[field]
    real = believed.with_figures(**{field: real_rate})
    measured = _first_step(run, real, chosen.policy)
    assert abs(measured.stall_s - chosen.timeline.steps[0].stall_s) > 0.02 * measured.wall_s
    found = calibrate_machine(believed, run, chosen, measured)
    assert found.to_dict()[field] == pytest.approx(real_rate, rel=0.02)
    assert found.with_figures(**{field: real_rate}) == replace(real, origin=found.origin)


def test_another_plan_follows_from_a_slower_disk(rate_machine: Rated) -> None:
    run, believed = run_shape(), rate_machine(read=0.5)
    small = needs_of(run, believed, OffloadPolicy.layerwise(1))
    budgets = Budgets(vram_bytes=small.device_bytes, ram_bytes=10 * run.blocks.stored_bytes)
    chosen = plan_offload(run, believed, budgets)
    assert chosen.policy.source == "file"
    real = replace(believed, disk_bytes_per_s=believed.disk_bytes_per_s / 4)
    again = plan_offload(
        run,
        calibrate_machine(believed, run, chosen, _first_step(run, real, chosen.policy)),
        budgets,
    )
    assert again.policy.ram_blocks == 8
    assert (
        predicted(run, real, again.policy).total_s
        < 0.8 * predicted(run, real, chosen.policy).total_s
    )


def test_a_step_without_waiting_says_that_disk_and_bus_are_fast_enough(rate_machine: Rated) -> None:
    run, believed = run_shape(), rate_machine(read=4.0)
    chosen = plan_offload(run, believed, Budgets())
    calm = changed_step(chosen.timeline.steps[0], wall_s=8.0, compute_s=8.0, stall_s=0.0)
    found = calibrate_machine(believed, run, chosen, calm)
    assert _first_step(run, found, chosen.policy).stall_s < 0.02 * 8
    assert found.disk_bytes_per_s > 3 * believed.disk_bytes_per_s


def test_a_cpu_has_a_disk_and_a_copy(rate_cpu: Rated) -> None:
    run, believed = run_shape(), rate_cpu(read=0.5)
    chosen = plan_offload(run, believed, Budgets())
    real = replace(believed, disk_bytes_per_s=believed.disk_bytes_per_s / 5)
    found = calibrate_machine(believed, run, chosen, _first_step(run, real, chosen.policy))
    assert found.disk_bytes_per_s == pytest.approx(real.disk_bytes_per_s, rel=0.02)
    assert found.bus is None


def test_only_the_first_step_of_the_plan_is_taken(rate_machine: Rated) -> None:
    run, machine = run_shape(), rate_machine()
    chosen = plan_offload(run, machine, Budgets())
    with pytest.raises(
        ValueError,
        match="step 1 of the high expert was measured; the plan begins with step 0 of high",
    ):
        calibrate_machine(machine, run, chosen, chosen.timeline.steps[1])
    with pytest.raises(ValueError, match=r"computed for 0\.0 s"):
        calibrate_machine(machine, run, chosen, replace(chosen.timeline.steps[0], compute_s=0.0))
