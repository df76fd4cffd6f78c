"""The chart of a report: the variants as bars beside each other, and the steps of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..plan import StepRecord, Timeline
from ..plan.figure_words import second_digits, seconds_text, size_text
from .chart_bars import bars, numbered_every
from .drawing import Box, Drawing, Shape, Stroke, Text, text_width
from .report import Report, Variant
from .report_figures import TOTAL, Spread

WIDTH, MARGIN = 1100, 24
HEAD, ROW, PANEL = 84, 30, 264
STRIP = 34
"""Height of the line of memory, which lies above the bars of a panel."""
LABELS = 300
"""Width that the names of the variants take in the overview."""

CACHED = 3
"""Height of the mark under the bar of a step in which a cache left blocks out."""

MOST_PANELS = 4
"""Variants whose steps are drawn; the page of the report has the tables of all."""

LEGEND = (
    ("high", "compute, high-noise expert", 190),
    ("low", "compute, low-noise expert", 186),
    ("stall", "stall", 60),
    ("other", "outside the blocks", 140),
    ("memory", "memory", 80),
)
"""Colour, words, and the width that they take."""

LONGEST_LINE = 300
"""Characters; none that can be read is as long on this paper."""

OTHER_FONTS = 0.92
"""Share of a width that text may take in the image's font, for the page has one of its own."""


def report_chart(report: Report) -> Drawing:
    """The chart of what was measured so far."""
    shown = [variant for variant in report.variants if variant.measured][:MOST_PANELS]
    overview = ROW * len(report.variants) + 12 if len(report.variants) > 1 else 0
    shapes: list[Shape] = [
        Text(x=MARGIN, y=30, text=_short(report.title, WIDTH - 2 * MARGIN, 18), size=18),
        Text(x=MARGIN, y=50, text=_short(", ".join(report.machine.values()), WIDTH - 2 * MARGIN, 12), colour="soft"),
        *_legend(),
        *(_overview(report) if overview else ()),
    ]
    most = _Most(
        seconds=max((step.wall_s for variant in shown for step in _drawn(variant)), default=0.0) or 1.0,
        memory=max((_memory_of(step) or 0 for variant in shown for step in _drawn(variant)), default=0),
    )
    for place, variant in enumerate(shown):
        shapes += _panel(variant, HEAD + overview + place * PANEL, most)
    if not shown:
        shapes.append(Text(x=MARGIN, y=HEAD + overview + 24, text="Nothing was measured."))
    return Drawing(width=WIDTH, height=HEAD + overview + PANEL * len(shown) + (16 if shown else 48), shapes=shapes)


class _Most(NamedTuple):
    """What all panels have room for, so that they can be compared: seconds of a step, and bytes."""

    seconds: float
    memory: int


def _memory_of(step: StepRecord) -> int | None:
    """Peak VRAM; on a CPU the RAM of the process."""
    return step.rss_bytes if step.device_bytes is None else step.device_bytes


def _drawn(variant: Variant) -> Iterator[StepRecord]:
    """Every bar that the panel of `variant` has to have room for."""
    for timeline in (*variant.measured, *([variant.predicted] if variant.predicted else [])):
        yield from bars(timeline.steps)


def _short(text: str, width: float, size: int) -> str:
    """The text, or as much of its beginning as fits."""
    room, kept = width * OTHER_FONTS, min(len(text), LONGEST_LINE)
    if kept == len(text) and text_width(text, size) <= room:
        return text
    while kept and text_width(f"{text[:kept]}...", size) > room:
        kept -= 1
    return f"{text[:kept]}..."


