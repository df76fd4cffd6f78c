"""Alternatives to a run: each is planned like any other run, and the fastest comes first."""

import math
from dataclasses import replace

import pytest

from wanstream.cli import alternatives
from wanstream.cli.alternatives import VIDEOS_AT_ONCE, in_fp8, in_int8, videos_at_once
from wanstream.plan import Budgets, plan_offload
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.plan_fixtures import needs_of, rated, run_shape

BUS_BOUND = {"copy": 3.0, "read": 0.5}
"""All blocks take three times as long to copy as to compute."""
INT8 = 'storage "int8 ConvRot", multiplied in int8'


def _planned(run, machine=None, **budgets):
    choices = alternatives.plan_alternatives(run, machine or rated(), Budgets(**budgets))
    return {each.words: each for each in choices}


def test_alternatives_are_planned_and_the_fastest_is_first():
    """A slow bus favours fewer bytes, and more videos for each byte."""
    run = run_shape()
    machine = rated(**BUS_BOUND)
    found = _planned(run, machine)
    assert len(found) == 3 * (1 + len(VIDEOS_AT_ONCE))
    seconds = [choice.video_s for choice in found.values()]
    assert seconds == sorted(seconds)
    for words, videos, expected in (
        ("as requested", 1, run),
        ("as requested, 4 videos in one pass", 4, videos_at_once(run, 4)),
        ('storage "fp8"', 1, in_fp8(run)),
        ('storage "fp8", 2 videos in one pass', 2, videos_at_once(in_fp8(run), 2)),
        (f"{INT8}, 4 videos in one pass", 4, videos_at_once(in_int8(run), 4)),
    ):
        plan = plan_offload(expected, machine, Budgets())
        assert (found[words].plan, found[words].videos) == (plan, videos)
        assert found[words].video_s == plan.total_s / videos
    needs = needs_of(videos_at_once(run, 4), machine, OffloadPolicy.layerwise(1))
    found = _planned(run, machine, vram_bytes=needs.device_bytes)
    alone_s = found["as requested"].video_s
    assert found['storage "fp8"'].video_s < 0.7 * alone_s
    assert found["as requested, 4 videos in one pass"].video_s < 0.5 * alone_s


def test_way_that_does_not_fit_has_its_reason_and_comes_last():
    run = run_shape()
    needs = needs_of(run, rated(), OffloadPolicy.layerwise(1))
    found = _planned(run, vram_bytes=needs.device_bytes)
    assert found["as requested"].plan is not None
    four = found["as requested, 4 videos in one pass"]
    assert four.plan is None
    assert math.isinf(four.video_s)
    assert "to compute in" in four.why_not
    assert [*found.values()][-1].plan is None


@pytest.mark.parametrize("changes", [{"decoded_bytes": 10}, {"stored_bytes": 10, "file_bytes": 10}])
def test_weights_in_another_form_are_not_quantised(changes):
    found = _planned(run_shape(**changes))
    assert {choice.videos for choice in found.values()} == {1, *VIDEOS_AT_ONCE}
    assert not any("fp8" in words or "int8" in words for words in found)


def test_int8_and_fp8_halve_bytes_and_int8_doubles_the_residents():
    run = run_shape()
    int8 = in_int8(run)
    # Rows: 256 in each of 8 matrices, and 512 and 256 in the feed-forward.
    nbytes = run.blocks.stored_bytes // 2 + 4 * (8 * 256 + 512 + 256)
    blocks = replace(run.blocks, stored_bytes=nbytes, computed_bytes=nbytes)
    assert int8.blocks == replace(blocks, quantised_to="int8 ConvRot")
    assert int8.kernels.linear_format == "int8"
    half = run.blocks.stored_bytes // run.value_bytes
    blocks = replace(run.blocks, stored_bytes=half, decoded_bytes=half, quantised_to="fp8")
    assert in_fp8(run).blocks == blocks
    machine = rated(linear_speedups={"int8": 3.0})
    all_resident = needs_of(int8, machine, OffloadPolicy.block_swap(0, 1))
    half_resident = needs_of(run, machine, OffloadPolicy.block_swap(6, 1))
    assert (len(all_resident.buffers), len(half_resident.buffers)) == (8, 4)
    assert all_resident.raw_bytes == 0
    assert sum(all_resident.buffers) == pytest.approx(sum(half_resident.buffers), rel=0.03)


def test_linear_layers_in_int8_shorten_computing():
    run = run_shape()
    fast = {"copy": 0.01, "read": 0.01, "quantise_bytes_per_s": 1e15}
    found = _planned(run, rated(**fast, linear_speedups={"int8": 3.0}))
    linear = run.expert.linear_flops(run.tokens) / run.expert.block_flops(run.tokens)
    requested_s = found["as requested"].video_s
    assert found[INT8].video_s / requested_s == pytest.approx(1 - linear + linear / 3, rel=0.01)
    assert found['storage "fp8"'].video_s == pytest.approx(requested_s, rel=0.02)


def test_blocks_that_are_rotated_while_they_are_read_take_longer():
    int8 = in_int8(run_shape())
    decoded = alternatives.in_compute_dtype(int8)
    for run, read_s in ((in_fp8(run_shape()), 0.2), (int8, 0.5), (decoded, 0.5)):
        assert run.blocks.read_seconds(rated(read=0.1)) == pytest.approx(read_s)


def test_run_in_int8_is_compared_with_decoding():
    int8 = in_int8(run_shape())
    machine = rated(linear_speedups={"int8": 3.0})
    found = _planned(int8, machine)
    decoded = found["decoded, multiplied in bf16"].plan
    assert not any("fp8" in words for words in found)
    assert decoded.reason.endswith("; multiplied in bf16")
    assert decoded == plan_offload(alternatives.in_compute_dtype(int8), machine, Budgets())
