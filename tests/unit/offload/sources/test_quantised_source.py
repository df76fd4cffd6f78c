from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wanstream.offload.formats.layout import allocate_flat, block_format, tensor_views
from wanstream.offload.formats.packing import QUANT_FORMATS, EightBit
from wanstream.offload.formats.quantise import quantise_rotated, work_memory
from wanstream.offload.formats.safetensors_header import FileTensor, read_header
from wanstream.offload.sources import quantised
from wanstream.offload.sources.base import SourceError
from wanstream.offload.sources.file import FileSource
from wanstream.offload.sources.quantised import (
    QUANTISED_BYTES,
    QuantisedSource,
    quantised_format,
    quantised_packings,
    row_pieces,
)
from wanstream.plan.programs import BlockKey

KEYS = [BlockKey("high", 0), BlockKey("high", 1), BlockKey("low", 0)]
SHAPES = {
    "up.weight": (300, 64),
    "down.weight": (64, 300),
    "half.weight": (8, 16),
    "full.weight": (9, 16),
}
DTYPES = {"half.weight": torch.float16, "full.weight": torch.float32}
FP8 = torch.float8_e4m3fn


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    # Few bits make rotated sums exact: a CPU may add one row in another order than many.
    torch.manual_seed(0)
    plain = {
        f"{key.expert}.{key.block}.{name}": torch.randn(shape)
        .pow(3)
        .mul(1024)
        .round()
        .div(1024)
        .to(DTYPES.get(name, torch.bfloat16))
        for key in KEYS
        for name, shape in SHAPES.items()
    }
    cast = {f"{key.expert}.{key.block}.cast.weight": torch.randn(5, 4).to(FP8) for key in KEYS}
    scaled = {f"{key.expert}.{key.block}.scaled.weight": torch.randn(6, 4).to(FP8) for key in KEYS}
    scales = {
        f"{key.expert}.{key.block}.scale": torch.tensor(0.75 + 0.125 * number)
        for number, key in enumerate(KEYS)
    }
    return {**plain, **cast, **scaled, **scales}