def _legend() -> Iterator[Shape]:
    x = float(MARGIN)
    for colour, name, width in LEGEND:
        yield Box(x=x, y=62, width=11, height=11, colour=colour)
        yield Text(x=x + 16, y=72, text=name)
        x += width
    yield Stroke(x=x + 5, y=60, to_x=x + 5, to_y=75, colour="ink")
    yield Text(x=x + 16, y=72, text="shortest to longest run")
    x += 160
    yield Box(x=x, y=62, width=11, height=11, colour="ink", outline=True)
    yield Text(x=x + 16, y=72, text="predicted")
    x += 84
    yield Box(x=x, y=67, width=11, height=CACHED, colour="soft")
    yield Text(x=x + 16, y=72, text="blocks left out by a cache")


def _overview(report: Report) -> Iterator[Shape]:
    """One bar for each variant: its usual run in parts, and all of its runs as a line."""
    totals = [TOTAL.spread(variant) for variant in report.variants]
    most = max((spread.high for spread in totals if spread is not None), default=1.0)
    base = totals[0]
    scale = (WIDTH - LABELS - 2 * MARGIN - 130) / most
    for place, (variant, spread) in enumerate(zip(report.variants, totals, strict=True)):
        y = HEAD + place * ROW
        yield Text(x=MARGIN, y=y + 19, text=_short(variant.name, LABELS - 12, 12))
        if spread is None or variant.usual is None:
            said = f"failed: {variant.failed}" if variant.failed else "not measured"
            yield Text(x=MARGIN + LABELS, y=y + 19, text=_short(said, WIDTH - LABELS - 2 * MARGIN, 12), colour="soft")
            continue
        x = float(MARGIN + LABELS)
        for colour, seconds in _parts(variant.usual.steps):
            yield Box(x=x, y=y + 6, width=seconds * scale, height=18, colour=colour)
            x += seconds * scale
        yield from _whisker(MARGIN + LABELS + spread.low * scale, MARGIN + LABELS + spread.high * scale, y + 15)
        ratio = f", {spread.median / base.median:.2f}x" if base is not None and base.median and place else ""
        end = MARGIN + LABELS + spread.high * scale + 8
        yield Text(x=end, y=y + 19, text=f"{seconds_text(spread.median)} s{ratio}")


def _parts(steps: Sequence[StepRecord]) -> Iterator[tuple[str, float]]:
    """Colour and seconds of what the steps consist of, end to end."""
    for expert in ("high", "low"):
        yield expert, sum(step.compute_s for step in steps if step.expert == expert)
    yield "stall", sum(step.stall_s for step in steps)
    yield "other", sum(max(0.0, step.wall_s - step.compute_s - step.stall_s) for step in steps)


def _whisker(left: float, right: float, y: float) -> Iterator[Shape]:
    yield Stroke(x=left, y=y, to_x=right, to_y=y, colour="ink")
    for x in (left, right):
        yield Stroke(x=x, y=y - 4, to_x=x, to_y=y + 4, colour="ink")


def _panel(variant: Variant, top: float, most: _Most) -> Iterator[Shape]:
    """The steps of the usual run of `variant`."""
    usual = variant.usual
    assert usual is not None
    spread = TOTAL.spread(variant)
    assert spread is not None
    left, floor = MARGIN + 48, top + PANEL - 38
    height = floor - top - 56 - STRIP
    yield Text(x=MARGIN, y=top + 22, text=_short(variant.name, 560, 14), size=14)
    yield Text(x=WIDTH - MARGIN, y=top + 22, text=_figures(usual, TOTAL.text(spread)), anchor="end", colour="soft")
    digits, scale = second_digits([most.seconds]), height / most.seconds
    for part in (0.0, 0.5, 1.0):
        y = floor - part * height
        yield Stroke(x=left, y=y, to_x=WIDTH - MARGIN, to_y=y, colour="faint")
        yield Text(
            x=left - 8, y=y + 4, text=f"{seconds_text(part * most.seconds, digits)} s", anchor="end", colour="soft"
        )
    if not usual.steps:
        return
    steps, switch = bars(usual.steps), usual.switch_step
    pitch = (WIDTH - MARGIN - left) / len(steps)
    every = numbered_every(pitch, text_width(f" {steps[-1].index + 1} ", 12))
    for place, (step, *runs) in enumerate(zip(steps, *(bars(run.steps) for run in variant.measured), strict=True)):
        x = left + place * pitch
        yield from _bar(step, [run.wall_s for run in runs], x=x, pitch=pitch, floor=floor, scale=scale)
        if step.skipped_visits:
            yield Box(x=x + 1, y=floor + 1, width=pitch - 2, height=CACHED, colour="soft")
        if (place + 1) % every == 0 or place == 0:
            yield Text(x=x + pitch / 2, y=floor + 16, text=str(step.index + 1), anchor="middle", colour="soft")
        if step.index == switch:
            yield Stroke(x=x, y=top + 30, to_x=x, to_y=floor, colour="ink", dashed=True)
            yield Text(x=x + 4, y=floor - height - 6, text="switch")
    yield from _predicted(variant, left=left, pitch=pitch, floor=floor, scale=scale)
    if most.memory:
        yield from _memory(steps, left=left, pitch=pitch, floor=top + 30 + STRIP, scale=STRIP / most.memory)
    axis = "step" if len(steps) == len(usual.steps) else f"step, {len(usual.steps)} of them in {len(steps)} bars"
    yield Text(x=(left + WIDTH - MARGIN) / 2, y=floor + 32, text=axis, anchor="middle", colour="soft")


