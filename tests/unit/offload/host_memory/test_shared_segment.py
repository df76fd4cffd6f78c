from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from wanstream.offload.host_memory.ram_slots import HostPages
from wanstream.offload.host_memory.shared_segment import SHM, SharedSegment, sweep
from wanstream.offload.sources.base import SourceError
from wanstream.plan.programs import BlockKey

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no file locks of this kind")

COUNT, NBYTES = 4, 3_000_001
KEYS = [BlockKey("high", index) for index in range(COUNT)]
SIZES = dict.fromkeys(KEYS, NBYTES)


def content(index: int, nbytes: int = NBYTES) -> torch.Tensor:
    return ((torch.arange(nbytes) * 7 + index) % 251).to(torch.uint8)


def fill(
    segment: SharedSegment, key: BlockKey, read: Callable[[torch.Tensor], object]
) -> torch.Tensor:
    """Read a block into the segment, unless another rank has."""
    with segment.reserve(key) as reservation:
        if reservation.needs_fill:
            read(reservation.view)
    return reservation.memory


def fill_slot(
    slots: HostPages, slot: int, key: BlockKey, read: Callable[[torch.Tensor], object]
) -> torch.Tensor:
    """Read a block into a slot, unless another rank has."""
    with slots.reserve(slot, key, NBYTES) as reservation:
        if reservation.needs_fill:
            read(reservation.view)
    slots.lock(slot, NBYTES)
    return reservation.memory


# A rank: executes one command per line and prints one line for each. `hang` blocks after
# half a block.
RANK = """
import sys, time, hashlib
from pathlib import Path
import torch
from wanstream.offload.host_memory.shared_segment import SharedSegment
from wanstream.plan.programs import BlockKey

folder, identity, count, nbytes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
keys = [BlockKey("high", index) for index in range(count)]
segment = SharedSegment(identity, dict.fromkeys(keys, nbytes), folder=folder)
print("open", flush=True)

def fill(index, hang):
    reads = []
    def read(memory):
        reads.append(index)
        whole = ((torch.arange(nbytes) * 7 + index) % 251).to(torch.uint8)
        if hang:
            memory[: nbytes // 2] = whole[: nbytes // 2]
            print("reading", flush=True)
            time.sleep(1000)
        time.sleep(0.02)
        memory[:] = whole
    with segment.reserve(keys[index]) as reservation:
        if reservation.needs_fill:
            read(reservation.view)
    return len(reads), hashlib.sha256(reservation.memory.numpy()).hexdigest()

for line in sys.stdin:
    what, *rest = line.split()
    if what == "fill":
        print(*fill(int(rest[0]), False), flush=True)
    elif what == "hang":
        fill(int(rest[0]), True)
    elif what == "filled":
        print(segment.filled_bytes, flush=True)
    elif what == "pss":
        rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
        shared = sum(int(row.split()[1]) for row in rollup if row.startswith("Pss_Shmem"))
        print(shared * 1024, flush=True)
    elif what == "close":
        segment.close()
        print("closed", flush=True)
"""


