"""The chart's pixels and texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pytest
from PIL import ImageColor, ImageDraw

from wanstream.bench import Report, Variant, report_chart
from wanstream.bench.chart import COLOURS, HEAD, MARGIN, MAX_PANELS, PANEL, SCALE, WIDTH
from wanstream.schema.records import Timeline

MakeTimeline = Callable[..., Timeline]
MakeVariant = Callable[..., Variant]
MakeReport = Callable[..., Report]

Pixels = np.ndarray[Any, Any]

BARS = ("high", "low", "stall", "other")
LEFT = MARGIN + 48


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, float]]:
    """Record each drawn text with its left and right end in units."""
    drawn: list[tuple[str, float, float]] = []
    draw = ImageDraw.ImageDraw.text

    def text(
        drawing: Any,
        place: tuple[float, float],
        text_drawn: str,
        *args: Any,
        font: Any,
        anchor: str,
    ) -> None:
        length = font.getlength(text_drawn)
        left = place[0] - {"l": 0.0, "m": length / 2, "r": length}[anchor[0]]
        drawn.append((text_drawn, left / SCALE, (left + length) / SCALE))
        draw(drawing, place, text_drawn, *args, font=font, anchor=anchor)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    return drawn


def pixels(report: Report) -> Pixels:
    return np.asarray(report_chart(report))


def painted(chart: Pixels, colour: str, top: int = HEAD) -> Pixels:
    """Return a mask for this colour, from `top` down and right of the labels."""
    return np.all(
        chart[top * SCALE :, LEFT * SCALE :] == ImageColor.getrgb(COLOURS[colour]), axis=2
    )


def heights(chart: Pixels, colour: str, top: int = HEAD) -> list[int]:
    """Return the bar heights in pixels for this colour in a panel, from left to right."""
    columns = painted(chart, colour, top + 30)[: (PANEL - 68) * SCALE].sum(axis=0)
    return [max(group) for painted, group in groupby(columns, key=bool) if painted]


def test_bars_are_as_high_as_the_steps_of_the_timeline_are_long(
    make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    run = make_timeline(4, 2, 2, 3, stall_s=0.5)
    chart = pixels(make_report(make_variant("a", run)))
    found = [*heights(chart, "high"), *heights(chart, "low")]
    assert [height / found[0] for height in found] == pytest.approx(
        [1, 1.5 / 3.5, 1.5 / 3.5, 2.5 / 3.5], abs=0.02
    )
    assert heights(chart, "stall") == pytest.approx([found[0] / 7] * 4, abs=1)


def test_time_outside_the_blocks_has_its_part(
    make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    run = make_timeline(4, 2)
    run = replace(run, steps=tuple(replace(step, compute_s=step.wall_s / 2) for step in run.steps))
    chart = pixels(make_report(make_variant("a", run)))
    assert heights(chart, "high") == pytest.approx(heights(chart, "other"), abs=1)


def test_panels_share_one_scale(
    seamless: Timeline, blocking: Timeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    chart = pixels(make_report(make_variant("new", seamless), make_variant("old", blocking)))
    top = HEAD + 2 * 30 + 12
    assert heights(chart, "high", top)[0] / heights(chart, "high", top + PANEL)[0] == pytest.approx(
        65 / 40, abs=0.02
    )


def test_the_switch_is_marked(
    blocking: Timeline,
    make_timeline: MakeTimeline,
    make_variant: MakeVariant,
    make_report: MakeReport,
    words: list[tuple[str, float, float]],
) -> None:
    chart = pixels(make_report(make_variant("old", blocking)))
    (line,) = np.flatnonzero(painted(chart, "ink", HEAD + 60).sum(axis=0) > 200)[:1]
    (first_low,) = np.flatnonzero(painted(chart, "low").any(axis=0))[:1]
    assert 0 < first_low - line < 10 * SCALE
    assert "switch" in [text_drawn for text_drawn, _, _ in words]
    words.clear()
    report_chart(make_report(make_variant("a", make_timeline(2, 2, switch=9))))
    assert "switch" not in [text_drawn for text_drawn, _, _ in words]


def test_runs_and_the_prediction_are_lines_at_their_heights(
    make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    runs = [make_timeline(wall) for wall in (2, 4, 3)]
    chart = pixels(
        make_report(make_variant("a", *runs, predicted=make_timeline(1.5, kind="simulated")))
    )
    bar, floor = painted(chart, "high"), max(np.flatnonzero(painted(chart, "high").any(axis=1)))
    height = floor - min(np.flatnonzero(bar.any(axis=1)))
    (middle,) = {round(float(np.mean(np.flatnonzero(bar[floor]))))}
    whisker = np.flatnonzero(painted(chart, "ink")[:floor, middle - 2 : middle + 3].any(axis=1))
    assert (floor - max(whisker)) / height == pytest.approx(2 / 3, abs=0.02)
    assert (floor - min(whisker)) / height == pytest.approx(4 / 3, abs=0.02)
    predicted = np.flatnonzero(painted(chart, "predicted").any(axis=1))
    assert (floor - np.mean(predicted)) / height == pytest.approx(1 / 2, abs=0.02)


def test_the_overview_has_a_bar_for_each_variant_and_says_why_one_failed(
    seamless: Timeline,
    blocking: Timeline,
    make_variant: MakeVariant,
    make_report: MakeReport,
    words: list[tuple[str, float, float]],
) -> None:
    failed = make_variant("resident", failed="needs 57 GB,\n24 GB free")
    variants = (
        make_variant("new", seamless, seamless),
        make_variant("old", blocking),
        failed,
        make_variant("to come"),
    )
    report_chart(make_report(*variants))
    text_drawn = {each for each, _, _ in words}
    assert {"new", "old", "resident", "to come"} <= text_drawn
    assert {
        "180.0 s",
        "167.0 s, 0.93x",
        "failed: needs 57 GB, 24 GB free",
        "not measured",
    } <= text_drawn


def test_memory_is_that_of_the_device_or_else_of_the_process(
    make_timeline: MakeTimeline,
    make_variant: MakeVariant,
    make_report: MakeReport,
    words: list[tuple[str, float, float]],
) -> None:
    def text_drawn(**memory: int) -> set[str]:
        words.clear()
        report_chart(make_report(make_variant("a", make_timeline(2, 2, **memory))))
        return {each for each, _, _ in words}

    assert {"VRAM", "3.00 GB"} <= text_drawn(device_bytes=3 * 10**9, rss_bytes=10**9)
    assert {"RAM", "1.00 GB"} <= text_drawn(rss_bytes=10**9)
    assert not {"VRAM", "RAM"} & text_drawn()


def test_only_some_variants_have_panels(
    make_timeline: MakeTimeline,
    make_variant: MakeVariant,
    make_report: MakeReport,
    words: list[tuple[str, float, float]],
) -> None:
    variants = [make_variant(f"v{number}", make_timeline(2, 2)) for number in range(MAX_PANELS + 2)]
    report_chart(make_report(*variants))
    text_drawn = [each for each, _, _ in words]
    assert [text_drawn.count(variant.name) for variant in variants] == [2] * MAX_PANELS + [1] * 2


def test_nothing_measured_is_a_chart_too(
    make_variant: MakeVariant, make_report: MakeReport, words: list[tuple[str, float, float]]
) -> None:
    assert report_chart(make_report(make_variant("a"), make_variant("b"))).size[0] == WIDTH * SCALE
    assert "Nothing was measured." in [text_drawn for text_drawn, _, _ in words]


@pytest.mark.slow  # draws many charts
@pytest.mark.parametrize("steps", [1, 4, 40, 200, 10_000])
def test_every_word_lies_on_the_paper_and_no_number_on_another(
    steps: int,
    make_timeline: MakeTimeline,
    make_variant: MakeVariant,
    make_report: MakeReport,
    words: list[tuple[str, float, float]],
) -> None:
    run = make_timeline(*[1.0] * steps, switch=steps // 2, device_bytes=10**9, stall_s=0.1)
    variant = make_variant("a very long name of a variant, " * 9, run, run, predicted=run)
    chart = pixels(make_report(variant, title="title " * 99, machine={"Device": "GPU " * 99}))
    columns = np.any([painted(chart, colour) for colour in BARS], axis=0).any(axis=0)
    assert all(0 <= left <= right <= WIDTH for _, left, right in words)
    numbers = [(left, right) for text_drawn, left, right in words if text_drawn.isdecimal()]
    assert all(right < left for (_, right), (left, _) in pairwise(numbers))
    first, last = np.flatnonzero(columns)[[0, -1]]
    assert first < 13
    assert last > (WIDTH - MARGIN - LEFT) * SCALE - 14
    if steps > 1000:
        assert columns[first:last].all(), "bars that are narrower than a pixel leave no gaps"


def test_steps_in_which_a_cache_left_blocks_out_are_marked(
    make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    run = make_timeline(4, 2, 2, 3)
    steps = [replace(step, skipped_visits=39 * (step.index in (1, 3))) for step in run.steps]
    chart = pixels(make_report(make_variant("a", replace(run, steps=tuple(steps)))))
    marks = painted(chart, "soft", HEAD + 60)
    under = np.flatnonzero(marks.sum(axis=1) > 400)
    assert len(under) == 3 * SCALE
    pitch = (WIDTH - MARGIN - LEFT) * SCALE / len(steps)
    assert {int(place // pitch) for place in np.flatnonzero(marks[under[0]])} == {1, 3}


def _brightness(colour: str) -> float:
    red, green, blue = (part / 255 for part in ImageColor.getrgb(colour))
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (red, green, blue)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("ink", 7),
        ("soft", 4.5),
        ("high", 3),
        ("low", 3),
        ("memory", 3),
        ("predicted", 3),
        ("stall", 2),
    ],
)
def test_texts_and_bars_have_enough_contrast(name: str, least: float) -> None:
    """The accessibility guidelines ask for 4.5 for small text and 3 for bars."""
    bright, dim = sorted(
        (_brightness(COLOURS[part]) + 0.05 for part in (name, "paper")), reverse=True
    )
    assert bright / dim >= least