@pytest.fixture
def path(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def file_source(path: Path) -> FileSource:
    header = read_header(path).tensors

    def named(key: BlockKey, *names: str) -> dict[str, FileTensor]:
        return {name: header[f"{key.expert}.{key.block}.{name}"] for name in names}

    return FileSource(
        {key: named(key, *SHAPES, "cast.weight", "scaled.weight") for key in KEYS},
        computed_dtypes=torch.bfloat16,
        scales={key: {"scaled.weight": header[f"{key.expert}.{key.block}.scale"]} for key in KEYS},
    )


@pytest.fixture(params=[(1, QUANTISED_BYTES), (3, QUANTISED_BYTES), (1, 500), (3, 10)], ids=str)
def source(
    request: pytest.FixtureRequest, path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[QuantisedSource]:
    threads, piece_bytes = request.param
    monkeypatch.setattr(quantised, "QUANTISED_BYTES", piece_bytes)
    source = QuantisedSource(file_source(path), threads=threads)
    yield source
    source.close()


def read(source: QuantisedSource, key: BlockKey) -> torch.Tensor:
    return allocate(source, key, lambda flat: source.read_block(key, flat))


def allocate(
    source: QuantisedSource, key: BlockKey, fill: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    flat = allocate_flat(source.formats[key].stored.nbytes, "cpu").fill_(0x55)
    fill(flat)
    return flat


def formula(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = values.float().abs().amax(1, keepdim=True) / 448.0
    return (values.float() / scales).to(FP8), scales


def assert_block(
    source: QuantisedSource, key: BlockKey, flat: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> None:
    scales, stored = source.scales(key), source.formats[key].stored
    assert {name: scale.item() for name, scale in scales.items()} == {
        "scaled.weight": tensors[f"{key.expert}.{key.block}.scale"].item()
    }
    for tensor, view in zip(stored.tensors, tensor_views(flat, stored).values(), strict=True):
        original = tensors[f"{key.expert}.{key.block}.{tensor.name}"]
        if tensor.name not in SHAPES:
            assert torch.equal(view.view(torch.uint8), original.view(torch.uint8)), tensor.name
            continue
        expected = formula(original)
        assert isinstance(tensor.packing, EightBit)
        for found, wanted in zip(tensor.packing.split(view, tensor.shape), expected, strict=True):
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), tensor.name


@pytest.mark.slow  # many engine runs
def test_blocks_are_quantised_as_they_arrive(source, tensors):
    assert list(source.formats) == KEYS
    for key in [*KEYS, *KEYS[::-1]]:
        assert_block(source, key, read(source, key), tensors)


def test_the_format_tells_the_bytes_before_anything_is_read(path):
    plain, source = file_source(path), QuantisedSource(file_source(path))
    path.unlink()
    before, after = plain.formats[KEYS[0]], source.formats[KEYS[0]]
    stored = {tensor.name: (tensor.dtype, tensor.nbytes) for tensor in after.stored.tensors}
    assert stored["up.weight"] == (torch.uint8, 300 * 64 + 4 * 300)
    assert stored["cast.weight"] == (FP8, 20)
    assert after.computed == before.computed
    assert after.scaled == {"scaled.weight"}
    assert set(quantised_packings(before, "fp8")) == set(SHAPES)
    assert quantised_format(after, "fp8") is after
    assert quantised_format(before, "as stored") is before


def test_packed_and_fp8_tensors_leave_the_format_as_it_is():
    packed = block_format(
        {"a": ((4, 256), torch.uint8), "b": ((4, 4), torch.float8_e5m2)},
        torch.bfloat16,
        packings={"a": QUANT_FORMATS["Q4_K"]},
    )
    scaled = block_format({"c": ((4, 4), torch.bfloat16)}, torch.bfloat16, scaled=["c"])
    assert quantised_format(scaled, "fp8") is scaled
    assert quantised_format(packed, "fp8") is packed
    assert not any(piece.packing for piece in row_pieces(packed, {}))
    # int8 ConvRot takes fp8 and scaled matrices too, and leaves out what it cannot rotate.
    assert quantised_packings(packed, "int8 ConvRot") == {"b": EightBit(group=4)}
    assert quantised_packings(scaled, "int8 ConvRot") == {"c": EightBit(group=4)}
    odd = block_format({"d": ((4, 6), torch.bfloat16)}, torch.bfloat16)
    assert quantised_format(odd, "int8 ConvRot") is odd


@pytest.mark.parametrize("piece_bytes", [1, 999, 128 * 7, 10**9])
def test_pieces_are_whole_rows_and_cover_every_byte_once(path, piece_bytes, monkeypatch):
    monkeypatch.setattr(quantised, "QUANTISED_BYTES", piece_bytes)
    source = file_source(path)
    stored = source.formats[KEYS[0]]
    seen: dict[str, list[range]] = {}
    for piece in row_pieces(stored, quantised_packings(stored, "fp8")):
        row_bytes = piece.tensor.nbytes // piece.tensor.shape[0]
        assert piece.rows
        assert len(piece.rows) * row_bytes <= max(piece_bytes, row_bytes)
        assert piece.bytes_of_tensor == slice(
            piece.rows.start * row_bytes, piece.rows.stop * row_bytes
        )
        assert (piece.packing is not None) == (piece.tensor.name in SHAPES)
        seen.setdefault(piece.tensor.name, []).append(piece.rows)
    for tensor in source.formats[KEYS[0]].stored.tensors:
        assert [row for rows in seen[tensor.name] for row in rows] == list(range(tensor.shape[0]))
    source.close()


def test_a_matrix_of_many_pieces_is_the_same_as_in_one(tmp_path):
    torch.manual_seed(1)
    weight = torch.randn(2000, 5120).bfloat16()
    assert weight.nbytes > 4 * QUANTISED_BYTES
    save_file({"w": weight}, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors").tensors
    source = QuantisedSource(
        FileSource({KEYS[0]: {"w": header["w"]}}, computed_dtypes=torch.bfloat16)
    )
    codes, scales = EightBit(dtype=FP8).split(read(source, KEYS[0]), (2000, 5120))
    expected, expected_scales = formula(weight)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
    source.close()


@pytest.mark.parametrize("piece_bytes", [1, 999, 70_000, QUANTISED_BYTES])
def test_int8_is_the_same_in_any_pieces_and_takes_scaled_fp8(
    path, tensors, piece_bytes, monkeypatch
):
    monkeypatch.setattr(quantised, "QUANTISED_BYTES", piece_bytes)
    source = QuantisedSource(file_source(path), "int8 ConvRot", threads=2)
    key = KEYS[0]
    stored = source.formats[key].stored
    assert source.scales(key) == {}
    groups = {"up.weight": 64, "down.weight": 4, "half.weight": 16, "full.weight": 16}
    groups |= {"cast.weight": 4, "scaled.weight": 4}
    for tensor, view in zip(
        stored.tensors, tensor_views(read(source, key), stored).values(), strict=True
    ):
        assert tensor.packing == EightBit(group=groups[tensor.name])
        values = tensors[f"high.0.{tensor.name}"].float()
        if tensor.name == "scaled.weight":
            values *= tensors["high.0.scale"]
        for found, wanted in zip(
            tensor.packing.split(view, tensor.shape),
            quantise_rotated(values, tensor.packing.group),
            strict=True,
        ):
            assert torch.equal(found, wanted), tensor.name
    source.close()


@pytest.mark.parametrize("storage", ["fp8", "int8 ConvRot"])
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_ranges_together_are_the_block(path, storage, parts, monkeypatch):
    """A range with only the scales reads the rows, too."""
    monkeypatch.setattr(quantised, "QUANTISED_BYTES", 999)
    source = QuantisedSource(file_source(path), storage, threads=1)
    layout = source.formats[KEYS[0]].stored
    whole, size = read(source, KEYS[0]), -(-layout.nbytes // parts)
    for start in range(0, layout.nbytes, size):
        wanted = range(start, min(layout.nbytes, start + size))
        part = torch.empty(size, dtype=torch.uint8)
        source.read_range(KEYS[0], wanted, part)
        for tensor in layout.tensors:
            own = range(
                max(tensor.offset, wanted.start), min(tensor.offset + tensor.nbytes, wanted.stop)
            )
            if own:
                found = part[own.start - start : own.stop - start]
                assert torch.equal(found, whole[own.start : own.stop]), tensor.name
        assert 0 < source.range_file_bytes(KEYS[0], wanted) <= source.file_bytes(KEYS[0])
    assert source.range_file_bytes(KEYS[0], range(layout.nbytes)) == source.file_bytes(KEYS[0])
    source.close()


def test_only_the_tensors_of_the_block_are_written(source):
    key = KEYS[0]
    stored = source.formats[key].stored
    flat = read(source, key)
    owned = torch.zeros(stored.nbytes, dtype=torch.bool)
    for tensor in stored.tensors:
        owned[tensor.offset : tensor.offset + tensor.nbytes] = True
    assert (flat[~owned] == 0x55).all()


@pytest.mark.parametrize("piece_bytes", [QUANTISED_BYTES, 1000])
@pytest.mark.parametrize("storage", ["fp8", "int8 ConvRot"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_refused_by_file_tensor_and_row(
    path, tensors, bad, storage, piece_bytes, monkeypatch
):
    monkeypatch.setattr(quantised, "QUANTISED_BYTES", piece_bytes)
    spoilt = tensors["high.1.up.weight"].clone()
    spoilt[217, 3] = bad
    save_file({**tensors, "high.1.up.weight": spoilt}, path)
    files = file_source(path)
    source = QuantisedSource(files, storage, threads=1)
    words = (
        r"model\.safetensors: up\.weight of block 1 holds NaN or an infinity in row 217.*as stored"
    )
    with pytest.raises(SourceError, match=words):
        read(source, KEYS[1])
    for key in (KEYS[0], KEYS[2]):  # the source stays usable
        read(source, key)
    source.close()


def test_a_file_cut_short_is_an_error_and_the_source_stays_usable(source, path, tensors):
    content = path.read_bytes()
    read(source, KEYS[0])
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(SourceError, match=r"model\.safetensors: reading .*failed"):
        for key in KEYS:
            read(source, key)


def test_blocks_are_read_from_several_threads_at_once(source, tensors):
    flats: dict[BlockKey, torch.Tensor] = {}
    threads = [
        threading.Thread(target=lambda key=key: flats.update({key: read(source, key)}))
        for key in KEYS
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for key in KEYS:
        assert_block(source, key, flats[key], tensors)


def test_closing_ends_the_threads_and_closes_the_inner_source(path):
    before = set(threading.enumerate())
    source = QuantisedSource(file_source(path))
    assert set(threading.enumerate()) == before  # opening starts none
    read(source, KEYS[0])
    source.close()
    source.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(SourceError, match="closed"):
        read(source, KEYS[1])


def test_the_calling_thread_keeps_its_threads_and_its_results(source):
    torch.manual_seed(0)
    matrix = torch.randn(300, 300)
    count, product = torch.get_num_threads(), matrix @ matrix
    read(source, KEYS[0])
    assert torch.get_num_threads() == count
    assert torch.equal(matrix @ matrix, product)


def test_it_needs_a_thread(path):
    with pytest.raises(ValueError, match="0 threads cannot read"):
        QuantisedSource(file_source(path), threads=0)


def test_a_thread_needs_as_little_memory_as_the_class_says():
    assert QUANTISED_BYTES + work_memory(13824).nbytes <= 6 * 1024**2
