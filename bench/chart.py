"""Report chart as an image: a bar per variant, and below them the first few variants' steps."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

from PIL import Image, ImageDraw, ImageFont

from ..schema.records import StepRecord, Timeline, limit_share
from ..schema.text import format_seconds, format_size, second_digits
from .figures import TOTAL, Spread, memory_bytes, spread_text
from .report import Report, Variant

SCALE = 2
"""Image pixels per unit of the lengths below."""
WIDTH = 1100
MARGIN = 24
HEAD = 84
ROW = 30
PANEL = 264
STRIP = 34
"""Height of the memory line above a panel's bars."""
LABELS = 300
"""Width for variant names in the overview."""
MAX_PANELS = 4
"""Number of variants with drawn steps. The report tables have all."""
LABEL_INTERVALS = (1, 5, 10, 50, 100, 500, 1000)
"""Possible distances between bars labelled with their step."""

COLOURS = {
    "paper": "#ffffff",
    "ink": "#222222",
    "soft": "#6b6b6b",
    "faint": "#dddddd",
    "high": "#35618f",
    "low": "#4d9078",
    "stall": "#e08e2b",
    "memory": "#8d5a99",
    "other": "#c4c4c4",
    "predicted": "#b3261e",
}
LEGEND = (
    ("high", "compute, high-noise expert"),
    ("low", "compute, low-noise expert"),
    ("stall", "stall"),
    ("other", "outside the blocks"),
    ("memory", "memory"),
    ("ink", "shortest to longest run"),
    ("predicted", "predicted"),
    ("soft", "blocks skipped by a cache"),
)


def report_chart(report: Report) -> Image.Image:
    """Draw the runs measured so far as an RGB image."""
    shown = [variant for variant in report.variants if variant.measured][:MAX_PANELS]
    top = HEAD
    if len(report.variants) > 1:
        top += ROW * len(report.variants) + 12
    width = WIDTH - 2 * MARGIN
    canvas = _Canvas(top + max(PANEL * len(shown) + 16, 48))
    canvas.text(MARGIN, 30, report.title, size=18, max_width=width)
    machine = ", ".join(report.machine.values())
    canvas.text(MARGIN, 50, machine, colour="soft", max_width=width)
    x = float(MARGIN)
    for colour, label in LEGEND:
        canvas.box(x, 62, 11, 11, colour)
        x += 30 + canvas.text(x + 16, 72, label)
    if top > HEAD:
        _draw_overview(canvas, report)
    runs = chain.from_iterable((*variant.measured, variant.predicted) for variant in shown)
    steps = [step for run in runs if run for step in run.steps]
    # The panels divide by these seconds, so they are never 0.
    seconds = max((step.wall_s for step in steps), default=0.0) or 1.0
    memory = max((memory_bytes(step.memory) or 0 for step in steps), default=0)
    for place, variant in enumerate(shown):
        _draw_panel(canvas, variant, top + place * PANEL, seconds, memory)
    if not shown:
        canvas.text(MARGIN, top + 24, "Nothing was measured.")
    return canvas.image


