"""Thumbnails for the template browser: workflow input left, model middle, output right.

They consist of a few symbols (text, picture, film, chart, GPU, graph), so that templates differ at
a glance. A line below has the size of the weights, and how much of them is in VRAM at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi, sin
from typing import Literal, NamedTuple, TypeAlias

from PIL import Image, ImageDraw, ImageFont

SIZE = (800, 450)
SCALE = 2
"""Factor for drawing thumbnails larger and then reducing them, for smooth edges."""

PAPER = (23, 25, 33)
INK = (226, 230, 240)
FAINT = (92, 100, 120)
HIGH = (217, 115, 26)
LOW = (47, 134, 214)
GREEN = (96, 190, 132)

Input: TypeAlias = Literal["text", "first", "last", "graph"]
Output: TypeAlias = Literal["film", "chart", "picture"]

TILE = 150
"""Side length of an input symbol."""
FILM = (470, 138, 760, 312)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Content of a thumbnail."""

    inputs: tuple[Input, ...]
    label: str
    """Model name."""
    mark: str = ""
    """One or two words that distinguish the workflow from others."""
    output: Output = "film"
    experts: int = 2
    gpus: int = 0
    curve: bool = False
    """True if the sampler is chosen freely."""


SCENES = {
    "t2v": Scene(inputs=("text",), label="Wan2.2 A14B"),
    "i2v": Scene(inputs=("text", "first"), label="Wan2.2 A14B"),
    "flf2v": Scene(inputs=("first", "last"), label="Wan2.2 A14B", mark="first + last"),
    "t2v_lightning": Scene(inputs=("text",), label="Wan2.2 A14B", mark="4 steps"),
    "i2v_lightning": Scene(inputs=("text", "first"), label="Wan2.2 A14B", mark="4 steps"),
    "long_video": Scene(inputs=("text", "first"), label="Wan2.2 A14B", mark="3 clips"),
    "continue_video": Scene(inputs=("first", "last"), label="Wan2.2 A14B", mark="next clip"),
    "three_stages": Scene(inputs=("text",), label="Wan2.2 A14B", mark="three stages"),
    "draft": Scene(inputs=("text",), label="Wan2.2 A14B", mark="draft"),
    "guider": Scene(inputs=("text",), label="Wan2.2 A14B", mark="any sampler", curve=True),
    "native_mixed": Scene(inputs=("graph",), label="Wan2.2 A14B", mark="ComfyUI's nodes"),
    "native_joined": Scene(inputs=("graph",), label="Wan2.2 A14B", mark="one KSampler"),
    "native_wan22": Scene(inputs=("graph",), label="Wan2.2 A14B", mark="two KSamplers"),
    "native_vace": Scene(
        inputs=("text", "first"), label="Wan2.1 VACE", mark="native nodes", experts=1
    ),
    "native_animate": Scene(
        inputs=("first", "last"), label="Wan2.2 Animate", mark="native nodes", experts=1
    ),
    "native_flux": Scene(
        inputs=("text",), label="Flux dev", mark="native nodes", experts=1, output="picture"
    ),
    "native_qwen_image": Scene(
        inputs=("text",), label="Qwen-Image", mark="native nodes", experts=1, output="picture"
    ),
    "native_ltx2": Scene(inputs=("text",), label="LTX-2", mark="video and sound", experts=1),
    "workers": Scene(inputs=("text",), label="Wan2.2 A14B", mark="2 GPUs", gpus=2),
    "fun_control": Scene(inputs=("text", "last"), label="Fun Control 2.2", mark="control video"),
    "fun_control_workers": Scene(
        inputs=("text", "last"), label="Fun Control 2.2", mark="control, 2 GPUs", gpus=2
    ),
    "fun_inp": Scene(inputs=("first", "last"), label="Fun InP 2.2", mark="first + last"),
    "fun_inp_workers": Scene(
        inputs=("first", "last"), label="Fun InP 2.2", mark="first + last", gpus=2
    ),
    "bernini": Scene(inputs=("text", "last"), label="Bernini-R", mark="edit a video"),
    "bernini_workers": Scene(
        inputs=("text", "last"), label="Bernini-R", mark="edit, 2 GPUs", gpus=2
    ),
    "benchmark": Scene(inputs=("text",), label="Wan2.2 A14B", mark="benchmark", output="chart"),
    "wan21_t2v": Scene(inputs=("text",), label="Wan2.1 1.3B", experts=1),
    "wan21_i2v": Scene(inputs=("text", "first"), label="Wan2.1 14B", experts=1),
    "wan22_5b_t2v": Scene(inputs=("text",), label="Wan2.2 5B", experts=1),
    "wan22_5b_i2v": Scene(inputs=("text", "first"), label="Wan2.2 5B", experts=1),
}
"""Scene by workflow. A workflow missing here is a KeyError in the builder."""


