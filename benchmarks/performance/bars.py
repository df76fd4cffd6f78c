"""A figure of horizontal bars as SVG, written by hand: the same figures give the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LABELS, ROW, TOP, GAP = 960, 330, 26, 58, 40
COLOURS = ("#c9c9c9", "#35618f", "#5b8fc0", "#e08e2b", "#8ab6dc", "#4d9078", "#a77bb0")
INK, FAINT, OURS = "#222222", "#dddddd", "#eef4fa"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One row: its parts lie end to end in the first panel, `beside` is one bar of the second."""

    label: str
    parts: Sequence[float]
    beside: float
    highlighted: bool = False
    remark: str = ""
    """Stands in place of the bars."""


@dataclass(frozen=True, kw_only=True)
class Panels:
    """What the two panels show."""

    title: str
    parts: Sequence[str]
    unit: str
    beside: str
    beside_unit: str


def bar_figure(bars: Sequence[Bar], panels: Panels) -> str:
    """The figure, `WIDTH` wide and as high as its rows."""
    height = TOP + ROW * len(bars) + 12
    left = (LABELS, round((WIDTH - LABELS) * 0.62))
    right = (LABELS + left[1] + GAP, WIDTH - LABELS - left[1] - GAP - 60)
    scales = (
        left[1] * 0.9 / max([sum(bar.parts) for bar in bars], default=1.0),
        right[1] / max([bar.beside for bar in bars], default=1.0),
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(8, 18, panels.title, size=14, weight="bold"),
        _text(right[0], 44, f"{panels.beside} [{panels.beside_unit}]"),
        *_legend(panels),
    ]
    for place, bar in enumerate(bars):
        lines += _row(bar, TOP + place * ROW, left[0], right[0], scales)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _legend(panels: Panels) -> list[str]:
    lines, x = [], float(LABELS)
    for colour, name in zip(COLOURS, panels.parts, strict=False):
        lines.append(f'<rect x="{x:.0f}" y="34" width="10" height="10" fill="{colour}"/>')
        lines.append(_text(x + 14, 43, name))
        x += 26 + 6.4 * len(name)
    return [*lines, _text(x, 43, f"[{panels.unit}]")]


def _row(bar: Bar, y: int, left: int, right: int, scales: tuple[float, float]) -> list[str]:
    lines = [f'<rect x="0" y="{y}" width="{WIDTH}" height="{ROW}" fill="{OURS}"/>'] if bar.highlighted else []
    lines.append(_text(8, y + 17, bar.label))
    if bar.remark:
        return [*lines, _text(left, y + 17, bar.remark)]
    x = float(left)
    for colour, part in zip(COLOURS, bar.parts, strict=False):
        width = part * scales[0]
        lines.append(f'<rect x="{x:.1f}" y="{y + 5}" width="{width:.1f}" height="{ROW - 10}" fill="{colour}"/>')
        x += width
    lines.append(_text(x + 5, y + 17, f"{sum(bar.parts):.1f}"))
    width = bar.beside * scales[1]
    lines.append(f'<rect x="{right}" y="{y + 5}" width="{width:.1f}" height="{ROW - 10}" fill="{COLOURS[5]}"/>')
    lines.append(_text(right + width + 5, y + 17, f"{bar.beside:.2f}"))
    return lines


def _text(x: float, y: float, text: str, *, size: int = 12, weight: str = "normal") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" font-weight="{weight}">{escape(text)}</text>'
