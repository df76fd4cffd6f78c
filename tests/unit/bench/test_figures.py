from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from wanstream.bench import Variant
from wanstream.bench.figures import (
    FIGURES,
    Figure,
    Spread,
    figures_dict,
    over_steady_s,
    steady_s,
    switch_record,
)
from wanstream.schema.records import MemorySample, PhaseRecord, Timeline

MakeTimeline = Callable[..., Timeline]
MakeVariant = Callable[..., Variant]


def figure(name: str) -> Figure:
    (found,) = (figure for figure in FIGURES if figure.name == name)
    return found


def test_a_spread_is_the_median_with_both_ends() -> None:
    assert Spread.of([5, 1, 3]) == Spread(median=3, low=1, high=5, runs=3)
    assert Spread.of([4, 1]) == Spread(median=2.5, low=1, high=4, runs=2)
    assert Spread.of([0]) == Spread(median=0, low=0, high=0, runs=1)


def test_a_figure_unknown_in_one_run_is_unknown() -> None:
    assert Spread.of([1, None, 3]) is None
    assert Spread.of([]) is None


def test_a_steady_step_is_none_that_begins_a_stage(blocking: Timeline) -> None:
    assert steady_s(blocking, "high") == 20
    assert steady_s(blocking, "low") == 20
    switch = switch_record(blocking)
    assert switch is blocking.steps[3]
    assert over_steady_s(blocking, switch) == 27
    assert over_steady_s(blocking, blocking.steps[0]) == 20


def test_a_stage_of_one_step_has_no_steady_one(make_timeline: MakeTimeline) -> None:
    run = make_timeline(40, 20, 50, switch=2)
    assert steady_s(run, "high") == 20
    assert steady_s(run, "low") is None
    assert over_steady_s(run, run.steps[2]) is None
    one_expert = make_timeline(40, 20, switch=9)
    assert switch_record(one_expert) is None
    assert figure("Switch step").of(one_expert) is None


def test_steps_are_known_by_their_number_not_by_their_place(make_timeline: MakeTimeline) -> None:
    late = make_timeline(20, 20, 47, 20, switch=12, first=10)
    assert late.switch_step == 12
    assert switch_record(late) is late.steps[2]


def test_figures_are_those_of_the_timelines(
    make_timeline: MakeTimeline, make_variant: MakeVariant
) -> None:
    given = {
        "copied_bytes": 10**9,
        "copy_s": 0.5,
        "read_bytes": 2 * 10**9,
        "read_s": 4.0,
        "stall_s": 1.0,
    }
    runs = [
        make_timeline(*walls, rss_bytes=7, **given)
        for walls in ((4, 2, 2, 3), (5, 2, 2, 3), (9, 2, 2, 3))
    ]
    variant = make_variant("a", *runs)
    expected = {
        "Total denoising": (12, 11, 16),
        "Average per step": (3, 2.75, 4),
        "Steady step, high-noise expert": (2, 2, 2),
        "First step": (5, 4, 9),
        "Switch step": (3, 3, 3),
        "Stall": (4, 4, 4),
        "Moved to buffers": (4 * 28e9,) * 3,
        "Rate to buffers": (2e9,) * 3,
        "Rate from files": (0.5e9,) * 3,
        "Transfers hidden": (0.75,) * 3,
        "Most RAM of the process": (7,) * 3,
    }
    written = figures_dict(variant)
    for name, (median, low, high) in expected.items():
        found = written[name]
        assert (found["median"], found["low"], found["high"], found["runs"]) == (
            median,
            low,
            high,
            3,
        ), name
    assert "Steady step, low-noise expert" not in written
    assert "Peak VRAM, allocated" not in written


def test_the_whole_run_includes_time_before_and_between_its_steps(
    make_timeline: MakeTimeline,
) -> None:
    run = make_timeline(2, 3)
    assert figure("Whole run, with what lies between steps").of(run) is None, (
        "of old timelines it is not known"
    )
    opened = PhaseRecord(name="open", start_s=-3.0, wall_s=2.0)
    assert (
        figure("Whole run, with what lies between steps").of(replace(run, phases=(opened,))) is None
    )
    phases = (
        PhaseRecord(name="first block", start_s=0.0, wall_s=1.5),
        PhaseRecord(name="high", start_s=1.5, wall_s=5.5),
    )
    run = replace(run, phases=(opened, *phases))
    assert figure("Whole run, with what lies between steps").of(run) == 7.0
    assert figure("Total denoising").of(run) == 5.0


