"""Views of the tensors of a file, found again by their place after they were renamed, sliced and reshaped."""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import save_file

from wanstream.offload.formats.safetensors_header import CheckpointFileError
from wanstream.offload.sources import mapped_file
from wanstream.offload.sources.file import read_tensors
from wanstream.offload.sources.mapped_file import MappedFile

Q8_0 = GGMLQuantizationType.Q8_0


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def plain(tmp_path: Path) -> MappedFile:
    tensors = {"a": normal(6, 4, seed=1), "b": normal(3, seed=2).half(), "none": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "plain.safetensors", metadata={"format": "pt"})
    return MappedFile(tmp_path / "plain.safetensors")


@pytest.fixture
def packed_values() -> dict[str, torch.Tensor]:
    return {"q": normal(6, 64, seed=3), "k": normal(4, 32, seed=4), "cube": normal(2, 3, 32, seed=5)}


@pytest.fixture
def packed(tmp_path: Path, packed_values: dict[str, torch.Tensor]) -> MappedFile:
    path = tmp_path / "packed.gguf"
    writer = GGUFWriter(path, "wan")
    for name, values in packed_values.items():
        writer.add_tensor(name, quantize(values.numpy(), Q8_0), raw_dtype=Q8_0)
    writer.add_tensor("norm", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return MappedFile(path)


def read(file: MappedFile, view: torch.Tensor) -> torch.Tensor:
    place = file.locate(view)
    assert place is not None
    return read_tensors({"": place})[""]


def test_a_view_is_read_from_its_place(plain: MappedFile) -> None:
    a = plain.tensors["a"]
    for view in (a, a[2:5], a.view(12, 2), a.view(-1)[4:9], plain.tensors["b"]):
        assert torch.equal(read(plain, view), view)
    assert plain.metadata == {"format": "pt"}
    assert not plain.is_packed


def test_tensors_that_are_not_contiguous_parts_of_the_file_have_no_place(plain: MappedFile) -> None:
    a = plain.tensors["a"]
    for other in (a.t(), a[:, :2], a.clone(), torch.ones(2), torch.empty(2, device="meta"), plain.tensors["none"]):
        assert plain.locate(other) is None
    assert plain.has(a[:, :2])
    assert not plain.has(a.clone())


def test_a_write_into_a_view_does_not_reach_the_file(plain: MappedFile) -> None:
    before = read(plain, plain.tensors["a"])
    plain.tensors["a"].zero_()
    assert torch.equal(read(plain, plain.tensors["a"]), before)


def test_a_read_only_mapping_warns_of_nothing(
    plain: MappedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(mapped_file, "COPIES_WRITES", False)
    again = MappedFile(tmp_path / "plain.safetensors")
    assert torch.equal(again.tensors["a"], plain.tensors["a"])
    assert not recwarn.list


@pytest.mark.skipif(sys.platform != "linux", reason="reads the size of the RAM, and needs sparse files")
def test_a_file_may_be_larger_than_the_memory(tmp_path: Path) -> None:
    nbytes = 4 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    header = json.dumps({"a": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + nbytes)
    large = MappedFile(path)
    assert large.tensors["a"].shape == (nbytes,)
    assert large.tensors["a"][-1] == 0


def test_a_view_of_a_packed_tensor_is_read_from_its_groups(
    packed: MappedFile, packed_values: dict[str, torch.Tensor]
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


def test_parts_of_groups_and_other_tensors_without_values_have_no_place(packed: MappedFile) -> None:
    q = packed.tensors["q"]
    for other in (q.view(-1)[16:48], q.view(-1)[:48], q[:, :32], q.t(), q.clone(), torch.empty(6, 64, device="meta")):
        assert packed.locate(other) is None
    assert packed.has(q[:, :32])
    assert not packed.has(q.clone())


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(CheckpointFileError, match=r"end in \.safetensors"):
        MappedFile(path)
