from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanstream.offload.formats.safetensors_header import FileVersion
from wanstream.offload.sources.read_plan import (
    ALIGNMENT,
    CACHED_SHARE,
    EXTENT_BYTES,
    GAP_BYTES,
    PIECE_BYTES,
    ReadPiece,
    direct_extents,
    read_route,
)

A, B = Path("a"), Path("b")
MEMORY = memoryview(bytearray(1))
PAGE = ALIGNMENT


def piece(path: Path, offset: int, nbytes: int, target: int = 0, name: str = "x") -> ReadPiece:
    return ReadPiece(path=path, offset=offset, nbytes=nbytes, target=target, names=(name,))


def cover(
    *pieces: ReadPiece, extent_bytes: int = 4 * PAGE
) -> list[tuple[str, int, int, int, tuple[str, ...], int]]:
    extents = direct_extents([(piece, MEMORY) for piece in pieces], extent_bytes=extent_bytes)
    return [
        (str(e.span.path), e.span.offset, e.span.nbytes, e.wanted, e.span.names, len(e.parts))
        for e in extents
    ]


FAR = GAP_BYTES + PAGE


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([piece(A, 5, 0)], [], id="an empty piece"),
        pytest.param([piece(A, 5, 10)], [("a", 0, PAGE, 15, ("x",), 1)], id="within a page"),
        pytest.param(
            [piece(A, PAGE - 1, 2)],
            [("a", 0, 2 * PAGE, PAGE + 1, ("x",), 1)],
            id="over a page's edge",
        ),
        pytest.param(
            [piece(A, 8, 6 * PAGE)],
            [
                ("a", 0, 4 * PAGE, 4 * PAGE, ("x",), 1),
                ("a", 4 * PAGE, 3 * PAGE, 2 * PAGE + 8, ("x",), 1),
            ],
            id="cut at a page's edge",
        ),
        pytest.param(
            [piece(A, 8, 100, 0, "x"), piece(A, 108, 100, 100, "y")],
            [("a", 0, PAGE, 208, ("x", "y"), 2)],
            id="neighbours",
        ),
        pytest.param(
            [piece(A, PAGE + 8, 100, 0, "y"), piece(A, 8, 100, 100, "x")],
            [("a", 0, 2 * PAGE, PAGE + 108, ("x", "y"), 2)],
            id="in the order of the file, with a small gap",
        ),
        pytest.param(
            [piece(A, 8, 100, 0, "x"), piece(A, FAR + PAGE, 100, 100, "y")],
            [("a", 0, PAGE, 108, ("x",), 1), ("a", FAR + PAGE, PAGE, 100, ("y",), 1)],
            id="a gap that is not read",
        ),
        pytest.param(
            [piece(A, 8, 10), piece(B, 18, 10)],
            [("a", 0, PAGE, 18, ("x",), 1), ("b", 0, PAGE, 28, ("x",), 1)],
            id="two files",
        ),
        pytest.param(
            [piece(A, 0, 100, 0, "x"), piece(A, 0, 100, 100, "y")],
            [("a", 0, PAGE, 100, ("x", "y"), 2)],
            id="the same bytes to two places",
        ),
        pytest.param(
            [piece(A, 0, 5 * PAGE, 0, "x"), piece(A, 0, 100, 9999, "y")],
            [
                ("a", 0, PAGE, 100, ("y",), 1),
                ("a", 0, 4 * PAGE, 4 * PAGE, ("x",), 1),
                ("a", 4 * PAGE, PAGE, PAGE, ("x",), 1),
            ],
            id="a part of the same bytes",
        ),
    ],
)
def test_extents_table(pieces, expected):
    assert sorted(cover(*pieces)) == expected


def test_a_gap_is_read_along_where_that_costs_less_than_a_read():
    near, far = (piece(A, PAGE + gap, 100, 100, "y") for gap in (GAP_BYTES, GAP_BYTES + PAGE))
    assert len(cover(piece(A, 8, 100), near, extent_bytes=EXTENT_BYTES)) == 1
    assert len(cover(piece(A, 8, 100), far, extent_bytes=EXTENT_BYTES)) == 2


def test_another_version_of_a_file_is_another_file():
    newer = ReadPiece(
        path=A,
        offset=10,
        nbytes=5,
        target=0,
        names=("y",),
        version=FileVersion(nbytes=1, modified_ns=2),
    )
    assert len(cover(piece(A, 0, 10), newer)) == 2


places = st.tuples(st.sampled_from([A, B]), st.integers(0, 20 * PAGE), st.integers(0, 9 * PAGE))


