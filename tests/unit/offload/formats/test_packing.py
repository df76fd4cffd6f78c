"""GGUF tensors in layouts and sources, next to plain and scaled ones.

They are decoded whole and in chunks.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from wanstream.offload.formats import chunk_size
from wanstream.offload.formats.decode import decode_block, decode_tensor
from wanstream.offload.formats.gguf_header import read_gguf_header
from wanstream.offload.formats.layout import allocate_flat, block_format, tensor_views
from wanstream.offload.formats.packing import QUANT_FORMATS
from wanstream.offload.sources.base import SourceError
from wanstream.offload.sources.file import FileSource, read_tensors
from wanstream.plan.programs import BlockKey
from wanstream.testing.quantised import random_groups

COMPUTED = [torch.float32, torch.float16, torch.bfloat16]
ROWS, COLUMNS = 33, 512
KEYS = [BlockKey("high", 0), BlockKey("low", 0)]


def packs_of(name: str, *, rows: int = ROWS, seed: int = 0, scale: float = 0.01) -> torch.Tensor:
    """Return groups [n, bytes] for a matrix with 512 values per row."""
    packing = QUANT_FORMATS[name]
    random = np.random.default_rng(seed)
    return torch.from_numpy(
        random_groups(
            GGMLQuantizationType[name], rows * COLUMNS // packing.values, random, scale=scale
        )
    )


def reference(name: str, groups: torch.Tensor) -> torch.Tensor:
    """Dequantise to fp32 [rows, 512] with the gguf package."""
    values = gguf.quants.dequantize(groups.numpy(), GGMLQuantizationType[name])
    return torch.from_numpy(values).reshape(-1, COLUMNS)


def packed_format(name: str, rows: int, computed: torch.dtype):
    return block_format(
        {"a": ((rows, COLUMNS), torch.uint8)}, computed, packings={"a": QUANT_FORMATS[name]}
    )


def decoded(name: str, groups: torch.Tensor, computed: torch.dtype) -> torch.Tensor:
    rows = groups.shape[0] * QUANT_FORMATS[name].values // COLUMNS
    both = packed_format(name, rows, computed)
    raw, into = allocate_flat(both.stored.nbytes, "cpu"), allocate_flat(both.computed.nbytes, "cpu")
    tensor_views(raw, both.stored)["a"].copy_(groups)
    decode_block(raw, into, both, {})
    return tensor_views(into, both.computed)["a"]


class TestLayouts:
    @pytest.mark.parametrize("name", QUANT_FORMATS)
    def test_bytes_are_packs_and_shapes_are_values(self, name):
        both = packed_format(name, 6, torch.bfloat16)
        packing, (stored,), (computed,) = (
            QUANT_FORMATS[name],
            both.stored.tensors,
            both.computed.tensors,
        )
        groups = 6 * COLUMNS // packing.values
        assert (stored.shape, stored.nbytes) == ((6, COLUMNS), groups * packing.nbytes)
        assert (computed.shape, computed.nbytes, computed.packing) == (
            (6, COLUMNS),
            6 * COLUMNS * 2,
            None,
        )
        assert tensor_views(allocate_flat(both.stored.nbytes, "cpu"), both.stored)["a"].shape == (
            groups,
            packing.nbytes,
        )
        assert not both.is_raw

    def test_bytes_of_a_block_of_wan(self):
        """Ten matrices in one A14B block, all in the same format."""
        matrices = [(5120, 5120)] * 8 + [(13824, 5120), (5120, 13824)]
        sizes = {
            name: sum(packing.bytes_of(shape) for shape in matrices)
            for name, packing in QUANT_FORMATS.items()
        }
        assert {
            name: round(sizes[name] / 1e6, 1) for name in ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K")
        } == {
            "Q8_0": 373.2, "Q6_K": 288.2, "Q5_K": 241.5, "Q4_K": 197.6, "Q3_K": 150.9,
        }  # fmt: skip

    def test_half_a_pack_is_a_bug(self):
        with pytest.raises(AssertionError, match="not a whole number of Q4_K groups of 256"):
            block_format(
                {"a": ((3, 128), torch.uint8)}, torch.float32, packings={"a": QUANT_FORMATS["Q4_K"]}
            )

    def test_a_packed_tensor_has_no_scale(self):
        with pytest.raises(AssertionError, match="of a quantised one"):
            block_format(
                {"a": ((2, 256), torch.uint8)}, torch.float32, ["a"], {"a": QUANT_FORMATS["Q4_K"]}
            )


class TestDecoding:
    @pytest.mark.parametrize("computed", COMPUTED, ids=str)
    @pytest.mark.parametrize("name", QUANT_FORMATS)
    def test_equals_the_package_in_fp32_and_its_cast_in_others(self, name, computed):
        groups = packs_of(name)
        values = decoded(name, groups, computed)
        assert values.shape == (ROWS, COLUMNS)
        assert torch.equal(
            values.view(torch.uint8), reference(name, groups).to(computed).view(torch.uint8)
        )

    @pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("chunk", [1, 255, 256, 300, 5000, ROWS * COLUMNS - 1, ROWS * COLUMNS])
    @pytest.mark.parametrize("name", ["Q5_K", "IQ4_NL"])
    def test_the_size_of_a_chunk_changes_no_bit(self, monkeypatch, name, chunk, computed):
        groups = packs_of(name)
        monkeypatch.setattr(chunk_size, "CHUNK_VALUES", chunk)
        assert torch.equal(decoded(name, groups, computed), reference(name, groups).to(computed))

    @pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("name", QUANT_FORMATS)
    def test_extra_memory_does_not_grow_with_the_matrix(self, name, computed):
        def largest_temporary(rows: int) -> int:
            both = packed_format(name, rows, computed)
            raw = allocate_flat(both.stored.nbytes, "cpu").zero_()
            into = allocate_flat(both.computed.nbytes, "cpu")
            activities = [torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
                decode_block(raw, into, both, {})
            return max(event.cpu_memory_usage for event in profile.events())

        assert largest_temporary(4096) <= largest_temporary(3 * 4096) <= 4 * chunk_size.CHUNK_VALUES

    def test_all_formats_in_one_block(self):
        names = {f"{name}.weight": QUANT_FORMATS[name] for name in QUANT_FORMATS}
        stored = dict.fromkeys(names, ((ROWS, COLUMNS), torch.uint8))
        stored |= {"plain": ((7, 5), torch.float16), "scaled": ((4, 6), torch.float8_e5m2)}
        both = block_format(stored, torch.bfloat16, scaled=["scaled"], packings=names)
        raw, into = (
            allocate_flat(both.stored.nbytes, "cpu"),
            allocate_flat(both.computed.nbytes, "cpu"),
        )
        views = tensor_views(raw, both.stored)
        for number, (name, packing) in enumerate(names.items()):
            views[name].copy_(packs_of(packing.name, seed=number))
        views["plain"].copy_(torch.randn(7, 5))
        views["scaled"].copy_(torch.randn(4, 6))
        decode_block(raw, into, both, {"scaled": torch.tensor(0.25)})
        result = tensor_views(into, both.computed)
        for number, (name, packing) in enumerate(names.items()):
            expected = reference(packing.name, packs_of(packing.name, seed=number)).bfloat16()
            assert torch.equal(result[name], expected), name
        assert torch.equal(result["plain"], views["plain"].bfloat16())
        assert torch.equal(result["scaled"], (views["scaled"].float() * 0.25).bfloat16())

    def test_a_tensor_of_any_shape(self):
        into = torch.empty(3, 11, 2, 256, dtype=torch.bfloat16)
        groups = packs_of("Q6_K")
        decode_tensor(groups, into, packing=QUANT_FORMATS["Q6_K"])
        assert torch.equal(into.view(ROWS, COLUMNS), reference("Q6_K", groups).bfloat16())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two blocks with three matrices in three formats, and one plain matrix each."""
    writer = GGUFWriter(tmp_path / "x.gguf", "wan")
    for seed, key in enumerate(KEYS):
        for name in ("Q4_K", "Q8_0", "Q6_K"):
            rows = packs_of(name, seed=seed).reshape(ROWS, -1).numpy()
            writer.add_tensor(f"{key.expert}.{name}", rows, raw_dtype=GGMLQuantizationType[name])
        writer.add_tensor(f"{key.expert}.F32", np.full((3, 5), seed, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "x.gguf"


def blocks_of(path: Path):
    tensors = read_gguf_header(path).tensors
    return {
        key: {name: tensors[f"{key.expert}.{name}"] for name in ("Q6_K", "F32", "Q4_K", "Q8_0")}
        for key in KEYS
    }


class TestSources:
    @pytest.mark.parametrize("portable", [False, True])
    def test_blocks_arrive_packed_and_are_decoded(self, path, portable):
        source = FileSource(blocks_of(path), computed_dtypes=torch.bfloat16, portable=portable)
        for seed, key in enumerate(KEYS):
            both = source.formats[key]
            flat, into = (
                allocate_flat(both.stored.nbytes, "cpu"),
                allocate_flat(both.computed.nbytes, "cpu"),
            )
            source.read_block(key, flat)
            decode_block(flat, into, both, source.scales(key))
            views = tensor_views(into, both.computed)
            assert list(views) == ["Q6_K", "F32", "Q4_K", "Q8_0"]
            for name in ("Q6_K", "Q4_K", "Q8_0"):
                assert torch.equal(
                    views[name], reference(name, packs_of(name, seed=seed)).bfloat16()
                )
            assert torch.equal(views["F32"], torch.full((3, 5), seed, dtype=torch.bfloat16))
        source.close()

    def test_the_bytes_of_a_block_are_those_in_the_file(self, path):
        source = FileSource(blocks_of(path), computed_dtypes=torch.bfloat16)
        packed = [
            QUANT_FORMATS[name].bytes_of((ROWS, COLUMNS)) for name in ("Q6_K", "Q4_K", "Q8_0")
        ]
        stored = source.formats[KEYS[0]].stored
        assert sum(tensor.nbytes for tensor in stored.tensors) == sum(packed) + 3 * 5 * 4
        source.close()

    def test_tensors_are_read_as_packs(self, path):
        tensors = read_tensors(read_gguf_header(path).tensors)
        for name in ("Q6_K", "Q4_K", "Q8_0"):
            assert torch.equal(tensors[f"high.{name}"], packs_of(name, seed=0))

    def test_rows_of_a_packed_tensor(self, path):
        table = read_gguf_header(path).tensors["high.Q4_K"]
        part = read_tensors({"part": table.rows(5, 8)})["part"]
        assert table.rows(5, 8).shape == (3, COLUMNS)
        assert torch.equal(part, packs_of("Q4_K", seed=0)[5 * 2 : 8 * 2])

    def test_a_file_that_changed_is_not_read(self, path):
        source = FileSource(blocks_of(path), computed_dtypes=torch.bfloat16)
        flat = allocate_flat(source.formats[KEYS[0]].stored.nbytes, "cpu")
        path.write_bytes(path.read_bytes() + bytes(32))
        with pytest.raises(SourceError, match="the file was changed after it was opened"):
            source.read_block(KEYS[0], flat)
        source.close()
