"""RAM slots: memory, page-locking, and blocks kept when the residency changes."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from wanstream.offload.core.buffers import BufferState
from wanstream.offload.core.pages import host_bytes, in_pages
from wanstream.offload.host_memory import ram_slots
from wanstream.offload.host_memory.ram_slots import HostPages, RamSlot, RamSlots
from wanstream.offload.host_memory.shared_segment import SharedSegment
from wanstream.offload.sources.base import InsufficientRamError, SourceError
from wanstream.offload.sources.module import TensorSource
from wanstream.plan.programs import BlockKey, RamResidency
from wanstream.schema import Residency, StateError
from wanstream.tests.support.offload.fixtures import LimitedPageLock, SlowSource

PAGE = in_pages(1)
KEYS = [BlockKey("high", 0), BlockKey("high", 1), BlockKey("high", 2), BlockKey("low", 0)]
SIZES = dict(zip(KEYS, (2 * PAGE, PAGE, 256, 3 * PAGE + 256), strict=True))
"""Whole multiples of 256 bytes, as blocks have."""


def stored_bytes(*keys: BlockKey) -> int:
    return sum(in_pages(SIZES[key]) for key in keys)


LARGEST = stored_bytes(KEYS[3])


def resident(*keys: BlockKey) -> RamResidency:
    blocks = {name: [key.block for key in keys if key.expert == name] for name in ("high", "low")}
    residents = {name: frozenset(each) for name, each in blocks.items()}
    return RamResidency(residency=Residency(residents=residents, permanent=True), slots=len(keys))


@pytest.fixture
def source() -> SlowSource:
    """Blocks filled with 1, 2, 3 and 4."""
    memory = {key: torch.full((SIZES[key],), KEYS.index(key) + 1).byte() for key in KEYS}
    blocks = {key: {"weight": values} for key, values in memory.items()}
    return SlowSource(TensorSource(blocks), seed=0, longest_s=0.0)


@pytest.fixture
def driver():
    return LimitedPageLock()


@pytest.fixture
def slots(driver) -> RamSlots:
    return RamSlots(SIZES, lock=driver)


def read(slots: RamSlots, source: SlowSource, index: int, key: BlockKey) -> RamSlot:
    """Read a block into a slot, take it for a fetch and release it."""
    slot = slots[index]
    slots.read(slot, key, source)
    slot.acquire(key)
    slot.release(last=True)
    assert set(host_bytes(slot.memory)) == {KEYS.index(key) + 1}
    return slot


def test_a_passing_slot_has_the_size_of_the_largest_block(slots, source, driver):
    slots.resize(resident(KEYS[1], KEYS[2]), 2)
    assert (len(slots), slots.nbytes, driver.locked) == (4, 0, [])
    read(slots, source, 0, KEYS[1])
    read(slots, source, 1, KEYS[2])
    assert slots.nbytes == stored_bytes(KEYS[1], KEYS[2])
    passing = read(slots, source, 2, KEYS[2])
    assert slots.nbytes == stored_bytes(KEYS[1], KEYS[2]) + LARGEST
    address = passing.memory.data_ptr()
    assert read(slots, source, 2, KEYS[3]).memory.data_ptr() == address, "memory is taken once"
    assert slots.locked_bytes == sum(nbytes for _, nbytes in driver.locked)
    assert len(driver.locked) == 3
    slots.close()
    assert (slots.nbytes, slots.locked_bytes, driver.locked, slots.contents()) == (0, 0, [], {})


def test_every_slot_in_use_needs_room(driver):
    slots = RamSlots(dict.fromkeys(KEYS, 1 << 47), lock=driver)
    words = rf"{3 * (1 << 47) / 1e9:.1f} GB of RAM for 3 blocks, .* are available: keep fewer"
    for freed in (0, 1 << 47):
        with pytest.raises(SourceError, match=words):
            slots.check_available(resident(KEYS[0]), 2, freed=freed)
    slots.check_available(resident(KEYS[0]), 2, freed=3 * (1 << 47))


def test_common_blocks_are_not_read_again(slots, source):
    slots.resize(resident(KEYS[0], KEYS[1], KEYS[3]), 1)
    for index, key in enumerate((KEYS[0], KEYS[1], KEYS[3])):
        read(slots, source, index, key)
    read(slots, source, 3, KEYS[2])
    kept = slots[2].memory.data_ptr()
    slots.resize(resident(KEYS[3], KEYS[2]), 1)
    assert slots.contents() == {0: KEYS[3], 1: KEYS[2], 2: KEYS[0]}
    assert slots[0].memory.data_ptr() == kept
    assert set(host_bytes(slots[0].memory)) == {4}
    assert slots.nbytes == stored_bytes(KEYS[3], KEYS[2], KEYS[0])
    slots.resize(resident(), 0)
    assert (len(slots), slots.nbytes) == (0, 0)
    assert len(source.reads) == 4


def test_passing_slots_keep_their_memory(slots, source, driver):
    slots.resize(resident(KEYS[0]), 2)
    read(slots, source, 0, KEYS[0])
    address = read(slots, source, 1, KEYS[1]).memory.data_ptr()
    read(slots, source, 2, KEYS[3])
    slots.resize(resident(), 2)
    assert slots.contents() == {0: KEYS[1], 1: KEYS[3]}
    assert slots[0].memory.data_ptr() == address
    assert slots.nbytes == 2 * LARGEST
    assert len(driver.locked) == 2
    slots.resize(resident(*KEYS), 2)
    assert list(slots.contents().values()) == [KEYS[3]]
    assert slots.nbytes == LARGEST, "nothing passes through, so no slot keeps memory for it"


def test_a_slot_is_refilled_when_its_copy_has_drained(slots, source):
    scaled = []
    source.scales = scaled.append
    slots.resize(resident(), 1)
    slot = read(slots, source, 0, KEYS[0])
    waited = []
    assert scaled == [KEYS[0]], "scales come with the block, not when it is fetched"
    slot.drained = lambda: waited.append(bytes(host_bytes(slot.memory)[:1]))
    read(slots, source, 0, KEYS[1])
    assert waited == [b"\x01"], "the copy was waited for once, before its bytes were overwritten"
    read(slots, source, 0, KEYS[2])
    assert len(waited) == 1


def test_a_read_that_fails_leaves_an_empty_slot(slots, source):
    slots.resize(resident(KEYS[0]), 0)
    source.fail_at = 0
    with pytest.raises(SourceError, match="went away"):
        slots.read(slots[0], KEYS[0], source)
    assert slots[0].state is BufferState.FILLING
    slots.end_run()
    assert (slots[0].state, slots.contents()) == (BufferState.EMPTY, {})
    with pytest.raises(StateError, match="slot 0 is empty with None: acquire needs it to be"):
        slots[0].acquire(KEYS[0])
    source.fail_at = None
    read(slots, source, 0, KEYS[0])
    assert slots.contents() == {0: KEYS[0]}


@pytest.mark.parametrize(
    ("wanted", "staging", "nbytes"),
    [
        (resident(KEYS[0], KEYS[2]), 0, stored_bytes(KEYS[0], KEYS[2])),
        (resident(KEYS[0], KEYS[2]), 2, stored_bytes(KEYS[0], KEYS[2]) + 2 * LARGEST),
        (resident(*KEYS), 2, stored_bytes(*KEYS)),
    ],
    ids=["kept", "kept and passing", "nothing passes"],
)
def test_bytes_for_slots(slots, wanted, staging, nbytes):
    assert slots.bytes_for(wanted, staging) == nbytes
    slots.check_available(wanted, staging)


def test_only_resident_blocks_are_shared(source, tmp_path):
    segment = SharedSegment("model", {key: SIZES[key] for key in KEYS[:2]}, folder=tmp_path)
    with segment.reserve(KEYS[0]) as reservation:  # by another rank
        reservation.view.fill_(1)
    slots = RamSlots(SIZES, lock=None, shared=segment)
    slots.resize(resident(KEYS[0]), 1)
    read(slots, source, 0, KEYS[0])
    assert source.reads == [], "another rank has read it"
    filled = segment.filled_bytes
    read(slots, source, 1, KEYS[1])
    assert segment.filled_bytes == filled, "a block that passes through is not shared"
    read(slots, source, 1, KEYS[3])
    slots.resize(resident(KEYS[0], KEYS[3]), 0)
    assert slots.contents() == {0: KEYS[0], 1: KEYS[3]}
    pages = HostPages(lock=None, shared=segment)
    pages.check_available(2, segment.filled_bytes, available=0)  # it needs no more RAM
    shared = fill(pages, 0, SIZES[KEYS[0]])
    own = fill(pages, 0, SIZES[KEYS[0]], filled_with(7), key=KEYS[2])
    assert (set(host_bytes(shared)), set(host_bytes(own))) == ({1}, {7})
    pages.close()
    slots.close()
    assert slots.nbytes == 0
    segment.close()


def filled_with(value: int) -> Callable[[torch.Tensor], object]:
    return lambda memory: memory.fill_(value)


def fill(pages: HostPages, slot: int, nbytes: int, read=None, key=KEYS[0], capacity=0):
    """Reserve a slot, read into it unless another rank has, and lock it."""
    with pages.reserve(slot, key, nbytes, capacity=capacity) as reservation:
        if reservation.needs_fill:
            (read or filled_with(slot + 1))(reservation.view)
    pages.lock(slot, nbytes)
    return reservation.memory


def resident_bytes(address: int, nbytes: int) -> int | None:
    """Bytes at `address` with a page. None if they are not mapped."""
    present = (ctypes.c_ubyte * (nbytes // PAGE))()
    failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), present)
    return None if failed else sum(each & 1 for each in present) * PAGE


def test_a_slot_takes_the_pages_of_its_block_and_returns_them(driver):
    pages = HostPages(lock=driver)
    assert (pages.nbytes, pages.locked.nbytes) == (0, 0)
    first = fill(pages, 0, PAGE + 1)
    second = fill(pages, 1, 10)
    assert (first.shape, first.dtype) == ((PAGE + 1,), torch.uint8)
    assert (int(first.min()), int(second.max())) == (1, 2)
    assert {first.data_ptr() % PAGE, second.data_ptr() % PAGE} == {0}
    assert (pages.nbytes, pages.locked.nbytes) == (3 * PAGE, PAGE + 11)
    assert driver.locked == [(first.data_ptr(), PAGE + 1), (second.data_ptr(), 10)]
    address = first.data_ptr()
    del first
    for slot in (0, 0, 7):
        pages.drop(slot)
    if sys.platform == "linux":
        assert resident_bytes(address, 2 * PAGE) is None
    assert (pages.nbytes, driver.locked) == (PAGE, [(second.data_ptr(), 10)])
    for _ in range(2):
        pages.close()
    assert (pages.nbytes, pages.locked.nbytes, driver.locked) == (0, 0, [])
    assert fill(pages, 1, 10).eq(2).all(), "a closed slot can be filled again"
    assert fill(pages, 1, 2 * PAGE).eq(2).sum() == 2 * PAGE, "and with a larger block"


def test_pages_are_filled_before_they_are_locked():
    locked: list[tuple[bool, int | None]] = []

    class Looking(LimitedPageLock):
        def lock_pages(self, memory: torch.Tensor) -> None:
            linux = sys.platform == "linux"
            touched = resident_bytes(memory.data_ptr(), 8 * PAGE) if linux else 8 * PAGE
            locked.append((bool(memory[:PAGE].eq(1).all()), touched))
            super().lock_pages(memory)

    pages = HostPages(lock=Looking())
    fill(pages, 0, PAGE, capacity=8 * PAGE)
    assert locked == [(True, 8 * PAGE)]
    pages.close()


def test_an_unlocked_slot_is_locked_when_there_is_room(caplog):
    pages = HostPages(lock=LimitedPageLock(limit=1))
    for slot in range(3):
        assert fill(pages, slot, PAGE).eq(slot + 1).all()
    assert len(caplog.records) == 1
    pages.drop(0)
    fill(pages, 1, PAGE)
    assert pages.locked.nbytes == PAGE
    pages.close()


def test_blocks_in_flight_count_until_their_pages_are_there(monkeypatch):
    """The system counts untouched pages as available."""
    monkeypatch.setattr(ram_slots, "available_bytes", lambda: 4 * PAGE - pages.nbytes * counted)
    pages = HostPages(lock=None)
    counted = False
    with pages.reserve(0, KEYS[0], 3 * PAGE):
        given = ((pages, 1, 2 * PAGE), (pages, 2, PAGE))
        second, third = (threading.Thread(target=fill, args=each) for each in given)
        second.start()
        third.start()
        third.join(60)
        second.join(0.02)
        assert second.is_alive(), "it waits for the first block, although its bytes look available"
    second.join(60)
    assert pages.nbytes == 6 * PAGE
    counted = True
    with pytest.raises(InsufficientRamError, match="for one more block"):
        fill(pages, 3, PAGE)
    pages.close()


@pytest.mark.parametrize(
    ("own", "nbytes", "available", "words"),
    [
        (0, 28_100_000_000, 12_300_000_000, "28.1 GB of RAM for 40 blocks, 12.3 GB are available"),
        (10 * PAGE, 110 * PAGE, 100 * PAGE, None),
        (10 * PAGE, 110 * PAGE + 1, 100 * PAGE, "0.0 GB of RAM for 40 blocks"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(own, nbytes, available, words):
    """Memory in use needs no more RAM."""
    pages = HostPages(lock=None)
    fill(pages, 0, own)
    refused = pytest.raises(InsufficientRamError, match=words) if words else nullcontext()
    with refused:
        pages.check_available(40, nbytes, available=available)
    pages.close()


def test_a_device_locks_private_and_shared_slots(gpu, tmp_path):
    torch.ones(1, device=gpu.device)
    nbytes = 5 * PAGE + 100
    # In /dev/shm: a disk file's pages cannot be locked.
    segment = SharedSegment(str(tmp_path), {KEYS[0]: nbytes})
    pages = HostPages(lock=gpu.runtime, shared=segment)
    shared = fill(pages, 0, nbytes)
    own = fill(pages, 1, nbytes, key=KEYS[1], capacity=9 * PAGE)
    for memory, value in ((shared, 1), (own, 2)):
        assert gpu.is_locked(memory)
        assert memory.to(gpu.device, non_blocking=True).eq(value).all()
    assert pages.locked.nbytes == nbytes + 9 * PAGE
    pages.drop(1)
    assert not gpu.is_locked(own)
    pages.close()
    assert not gpu.is_locked(shared)
    assert pages.locked.nbytes == 0
    segment.close()
