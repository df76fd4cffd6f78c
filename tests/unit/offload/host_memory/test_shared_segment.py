"""Blocks shared by the ranks on one machine, also when ranks are killed, and refused folders."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from wanstream.offload.host_memory.shared_segment import SHM, SharedSegment, sweep
from wanstream.offload.sources.base import SourceError
from wanstream.plan.programs import BlockKey
from wanstream.tests.support.offload.fixtures import in_threads

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no file locks of this kind")

COUNT = 4
NBYTES = 300_001
KEYS = [BlockKey("high", index) for index in range(COUNT)]
SIZES = dict.fromkeys(KEYS, NBYTES)


def content(index: int) -> torch.Tensor:
    return ((torch.arange(NBYTES) * 7 + index) % 251).to(torch.uint8)


def fill(segment, key, read) -> torch.Tensor:
    """Read a block into the segment, unless another rank has."""
    with segment.reserve(key) as reservation:
        if reservation.needs_fill:
            read(reservation.view)
    return reservation.memory


def sevens(memory: torch.Tensor) -> None:
    memory.fill_(7)


def fail(memory: torch.Tensor) -> None:
    memory.fill_(1)
    raise SourceError("the disk went away")


# A rank: prints the value of each line. `hang` blocks after some bytes.
RANK = """
import hashlib, sys, time
from pathlib import Path
from wanstream.offload.host_memory.shared_segment import SharedSegment
from wanstream.tests.unit.offload.host_memory.test_shared_segment import KEYS, SIZES, content

segment = SharedSegment(sys.argv[2], SIZES, folder=Path(sys.argv[1]))
print("open", flush=True)

def fill(index, hang=False):
    with segment.reserve(KEYS[index]) as reservation:
        if reservation.needs_fill:
            if hang:
                reservation.view[:1000] = 1
                print("reading", flush=True)
                time.sleep(1000)
            time.sleep(0.02)
            reservation.view[:] = content(index)
    return [reservation.needs_fill, hashlib.sha256(reservation.memory.numpy()).hexdigest()]

def shared():
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(row.split()[1]) for row in rollup if row.startswith("Pss_Shmem"))

for line in sys.stdin:
    print(eval(line), flush=True)
"""


class Rank:
    def __init__(self, folder: Path, identity: str) -> None:
        command = [sys.executable, "-c", RANK, str(folder), identity]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        pipes["env"] = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, **pipes)

    def send(self, line: str) -> None:
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        return self._process.stdout.readline().strip()

    def call(self, line: str) -> str:
        self.send(line)
        return self.answer()

    def kill(self) -> None:
        self._process.kill()
        self.leave()

    def leave(self) -> None:
        """End the process without closing the segment."""
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()
        self._process.wait(60)


def filled(index: int, *, reads: bool = False) -> str:
    """Return a rank's answer to `fill`."""
    return str([reads, hashlib.sha256(content(index).numpy()).hexdigest()])


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="test-", dir=SHM if SHM.is_dir() else None) as place:
        yield Path(place)


@pytest.fixture
def start(folder) -> Iterator[Callable[..., list[Rank]]]:
    """Start ranks that share one segment."""
    started: list[Rank] = []

    def ranks(number: int, identity: str = "model") -> list[Rank]:
        new = [Rank(folder, identity) for _ in range(number)]
        started.extend(new)
        assert [rank.answer() for rank in new] == ["open"] * number
        return new

    yield ranks
    for rank in started:
        rank.kill()


@pytest.mark.integration
def test_every_block_is_read_by_one_rank_and_there_once(start, folder):
    ranks = start(3)
    linux = sys.platform == "linux"
    before = sum(int(rank.call("shared()")) for rank in ranks) if linux else 0
    for index in range(COUNT):
        for rank in ranks:
            rank.send(f"fill({index})")
        answers = sorted(rank.answer() for rank in ranks)
        assert answers == [filled(index), filled(index), filled(index, reads=True)]
    if linux:
        after = sum(int(rank.call("shared()")) for rank in ranks)
        assert 0.99 <= (after - before) / (COUNT * NBYTES) <= 1.05
    assert ranks[0].call("segment.filled_bytes") == str(COUNT * NBYTES)
    for rank in ranks[:2]:
        assert rank.call("segment.close()") == "None"
    assert len(list(folder.iterdir())) == 1, "somebody still uses it"
    ranks[2].leave()
    assert list(folder.iterdir()) == [], "a process that ends by itself need not close"


