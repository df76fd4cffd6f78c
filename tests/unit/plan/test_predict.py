"""A run's predicted seconds against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wanstream.plan import Machine
from wanstream.plan.predict import Prediction, compile_programs
from wanstream.plan.programs import check_program, check_ram
from wanstream.schema import OffloadPolicy
from wanstream.schema.records import StepRecord, Timeline
from wanstream.shapes.run import CHUNK_S, RunShape, StepShape
from wanstream.tests.support.plan_fixtures import (
    predicted,
    rated,
    rated_cpu,
    run_shape,
    visit_seconds,
)

LAYERWISE = OffloadPolicy.layerwise(1)


def test_a_visit_is_all_lanes_and_the_cost_of_chunks():
    """Only linear layers are faster in int8."""
    lanes = {"sides": {"high": 3, "low": 1}}
    run = run_shape(**lanes)
    machine = rated(visit=2.0, linear_speedups={"int8": 4.0})
    linear = run.expert.linear_flops(run.tokens) / run.expert.block_flops(run.tokens)
    for work, share in (
        (run, 1.0),
        (run_shape(linear_format="fp8", **lanes), 1.0),
        (run_shape(linear_format="int8", **lanes), 1 - linear + linear / 4),
    ):
        assert visit_seconds(work, machine, "high") == pytest.approx(6.0 * share)
        assert visit_seconds(work, machine, "low") == pytest.approx(2.0 * share)
    chunked = visit_seconds(run, machine, "high", 300)  # of 1000 tokens
    assert chunked == pytest.approx(3 * (2.0 + 3 * CHUNK_S))
    assert visit_seconds(run, machine, "high", 1000) == pytest.approx(6.0)


def compute_seconds(run: RunShape, machine: Machine, *, by_step: bool) -> list[float]:
    timeline = predicted(run, machine, LAYERWISE, by_step=by_step).timeline
    return [step.compute_s for step in timeline.steps]


def test_steps_have_the_lanes_of_their_expert_or_of_their_own():
    own = [("high", None), ("high", 1), ("low", 3)]
    steps = [StepShape(expert=expert, sides=sides) for expert, sides in own]
    sides = {"high": 2, "low": 4}
    run = run_shape(steps=steps, sides=sides)
    cases = [(run, False, [16.0, 16.0, 32.0]), (run, True, [16.0, 8.0, 24.0])]
    cases += [(run_shape(2, 1, sides=sides), True, [16.0, 16.0, 32.0])]
    for work, by_step, expected in cases:
        assert compute_seconds(work, rated(), by_step=by_step) == pytest.approx(expected)


def test_lanes_of_each_side_have_their_own_tokens():
    machine = rated()
    long_s, short_s = (visit_seconds(run_shape(tokens=n), machine, "high") for n in (1000, 400))
    sides = {"sides": {"high": 3, "low": 1}, "extra_tokens": (600, 0, 600)}
    steps = [StepShape(expert="high"), StepShape(expert="high", sides=1), StepShape(expert="low")]
    run = run_shape(tokens=1000, steps=steps, **sides)
    visit_s = visit_seconds(run, machine, "high")
    assert visit_s == pytest.approx(2 * long_s + short_s)
    assert visit_seconds(run, machine, "low") == pytest.approx(long_s)
    own = compute_seconds(run, machine, by_step=True)
    assert own == pytest.approx([8 * visit_s, 8 * long_s, 8 * long_s])
    added = visit_seconds(run, machine, "high", 500) - visit_s
    assert added == pytest.approx(2 * CHUNK_S), "the short lane has one chunk"


SIZES = {"as stored": (1.0, 1.0, 0.5), "packed": (0.5, 0.5, 0.25), "quantised": (0.5, 1.0, 0.5)}


@pytest.mark.parametrize(("stored", "file", "read_s"), SIZES.values(), ids=SIZES)
def test_the_first_block_is_read_then_copied_then_decoded(stored, file, read_s):
    block = run_shape().blocks.computed_bytes
    run = run_shape(stored_bytes=int(stored * block), file_bytes=int(file * block))
    decode_s = 0.0 if stored == 1.0 else 0.01
    first = predicted(run, rated(), LAYERWISE).timeline.first_block_s
    assert first == pytest.approx(read_s + 0.1 * stored + decode_s)


def test_quantising_slower_than_the_disk_limits_reading():
    block = run_shape().blocks.computed_bytes
    machine = rated(quantise_bytes_per_s=block / 3.0)
    quantised = {"stored_bytes": block // 2, "file_bytes": block, "quantised_to": "fp8"}
    for run, read_s in ((run_shape(**quantised), 3.0), (run_shape(), 0.5)):
        assert run.costs(machine).hardware.disk_bytes_per_s == pytest.approx(block / read_s)


def test_a_cpu_decodes_while_nothing_computes():
    block = run_shape().blocks.computed_bytes
    run = run_shape(1, 0, stored_bytes=block // 2, file_bytes=block // 2)
    (step,) = predicted(run, rated_cpu(decode_bytes_per_s=block / 0.25), LAYERWISE).timeline.steps
    assert step.decode_s == pytest.approx(8 * 0.25)
    assert step.wall_s == pytest.approx(step.compute_s + step.stall_s + step.decode_s)


POLICIES = [LAYERWISE, OffloadPolicy.resident(), OffloadPolicy.block_swap(4, 2, source="pinned")]
POLICIES += [replace(LAYERWISE, source="pinned", ram_blocks=5)]


@pytest.mark.parametrize("policy", POLICIES)
def test_programs_are_right_on_every_machine(policy):
    run = run_shape()
    for work in (run, run_shape(stored_bytes=run.blocks.stored_bytes // 2)):
        for machine in (rated(), rated_cpu()):
            programs = compile_programs(work.costs(machine), policy)
            check_program(programs.device)
            check_ram(programs.device, programs.ram)
            assert compile_programs(work.costs(machine), policy, device=programs.device) == programs


SWITCHES = [([9, 2, 2], [7, 3, 3], 4.0), ([9, 2, 2], [3, 3, 4], 0.0)]
SWITCHES += [([9, 2, 2], [7], 5.0), ([9], [7], 7.0), ([], [9, 2, 2], 0.0)]


@pytest.mark.parametrize(("high", "low", "switch_s"), SWITCHES)
def test_the_extra_stall_of_a_switch(high, low, switch_s):
    values = {"index": 0, "sigma": None, "wall_s": 9, "compute_s": 1, "bytes_moved": 0}
    stalls = [*(("high", each) for each in high), *(("low", each) for each in low)]
    steps = tuple(StepRecord.of(expert=expert, stall_s=each, **values) for expert, each in stalls)
    timeline = Timeline(steps=steps, kind="simulated")
    assert Prediction(policy=LAYERWISE, timeline=timeline).switch_s == switch_s
