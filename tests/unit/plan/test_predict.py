"""Predicted seconds of a run against sums by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from wanstream.plan import Machine, OffloadJob, check_program, check_ram
from wanstream.plan.predict import CHUNK_S, Prediction, compile_programs, hardware_of, predict, visit_seconds
from wanstream.schema import OffloadPolicy, StepRecord, Timeline

Rated, Job = Callable[..., Machine], Callable[..., OffloadJob]

LAYERWISE = OffloadPolicy.layerwise(1)


def test_a_visit_is_all_lanes_and_the_cost_of_chunks(rate_machine: Rated, make_job: Job) -> None:
    job, machine = make_job(lanes={"high": 3, "low": 1}), rate_machine(visit=2.0)
    assert visit_seconds(job, machine, "high", None) == pytest.approx(6.0)
    assert visit_seconds(job, machine, "low", None) == pytest.approx(2.0)
    assert visit_seconds(job, machine, "high", 300) == pytest.approx(3 * (2.0 + 3 * CHUNK_S))  # of 1000 tokens
    assert visit_seconds(job, machine, "high", 1000) == pytest.approx(6.0)


def test_only_linear_layers_are_faster_in_int8(rate_machine: Rated, make_job: Job) -> None:
    machine, usual = rate_machine(visit=2.0, linear_speedups={"int8": 4.0}), make_job()
    linear = usual.expert.linear_flops(usual.tokens) / usual.expert.block_flops(usual.tokens)
    int8 = make_job(linear_format="int8", lanes={"high": 3, "low": 1})
    assert visit_seconds(usual, machine, "low", None) == pytest.approx(2.0)
    assert visit_seconds(int8, machine, "low", None) == pytest.approx(2.0 * (1 - linear + linear / 4))
    assert visit_seconds(int8, machine, "high", None) == pytest.approx(6.0 * (1 - linear + linear / 4))
    assert visit_seconds(make_job(linear_format="fp8"), machine, "low", None) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="linear_format is 'int4', choose '' or one of"):
        make_job(linear_format="int4")


def test_lanes_of_one_expert_are_in_the_steps_of_that_expert(rate_machine: Rated, make_job: Job) -> None:
    job = make_job(1, 1, lanes={"high": 2, "low": 1})
    high, low = predict(job, rate_machine(), LAYERWISE).timeline.steps
    assert (high.compute_s, low.compute_s) == pytest.approx((16.0, 8.0))


def test_steps_have_lanes_of_their_own_where_a_job_tells_them(rate_machine: Rated, make_job: Job) -> None:
    job = make_job(2, 1, lanes={"high": 2, "low": 4}, lanes_of_steps=(2, 1, 3))
    planned = predict(job, rate_machine(), LAYERWISE).timeline.steps
    predicted = predict(job, rate_machine(), LAYERWISE, by_step=True).timeline.steps
    assert [step.compute_s for step in planned] == pytest.approx([16.0, 16.0, 32.0])
    assert [step.compute_s for step in predicted] == pytest.approx([16.0, 8.0, 24.0])
    alike = replace(job, lanes_of_steps=())
    assert predict(alike, rate_machine(), LAYERWISE, by_step=True).timeline.steps == planned
    with pytest.raises(ValueError, match="2 values for 3 steps: give one for each step, or none"):
        replace(job, lanes_of_steps=(1, 2))


def test_lanes_of_each_side_have_their_own_tokens(rate_machine: Rated, make_job: Job) -> None:
    long, short = (make_job(tokens=tokens) for tokens in (1000, 400))
    seconds = [visit_seconds(job, rate_machine(), "high", None) for job in (long, short)]
    sides = {"lanes": {"high": 3, "low": 1}, "sides": {"high": 3, "low": 1}, "extra_tokens": (600, 0, 600)}
    job = make_job(2, 1, tokens=1000, **sides, lanes_of_steps=(3, 1, 1), sides_of_steps=(3, 1, 1))
    assert visit_seconds(job, rate_machine(), "high", None) == pytest.approx(2 * seconds[0] + seconds[1])
    assert visit_seconds(job, rate_machine(), "low", None) == pytest.approx(seconds[0])
    predicted = predict(job, rate_machine(), LAYERWISE, by_step=True).timeline.steps
    expected = [8 * (2 * seconds[0] + seconds[1]), 8 * seconds[0], 8 * seconds[0]]
    assert [step.compute_s for step in predicted] == pytest.approx(expected)
    added = visit_seconds(job, rate_machine(), "high", 500) - visit_seconds(job, rate_machine(), "high", None)
    assert added == pytest.approx(2 * CHUNK_S), "the short lane has one chunk"
    with pytest.raises(ValueError, match=r"sides are .*: give multiples of the sides"):
        replace(job, lanes={"high": 4, "low": 1})


@pytest.mark.parametrize(
    ("stored", "file", "read_s"),
    [(1.0, 1.0, 0.5), (0.5, 0.5, 0.25), (0.5, 1.0, 0.5)],
    ids=["as stored", "packed", "quantised"],
)
def test_the_first_block_is_read_then_copied_then_decoded(
    rate_machine: Rated, make_job: Job, stored: float, file: float, read_s: float
) -> None:
    block = make_job().computed_bytes
    job = make_job(stored_bytes=int(stored * block), file_bytes=int(file * block))
    decode_s = 0.0 if stored == 1.0 else 0.01
    first = predict(job, rate_machine(), LAYERWISE).timeline.first_block_s
    assert first == pytest.approx(read_s + 0.1 * stored + decode_s)


def test_quantising_slower_than_the_disk_limits_reading(rate_machine: Rated, make_job: Job) -> None:
    block = make_job().computed_bytes
    job = make_job(stored_bytes=block // 2, file_bytes=block, quantised_to="fp8")
    machine = rate_machine(quantise_bytes_per_s=block / 3.0)
    assert hardware_of(job, machine, None).disk_bytes_per_s == pytest.approx(block / 3.0)
    assert hardware_of(make_job(), machine, None).disk_bytes_per_s == pytest.approx(block / 0.5)


def test_a_cpu_decodes_while_nothing_computes(rate_cpu: Rated, make_job: Job) -> None:
    block = make_job().computed_bytes
    job = make_job(1, 0, stored_bytes=block // 2, file_bytes=block // 2)
    (step,) = predict(job, rate_cpu(decode_bytes_per_s=block / 0.25), LAYERWISE).timeline.steps
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
    rate_machine: Rated, rate_cpu: Rated, make_job: Job, policy: OffloadPolicy
) -> None:
    job = make_job()
    for work in (job, make_job(stored_bytes=job.stored_bytes // 2)):
        for machine in (rate_machine(), rate_cpu()):
            programs = compile_programs(work, machine, policy)
            check_program(programs.device)
            check_ram(programs.device, programs.ram)
            again = compile_programs(work, machine, policy, device=programs.device)
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
        StepRecord(index=0, expert=expert, sigma=None, wall_s=9, compute_s=1, stall_s=stall, bytes_moved=0)
        for expert, each in stalls.items()
        for stall in each
    ]
    timeline = Timeline(steps=tuple(steps), kind="simulated")
    assert Prediction(policy=LAYERWISE, timeline=timeline).switch_s == switch_s
