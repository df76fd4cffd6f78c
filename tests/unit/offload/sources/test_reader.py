"""Reads of many pieces on each route, on failing and refusing files, with memory and threads."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from wanstream.offload.sources import reader as reader_module
from wanstream.offload.sources.base import SourceError
from wanstream.offload.sources.read_plan import ALIGNMENT, EXTENT_BYTES, O_DIRECT, ReadPiece
from wanstream.offload.sources.reader import (
    HAS_DIRECT,
    HAS_PREADV,
    FileReader,
    OpenFiles,
    lies_in_ram,
)

CONTENT = os.urandom(100_000)
LARGE = os.urandom(3 * EXTENT_BYTES + 12_345)
ROUTES = {"preadv": {}, "seek": {"portable": True}, "direct": {"direct": True}}
READ_FAILED = r"\.bin: reading a, b at byte \d+ failed: "

Read = tuple[ReadPiece, memoryview]


def buffer(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def piece(path: Path, offset: int, nbytes: int, target: int = 0) -> ReadPiece:
    return ReadPiece(path=path, offset=offset, nbytes=nbytes, target=target, names=("a", "b"))


def whole_of(path: Path, memory: memoryview, size: int = 1_000_003) -> list[Read]:
    nbytes = len(memory)
    return [(piece(path, at, min(size, nbytes - at), at), memory) for at in range(0, nbytes, size)]


@pytest.fixture
def path(tmp_path) -> Path:
    (tmp_path / "content.bin").write_bytes(CONTENT)
    return tmp_path / "content.bin"


@pytest.fixture
def large(tmp_path) -> Path:
    (tmp_path / "large.bin").write_bytes(LARGE)
    return tmp_path / "large.bin"


@pytest.fixture(params=ROUTES)
def route(request) -> str:
    if request.param == "preadv" and not HAS_PREADV:
        pytest.skip("this system has no preadv")
    if request.param == "direct" and not HAS_DIRECT:
        pytest.skip("this system has no O_DIRECT")
    return request.param


@pytest.fixture
def reader(route) -> Iterator[FileReader]:
    reader = FileReader(readers={"preadv": 4, "seek": 2, "direct": 0}[route], **ROUTES[route])
    yield reader
    reader.close()


class Layer:
    """OpenFiles whose reads from number `at` on fail, or whose read `at` has `short` bytes."""

    def __init__(self, inner, *, at=None, error=None, short=0) -> None:
        self.inner = inner
        self.at = at
        self.error = error
        self.short = short
        self.requests: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self.version = inner.version
        self.close = inner.close

    def read_at(self, path: Path, position: int, into: memoryview) -> int:
        with self._lock:
            number = len(self.requests)
            self.requests.append((position, len(into)))
        if self.error is not None and self.at is not None and number >= self.at:
            raise OSError(self.error, os.strerror(self.error))
        count = self.inner.read_at(path, position, into)
        return min(count, self.short) if number == self.at else count


@pytest.fixture
def layered() -> Iterator:
    """Make a reader over a layer, and return both."""
    readers: list[FileReader] = []

    def make(route: str, *, readers_count: int = 2, **how: int) -> tuple[FileReader, Layer]:
        inner = OpenFiles(O_DIRECT if route == "direct" else 0, positional=route != "seek")
        layer = Layer(inner, **how)
        reader = FileReader(readers=readers_count, **ROUTES[route])
        setattr(reader, "direct_files" if route == "direct" else "files", layer)
        readers.append(reader)
        return reader, layer

    yield make
    for reader in readers:
        reader.close()


def test_many_pieces_arrive_in_their_places(reader, path):
    size = 24
    count = 4000
    other = path.with_name("other.bin")
    other.write_bytes(CONTENT[::-1])
    memory = buffer(size * count)
    second = buffer(10)
    pieces = [piece(path, size * (count - 1 - at), size, size * at) for at in range(count)]
    reads = [(each, memory) for each in pieces]
    for _ in range(3):
        memory[:] = bytes(size * count)
        reader.read([*reads, (piece(other, 5, 10), second), (piece(other, 0, 0), memory)])
        for read, _ in reads:
            found = memory[read.target : read.target + size]
            assert found == CONTENT[read.offset : read.offset + size]
        assert second == CONTENT[::-1][5:15]
    reader.read([])


def test_a_shorter_file_is_named_with_its_tensors_and_offset(reader, path):
    memory = buffer(len(CONTENT))
    reads = whole_of(path, memory, 10_000)
    reader.read(reads)
    os.truncate(path, 34_567)
    with pytest.raises(SourceError, match=rf"content{READ_FAILED}the file ends here"):
        reader.read(reads)
    words = "at byte 34567 failed: the file ends here, it was changed"
    with pytest.raises(SourceError, match=words):
        reader.read([(piece(path, 30_000, 10_000), buffer(10_000))])
    path.write_bytes(CONTENT)  # the same file with the old content: the reader is still good
    memory[:] = bytes(len(CONTENT))
    reader.read(reads)
    assert memory == CONTENT


def test_files_that_cannot_be_opened_are_source_errors(reader, path):
    with pytest.raises(SourceError, match=r"gone: reading a, b at byte [03] failed: No such file"):
        reader.read([(piece(path.with_name("gone"), 3, 10), buffer(10))])
    if sys.platform != "win32":
        with pytest.raises(SourceError, match="failed: Is a directory"):
            reader.read([(piece(path.parent, 0, 10), buffer(10))])
    memory = buffer(10)
    reader.read([(piece(path, 3, 10), memory)])
    assert memory == CONTENT[3:13]


def test_threads_and_files_live_from_the_first_read_to_close(path, route):
    def held() -> tuple[int, int]:
        names = [thread.name for thread in threading.enumerate()]
        open_files = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
        return sum(name.startswith("wanstream-read") for name in names), open_files

    before = held()
    reader = FileReader(readers=2, **ROUTES[route])
    assert held() == before
    memory = buffer(1000)
    for _ in range(4):
        reader.read([(piece(path, index, 1, index), memory) for index in range(1000)])
    threads, files = (now - then for now, then in zip(held(), before, strict=True))
    assert 1 <= threads <= 2
    assert files <= (2 if route == "seek" else 1)
    reader.close()
    reader.close()
    assert held() == before
    with pytest.raises(SourceError, match="closed"):
        reader.read([(piece(path, 0, 1), memory)])
    with pytest.raises(ValueError, match="use 1 or more"):
        FileReader(readers=-1)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_disk_that_fails_is_an_error_and_no_wrong_bytes_stay(layered, route, large, at):
    reader, layer = layered(route, readers_count=1, at=at, error=errno.EIO)
    memory = buffer(len(LARGE))
    with pytest.raises(SourceError, match=rf"large{READ_FAILED}Input/output error"):
        reader.read(whole_of(large, memory))
    assert len(layer.requests) == at + 1, "the rest is not read"
    layer.at = None
    memory[:] = bytes(len(LARGE))
    reader.read(whole_of(large, memory))
    assert memory == LARGE


@pytest.mark.parametrize("short", [ALIGNMENT, 5 * ALIGNMENT + 77, 512 * 1024])
def test_a_short_read_is_continued(layered, route, large, short, caplog):
    reader, layer = layered(route, at=1, short=short)
    memory = buffer(len(LARGE))
    caplog.set_level(logging.INFO)
    reader.read(whole_of(large, memory))
    assert memory == LARGE
    assert caplog.records == [], "a short read is no refusal"
    if route == "direct":
        assert all(position % ALIGNMENT == 0 for position, _ in layer.requests)


def test_bytes_are_counted_as_files_return_them(layered, route, large):
    reader, _ = layered(route)
    reader.read(whole_of(large, buffer(len(LARGE))))
    assert reader.bytes_read == len(LARGE)
    reader.read([(piece(large, 10, 100), buffer(100))])
    assert reader.bytes_read == len(LARGE) + (ALIGNMENT if route == "direct" else 100)


direct = pytest.mark.skipif(not HAS_DIRECT, reason="this system has no O_DIRECT")


@direct
def test_direct_reads_are_aligned_and_read_each_byte_once(layered, large):
    reader, layer = layered("direct", readers_count=3)
    assert not reader.bounces
    memory = buffer(len(LARGE))
    reader.read(whole_of(large, memory)[::-1])
    assert memory == LARGE
    requests = sorted(layer.requests)
    assert all(position % ALIGNMENT == length % ALIGNMENT == 0 for position, length in requests)
    assert [position for position, _ in requests] == list(range(0, len(LARGE), EXTENT_BYTES))
    for _ in range(5):
        reader.read(whole_of(large, memory))
    bounces = sum(bounce.nbytes for bounce in reader.bounces.values())
    assert EXTENT_BYTES <= bounces <= 3 * EXTENT_BYTES
    reader.close()
    assert not reader.bounces


@direct
@pytest.mark.parametrize("at", [0, 2])
def test_a_refusing_file_system_is_read_through_the_cache(large, caplog, at):
    other = large.with_name("other.bin")
    other.write_bytes(CONTENT)
    reader = FileReader(readers=1, direct=True)
    reader.direct_files = layer = Layer(OpenFiles(), at=at, error=errno.EINVAL)
    memory = buffer(len(LARGE))
    small = buffer(100)
    caplog.set_level(logging.INFO)
    for _ in range(2):
        memory[:] = bytes(len(LARGE))
        small[:] = bytes(100)
        reader.read([*whole_of(large, memory), (piece(other, 7, 100), small)])
        assert (memory, small) == (LARGE, CONTENT[7:107])
    assert len(layer.requests) == 5, "what was planned by then is tried, no more"
    words = "refuses direct reads (Invalid argument); reading through the page cache"
    assert caplog.messages == [f"{large}: the file system {words}"], "logged once for both files"
    assert reader.bytes_read == 2 * (len(LARGE) + 100)
    reader.close()


def test_the_portable_route_never_reads_directly(large):
    reader = FileReader(readers=2, portable=True, direct=True)
    reader.direct_files = layer = Layer(OpenFiles())
    reader.read(whole_of(large, buffer(len(LARGE))))
    assert layer.requests == []
    reader.close()


def test_a_refusal_of_other_than_direct_reads_is_an_error(layered, large):
    refused, _ = layered("seek", at=0, error=errno.EINVAL)
    with pytest.raises(SourceError, match="Invalid argument"):
        refused.read(whole_of(large, buffer(len(LARGE))))


KINDS = [("tmpfs", True), ("ramfs", True), ("ext4", False), ("overlay", False), (None, False)]


@pytest.mark.parametrize(("kind", "expected"), KINDS)
def test_files_in_ram_are_found_by_their_mount(tmp_path, monkeypatch, kind, expected):
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    other = "21 1 0:999 / /elsewhere rw shared:1 - tmpfs none rw"
    own = f"\n22 1 {number} / /a rw - {kind} /dev/x rw" if kind else ""
    (tmp_path / "mountinfo").write_text(other + own)
    monkeypatch.setattr(reader_module, "MOUNTS", tmp_path / "mountinfo")
    assert lies_in_ram(tmp_path) is expected
    monkeypatch.setattr(reader_module, "MOUNTS", tmp_path / "missing")
    assert not lies_in_ram(tmp_path), "other systems do not report mounts"
    assert not lies_in_ram(tmp_path / "missing")
