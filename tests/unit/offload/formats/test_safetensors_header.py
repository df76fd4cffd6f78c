from __future__ import annotations

import json
import os
import sys
from pathlib import Path

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


def file_bytes(entries: dict[str, object] | bytes, data: bytes = b"") -> bytes:
    header = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + data


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_places_are_where_the_bytes_lie(tmp_path):
    tensors = {
        name: torch.randint(0, 2, (3, 5)).to(dtype)
        for name, dtype in {key.lower(): DTYPES[key] for key in DTYPES}.items()
    }
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "all.safetensors", metadata={"format": "pt", "note": "{}"})
    header = read_header(tmp_path / "all.safetensors")
    assert header.metadata == {"format": "pt", "note": "{}"}
    assert header.tensors.keys() == tensors.keys()
    content = (tmp_path / "all.safetensors").read_bytes()
    for name, tensor in tensors.items():
        place = header.tensors[name]
        assert (place.path, place.dtype, place.shape) == (
            header.path,
            tensor.dtype,
            tuple(tensor.shape),
        )
        stored = content[place.offset : place.offset + place.nbytes]
        assert stored == bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def test_tensors_come_in_the_order_of_their_bytes(tmp_path):
    entries = {
        "z": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "a": {"dtype": "U8", "shape": [2], "data_offsets": [4, 6]},
        "m": {"dtype": "U8", "shape": [3], "data_offsets": [1, 4]},
    }
    header = read_header(written(tmp_path / "x.safetensors", file_bytes(entries, b"zmmmaa")))
    assert list(header.tensors) == ["z", "m", "a"]
    assert header.metadata == {}


def test_rows_of_a_tensor():
    table = FileTensor(
        path=Path("x"), offset=1000, nbytes=10 * 3 * 4 * 2, dtype=torch.bfloat16, shape=(10, 3, 4)
    )
    assert table.rows(0, 10) == table
    assert table.rows(4, 6) == FileTensor(
        path=Path("x"), offset=1000 + 4 * 24, nbytes=48, dtype=torch.bfloat16, shape=(2, 3, 4)
    )
    assert table.rows(3, 3).nbytes == 0
    with pytest.raises(AssertionError):
        table.rows(9, 11)


def test_a_header_whose_length_looks_like_a_pickle_is_read(tmp_path):
    header = json.dumps(ONE_TENSOR).encode()
    padded = header + b" " * (
        0x280 - len(header)
    )  # the length is stored as 80 02 00 ..., like a protocol 2 pickle
    assert list(
        read_header(written(tmp_path / "x.safetensors", file_bytes(padded, bytes(8)))).tensors
    ) == ["a"]


def two(second: dict[str, object]) -> bytes:
    return file_bytes({**ONE_TENSOR, "b": second}, bytes(16))


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 28577148800\n"

