"""Blocks quantised as they arrive, in any pieces and ranges, by several threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wanstream.offload.formats.layout import allocate_flat, block_format, tensor_views
from wanstream.offload.formats.packing import QUANT_FORMATS, EightBit
from wanstream.offload.formats.quantise import quantise_rotated, work_memory
from wanstream.offload.formats.safetensors_header import read_header
from wanstream.offload.sources import FileSource, QuantisedSource, quantised, quantised_packings
from wanstream.offload.sources.base import SourceError
from wanstream.offload.sources.quantised import QUANTISED_BYTES, quantised_format, row_pieces
from wanstream.plan.programs import BlockKey
from wanstream.tests.support.offload.fixtures import in_threads

KEYS = [BlockKey("high", 0), BlockKey("high", 1), BlockKey("low", 0)]
FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
QUANTISED = {"up.weight": (300, 64), "down.weight": (64, 300)}
QUANTISED |= {"half.weight": (8, 16), "full.weight": (9, 16)}
DTYPES = {"half.weight": torch.float16, "full.weight": torch.float32}
NAMES = (*QUANTISED, "cast.weight", "scaled.weight")

Tensors = dict[str, torch.Tensor]


def stored_name(key: BlockKey, name: str) -> str:
    return f"{key.expert}.{key.block}.{name}"


@pytest.fixture
def tensors() -> Tensors:
    torch.manual_seed(0)
    made = {}
    for number, key in enumerate(KEYS):
        # Few bits make rotated sums exact: a CPU may add one row in another order than many.
        block = {name: torch.randn(shape).pow(3) for name, shape in QUANTISED.items()}
        for name, values in block.items():
            block[name] = values.mul(1024).round().div(1024).to(DTYPES.get(name, BF16))
        block["cast.weight"] = torch.randn(5, 4).to(FP8)
        block["scaled.weight"] = torch.randn(6, 4).to(FP8)
        block["scale"] = torch.tensor(0.75 + 0.125 * number)
        made |= {stored_name(key, name): tensor for name, tensor in block.items()}
    return made


@pytest.fixture
def path(tmp_path, tensors) -> Path:
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def files(path) -> FileSource:
    header = read_header(path).tensors
    blocks = {key: {name: header[stored_name(key, name)] for name in NAMES} for key in KEYS}
    scales = {key: {"scaled.weight": header[stored_name(key, "scale")]} for key in KEYS}
    return FileSource(blocks, computed_dtypes=BF16, scales=scales)


@pytest.fixture(params=[(1, QUANTISED_BYTES), (3, 500)], ids=str)
def source(request, files, monkeypatch) -> Iterator[QuantisedSource]:
    threads, piece_bytes = request.param
    monkeypatch.setattr(quantised, "QUANTISED_BYTES", piece_bytes)
    source = QuantisedSource(files, threads=threads)
    yield source
    source.close()


def read(source: QuantisedSource, key: BlockKey = KEYS[0]) -> torch.Tensor:
    flat = allocate_flat(source.formats[key].stored.nbytes, "cpu").fill_(0x55)
    source.read_block(key, flat)
    return flat


def formula(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = values.float().abs().amax(1, keepdim=True) / 448.0
    return (values.float() / scales).to(FP8), scales


def assert_block(source, key, flat, tensors) -> None:
    stored = source.formats[key].stored
    flat = flat.clone()
    assert source.scales(key) == {"scaled.weight": tensors[stored_name(key, "scale")]}
    for tensor, view in zip(stored.tensors, tensor_views(flat, stored).values(), strict=True):
        found = [view]
        wanted = [tensors[stored_name(key, tensor.name)]]
        if tensor.name in QUANTISED:
            assert isinstance(tensor.packing, EightBit)
            found = tensor.packing.split(view, tensor.shape)
            wanted = formula(wanted[0])
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), tensor.name
        flat[tensor.offset : tensor.offset + tensor.nbytes] = 0x55
    assert flat.eq(0x55).all(), "only the tensors of the block are written"


def test_blocks_are_quantised_by_several_threads_at_once(source, tensors):
    assert list(source.formats) == KEYS
    flats = in_threads([partial(read, source, key) for key in KEYS])
    for key, flat in zip(KEYS, flats, strict=True):
        assert_block(source, key, flat, tensors)


def test_formats_are_known_before_anything_is_read(path, files):
    source = QuantisedSource(files)
    path.unlink()
    before = files.formats[KEYS[0]]
    after = source.formats[KEYS[0]]
    stored = {tensor.name: (tensor.dtype, tensor.nbytes) for tensor in after.stored.tensors}
    assert stored["up.weight"] == (torch.uint8, 300 * 64 + 4 * 300)
    assert stored["cast.weight"] == (FP8, 20)
    assert after.computed == before.computed
    assert after.scaled == {"scaled.weight"}
    assert set(quantised_packings(before, "fp8")) == set(QUANTISED)
    assert quantised_format(after, "fp8") is after
    assert quantised_format(before, "as stored") is before


def test_packed_and_fp8_tensors_leave_the_format_as_it_is():
    shapes = {"a": ((4, 256), torch.uint8), "b": ((4, 4), torch.float8_e5m2)}
    packed = block_format(shapes, BF16, packings={"a": QUANT_FORMATS["Q4_K"]})
    scaled = block_format({"c": ((4, 4), BF16)}, BF16, scaled=["c"])
    odd = block_format({"d": ((4, 6), BF16)}, BF16)
    assert quantised_format(scaled, "fp8") is scaled
    assert quantised_format(packed, "fp8") is packed
    assert not any(piece.packing for piece in row_pieces(packed, {}))
    # int8 ConvRot takes fp8 and scaled matrices too, and leaves out what it cannot rotate.
    assert quantised_packings(packed, "int8 ConvRot") == {"b": EightBit(group=4)}
    assert quantised_packings(scaled, "int8 ConvRot") == {"c": EightBit(group=4)}
    assert quantised_format(odd, "int8 ConvRot") is odd


@pytest.mark.parametrize("piece_bytes", [1, 999, 128 * 7, 10**9])
def test_pieces_are_whole_rows_and_cover_every_byte_once(files, piece_bytes, monkeypatch):
    monkeypatch.setattr(quantised, "QUANTISED_BYTES", piece_bytes)
    stored = files.formats[KEYS[0]]
    seen = dict[str, list[int]]()
    for piece in row_pieces(stored, quantised_packings(stored, "fp8")):
        tensor = piece.tensor
        rows = piece.rows
        row_bytes = tensor.nbytes // tensor.shape[0]
        assert rows
        assert len(rows) * row_bytes <= max(piece_bytes, row_bytes)
        assert piece.bytes_of_tensor == slice(rows.start * row_bytes, rows.stop * row_bytes)
        assert (piece.packing is not None) == (tensor.name in QUANTISED)
        seen.setdefault(tensor.name, []).extend(rows)
    assert seen == {each.name: list(range(each.shape[0])) for each in stored.stored.tensors}


@pytest.mark.parametrize("piece_bytes", [1, 999, 70_000, QUANTISED_BYTES])
def test_int8_in_any_pieces_and_from_scaled_fp8(files, tensors, piece_bytes, monkeypatch):
    monkeypatch.setattr(quantised, "QUANTISED_BYTES", piece_bytes)
    source = QuantisedSource(files, "int8 ConvRot", threads=2)
    stored = source.formats[KEYS[0]].stored
    assert source.scales(KEYS[0]) == {}
    groups = dict(zip(NAMES, (64, 4, 16, 16, 4, 4), strict=True))
    views = tensor_views(read(source), stored)
    for tensor, view in zip(stored.tensors, views.values(), strict=True):
        assert tensor.packing == EightBit(group=groups[tensor.name])
        values = tensors[f"high.0.{tensor.name}"].float()
        if tensor.name == "scaled.weight":
            values *= tensors["high.0.scale"]
        found = tensor.packing.split(view, tensor.shape)
        assert all(map(torch.equal, found, quantise_rotated(values, tensor.packing.group)))
    source.close()


@pytest.mark.parametrize(("storage", "parts"), [("fp8", 3), ("int8 ConvRot", 7)])
def test_ranges_together_are_the_block(files, storage, parts, monkeypatch):
    """A range with only the scales reads the rows, too."""
    monkeypatch.setattr(quantised, "QUANTISED_BYTES", 999)
    source = QuantisedSource(files, storage, threads=1)
    key = KEYS[0]
    layout = source.formats[key].stored
    whole = read(source)
    size = -(-layout.nbytes // parts)
    for start in range(0, layout.nbytes, size):
        wanted = range(start, min(layout.nbytes, start + size))
        part = torch.empty(size, dtype=torch.uint8)
        source.read_range(key, wanted, part)
        for tensor in layout.tensors:
            first = max(tensor.offset, wanted.start)
            own = slice(first, max(first, min(tensor.offset + tensor.nbytes, wanted.stop)))
            assert torch.equal(part[own.start - start : own.stop - start], whole[own]), tensor.name
        assert 0 < source.range_file_bytes(key, wanted) <= source.file_bytes(key)
    assert source.range_file_bytes(key, range(layout.nbytes)) == source.file_bytes(key)
    source.close()


NOT_FINITE = [(math.nan, "fp8", 1000), (math.inf, "int8 ConvRot", QUANTISED_BYTES)]


@pytest.mark.parametrize(("bad", "storage", "nbytes"), NOT_FINITE)
def test_infinite_and_nan_are_refused(path, tensors, request, bad, storage, nbytes, monkeypatch):
    monkeypatch.setattr(quantised, "QUANTISED_BYTES", nbytes)
    tensors["high.1.up.weight"][217, 3] = bad
    save_file(tensors, path)
    source = QuantisedSource(request.getfixturevalue("files"), storage, threads=1)
    words = r"model\.safetensors: up\.weight of block 1 holds NaN or an infinity in row 217.*as sto"
    with pytest.raises(SourceError, match=words):
        read(source, KEYS[1])
    for key in (KEYS[0], KEYS[2]):  # the source stays usable
        read(source, key)
    source.close()


def test_threads_live_from_the_first_read_to_close(files):
    torch.manual_seed(0)
    before = set(threading.enumerate())
    matrix = torch.randn(300, 300)
    count = torch.get_num_threads()
    product = matrix @ matrix
    source = QuantisedSource(files)
    assert set(threading.enumerate()) == before
    read(source)
    assert torch.get_num_threads() == count
    assert torch.equal(matrix @ matrix, product)
    source.close()
    source.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(SourceError, match="closed"):
        read(source)
    with pytest.raises(ValueError, match="0 threads cannot read"):
        QuantisedSource(files, threads=0)


def test_a_thread_needs_as_little_memory_as_documented():
    assert QUANTISED_BYTES + work_memory(13824).nbytes <= 6 * 1024**2
