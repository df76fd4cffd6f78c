"""A run's predicted seconds against sums by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from wanstream.plan import Machine
from wanstream.plan.predict import Prediction, compile_programs
from wanstream.plan.programs import check_program, check_ram
from wanstream.schema import OffloadPolicy
from wanstream.schema.records import StepRecord, Timeline
from wanstream.shapes import StepShape
from wanstream.shapes.run import CHUNK_S
from wanstream.tests.support.plan_fixtures import predicted, run_shape, visit_seconds

Rated = Callable[..., Machine]

LAYERWISE = OffloadPolicy.layerwise(1)


def test_a_visit_is_all_lanes_and_the_cost_of_chunks(rate_machine: Rated) -> None:
    run, machine = run_shape(sides={"high": 3, "low": 1}), rate_machine(visit=2.0)
    assert visit_seconds(run, machine, "high", None) == pytest.approx(6.0)
    assert visit_seconds(run, machine, "low", None) == pytest.approx(2.0)
    assert visit_seconds(run, machine, "high", 300) == pytest.approx(
        3 * (2.0 + 3 * CHUNK_S)
    )  # of 1000 tokens
    assert visit_seconds(run, machine, "high", 1000) == pytest.approx(6.0)


def test_only_linear_layers_are_faster_in_int8(rate_machine: Rated) -> None:
    machine, usual = rate_machine(visit=2.0, linear_speedups={"int8": 4.0}), run_shape()
    linear = usual.expert.linear_flops(usual.tokens) / usual.expert.block_flops(usual.tokens)
    int8 = run_shape(linear_format="int8", sides={"high": 3, "low": 1})
    assert visit_seconds(usual, machine, "low", None) == pytest.approx(2.0)
    assert visit_seconds(int8, machine, "low", None) == pytest.approx(
        2.0 * (1 - linear + linear / 4)
    )
    assert visit_seconds(int8, machine, "high", None) == pytest.approx(
        6.0 * (1 - linear + linear / 4)
    )
    assert visit_seconds(run_shape(linear_format="fp8"), machine, "low", None) == pytest.approx(2.0)


def test_lanes_of_one_expert_are_in_the_steps_of_that_expert(rate_machine: Rated) -> None:
    run = run_shape(1, 1, sides={"high": 2, "low": 1})
    high, low = predicted(run, rate_machine(), LAYERWISE).timeline.steps
    assert (high.compute_s, low.compute_s) == pytest.approx((16.0, 8.0))


def test_steps_have_lanes_of_their_own_where_a_job_tells_them(rate_machine: Rated) -> None:
    steps = [
        StepShape(expert="high"),
        StepShape(expert="high", sides=1),
        StepShape(expert="low", sides=3),
    ]
    run = run_shape(steps=steps, sides={"high": 2, "low": 4})
    planned = predicted(run, rate_machine(), LAYERWISE).timeline.steps
    own = predicted(run, rate_machine(), LAYERWISE, by_step=True).timeline.steps
    assert [step.compute_s for step in planned] == pytest.approx([16.0, 16.0, 32.0])
    assert [step.compute_s for step in own] == pytest.approx([16.0, 8.0, 24.0])
    alike = run_shape(2, 1, sides={"high": 2, "low": 4})
    assert predicted(alike, rate_machine(), LAYERWISE, by_step=True).timeline.steps == planned


def test_lanes_of_each_side_have_their_own_tokens(rate_machine: Rated) -> None:
    long, short = (run_shape(tokens=tokens) for tokens in (1000, 400))
    seconds = [visit_seconds(run, rate_machine(), "high", None) for run in (long, short)]
    sides = {"sides": {"high": 3, "low": 1}, "extra_tokens": (600, 0, 600)}
    steps = [StepShape(expert="high"), StepShape(expert="high", sides=1), StepShape(expert="low")]
    run = run_shape(tokens=1000, steps=steps, **sides)
    assert visit_seconds(run, rate_machine(), "high", None) == pytest.approx(
        2 * seconds[0] + seconds[1]
    )
    assert visit_seconds(run, rate_machine(), "low", None) == pytest.approx(seconds[0])
    own = predicted(run, rate_machine(), LAYERWISE, by_step=True).timeline.steps
    expected = [8 * (2 * seconds[0] + seconds[1]), 8 * seconds[0], 8 * seconds[0]]
    assert [step.compute_s for step in own] == pytest.approx(expected)
    added = visit_seconds(run, rate_machine(), "high", 500) - visit_seconds(
        run, rate_machine(), "high", None
    )
    assert added == pytest.approx(2 * CHUNK_S), "the short lane has one chunk"


@pytest.mark.parametrize(
    ("stored", "file", "read_s"),
    [(1.0, 1.0, 0.5), (0.5, 0.5, 0.25), (0.5, 1.0, 0.5)],
    ids=["as stored", "packed", "quantised"],
)
def test_the_first_block_is_read_then_copied_then_decoded(
    rate_machine: Rated, stored: float, file: float, read_s: float
) -> None:
    block = run_shape().blocks.computed_bytes
    run = run_shape(stored_bytes=int(stored * block), file_bytes=int(file * block))
    decode_s = 0.0 if stored == 1.0 else 0.01
    first = predicted(run, rate_machine(), LAYERWISE).timeline.first_block_s
    assert first == pytest.approx(read_s + 0.1 * stored + decode_s)


def test_quantising_slower_than_the_disk_limits_reading(rate_machine: Rated) -> None:
    block = run_shape().blocks.computed_bytes
    run = run_shape(stored_bytes=block // 2, file_bytes=block, quantised_to="fp8")
    machine = rate_machine(quantise_bytes_per_s=block / 3.0)
    assert run.costs(machine).hardware.disk_bytes_per_s == pytest.approx(block / 3.0)
    assert run_shape().costs(machine).hardware.disk_bytes_per_s == pytest.approx(block / 0.5)


def test_a_cpu_decodes_while_nothing_computes(rate_cpu: Rated) -> None:
    block = run_shape().blocks.computed_bytes
    run = run_shape(1, 0, stored_bytes=block // 2, file_bytes=block // 2)
    (step,) = predicted(run, rate_cpu(decode_bytes_per_s=block / 0.25), LAYERWISE).timeline.steps
    assert step.decode_s == pytest.approx(8 * 0.25)
    assert step.wall_s == pytest.approx(step.compute_s + step.stall_s + step.decode_s)


@pytest.mark.parametrize(
    "policy",
    [
        LAYERWISE,
        OffloadPolicy.resident(),
        OffloadPolicy.block_swap(4, 2, source="pinned"),
        replace(LAYERWISE, source="pinned", ram_blocks=5),
    ],
)
def test_programs_are_right_on_every_machine(
    rate_machine: Rated, rate_cpu: Rated, policy: OffloadPolicy
) -> None:
    run = run_shape()
    for work in (run, run_shape(stored_bytes=run.blocks.stored_bytes // 2)):
        for machine in (rate_machine(), rate_cpu()):
            programs = compile_programs(work.costs(machine), policy)
            check_program(programs.device)
            check_ram(programs.device, programs.ram)
            again = compile_programs(work.costs(machine), policy, device=programs.device)
            assert again == programs


@pytest.mark.parametrize(
    ("stalls", "switch_s"),
    [
        ({"high": [9, 2, 2], "low": [7, 3, 3]}, 4.0),
        ({"high": [9, 2, 2], "low": [3, 3, 4]}, 0.0),
        ({"high": [9, 2, 2], "low": [7]}, 5.0),
        ({"high": [9], "low": [7]}, 7.0),
        ({"low": [9, 2, 2]}, 0.0),
    ],
)
def test_the_extra_stall_of_a_switch(stalls: dict[str, list[float]], switch_s: float) -> None:
    steps = [
        StepRecord.of(
            index=0, expert=expert, sigma=None, wall_s=9, compute_s=1, stall_s=stall, bytes_moved=0
        )
        for expert, each in stalls.items()
        for stall in each
    ]
    timeline = Timeline(steps=tuple(steps), kind="simulated")
    assert Prediction(policy=LAYERWISE, timeline=timeline).switch_s == switch_s
