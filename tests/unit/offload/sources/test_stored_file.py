"""File tensor views, found again by place after renaming, slicing and reshaping."""

from __future__ import annotations

import copy
import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load, save, save_file

from wanstream.offload.formats.safetensors_header import CheckpointFileError
from wanstream.offload.sources import reader
from wanstream.offload.sources.base import SourceError
from wanstream.offload.sources.file import read_tensors
from wanstream.offload.sources.stored_file import StoredFile

Q8_0 = GGMLQuantizationType.Q8_0


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def plain(tmp_path: Path) -> StoredFile:
    tensors = {"a": normal(6, 4, seed=1), "b": normal(3, seed=2).half(), "none": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "plain.safetensors", metadata={"format": "pt"})
    return StoredFile(tmp_path / "plain.safetensors")


@pytest.fixture
def packed_values() -> dict[str, torch.Tensor]:
    return {
        "q": normal(6, 64, seed=3),
        "k": normal(4, 32, seed=4),
        "cube": normal(2, 3, 32, seed=5),
    }


@pytest.fixture
def packed(tmp_path: Path, packed_values: dict[str, torch.Tensor]) -> StoredFile:
    path = tmp_path / "packed.gguf"
    writer = GGUFWriter(path, "wan")
    for name, values in packed_values.items():
        writer.add_tensor(name, quantize(values.numpy(), Q8_0), raw_dtype=Q8_0)
    writer.add_tensor("norm", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return StoredFile(path)


def test_reading_a_small_tensor_starts_no_thread(
    plain: StoredFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "ReadThreads", None)
    assert torch.equal(plain.tensors["b"].clone(), normal(3, seed=2).half())
    with pytest.raises(TypeError):
        read_tensors(plain.places)


def read(file: StoredFile, view: torch.Tensor) -> torch.Tensor:
    place = file.locate(view)
    assert place is not None
    return read_tensors({"": place})[""]


def test_a_view_is_read_from_its_place(plain: StoredFile) -> None:
    a = plain.tensors["a"]
    for view in (a, a[2:5], a.view(12, 2), a.view(-1)[4:9], plain.tensors["b"]):
        assert torch.equal(read(plain, view), view)
    assert plain.metadata == {"format": "pt"}
    assert not plain.is_packed


def test_tensors_that_are_not_contiguous_parts_of_the_file_have_no_place(plain: StoredFile) -> None:
    a = plain.tensors["a"]
    for other in (
        a.t(),
        a[:, :2],
        a.clone(),
        torch.ones(2),
        torch.empty(2, device="meta"),
        plain.tensors["none"],
    ):
        assert plain.locate(other) is None
    assert plain.has(a[:, :2])
    assert not plain.has(a.clone())


OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda a: a.clone(),
    "to": lambda a: a.to(torch.float64, copy=True),
    "bytes": lambda a: a.view(torch.uint8).clone(),
    "slices": lambda a: torch.cat([a[1:3], a[4:]]),
    "not contiguous": lambda a: a.t()[1:, ::2].contiguous(),
    "copied into": lambda a: torch.empty_like(a, dtype=torch.float16).copy_(a),
    "parameter": lambda a: torch.nn.functional.linear(
        torch.ones(4), torch.nn.Parameter(a, requires_grad=False)
    ),
    "chunks": lambda a: a.chunk(3)[1] * 2,
    "numpy": lambda a: torch.from_numpy(a.numpy()),
    "list": lambda a: torch.tensor(a[2].tolist()),
    "device": lambda a: a.to(device="cpu", dtype=torch.float64).float(),
    "reshape": lambda a: a.t().reshape(3, 8).flatten() + a.reshape(-1),
    "item": lambda a: torch.tensor(a[1, 1].item()),
    "deep copy": lambda a: copy.deepcopy({"a": a})["a"] + 0,
    "like": lambda a: torch.zeros_like(a),
    "saved": lambda a: load(save({"a": a.detach()}))["a"],
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_reads_the_values(
    plain: StoredFile, operation: str, inference: bool
) -> None:
    with torch.inference_mode(inference):
        expected = OPERATIONS[operation](normal(6, 4, seed=1))
        result = OPERATIONS[operation](plain.tensors["a"])
    assert torch.equal(result, expected)
    assert type(result) is torch.Tensor


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "like"])
@pytest.mark.parametrize("change", ["cut", "empty", "rewritten", "replaced", "gone"])
def test_every_operation_on_a_changed_file_is_refused_in_words(
    plain: StoredFile, operation: str, change: str
) -> None:
    path = plain.tensors["a"].place.path  # type: ignore[attr-defined]
    content = path.read_bytes()
    if change in {"cut", "empty"}:
        os.truncate(path, 0 if change == "empty" else len(content) - 100)
    elif change == "gone":
        path.unlink()
    else:
        other = path.with_name("other") if change == "replaced" else path
        other.write_bytes(bytes(len(content)))
        os.utime(other, ns=(1, 1))
        other.replace(path)
    with pytest.raises(SourceError, match=r"plain\.safetensors"):
        OPERATIONS[operation](plain.tensors["a"])


def test_a_view_cannot_be_written(plain: StoredFile) -> None:
    for write in (
        lambda a: a.zero_(),
        lambda a: a[1].copy_(torch.ones(4)),
        lambda a: torch.add(a, 1, out=a),
    ):
        with pytest.raises(ValueError, match="clone it first"):
            write(plain.tensors["a"])


@pytest.mark.skipif(
    sys.platform != "linux", reason="reads the size of the RAM, and needs sparse files"
)
def test_a_file_may_be_larger_than_the_memory(tmp_path: Path) -> None:
    nbytes = 4 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    header = json.dumps(
        {"a": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}
    ).encode()
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + nbytes)
    large = StoredFile(path)
    assert large.tensors["a"].shape == (nbytes,)
    assert large.tensors["a"][-1] == 0


def test_a_view_of_a_packed_tensor_is_read_from_its_groups(
    packed: StoredFile, packed_values: dict[str, torch.Tensor]
) -> None:
    assert packed.is_packed
    assert torch.equal(read(packed, packed.tensors["norm"]), torch.arange(5.0))
    for name, values in packed_values.items():
        view = packed.tensors[name]
        assert view.is_meta
        assert view.shape == values.shape
        expected = torch.from_numpy(quantize(values.numpy(), Q8_0)).view(-1, 34)
        assert torch.equal(read(packed, view), expected)
        groups = values[0].numel() // 32
        assert torch.equal(read(packed, view[1:]), expected[groups:])
        assert torch.equal(read(packed, view[1:2].reshape(-1)), expected[groups : 2 * groups])


def test_parts_of_groups_and_other_tensors_without_values_have_no_place(packed: StoredFile) -> None:
    q = packed.tensors["q"]
    for other in (
        q.view(-1)[16:48],
        q.view(-1)[:48],
        q[:, :32],
        q.t(),
        q.clone(),
        torch.empty(6, 64, device="meta"),
    ):
        assert packed.locate(other) is None
    assert packed.has(q[:, :32])
    assert not packed.has(q.clone())


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(CheckpointFileError, match=r"end in \.safetensors"):
        StoredFile(path)
