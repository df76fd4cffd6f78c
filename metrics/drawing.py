"""A drawing as a list of shapes, and the two forms that it takes: SVG for a page, pixels for an image."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, TypeAlias

from PIL import Image, ImageDraw, ImageFont

Anchor = Literal["start", "middle", "end"]

COLOURS = {
    "paper": ("#ffffff", "#1b1d20"),
    "ink": ("#222222", "#e6e6e6"),
    "soft": ("#6b6b6b", "#a0a0a0"),
    "faint": ("#dddddd", "#3c3f44"),
    "high": ("#35618f", "#6c9bd2"),
    "low": ("#4d9078", "#6fbf9f"),
    "stall": ("#e08e2b", "#f0a850"),
    "memory": ("#8d5a99", "#c49bd0"),
    "other": ("#c4c4c4", "#63676d"),
}
"""On light and on dark paper, by their part in a chart; those that touch each other differ in brightness too."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """A filled rectangle, or with `outline` its border alone."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    outline: bool = False


@dataclass(frozen=True, kw_only=True)
class Stroke:
    """A straight line."""

    x: float
    y: float
    to_x: float
    to_y: float
    colour: str
    dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Text:
    """One line of text whose baseline is at `y`; `x` is its start, middle or end."""

    x: float
    y: float
    text: str
    size: int = 12
    colour: str = "ink"
    anchor: Anchor = "start"


Shape: TypeAlias = Box | Stroke | Text


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Shapes on paper, in the order in which they are laid on it; all lengths in pixels."""

    width: int
    height: int
    shapes: Sequence[Shape]

    def svg(self) -> str:
        """One element with its own colours, light or dark as the reader's page is."""
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="sans-serif" role="img">',
            f"<style>{_rules(0)} @media (prefers-color-scheme: dark) {{ {_rules(1)} }}</style>",
            f'<rect width="{self.width}" height="{self.height}" class="f-paper"/>',
            *map(_svg, self.shapes),
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def image(self, scale: int = 2) -> Image.Image:
        """RGB pixels in the light colours, `scale` times as large."""
        picture = Image.new("RGB", (self.width * scale, self.height * scale), COLOURS["paper"][0])
        pencil = ImageDraw.Draw(picture)
        for shape in self.shapes:
            _paint(pencil, shape, scale)
        return picture


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def text_width(text: str, size: int) -> float:
    """Pixels that one line of text takes in an image."""
    return float(_font(size).getlength(text))


def _rules(paper: int) -> str:
    """The style rules for light paper (0) or dark (1)."""
    return " ".join(f".f-{name}{{fill:{of[paper]}}} .s-{name}{{stroke:{of[paper]}}}" for name, of in COLOURS.items())


def _svg(shape: Shape) -> str:
    if isinstance(shape, Box):
        place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}"'
        look = f'fill="none" class="s-{shape.colour}"' if shape.outline else f'class="f-{shape.colour}"'
        return f"<rect {place} {look}/>"
    if isinstance(shape, Stroke):
        dashes = ' stroke-dasharray="4 3"' if shape.dashed else ""
        ends = f'x1="{shape.x:.1f}" y1="{shape.y:.1f}" x2="{shape.to_x:.1f}" y2="{shape.to_y:.1f}"'
        return f'<line {ends} class="s-{shape.colour}"{dashes}/>'
    place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size}" text-anchor="{shape.anchor}"'
    return f'<text {place} class="f-{shape.colour}">{escape(shape.text)}</text>'


def _paint(pencil: ImageDraw.ImageDraw, shape: Shape, scale: int) -> None:
    colour = COLOURS[shape.colour][0]
    if isinstance(shape, Box):
        _paint_box(pencil, shape, scale)
    elif isinstance(shape, Stroke):
        for x, y, to_x, to_y in _dashes(shape) if shape.dashed else [(shape.x, shape.y, shape.to_x, shape.to_y)]:
            pencil.line((x * scale, y * scale, to_x * scale, to_y * scale), colour, width=scale)
    else:
        anchors = {"start": "ls", "middle": "ms", "end": "rs"}
        place, font = (shape.x * scale, shape.y * scale), _font(shape.size * scale)
        pencil.text(place, shape.text, colour, font=font, anchor=anchors[shape.anchor])


def _paint_box(pencil: ImageDraw.ImageDraw, box: Box, scale: int) -> None:
    edges = (box.x, box.y, box.x + box.width, box.y + box.height)
    left, top, past, below = (round(edge * scale) for edge in edges)
    if past <= left or below <= top:
        return  # less than half a pixel is nothing
    corners, colour = (left, top, past - 1, below - 1), COLOURS[box.colour][0]
    if box.outline:
        pencil.rectangle(corners, outline=colour, width=scale)
    else:
        pencil.rectangle(corners, colour)


def _dashes(line: Stroke) -> list[tuple[float, float, float, float]]:
    """The pieces of a dashed line, as the SVG's: 4 pixels long, 3 apart."""
    across, down = line.to_x - line.x, line.to_y - line.y
    length = (across**2 + down**2) ** 0.5
    pieces = []
    for start in range(0, int(length) + 1, 7):
        begin, end = start / length, min(1.0, (start + 4) / length)
        pieces.append((line.x + across * begin, line.y + down * begin, line.x + across * end, line.y + down * end))
    return pieces
