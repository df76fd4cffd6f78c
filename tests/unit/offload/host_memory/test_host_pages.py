from __future__ import annotations

import ctypes
import logging
import mmap
import re
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from wanstream.offload.host_memory import ram_slots
from wanstream.offload.host_memory.ram_slots import HostPages
from wanstream.offload.host_memory.shared_segment import SharedSegment
from wanstream.offload.sources.base import InsufficientRamError, SourceError
from wanstream.plan.programs import BlockKey

KEY = BlockKey("high", 0)
PAGE = mmap.PAGESIZE


def filled_with(value: int):
    def read(memory: torch.Tensor) -> None:
        memory.fill_(value)

    return read


def fill(
    slots: HostPages,
    slot: int,
    key: BlockKey,
    nbytes: int,
    read: Callable[[torch.Tensor], None],
    *,
    capacity: int = 0,
) -> torch.Tensor:
    """Reserve a slot, read into it unless another rank has, and lock it."""
    with slots.reserve(slot, key, nbytes, capacity=capacity) as reservation:
        if reservation.needs_fill:
            read(reservation.view)
    slots.lock(slot, nbytes)
    return reservation.memory


def failing(memory: torch.Tensor) -> None:
    raise SourceError("the disk went away")


def resident_bytes(address: int, nbytes: int) -> int | None:
    """Bytes at `address` with a page. None if they are not mapped."""
    present = (ctypes.c_ubyte * (nbytes // PAGE))()
    failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), present)
    return None if failed else sum(each & 1 for each in present) * PAGE


def test_a_slot_takes_the_pages_of_its_block_and_gives_them_back(limited_page_lock):
    driver = limited_page_lock()
    slots = HostPages(lock=driver)
    assert (slots.nbytes, slots.locked.nbytes) == (0, 0)
    first = fill(slots, 0, KEY, PAGE + 1, filled_with(3))
    second = fill(slots, 1, KEY, 10, filled_with(4))
    assert (first.shape, first.dtype) == ((PAGE + 1,), torch.uint8)
    assert first.eq(3).all()
    assert second.eq(4).all()
    assert {first.data_ptr() % PAGE, second.data_ptr() % PAGE} == {0}
    assert (slots.nbytes, slots.locked.nbytes) == (3 * PAGE, PAGE + 11)
    assert driver.locked == [(first.data_ptr(), PAGE + 1), (second.data_ptr(), 10)]
    for slot in (0, 0, 7):
        slots.drop(slot)
    assert (slots.nbytes, driver.locked) == (PAGE, [(second.data_ptr(), 10)])
    slots.close()
    slots.close()
    assert (slots.nbytes, slots.locked.nbytes, driver.locked) == (0, 0, [])
    assert fill(slots, 1, KEY, 10, filled_with(5)).eq(5).all(), "a closed slot can be filled again"


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_memory_is_mapped_by_the_first_fill_and_unmapped_by_drop():
    slots = HostPages(lock=None)
    address = fill(slots, 0, KEY, 10 * PAGE - 5, filled_with(1)).data_ptr()
    assert resident_bytes(address, 10 * PAGE) == 10 * PAGE
    slots.drop(0)
    assert resident_bytes(address, 10 * PAGE) is None


def test_memory_stays_for_smaller_blocks_and_grows_for_larger_ones(limited_page_lock):
    driver = limited_page_lock()
    slots = HostPages(lock=driver)
    first = fill(slots, 0, KEY, 3 * PAGE, filled_with(1))
    smaller = fill(slots, 0, KEY, PAGE, filled_with(2))
    assert (smaller.data_ptr(), smaller.numel()) == (first.data_ptr(), PAGE)
    assert (slots.nbytes, driver.attempts) == (3 * PAGE, 1)
    del first, smaller
    larger = fill(slots, 0, KEY, 4 * PAGE, filled_with(3))
    assert (slots.nbytes, driver.locked) == (4 * PAGE, [(larger.data_ptr(), 4 * PAGE)])
    roomy = fill(slots, 1, KEY, PAGE, filled_with(4), capacity=2 * PAGE + 1)
    assert (roomy.numel(), slots.nbytes) == (PAGE, 7 * PAGE)
    assert fill(slots, 1, KEY, 2 * PAGE + 1, filled_with(5)).data_ptr() == roomy.data_ptr()
    slots.close()


def test_pages_are_touched_before_they_are_locked():
    seen: list[torch.Tensor] = []

    class Looking:
        def lock_pages(self, memory: torch.Tensor) -> None:
            if sys.platform == "linux":
                resident.append(resident_bytes(memory.data_ptr(), memory.numel()))
            seen.append(memory.clone())

        def unlock_pages(self, memory: torch.Tensor) -> None: ...

    resident: list[int] = []
    slots = HostPages(lock=Looking())
    fill(slots, 0, KEY, PAGE, filled_with(9), capacity=8 * PAGE)
    assert seen[0][:PAGE].eq(9).all()
    assert resident in ([8 * PAGE], [])
    slots.close()


