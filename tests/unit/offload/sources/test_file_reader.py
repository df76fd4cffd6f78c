from __future__ import annotations

import errno
import logging
import os
import sys
import threading
from pathlib import Path

import psutil
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


def piece(path: Path, offset: int, nbytes: int, target: int = 0) -> ReadPiece:
    return ReadPiece(path=path, offset=offset, nbytes=nbytes, target=target, names=("a", "b"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "content.bin"
    file.write_bytes(CONTENT)
    return file


ROUTES = {
    "preadv": {"portable": False},
    "seek": {"portable": True},
    "direct": {"portable": False, "direct": True},
}


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest) -> str:
    if request.param == "preadv" and not HAS_PREADV:
        pytest.skip("this system has no preadv")
    if request.param == "direct" and not HAS_DIRECT:
        pytest.skip("this system has no O_DIRECT")
    return request.param


@pytest.fixture(params=[0, 1, 2, 4])
def reader(request: pytest.FixtureRequest, route: str):
    reader = FileReader(readers=request.param, **ROUTES[route])
    yield reader
    reader.close()


class Layer:
    """OpenFiles whose read number `at` fails, or returns only `short` bytes."""

    def __init__(
        self, inner: OpenFiles, *, at: int | None = None, error: int | None = None, short: int = 0
    ) -> None:
        self.inner, self.at, self.error, self.short = inner, at, error, short
        self.asked: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def read_at(self, path: Path, position: int, into: memoryview) -> int:
        with self._lock:
            number = len(self.asked)
            self.asked.append((position, len(into)))
        if number == self.at and self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        count = self.inner.read_at(path, position, into)
        return min(count, self.short) if number == self.at else count

    def version(self, path: Path):
        return self.inner.version(path)

    def close(self) -> None:
        self.inner.close()


def layered(route: str, *, readers: int = 2, **how) -> tuple[FileReader, Layer]:
    """Return a reader over a layer, and the layer."""
    inner = OpenFiles(O_DIRECT if route == "direct" else 0, positional=route != "seek")
    layer = Layer(inner, **how)
    reader = FileReader(readers=readers, **ROUTES[route])
    setattr(reader, "direct_files" if route == "direct" else "files", layer)
    return reader, layer


def test_many_pieces_arrive_in_their_places(reader, path):
    size, count = 24, 4000
    memory = memoryview(bytearray(size * count))
    reads = [
        (piece(path, size * (count - 1 - place), size, size * place), memory)
        for place in range(count)
    ]
    for _ in range(3):
        memory[:] = bytes(size * count)
        reader.read(reads)
        for read, _ in reads:
            assert (
                memory[read.target : read.target + size]
                == CONTENT[read.offset : read.offset + size]
            )


def test_pieces_of_several_files_and_memories(reader, path, tmp_path):
    other = tmp_path / "other.bin"
    other.write_bytes(CONTENT[::-1])
    first, second = memoryview(bytearray(10)), memoryview(bytearray(10))
    reader.read(
        [(piece(path, 5, 10), first), (piece(other, 5, 10), second), (piece(other, 0, 0), first)]
    )
    assert first == CONTENT[5:15]
    assert second == CONTENT[::-1][5:15]


def test_nothing_to_read(reader):
    reader.read([])


def test_a_file_that_shrank_is_named_with_its_tensors_and_offset(reader, path):
    memory = memoryview(bytearray(len(CONTENT)))
    whole = [
        (piece(path, offset, 10_000, offset), memory) for offset in range(0, len(CONTENT), 10_000)
    ]
    reader.read(whole)
    os.truncate(path, 34_567)
    with pytest.raises(
        SourceError, match=r"content\.bin: reading a, b at byte \d+ failed: the file ends here"
    ):
        reader.read(whole)
    path.write_bytes(CONTENT)  # the same file with the old content: the reader is still good
    memory[:] = bytes(len(CONTENT))
    reader.read(whole)
    assert memory == CONTENT


def test_a_read_that_stops_short_goes_on_where_it_stopped(reader, path):
    os.truncate(path, 34_567)
    with pytest.raises(
        SourceError, match="at byte 34567 failed: the file ends here, it was changed"
    ):
        reader.read([(piece(path, 30_000, 10_000), memoryview(bytearray(10_000)))])


def test_a_file_that_is_gone_is_an_error_of_the_source(reader, path):
    memory = memoryview(bytearray(10))
    with pytest.raises(SourceError, match=r"gone: reading a, b at byte [03] failed: No such file"):
        reader.read([(piece(path.with_name("gone"), 3, 10), memory)])
    reader.read([(piece(path, 3, 10), memory)])
    assert memory == CONTENT[3:13]


@pytest.mark.skipif(sys.platform == "win32", reason="folders cannot be opened there")
def test_what_the_system_refuses_is_an_error_of_the_source(reader, path):
    with pytest.raises(SourceError, match=r"failed: Is a directory"):
        reader.read([(piece(path.parent, 0, 10), memoryview(bytearray(10)))])


def reader_threads() -> int:
    return sum(thread.name.startswith("wanstream-read") for thread in threading.enumerate())


def test_threads_and_files_live_from_the_first_read_to_close(path, route):
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0

    before = open_files()
    reader = FileReader(readers=2, **ROUTES[route])
    assert (reader_threads(), open_files()) == (0, before)
    memory = memoryview(bytearray(1000))
    for _ in range(20):
        reader.read([(piece(path, index, 1, index), memory) for index in range(1000)])
    assert 1 <= reader_threads() <= 2
    assert open_files() - before <= (2 if route == "seek" else 1)
    reader.close()
    reader.close()
    assert (reader_threads(), open_files()) == (0, before)
    with pytest.raises(SourceError, match="closed"):
        reader.read([(piece(path, 0, 1), memory)])


def test_less_than_no_readers_are_refused():
    with pytest.raises(ValueError, match="use 1 or more"):
        FileReader(readers=-1)


LARGE = os.urandom(3 * EXTENT_BYTES + 12_345)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    file = tmp_path / "large.bin"
    file.write_bytes(LARGE)
    return file


def whole_of(
    path: Path, memory: memoryview, size: int = 1_000_003
) -> list[tuple[ReadPiece, memoryview]]:
    return [
        (piece(path, at, min(size, len(LARGE) - at), at), memory)
        for at in range(0, len(LARGE), size)
    ]


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_disk_that_fails_in_the_middle_is_an_error_and_noise_is_never_kept(route, large, at):
    reader, layer = layered(route, at=at, error=errno.EIO)
    memory = memoryview(bytearray(len(LARGE)))
    with pytest.raises(
        SourceError, match=r"large\.bin: reading a, b at byte \d+ failed: Input/output error"
    ):
        reader.read(whole_of(large, memory))
    layer.at = None
    memory[:] = bytes(len(LARGE))
    reader.read(whole_of(large, memory))
    assert memory == LARGE
    reader.close()


def test_after_an_error_the_rest_is_not_read(route, large):
    reader, layer = layered(route, readers=1, at=1, error=errno.EIO)
    with pytest.raises(SourceError):
        reader.read(whole_of(large, memoryview(bytearray(len(LARGE)))))
    assert len(layer.asked) == 2
    reader.close()


@pytest.mark.parametrize("short", [ALIGNMENT, 5 * ALIGNMENT + 77, 512 * 1024])
def test_a_short_read_is_gone_on_with(route, large, short, caplog):
    reader, layer = layered(route, at=1, short=short)
    memory = memoryview(bytearray(len(LARGE)))
    with caplog.at_level(logging.INFO):
        reader.read(whole_of(large, memory))
    assert memory == LARGE
    assert caplog.records == [], "a short read is no refusal"
    if route == "direct":
        assert all(position % ALIGNMENT == 0 for position, _ in layer.asked)
    reader.close()


def test_a_read_that_gives_nothing_is_the_end_of_the_file(route, large):
    reader, _ = layered(route, at=2, short=0)
    with pytest.raises(
        SourceError, match=r"large\.bin: reading a, b at byte \d+ failed: the file ends here"
    ):
        reader.read(whole_of(large, memoryview(bytearray(len(LARGE)))))
    reader.close()


def test_bytes_are_counted_as_files_give_them(route, large):
    reader, _ = layered(route)
    reader.read(whole_of(large, memoryview(bytearray(len(LARGE)))))
    assert reader.bytes_read == len(LARGE)
    reader.read([(piece(large, 10, 100), memoryview(bytearray(100)))])
    assert reader.bytes_read == len(LARGE) + (ALIGNMENT if route == "direct" else 100)
    reader.close()


direct = pytest.mark.skipif(not HAS_DIRECT, reason="this system has no O_DIRECT")


@direct
def test_direct_reads_are_aligned_and_each_byte_is_read_once(large):
    reader, layer = layered("direct")
    memory = memoryview(bytearray(len(LARGE)))
    reader.read(whole_of(large, memory)[::-1])
    assert memory == LARGE
    asked = sorted(layer.asked)
    assert all(position % ALIGNMENT == length % ALIGNMENT == 0 for position, length in asked)
    assert [position for position, _ in asked] == list(range(0, len(LARGE), EXTENT_BYTES))
    reader.close()


@direct
@pytest.mark.parametrize("at", [0, 2])
def test_a_file_system_that_refuses_is_read_through_the_cache_and_told_once(large, caplog, at):
    layer = Layer(OpenFiles(), at=at, error=errno.EINVAL)
    reader = FileReader(readers=1, direct=True)
    reader.direct_files = layer
    memory = memoryview(bytearray(len(LARGE)))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            memory[:] = bytes(len(LARGE))
            reader.read(whole_of(large, memory))
            assert memory == LARGE
    assert len(layer.asked) == 4, "what was planned by then is tried, no more"
    assert [record.getMessage() for record in caplog.records] == [
        f"{large}: the file system refuses direct reads (Invalid argument); reading through the "
        "page cache"
    ]
    assert reader.bytes_read == 2 * len(LARGE)
    reader.close()


@direct
def test_many_refusals_are_told_once(large, path, caplog):
    class Refusing(Layer):
        def read_at(self, path: Path, position: int, into: memoryview) -> int:
            raise OSError(errno.EINVAL, "refused")

    reader = FileReader(readers=1, direct=True)
    reader.direct_files = Refusing(OpenFiles())
    memory, small = memoryview(bytearray(len(LARGE))), memoryview(bytearray(100))
    with caplog.at_level(logging.INFO):
        reader.read([*whole_of(large, memory), (piece(path, 7, 100), small)])
    assert (memory, small) == (LARGE, CONTENT[7:107])
    assert len(caplog.records) == 1
    reader.close()


def test_the_same_refusal_of_an_ordinary_read_is_an_error_of_the_source(large):
    reader = FileReader(readers=1, portable=True)
    reader.files = Layer(OpenFiles(positional=False), at=0, error=errno.EINVAL)
    with pytest.raises(SourceError, match="Invalid argument"):
        reader.read(whole_of(large, memoryview(bytearray(len(LARGE)))))
    reader.close()


def test_the_portable_route_never_reads_directly(large):
    layer = Layer(OpenFiles())
    reader = FileReader(readers=2, portable=True, direct=True)
    reader.direct_files = layer
    assert not reader.direct
    reader.read(whole_of(large, memoryview(bytearray(len(LARGE)))))
    assert layer.asked == []
    reader.close()


def test_bounce_buffers_are_exact_and_go_with_close(large):
    if not HAS_DIRECT:
        pytest.skip("this system has no O_DIRECT")
    reader = FileReader(readers=3, direct=True)
    assert not reader.bounces
    for _ in range(5):
        reader.read(whole_of(large, memoryview(bytearray(len(LARGE)))))
    assert (
        EXTENT_BYTES <= sum(bounce.nbytes for bounce in reader.bounces.values()) <= 3 * EXTENT_BYTES
    )
    reader.close()
    assert not reader.bounces


def test_reading_again_and_again_takes_no_more_memory(reader, large):
    process, memory = psutil.Process(), memoryview(bytearray(len(LARGE)))
    for _ in range(3):
        reader.read(whole_of(large, memory))
    before = process.memory_info().rss
    for _ in range(30):
        reader.read(whole_of(large, memory))
    assert process.memory_info().rss - before < len(LARGE) // 2, "of 30 times as much"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("tmpfs", True), ("ramfs", True), ("ext4", False), ("overlay", False), (None, False)],
)
def test_files_in_ram_are_found_by_their_mount(tmp_path, monkeypatch, kind, expected):
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    lines = [
        "21 1 0:999 / /elsewhere rw shared:1 - tmpfs none rw",
        f"22 1 {number} / /a rw - {kind} /dev/x rw",
    ]
    mounts.write_text("\n".join(lines if kind else lines[:1]))
    monkeypatch.setattr(reader_module, "MOUNTS", mounts)
    assert lies_in_ram(tmp_path) is expected
    monkeypatch.setattr(reader_module, "MOUNTS", tmp_path / "missing")
    assert not lies_in_ram(tmp_path), "other systems do not report mounts"
    assert not lies_in_ram(tmp_path / "missing")
