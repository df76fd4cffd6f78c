"""Blocks and tensors read from files: bytes, scales, routes, changed files and identities."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wanstream.offload.formats import CheckpointFileError, FileTensor, read_header
from wanstream.offload.formats.layout import allocate_flat, tensor_views
from wanstream.offload.sources.base import SourceError
from wanstream.offload.sources.file import FileSource, read_tensors
from wanstream.offload.sources.read_plan import ALIGNMENT
from wanstream.offload.sources.reader import HAS_DIRECT, HAS_PREADV
from wanstream.plan.programs import BlockKey

SHAPES = {"ffn.weight": (96, 32), "q.weight": (32, 32), "k.weight": (5, 7)}
KEYS = [BlockKey("high", 0), BlockKey("high", 1), BlockKey("low", 0)]
FP32 = {"computed_dtypes": torch.float32}
Tensors = dict[str, torch.Tensor]


def stored_name(key: BlockKey, name: str) -> str:
    return f"{key.expert}.{key.block}.{name}"


@pytest.fixture
def tensors() -> Tensors:
    torch.manual_seed(0)
    names = product(KEYS, SHAPES)
    return {stored_name(key, name): torch.randn(SHAPES[name]).bfloat16() for key, name in names}


@pytest.fixture
def path(tmp_path, tensors) -> Path:
    save_file(tensors, tmp_path / "model.safetensors")  # sorted by name
    return tmp_path / "model.safetensors"


def save_other(path: Path, tensors: Tensors) -> None:
    """Write a file of the same size with other values and another time."""
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, path)
    os.utime(path, ns=(1, 1))


def blocks_of(path: Path) -> dict[BlockKey, dict[str, FileTensor]]:
    header = read_header(path)
    return {key: {name: header.tensors[stored_name(key, name)] for name in SHAPES} for key in KEYS}


def read(source: FileSource, key: BlockKey) -> torch.Tensor:
    flat = allocate_flat(source.formats[key].stored.nbytes, "cpu").fill_(255)
    source.read_block(key, flat)
    return flat


def is_block(source: FileSource, key: BlockKey, flat: torch.Tensor, tensors: Tensors) -> bool:
    views = tensor_views(flat, source.formats[key].stored)
    assert list(views) == list(SHAPES)
    return all(torch.equal(view, tensors[stored_name(key, name)]) for name, view in views.items())


ROUTES = {"cache": {"direct": False}, "direct": {"direct": True}, "portable": {"portable": True}}


@pytest.fixture(params=[(1, "cache"), (4, "direct"), (4, "portable")], ids=str)
def source(request, path) -> Iterator[FileSource]:
    readers, route = request.param
    if not {"cache": HAS_PREADV, "direct": HAS_DIRECT}.get(route, True):
        pytest.skip("this system has no such reads")
    source = FileSource(blocks_of(path), readers=readers, **FP32, **ROUTES[route])
    yield source
    source.close()


def test_blocks_arrive_as_they_are_stored(source, path, tensors):
    assert list(source.formats) == KEYS
    assert source.reader.bytes_read == 0
    wanted = 0
    for count, key in enumerate([*KEYS, *KEYS[::-1]], 1):
        stored = source.formats[key].stored
        memory = allocate_flat(stored.nbytes + 256, "cpu").fill_(7)
        source.read_block(key, memory[: stored.nbytes])
        assert is_block(source, key, memory[: stored.nbytes], tensors)
        for tensor in stored.tensors:
            memory[tensor.offset : tensor.offset + tensor.nbytes] = 7
        assert memory.eq(7).all(), "only the tensors of the block are written"
        nbytes = sum(tensor.nbytes for tensor in stored.tensors)
        assert (source.file_bytes(key), source.scales(key)) == (nbytes, {})
        wanted += nbytes  # and at most a page at each end
        assert wanted <= source.reader.bytes_read <= wanted + count * 2 * ALIGNMENT
    for name, rows in (("ffn.weight", range(96)), ("q.weight", range(5, 6))):
        expected = tensors[stored_name(KEYS[1], name)][rows.start : rows.stop]
        flat = allocate_flat(expected.nbytes, "cpu")
        source.read_rows(KEYS[1], name, rows, flat)
        assert torch.equal(flat.view(torch.bfloat16).view(expected.shape), expected)
        assert source.path(KEYS[1], name) == path


def test_computed_dtypes_are_one_for_all_or_by_block_and_name(path):
    blocks = blocks_of(path)
    bf16 = torch.bfloat16
    assert FileSource(blocks, computed_dtypes=bf16).formats[KEYS[0]].is_raw
    own = dict.fromkeys(SHAPES, bf16)
    dtypes = dict.fromkeys(blocks, own) | {KEYS[0]: own | {"q.weight": torch.float32}}
    named = FileSource(blocks, computed_dtypes=dtypes).formats
    assert named[KEYS[1]].is_raw
    assert not named[KEYS[0]].is_raw
    computed = [tensor.dtype for tensor in named[KEYS[0]].computed.tensors]
    assert computed == [bf16, torch.float32, bf16]


@pytest.mark.parametrize(
    ("stored", "shape"),
    [
        (torch.tensor(0.5), ()),
        (torch.tensor([[0.5]]), ()),
        (torch.tensor([0.25, 0.5, 2.0], dtype=torch.bfloat16), (3, 1)),
        (torch.tensor([[0.25], [0.5], [2.0]], dtype=torch.float16), (3, 1)),
        *((torch.ones(shape), None) for shape in ((2,), (5,), (1, 3), (3, 5), (1, 1, 1))),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, torch.Tensor) else "",
)
def test_scales_are_one_number_or_one_per_row(tmp_path, stored, shape):
    matrix = torch.ones(3, 5).to(torch.float8_e4m3fn)
    save_file({"w": matrix, "s": stored}, tmp_path / "x.safetensors")
    file = read_header(tmp_path / "x.safetensors").tensors
    key = KEYS[0]
    blocks = {key: {"w": file["w"]}}
    scales = {key: {"w": file["s"]}}
    if shape is None:
        words = r"x\.safetensors: the scale of w has shape .* one value or 3"
        with pytest.raises(CheckpointFileError, match=words):
            FileSource(blocks, scales=scales, **FP32)
        return
    source = FileSource(blocks, scales=scales, **FP32)
    assert source.formats[key].scaled == {"w"}
    assert not source.formats[key].is_raw
    scale = source.scales(key)["w"]
    assert (tuple(scale.shape), scale.dtype) == (shape, torch.float32)
    assert torch.equal(scale.flatten(), stored.float().flatten())
    assert source.scales(key)["w"] is scale
    source.close()


def test_read_tensors_keeps_names_shapes_and_dtypes(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "wide": torch.randn(700, 900),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "fp8": torch.randn(9, 9).to(torch.float8_e5m2),
        "flags": torch.tensor([True, False, True]),
        "counts": torch.arange(5),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    places = read_header(tmp_path / "x.safetensors").tensors
    with torch.inference_mode():
        found = read_tensors({name: places[name] for name in tensors}, readers=3)
    rows = read_tensors({"some": places["wide"].rows(3, 5)})["some"]
    os.truncate(tmp_path / "x.safetensors", 0)  # tensors that were read do not need the file
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
        assert not found[name].is_inference()
    assert found["wide"].data_ptr() % 64 == 0
    assert rows.equal(tensors["wide"][3:5])
    assert read_tensors({}) == {}
    with pytest.raises(SourceError, match=r"x\.safetensors"):
        read_tensors({"wide": places["wide"]})


@pytest.mark.parametrize("how", ["replaced", "overwritten"])
@pytest.mark.parametrize("opened", [False, True], ids=["not yet read", "read before"])
def test_another_file_under_the_name_is_never_read(source, tensors, path, how, opened):
    if opened:
        read(source, KEYS[0])
    other = path.with_name("other.safetensors")
    save_other(other, tensors)
    if how == "replaced":
        other.replace(path)
    else:
        path.write_bytes(other.read_bytes())
        os.utime(path, ns=(1, 1))
    words = r"model\.safetensors: .* was changed after it was opened"
    refused = pytest.raises(SourceError, match=words)
    # The opened file is still there without a name. A thread opening it later finds the other one.
    may_succeed = opened and how == "replaced"
    with contextlib.suppress(SourceError) if may_succeed else refused:
        assert is_block(source, KEYS[0], read(source, KEYS[0]), tensors)


def test_the_route_is_chosen_by_free_memory_or_by_request(path):
    huge = FileTensor(path=path, offset=0, nbytes=1 << 44, dtype=torch.uint8, shape=(1 << 44,))
    small = blocks_of(path)
    large = {KEYS[0]: {"w": huge}}
    for blocks, how, direct in (
        (small, {}, False),  # a small file stays in the page cache
        (small, {"direct": True}, HAS_DIRECT),
        (small, {"direct": False}, False),
        (small, {"direct": True, "portable": True}, False),
        (large, {}, HAS_DIRECT),
        (large, {"direct": False}, False),
    ):
        assert FileSource(blocks, **FP32, **how).reader.direct == direct


@pytest.mark.parametrize(("first", "second"), [("cache", "direct"), ("direct", "portable")])
def test_one_source_closes_while_another_reads(path, tensors, first, second):
    lasting = FileSource(blocks_of(path), readers=2, **FP32, **ROUTES[first])
    right: list[bool] = []

    def read_on() -> None:
        for key in KEYS * 40:
            right.append(is_block(lasting, key, read(lasting, key), tensors))

    reading = threading.Thread(target=read_on)
    reading.start()
    while reading.is_alive():
        passing = FileSource(blocks_of(path), readers=2, **FP32, **ROUTES[second])
        assert is_block(passing, KEYS[1], read(passing, KEYS[1]), tensors)
        passing.close()
    lasting.close()
    assert right == [True] * 3 * 40


def identity(blocks: dict[BlockKey, dict[str, FileTensor]]) -> str:
    return FileSource(blocks, **FP32).identity


def test_the_identity_has_the_tensors_and_the_files_version(path, tensors, monkeypatch):
    blocks = blocks_of(path)
    assert identity(blocks) == identity(blocks_of(path))
    assert identity({key: blocks[key] for key in KEYS[:2]}) != identity(blocks)
    assert identity({KEYS[0]: blocks[KEYS[1]]}) != identity({KEYS[0]: blocks[KEYS[0]]})
    save_other(path, tensors)
    assert identity(blocks_of(path)) != identity(blocks)
    relative = set()
    for folder in ("one", "two"):
        path.with_name(folder).mkdir()
        monkeypatch.chdir(path.with_name(folder))
        save_other(Path("model.safetensors"), tensors)
        relative.add(identity(blocks_of(Path("model.safetensors"))))
    assert len(relative) == 2, "files of one name in other folders"


@pytest.mark.integration
def test_processes_share_the_identity(path):
    imports = "from wanstream.tests.unit.offload.sources.test_file import Path, blocks_of, identity"
    code = f"import sys\n{imports}\nprint(identity(blocks_of(Path(sys.argv[1]))))"
    command = [sys.executable, "-c", code, str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert found == identity(blocks_of(path))
