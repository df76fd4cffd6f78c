"""Positions of nodes on the canvas: groups in columns, from left to right. Pure functions.

The nodes of a group are placed below each other; a node with a source in the same group is placed to its right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

GAP = 50.0
PADDING = 20.0
BADGE = 32.0
"""Space above each node for its badge, which does not shrink when the canvas is zoomed out."""
TITLE = 30.0
"""Height of a node's title bar, which is above its position."""
GROUP_TITLE = 36.0


class Size(NamedTuple):
    """Width and height of a node without its title bar, in pixels of the canvas."""

    width: float
    height: float


class Box(NamedTuple):
    """Rectangle on the canvas."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, kw_only=True)
class Group:
    """Titled frame; `ranks` are the ids of its nodes, in sub-columns from left to right."""

    title: str
    ranks: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Positions of all nodes (below their title bars), and the frames of the groups by title."""

    nodes: Mapping[str, tuple[float, float]]
    frames: Mapping[str, Box]


def place(columns: Sequence[Sequence[Group]], sizes: Mapping[str, Size]) -> Layout:
    """Put the groups of each column below each other and the columns side by side, from (0, 0)."""
    nodes: dict[str, tuple[float, float]] = {}
    frames: dict[str, Box] = {}
    left = 0.0
    for column in columns:
        top = 0.0
        for group in column:
            placed = _inside(group, sizes, left + PADDING, top + GROUP_TITLE)
            nodes |= placed
            right = max(placed[node][0] + sizes[node].width for node in placed)
            bottom = max(placed[node][1] + sizes[node].height for node in placed)
            frames[group.title] = Box(left, top, right + PADDING - left, bottom + PADDING - top)
            top = bottom + PADDING + GAP
        left = max(frames[group.title].x + frames[group.title].width for group in column) + GAP
        _widen(column, frames, left - GAP)
    return Layout(nodes=nodes, frames=frames)


def _inside(group: Group, sizes: Mapping[str, Size], left: float, top: float) -> dict[str, tuple[float, float]]:
    """Return the positions of a group's nodes, starting at (left, top) within the frame."""
    placed = {}
    for rank in group.ranks:
        below = top
        for node in rank:
            placed[node] = (left, below + BADGE + TITLE)
            below += BADGE + TITLE + sizes[node].height
        left += max(sizes[node].width for node in rank) + GAP
    return placed


def _widen(column: Sequence[Group], frames: dict[str, Box], right: float) -> None:
    """Make all frames of a column equally wide."""
    for group in column:
        frame = frames[group.title]
        frames[group.title] = frame._replace(width=right - frame.x)