def test_no_byte_of_a_run_is_left_out(make_timeline: MakeTimeline) -> None:
    run = make_timeline(2, read_bytes=10, non_block_bytes=5)
    names = "Read from files", "Weights outside the blocks"
    assert [figure(name).of(run) for name in names] == [10, 5]


def test_warm_ups_do_not_count(make_timeline: MakeTimeline, make_variant: MakeVariant) -> None:
    variant = make_variant("a", make_timeline(90), make_timeline(10), make_timeline(12))
    cold, *rest = variant.trials
    variant = replace(variant, trials=(replace(cold, warmup=True), *rest))
    assert figure("Total denoising").spread(variant) == Spread(median=11, low=10, high=12, runs=2)


def test_memory_between_the_steps_counts_too(make_timeline: MakeTimeline) -> None:
    sample = MemorySample(at_s=1, device_bytes=9, device_used_bytes=30, rss_bytes=5)
    run = make_timeline(1, 1, device_bytes=8, device_used_bytes=20, rss_bytes=7, memory=(sample,))
    assert figure("Peak VRAM, allocated").of(run) == 9
    assert figure("Most VRAM used by all").of(run) == 30
    assert figure("Most RAM of the process").of(run) == 7
    assert figure("Most page-locked RAM").of(run) is None


def test_only_figures_that_some_run_knows_are_shown(
    make_timeline: MakeTimeline, make_variant: MakeVariant
) -> None:
    plain, gpu = (
        make_variant("a", make_timeline(1)),
        make_variant("b", make_timeline(1, device_bytes=8)),
    )
    assert figures_dict(gpu).keys() - figures_dict(plain).keys() == {"Peak VRAM, allocated"}
    assert figures_dict(make_variant("c")) == {}


@pytest.mark.parametrize(
    ("name", "spread", "text"),
    [
        (
            "Total denoising",
            Spread(median=662.2, low=660.04, high=664, runs=3),
            "662.2 s (660.0 to 664.0)",
        ),
        (
            "Total denoising",
            Spread(median=0.0123, low=0.0101, high=1.5, runs=3),
            "0.0123 s (0.0101 to 1.5000)",
        ),
        ("Total denoising", Spread(median=23, low=23, high=23, runs=1), "23.00 s (1 run)"),
        (
            "Moved to buffers",
            Spread(median=28e9, low=27e9, high=29e9, runs=2),
            "28.0 GB (27.0 GB to 29.0 GB)",
        ),
        (
            "Rate from files",
            Spread(median=2.5e9, low=2e9, high=3e9, runs=2),
            "2.50 GB/s (2.00 GB/s to 3.00 GB/s)",
        ),
        (
            "Transfers hidden",
            Spread(median=0.5, low=0.25, high=1, runs=2),
            "50.0 % (25.0 % to 100.0 %)",
        ),
    ],
)
def test_a_figure_is_never_a_number_alone(name: str, spread: Spread, text: str) -> None:
    assert spread.text(figure(name).unit) == text


def test_a_short_time_among_long_ones_has_their_digits() -> None:
    stall = Spread(median=0, low=0, high=0.25, runs=3)
    assert stall.text("s", 2) == "0.00 s (0.00 to 0.25)"
    assert Spread(median=662.2, low=660, high=664, runs=3).text("s", 2).startswith("662.2 s")


def test_the_usual_run_is_the_one_in_the_middle(
    make_timeline: MakeTimeline, make_variant: Any
) -> None:
    short, middle, long = (make_timeline(wall) for wall in (1, 2, 9))
    assert make_variant("a", long, short, middle).median_run is middle
    assert make_variant("a", long, short).median_run is short
    assert make_variant("a").median_run is None


def test_a_cache_is_known_by_the_share_of_steps_that_it_shortened(
    make_timeline: MakeTimeline,
) -> None:
    share, plain = figure("Steps in which a cache skipped blocks"), make_timeline(2, 2, 2, 2)
    assert share.of(plain) is None
    lanes = (0, 1, 2, 2)
    steps = zip(plain.steps, lanes, strict=True)
    cached = [
        replace(step, skipped_lanes=count, skipped_visits=39 * (count == 2))
        for step, count in steps
    ]
    assert share.of(replace(plain, steps=tuple(cached))) == 0.5
