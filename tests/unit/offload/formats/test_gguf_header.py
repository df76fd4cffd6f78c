"""GGUF headers against the gguf package. Invalid headers all raise our own error."""

from __future__ import annotations

import os
import struct
import sys
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from wanstream.offload.formats.gguf_header import READABLE_TYPES, TYPES, read_gguf_header
from wanstream.offload.formats.packing import QUANT_FORMATS
from wanstream.offload.formats.safetensors_header import DTYPES, CheckpointFileError, read_header
from wanstream.offload.sources.file import read_tensors
from wanstream.testing.quantised import random_groups

F32, TEXT, LIST = 0, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def entry(name: str = "a", dims: tuple[int, ...] = (2,), kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file_bytes(
    *entries: bytes,
    fields: tuple[bytes, ...] = (),
    data: int = 64,
    start: bytes = b"GGUF\x03\x00\x00\x00",
    counts: tuple[int, int] | None = None,
) -> bytes:
    counts = counts or (len(entries), len(fields))
    header = start + struct.pack("<2Q", *counts) + b"".join(fields) + b"".join(entries)
    return header + bytes(-len(header) % 32 + data)


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> Path:
    """File with every readable type, every field type, and a 5D tensor with a shape field."""
    path, random = tmp_path_factory.mktemp("gguf") / "all.gguf", np.random.default_rng(0)
    writer = GGUFWriter(path, "wan")
    writer.add_string("note", "smörgås")
    writer.add_array("tokens", ["a", "bc", ""])
    writer.add_array("long", list(range(1000)))
    writer.add_bool("yes", True)
    for number, add in enumerate(
        (
            writer.add_uint8,
            writer.add_int8,
            writer.add_uint16,
            writer.add_int16,
            writer.add_uint32,
            writer.add_int32,
        )
    ):
        add(f"number {number}", 7)
    writer.add_uint64("large", 2**60)
    writer.add_int64("negative", -(2**60))
    writer.add_float32("half", 0.5)
    writer.add_float64("third", 1 / 3)
    for name, packing in QUANT_FORMATS.items():
        kind = GGMLQuantizationType[name]
        packs = random_groups(kind, 6 * 512 // packing.values, random)
        writer.add_tensor(name.lower(), packs.reshape(6, -1), raw_dtype=kind)
    values = random.standard_normal((3, 2, 1, 2, 2), dtype=np.float32)
    writer.add_tensor("f32", values)
    writer.add_tensor("f16", values[0].astype(np.float16))
    writer.add_tensor(
        "bf16",
        gguf.quants.quantize(values[0, 0], GGMLQuantizationType.BF16),
        raw_dtype=GGMLQuantizationType.BF16,
    )
    writer.add_tensor("reshaped", values.reshape(12, 2))
    writer.add_array("comfy.gguf.orig_shape.reshaped", values.shape)
    for dtype in (np.int8, np.int16, np.int32, np.int64, np.float64):
        writer.add_tensor(np.dtype(dtype).name, np.arange(5, dtype=dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_places_are_those_that_the_package_finds(everything):
    header, reader = read_gguf_header(everything), GGUFReader(everything)
    assert header.metadata == {"general.architecture": "wan", "note": "smörgås"}
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for theirs in reader.tensors:
        ours = header.tensors[theirs.name]
        assert (ours.path, ours.offset, ours.nbytes) == (
            everything,
            theirs.data_offset,
            theirs.n_bytes,
        )
        known = theirs.tensor_type.name
        assert TYPES[theirs.tensor_type.value] == known
        assert (ours.packing.name if ours.packing else ours.dtype) == DTYPES.get(known, known)
        if theirs.name != "reshaped":
            assert ours.shape == tuple(int(size) for size in reversed(theirs.shape))
    assert header.tensors["reshaped"].shape == (3, 2, 1, 2, 2)
    assert header.tensors["q4_k"].shape == (6, 512)
    assert header.tensors["q4_k"].packing.name == "Q4_K"


def test_bytes_are_those_that_were_written(everything):
    reader = {tensor.name: tensor for tensor in GGUFReader(everything).tensors}
    for name, tensor in read_tensors(read_gguf_header(everything).tensors).items():
        assert (
            bytes(tensor.reshape(-1).view(torch.uint8).tolist()) == reader[name].data.tobytes()
        ), name


@pytest.mark.parametrize("alignment", [1, 8, 32, 4096])
def test_alignment(tmp_path, alignment):
    writer = GGUFWriter(tmp_path / "x.gguf", "wan")
    if alignment >= 8:
        writer.add_custom_alignment(alignment)
    for name in "abc":
        writer.add_tensor(name, np.full(3, ord(name), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = read_tensors(read_gguf_header(tmp_path / "x.gguf").tensors)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        name: [ord(name)] * 3 for name in "abc"
    }


@pytest.mark.parametrize("version", [2, 3])
def test_versions(tmp_path, version):
    start = b"GGUF" + struct.pack("<I", version)
    path = written(tmp_path / "x.gguf", file_bytes(entry(), start=start))
    assert list(read_gguf_header(path).tensors) == ["a"]


def test_tensors_come_in_the_order_of_their_bytes(tmp_path):
    entries = [entry("z", offset=64), entry("a", offset=0), entry("m", offset=32)]
    path = written(tmp_path / "x.gguf", file_bytes(*entries, data=96))
    assert list(read_gguf_header(path).tensors) == ["a", "m", "z"]


def test_a_file_without_tensors_is_read(tmp_path):
    header = read_gguf_header(
        written(tmp_path / "x.gguf", file_bytes(fields=(field("n", TEXT, text("t")),)))
    )
    assert (dict(header.tensors), dict(header.metadata)) == ({}, {"n": "t"})


Q4_K = 12
READABLE = (
    "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS"
)
SHAPE = "comfy.gguf.orig_shape.a"
NUMBERS = struct.pack("<IQ", 5, 2) + struct.pack("<2i", 2, 1)

BAD_FILES = {
    "empty": (b"", "is empty: download it again"),
    "short": (b"GGUF\x03", "is not a GGUF file: has 5 bytes"),
    "html": (
        b"<!DOCTYPE html><html>",
        "is not the model but a web page; the download probably needs a login",
    ),
    "git-lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\n",
        "is not the model but a git-lfs pointer",
    ),
    "zip": (b"PK\x03\x04\x00\x00\x08\x08" + bytes(100), "PyTorch pickle"),
    "pickle": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "PyTorch pickle"),
    "safetensors": (
        struct.pack("<Q", 2) + b"{}",
        "not a GGUF file but safetensors: let its name end in .safetensors",
    ),
    "big-endian": (file_bytes(entry(), start=b"GGUF\x00\x00\x00\x03"), "is a big-endian GGUF file"),
    "version 1": (
        file_bytes(entry(), start=b"GGUF\x01\x00\x00\x00"),
        "version 1; versions 2 and 3 can be read",
    ),
    "version 4": (
        file_bytes(entry(), start=b"GGUF\x04\x00\x00\x00"),
        "version 4; versions 2 and 3 can be read",
    ),
    "no counts": (
        b"GGUF\x03\x00\x00\x00\x01",
        "truncated or damaged: its header does not end within its 9 bytes",
    ),
    "more tensors": (file_bytes(entry(), counts=(2**60, 0)), "truncated or damaged|damaged GGUF"),
    "more fields": (file_bytes(entry(), counts=(1, 2**60)), "truncated or damaged|damaged GGUF"),
    "long name": (file_bytes(struct.pack("<Q", 2**62)), "truncated or damaged"),
    "no UTF-8": (
        file_bytes(struct.pack("<Q", 2) + b"\xff\xfe" + bytes(40)),
        "a name or text that is not UTF-8",
    ),
    "unknown field": (
        file_bytes(entry(), fields=(field("n", 77, b""),)),
        "a field 'n' of the unknown type 77",
    ),
    "list of lists": (
        file_bytes(entry(), fields=(field("n", LIST, struct.pack("<IQ", LIST, 1)),)),
        "a field 'n' of the unknown type 9",
    ),
    "long list": (
        file_bytes(entry(), fields=(field("n", LIST, struct.pack("<IQ", 0, 2**63)),)),
        "truncated",
    ),
    "long list of texts": (
        file_bytes(entry(), fields=(field("n", LIST, struct.pack("<IQ", TEXT, 2**63)),)),
        "truncated or damaged",
    ),
    "field twice": (
        file_bytes(entry(), fields=(field("n", 0, b"1"), field("n", 0, b"2"))),
        "'n' twice",
    ),
    "tensor twice": (file_bytes(entry(), entry()), "'a' twice"),
    "endless name": (file_bytes(entry(name="a" * 65536)), "a name of 65536 characters"),
    "dimensions": (file_bytes(entry(dims=(1,) * 9)), "a tensor 'a' of 9 dimensions"),
    "overlap": (
        file_bytes(entry("a", (16,)), entry("b", offset=32)),
        "overlapping tensors 'a' and 'b'",
    ),
    "offset": (file_bytes(entry(offset=4)), "a tensor 'a' at byte 4, not a multiple of 32"),
    "data cut off": (
        file_bytes(entry(dims=(17,))),
        r"is truncated: has 128 of 132 bytes; download it again",
    ),
    "far away": (file_bytes(entry(offset=2**62)), "is truncated: has"),
    "too large": (file_bytes(entry(dims=(2**32, 2**32, 2**32))), "is truncated: has"),
    "broken rows": (
        file_bytes(entry(dims=(128, 2), kind=Q4_K)),
        r"'a' \[2, 128\] in Q4_K, whose groups have 256 values",
    ),
    "packed scalar": (
        file_bytes(entry(dims=(), kind=Q4_K)),
        r"'a' \[\] in Q4_K, whose groups have 256 values",
    ),
    "alignment 0": (
        file_bytes(entry(), fields=(field("general.alignment", 4, bytes(4)),)),
        "general.alignment 0;",
    ),
    "alignment 3": (
        file_bytes(entry(), fields=(field("general.alignment", 4, b"\3\0\0\0"),)),
        "general.alignment 3;",
    ),
    "alignment text": (
        file_bytes(entry(), fields=(field("general.alignment", TEXT, text("x")),)),
        "alignment 'x'",
    ),
    "alignment bool": (
        file_bytes(entry(), fields=(field("general.alignment", 7, b"\1"),)),
        "alignment True",
    ),
    "shape": (
        file_bytes(entry(dims=(3,)), fields=(field(SHAPE, LIST, NUMBERS),)),
        r"the shape \[2, 1\] for tensor 'a'",
    ),
    "shape text": (
        file_bytes(entry(), fields=(field(SHAPE, TEXT, text("2, 1")),)),
        "the shape '2, 1' for tensor 'a'",
    ),
    "shape negative": (
        file_bytes(entry(), fields=(field(SHAPE, LIST, struct.pack("<IQ2i", 5, 2, -2, -1)),)),
        r"the shape \(-2, -1\)",
    ),
    "shape fractions": (
        file_bytes(entry(), fields=(field(SHAPE, LIST, struct.pack("<IQ2f", 6, 2, 2.0, 1.0)),)),
        r"the shape \(2.0, 1.0\)",
    ),
    "type IQ2_XXS": (
        file_bytes(entry(dims=(256,), kind=16)),
        f"a is stored as IQ2_XXS, .* use a file of {READABLE}",
    ),
    "type TQ1_0": (
        file_bytes(entry(dims=(256,), kind=34)),
        "a is stored as TQ1_0, which is not supported",
    ),
    "type MXFP4": (
        file_bytes(entry(dims=(256,), kind=39)),
        "a is stored as MXFP4, which is not supported",
    ),
    "type Q8_1": (
        file_bytes(entry(dims=(256,), kind=9)),
        "a is stored as Q8_1, which is not supported",
    ),
    "type 4": (
        file_bytes(entry(dims=(256,), kind=4)),
        "a is stored as type 4 of ggml, which is not supported",
    ),
    "type 9999": (file_bytes(entry(dims=(256,), kind=9999)), "a is stored as type 9999 of ggml"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_by_name_and_reason(tmp_path, case):
    content, reason = BAD_FILES[case]
    path = written(tmp_path / "bad.gguf", content)
    with pytest.raises(CheckpointFileError, match=reason) as refusal:
        read_gguf_header(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert refusal.value.path == path


@pytest.mark.parametrize("kind", GGMLQuantizationType, ids=lambda kind: kind.name)
def test_every_type_of_ggml_is_known_by_its_name(tmp_path, kind):
    """A later gguf version may have more types than the installed one."""
    path = written(tmp_path / "x.gguf", file_bytes(entry(dims=(256,), kind=kind.value), data=4096))
    if kind.name in DTYPES:
        assert read_gguf_header(path).tensors["a"].packing is None
    elif kind.name in READABLE_TYPES:
        assert read_gguf_header(path).tensors["a"].packing.name == kind.name
    else:
        with pytest.raises(CheckpointFileError, match=f"a is stored as {kind.name},"):
            read_gguf_header(path)


def test_missing_files_and_folders_are_refused(tmp_path):
    with pytest.raises(CheckpointFileError, match=r"gone\.gguf: cannot be read: No such file"):
        read_gguf_header(tmp_path / "gone.gguf")
    with pytest.raises(CheckpointFileError, match="cannot be read"):
        read_gguf_header(tmp_path)


def test_a_gguf_file_under_another_name_is_told_so(tmp_path):
    with pytest.raises(
        CheckpointFileError, match=r"not a safetensors file but GGUF: let its name end in \.gguf"
    ):
        read_header(written(tmp_path / "x.safetensors", file_bytes(entry())))


def test_a_header_without_end_is_refused_before_it_fills_the_memory(tmp_path):
    path = written(
        tmp_path / "x.gguf",
        file_bytes(entry(), fields=(field("n", TEXT, struct.pack("<Q", 2**30)),)),
    )
    os.truncate(path, 2**31)  # a sparse file
    with pytest.raises(CheckpointFileError, match="a header of more than 100000000 bytes"):
        read_gguf_header(path)


@pytest.mark.skipif(sys.platform != "linux", reason="counts with /proc")
def test_only_the_header_is_read(tmp_path):
    path = written(tmp_path / "large.gguf", file_bytes(entry(dims=(2**32,))))
    os.truncate(path, 2**34 + 1024)  # a sparse file: no disk is used

    def bytes_read() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["rchar"])

    before = bytes_read()
    assert read_gguf_header(path).tensors["a"].nbytes == 2**34
    assert bytes_read() - before < 64 * 1024


SOUND = file_bytes(
    entry("first", (256, 2), Q4_K),
    entry("second", (16,), offset=288),
    fields=(
        field("general.architecture", TEXT, text("wan")),
        field("comfy.gguf.orig_shape.second", LIST, struct.pack("<IQ2i", 5, 2, 4, 4)),
        field("tokens", LIST, struct.pack("<IQ", TEXT, 2) + text("a") + text("b")),
        field("flag", 7, b"\1"),
    ),
    data=352,
)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    flips=st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(1, 255)), max_size=4),
    length=st.integers(0, len(SOUND)) | st.just(len(SOUND)),
)
@example(flips=[], length=len(SOUND))
@example(flips=[(192, 32)], length=640)
def test_damage_of_any_kind_is_refused_or_harmless(tmp_path, flips, length):
    """No other error, no endless loop. Accepted tensors lie inside the file."""
    content = bytearray(SOUND)
    for place, bits in flips:
        content[place] ^= bits
    path = written(tmp_path / "x.gguf", bytes(content[:length]))
    try:
        header = read_gguf_header(path)
    except CheckpointFileError:
        assert flips or length < len(SOUND)
        return
    for tensor in header.tensors.values():
        assert tensor.offset + tensor.nbytes <= length
    assert len(read_tensors(header.tensors)) == len(header.tensors)


@pytest.mark.parametrize("bit", range(8))
def test_every_single_bit_of_the_header(tmp_path, bit):
    for place in range(len(SOUND) - 352):
        content = bytearray(SOUND)
        content[place] ^= 1 << bit
        path = written(tmp_path / "x.gguf", bytes(content))
        with suppress(CheckpointFileError):
            read_gguf_header(path)