@pytest.mark.integration
def test_blocks_of_killed_ranks_are_filled_again(start, folder):
    first, second, third = start(3)
    assert first.call("fill(0)") == filled(0, reads=True)
    assert first.call("fill(1, hang=True)") == "reading"
    second.send("fill(1)")
    third.send("fill(1)")
    first.kill()
    assert sorted([second.answer(), third.answer()]) == [filled(1), filled(1, reads=True)]
    assert second.call("fill(0)") == filled(0), "what the dead one had filled is there"
    second.kill()
    third.kill()
    (left,) = folder.iterdir()
    with (left / "memory").open("r+b") as file:  # memory without a user may have any contents
        file.seek(-NBYTES, os.SEEK_END)
        file.write(bytes(NBYTES))
    (fourth,) = start(1)
    assert fourth.call("segment.filled_bytes") == "0"
    assert fourth.call("fill(0)") == filled(0, reads=True)
    fourth.call("segment.close()")
    assert list(folder.iterdir()) == []


@pytest.mark.integration
def test_opening_sweeps_out_dead_segments_of_other_models(start, folder):
    dead = start(1, "dead")[0]
    living = start(1, "living")[0]
    assert dead.call("fill(0)") == living.call("fill(0)") == filled(0, reads=True)
    dead.kill()
    assert len(list(folder.iterdir())) == 2
    (other,) = start(1, "other")
    assert len(list(folder.iterdir())) == 2
    assert living.call("fill(0)") == filled(0)
    assert other.call("fill(0)") == filled(0, reads=True), "models never share"
    for rank in (living, other):
        rank.call("segment.close()")
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_remove_the_segment(folder):
    segment = SharedSegment("model", SIZES, folder=folder)
    if (child := os.fork()) == 0:
        segment.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert segment.path.exists()
    segment.close()
    assert list(folder.iterdir()) == []


def test_threads_with_own_segments_exclude_each_other_too(folder):
    reads: list[int] = []

    def rank() -> None:
        segment = SharedSegment("model", SIZES, folder=folder)
        for index, key in enumerate(KEYS):

            def read(memory: torch.Tensor, index: int = index) -> None:
                reads.append(index)
                memory.copy_(content(index))

            assert fill(segment, key, read).equal(content(index))
        segment.close()

    keeper = SharedSegment("model", SIZES, folder=folder)
    assert in_threads([rank] * 4) == [None] * 4
    assert sorted(reads) == list(range(COUNT))
    assert keeper.filled_bytes == COUNT * NBYTES
    keeper.close()
    assert list(folder.iterdir()) == []


def test_opening_and_removing_race_with_each_other(folder):
    """No thread may join a removed segment."""

    def visit() -> None:
        for _ in range(8):
            segment = SharedSegment("model", {KEYS[0]: 1000}, folder=folder)
            memory = fill(segment, KEYS[0], sevens)
            assert segment.path.exists()
            assert memory.eq(7).all()
            segment.close()
            segment.close()

    assert in_threads([visit] * 6) == [None] * 6
    assert list(folder.iterdir()) == []


@pytest.fixture
def place(folder) -> Path:
    """The predictable path of the model's segment, still free."""
    segment = SharedSegment("model", SIZES, folder=folder)
    segment.close()
    return segment.path


@pytest.mark.parametrize("made_by", ["another user", "this one"])
def test_a_folder_removed_during_opening_is_made_again(folder, place, monkeypatch, made_by):
    removed = []
    if made_by == "another user":
        place.mkdir(mode=0o700)

    def remove_before(look: str) -> None:
        real = getattr(Path, look)

        def looked(path: Path, *args: object, **kwargs: object) -> object:
            if path == place and not removed:
                removed.append(path)
                shutil.rmtree(place)
            return real(path, *args, **kwargs)

        monkeypatch.setattr(Path, look, looked)

    remove_before("is_dir")
    remove_before("lstat")
    segment = SharedSegment("model", SIZES, folder=folder)
    assert removed
    assert fill(segment, KEYS[0], sevens).eq(7).all()
    assert place.is_dir()
    segment.close()
    assert list(folder.iterdir()) == []


def test_a_folder_whose_children_inherit_its_group_is_used(folder):
    folder.chmod(0o2700)
    segment = SharedSegment("model", SIZES, folder=folder)
    assert segment.path.stat().st_mode & 0o2777 == 0o2700
    segment.close()


