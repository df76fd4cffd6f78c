from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from wanstream.offload.file_reader import FileReader
from wanstream.offload.read_pieces import ReadPiece
from wanstream.offload.source import SourceError

CONTENT = os.urandom(100_000)


def piece(path: Path, offset: int, nbytes: int, target: int = 0) -> ReadPiece:
    return ReadPiece(path=path, offset=offset, nbytes=nbytes, target=target, names=("a", "b"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "content.bin"
    file.write_bytes(CONTENT)
    return file


@pytest.fixture(params=[False, True], ids=["preadv", "seek"])
def portable(request: pytest.FixtureRequest) -> bool:
    if not request.param and not hasattr(os, "preadv"):
        pytest.skip("this system has no preadv")
    return request.param


@pytest.fixture(params=[1, 2, 4])
def reader(request: pytest.FixtureRequest, portable: bool):
    reader = FileReader(readers=request.param, portable=portable)
    yield reader
    reader.close()


def test_many_pieces_arrive_in_their_places(reader, path):
    size, count = 24, 4000
    memory = memoryview(bytearray(size * count))
    reads = [(piece(path, size * (count - 1 - place), size, size * place), memory) for place in range(count)]
    for _ in range(3):
        memory[:] = bytes(size * count)
        reader.read(reads)
        for read, _ in reads:
            assert memory[read.target : read.target + size] == CONTENT[read.offset : read.offset + size]


def test_pieces_of_several_files_and_memories(reader, path, tmp_path):
    other = tmp_path / "other.bin"
    other.write_bytes(CONTENT[::-1])
    first, second = memoryview(bytearray(10)), memoryview(bytearray(10))
    reader.read([(piece(path, 5, 10), first), (piece(other, 5, 10), second), (piece(other, 0, 0), first)])
    assert first == CONTENT[5:15]
    assert second == CONTENT[::-1][5:15]


def test_nothing_to_read(reader):
    reader.read([])


def test_a_file_that_shrank_is_named_with_its_tensors_and_offset(reader, path):
    memory = memoryview(bytearray(len(CONTENT)))
    whole = [(piece(path, offset, 10_000, offset), memory) for offset in range(0, len(CONTENT), 10_000)]
    reader.read(whole)
    os.truncate(path, 34_567)
    with pytest.raises(SourceError, match=r"content\.bin: reading a, b at byte \d+ failed: the file ends here"):
        reader.read(whole)
    path.write_bytes(CONTENT)  # the same file with its old content: the reader is still good
    memory[:] = bytes(len(CONTENT))
    reader.read(whole)
    assert memory == CONTENT


def test_a_read_that_stops_short_goes_on_where_it_stopped(reader, path):
    os.truncate(path, 34_567)
    with pytest.raises(SourceError, match="at byte 34567 failed: the file ends here, it was changed"):
        reader.read([(piece(path, 30_000, 10_000), memoryview(bytearray(10_000)))])


def test_a_file_that_is_gone_is_an_error_of_the_source(reader, path):
    memory = memoryview(bytearray(10))
    with pytest.raises(SourceError, match=r"gone: reading a, b at byte 3 failed: No such file"):
        reader.read([(piece(path.with_name("gone"), 3, 10), memory)])
    reader.read([(piece(path, 3, 10), memory)])
    assert memory == CONTENT[3:13]


@pytest.mark.skipif(sys.platform == "win32", reason="folders cannot be opened there")
def test_what_the_system_refuses_is_an_error_of_the_source(reader, path):
    with pytest.raises(SourceError, match=r"failed: Is a directory"):
        reader.read([(piece(path.parent, 0, 10), memoryview(bytearray(10)))])


def reader_threads() -> int:
    return sum(thread.name.startswith("wanstream-read") for thread in threading.enumerate())


def test_threads_and_files_live_from_the_first_read_to_close(path, portable):
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0

    before = open_files()
    reader = FileReader(readers=2, portable=portable)
    assert (reader_threads(), open_files()) == (0, before)
    memory = memoryview(bytearray(1000))
    for _ in range(20):
        reader.read([(piece(path, index, 1, index), memory) for index in range(1000)])
    assert 1 <= reader_threads() <= 2
    assert open_files() - before <= (2 if portable else 1)
    reader.close()
    reader.close()
    assert (reader_threads(), open_files()) == (0, before)
    with pytest.raises(SourceError, match="closed"):
        reader.read([(piece(path, 0, 1), memory)])


@pytest.mark.parametrize("readers", [0, -1])
def test_no_readers_are_refused(readers):
    with pytest.raises(ValueError, match="use 1 or more"):
        FileReader(readers=readers)
