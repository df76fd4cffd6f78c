from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wanstream.offload.formats.decode import work_memory
from wanstream.offload.formats.layout import allocate_flat, block_format, tensor_views
from wanstream.offload.formats.packing import QUANT_FORMATS
from wanstream.offload.formats.safetensors_header import FileTensor, read_header
from wanstream.offload.sources.base import SourceError
from wanstream.offload.sources.file import FileSource
from wanstream.offload.sources.module import ModuleSource
from wanstream.offload.sources.quantised import (
    PIECE_BYTES,
    QuantisedSource,
    quantised_format,
    quantised_names,
    row_pieces,
    scale_bytes,
)
from wanstream.plan import BlockKey

KEYS = [BlockKey("high", 0), BlockKey("high", 1), BlockKey("low", 0)]
SHAPES = {"up.weight": (300, 64), "down.weight": (64, 300), "half.weight": (8, 16), "full.weight": (9, 16)}
DTYPES = {"half.weight": torch.float16, "full.weight": torch.float32}
FP8 = torch.float8_e4m3fn


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    plain = {
        f"{key.expert}.{key.block}.{name}": torch.randn(shape).pow(3).to(DTYPES.get(name, torch.bfloat16))
        for key in KEYS
        for name, shape in SHAPES.items()
    }
    cast = {f"{key.expert}.{key.block}.cast.weight": torch.randn(5, 4).to(FP8) for key in KEYS}
    scaled = {f"{key.expert}.{key.block}.scaled.weight": torch.randn(6, 4).to(FP8) for key in KEYS}
    scales = {f"{key.expert}.{key.block}.scale": torch.rand(()) for key in KEYS}
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


@pytest.fixture(params=[(1, PIECE_BYTES), (3, PIECE_BYTES), (1, 500), (3, 10)], ids=str)
def source(request: pytest.FixtureRequest, path: Path) -> Iterator[QuantisedSource]:
    threads, piece_bytes = request.param
    source = QuantisedSource(file_source(path), threads=threads, piece_bytes=piece_bytes)
    yield source
    source.close()


def read(source: QuantisedSource, key: BlockKey) -> torch.Tensor:
    return allocate(source, key, lambda flat: source.read_block(key, flat))


