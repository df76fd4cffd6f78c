"""Nodes are inside their frames, from left to right, without overlap."""

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from wanstream.tools.arrange import TITLE, Box, Group, Size, place


def whole(layout, sizes, node):
    """Return a node's box with the title bar."""
    x, y = layout.nodes[node]
    return Box(x, y - TITLE, sizes[node].width, sizes[node].height + TITLE)


def spans(box: Box) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the first and last coordinate along each axis."""
    return (box.x, box.x + box.width), (box.y, box.y + box.height)


def overlap(one: Box, other: Box) -> bool:
    pairs = zip(spans(one), spans(other), strict=True)
    return all(first < end and begin < last for (first, last), (begin, end) in pairs)


def inside(inner: Box, outer: Box) -> bool:
    pairs = zip(spans(inner), spans(outer), strict=True)
    return all(begin <= first and last <= end for (first, last), (begin, end) in pairs)


# Whole pixels, as nodes have: sums of other floats are not exact.
PIXELS = st.integers(20, 500).map(float)
SIZES = st.builds(Size, PIXELS, PIXELS)
RANKS = st.lists(st.lists(SIZES, min_size=1, max_size=3), min_size=1, max_size=2)
COLUMNS = st.lists(st.lists(RANKS, min_size=1, max_size=3), min_size=1, max_size=4)


@given(COLUMNS)
def test_nothing_overlaps_and_every_node_is_in_its_frame(drawn):
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
    # Groups of a column stand below each other, and columns from left to right.
    frames = [[layout.frames[group.title] for group in groups] for groups in columns]
    for column in frames:
        assert column[0].y == 0
        assert {(frame.x, frame.width) for frame in column} == {(column[0].x, column[0].width)}
        assert all(two.y > one.y + one.height for one, two in pairwise(column))
    for left, right in pairwise(frames):
        assert right[0].x == left[0].x + left[0].width + 50
