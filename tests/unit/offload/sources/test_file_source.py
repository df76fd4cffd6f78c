from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wanstream.offload.formats.layout import allocate_flat, tensor_views
from wanstream.offload.formats.safetensors_header import (
    CheckpointFileError,
    FileTensor,
    read_header,
)
from wanstream.offload.sources.base import SourceError
from wanstream.offload.sources.file import FileSource, read_tensors
from wanstream.offload.sources.read_plan import ALIGNMENT
from wanstream.offload.sources.reader import HAS_DIRECT, HAS_PREADV
from wanstream.plan.programs import BlockKey

NAMES = ("ffn.weight", "q.weight", "k.weight")  # the file has them sorted by name
KEYS = [BlockKey("high", 0), BlockKey("high", 1), BlockKey("low", 0)]


def stored_name(key: BlockKey, name: str) -> str:
    return f"{key.expert}.{key.block}.{name}"


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"ffn.weight": (96, 32), "q.weight": (32, 32), "k.weight": (5, 7)}
    return {
        stored_name(key, name): torch.randn(shapes[name]).bfloat16()
        for key in KEYS
        for name in NAMES
    }


@pytest.fixture
def path(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def blocks_of(path: Path) -> dict[BlockKey, dict[str, FileTensor]]:
    header = read_header(path)
    return {key: {name: header.tensors[stored_name(key, name)] for name in NAMES} for key in KEYS}


ROUTES = {"cache": {"direct": False}, "direct": {"direct": True}, "portable": {"portable": True}}


@pytest.fixture(
    params=[
        (1, "cache"),
        (4, "cache"),
        (1, "direct"),
        (4, "direct"),
        (1, "portable"),
        (4, "portable"),
    ]
)
def source(request: pytest.FixtureRequest, path: Path) -> Iterator[FileSource]:
    readers, route = request.param
    if route == "cache" and not HAS_PREADV:
        pytest.skip("this system has no preadv")
    if route == "direct" and not HAS_DIRECT:
        pytest.skip("this system has no O_DIRECT")
    source = FileSource(
        blocks_of(path), computed_dtypes=torch.float32, readers=readers, **ROUTES[route]
    )
    yield source
    source.close()


def test_blocks_arrive_as_they_are_stored(source, tensors):
    assert list(source.formats) == KEYS
    for key in [*KEYS, *KEYS[::-1]]:
        stored = source.formats[key].stored
        assert tuple(tensor.name for tensor in stored.tensors) == NAMES
        flat = allocate_flat(stored.nbytes, "cpu")
        source.read_block(key, flat)
        for name, view in tensor_views(flat, stored).items():
            assert torch.equal(view, tensors[stored_name(key, name)])
        assert source.file_bytes(key) == sum(
            tensor.nbytes for tensor in source.formats[key].stored.tensors
        )
        assert source.scales(key) == {}


def test_computed_dtypes_are_one_for_all_or_by_block_and_name(path):
    blocks = blocks_of(path)
    own = FileSource(blocks, computed_dtypes=torch.bfloat16)
    assert own.formats[KEYS[0]].is_raw
    of_block = dict.fromkeys(NAMES, torch.bfloat16)
    named = FileSource(
        blocks,
        computed_dtypes=dict.fromkeys(blocks, of_block)
        | {KEYS[0]: of_block | {"q.weight": torch.float32}},
    )
    assert named.formats[KEYS[1]].is_raw
    assert not named.formats[KEYS[0]].is_raw
    assert [tensor.dtype for tensor in named.formats[KEYS[0]].computed.tensors] == [
        torch.bfloat16,
        torch.float32,
        torch.bfloat16,
    ]


def test_only_the_tensors_of_the_block_are_written(source):
    stored = source.formats[KEYS[0]].stored
    flat = allocate_flat(stored.nbytes + 256, "cpu").fill_(7)
    source.read_block(KEYS[0], flat[: stored.nbytes])
    owned = torch.zeros(stored.nbytes + 256, dtype=torch.bool)
    for tensor in stored.tensors:
        owned[tensor.offset : tensor.offset + tensor.nbytes] = True
    assert (flat[~owned] == 7).all()


def test_an_error_names_the_tensor_and_leaves_the_source_usable(source, path, tensors):
    content, status = path.read_bytes(), path.stat()
    flat = allocate_flat(source.formats[KEYS[0]].stored.nbytes, "cpu")
    source.read_block(KEYS[0], flat)
    os.truncate(path, max(tensor.offset for tensor in blocks_of(path)[KEYS[2]].values()) + 3)
    with pytest.raises(
        SourceError,
        match=r"model\.safetensors: reading \w+\.weight.* at byte \d+ failed: the file ",
    ):
        source.read_block(KEYS[2], flat)
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    source.read_block(KEYS[2], flat)
    for name, view in tensor_views(flat, source.formats[KEYS[2]].stored).items():
        assert torch.equal(view, tensors[stored_name(KEYS[2], name)])


def test_nothing_but_headers_is_read_before_the_first_block(path):
    blocks = blocks_of(path)
    path.unlink()
    source = FileSource(blocks, computed_dtypes=torch.float32)
    flat = allocate_flat(source.formats[KEYS[0]].stored.nbytes, "cpu")
    with pytest.raises(SourceError, match="No such file"):
        source.read_block(KEYS[0], flat)
    source.close()


@pytest.mark.parametrize(
    ("stored", "shape"),
    [
        (torch.tensor(0.5), ()),
        (torch.tensor([0.5]), ()),
        (torch.tensor([[0.5]]), ()),
        (torch.tensor([0.25, 0.5, 2.0], dtype=torch.bfloat16), (3, 1)),
        (torch.tensor([[0.25], [0.5], [2.0]], dtype=torch.float16), (3, 1)),
    ],
)
def test_scales_have_two_shapes(tmp_path, stored, shape):
    save_file(
        {"w": torch.ones(3, 5).to(torch.float8_e4m3fn), "s": stored}, tmp_path / "x.safetensors"
    )
    file = read_header(tmp_path / "x.safetensors").tensors
    key = BlockKey("high", 0)
    source = FileSource(
        {key: {"w": file["w"]}}, computed_dtypes=torch.float32, scales={key: {"w": file["s"]}}
    )
    assert source.formats[key].scaled == {"w"}
    assert not source.formats[key].is_raw
    scale = source.scales(key)["w"]
    assert (tuple(scale.shape), scale.dtype) == (shape, torch.float32)
    assert torch.equal(scale.flatten(), stored.float().flatten())
    assert source.scales(key)["w"] is scale
    source.close()


@pytest.mark.parametrize("shape", [(2,), (5,), (1, 3), (3, 5), (1, 1, 1)])
def test_scales_that_fit_nothing_are_refused(tmp_path, shape):
    save_file({"w": torch.ones(3, 5), "s": torch.ones(shape)}, tmp_path / "x.safetensors")
    file = read_header(tmp_path / "x.safetensors").tensors
    key = BlockKey("high", 0)
    with pytest.raises(
        CheckpointFileError, match=r"x\.safetensors: the scale of w has shape .* one value or 3"
    ):
        FileSource(
            {key: {"w": file["w"]}}, computed_dtypes=torch.float32, scales={key: {"w": file["s"]}}
        )


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
    header = read_header(tmp_path / "x.safetensors")
    with torch.inference_mode():
        read = read_tensors({name: header.tensors[name] for name in tensors}, readers=3)
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert read[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
        assert not read[name].is_inference()
    assert read["wide"].data_ptr() % 64 == 0
    assert read_tensors({"some": header.tensors["wide"].rows(3, 5)})["some"].equal(
        tensors["wide"][3:5]
    )
    assert read_tensors({}) == {}


def test_tensors_that_were_read_do_not_hang_on_the_file(tmp_path):
    save_file({"a": torch.ones(1000)}, tmp_path / "x.safetensors")
    read = read_tensors(read_header(tmp_path / "x.safetensors").tensors)
    os.truncate(tmp_path / "x.safetensors", 0)
    assert read["a"].sum() == 1000
    with pytest.raises(SourceError, match=r"x\.safetensors"):
        read_tensors(
            {
                "a": FileTensor(
                    path=tmp_path / "x.safetensors",
                    offset=8,
                    nbytes=4,
                    dtype=torch.float32,
                    shape=(1,),
                )
            }
        )


@pytest.mark.parametrize("how", ["replaced", "overwritten"])
@pytest.mark.parametrize("opened", [False, True], ids=["not yet read", "read before"])
def test_another_file_under_the_same_name_is_never_taken_for_the_one_that_was_opened(
    source, tensors, path, how, opened
):
    flat = allocate_flat(source.formats[KEYS[0]].stored.nbytes, "cpu")
    if opened:
        source.read_block(KEYS[0], flat)
    kept = {
        name: view.clone()
        for name, view in tensor_views(flat, source.formats[KEYS[0]].stored).items()
    }
    other = path.with_name("other.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, other)
    os.utime(other, ns=(1, 1))
    if how == "replaced":
        other.replace(path)
    else:
        path.write_bytes(other.read_bytes())
        os.utime(path, ns=(1, 1))
    told = pytest.raises(
        SourceError, match=r"model\.safetensors: .* was changed after it was opened"
    )
    # The opened file is still there without a name. A thread opening it later finds the other one.
    may_succeed = opened and how == "replaced"
    with contextlib.suppress(SourceError) if may_succeed else told:
        source.read_block(KEYS[0], flat)
        for name, view in tensor_views(flat, source.formats[KEYS[0]].stored).items():
            assert torch.equal(view, kept[name])


def test_rows_of_one_parameter_arrive_as_they_are_stored(source, path, tensors):
    for name, rows in (
        ("ffn.weight", range(96)),
        ("q.weight", range(5, 6)),
        ("k.weight", range(2, 5)),
    ):
        expected = tensors[stored_name(KEYS[1], name)][rows.start : rows.stop]
        flat = allocate_flat(expected.nbytes, "cpu")
        source.read_rows(KEYS[1], name, rows, flat)
        assert torch.equal(flat.view(torch.bfloat16).view(expected.shape), expected)
        assert source.path(KEYS[1], name) == path


def assert_block(
    source: FileSource, key: BlockKey, flat: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> None:
    for name, view in tensor_views(flat, source.formats[key].stored).items():
        assert torch.equal(view, tensors[stored_name(key, name)])


def test_a_file_cut_short_while_blocks_stream_is_an_error_until_it_is_whole_again(
    source, path, tensors
):
    content, status = path.read_bytes(), path.stat()
    flat = allocate_flat(max(source.formats[key].stored.nbytes for key in KEYS), "cpu")
    for key in KEYS:
        memory = flat[: source.formats[key].stored.nbytes]
        source.read_block(key, memory)
        os.truncate(path, len(content) // 3)
        # The bytes can still be read, but the version differs.
        with pytest.raises(
            SourceError,
            match=r"model\.safetensors: reading \S+\.weight.* at byte \d+ failed: the file ",
        ):
            source.read_block(key, memory)
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        source.read_block(key, memory)
        assert_block(source, key, memory, tensors)


def test_bytes_read_are_those_of_the_block_and_at_most_a_page_at_each_end(source):
    assert source.reader.bytes_read == 0
    for count, key in enumerate(KEYS, 1):
        stored = source.formats[key].stored
        source.read_block(key, allocate_flat(stored.nbytes, "cpu"))
        wanted = count * sum(tensor.nbytes for tensor in stored.tensors)
        assert wanted <= source.reader.bytes_read <= wanted + count * 2 * ALIGNMENT


def test_the_route_is_chosen_by_what_is_free_unless_it_is_asked_for(path):
    blocks = blocks_of(path)
    assert not FileSource(blocks, computed_dtypes=torch.float32).reader.direct, (
        "a small file stays in the page cache"
    )
    assert (
        FileSource(blocks, computed_dtypes=torch.float32, direct=True).reader.direct == HAS_DIRECT
    )
    assert not FileSource(blocks, computed_dtypes=torch.float32, direct=False).reader.direct
    assert not FileSource(
        blocks, computed_dtypes=torch.float32, direct=True, portable=True
    ).reader.direct
    huge = FileTensor(path=path, offset=0, nbytes=1 << 44, dtype=torch.uint8, shape=(1 << 44,))
    assert (
        FileSource({KEYS[0]: {"w": huge}}, computed_dtypes=torch.float32).reader.direct
        == HAS_DIRECT
    )
    assert not FileSource(
        {KEYS[0]: {"w": huge}}, computed_dtypes=torch.float32, direct=False
    ).reader.direct


@pytest.mark.parametrize("first", ROUTES)
@pytest.mark.parametrize("second", ROUTES)
def test_one_loader_closes_while_the_other_reads(path, tensors, first, second):
    lasting = FileSource(blocks_of(path), computed_dtypes=torch.float32, readers=2, **ROUTES[first])
    wrong: list[BlockKey] = []
    done = threading.Event()

    def read_on() -> None:
        for key in KEYS * 40:
            flat = allocate_flat(lasting.formats[key].stored.nbytes, "cpu").fill_(255)
            lasting.read_block(key, flat)
            views = tensor_views(flat, lasting.formats[key].stored)
            if not all(
                torch.equal(view, tensors[stored_name(key, name)]) for name, view in views.items()
            ):
                wrong.append(key)
        done.set()

    reading = threading.Thread(target=read_on)
    reading.start()
    while not done.is_set():
        passing = FileSource(
            blocks_of(path), computed_dtypes=torch.float32, readers=2, **ROUTES[second]
        )
        flat = allocate_flat(passing.formats[KEYS[1]].stored.nbytes, "cpu")
        passing.read_block(KEYS[1], flat)
        assert_block(passing, KEYS[1], flat, tensors)
        passing.close()
    reading.join()
    lasting.close()
    assert wrong == []


LOADER = """
import sys
from pathlib import Path
import torch
from wanstream.offload.sources.file import FileSource
from wanstream.offload.formats.safetensors_header import read_header
from wanstream.plan.programs import BlockKey

header = read_header(Path(sys.argv[1]))
blocks = {
    BlockKey("all", index): {name: tensor}
    for index, (name, tensor) in enumerate(header.tensors.items())
}
source = FileSource(blocks, computed_dtypes=torch.float32, direct=sys.argv[2] == "direct")
sums = []
for _ in range(30):
    for key in blocks:
        flat = torch.empty(source.formats[key].stored.nbytes, dtype=torch.uint8)
        source.read_block(key, flat)
        nbytes = sum(t.nbytes for t in source.formats[key].stored.tensors)
        sums.append(int(flat[:nbytes].long().sum()))
print(sum(sums), source.identity)
source.close()
"""


@pytest.mark.integration
def test_processes_load_one_file_at_the_same_time(path, tensors):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LOADER, str(path), route], stdout=subprocess.PIPE, text=True
        )
        for route in ("direct", "cache", "direct")
    ]
    answers = [process.communicate()[0].split() for process in processes]
    total = 30 * sum(
        int(tensor.flatten().view(torch.uint8).long().sum()) for tensor in tensors.values()
    )
    assert [int(answer[0]) for answer in answers] == [total] * 3
    assert len({answer[1] for answer in answers}) == 1, "what they could share has one name"


def test_the_identity_is_that_of_the_tensors_and_of_the_version_of_their_files(path, tensors):
    def identity(blocks: dict[BlockKey, dict[str, FileTensor]]) -> str:
        return FileSource(blocks, computed_dtypes=torch.float32).identity

    blocks = blocks_of(path)
    assert identity(blocks) == identity(blocks_of(path))
    assert identity({key: blocks[key] for key in KEYS[:2]}) != identity(blocks)
    assert identity({KEYS[0]: blocks[KEYS[1]]}) != identity({KEYS[0]: blocks[KEYS[0]]})
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, path)
    os.utime(path, ns=(1, 1))
    assert identity(blocks_of(path)) != identity(blocks)


def test_files_of_the_same_name_in_other_folders_are_others(tmp_path, monkeypatch, tensors):
    identities = set()
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        save_file(tensors, "model.safetensors")
        os.utime("model.safetensors", ns=(1, 1))
        identities.add(
            FileSource(blocks_of(Path("model.safetensors")), computed_dtypes=torch.float32).identity
        )
    assert len(identities) == 2