class Footprint(NamedTuple):
    """Sizes of a model in GB, in the number format of the workflow's files."""

    weights: float
    """Diffusion model files together."""
    buffers: float
    """Two of the largest block under Layerwise Prefetch. Less where fp8 blocks are not decoded."""

    def words(self) -> str:
        return f"{self.weights:g} GB of weights, up to {self.buffers:g} GB in VRAM"


FP8_PAIR = Footprint(weights=29, buffers=1.4)
FOOTPRINTS = {
    "Wan2.2 A14B": FP8_PAIR,
    "Fun Control 2.2": FP8_PAIR,
    "Fun InP 2.2": FP8_PAIR,
    "Bernini-R": FP8_PAIR,
    "Wan2.1 VACE": Footprint(weights=35, buffers=1.6),
    "Wan2.2 Animate": Footprint(weights=35, buffers=1.6),
    "Flux dev": Footprint(weights=24, buffers=1.4),
    "Qwen-Image": Footprint(weights=20, buffers=0.7),
    "Wan2.1 1.3B": Footprint(weights=2.8, buffers=0.2),
    "Wan2.1 14B": Footprint(weights=16, buffers=1.6),
    "Wan2.2 5B": Footprint(weights=10, buffers=0.7),
}
"""Footprint by model. The LTX-2 file mixes number formats, and its sizes are not known here."""


def thumbnail(stem: str) -> Image.Image:
    """Draw the thumbnail for the workflow with this name."""
    scene = SCENES[stem]
    picture = Image.new("RGB", (SIZE[0] * SCALE, SIZE[1] * SCALE), PAPER)
    pen = _Pen(picture)
    tops = [150] if len(scene.inputs) == 1 else [50, 230]
    for kind, top in zip(scene.inputs, tops, strict=True):
        _input(pen, kind, (50, top, 50 + TILE, top + TILE))
    _arrow(pen, 212, 258)
    _model(pen, scene)
    _arrow(pen, 412, 458)
    if scene.output == "film":
        _film(pen, FILM)
    elif scene.output == "picture":
        pen.landscape((520, 125, 710, 315), day=0.4)
        pen.box((520, 125, 710, 315), outline=INK, round_by=2)
    else:
        _chart(pen, FILM)
    pen.words((340, 352), scene.label, 30, INK)
    if scene.mark:
        pen.words((615, 360), scene.mark, 40, GREEN)
    if scene.label in FOOTPRINTS:
        pen.words((400, 420), FOOTPRINTS[scene.label].words(), 26, INK)
    # Pillow draws without antialiasing, and this reduction smooths the edges.
    return picture.resize(SIZE, Image.Resampling.LANCZOS)


class _Pen:
    """Drawing in thumbnail pixels, scaled by `SCALE`."""

    def __init__(self, picture: Image.Image) -> None:
        self.picture = picture
        self.draw = ImageDraw.Draw(picture)

    def box(
        self,
        box: tuple[float, ...],
        *,
        fill: tuple[int, ...] | None = None,
        outline: tuple[int, ...] | None = None,
        round_by: float = 10,
    ) -> None:
        self.draw.rounded_rectangle(
            [at * SCALE for at in box], round_by * SCALE, fill, outline, 3 * SCALE
        )

    def line(
        self, points: list[tuple[float, float]], colour: tuple[int, ...], width: float = 4
    ) -> None:
        scaled = [(x * SCALE, y * SCALE) for x, y in points]
        self.draw.line(scaled, colour, round(width * SCALE), joint="curve")

    def words(
        self, middle: tuple[float, float], text: str, size: int, colour: tuple[int, ...]
    ) -> None:
        font = ImageFont.load_default(size * SCALE)
        self.draw.text((middle[0] * SCALE, middle[1] * SCALE), text, colour, font, anchor="mm")

    def landscape(self, box: tuple[int, int, int, int], *, day: float) -> None:
        left, top, right, bottom = (at * SCALE for at in box)
        self.picture.paste(landscape(right - left, bottom - top, day=day), (left, top))


def _input(pen: _Pen, kind: Input, box: tuple[int, int, int, int]) -> None:
    left, top, right, bottom = box
    if kind == "text":
        pen.box(box, outline=FAINT)
        pen.words(((left + right) / 2, top + 45), "Aa", 52, INK)
        for number, length in enumerate((1.0, 0.85, 0.6)):
            y = top + 90 + 20 * number
            pen.line([(left + 22, y), (left + 22 + (right - left - 44) * length, y)], FAINT, 6)
    elif kind == "graph":
        _graph(pen, box)
    else:
        pen.landscape((left, top + 15, right, bottom - 15), day=0.9 if kind == "last" else 0.1)
        pen.box((left, top + 15, right, bottom - 15), outline=INK, round_by=2)


