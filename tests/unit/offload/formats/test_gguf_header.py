"""GGUF headers against the gguf package. Invalid headers all raise our own error."""

from __future__ import annotations

import os
import struct
import sys
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import psutil
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
from wanstream.tests.support.offload.edited_files import close_gguf

F32 = 0
Q4_K = 12
FLAG = 7
TEXT = 8
LIST = 9
START = b"GGUF\x03\x00\x00\x00"


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def listed(kind: int, count: int, *numbers: float) -> bytes:
    """Return a list's value, with int32 or fp32 numbers."""
    form = "f" if kind == 6 else "i"
    return struct.pack(f"<IQ{len(numbers)}{form}", kind, count, *numbers)


def entry(name: str = "a", dims: tuple[int, ...] = (2,), kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def whole(*entries, fields=(), data=64, start=START, counts=None) -> bytes:
    """Return a file's bytes, with entry `a` of two numbers by default."""
    entries = entries or (entry(),)
    counts = counts or (len(entries), len(fields))
    header = start + struct.pack("<2Q", *counts) + b"".join(fields) + b"".join(entries)
    return header + bytes(-len(header) % 32 + data)


def with_field(name: str, kind: int, value: bytes) -> bytes:
    return whole(fields=(field(name, kind, value),))


def typed(kind: int, *dims: int) -> bytes:
    return whole(entry(dims=dims, kind=kind), data=4096)


@pytest.fixture
def write(tmp_path):
    """Write a file's bytes, and return the path."""

    def write(content: bytes) -> Path:
        (tmp_path / "x.gguf").write_bytes(content)
        return tmp_path / "x.gguf"

    return write


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> Path:
    """File with every readable type, every field type, and a 5D tensor with a shape field."""
    path = tmp_path_factory.mktemp("gguf") / "all.gguf"
    random = np.random.default_rng(0)
    writer = GGUFWriter(path, "wan")
    writer.add_string("note", "smörgås")
    writer.add_array("tokens", ["a", "bc", ""])
    writer.add_array("long", list(range(1000)))
    writer.add_bool("yes", True)
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(kind, 7)
    writer.add_float32("half", 0.5)
    writer.add_float64("third", 1 / 3)
    for name, packing in QUANT_FORMATS.items():
        kind = GGMLQuantizationType[name]
        packs = random_groups(kind, 6 * 512 // packing.values, random)
        writer.add_tensor(name.lower(), packs.reshape(6, -1), raw_dtype=kind)
    values = random.standard_normal((3, 2, 1, 2, 2), dtype=np.float32)
    writer.add_tensor("f32", values)
    writer.add_tensor("f16", values[0].astype(np.float16))
    bf16 = GGMLQuantizationType.BF16
    writer.add_tensor("bf16", gguf.quants.quantize(values[0, 0], bf16), raw_dtype=bf16)
    writer.add_tensor("reshaped", values.reshape(12, 2))
    writer.add_array("comfy.gguf.orig_shape.reshaped", values.shape)
    for dtype in (np.int8, np.int16, np.int32, np.int64, np.float64):
        writer.add_tensor(np.dtype(dtype).name, np.arange(5, dtype=dtype))
    close_gguf(writer)
    return path


def test_places_and_bytes_are_those_of_the_package(everything):
    header = read_gguf_header(everything)
    reader = GGUFReader(everything)
    assert header.metadata == {"general.architecture": "wan", "note": "smörgås"}
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    read = read_tensors(header.tensors)
    for theirs in reader.tensors:
        ours = header.tensors[theirs.name]
        place = (everything, theirs.data_offset, theirs.n_bytes)
        assert (ours.path, ours.offset, ours.nbytes) == place
        known = theirs.tensor_type.name
        assert TYPES[theirs.tensor_type.value] == known
        assert (ours.packing.name if ours.packing else ours.dtype) == DTYPES.get(known, known)
        if theirs.name != "reshaped":
            assert ours.shape == tuple(int(size) for size in reversed(theirs.shape))
        stored = bytes(read[theirs.name].reshape(-1).view(torch.uint8).tolist())
        assert stored == theirs.data.tobytes(), theirs.name
    assert header.tensors["reshaped"].shape == (3, 2, 1, 2, 2)
    packed = header.tensors["q4_k"]
    assert packed.shape == (6, 512)
    assert packed.rows(2, 5).shape == (3, 512)
    rows = read_tensors({"rows": packed.rows(2, 5)})["rows"]
    assert torch.equal(rows, read["q4_k"][2 * 2 : 5 * 2]), "two groups per row"


@pytest.mark.parametrize("alignment", [1, 8, 32, 4096])
def test_alignment(tmp_path, alignment):
    writer = GGUFWriter(tmp_path / "x.gguf", "wan")
    if alignment >= 8:
        writer.add_custom_alignment(alignment)
    for name in "abc":
        writer.add_tensor(name, np.full(3, ord(name), dtype=np.float32))
    close_gguf(writer)
    tensors = read_tensors(read_gguf_header(tmp_path / "x.gguf").tensors)
    values = {name: tensor.tolist() for name, tensor in tensors.items()}
    assert values == {name: [ord(name)] * 3 for name in "abc"}


def test_order_version_2_and_files_without_tensors(write):
    entries = [entry("z", offset=64), entry("a", offset=0), entry("m", offset=32)]
    header = read_gguf_header(write(whole(*entries, data=96)))
    assert list(header.tensors) == ["a", "m", "z"], "in the order of their bytes"
    assert list(read_gguf_header(write(whole(start=b"GGUF\x02\x00\x00\x00"))).tensors) == ["a"]
    header = read_gguf_header(write(START + struct.pack("<2Q", 0, 1) + field("n", TEXT, text("t"))))
    assert (dict(header.tensors), dict(header.metadata)) == ({}, {"n": "t"})


READABLE = ", ".join(READABLE_TYPES)
SHAPE = "comfy.gguf.orig_shape.a"
ALIGNMENT = "general.alignment"
UNENDED = "is truncated or damaged: its header does not end within its"
VERSIONS = "; versions 2 and 3 can be read"

BAD_FILES = {
    "empty": (b"", "is empty: download it again"),
    "short": (b"GGUF\x03", "is not a GGUF file: has 5 bytes"),
    "html": (b"<!DOCTYPE html><html>", "is not the model but a web page; the download probably"),
    "safetensors": (b"\x02" + bytes(7) + b"{}", r"but safetensors: let its name end in \.safeten"),
    "big-endian": (whole(start=b"GGUF\x00\x00\x00\x03"), "is a big-endian GGUF file"),
    "version 1": (whole(start=b"GGUF\x01\x00\x00\x00"), f"version 1{VERSIONS}"),
    "more tensors": (whole(counts=(2**60, 0)), f"{UNENDED}|damaged GGUF"),
    "more fields": (whole(counts=(1, 2**60)), f"{UNENDED}|damaged GGUF"),
    "long name": (whole(struct.pack("<Q", 2**62)), UNENDED),
    "no UTF-8": (whole(struct.pack("<Q", 2) + b"\xff\xfe" + bytes(40)), "text that is not UTF-8"),
    "unknown field": (with_field("n", 77, b""), "a field 'n' of the unknown type 77"),
    "long list": (with_field("n", LIST, listed(0, 2**63 - 1)), "truncated"),
    "long list of texts": (with_field("n", LIST, listed(TEXT, 2**63 - 1)), UNENDED),
    "field twice": (whole(fields=(field("n", 0, b"1"), field("n", 0, b"2"))), "'n' twice"),
    "tensor twice": (whole(entry(), entry()), "'a' twice"),
    "endless name": (whole(entry(name="a" * 65536)), "a name of 65536 characters"),
    "dimensions": (whole(entry(dims=(1,) * 9)), "a tensor 'a' of 9 dimensions"),
    "overlap": (whole(entry("a", (16,)), entry("b", offset=32)), "overlapping tensors 'a' and 'b'"),
    "offset": (whole(entry(offset=4)), "a tensor 'a' at byte 4, not a multiple of 32"),
    "data cut off": (whole(entry(dims=(17,))), r"truncated: has 128 of 132 bytes; download it ag"),
    "broken rows": (typed(Q4_K, 128, 2), r"'a' \[2, 128\] in Q4_K, whose groups have 256 values"),
    "alignment 0": (with_field(ALIGNMENT, 4, bytes(4)), "general.alignment 0;"),
    "alignment text": (with_field(ALIGNMENT, TEXT, text("x")), "alignment 'x'"),
    "shape": (
        whole(entry(dims=(3,)), fields=(field(SHAPE, LIST, listed(5, 2, 2, 1)),)),
        r"the shape \[2, 1\] for tensor 'a'",
    ),
    "shape negative": (with_field(SHAPE, LIST, listed(5, 2, -2, -1)), r"the shape \(-2, -1\)"),
    "type IQ2_XXS": (typed(16, 256), f"a is stored as IQ2_XXS, .* use a file of {READABLE}"),
    "type 4": (typed(4, 256), "a is stored as type 4 of ggml, which is not supported"),
    "type 9999": (typed(9999, 256), "a is stored as type 9999 of ggml"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_by_name_and_reason(write, case):
    content, reason = BAD_FILES[case]
    path = write(content)
    with pytest.raises(CheckpointFileError, match=reason) as refusal:
        read_gguf_header(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert refusal.value.path == path


@pytest.mark.parametrize("kind", GGMLQuantizationType, ids=lambda kind: kind.name)
def test_every_type_of_ggml_is_known_by_its_name(write, kind):
    """A later gguf version may have more types than the installed one."""
    path = write(typed(kind.value, 256))
    if kind.name in DTYPES:
        assert read_gguf_header(path).tensors["a"].packing is None
    elif kind.name in READABLE_TYPES:
        assert read_gguf_header(path).tensors["a"].packing.name == kind.name
    else:
        with pytest.raises(CheckpointFileError, match=f"a is stored as {kind.name}, which is not"):
            read_gguf_header(path)


def test_missing_files_folders_and_other_names_are_refused(write, tmp_path):
    with pytest.raises(CheckpointFileError, match=r"gone\.gguf: cannot be read: No such file"):
        read_gguf_header(tmp_path / "gone.gguf")
    with pytest.raises(CheckpointFileError, match="cannot be read"):
        read_gguf_header(tmp_path)
    words = r"not a safetensors file but GGUF: let its name end in \.gguf"
    with pytest.raises(CheckpointFileError, match=words):
        read_header(write(whole()).rename(tmp_path / "x.safetensors"))


def test_endless_header_is_refused(write):
    path = write(with_field("n", TEXT, struct.pack("<Q", 2**30)))
    os.truncate(path, 2**31)  # a sparse file
    with pytest.raises(CheckpointFileError, match="a header of more than 100000000 bytes"):
        read_gguf_header(path)


@pytest.mark.skipif(sys.platform != "linux", reason="counts with /proc")
def test_only_the_header_is_read(write):
    path = write(whole(entry(dims=(2**32,))))
    os.truncate(path, 2**34 + 1024)  # a sparse file: no disk is used

    counters = psutil.Process().io_counters
    before = counters().read_chars
    assert read_gguf_header(path).tensors["a"].nbytes == 2**34
    assert counters().read_chars - before < 64 * 1024


SOUND = whole(
    entry("first", (256, 2), Q4_K),
    entry("second", (16,), offset=288),
    fields=(
        field("general.architecture", TEXT, text("wan")),
        field("comfy.gguf.orig_shape.second", LIST, listed(5, 2, 4, 4)),
        field("tokens", LIST, listed(TEXT, 2) + text("a") + text("b")),
        field("flag", FLAG, b"\1"),
    ),
    data=352,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(1, 255)), max_size=4),
    length=st.integers(0, len(SOUND)) | st.just(len(SOUND)),
)
@example(flips=[], length=len(SOUND))
@example(flips=[(192, 32)], length=640)
def test_damage_of_any_kind_is_refused_or_harmless(write, flips, length):
    """No other error, no endless loop. Accepted tensors lie inside the file."""
    content = bytearray(SOUND)
    for place, bits in flips:
        content[place] ^= bits
    try:
        header = read_gguf_header(write(bytes(content[:length])))
    except CheckpointFileError:
        assert flips or length < len(SOUND)
        return
    for tensor in header.tensors.values():
        assert tensor.offset + tensor.nbytes <= length
    assert len(read_tensors(header.tensors)) == len(header.tensors)


def test_every_byte_of_the_header(write):
    for place in range(len(SOUND) - 352):
        content = bytearray(SOUND)
        content[place] ^= 1 << place % 8
        with suppress(CheckpointFileError):
            read_gguf_header(write(bytes(content)))
