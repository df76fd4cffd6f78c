from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wanstream.offload.formats.layout import flat_layout
from wanstream.offload.formats.safetensors_header import FileTensor
from wanstream.offload.sources.read_plan import PIECE_BYTES, ReadPiece, read_pieces

A, B = Path("a"), Path("b")


def stored(path: Path, offset: int, nbytes: int) -> FileTensor:
    return FileTensor(path=path, offset=offset, nbytes=nbytes, dtype=torch.uint8, shape=(nbytes,))


def cut(
    tensors: dict[str, FileTensor], piece_bytes: int
) -> list[tuple[str, int, int, int, tuple[str, ...]]]:
    layout = flat_layout((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
    pieces = read_pieces(tensors, layout, piece_bytes=piece_bytes)
    return [
        (str(piece.path), piece.offset, piece.nbytes, piece.target, piece.names) for piece in pieces
    ]


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        pytest.param({}, [], id="nothing"),
        pytest.param({"x": stored(A, 70, 0)}, [], id="empty tensor"),
        pytest.param({"x": stored(A, 70, 100)}, [("a", 70, 100, 0, ("x",))], id="one piece"),
        pytest.param(
            {"x": stored(A, 70, 2100)},
            [
                ("a", 70, 1024, 0, ("x",)),
                ("a", 1094, 1024, 1024, ("x",)),
                ("a", 2118, 52, 2048, ("x",)),
            ],
            id="cut",
        ),
        pytest.param(
            {"x": stored(A, 0, 256), "y": stored(A, 256, 512)},
            [("a", 0, 768, 0, ("x", "y"))],
            id="joined",
        ),
        pytest.param(
            {"x": stored(A, 0, 255), "y": stored(A, 255, 512)},
            [("a", 0, 255, 0, ("x",)), ("a", 255, 512, 256, ("y",))],
            id="a gap in memory",
        ),
        pytest.param(
            {"x": stored(A, 0, 256), "y": stored(A, 300, 256)},
            [("a", 0, 256, 0, ("x",)), ("a", 300, 256, 256, ("y",))],
            id="a gap in the file",
        ),
        pytest.param(
            {"x": stored(A, 256, 256), "y": stored(A, 0, 256)},
            [("a", 256, 256, 0, ("x",)), ("a", 0, 256, 256, ("y",))],
            id="another order in the file",
        ),
        pytest.param(
            {"x": stored(A, 0, 256), "y": stored(B, 256, 256)},
            [("a", 0, 256, 0, ("x",)), ("b", 256, 256, 256, ("y",))],
            id="another file",
        ),
        pytest.param(
            {"x": stored(A, 0, 768), "y": stored(A, 768, 512)},
            [("a", 0, 768, 0, ("x",)), ("a", 768, 512, 768, ("y",))],
            id="not joined past the limit",
        ),
        pytest.param(
            {"x": stored(A, 0, 1280), "y": stored(A, 1280, 256)},
            [("a", 0, 1024, 0, ("x",)), ("a", 1024, 512, 1024, ("x", "y"))],
            id="cut, then joined",
        ),
    ],
)
def test_pieces_table(tensors, expected):
    assert cut(tensors, 1024) == expected


places = st.tuples(st.sampled_from([A, B]), st.integers(0, 50), st.integers(0, 700))


@settings(deadline=None)
@given(st.lists(places, max_size=8), st.integers(1, 600))
def test_every_byte_is_read_once_from_its_place(parts, piece_bytes):
    tensors = {f"t{index}": stored(*place) for index, place in enumerate(parts)}
    layout = flat_layout((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
    came_from: dict[int, tuple[Path, int]] = {}
    for piece in read_pieces(tensors, layout, piece_bytes=piece_bytes):
        assert 0 < piece.nbytes <= piece_bytes
        for byte in range(piece.nbytes):
            assert piece.target + byte not in came_from
            came_from[piece.target + byte] = (piece.path, piece.offset + byte)
    assert came_from == {
        place.offset + byte: (tensors[place.name].path, tensors[place.name].offset + byte)
        for place in layout.tensors
        for byte in range(place.nbytes)
    }


def test_a_whole_block_in_file_order_is_cut_evenly():
    matrices = {f"m{index}": stored(A, 52_428_800 * index, 52_428_800) for index in range(8)}
    layout = flat_layout((name, tensor.shape, tensor.dtype) for name, tensor in matrices.items())
    pieces = read_pieces(matrices, layout)
    assert sum(piece.nbytes for piece in pieces) == 8 * 52_428_800
    assert len(pieces) == 8 * 7
    assert all(isinstance(piece, ReadPiece) and piece.nbytes <= PIECE_BYTES for piece in pieces)