BAD_FILES = {
    "empty": (b"", "is empty: download it again"),
    "short": (b"abc", "is not a safetensors file: has 3 bytes and starts with b'abc'"),
    "html": (
        b"<!DOCTYPE html><html>",
        "is not the model but a web page; the download probably needs a login",
    ),
    "message of a server": (b'{"error":"Unauthorized"}', "is not the model but a server's message"),
    "html of another kind": (b"\n <HTML lang=en>", "is not the model but a web page"),
    "git-lfs pointer": (
        LFS_POINTER,
        "is not the model but a git-lfs pointer, a text file of about 130 bytes: download the file",
    ),
    "gguf": (b"GGUF\x03\x00\x00\x00" + bytes(100), "is not a safetensors file"),
    "zip": (b"PK\x03\x04\x00\x00\x08\x08" + bytes(100), "PyTorch pickle"),
    "pickle": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "PyTorch pickle"),
    "pickle 4": (b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00}\x94.", "PyTorch pickle"),
    "header too large": ((100_000_001).to_bytes(8, "little") + b"{}", "is not a safetensors file"),
    "header cut off": (
        file_bytes(ONE_TENSOR)[:30],
        "truncated: has 30 bytes, its header alone needs 69",
    ),
    "data cut off": (file_bytes(ONE_TENSOR, bytes(7)), "truncated: has 76 of 77 bytes"),
    "data missing": (file_bytes(ONE_TENSOR), "truncated: has 69 of 77 bytes"),
    "too much data": (file_bytes(ONE_TENSOR, bytes(9)), "is a damaged safetensors file"),
    "no JSON": (file_bytes(b"{hello}"), "is not a safetensors file"),
    "deep JSON": (file_bytes(b'{"a":' + b"[" * 100_000), "is not a safetensors file"),
    "no UTF-8": (file_bytes(b'{"\xff":1}'), "is not a safetensors file"),
    "no offsets": (
        file_bytes({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
        "is not a safetensors file",
    ),
    "hole": (
        two({"dtype": "F32", "shape": [1], "data_offsets": [12, 16]}),
        "is a damaged safetensors file",
    ),
    "overlap": (
        two({"dtype": "F32", "shape": [3], "data_offsets": [4, 16]}),
        "is a damaged safetensors file",
    ),
    "shape": (
        two({"dtype": "F32", "shape": [3], "data_offsets": [8, 16]}),
        "is a damaged safetensors file",
    ),
    "negative": (
        two({"dtype": "F32", "shape": [-2], "data_offsets": [8, 16]}),
        "is a damaged safetensors file",
    ),
    "unknown dtype": (
        two({"dtype": "Q7", "shape": [2], "data_offsets": [8, 16]}),
        "is a damaged safetensors file",
    ),
    **{
        f"impossible {shape}": (
            file_bytes(
                {**ONE_TENSOR, "b": {"dtype": "F32", "shape": shape, "data_offsets": [8, 8]}},
                bytes(8),
            ),
            "b has the shape",
        )
        for shape in ([0, 2**62, 2**62], [2**62, 0, 4, 2**50], [2**63 - 1, 0], [0, *[2**16] * 4])
    },
    "our limit": (
        two({"dtype": "C64", "shape": [1], "data_offsets": [8, 16]}),
        "b is stored as C64",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_by_name_and_reason(tmp_path, case):
    content, reason = BAD_FILES[case]
    path = written(tmp_path / "bad.safetensors", content)
    with pytest.raises(CheckpointFileError) as refusal:
        read_header(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert reason in str(refusal.value)
    assert refusal.value.path == path


@pytest.mark.parametrize("legacy", [False, True])
def test_what_torch_saves_is_refused_and_never_run(tmp_path, legacy):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save(
        {"w": torch.zeros(2), "x": Evil()},
        tmp_path / "m.safetensors",
        _use_new_zipfile_serialization=not legacy,
    )
    with pytest.raises(CheckpointFileError, match="PyTorch pickle"):
        read_header(tmp_path / "m.safetensors")
    assert not (tmp_path / "ran").exists()


def test_missing_files_and_folders_are_refused(tmp_path):
    with pytest.raises(
        CheckpointFileError, match=r"gone\.safetensors: cannot be read: No such file"
    ):
        read_header(tmp_path / "gone.safetensors")
    with pytest.raises(CheckpointFileError, match="cannot be read"):
        read_header(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="counts with /proc")
def test_only_the_header_is_read(tmp_path):
    nbytes = 16 * 1024**3
    path = tmp_path / "large.safetensors"
    content = file_bytes(
        {"a": {"dtype": "BF16", "shape": [nbytes // 2], "data_offsets": [0, nbytes]}}
    )
    path.write_bytes(content)
    os.truncate(path, len(content) + nbytes)  # a sparse file: no disk is used

    def bytes_read() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["rchar"])

    import resource  # not on Windows

    def page_faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    reads_before, faults_before = bytes_read(), page_faults()
    assert read_header(path).tensors["a"].nbytes == nbytes
    assert bytes_read() - reads_before < 64 * 1024
    assert (
        page_faults() - faults_before < 1000
    )  # reading the whole mapped file would take 4 million
