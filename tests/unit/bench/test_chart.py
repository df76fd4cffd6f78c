"""The chart's pixels and texts."""

from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np
import pytest
from PIL import ImageColor, ImageDraw

from wanstream.bench import report_chart
from wanstream.bench.chart import COLOURS, HEAD, MARGIN, MAX_PANELS, PANEL, SCALE, WIDTH
from wanstream.tests.support.bench_runs import (
    BLOCKING,
    SEAMLESS,
    make_report,
    make_timeline,
    make_variant,
)

BARS = ("high", "low", "stall", "other")
LEFT = MARGIN + 48


@pytest.fixture
def words(monkeypatch):
    """Record each drawn text with its left and right end in units."""
    drawn = []
    draw = ImageDraw.ImageDraw.text

    def text(drawing, place, words, *args, font, anchor):
        length = font.getlength(words)
        left = place[0] - {"l": 0.0, "m": length / 2, "r": length}[anchor[0]]
        drawn.append((words, left / SCALE, (left + length) / SCALE))
        draw(drawing, place, words, *args, font=font, anchor=anchor)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    return drawn


def drawn_with(words, *variants):
    """Return the texts in the chart of a report."""
    words.clear()
    report_chart(make_report(*variants))
    return [each for each, _, _ in words]


def pixels(*variants, **values):
    return np.asarray(report_chart(make_report(*variants, **values)))


def painted(chart, colour, top=HEAD):
    """Return a mask for this colour, from `top` down and right of the labels."""
    inside = chart[top * SCALE :, LEFT * SCALE :]
    return np.all(inside == ImageColor.getrgb(COLOURS[colour]), axis=2)


def heights(chart, colour, top=HEAD):
    """Return the bar heights in pixels for this colour in a panel, from left to right."""
    columns = painted(chart, colour, top + 30)[: (PANEL - 68) * SCALE].sum(axis=0)
    return [max(group) for painted, group in groupby(columns, key=bool) if painted]


def test_bars_are_as_high_as_the_steps_of_the_timeline_are_long():
    chart = pixels(make_variant("a", make_timeline(4, 2, 2, 3, stall_s=0.5)))
    found = [*heights(chart, "high"), *heights(chart, "low")]
    expected = [1, 1.5 / 3.5, 1.5 / 3.5, 2.5 / 3.5]
    assert [height / found[0] for height in found] == pytest.approx(expected, abs=0.02)
    assert heights(chart, "stall") == pytest.approx([found[0] / 7] * 4, abs=1)
    run = make_timeline(4, 2)
    half = tuple(replace(step, compute_s=step.wall_s / 2) for step in run.steps)
    chart = pixels(make_variant("a", replace(run, steps=half)))
    assert heights(chart, "high") == pytest.approx(heights(chart, "other"), abs=1)


def test_panels_share_one_scale():
    chart = pixels(make_variant("new", SEAMLESS), make_variant("old", BLOCKING))
    top = HEAD + 2 * 30 + 12
    new, old = (heights(chart, "high", place)[0] for place in (top, top + PANEL))
    assert new / old == pytest.approx(65 / 40, abs=0.02)


def test_switch_is_marked(words):
    old = make_variant("old", BLOCKING)
    chart = pixels(old)
    (line,) = np.flatnonzero(painted(chart, "ink", HEAD + 60).sum(axis=0) > 200)[:1]
    (first_low,) = np.flatnonzero(painted(chart, "low").any(axis=0))[:1]
    assert 0 < first_low - line < 10 * SCALE
    assert "switch" in drawn_with(words, old)
    assert "switch" not in drawn_with(words, make_variant("a", make_timeline(2, 2, switch=9)))


def test_runs_and_the_prediction_are_lines_at_their_heights():
    runs = map(make_timeline, (2, 4, 3))
    chart = pixels(make_variant("a", *runs, predicted=make_timeline(1.5, kind="simulated")))
    bar = painted(chart, "high")
    floor = max(np.flatnonzero(painted(chart, "high").any(axis=1)))
    height = floor - min(np.flatnonzero(bar.any(axis=1)))
    middle = round(float(np.mean(np.flatnonzero(bar[floor]))))
    whisker = np.flatnonzero(painted(chart, "ink")[:floor, middle - 2 : middle + 3].any(axis=1))
    line = np.mean(np.flatnonzero(painted(chart, "predicted").any(axis=1)))
    for place, ratio in ((max(whisker), 2 / 3), (min(whisker), 4 / 3), (line, 1 / 2)):
        assert (floor - place) / height == pytest.approx(ratio, abs=0.02)