class _Canvas:
    """Image with methods to draw boxes, lines and text.

    All lengths are in units of `SCALE` pixels.
    """

    def __init__(self, height: int) -> None:
        self.image = Image.new("RGB", (WIDTH * SCALE, height * SCALE), COLOURS["paper"])
        self._draw = ImageDraw.Draw(self.image)

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """Draw a filled rectangle. One narrower than a pixel is omitted."""
        left, top, right, bottom = (round(edge * SCALE) for edge in (x, y, x + width, y + height))
        if right > left and bottom > top:
            # Pillow's rectangles include the pixels at `right` and `bottom`.
            self._draw.rectangle((left, top, right - 1, bottom - 1), COLOURS[colour])

    def line(self, x: float, y: float, to_x: float, to_y: float, colour: str) -> None:
        """Draw a line, one unit wide."""
        self._draw.line([edge * SCALE for edge in (x, y, to_x, to_y)], COLOURS[colour], width=SCALE)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 12,
        colour: str = "ink",
        anchor: str = "ls",
        max_width: float = WIDTH,
    ) -> float:
        """Draw one line of text, truncated to `max_width`, and return the width."""
        # Pillow would draw several lines if the text had line ends.
        text = " ".join(text.split())
        font = _font(size * SCALE)
        # Each length is measured, and usual text of 300 characters is wider than the chart.
        truncated = (f"{text[:length]}..." for length in range(min(len(text), 300), 0, -1))
        text = next(
            (each for each in (text, *truncated) if font.getlength(each) <= max_width * SCALE), ""
        )
        self._draw.text((x * SCALE, y * SCALE), text, COLOURS[colour], font=font, anchor=anchor)
        return font.getlength(text) / SCALE


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    # Pillow contains this font, so the image does not depend on the system's fonts.
    return ImageFont.load_default(size)


def _parts(steps: Sequence[StepRecord]) -> Iterator[tuple[str, float]]:
    """Yield colour and seconds by part of the steps."""
    for expert in ("high", "low"):
        yield expert, sum(step.compute_s for step in steps if step.expert == expert)
    yield "stall", sum(step.stall_s for step in steps)
    # The host measures the wall time and the device the parts, so the rest could be below 0.
    yield "other", sum(max(0.0, step.wall_s - step.compute_s - step.stall_s) for step in steps)


def _draw_overview(canvas: _Canvas, report: Report) -> None:
    """Draw one bar per variant: the parts of the median run.

    A line goes from the shortest to the longest run.
    """
    totals = [TOTAL.spread(variant) for variant in report.variants]
    base = totals[0]
    left = MARGIN + LABELS
    most = max((total.high for total in totals if total), default=0.0)
    scale = (WIDTH - left - MARGIN - 130) / (most or 1.0)
    for place, (variant, total) in enumerate(zip(report.variants, totals, strict=True)):
        y = HEAD + place * ROW
        canvas.text(MARGIN, y + 19, variant.name, max_width=LABELS - 12)
        if total is None or variant.median_run is None:
            reason = variant.failed and f"failed: {variant.failed}"
            width = WIDTH - left - MARGIN
            canvas.text(left, y + 19, reason or "not measured", colour="soft", max_width=width)
            continue
        x = float(left)
        for colour, seconds in _parts(variant.median_run.steps):
            canvas.box(x, y + 6, seconds * scale, 18, colour)
            x += seconds * scale
        low = left + total.low * scale
        high = left + total.high * scale
        canvas.line(low, y + 15, high, y + 15, "ink")
        label = f"{format_seconds(total.median)} s"
        if place and base is not None and base.median:
            label += f", {total.median / base.median:.2f}x"
        canvas.text(high + 8, y + 19, label)


