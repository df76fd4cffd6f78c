"""Nodes are inside their frames, from left to right, without overlap."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from wanstream.tools.arrange import TITLE, Box, Group, Layout, Size, place


def whole(layout: Layout, sizes: dict[str, Size], node: str) -> Box:
    """Return a node's box with the title bar."""
    x, y = layout.nodes[node]
    return Box(x, y - TITLE, sizes[node].width, sizes[node].height + TITLE)


def overlap(one: Box, other: Box) -> bool:
    apart = (
        one.x + one.width <= other.x
        or other.x + other.width <= one.x
        or one.y + one.height <= other.y
        or other.y + other.height <= one.y
    )
    return not apart


def inside(inner: Box, outer: Box) -> bool:
    return (
        outer.x <= inner.x
        and outer.y <= inner.y
        and inner.x + inner.width <= outer.x + outer.width
        and inner.y + inner.height <= outer.y + outer.height
    )


def test_a_group_stands_below_the_other_and_the_next_column_to_the_right() -> None:
    sizes = {"a": Size(100, 50), "b": Size(200, 80), "c": Size(150, 40), "d": Size(100, 100)}
    columns = [
        [Group(title="one", ranks=[["a"], ["b"]]), Group(title="two", ranks=[["c"]])],
        [Group(title="three", ranks=[["d"]])],
    ]
    layout = place(columns, sizes)
    assert layout.nodes["a"] == (20, 98)
    assert layout.nodes["b"][0] > layout.nodes["a"][0] + 100
    assert layout.nodes["b"][1] == layout.nodes["a"][1]
    one, two, three = (layout.frames[title] for title in ("one", "two", "three"))
    assert two.y > one.y + one.height
    assert (two.x, two.width) == (one.x, one.width)
    assert three.x == one.x + one.width + 50
    assert three.y == one.y == 0


SIZES = st.builds(Size, st.floats(20, 500), st.floats(20, 500))
RANKS = st.lists(st.lists(SIZES, min_size=1, max_size=3), min_size=1, max_size=2)
COLUMNS = st.lists(st.lists(RANKS, min_size=1, max_size=3), min_size=1, max_size=4)


@given(COLUMNS)
def test_nothing_overlaps_and_every_node_is_in_its_frame(
    drawn: list[list[list[list[Size]]]],
) -> None:
    sizes: dict[str, Size] = {}

    def named(size: Size) -> str:
        name = str(len(sizes))
        sizes[name] = size
        return name

    columns = [
        [
            Group(title=f"{x}.{y}", ranks=[[named(size) for size in rank] for rank in ranks])
            for y, ranks in enumerate(groups)
        ]
        for x, groups in enumerate(drawn)
    ]
    layout = place(columns, sizes)
    boxes = [whole(layout, sizes, node) for node in sizes]
    assert not any(overlap(*pair) for pair in combinations(boxes, 2))
    assert not any(overlap(*pair) for pair in combinations(layout.frames.values(), 2))
    for groups in columns:
        for group in groups:
            for node in (node for rank in group.ranks for node in rank):
                assert inside(whole(layout, sizes, node), layout.frames[group.title])
