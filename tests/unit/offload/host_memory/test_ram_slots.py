"""RAM slots: memory, page-locking, and blocks kept when the residency changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch

from wanstream.offload.core.buffers import BufferState
from wanstream.offload.core.pages import host_bytes, in_pages
from wanstream.offload.formats.layout import block_format
from wanstream.offload.host_memory.base import Reservation
from wanstream.offload.host_memory.ram_slots import RamSlot, RamSlots
from wanstream.offload.sources.base import SourceError
from wanstream.plan.programs import BlockKey, RamResidency
from wanstream.schema import Residency, StateError

PAGE = in_pages(1)
KEYS = [BlockKey("high", 0), BlockKey("high", 1), BlockKey("high", 2), BlockKey("low", 0)]
SIZES = dict(zip(KEYS, (2 * PAGE, PAGE, 5, 3 * PAGE + 1), strict=True))


class Numbers:
    """Source with numbered blocks and recorded reads."""

    def __init__(self) -> None:
        self.formats = {
            key: block_format({"weight": ((SIZES[key],), torch.uint8)}, torch.uint8) for key in KEYS
        }
        self.reads: list[BlockKey] = []
        self.scaled: list[BlockKey] = []
        self.broken = False

    def scales(self, key: BlockKey) -> Mapping[str, torch.Tensor]:
        self.scaled.append(key)
        return {}

    def file_bytes(self, key: BlockKey) -> int:
        return SIZES[key]

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        host_bytes(into)[:] = KEYS.index(key) + 1
        if self.broken:
            raise SourceError("the disk went away")
        self.reads.append(key)

    def close(self) -> None: ...


def stored_bytes(*keys: BlockKey) -> int:
    return sum(in_pages(Numbers().formats[key].stored.nbytes) for key in keys)


LARGEST = stored_bytes(KEYS[3])


def resident(*keys: BlockKey) -> RamResidency:
    residents = {
        name: frozenset(key.block for key in keys if key.expert == name) for name in ("high", "low")
    }
    return RamResidency(residency=Residency(residents=residents, permanent=True), slots=len(keys))


@pytest.fixture
def source() -> Numbers:
    return Numbers()


@pytest.fixture
def driver(limited_page_lock):
    return limited_page_lock()


@pytest.fixture
def slots(source: Numbers, driver) -> RamSlots:
    return RamSlots({key: source.formats[key].stored.nbytes for key in KEYS}, lock=driver)


def read(slots: RamSlots, source: Numbers, index: int, key: BlockKey) -> RamSlot:
    """Read a block into a slot, take it for a fetch and release it."""
    slot = slots[index]
    slots.read(slot, key, source)
    slot.acquire(key)
    slot.release(last=True)
    assert slot.memory is not None
    assert set(host_bytes(slot.memory)) == {KEYS.index(key) + 1}
    return slot


def test_a_home_takes_its_own_size_and_a_place_to_pass_through_the_largest(slots, source, driver):
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


@pytest.mark.parametrize(
    ("wanted", "staging", "blocks"), [(resident(), 2, 2), (resident(KEYS[0]), 2, 3)]
)
def test_room_is_asked_for_every_slot_that_is_used(driver, wanted, staging, blocks):
    slots = RamSlots(dict.fromkeys(KEYS, 1 << 47), lock=driver)
    error = (
        rf"{blocks * (1 << 47) / 1e9:.1f} GB of RAM for {blocks} blocks, .* are available: keep "
        r"fewer blocks in RAM,"
    )
    with pytest.raises(SourceError, match=error):
        slots.check_available(wanted, staging)
    with pytest.raises(SourceError, match=error):
        slots.check_available(wanted, staging, freed=1 << 47)
    slots.check_available(wanted, staging, freed=blocks * (1 << 47))


def test_homes_that_stay_are_not_read_again(slots, source):
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


def test_what_passes_through_keeps_its_memory_when_homes_change(slots, source, driver):
    slots.resize(resident(KEYS[0]), 2)
    read(slots, source, 0, KEYS[0])
    address = read(slots, source, 1, KEYS[1]).memory.data_ptr()
    read(slots, source, 2, KEYS[3])
    slots.resize(resident(), 2)
    assert slots.contents() == {0: KEYS[1], 1: KEYS[3]}
    assert slots[0].memory.data_ptr() == address
    assert slots.nbytes == 2 * LARGEST
    assert len(driver.locked) == 2


def test_where_nothing_passes_through_no_slot_keeps_memory_for_it(slots, source):
    slots.resize(resident(KEYS[0]), 2)
    for index in range(3):
        read(slots, source, index, KEYS[0])
    slots.resize(resident(*KEYS), 2)
    assert slots.contents() == {0: KEYS[0]}
    assert slots.nbytes == stored_bytes(KEYS[0])


def test_a_slot_is_refilled_when_its_copy_has_drained(slots, source):
    slots.resize(resident(), 1)
    slot, waited = read(slots, source, 0, KEYS[0]), []
    slot.drained = lambda: waited.append(bytes(host_bytes(slot.memory)[:1]))
    read(slots, source, 0, KEYS[1])
    assert waited == [b"\x01"], "the copy was waited for once, before its bytes were overwritten"
    read(slots, source, 0, KEYS[2])
    assert len(waited) == 1


def test_a_read_that_fails_leaves_an_empty_slot(slots, source):
    slots.resize(resident(KEYS[0]), 0)
    source.broken = True
    with pytest.raises(SourceError, match="went away"):
        slots.read(slots[0], KEYS[0], source)
    assert slots[0].state is BufferState.FILLING
    slots.end_run()
    assert (slots[0].state, slots.contents()) == (BufferState.EMPTY, {})
    source.broken = False
    read(slots, source, 0, KEYS[0])
    assert slots.contents() == {0: KEYS[0]}


def test_what_was_read_and_not_asked_for_is_whole(slots, source):
    slots.resize(resident(), 2)
    slots.read(slots[0], KEYS[1], source)
    slots.read(slots[1], KEYS[2], source)
    slots[1].acquire(KEYS[2])
    slots.end_run()
    assert slots.contents() == {0: KEYS[1], 1: KEYS[2]}
    assert source.scaled == KEYS[1:3], "scales come with the block, not when it is fetched"


def test_a_slot_says_its_name_when_it_is_used_out_of_order(slots):
    slots.resize(resident(), 1)
    with pytest.raises(
        StateError, match="slot 0 is empty with None: acquire needs it to be issued or idle"
    ):
        slots[0].acquire(KEYS[0])


@pytest.mark.parametrize(
    ("wanted", "staging", "nbytes"),
    [
        (resident(KEYS[0], KEYS[2]), 0, stored_bytes(KEYS[0], KEYS[2])),
        (resident(KEYS[0], KEYS[2]), 2, stored_bytes(KEYS[0], KEYS[2]) + 2 * LARGEST),
        (resident(*KEYS), 2, stored_bytes(*KEYS)),
    ],
    ids=["kept", "kept and passing", "nothing passes"],
)
def test_how_much_room_slots_will_take(slots, wanted, staging, nbytes):
    assert slots.bytes_for(wanted, staging) == nbytes
    slots.check_available(wanted, staging)


class Segment:
    """Fake shared segment. Another rank has filled the high-noise expert's block 0."""

    def __init__(self) -> None:
        self.blocks = {KEYS[0]: torch.full((SIZES[KEYS[0]],), 1, dtype=torch.uint8)}

    filled_bytes = 0

    def __contains__(self, key: BlockKey) -> bool:
        return key in (KEYS[0], KEYS[1])

    @contextmanager
    def reserve(self, key: BlockKey) -> Iterator[Reservation]:
        needs_fill = key not in self.blocks
        if needs_fill:
            self.blocks[key] = torch.zeros(Numbers().formats[key].stored.nbytes, dtype=torch.uint8)
        yield Reservation(memory=self.blocks[key], view=self.blocks[key], needs_fill=needs_fill)


def test_only_homes_that_are_kept_are_shared(source):
    segment = Segment()
    slots = RamSlots(
        {key: source.formats[key].stored.nbytes for key in KEYS}, lock=None, shared=segment
    )
    slots.resize(resident(KEYS[0]), 1)
    assert read(slots, source, 0, KEYS[0]).memory.data_ptr() == segment.blocks[KEYS[0]].data_ptr()
    assert source.reads == [], "another rank has read it"
    read(slots, source, 1, KEYS[3])
    assert list(segment.blocks) == [KEYS[0]]
    slots.resize(resident(KEYS[0], KEYS[3]), 0)
    assert slots.contents() == {0: KEYS[0], 1: KEYS[3]}
    slots.close()
    assert slots.nbytes == 0
