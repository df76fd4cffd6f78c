from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from wanstream.metrics.charts import MOST_PANELS, report_chart
from wanstream.metrics.drawing import Box, Drawing, Stroke, Text, text_width
from wanstream.metrics.report import Report, Variant
from wanstream.plan import Timeline

MakeTimeline = Callable[..., Timeline]
MakeVariant = Callable[..., Variant]
MakeReport = Callable[..., Report]

BARS = {"high", "low", "stall", "other"}


def words(chart: Drawing) -> list[str]:
    return [shape.text for shape in chart.shapes if isinstance(shape, Text)]


def bars(chart: Drawing, *, below: float = 80) -> list[Box]:
    """The filled boxes under the legend, in their order."""
    boxes = [shape for shape in chart.shapes if isinstance(shape, Box)]
    return [box for box in boxes if box.colour in BARS and not box.outline and box.y >= below]


def test_bars_are_as_high_as_the_steps_of_the_timeline_are_long(
    make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    run = make_timeline(4, 2, 2, 3, stall_s=0.5)
    found = bars(report_chart(make_report(make_variant("a", run))))
    columns = sorted({box.x for box in found})
    assert len(columns) == 4
    scale = sum(box.height for box in found) / run.wall_s
    for x, step in zip(columns, run.steps, strict=True):
        parts = {box.colour: box for box in found if box.x == x}
        assert parts.keys() == {step.expert, "stall"}
        assert parts[step.expert].height == pytest.approx(step.compute_s * scale)
        assert parts["stall"].height == pytest.approx(step.stall_s * scale)
        assert parts["stall"].y + parts["stall"].height == pytest.approx(parts[step.expert].y)


def test_what_is_neither_compute_nor_stall_has_its_part(
    make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    run = make_timeline(4, 2)
    run = replace(run, steps=tuple(replace(step, compute_s=step.wall_s / 2) for step in run.steps))
    found = bars(report_chart(make_report(make_variant("a", run))))
    heights = {colour: sum(box.height for box in found if box.colour == colour) for colour in ("high", "other")}
    assert heights["high"] == pytest.approx(heights["other"])


def test_panels_share_one_scale(
    seamless: Timeline, blocking: Timeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    chart = report_chart(make_report(make_variant("new", seamless), make_variant("old", blocking)))
    panels = bars(chart, below=84 + 2 * 30 + 12)
    first, other = panels[0], panels[len(seamless.steps)]
    assert first.height / other.height == pytest.approx(65 / 40)


def test_the_switch_is_marked(
    blocking: Timeline, make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    chart = report_chart(make_report(make_variant("old", blocking)))
    (line,) = (shape for shape in chart.shapes if isinstance(shape, Stroke) and shape.dashed)
    switch = bars(chart)[3]
    assert switch.colour == "low"
    assert line.x < switch.x < line.x + 10
    alone = report_chart(make_report(make_variant("a", make_timeline(2, 2, switch=9))))
    assert "switch" not in words(alone)


def test_all_runs_of_a_step_are_a_line_over_its_bar(
    make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    runs = [make_timeline(wall) for wall in (2, 4, 3)]
    chart = report_chart(make_report(make_variant("a", *runs)))
    (bar,) = bars(chart)
    upright = [s for s in chart.shapes if isinstance(s, Stroke) and s.x == s.to_x and s.colour == "ink" and s.y > 84]
    (whisker,) = upright
    floor = bar.y + bar.height
    assert (floor - whisker.y) / bar.height == pytest.approx(2 / 3)
    assert (floor - whisker.to_y) / bar.height == pytest.approx(4 / 3)


def test_what_was_predicted_is_an_outline_of_its_height(
    make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    foretold = make_variant("a", make_timeline(2, 2), predicted=make_timeline(3, 1, kind="simulated"))
    chart = report_chart(make_report(foretold))
    outlines = [shape for shape in chart.shapes if isinstance(shape, Box) and shape.outline and shape.y > 84]
    assert [outline.height / bar.height for outline, bar in zip(outlines, bars(chart), strict=True)] == [
        pytest.approx(1.5),
        pytest.approx(0.5),
    ]


def test_the_overview_has_a_bar_for_each_variant_and_says_why_one_failed(
    seamless: Timeline, blocking: Timeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    failed = make_variant("resident", failed="needs 57 GB, 24 GB free")
    variants = make_variant("new", seamless, seamless), make_variant("old", blocking), failed, make_variant("to come")
    said = words(report_chart(make_report(*variants)))
    assert {"new", "old", "resident", "to come"} <= {*said}
    assert {"180.0 s", "167.0 s, 0.93x", "failed: needs 57 GB, 24 GB free", "not measured"} <= {*said}


def test_memory_is_that_of_the_device_or_else_of_the_process(
    make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    gpu = make_timeline(2, 2, device_bytes=3 * 10**9, rss_bytes=10**9)
    assert {"VRAM", "3.00 GB"} <= {*words(report_chart(make_report(make_variant("a", gpu))))}
    cpu = make_timeline(2, 2, rss_bytes=10**9)
    assert {"RAM", "1.00 GB"} <= {*words(report_chart(make_report(make_variant("a", cpu))))}
    assert not {"VRAM", "RAM"} & {*words(report_chart(make_report(make_variant("a", make_timeline(2)))))}


def test_lines_of_memory_share_one_scale(
    make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    little, much = (
        make_variant(f"{nbytes}", make_timeline(2, 2, device_bytes=nbytes)) for nbytes in (10**9, 4 * 10**9)
    )
    chart = report_chart(make_report(little, much))
    lines = [shape for shape in chart.shapes if isinstance(shape, Stroke) and shape.colour == "memory"]
    titles = [shape for shape in chart.shapes if isinstance(shape, Text) and shape.size == 14]
    low, high = (title.y + 42 - line.y for title, line in zip(titles, lines, strict=True))
    assert high / low == pytest.approx(4)


def test_only_some_variants_have_panels(
    make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    variants = [make_variant(f"v{number}", make_timeline(2, 2)) for number in range(MOST_PANELS + 2)]
    said = words(report_chart(make_report(*variants)))
    assert [said.count(variant.name) for variant in variants] == [2] * MOST_PANELS + [1] * 2


def test_nothing_measured_is_a_chart_too(make_variant: MakeVariant, make_report: MakeReport) -> None:
    assert "Nothing was measured." in words(report_chart(make_report(make_variant("a"))))
    assert report_chart(make_report(make_variant("a"), make_variant("b"))).image().size[0] > 0


@pytest.mark.parametrize("steps", [1, 4, 40, 200, 10_000])
def test_everything_lies_on_the_paper(
    steps: int, make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    run = make_timeline(*[1.0] * steps, switch=steps // 2, device_bytes=10**9, stall_s=0.1)
    variant = make_variant("a very long name of a variant, " * 9, run, run, predicted=run)
    chart = report_chart(make_report(variant, variant, title="title " * 99, machine={"Device": "GPU " * 99}))
    for shape in chart.shapes:
        if isinstance(shape, Box):
            assert 0 <= shape.x <= shape.x + shape.width <= chart.width
            assert 0 <= shape.y <= shape.y + shape.height <= chart.height
        else:
            assert 0 <= shape.x <= chart.width
            assert 0 <= shape.y <= chart.height
        if isinstance(shape, Text):
            length = text_width(shape.text, shape.size)
            left = shape.x - {"start": 0, "middle": length / 2, "end": length}[shape.anchor]
            assert left >= 0
            assert left + length <= chart.width, shape.text


@pytest.mark.parametrize("steps", [3, 40, 200, 10_000])
def test_every_step_is_seen_and_no_number_lies_on_another(
    steps: int, make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    run = make_timeline(*[1.0] * steps, switch=steps // 2)
    chart = report_chart(make_report(make_variant("a", run)))
    assert len(chart.shapes) < 1500
    assert min(bar.width for bar in bars(chart)) > 1
    numbers = [shape for shape in chart.shapes if isinstance(shape, Text) and shape.text.isdecimal()]
    places = [(shape.x, text_width(shape.text, shape.size) / 2) for shape in numbers]
    assert all(x + half < to_x - to_half for (x, half), (to_x, to_half) in pairwise(places))
    assert ("bars" in " ".join(words(chart))) == (steps > 250)


def test_steps_in_which_a_cache_left_blocks_out_are_marked(
    make_timeline: MakeTimeline, make_variant: MakeVariant, make_report: MakeReport
) -> None:
    run = make_timeline(4, 2, 2, 3)
    steps = [replace(step, skipped_visits=39 * (step.index in (1, 3))) for step in run.steps]
    chart = report_chart(make_report(make_variant("a", replace(run, steps=tuple(steps)))))
    columns = sorted({box.x for box in bars(chart)})
    marks = [shape for shape in chart.shapes if isinstance(shape, Box) and shape.colour == "soft" and shape.y > 80]
    assert [min(range(4), key=lambda place: abs(columns[place] - mark.x)) for mark in marks] == [1, 3]
    assert "blocks left out by a cache" in words(chart)