def allocate(source: QuantisedSource, key: BlockKey, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
    flat = allocate_flat(source.formats[key].stored.nbytes, "cpu").fill_(0x55)
    fill(flat)
    return flat


def formula(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = values.float().abs().amax(1, keepdim=True) / 448.0
    return (values.float() / scales).to(FP8), scales


def assert_block(source: QuantisedSource, key: BlockKey, flat: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    scales = source.scales(key)
    assert set(scales) == {*SHAPES, "scaled.weight"}
    for name, view in tensor_views(flat, source.formats[key].stored).items():
        original = tensors[f"{key.expert}.{key.block}.{name}"]
        expected, scale = (original, None) if name not in SHAPES else formula(original)
        assert torch.equal(view.view(torch.uint8), expected.view(torch.uint8)), name
        if scale is not None:
            assert torch.equal(scales[name], scale)
    assert scales["scaled.weight"].item() == tensors[f"{key.expert}.{key.block}.scale"].item()


def test_blocks_are_quantised_as_they_arrive(source, tensors):
    assert list(source.formats) == KEYS
    for key in [*KEYS, *KEYS[::-1]]:
        assert_block(source, key, read(source, key), tensors)


def test_the_format_tells_the_bytes_before_anything_is_read(path):
    plain, source = file_source(path), QuantisedSource(file_source(path))
    path.unlink()
    before, after = plain.formats[KEYS[0]], source.formats[KEYS[0]]
    stored = {tensor.name: (tensor.dtype, tensor.nbytes) for tensor in after.stored.tensors}
    assert stored["up.weight"] == (FP8, 300 * 64)
    assert {dtype for dtype, _ in stored.values()} == {FP8}
    assert after.computed == before.computed
    assert after.scaled == {*SHAPES, "scaled.weight"}
    assert quantised_names(before) == set(SHAPES)
    assert scale_bytes(before) == 4 * (300 + 64 + 8 + 9)
    assert quantised_format(after) is after


def test_packed_and_fp8_tensors_leave_the_format_as_it_is():
    packed = block_format(
        {"a": ((4, 256), torch.uint8), "b": ((4, 4), torch.float8_e5m2)},
        torch.bfloat16,
        packings={"a": QUANT_FORMATS["Q4_K"]},
    )
    scaled = block_format({"c": ((4, 4), torch.bfloat16)}, torch.bfloat16, scaled=["c"])
    assert quantised_format(scaled) is scaled
    assert quantised_format(packed) is packed
    assert scale_bytes(packed) == 0
    assert not any(piece.quantised for piece in row_pieces(packed))


@pytest.mark.parametrize("piece_bytes", [1, 999, 128 * 7, 10**9])
def test_pieces_are_whole_rows_and_cover_every_byte_once(path, piece_bytes):
    source = file_source(path)
    seen: dict[str, list[range]] = {}
    for piece in row_pieces(source.formats[KEYS[0]], piece_bytes=piece_bytes):
        row_bytes = piece.tensor.nbytes // piece.tensor.shape[0]
        assert piece.rows
        assert len(piece.rows) * row_bytes <= max(piece_bytes, row_bytes)
        assert piece.bytes_of_tensor == slice(piece.rows.start * row_bytes, piece.rows.stop * row_bytes)
        assert piece.quantised == (piece.tensor.name in SHAPES)
        seen.setdefault(piece.tensor.name, []).append(piece.rows)
    for tensor in source.formats[KEYS[0]].stored.tensors:
        assert [row for rows in seen[tensor.name] for row in rows] == list(range(tensor.shape[0]))
    source.close()


def test_a_matrix_of_many_pieces_is_the_same_as_in_one(tmp_path):
    torch.manual_seed(1)
    weight = torch.randn(2000, 5120).bfloat16()
    assert weight.nbytes > 4 * PIECE_BYTES
    save_file({"w": weight}, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors").tensors
    source = QuantisedSource(FileSource({KEYS[0]: {"w": header["w"]}}, computed_dtypes=torch.bfloat16))
    expected, scales = formula(weight)
    assert torch.equal(read(source, KEYS[0])[: expected.numel()], expected.view(-1).view(torch.uint8))
    assert torch.equal(source.scales(KEYS[0])["w"], scales)
    source.close()


def test_scales_stay_the_same_objects_and_can_be_asked_for_first(source, tensors):
    first = source.scales(KEYS[1])
    flat = read(source, KEYS[1])
    assert source.scales(KEYS[1]) is first
    assert_block(source, KEYS[1], flat, tensors)
    read(source, KEYS[1])
    assert source.scales(KEYS[1]) is first


def test_only_the_tensors_of_the_block_are_written(source):
    key = KEYS[0]
    stored = source.formats[key].stored
    flat = read(source, key)
    owned = torch.zeros(stored.nbytes, dtype=torch.bool)
    for tensor in stored.tensors:
        owned[tensor.offset : tensor.offset + tensor.nbytes] = True
    assert (flat[~owned] == 0x55).all()


@pytest.mark.parametrize("piece_bytes", [PIECE_BYTES, 1000])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_refused_by_file_tensor_and_row(path, tensors, bad, piece_bytes):
    spoilt = tensors["high.1.up.weight"].clone()
    spoilt[217, 3] = bad
    save_file({**tensors, "high.1.up.weight": spoilt}, path)
    files = file_source(path)
    source = QuantisedSource(files, threads=1, piece_bytes=piece_bytes)
    words = r"model\.safetensors: up\.weight of block 1 holds NaN or an infinity in row 217.*as stored"
    with pytest.raises(SourceError, match=words):
        read(source, KEYS[1])
    with pytest.raises(SourceError, match=words):
        source.scales(KEYS[1])
    for key in (KEYS[0], KEYS[2]):  # the source stays usable
        assert_block(source, key, read(source, key), tensors)
    source.close()


def test_a_block_that_changed_is_an_error_and_not_noise(make_stack):
    class Rows(ModuleSource):
        """A module's weights, row by row."""

        def read_rows(self, key: BlockKey, name: str, rows: range, into: torch.Tensor) -> None:
            weight = self._weights[key][name][rows.start : rows.stop].contiguous()
            into.copy_(weight.view(-1).view(torch.uint8))

        def path(self, key: BlockKey, name: str) -> Path:
            return Path("memory")

    stack = make_stack(1)
    source = QuantisedSource(Rows({"high": stack}))
    read(source, KEYS[0])
    stack[0].up.weight.data[0] *= 3
    with pytest.raises(SourceError, match="block 0 of 'high' has changed since it was first read"):
        read(source, KEYS[0])
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
    threads = [threading.Thread(target=lambda key=key: flats.update({key: read(source, key)})) for key in KEYS]
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
    assert PIECE_BYTES + work_memory(13824).nbytes <= 6 * 1024**2