def make_open_folder(place: Path, other: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


def make_foreign_folder(place: Path, other: Path) -> None:
    if not hasattr(os, "getuid") or os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    place.mkdir(mode=0o700)
    os.chown(place, 12345, 12345)


def make_linked_memory(place: Path, other: Path) -> None:
    place.mkdir(mode=0o700)
    (place / "memory").symlink_to(other / "memory")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda place, other: place.touch(), "it is not a folder; remove it"),
        (lambda place, other: place.symlink_to(other / "nowhere"), "it is not a folder; remove it"),
        (lambda place, other: place.symlink_to(other), "it is not a folder"),
        (make_open_folder, "has the mode 777, not to user"),
        (make_foreign_folder, "belongs to user 12345 and has the mode 700"),
        (make_linked_memory, "cannot be shared"),
    ],
    ids=["file", "dangling link", "link to a folder", "open", "of another user", "linked memory"],
)
def test_other_files_in_the_segments_place_are_refused(folder, place, tmp_path, make, words):
    tmp_path.chmod(0o700)
    (tmp_path / "memory").write_bytes(b"something of value")
    make(place, tmp_path)
    with pytest.raises(SourceError, match=words):
        SharedSegment("model", SIZES, folder=folder)
    sweep(folder)
    assert os.path.lexists(place)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"something of value"]


def test_a_failed_read_leaves_the_block_to_the_next_try(folder):
    segment = SharedSegment("model", SIZES, folder=folder)
    with pytest.raises(SourceError, match="the disk went away"):
        fill(segment, KEYS[2], fail)
    assert segment.filled_bytes == 0
    memory = fill(segment, KEYS[2], sevens)
    assert fill(segment, KEYS[2], fail).eq(7).all()
    for _ in range(2):
        segment.close()
        assert memory.eq(7).all(), "blocks stay readable"
        assert segment.filled_bytes == 0
    with pytest.raises(SourceError, match="block 0 of 'high': the segment was closed"):
        fill(segment, KEYS[0], fail)


def test_models_blocks_and_sizes_have_own_segments(folder):
    wanted = [
        ("a", SIZES),
        ("b", SIZES),
        ("a", {KEYS[0]: NBYTES}),
        ("a", dict.fromkeys(KEYS, 1000)),
        ("a", {BlockKey("low", index): NBYTES for index in range(COUNT)}),
        ("a", dict(SIZES)),
    ]
    segments = [SharedSegment(identity, sizes, folder=folder) for identity, sizes in wanted]
    paths = [segment.path for segment in segments]
    assert len(set(paths)) == len(wanted) - 1
    assert paths[0] == paths[-1]
    for segment in segments:
        segment.close()
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(not SHM.is_dir(), reason="this system has no /dev/shm")
def test_a_block_without_room_is_refused_and_not_a_crash(folder):
    size = shutil.disk_usage(folder).total + 1_000_000_000
    segment = SharedSegment("model", {KEYS[0]: size, KEYS[1]: 1000}, folder=folder)
    words = r"for block 0 of 'high' were refused \(No space left.*0\.0 GB are filled, .*--shm-size"
    with pytest.raises(SourceError, match=rf"{size / 1e9:.2f} GB {words}"):
        fill(segment, KEYS[0], fail)
    assert fill(segment, KEYS[1], sevens).eq(7).all()
    segment.close()


def test_a_segment_too_large_to_map_leaves_nothing_behind(folder):
    with pytest.raises(SourceError, match="cannot be shared by the ranks"):
        SharedSegment("model", {KEYS[0]: 1 << 47}, folder=folder)
    assert list(folder.iterdir()) == []
    if (descriptors := Path("/proc/self/fd")).is_dir():
        opened = [os.readlink(link) for link in descriptors.iterdir() if link.is_symlink()]
        assert not [path for path in opened if path.startswith(str(folder))]


def test_a_missing_folder_is_an_error_with_a_remedy(folder, tmp_path):
    segment = SharedSegment("model", SIZES, folder=folder)
    shutil.rmtree(segment.path)
    words = r"block 1 of 'high' cannot be shared .*No such file.*; without a"
    with pytest.raises(SourceError, match=words):
        fill(segment, KEYS[1], fail)
    segment.close()
    words = r"cannot be shared by the ranks: .*; without a shared segment every rank keeps"
    with pytest.raises(SourceError, match=words):
        SharedSegment("model", SIZES, folder=tmp_path / "missing")
