"""File tensor views, found again by place after renaming, slicing and reshaping."""

from __future__ import annotations

import copy
import json
import os
import struct
import sys
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load, save, save_file

from wanstream.offload.formats.safetensors_header import CheckpointFileError
from wanstream.offload.sources import StoredFile, read_tensors, reader
from wanstream.offload.sources.base import SourceError
from wanstream.tests.support.offload.edited_files import close_gguf

Q8_0 = GGMLQuantizationType.Q8_0


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


VALUES = {"q": normal(6, 64, seed=3), "k": normal(4, 32, seed=4), "cube": normal(2, 3, 32, seed=5)}


@pytest.fixture
def plain(tmp_path) -> StoredFile:
    tensors = {"a": normal(6, 4, seed=1), "b": normal(3, seed=2).half(), "none": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "plain.safetensors", metadata={"format": "pt"})
    return StoredFile(tmp_path / "plain.safetensors")


@pytest.fixture
def packed(tmp_path) -> StoredFile:
    path = tmp_path / "packed.gguf"
    writer = GGUFWriter(path, "wan")
    for name, values in VALUES.items():
        writer.add_tensor(name, quantize(values.numpy(), Q8_0), raw_dtype=Q8_0)
    writer.add_tensor("norm", np.arange(5, dtype=np.float32))
    close_gguf(writer)
    return StoredFile(path)


def test_reading_a_small_tensor_starts_no_thread(plain, monkeypatch):
    monkeypatch.setattr(reader, "ReadThreads", None)
    assert torch.equal(plain.tensors["b"].clone(), normal(3, seed=2).half())
    with pytest.raises(TypeError):
        read_tensors(plain.places)


def read(file: StoredFile, view: torch.Tensor) -> torch.Tensor:
    return read_tensors({"": file.locate(view)})[""]


def test_contiguous_views_are_read_from_their_place(plain):
    a = plain.tensors["a"]
    for view in (a, a[2:5], a.view(12, 2), a.view(-1)[4:9], plain.tensors["b"]):
        assert torch.equal(read(plain, view), view)
    assert plain.metadata == {"format": "pt"}
    assert not plain.is_packed
    others = (torch.ones(2), torch.empty(2, device="meta"), plain.tensors["none"])
    for other in (a.t(), a[:, :2], a.clone(), *others):
        assert plain.locate(other) is None
    assert plain.has(a[:, :2])
    assert not plain.has(a.clone())


def test_views_of_whole_groups_are_read_from_their_place(packed):
    assert packed.is_packed
    assert torch.equal(read(packed, packed.tensors["norm"]), torch.arange(5.0))
    for name, values in VALUES.items():
        view = packed.tensors[name]
        assert view.is_meta
        assert view.shape == values.shape
        expected = torch.from_numpy(quantize(values.numpy(), Q8_0)).view(-1, 34)
        assert torch.equal(read(packed, view), expected)
        groups = values[0].numel() // 32
        assert torch.equal(read(packed, view[1:]), expected[groups:])
        assert torch.equal(read(packed, view[1:2].reshape(-1)), expected[groups : 2 * groups])
    q = packed.tensors["q"]
    parts = (q.view(-1)[16:48], q.view(-1)[:48], q[:, :32])
    for other in (*parts, q.t(), q.clone(), torch.empty(6, 64, device="meta")):
        assert packed.locate(other) is None
    assert packed.has(q[:, :32])
    assert not packed.has(q.clone())


OPERATIONS = {
    "plain": lambda a: a.clone(),
    "to": lambda a: a.to(torch.float64, copy=True),
    "bytes": lambda a: a.view(torch.uint8).clone(),
    "slices": lambda a: torch.cat([a[1:3], a[4:]]),
    "not contiguous": lambda a: a.t()[1:, ::2].contiguous(),
    "copied into": lambda a: torch.empty_like(a, dtype=torch.float16).copy_(a),
    "parameter": lambda a: torch.ones(4) @ torch.nn.Parameter(a, requires_grad=False).t(),
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


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_reads_the_values(plain, operation):
    for inference in (False, True):
        with torch.inference_mode(inference):
            expected = OPERATIONS[operation](normal(6, 4, seed=1))
            result = OPERATIONS[operation](plain.tensors["a"])
        assert torch.equal(result, expected)
        assert type(result) is torch.Tensor


READING = [name for name in OPERATIONS if name != "like"]
CHANGES = ["cut", "empty", "rewritten", "replaced", "gone"]


@pytest.mark.parametrize(("operation", "change"), [*zip(READING, cycle(CHANGES), strict=False)])
def test_every_operation_on_a_changed_file_is_refused(plain, operation, change):
    path = plain.tensors["a"].place.path
    nbytes = path.stat().st_size
    if change in {"cut", "empty"}:
        os.truncate(path, 0 if change == "empty" else nbytes - 100)
    elif change == "gone":
        path.unlink()
    else:
        other = path.with_name("other") if change == "replaced" else path
        other.write_bytes(bytes(nbytes))
        os.utime(other, ns=(1, 1))
        other.replace(path)
    with pytest.raises(SourceError, match=r"plain\.safetensors"):
        OPERATIONS[operation](plain.tensors["a"])


WAYS = [lambda a: a.zero_(), lambda a: a[1].copy_(torch.ones(4)), lambda a: torch.add(a, 1, out=a)]


@pytest.mark.parametrize("write", WAYS)
def test_a_view_cannot_be_written(plain, write):
    with pytest.raises(ValueError, match="clone it first"):
        write(plain.tensors["a"])


@pytest.mark.skipif(sys.platform != "linux", reason="reads the RAM's size, needs sparse files")
def test_a_file_may_be_larger_than_the_memory(tmp_path):
    nbytes = 4 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    tensor = {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}
    header = json.dumps({"a": tensor}).encode()
    path = Path(tmp_path / "large.safetensors")
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + nbytes)
    large = StoredFile(path).tensors["a"]
    assert large.shape == (nbytes,)
    assert large[-1] == 0


def test_a_file_of_another_kind_is_refused(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.gguf")
    with pytest.raises(CheckpointFileError, match=r"end in \.safetensors"):
        StoredFile(tmp_path / "model.gguf")