@settings(deadline=None, max_examples=200)
@given(st.lists(places, max_size=6), st.integers(1, 5))
def test_every_wanted_byte_comes_from_its_place_and_no_page_is_read_twice(parts, pages):
    pieces, target = [], 0
    for path, offset, nbytes in parts:
        pieces.append(piece(path, offset, nbytes, target))
        target += nbytes
    extents = direct_extents([(piece, MEMORY) for piece in pieces], extent_bytes=pages * PAGE)
    filled: list[tuple[int, int]] = []
    for extent in extents:
        span = extent.span
        assert span.offset % PAGE == span.nbytes % PAGE == 0
        assert 0 < extent.wanted <= span.nbytes <= pages * PAGE
        assert span.nbytes - extent.wanted < PAGE
        for part, memory in extent.parts:
            assert memory is MEMORY
            assert span.path == part.path
            assert span.offset <= part.offset
            assert part.offset + part.nbytes <= span.offset + extent.wanted
            whole = next(p for p in pieces if p.target <= part.target < p.target + p.nbytes)
            assert (whole.path, whole.offset - whole.target) == (
                part.path,
                part.offset - part.target,
            )
            filled.append((part.target, part.nbytes))
    filled.sort()
    assert [start for start, _ in filled] == [
        sum(n for _, n in filled[:index]) for index in range(len(filled))
    ]
    assert sum(nbytes for _, nbytes in filled) == target
    if not _overlap(pieces):
        read = [
            (extent.span.path, page)
            for extent in extents
            for page in range(extent.span.offset, extent.span.offset + extent.span.nbytes, PAGE)
        ]
        assert len(read) == len(set(read))


def _overlap(pieces: list[ReadPiece]) -> bool:
    spans = sorted((str(p.path), p.offset, p.offset + p.nbytes) for p in pieces if p.nbytes)
    return any(before[0] == after[0] and after[1] < before[2] for before, after in pairwise(spans))


@pytest.mark.parametrize("data_start", [4_712, 4_096, 96_008])
def test_a_block_of_the_real_size_costs_almost_nothing_more(data_start):
    """Ten matrices with biases and norms in between, as in a diffusers file, cut into pieces."""
    order = [("bias", 10_240), ("w", 52_428_800), ("norm", 10_240)] * 8 + [
        ("bias", 27_648),
        ("w", 141_557_760),
    ] * 2
    pieces, offset, target = [], data_start, 0
    for kind, nbytes in order:
        if kind == "w":
            for start in range(0, nbytes, PIECE_BYTES):
                size = min(PIECE_BYTES, nbytes - start)
                pieces.append(piece(A, offset + start, size, target))
                target += size
        offset += nbytes
    extents = direct_extents([(piece, MEMORY) for piece in pieces])
    assert sum(e.span.nbytes for e in extents) <= 1.001 * target
    assert len(extents) <= target / EXTENT_BYTES + 2


@pytest.mark.parametrize(
    ("file_gb", "available_gb", "cores", "in_ram", "expected"),
    [
        pytest.param(57.2, 27, 2, False, (True, 4), id="both experts in bf16, 32 GB"),
        pytest.param(57.2, 70, 16, True, (False, 15), id="both experts in tmpfs, 16 cores"),
        pytest.param(57.2, 70, 128, True, (False, 16), id="both experts in tmpfs, 128 cores"),
        pytest.param(28.6, 57, 16, False, (True, 4), id="both in fp8, 64 GB"),
        pytest.param(5.7, 22, 8, False, (True, 4), id="a small pair, 24 GB"),
        pytest.param(5.7, 2.7, 1, False, (True, 4), id="a small pair inside 3 GB"),
        pytest.param(0.3, 22, 2, False, (False, 4), id="a test model"),
        pytest.param(11.4, 120, 16, False, (False, 15), id="the text encoder on a large machine"),
        pytest.param(0, 0, 1, False, (False, 4), id="nothing to read"),
    ],
)
def test_route_and_threads_of_a_file(file_gb, available_gb, cores, in_ram, expected):
    route = read_route(
        file_bytes=int(file_gb * 1e9),
        available_bytes=int(available_gb * 1e9),
        cores=cores,
        in_ram=in_ram,
    )
    assert (route.direct, route.readers) == expected


@pytest.mark.parametrize("more", [0, 1])
def test_the_edge_of_the_decision(more):
    available = 80_000
    file_bytes = int(available * CACHED_SHARE) + more
    assert read_route(
        file_bytes=file_bytes, available_bytes=available, cores=2, in_ram=False
    ).direct is bool(more)
