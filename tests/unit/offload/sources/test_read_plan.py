"""Cuts of a block into reads: pieces by file place, aligned extents, and the route of a file."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wanstream.offload.formats.layout import flat_layout
from wanstream.offload.formats.safetensors_header import FileTensor, FileVersion
from wanstream.offload.sources.read_plan import (
    ALIGNMENT,
    CACHED_SHARE,
    EXTENT_BYTES,
    GAP_BYTES,
    ReadPiece,
    direct_extents,
    read_pieces,
    read_route,
)

A = Path("a")
B = Path("b")
FILES = st.sampled_from([A, B])
MEMORY = memoryview(bytearray(1))
PAGE = ALIGNMENT
FAR = GAP_BYTES + ALIGNMENT

Place = tuple[Path, int, int]


def cut(places: list[Place], piece_bytes: int) -> tuple[dict, list[ReadPiece]]:
    """Cut tensors named x, y, ... stored in these places. Return their layout and the pieces."""
    tensors = {
        name: FileTensor(path=path, offset=offset, nbytes=size, dtype=torch.uint8, shape=(size,))
        for name, (path, offset, size) in zip("xyzuvwstqr", places, strict=False)
    }
    layout = flat_layout((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
    pieces = read_pieces(tensors, layout, piece_bytes=piece_bytes)
    return {tensor.name: tensor.offset for tensor in layout.tensors}, list(pieces)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([(A, 70, 0)], []),
        ([(A, 70, 1100)], [(A, 70, 1024, 0, "x"), (A, 1094, 76, 1024, "x")]),
        ([(A, 0, 256), (A, 256, 512)], [(A, 0, 768, 0, "xy")]),
        ([(A, 0, 255), (A, 255, 512)], [(A, 0, 255, 0, "x"), (A, 255, 512, 256, "y")]),
        ([(A, 0, 256), (A, 300, 256)], [(A, 0, 256, 0, "x"), (A, 300, 256, 256, "y")]),
        ([(A, 0, 256), (B, 256, 256)], [(A, 0, 256, 0, "x"), (B, 256, 256, 256, "y")]),
        ([(A, 0, 768), (A, 768, 512)], [(A, 0, 768, 0, "x"), (A, 768, 512, 768, "y")]),
        ([(A, 0, 1280), (A, 1280, 256)], [(A, 0, 1024, 0, "x"), (A, 1024, 512, 1024, "xy")]),
    ],
    ids=["empty", "cut", "joined", "gap in memory", "gap in file", "two files", "limit", "both"],
)
def test_pieces(places, expected):
    _, pieces = cut(places, 1024)
    assert [(p.path, p.offset, p.nbytes, p.target, "".join(p.names)) for p in pieces] == expected


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(FILES, st.integers(0, 50), st.integers(0, 700)), max_size=8),
    st.integers(1, 600),
)
def test_pieces_take_every_byte_once_from_its_place(places, piece_bytes):
    offsets, pieces = cut(places, piece_bytes)
    came_from: dict[int, tuple[Path, int]] = {}
    for piece in pieces:
        assert 0 < piece.nbytes <= piece_bytes
        for byte in range(piece.nbytes):
            assert piece.target + byte not in came_from
            came_from[piece.target + byte] = (piece.path, piece.offset + byte)
    assert came_from == {
        target + byte: (path, offset + byte)
        for target, (path, offset, nbytes) in zip(offsets.values(), places, strict=True)
        for byte in range(nbytes)
    }


def piece(path: Path, offset: int, nbytes: int, target: int = 0, name: str = "x") -> ReadPiece:
    return ReadPiece(path=path, offset=offset, nbytes=nbytes, target=target, names=(name,))


def cover(*pieces: ReadPiece, extent_bytes: int = 4 * PAGE) -> list[tuple]:
    extents = direct_extents([(piece, MEMORY) for piece in pieces], extent_bytes=extent_bytes)
    spans = [(e.span.path, e.span.offset, e.span.nbytes, "".join(e.span.names)) for e in extents]
    return [(*span, e.wanted, len(e.parts)) for span, e in zip(spans, extents, strict=True)]


def after(offset: int) -> ReadPiece:
    return piece(A, offset, 100, 100, "y")


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([piece(A, 5, 0)], []),
        ([piece(A, PAGE - 1, 2)], [(A, 0, 2 * PAGE, "x", PAGE + 1, 1)]),
        (
            [piece(A, 8, 6 * PAGE)],
            [(A, 0, 4 * PAGE, "x", 4 * PAGE, 1), (A, 4 * PAGE, 3 * PAGE, "x", 2 * PAGE + 8, 1)],
        ),
        ([after(PAGE + 8), piece(A, 8, 100)], [(A, 0, 2 * PAGE, "xy", PAGE + 108, 2)]),
        (
            [piece(A, 8, 100), after(FAR + PAGE)],
            [(A, 0, PAGE, "x", 108, 1), (A, FAR + PAGE, PAGE, "y", 100, 1)],
        ),
        ([piece(A, 8, 10), piece(B, 18, 10)], [(A, 0, PAGE, "x", 18, 1), (B, 0, PAGE, "x", 28, 1)]),
        ([piece(A, 0, 100), after(0)], [(A, 0, PAGE, "xy", 100, 2)]),
    ],
    ids=["empty", "page edge", "cut", "small gap, in file order", "gap", "two files", "twice"],
)
def test_extents(pieces, expected):
    assert sorted(cover(*pieces)) == expected


def test_small_gaps_are_read_and_other_versions_are_not():
    for gap, reads in ((GAP_BYTES, 1), (GAP_BYTES + PAGE, 2)):
        assert len(cover(piece(A, 8, 100), after(PAGE + gap), extent_bytes=EXTENT_BYTES)) == reads
    version = FileVersion(nbytes=1, modified_ns=2)
    newer = ReadPiece(path=A, offset=10, nbytes=5, target=0, names=("y",), version=version)
    assert len(cover(piece(A, 0, 10), newer)) == 2


places = st.tuples(FILES, st.integers(0, 20 * PAGE), st.integers(0, 9 * PAGE))


@settings(deadline=None, max_examples=50)
@given(st.lists(places, max_size=6), st.integers(1, 5))
def test_extents_read_no_page_twice(parts, pages):
    pieces = []
    target = 0
    for path, offset, nbytes in parts:
        pieces.append(piece(path, offset, nbytes, target))
        target += nbytes
    extents = direct_extents([(piece, MEMORY) for piece in pieces], extent_bytes=pages * PAGE)
    filled: list[range] = []
    for extent in extents:
        span = extent.span
        assert span.offset % PAGE == span.nbytes % PAGE == 0
        assert 0 < extent.wanted <= span.nbytes <= pages * PAGE
        assert span.nbytes - extent.wanted < PAGE
        for part, memory in extent.parts:
            assert memory is MEMORY
            assert span.offset <= part.offset
            assert part.offset + part.nbytes <= span.offset + extent.wanted
            whole = next(p for p in pieces if p.target <= part.target < p.target + p.nbytes)
            assert whole.path == part.path == span.path
            assert whole.offset - whole.target == part.offset - part.target
            filled.append(range(part.target, part.target + part.nbytes))
    filled.sort(key=lambda bytes_of: bytes_of.start)
    ends = [0, *(bytes_of.stop for bytes_of in filled)]
    assert [*(bytes_of.start for bytes_of in filled), target] == ends
    spans = sorted((path.name, offset, offset + nbytes) for path, offset, nbytes in parts if nbytes)
    if all(one[0] != other[0] or one[2] <= other[1] for one, other in pairwise(spans)):
        read = [
            (extent.span.path, page)
            for extent in extents
            for page in range(extent.span.offset, extent.span.offset + extent.span.nbytes, PAGE)
        ]
        assert len(read) == len(set(read))


@pytest.mark.parametrize(
    ("file_bytes", "available", "cores", "in_ram", "expected"),
    [
        (57.2e9, 27e9, 2, False, (True, 4)),  # both experts in bf16, 32 GB
        (57.2e9, 70e9, 16, True, (False, 15)),  # in tmpfs, 16 cores
        (57.2e9, 70e9, 128, True, (False, 16)),
        (5.7e9, 2.7e9, 1, False, (True, 4)),  # a small pair inside 3 GB
        (0.3e9, 22e9, 2, False, (False, 4)),  # a test model
        (11.4e9, 120e9, 16, False, (False, 15)),  # the text encoder on a large machine
        (0, 0, 1, False, (False, 4)),
        (80_000 * CACHED_SHARE, 80_000, 2, False, (False, 4)),
        (80_000 * CACHED_SHARE + 1, 80_000, 2, False, (True, 4)),
    ],
)
def test_route_and_threads_of_a_file(file_bytes, available, cores, in_ram, expected):
    nbytes = {"file_bytes": int(file_bytes), "available_bytes": int(available)}
    route = read_route(**nbytes, cores=cores, in_ram=in_ram)
    assert (route.direct, route.readers) == expected