def _draw_panel(canvas: _Canvas, variant: Variant, top: float, seconds: float, memory: int) -> None:
    """Draw the median run's steps.

    `seconds` and `memory` (bytes) are the scale for all panels.
    """
    median = variant.median_run
    assert median is not None
    left = MARGIN + 48
    right = WIDTH - MARGIN
    floor = top + PANEL - 38
    height = floor - top - 56 - STRIP
    canvas.text(MARGIN, top + 22, variant.name, size=14, max_width=560)
    canvas.text(right, top + 22, _panel_text(variant, median), colour="soft", anchor="rs")
    for part in (0.0, 0.5, 1.0):
        y = floor - part * height
        label = format_seconds(part * seconds, second_digits([seconds]))
        canvas.line(left, y, right, y, "faint")
        canvas.text(left - 8, y + 4, f"{label} s", colour="soft", anchor="rs")
    if not median.steps:
        return
    pitch = (right - left) / len(median.steps)
    scale = height / seconds
    label_width = _font(12 * SCALE).getlength(f" {median.steps[-1].index + 1} ") / SCALE
    # Step 1 has a label and step `interval` has the next one, `interval` - 1 bars to the right.
    fitting = (each for each in LABEL_INTERVALS if max(each - 1, 1) * pitch >= label_width)
    interval = next(fitting, len(median.steps))
    # Each entry has one step's wall times in all runs.
    times = zip(*([step.wall_s for step in run.steps] for run in variant.measured), strict=True)
    for place, (step, walls) in enumerate(zip(median.steps, times, strict=True)):
        x = left + place * pitch
        _draw_step(canvas, step, walls, x, pitch, floor, scale)
        if (place + 1) % interval == 0 or place == 0:
            canvas.text(x + pitch / 2, floor + 16, str(step.index + 1), colour="soft", anchor="ms")
        if step.index == median.switch_step:
            canvas.line(x, top + 30, x, floor, "ink")
            canvas.text(x + 4, floor - height - 6, "switch")
    if variant.predicted is not None:
        for place, step in enumerate(variant.predicted.steps):
            y = floor - step.wall_s * scale
            canvas.line(left + place * pitch, y, left + (place + 1) * pitch, y, "predicted")
    if memory:
        _draw_memory(canvas, median.steps, left, pitch, top + 30 + STRIP, STRIP / memory)
    canvas.text((left + right) / 2, floor + 32, "step", colour="soft", anchor="ms")


def _panel_text(variant: Variant, median: Timeline) -> str:
    """Return the total over all runs, and the median run's figures."""
    parts = [spread_text(map(TOTAL.of, variant.measured), TOTAL.unit)]
    share = limit_share(median, variant.predicted)
    if share is not None:
        parts.append(f"computed at {share:.0%} of the device's limit")
    parts.append(f"moved {format_size(median.bytes_moved)}")
    overlap = median.transfers.overlap
    if overlap is not None:
        parts.append(f"{100 * overlap:.0f} % of the transfers hidden")
    return ", ".join(parts)


def _draw_step(
    canvas: _Canvas,
    step: StepRecord,
    runs: Sequence[float],
    x: float,
    pitch: float,
    floor: float,
    scale: float,
) -> None:
    """Draw the parts of one step from `floor` up, and a line from shortest to longest run."""
    # Very narrow bars must touch. With a gap, rounding would leave pixels between them that belong
    # to no step.
    gap = min(6.0, pitch * 0.2) if pitch >= 3 else 0.0
    y = floor
    for colour, seconds in _parts([step]):
        y -= seconds * scale
        canvas.box(x + gap, y, pitch - 2 * gap, seconds * scale, colour)
    if step.skipped_visits:
        canvas.box(x + gap, floor + 1, pitch - 2 * gap, 3, "soft")
    spread = Spread.of(runs)
    # Bars without a gap are very narrow, and these lines would cover them.
    if spread is not None and spread.runs > 1 and gap:
        middle = x + pitch / 2
        canvas.line(middle, floor - spread.low * scale, middle, floor - spread.high * scale, "ink")


def _draw_memory(
    canvas: _Canvas,
    steps: Sequence[StepRecord],
    left: float,
    pitch: float,
    floor: float,
    scale: float,
) -> None:
    """Draw step memory as a line above `floor`, labelled with the maximum."""
    canvas.line(left, floor, WIDTH - MARGIN, floor, "faint")
    points = []
    most = 0
    for place, step in enumerate(steps):
        nbytes = memory_bytes(step.memory)
        if nbytes:
            points.append((left + (place + 0.5) * pitch, floor - nbytes * scale))
            most = max(most, nbytes)
    for start, end in pairwise(points):
        canvas.line(*start, *end, "memory")
    if points:
        name = "RAM" if steps[0].memory.device_bytes is None else "VRAM"
        canvas.text(left - 8, floor - 12, name, colour="memory", anchor="rs")
        canvas.text(left - 8, floor + 2, format_size(most), colour="memory", anchor="rs")