class Rank:
    def __init__(self, folder: Path, identity: str, count: int, nbytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), identity, str(count), str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def answer(self) -> list[str]:
        assert self._process.stdout is not None
        return self._process.stdout.readline().split()

    def call(self, line: str) -> list[str]:
        self.tell(line)
        return self.answer()

    def kill(self) -> None:
        self._process.kill()
        self._end()

    def leave(self) -> None:
        """End the process without closing the segment."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0
        self._end()

    def _end(self) -> None:
        self._process.wait(60)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="test-", dir=SHM if SHM.is_dir() else None))
    yield place
    shutil.rmtree(place)


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., list[Rank]]]:
    """Start ranks that share one segment."""
    started: list[Rank] = []

    def ranks(
        number: int, identity: str = "model", count: int = COUNT, nbytes: int = NBYTES
    ) -> list[Rank]:
        new = [Rank(folder, identity, count, nbytes) for _ in range(number)]
        started.extend(new)
        for rank in new:
            assert rank.answer() == ["open"]
        return new

    yield ranks
    for rank in started:
        rank.kill()


def digest(index: int) -> str:
    import hashlib

    return hashlib.sha256(content(index).numpy()).hexdigest()


@pytest.mark.integration
def test_every_block_is_read_by_one_rank_and_found_by_all_bit_for_bit(start, folder):
    ranks = start(3)
    reads = 0
    for index in range(COUNT):
        for rank in ranks:
            rank.tell(f"fill {index}")
        for rank in ranks:
            count, found = rank.answer()
            reads += int(count)
            assert found == digest(index)
    assert reads == COUNT
    assert ranks[0].call("filled") == [str(COUNT * NBYTES)]
    for rank in ranks[:2]:
        assert rank.call("close") == ["closed"]
    assert len(list(folder.iterdir())) == 1, "somebody still uses it"
    ranks[2].leave()
    assert list(folder.iterdir()) == [], "a process that ends by itself need not close"


@pytest.mark.integration
def test_a_rank_that_is_killed_while_it_fills_leaves_the_block_to_the_next(start, folder):
    first, second, third = start(3)
    assert first.call("fill 0")[0] == "1"
    assert first.call("hang 1") == ["reading"]
    second.tell("fill 1")
    third.tell("fill 1")
    first.kill()
    answers = [second.answer(), third.answer()]
    assert sorted(count for count, _ in answers) == ["0", "1"]
    assert {found for _, found in answers} == {digest(1)}
    assert second.call("fill 0") == ["0", digest(0)], "what the dead one had filled is there"
    assert second.call("close") == third.call("close") == ["closed"]
    assert list(folder.iterdir()) == []


@pytest.mark.integration
def test_what_killed_ranks_left_is_recognised_and_not_believed(start, folder):
    first, second = start(2)
    assert first.call("fill 0")[0] == "1"
    first.kill()
    second.kill()
    (left,) = folder.iterdir()
    (memory,) = left.glob("memory")
    with memory.open("r+b") as file:  # memory without a user may have any contents
        file.seek(-NBYTES, os.SEEK_END)
        file.write(bytes(NBYTES))
    (third,) = start(1)
    assert third.call("filled") == ["0"]
    assert third.call("fill 0") == ["1", digest(0)]
    assert third.call("close") == ["closed"]
    assert list(folder.iterdir()) == []


@pytest.mark.integration
def test_what_killed_ranks_of_another_model_left_is_swept_out_and_what_is_used_stays(start, folder):
    dead, living = start(1, "dead")[0], start(1, "living")[0]
    assert dead.call("fill 0")[0] == living.call("fill 0")[0] == "1"
    dead.kill()
    assert len(list(folder.iterdir())) == 2
    (other,) = start(1, "other")
    assert len(list(folder.iterdir())) == 2
    assert living.call("fill 0") == ["0", digest(0)]
    assert other.call("fill 0")[0] == "1", "models never share"
    assert living.call("close") == other.call("close") == ["closed"]
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
@pytest.mark.integration
def test_memory_is_there_once(start):
    nbytes = 16_000_000
    ranks = start(3, "large", 2, nbytes)
    before = sum(int(rank.call("pss")[0]) for rank in ranks)
    for index in range(2):
        for rank in ranks:
            rank.call(f"fill {index}")
    after = sum(int(rank.call("pss")[0]) for rank in ranks)
    assert 2 * nbytes * 0.99 <= after - before <= 2 * nbytes * 1.05


def test_threads_with_segments_of_their_own_exclude_each_other_too(folder):
    reads: list[int] = []
    wrong: list[int] = []

    def rank() -> None:
        segment = SharedSegment("model", SIZES, folder=folder)
        for index, key in enumerate(KEYS):

            def read(memory: torch.Tensor, index: int = index) -> None:
                reads.append(index)
                memory.copy_(content(index))

            if not fill(segment, key, read).equal(content(index)):
                wrong.append(index)
        segment.close()

    keeper = SharedSegment("model", SIZES, folder=folder)
    threads = [threading.Thread(target=rank) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (sorted(reads), wrong) == (list(range(COUNT)), [])
    assert keeper.filled_bytes == COUNT * NBYTES
    keeper.close()
    assert list(folder.iterdir()) == []


def test_many_come_and_go_at_once(folder):
    """Opening and removing race with each other. No thread may join a removed segment."""
    failures: list[str] = []

    def visit(number: int) -> None:
        for _ in range(25):
            segment = SharedSegment("model", {KEYS[0]: 1000}, folder=folder)
            memory = fill(segment, KEYS[0], lambda memory: memory.fill_(7))
            if not segment.path.exists() or not memory.eq(7).all():
                failures.append(f"visitor {number}")
            segment.close()
            segment.close()

    threads = [threading.Thread(target=visit, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("made_by", ["another user of it", "this one"])
def test_a_folder_that_its_last_user_removes_while_it_is_opened_is_made_again(
    folder, monkeypatch, made_by
):
    closed = SharedSegment("model", SIZES, folder=folder)
    closed.close()
    place, removed = closed.path, []
    if made_by == "another user of it":
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
    assert fill(segment, KEYS[0], lambda memory: memory.fill_(7)).eq(7).all()
    assert place.is_dir()
    segment.close()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("occupied", ["file", "dangling link"])
def test_what_has_the_name_of_the_folder_and_is_none_is_refused(folder, occupied):
    closed = SharedSegment("model", SIZES, folder=folder)
    closed.close()
    place = closed.path
    if occupied == "file":
        place.touch()
    else:
        place.symlink_to(folder / "nowhere")
    with pytest.raises(SourceError, match="it is not a folder; remove it"):
        SharedSegment("model", SIZES, folder=folder)


def test_a_folder_whose_children_inherit_its_group_is_used(folder):
    folder.chmod(0o2700)
    segment = SharedSegment("model", SIZES, folder=folder)
    assert segment.path.stat().st_mode & 0o2777 == 0o2700
    segment.close()
    assert list(folder.iterdir()) == []


def fail(memory: torch.Tensor) -> None:
    memory.fill_(1)
    raise SourceError("the disk went away")


def test_a_read_that_fails_leaves_the_block_to_the_next_try(folder):
    segment = SharedSegment("model", SIZES, folder=folder)
    with pytest.raises(SourceError, match="the disk went away"):
        fill(segment, KEYS[2], fail)
    assert segment.filled_bytes == 0
    assert fill(segment, KEYS[2], lambda memory: memory.copy_(content(2))).equal(content(2))
    assert fill(segment, KEYS[2], fail).equal(content(2))
    segment.close()


def test_models_blocks_and_sizes_have_segments_of_their_own(folder):
    table = {
        "a": SharedSegment("a", SIZES, folder=folder),
        "b": SharedSegment("b", SIZES, folder=folder),
        "fewer": SharedSegment("a", {KEYS[0]: NBYTES}, folder=folder),
        "smaller": SharedSegment("a", dict.fromkeys(KEYS, 1000), folder=folder),
        "of the other expert": SharedSegment(
            "a", {BlockKey("low", i): NBYTES for i in range(COUNT)}, folder=folder
        ),
    }
    assert len({segment.path for segment in table.values()}) == len(table)
    again = SharedSegment("a", dict(SIZES), folder=folder)
    assert again.path == table["a"].path
    for segment in (*table.values(), again):
        segment.close()
    assert list(folder.iterdir()) == []


def test_after_close_nothing_can_be_asked_for_and_blocks_stay_readable(folder):
    segment = SharedSegment("model", SIZES, folder=folder)
    memory = fill(segment, KEYS[1], lambda memory: memory.copy_(content(1)))
    segment.close()
    segment.close()
    assert memory.equal(content(1))
    assert segment.filled_bytes == 0
    with pytest.raises(SourceError, match="block 0 of 'high': the segment was closed"):
        fill(segment, KEYS[0], fail)


@pytest.mark.skipif(not SHM.is_dir(), reason="this system has no /dev/shm")
def test_more_than_there_is_room_for_is_refused_and_not_a_crash(folder):
    size = shutil.disk_usage(folder).total + 1_000_000_000
    segment = SharedSegment("model", {KEYS[0]: size, KEYS[1]: 1000}, folder=folder)
    error = (
        rf"{size / 1e9:.2f} GB for block 0 of 'high' were refused \(No space left.*0\.0 GB are "
        r"filled, .*--shm-size"
    )
    with pytest.raises(SourceError, match=error):
        fill(segment, KEYS[0], fail)
    assert fill(segment, KEYS[1], lambda memory: memory.fill_(3)).eq(3).all()
    segment.close()


def test_more_than_can_be_mapped_is_refused_and_nothing_stays_behind(folder):
    with pytest.raises(SourceError, match="cannot be shared by the ranks"):
        SharedSegment("model", {KEYS[0]: 1 << 47}, folder=folder)
    assert list(folder.iterdir()) == []
    if Path("/proc/self/fd").is_dir():
        opened = [
            os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()
        ]
        assert not [path for path in opened if path.startswith(str(folder))]


def test_a_segment_that_was_taken_away_is_an_error_with_a_remedy(folder):
    segment = SharedSegment("model", SIZES, folder=folder)
    shutil.rmtree(segment.path)
    with pytest.raises(
        SourceError, match=r"block 1 of 'high' cannot be shared .*No such file.*; without a"
    ):
        fill(segment, KEYS[1], fail)
    segment.close()


def test_a_folder_that_cannot_be_used_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(
        SourceError,
        match=r"cannot be shared by the ranks: .*; without a shared segment every rank keeps",
    ):
        SharedSegment("model", SIZES, folder=tmp_path / "missing")


def test_a_link_in_place_of_the_memory_is_refused(folder, tmp_path):
    segment = SharedSegment("model", SIZES, folder=folder)
    place = segment.path
    segment.close()
    place.mkdir()
    (tmp_path / "elsewhere").write_bytes(b"something of value")
    (place / "memory").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SourceError, match="cannot be shared"):
        SharedSegment("model", SIZES, folder=folder)
    assert (tmp_path / "elsewhere").read_bytes() == b"something of value"


def test_slots_hold_shared_blocks_and_their_own_side_by_side(folder, limited_page_lock):
    driver, reads = limited_page_lock(), []

    def read_of(index: int) -> Callable[[torch.Tensor], None]:
        def read(memory: torch.Tensor) -> None:
            reads.append(index)
            memory.copy_(content(index, memory.numel()))

        return read

    segment = SharedSegment("model", {KEYS[0]: NBYTES, KEYS[1]: NBYTES}, folder=folder)
    other = SharedSegment("model", {KEYS[0]: NBYTES, KEYS[1]: NBYTES}, folder=folder)
    slots, others = HostPages(lock=driver, shared=segment), HostPages(lock=None, shared=other)
    for index in range(3):
        assert fill_slot(slots, index, KEYS[index], read_of(index)).equal(content(index))
        assert fill_slot(others, index, KEYS[index], read_of(index)).equal(content(index))
    assert reads == [0, 1, 2, 2], "the third has no place in the segment"
    assert (slots.locked.nbytes, slots.nbytes) == (3 * NBYTES, others.nbytes)
    # Filled blocks need no more RAM. A shared block's slot gets other memory for a private one.
    HostPages(lock=None, shared=other).check_available(2, 2 * NBYTES, available=0)
    assert fill_slot(slots, 0, KEYS[3], read_of(3)).equal(content(3))
    assert fill_slot(others, 0, KEYS[0], read_of(0)).equal(content(0))
    filled = segment.filled_bytes
    slots.drop(1)
    slots.drop(2)
    assert segment.filled_bytes == filled, "other ranks have it still"
    slots.close()
    assert driver.locked == []
    others.close()
    segment.close()
    other.close()
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(not re.match("linux|darwin", sys.platform), reason="needs fork")
@pytest.mark.integration
def test_a_forked_child_does_not_take_the_segment_away(folder):
    segment = SharedSegment("model", SIZES, folder=folder)
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from wanstream.offload.host_memory.shared_segment import SharedSegment\n"
        "from wanstream.plan.programs import BlockKey\n"
        "segment = SharedSegment('fork', {BlockKey('high', 0): 1000}, folder=Path(sys.argv[1]))\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    segment.close()\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print(segment.path.exists(), flush=True)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "True"
    assert [place for place in folder.iterdir() if place != segment.path] == []
    segment.close()


def expected_path(folder: Path) -> Path:
    """Return the segment's predictable path, still free."""
    segment = SharedSegment("model", SIZES, folder=folder)
    segment.close()
    return segment.path


def test_a_folder_that_others_can_write_to_is_refused_and_not_swept(folder):
    place = expected_path(folder)
    place.mkdir(mode=0o700)
    place.chmod(0o777)
    (place / "memory").touch(mode=0o600)
    with pytest.raises(SourceError, match="has the mode 777, not to user"):
        SharedSegment("model", SIZES, folder=folder)
    sweep(folder)
    assert (place / "memory").exists()


@pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a folder away"
)
def test_a_folder_of_another_user_is_refused(folder):
    place = expected_path(folder)
    place.mkdir(mode=0o700)
    os.chown(place, 12345, 12345)
    with pytest.raises(SourceError, match="belongs to user 12345 and has the mode 700"):
        SharedSegment("model", SIZES, folder=folder)


def test_a_link_to_a_folder_is_refused(folder, tmp_path):
    tmp_path.chmod(0o700)
    expected_path(folder).symlink_to(tmp_path)
    with pytest.raises(SourceError, match="it is not a folder"):
        SharedSegment("model", SIZES, folder=folder)
    assert list(tmp_path.iterdir()) == []
