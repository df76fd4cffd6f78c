"""Safetensors headers. Invalid files and pickles are refused by name and reason, and never run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from wanstream.offload.formats.safetensors_header import (
    DTYPES,
    CheckpointFileError,
    FileTensor,
    read_header,
)

ONE_TENSOR = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def file_bytes(entries: dict[str, object] | bytes, data: int = 0) -> bytes:
    header = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + bytes(data)


def tensor(dtype: str, shape: list[int], *offsets: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def two(*second: object, data: int = 16) -> bytes:
    return file_bytes({**ONE_TENSOR, "b": tensor(*second)}, data)


@pytest.fixture
def write(tmp_path):
    """Write a file's bytes, and return the path."""

    def write(content: bytes) -> Path:
        (tmp_path / "x.safetensors").write_bytes(content)
        return tmp_path / "x.safetensors"

    return write


def test_places_are_where_the_bytes_lie(tmp_path):
    tensors = {name: torch.randint(0, 2, (3, 5)).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "all.safetensors", metadata={"format": "pt", "note": "{}"})
    header = read_header(tmp_path / "all.safetensors")
    assert header.metadata == {"format": "pt", "note": "{}"}
    assert header.tensors.keys() == tensors.keys()
    content = header.path.read_bytes()
    for name, values in tensors.items():
        place = header.tensors[name]
        shape = tuple(values.shape)
        assert (place.path, place.dtype, place.shape) == (header.path, values.dtype, shape)
        stored = content[place.offset : place.offset + place.nbytes]
        assert stored == bytes(values.reshape(-1).view(torch.uint8).tolist())


def test_tensors_come_in_the_order_of_their_bytes(write):
    places = {"z": (0, 1), "a": (4, 6), "m": (1, 4)}
    entries = {name: tensor("U8", [end - at], at, end) for name, (at, end) in places.items()}
    header = read_header(write(file_bytes(entries, 6)))
    assert list(header.tensors) == ["z", "m", "a"]
    assert header.metadata == {}


def test_rows_beyond_a_tensor_are_refused():
    where = {"path": Path("x"), "offset": 1000, "nbytes": 80}
    table = FileTensor(dtype=torch.float32, shape=(10, 2), **where)
    with pytest.raises(AssertionError, match="rows 9:11"):
        table.rows(9, 11)


def test_a_header_whose_length_looks_like_a_pickle_is_read(write):
    # The length is stored as 80 02 00 ..., like a protocol 2 pickle.
    padded = json.dumps(ONE_TENSOR).encode().ljust(0x280)
    assert list(read_header(write(file_bytes(padded, 8))).tensors) == ["a"]


OTHER = "is not a safetensors file"
DAMAGED = "is a damaged safetensors file"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 28577148800\n"

BAD_FILES = {
    "empty": (b"", "is empty: download it again"),
    "short": (b"abc", f"{OTHER}: has 3 bytes and starts with b'abc'"),
    "html": (b"<!DOCTYPE html><html>", "a web page; the download probably needs a login"),
    "message of a server": (b'{"error":"Unauthorized"}', "is not the model but a server's message"),
    "git-lfs pointer": (LFS_POINTER, "a git-lfs pointer, a text file of about 130 bytes: download"),
    "gguf": (b"GGUF\x03\x00\x00\x00" + bytes(100), OTHER),
    "zip": (b"PK\x03\x04\x00\x00\x08\x08" + bytes(100), "PyTorch pickle"),
    "pickle": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "PyTorch pickle"),
    "header too large": ((100_000_001).to_bytes(8, "little") + b"{}", OTHER),
    "header cut off": (file_bytes(ONE_TENSOR)[:30], "has 30 bytes, its header alone needs 69"),
    "data cut off": (file_bytes(ONE_TENSOR, 7), "truncated: has 76 of 77 bytes"),
    "no JSON": (file_bytes(b"{hello}"), OTHER),
    "no offsets": (file_bytes({"a": {"dtype": "F32", "shape": [2]}}, 8), OTHER),
    "hole": (two("F32", [1], 12, 16), DAMAGED),
    "shape": (two("F32", [3], 8, 16), DAMAGED),
    "unknown dtype": (two("Q7", [2], 8, 16), DAMAGED),
    "our limit": (two("C64", [1], 8, 16), "b is stored as C64"),
} | {
    f"impossible {shape}": (two("F32", shape, 8, 8, data=8), "b has the shape")
    for shape in ([0, 2**62, 2**62], [2**62, 0, 4, 2**50], [2**63 - 1, 0], [0, *[2**16] * 4])
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_by_name_and_reason(write, case):
    content, reason = BAD_FILES[case]
    path = write(content)
    with pytest.raises(CheckpointFileError) as refusal:
        read_header(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert reason in str(refusal.value)
    assert refusal.value.path == path


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_is_refused_and_never_run(tmp_path, legacy):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    path = tmp_path / "m.safetensors"
    torch.save({"x": Evil()}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointFileError, match="PyTorch pickle"):
        read_header(path)
    assert not (tmp_path / "ran").exists()


def test_missing_files_and_folders_are_refused(tmp_path):
    words = r"gone\.safetensors: cannot be read: No such file"
    with pytest.raises(CheckpointFileError, match=words):
        read_header(tmp_path / "gone.safetensors")
    with pytest.raises(CheckpointFileError, match="cannot be read"):
        read_header(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="counts with /proc")
def test_only_the_header_is_read(write):
    import resource  # not on Windows

    nbytes = 16 * 1024**3
    content = file_bytes({"a": tensor("BF16", [nbytes // 2], 0, nbytes)})
    path = write(content)
    os.truncate(path, len(content) + nbytes)  # a sparse file: no disk is used

    def read_and_faults() -> tuple[int, int]:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        return psutil.Process().io_counters().read_chars, faults

    before = read_and_faults()
    assert read_header(path).tensors["a"].nbytes == nbytes
    read, faults = (now - then for now, then in zip(read_and_faults(), before, strict=True))
    assert read < 64 * 1024
    assert faults < 1000, "reading the whole mapped file would take 4 million"