def test_a_refusal_to_lock_is_one_warning_and_the_block_is_there(limited_page_lock, caplog):
    driver = limited_page_lock(limit=1)
    slots = HostPages(lock=driver)
    with caplog.at_level(logging.WARNING):
        for index in range(4):
            assert fill(slots, index, KEY, PAGE, filled_with(index)).eq(index).all()
        slots.drop(0)
        for index in range(4, 8):
            assert fill(slots, index, KEY, PAGE, filled_with(index)).eq(index).all()
    assert len(caplog.records) == 1
    assert "slower (often 6 GB/s instead of 25), and the host waits" in caplog.text
    assert slots.locked.nbytes == PAGE, "what was given back may be locked again"
    slots.close()
    assert driver.locked == []


def test_a_slot_that_could_not_be_locked_is_tried_again_when_there_is_room(limited_page_lock):
    slots = HostPages(lock=limited_page_lock(limit=1))
    fill(slots, 0, KEY, PAGE, filled_with(1))
    fill(slots, 1, KEY, PAGE, filled_with(1))
    slots.drop(0)
    fill(slots, 1, KEY, PAGE, filled_with(2))
    assert slots.locked.nbytes == PAGE
    slots.close()


def test_a_read_that_fails_leaves_a_slot_that_can_be_filled_again(limited_page_lock):
    driver = limited_page_lock()
    slots = HostPages(lock=driver)
    with pytest.raises(SourceError, match="the disk went away"):
        fill(slots, 0, KEY, PAGE, failing)
    assert driver.locked == [], "what holds anything is not locked"
    assert fill(slots, 0, KEY, PAGE, filled_with(1)).eq(1).all()
    with pytest.raises(SourceError, match="the disk went away"):
        fill(slots, 0, KEY, PAGE, failing)
    assert slots.nbytes == slots.locked.nbytes == PAGE
    slots.close()
    assert driver.locked == []


def test_more_memory_than_there_is_is_refused_with_numbers():
    with pytest.raises(
        InsufficientRamError,
        match=r"140737\.5 GB of RAM for one more block, \d+\.\d GB are available: keep few",
    ):
        fill(HostPages(lock=None), 0, KEY, 1 << 47, failing)


def test_blocks_in_flight_are_counted_until_their_pages_are_there(monkeypatch):
    """The system counts untouched pages as available."""
    monkeypatch.setattr(ram_slots, "available_bytes", lambda: 4 * PAGE - slots.nbytes * counted)
    slots, counted = HostPages(lock=None), False
    with slots.reserve(0, KEY, 3 * PAGE):
        second = threading.Thread(target=fill, args=(slots, 1, KEY, 2 * PAGE, filled_with(2)))
        second.start()
        third = threading.Thread(target=fill, args=(slots, 2, KEY, PAGE, filled_with(3)))
        third.start()
        third.join(60)
        second.join(0.02)
        assert second.is_alive(), "it waits for the first block, although its bytes look available"
    second.join(60)
    assert slots.nbytes == 6 * PAGE
    counted = True
    with pytest.raises(InsufficientRamError, match="for one more block"):
        fill(slots, 3, KEY, PAGE, filled_with(4))
    slots.close()


@pytest.mark.parametrize(
    ("nbytes", "available", "refused"),
    [
        (
            28_100_000_000,
            12_300_000_000,
            "28.1 GB of RAM for 40 blocks, 12.3 GB are available: keep fewer blocks in RAM",
        ),
        (100 * PAGE, 100 * PAGE, None),
        (110 * PAGE, 100 * PAGE, None),
        (110 * PAGE + 1, 100 * PAGE, "0.0 GB of RAM for 40 blocks"),
    ],
)
def test_homes_that_do_not_fit_are_refused_before_they_are_filled(nbytes, available, refused):
    slots = HostPages(lock=None)
    if nbytes < 1_000_000_000:
        fill(slots, 0, KEY, 10 * PAGE, filled_with(1))  # memory in use needs no more RAM
    if refused is None:
        slots.check_available(40, nbytes, available=available)
    else:
        with pytest.raises(InsufficientRamError, match=re.escape(refused)):
            slots.check_available(40, nbytes, available=available)
    slots.close()


def test_a_device_locks_slots_and_shared_blocks_where_they_lie(gpu, tmp_path):
    torch.ones(1, device=gpu.device)
    nbytes = 5 * PAGE + 100
    segment = SharedSegment(
        str(tmp_path), {KEY: nbytes}
    )  # in /dev/shm: a disk file's pages cannot be locked
    slots = HostPages(lock=gpu.runtime, shared=segment)
    shared = fill(slots, 0, KEY, nbytes, filled_with(7))
    own = fill(slots, 1, BlockKey("high", 1), nbytes, filled_with(8), capacity=9 * PAGE)
    for memory, value in ((shared, 7), (own, 8)):
        assert gpu.is_locked(memory)
        assert memory.to(gpu.device, non_blocking=True).eq(value).all()
    assert slots.locked.nbytes == nbytes + 9 * PAGE
    slots.drop(1)
    assert not gpu.is_locked(own)
    slots.close()
    assert not gpu.is_locked(shared)
    assert slots.locked.nbytes == 0
    segment.close()
