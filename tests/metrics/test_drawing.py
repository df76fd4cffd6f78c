"""Both forms of a drawing show the same shapes at the same places."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from PIL import Image, ImageColor

from wanstream.metrics.drawing import COLOURS, Box, Drawing, Shape, Stroke, Text

SVG = "{http://www.w3.org/2000/svg}"
PAPER = ImageColor.getrgb(COLOURS["paper"][0])
STALL = ImageColor.getrgb(COLOURS["stall"][0])


def pixels(*shapes: Shape, scale: int = 1) -> Image.Image:
    return Drawing(width=40, height=30, shapes=shapes).image(scale)


def elements(*shapes: Shape) -> list[ElementTree.Element]:
    """Those of the shapes, without the rules and the paper."""
    _, _, *found = ElementTree.fromstring(Drawing(width=40, height=30, shapes=shapes).svg())
    return found


@pytest.mark.parametrize("scale", [1, 2, 3])
def test_a_box_is_filled_and_ends_where_it_says(scale: int) -> None:
    picture = pixels(Box(x=10, y=5, width=20, height=10, colour="stall"), scale=scale)
    assert picture.size == (40 * scale, 30 * scale)
    inside = [(x, y) for x in (10 * scale, 30 * scale - 1) for y in (5 * scale, 15 * scale - 1)]
    outside = [(10 * scale - 1, 5 * scale), (30 * scale, 5 * scale), (10 * scale, 15 * scale)]
    assert {picture.getpixel(place) for place in inside} == {STALL}
    assert {picture.getpixel(place) for place in outside} == {PAPER}


def test_less_than_half_a_pixel_is_nothing() -> None:
    def painted(height: float) -> bool:
        picture = pixels(Box(x=10, y=5, width=20, height=height, colour="stall"))
        return STALL in {picture.getpixel((15, y)) for y in range(30)}

    assert [painted(height) for height in (0, 0.4, 0.6)] == [False, False, True]


def test_an_outline_is_hollow() -> None:
    picture = pixels(Box(x=10, y=5, width=20, height=10, colour="stall", outline=True))
    assert picture.getpixel((10, 10)) == STALL
    assert picture.getpixel((20, 10)) == PAPER
    (found,) = elements(Box(x=10, y=5, width=20, height=10, colour="stall", outline=True))
    assert found.get("fill") == "none"
    assert found.get("class") == "s-stall"


def test_a_dashed_line_has_gaps_in_both_forms() -> None:
    line = Stroke(x=5, y=0, to_x=5, to_y=29, colour="stall", dashed=True)
    column = [pixels(line).getpixel((5, y)) == STALL for y in range(29)]
    assert column[:4] == [True] * 4
    assert not column[5]
    assert column[8]
    assert elements(line)[0].get("stroke-dasharray") == "4 3"
    assert all(pixels(Stroke(x=5, y=0, to_x=5, to_y=29, colour="stall")).getpixel((5, y)) == STALL for y in range(29))


@pytest.mark.parametrize("anchor", ["start", "middle", "end"])
def test_text_lies_on_its_side_of_the_anchor(anchor: str) -> None:
    picture = pixels(Text(x=20, y=20, text="WWW", colour="stall", anchor=anchor, size=8))
    inked = [x for x in range(40) for y in range(30) if picture.getpixel((x, y)) != PAPER]
    assert inked
    left, right = min(inked), max(inked)
    assert {"start": left >= 19, "middle": left < 18 < 22 < right, "end": right <= 21}[anchor]
    (found,) = elements(Text(x=20, y=20, text="WWW", anchor=anchor))
    assert (found.tag, found.text, found.get("text-anchor")) == (f"{SVG}text", "WWW", anchor)


def test_svg_says_the_same_places() -> None:
    box, line = elements(
        Box(x=10, y=5, width=20, height=10, colour="high"), Stroke(x=1, y=2, to_x=3, to_y=4, colour="ink")
    )
    assert (box.tag, line.tag) == (f"{SVG}rect", f"{SVG}line")
    assert [box.get(name) for name in ("x", "y", "width", "height", "class")] == [
        "10.0",
        "5.0",
        "20.0",
        "10.0",
        "f-high",
    ]
    assert [line.get(name) for name in ("x1", "y1", "x2", "y2", "class")] == ["1.0", "2.0", "3.0", "4.0", "s-ink"]


def test_text_of_a_drawing_stays_text() -> None:
    evil = '</text><script>alert("1")</script>'
    (found,) = elements(Text(x=1, y=2, text=evil))
    assert found.text == evil


def test_every_colour_has_a_rule_for_light_and_for_dark_paper() -> None:
    svg = Drawing(width=1, height=1, shapes=()).svg()
    for name, (light, dark) in COLOURS.items():
        assert svg.count(f".f-{name}{{fill:{light}}}") == 1
        assert svg.count(f".s-{name}{{stroke:{dark}}}") == 1


def _brightness(colour: str) -> float:
    red, green, blue = (part / 255 for part in ImageColor.getrgb(colour))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("paper", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(
    ("name", "least"), [("ink", 7), ("soft", 4.5), ("high", 3), ("low", 3), ("memory", 3), ("stall", 2)]
)
def test_what_is_read_stands_out_from_the_paper(name: str, least: float, paper: int) -> None:
    """Contrast as the accessibility guidelines reckon it: 4.5 for small text, 3 for bars."""
    bright, dim = sorted((_brightness(COLOURS[part][paper]) + 0.05 for part in (name, "paper")), reverse=True)
    assert bright / dim >= least