def _graph(pen: _Pen, box: tuple[int, int, int, int]) -> None:
    """Draw three nodes and their links."""
    left, top, right, bottom = box
    ends = [(left + 55, top + 35), (left + 55, bottom - 35)]
    for x, y in ends:
        pen.line(
            [
                (x, y),
                (x + 20, y),
                (right - 65, (top + bottom) / 2),
                (right - 50, (top + bottom) / 2),
            ],
            GREEN,
        )
    for end, middle in [*ends, (right, (top + bottom) // 2)]:
        pen.box(
            (end - 55, middle - 25, end, middle + 25), fill=(44, 48, 60), outline=FAINT, round_by=6
        )


def _arrow(pen: _Pen, left: float, right: float) -> None:
    y = 225
    pen.line([(left, y), (right, y)], FAINT, 6)
    pen.line([(right - 14, y - 14), (right, y), (right - 14, y + 14)], FAINT, 6)


def _model(pen: _Pen, scene: Scene) -> None:
    """Draw the experts' blocks by colour, half of them filled.

    GPUs, or a curve, above them.
    """
    for row in range(4):
        for column in range(4):
            x = 275 + column * 33
            y = 160 + row * 33
            colour = HIGH if scene.experts == 2 and row < 2 else LOW
            streamed = column < 2
            pen.box(
                (x, y, x + 26, y + 26),
                fill=colour if streamed else None,
                outline=colour,
                round_by=4,
            )
    for gpu in range(scene.gpus):
        left = 275 + gpu * 70
        pen.box((left, 95, left + 56, 140), fill=(44, 48, 60), outline=GREEN, round_by=5)
        for pin in range(4):
            x = left + 10 + pin * 12
            pen.line([(x, 140), (x, 150)], GREEN, 4)
    if scene.curve:
        points = [
            (275 + step * 9.0, 100 + 40 * sin(pi * step / 28) ** 2 + step) for step in range(15)
        ]
        pen.line(points, GREEN, 5)
        for at, level in points[::3]:
            pen.box((at - 5, level - 5, at + 5, level + 5), fill=INK, round_by=5)


def _film(pen: _Pen, box: tuple[int, int, int, int]) -> None:
    """Draw video frames with a sunset."""
    left, top, right, bottom = box
    pen.box(box, fill=(44, 48, 60), round_by=6)
    width = (right - left - 40) // 3
    for number in range(3):
        x = left + 10 + number * (width + 10)
        pen.landscape((x, top + 30, x + width, bottom - 30), day=0.1 + 0.4 * number)
    for hole in range(12):
        x = left + 12 + hole * (right - left - 24) // 12
        for y in (top + 9, bottom - 21):
            pen.box((x, y, x + 12, y + 12), fill=PAPER, round_by=3)


def _chart(pen: _Pen, box: tuple[int, int, int, int]) -> None:
    """Draw bars for both experts' steps, the switch between them, and a memory line."""
    left, top, right, bottom = box
    heights = (0.9, 0.62, 0.6, 0.61, 0.59, 0.6, 0.45, 0.44, 0.46, 0.45)
    width = (right - left) / len(heights)
    for number, height in enumerate(heights):
        x = left + number * width
        pen.box(
            (x + 3, bottom - height * 170, x + width - 3, bottom),
            fill=HIGH if number < 5 else LOW,
            round_by=3,
        )
    middle = left + 5 * width
    for y in range(top, bottom, 16):
        pen.line([(middle, y), (middle, y + 9)], INK, 3)
    pen.line([(left, top + 60), (left + 60, top + 12), (right, top + 12)], (154, 91, 214), 5)


def landscape(width: int, height: int, *, day: float = 0.5) -> Image.Image:
    """Draw a sunset over the sea. `day` from 0 to 1 moves the sun down and to the right."""
    picture = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(picture)
    horizon = height * 3 // 5
    for y in range(height):
        part = (y / horizon if y < horizon else (height - y) / (height - horizon) * 0.7) * (
            1.1 - 0.6 * day
        )
        draw.line(
            [(0, y), (width, y)],
            fill=(int(40 + 200 * part), int(60 + 90 * part), int(120 - 30 * part)),
        )
    # Copied before the sun is drawn, and pasted over the lower half afterwards.
    sea = picture.crop((0, horizon, width, height))
    radius = height // 8
    middle_x = width * (0.25 + 0.5 * day)
    middle_y = horizon * (0.3 + 0.7 * day)
    sun = (middle_x - radius, middle_y - radius, middle_x + radius, middle_y + radius)
    draw.ellipse(sun, fill=(255, 226, 150))
    picture.paste(sea, (0, horizon))
    return picture
