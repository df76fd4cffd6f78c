"""Alternatives to a run: each is planned like any other run, and the fastest comes first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from wanstream.cli.alternatives import (
    VIDEOS_AT_ONCE,
    Alternative,
    in_compute_dtype,
    in_fp8,
    in_int8,
    plan_alternatives,
    videos_at_once,
)
from wanstream.plan import Budgets, Machine, plan_offload
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.plan_fixtures import needs_of, run_shape

Rated = Callable[..., Machine]

BUS_BOUND = {"copy": 3.0, "read": 0.5}
"""All blocks take three times as long to copy as to compute."""


INT8 = 'storage "int8 ConvRot", multiplied in int8'


def _by_words(choices: tuple[Alternative, ...]) -> dict[str, Alternative]:
    return {choice.words: choice for choice in choices}


def test_each_way_is_planned_like_any_run_and_the_fastest_per_video_comes_first(
    rate_machine: Rated,
) -> None:
    run, machine, budgets = run_shape(), rate_machine(**BUS_BOUND), Budgets()
    choices = plan_alternatives(run, machine, budgets)
    assert len(choices) == 3 * (1 + len(VIDEOS_AT_ONCE))
    assert [choice.video_s for choice in choices] == sorted(choice.video_s for choice in choices)
    found = _by_words(choices)
    for words, videos, expected in [
        ("as requested", 1, run),
        ("as requested, 4 videos in one pass", 4, videos_at_once(run, 4)),
        ('storage "fp8"', 1, in_fp8(run)),
        ('storage "fp8", 2 videos in one pass', 2, videos_at_once(in_fp8(run), 2)),
        (f"{INT8}, 4 videos in one pass", 4, videos_at_once(in_int8(run), 4)),
    ]:
        plan = plan_offload(expected, machine, budgets)
        assert found[words].plan == plan
        assert found[words].videos == videos
        assert found[words].video_s == plan.total_s / videos


def test_where_the_bus_is_slow_fewer_bytes_and_more_videos_for_each_of_them_are_faster(
    rate_machine: Rated,
) -> None:
    run, machine = run_shape(), rate_machine(**BUS_BOUND)
    small = OffloadPolicy.layerwise(1)
    budgets = Budgets(vram_bytes=needs_of(videos_at_once(run, 4), machine, small).device_bytes)
    found = _by_words(plan_alternatives(run, machine, budgets))
    alone = found["as requested"].video_s
    assert found['storage "fp8"'].video_s < 0.7 * alone
    assert found["as requested, 4 videos in one pass"].video_s < 0.5 * alone


def test_where_computing_takes_all_the_time_no_way_is_worth_naming(rate_machine: Rated) -> None:
    choices = plan_alternatives(run_shape(), rate_machine(copy=0.01, read=0.01), Budgets())
    assert choices[-1].video_s < 1.02 * choices[0].video_s


def test_a_way_that_does_not_fit_says_why_and_comes_last(rate_machine: Rated) -> None:
    run, machine = run_shape(), rate_machine()
    budgets = Budgets(vram_bytes=needs_of(run, machine, OffloadPolicy.layerwise(1)).device_bytes)
    choices = plan_alternatives(run, machine, budgets)
    assert _by_words(choices)["as requested"].plan is not None
    four = _by_words(choices)["as requested, 4 videos in one pass"]
    assert four.plan is None
    assert math.isinf(four.video_s)
    assert "to compute in" in four.why_not
    assert choices[-1].plan is None


@pytest.mark.parametrize("changes", [{"decoded_bytes": 10}, {"stored_bytes": 10, "file_bytes": 10}])
def test_weights_that_are_in_another_form_already_are_not_quantised(
    changes: dict[str, object], rate_machine: Rated
) -> None:
    run = run_shape(**changes)
    choices = plan_alternatives(run, rate_machine(), Budgets())
    assert {choice.videos for choice in choices} == {1, *VIDEOS_AT_ONCE}
    assert not any("fp8" in choice.words or "int8" in choice.words for choice in choices)


def test_int8_halves_ram_bus_and_buffers_and_doubles_the_residents(rate_machine: Rated) -> None:
    run = run_shape()
    int8 = in_int8(run)
    # Rows: 256 in each of 8 matrices, and 512 and 256 in the feed-forward.
    nbytes = run.blocks.stored_bytes // 2 + 4 * (8 * 256 + 512 + 256)
    stored = {"stored_bytes": nbytes, "computed_bytes": nbytes, "quantised_to": "int8 ConvRot"}
    assert int8.blocks == replace(run.blocks, **stored)  # type: ignore[arg-type]
    assert int8.kernels.linear_format == "int8"
    machine = rate_machine(linear_speedups={"int8": 3.0})
    all_resident = needs_of(int8, machine, OffloadPolicy.block_swap(0, 1))
    half_resident = needs_of(run, machine, OffloadPolicy.block_swap(6, 1))
    assert (len(all_resident.buffers), len(half_resident.buffers)) == (8, 4)
    assert all_resident.raw_bytes == 0
    assert sum(all_resident.buffers) == pytest.approx(sum(half_resident.buffers), rel=0.03)


def test_where_computing_takes_all_the_time_int8_is_faster_by_its_linear_layers(
    rate_machine: Rated,
) -> None:
    run = run_shape()
    machine = rate_machine(
        copy=0.01, read=0.01, linear_speedups={"int8": 3.0}, quantise_bytes_per_s=1e15
    )
    found = _by_words(plan_alternatives(run, machine, Budgets()))
    linear = run.expert.linear_flops(run.tokens) / run.expert.block_flops(run.tokens)
    faster = found[INT8].video_s / found["as requested"].video_s
    assert faster == pytest.approx(1 - linear + linear / 3, rel=0.01)


def test_blocks_that_are_rotated_while_they_are_read_take_longer(rate_machine: Rated) -> None:
    run, machine = run_shape(), rate_machine(read=0.1)
    assert in_fp8(run).blocks.read_seconds(machine) == pytest.approx(0.2)
    assert in_int8(run).blocks.read_seconds(machine) == pytest.approx(0.5)
    assert in_compute_dtype(in_int8(run)).blocks.read_seconds(machine) == pytest.approx(0.5)


def test_a_run_in_int8_is_compared_with_decoding(rate_machine: Rated) -> None:
    run, machine = run_shape(), rate_machine(linear_speedups={"int8": 3.0})
    found = _by_words(plan_alternatives(in_int8(run), machine, Budgets()))
    decoded = found["decoded, multiplied in bf16"].plan
    assert not any("fp8" in words for words in found)
    assert decoded is not None
    assert decoded.reason.endswith("; multiplied in bf16")
    assert decoded == plan_offload(in_compute_dtype(in_int8(run)), machine, Budgets())


def test_fp8_takes_one_byte_for_each_weight_from_ram_on() -> None:
    run = run_shape()
    quantised = in_fp8(run)
    nbytes = run.blocks.stored_bytes // run.value_bytes
    stored = {"stored_bytes": nbytes, "decoded_bytes": nbytes, "quantised_to": "fp8"}
    assert quantised.blocks == replace(run.blocks, **stored)  # type: ignore[arg-type]
