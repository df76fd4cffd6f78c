"""Alternatives to a run: each is planned like any other run, and the fastest comes first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from wanstream.plan import Budgets, Machine, OffloadJob, plan_offload
from wanstream.plan.memory import memory_needs
from wanstream.plan.planner import VIDEOS_AT_ONCE, Alternative, in_fp8, in_int8, plan_alternatives, videos_at_once
from wanstream.plan.predict import read_seconds
from wanstream.schema import OffloadPolicy

Rated, Job = Callable[..., Machine], Callable[..., OffloadJob]

BUS_BOUND = {"copy": 3.0, "read": 0.5}
"""All blocks take three times as long to copy as to compute."""


INT8 = 'storage "int8 ConvRot", multiplied in int8'


def _by_words(choices: tuple[Alternative, ...]) -> dict[str, Alternative]:
    return {choice.words: choice for choice in choices}


def test_each_way_is_planned_like_any_run_and_the_fastest_per_video_comes_first(
    rate_machine: Rated, make_job: Job
) -> None:
    job, machine, budgets = make_job(), rate_machine(**BUS_BOUND), Budgets()
    choices = plan_alternatives(job, machine, budgets)
    assert len(choices) == 3 * (1 + len(VIDEOS_AT_ONCE))
    assert [choice.video_s for choice in choices] == sorted(choice.video_s for choice in choices)
    found = _by_words(choices)
    for words, videos, expected in [
        ("as requested", 1, job),
        ("as requested, 4 videos in one pass", 4, videos_at_once(job, 4)),
        ('storage "fp8"', 1, in_fp8(job)),
        ('storage "fp8", 2 videos in one pass', 2, videos_at_once(in_fp8(job), 2)),
        (f"{INT8}, 4 videos in one pass", 4, videos_at_once(in_int8(job), 4)),
    ]:
        plan = plan_offload(expected, machine, budgets)
        assert found[words].plan == plan
        assert found[words].videos == videos
        assert found[words].video_s == plan.total_s / videos


def test_where_the_bus_is_slow_fewer_bytes_and_more_videos_for_each_of_them_are_faster(
    rate_machine: Rated, make_job: Job
) -> None:
    job, machine = make_job(), rate_machine(**BUS_BOUND)
    small = OffloadPolicy.layerwise(1)
    budgets = Budgets(vram_bytes=memory_needs(videos_at_once(job, 4), machine, small).device_bytes)
    found = _by_words(plan_alternatives(job, machine, budgets))
    alone = found["as requested"].video_s
    assert found['storage "fp8"'].video_s < 0.7 * alone
    assert found["as requested, 4 videos in one pass"].video_s < 0.5 * alone


def test_where_computing_takes_all_the_time_no_way_is_worth_naming(rate_machine: Rated, make_job: Job) -> None:
    choices = plan_alternatives(make_job(), rate_machine(copy=0.01, read=0.01), Budgets())
    assert choices[-1].video_s < 1.02 * choices[0].video_s


def test_a_way_that_does_not_fit_says_why_and_comes_last(rate_machine: Rated, make_job: Job) -> None:
    job, machine = make_job(), rate_machine()
    budgets = Budgets(vram_bytes=memory_needs(job, machine, OffloadPolicy.layerwise(1)).device_bytes)
    choices = plan_alternatives(job, machine, budgets)
    assert _by_words(choices)["as requested"].plan is not None
    four = _by_words(choices)["as requested, 4 videos in one pass"]
    assert four.plan is None
    assert math.isinf(four.video_s)
    assert "to compute in" in four.why_not
    assert choices[-1].plan is None


@pytest.mark.parametrize("changes", [{"converts": True}, {"stored_bytes": 10, "file_bytes": 10}])
def test_weights_that_are_in_another_form_already_are_not_quantised(
    changes: dict[str, object], rate_machine: Rated, make_job: Job
) -> None:
    job = replace(make_job(), **changes)  # type: ignore[arg-type]
    choices = plan_alternatives(job, rate_machine(), Budgets())
    assert {choice.videos for choice in choices} == {1, *VIDEOS_AT_ONCE}
    assert not any("fp8" in choice.words or "int8" in choice.words for choice in choices)


def test_int8_halves_ram_bus_and_buffers_and_doubles_the_residents(rate_machine: Rated, make_job: Job) -> None:
    job = make_job()
    int8 = in_int8(job)
    # Rows: 8 matrices of 256, and 512 and 256 of the feed-forward.
    assert int8.stored_bytes == int8.computed_bytes == job.stored_bytes // 2 + 4 * (8 * 256 + 512 + 256)
    assert (int8.file_bytes, int8.linear_format, int8.decodes, int8.quantises) == (job.file_bytes, "int8", False, True)
    machine = rate_machine(linear_speedups={"int8": 3.0})
    all_resident = memory_needs(int8, machine, OffloadPolicy.block_swap(0, 1))
    half_resident = memory_needs(job, machine, OffloadPolicy.block_swap(6, 1))
    assert (all_resident.buffers, half_resident.buffers, all_resident.raw_bytes) == (8, 4, 0)
    assert all_resident.buffer_bytes * 8 == pytest.approx(half_resident.buffer_bytes * 4, rel=0.03)


def test_where_computing_takes_all_the_time_int8_is_faster_by_its_linear_layers(
    rate_machine: Rated, make_job: Job
) -> None:
    job = make_job()
    machine = rate_machine(copy=0.01, read=0.01, linear_speedups={"int8": 3.0}, quantise_bytes_per_s=1e15)
    found = _by_words(plan_alternatives(job, machine, Budgets()))
    linear = job.expert.linear_flops(job.tokens) / job.expert.block_flops(job.tokens)
    faster = found[INT8].video_s / found["as requested"].video_s
    assert faster == pytest.approx(1 - linear + linear / 3, rel=0.01)


def test_blocks_that_are_rotated_while_they_are_read_take_longer(rate_machine: Rated, make_job: Job) -> None:
    job, machine = make_job(), rate_machine(read=0.1)
    assert read_seconds(in_fp8(job), machine) == pytest.approx(0.2)
    assert read_seconds(in_int8(job), machine) == pytest.approx(0.5)
    decoded = replace(in_int8(job), computed_bytes=job.computed_bytes, linear_format="")
    assert read_seconds(decoded, machine) == pytest.approx(0.5)


def test_a_run_in_int8_is_compared_with_decoding(rate_machine: Rated, make_job: Job) -> None:
    job, machine = make_job(), rate_machine(linear_speedups={"int8": 3.0})
    found = _by_words(plan_alternatives(in_int8(job), machine, Budgets()))
    decoded = found["decoded, multiplied in bf16"].plan
    assert not any("fp8" in words for words in found)
    assert decoded is not None
    assert decoded.reason.endswith("; multiplied in bf16")
    assert decoded == plan_offload(
        replace(in_int8(job), computed_bytes=job.computed_bytes, linear_format=""), machine, Budgets()
    )


def test_fp8_takes_one_byte_for_each_weight_from_ram_on(make_job: Job) -> None:
    job = make_job()
    quantised = in_fp8(job)
    assert quantised.stored_bytes * job.value_bytes == job.stored_bytes
    assert (quantised.file_bytes, quantised.computed_bytes) == (job.file_bytes, job.computed_bytes)
    assert quantised.quantises
    assert quantised.decodes