def _figures(usual: Timeline, total: str) -> str:
    hidden = "" if usual.overlap is None else f", {100 * usual.overlap:.0f} % of the transfers hidden"
    return f"{total}, moved {size_text(usual.bytes_moved)}{hidden}"


def _bar(
    step: StepRecord, runs: Sequence[float], *, x: float, pitch: float, floor: float, scale: float
) -> Iterator[Shape]:
    """One step: what it consists of, from the floor upwards, and how long it took in every run."""
    gap = min(6.0, pitch * 0.2)
    y = floor
    for colour, seconds in _parts([step]):
        y -= seconds * scale
        if seconds > 0:
            yield Box(x=x + gap, y=y, width=pitch - 2 * gap, height=seconds * scale, colour=colour)
    spread = Spread.of(runs)
    if spread is not None and spread.runs > 1:
        low, high, middle = floor - spread.low * scale, floor - spread.high * scale, x + pitch / 2
        yield Stroke(x=middle, y=low, to_x=middle, to_y=high, colour="ink")
        for end in (low, high):
            yield Stroke(x=middle - 3, y=end, to_x=middle + 3, to_y=end, colour="ink")


def _predicted(variant: Variant, *, left: float, pitch: float, floor: float, scale: float) -> Iterator[Shape]:
    """What the simulator said of each step, as an outline around its bar."""
    gap = min(6.0, pitch * 0.2) - 2
    for place, step in enumerate(bars(variant.predicted.steps) if variant.predicted else ()):
        high = step.wall_s * scale
        width = pitch - 2 * gap
        yield Box(x=left + place * pitch + gap, y=floor - high, width=width, height=high, colour="ink", outline=True)


def _memory(steps: Sequence[StepRecord], *, left: float, pitch: float, floor: float, scale: float) -> Iterator[Shape]:
    """The memory of each step as a line over its own floor, and the most of it in words."""
    known = [(place, value) for place, step in enumerate(steps) if (value := _memory_of(step))]
    points = [(left + (place + 0.5) * pitch, floor - value * scale) for place, value in known]
    yield Stroke(x=left, y=floor, to_x=WIDTH - MARGIN, to_y=floor, colour="faint")
    for (x, y), (to_x, to_y) in pairwise(points):
        yield Stroke(x=x, y=y, to_x=to_x, to_y=to_y, colour="memory")
    if points:
        name, most = "RAM" if steps[0].device_bytes is None else "VRAM", max(value for _, value in known)
        yield Text(x=left - 8, y=floor - 12, text=name, colour="memory", anchor="end")
        yield Text(x=left - 8, y=floor + 2, text=size_text(most), colour="memory", anchor="end")