def test_overview_has_a_bar_or_a_reason_for_each_variant(words):
    failed = make_variant("resident", failed="needs 57 GB,\n24 GB free")
    new = make_variant("new", SEAMLESS, SEAMLESS)
    found = drawn_with(words, new, make_variant("old", BLOCKING), failed, make_variant("to come"))
    assert {"new", "old", "resident", "to come", "180.0 s", "167.0 s, 0.93x"} <= {*found}
    assert {"failed: needs 57 GB, 24 GB free", "not measured"} <= {*found}
    variants = [make_variant(f"v{number}", make_timeline(2, 2)) for number in range(MAX_PANELS + 2)]
    found = drawn_with(words, *variants)
    counts = [found.count(variant.name) for variant in variants]
    assert counts == [2] * MAX_PANELS + [1] * 2, "only some have panels"
    assert report_chart(make_report(make_variant("a"))).size[0] == WIDTH * SCALE
    assert "Nothing was measured." in drawn_with(words, make_variant("a"), make_variant("b"))


def test_memory_is_that_of_the_device_or_else_of_the_process(words):
    of_process = {"rss_bytes": 10**9}
    both = {"device_bytes": 3 * 10**9, **of_process}
    for memory, label, size in ((both, "VRAM", "3.00 GB"), (of_process, "RAM", "1.00 GB")):
        variant = make_variant("a", make_timeline(2, 2, **memory))
        assert {label, size} <= {*drawn_with(words, variant)}
        assert painted(pixels(variant), "memory").any()
    assert not {"VRAM", "RAM"} & {*drawn_with(words, make_variant("a", make_timeline(2, 2)))}


@pytest.mark.slow  # draws many charts
@pytest.mark.parametrize("steps", [1, 4, 40, 200, 10_000])
def test_every_word_lies_on_the_paper_and_no_number_on_another(steps, words):
    run = make_timeline(*[1.0] * steps, switch=steps // 2, device_bytes=10**9, stall_s=0.1)
    variant = make_variant("a very long name of a variant, " * 9, run, run, predicted=run)
    chart = pixels(variant, title="title " * 99, machine={"Device": "GPU " * 99})
    columns = np.any([painted(chart, colour) for colour in BARS], axis=0).any(axis=0)
    assert all(0 <= left <= right <= WIDTH for _, left, right in words)
    numbers = [(left, right) for text_drawn, left, right in words if text_drawn.isdecimal()]
    assert all(right < left for (_, right), (left, _) in pairwise(numbers))
    first, last = np.flatnonzero(columns)[[0, -1]]
    assert first < 13
    assert last > (WIDTH - MARGIN - LEFT) * SCALE - 14
    if steps > 1000:
        assert columns[first:last].all(), "bars that are narrower than a pixel leave no gaps"


def test_steps_in_which_a_cache_left_blocks_out_are_marked():
    run = make_timeline(4, 2, 2, 3)
    steps = tuple(replace(step, skipped_visits=39 * (step.index in (1, 3))) for step in run.steps)
    marks = painted(pixels(make_variant("a", replace(run, steps=steps))), "soft", HEAD + 60)
    under = np.flatnonzero(marks.sum(axis=1) > 400)
    assert len(under) == 3 * SCALE
    pitch = (WIDTH - MARGIN - LEFT) * SCALE / len(steps)
    assert {int(place // pitch) for place in np.flatnonzero(marks[under[0]])} == {1, 3}


def _brightness(colour):
    parts = np.array(ImageColor.getrgb(colour)) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return linear @ (0.2126, 0.7152, 0.0722)


def test_texts_and_bars_have_enough_contrast():
    """The accessibility guidelines ask for 4.5 for small text and 3 for bars."""
    least = {"ink": 7, "soft": 4.5, "high": 3, "low": 3, "memory": 3, "predicted": 3, "stall": 2}
    for name, ratio in least.items():
        dim, bright = sorted(_brightness(COLOURS[part]) + 0.05 for part in (name, "paper"))
        assert bright / dim >= ratio, name
