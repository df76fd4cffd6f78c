"""RAM slots: RAM-resident blocks, and staging slots for other blocks on the way from a file to a buffer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...devices import NvtxRanges, available_bytes
from ...plan import BlockKey, RamResidency
from ...schema import Residency
from ...telemetry import ReadSpan
from ..engine.buffers import BlockStorage, BufferState
from ..sources.base import BlockSource, InsufficientRamError, timed_read
from .base import Reservation, SlotMemory
from .in_place import InPlaceBlocks
from .pages import HostBlock, PageLock, in_pages, map_memory
from .shared_segment import SharedSegment

REMEDY = "keep fewer blocks in RAM, stream from the file instead, or close other programs that use RAM"


@dataclass(frozen=True, kw_only=True)
class _Pages:
    memory: torch.Tensor
    shared: bool


class HostPages(SlotMemory):
    """Slot memory in RAM, page-locked in place: pages of this process, or places in a shared segment.

    A slot has exactly the memory for the block, from the first `reserve` until `drop` or `close`.

    Args:
        lock: see `SlotMemory`.
        shared: memory shared by the ranks on one machine. If a block has a place there, one rank reads it, and the
            other ranks find it filled. Blocks without a place get pages of this process.
    """

    def __init__(self, *, lock: PageLock | None, shared: SharedSegment | None = None) -> None:
        super().__init__(lock)
        self._pages: dict[Hashable, _Pages] = {}
        self._shared = shared
        self._filling: dict[Hashable, int] = {}
        """Bytes of new memory to fill, by slot. The system counts the untouched pages as available."""
        self._filled = threading.Condition()

    @property
    def nbytes(self) -> int:
        # A list, because other threads read this while the read thread reserves.
        return sum(in_pages(pages.memory.numel()) for pages in list(self._pages.values()))

    def check_available(self, blocks: int, nbytes: int, *, available: int) -> None:
        usable = available + (self.nbytes if self._shared is None else max(self.nbytes, self._shared.filled_bytes))
        if nbytes > usable:
            raise InsufficientRamError(
                f"{nbytes / 1e9:.1f} GB of RAM for {blocks} blocks, {usable / 1e9:.1f} GB are available: {REMEDY}"
            )

    @contextmanager
    def reserve(self, slot: Hashable, key: BlockKey, nbytes: int, *, capacity: int = 0) -> Iterator[Reservation]:
        if self._shared is not None and key in self._shared:
            with self._shared.reserve(key) as reservation:
                memory = reservation.memory
                assert memory.numel() == nbytes, f"{key} has {memory.numel()} shared bytes, not {nbytes}"
                yield reservation
            self._replace(slot, _Pages(memory=memory, shared=True))
        else:
            memory = self._private(slot, max(nbytes, capacity))
            try:
                yield Reservation(memory=memory[:nbytes], view=memory[:nbytes], needs_fill=True)
            finally:
                self._end_filling(slot)

    def lock(self, slot: Hashable, filled: int) -> bool:
        # After the read: the driver would fault in untouched pages one by one.
        return self._locked is not None and self._locked.add(self._pages[slot].memory, filled=filled)

    def drop(self, slot: Hashable) -> None:
        pages = self._pages.pop(slot, None)
        if pages is not None and self._locked is not None:
            self._locked.remove(pages.memory)

    def release_shared(self) -> None:
        if self._shared is not None and not self._pages:
            self._shared.release()

    def close(self) -> None:
        for slot in list(self._pages):
            self.drop(slot)

    def _replace(self, slot: Hashable, new: _Pages) -> None:
        old = self._pages.get(slot)
        if old is None or old.memory.data_ptr() != new.memory.data_ptr():
            self.drop(slot)
            self._pages[slot] = new

    def _private(self, slot: Hashable, nbytes: int) -> torch.Tensor:
        old = self._pages.get(slot)
        if old is None or old.shared or old.memory.numel() < nbytes:
            self.drop(slot)  # before the new memory is mapped: there may not be enough RAM for both
            del old
            self._begin_filling(slot, nbytes)
            try:
                self._pages[slot] = _Pages(memory=_map(nbytes), shared=False)
            except BaseException:
                self._end_filling(slot)
                raise
        return self._pages[slot].memory

    def _begin_filling(self, slot: Hashable, nbytes: int) -> None:
        """Wait until the slots filled by other threads leave `nbytes` of RAM. Raise InsufficientRamError if none do."""
        with self._filled:
            while nbytes + sum(self._filling.values()) > (available := available_bytes()):
                if not self._filling:
                    raise InsufficientRamError(
                        f"{nbytes / 1e9:.1f} GB of RAM for one more block, {available / 1e9:.1f} GB are available: "
                        f"{REMEDY}"
                    )
                self._filled.wait()
            self._filling[slot] = nbytes

    def _end_filling(self, slot: Hashable) -> None:
        with self._filled:
            self._filling.pop(slot, None)
            self._filled.notify_all()


class RamSlot(BlockStorage):
    """One slot. `begin_fill`: a read starts. `issued`: the read has ended. `acquire`: a fetch copies from the slot.

    Attributes:
        memory: stored block bytes. None before the first read.
        capacity: bytes allocated for blocks that are not copied in place.
        drained: waits for the last copy from the slot. None if no copy is in progress.
    """

    word = "slot"

    def __init__(self) -> None:
        super().__init__(0)
        self.memory: HostBlock | None = None
        self.capacity = 0
        self.drained: Callable[[], object] | None = None

    def end_run(self) -> None:
        """End the run. A finished read has left a complete block, even if no fetch has taken it."""
        if self.state is BufferState.ISSUED:
            self.state = BufferState.DONE
        super().end_run()


FLIGHT_BYTES = 256 * 1024**2
"""Bytes to read while a block is page-locked: 8 MB for each of a source's 32 threads."""

MOST_IN_FLIGHT = 8


def blocks_in_flight(block_bytes: int) -> int:
    """Return the number of blocks to read and page-lock at the same time.

    At least two: one is locked while the other is read. More if a small block does not have a piece for each source
    thread. A cancelled run waits for each thread's piece, and for the locks of blocks already read.
    """
    return min(MOST_IN_FLIGHT, 1 + -(-FLIGHT_BYTES // max(block_bytes, 1)))


class RamSlots:
    """Slots of one engine. The first ones belong to RAM-resident blocks, the others are staging slots.

    Memory is allocated by the first read into a slot: the exact size for a RAM-resident block, the largest block size
    for a staging slot.

    Args:
        sizes: stored bytes of every block.
        lock: driver that page-locks slots, so that a device can copy from them asynchronously. None for a CPU.
        shared: memory for RAM-resident blocks, shared by the ranks on one machine.
        on_device: memory for RAM-resident blocks on the device itself, instead.
        in_place: blocks copied from source memory. Their slots have no memory.
    """

    def __init__(
        self,
        sizes: Mapping[BlockKey, int],
        *,
        lock: PageLock | None,
        shared: SharedSegment | None = None,
        on_device: SlotMemory | None = None,
        in_place: InPlaceBlocks | None = None,
    ) -> None:
        self._in_place = in_place
        self._sizes = {key: 0 if in_place is not None and key in in_place else size for key, size in sizes.items()}
        self._largest = max(self._sizes.values())
        self._staging: SlotMemory = HostPages(lock=lock)
        self._resident: SlotMemory = self._staging if shared is None else HostPages(lock=lock, shared=shared)
        if on_device is not None:
            self._resident = on_device
        self._residents = RamResidency(residency=Residency(residents={}, permanent=True), slots=0)
        self._slots: tuple[RamSlot, ...] = ()

    def __getitem__(self, index: int) -> RamSlot:
        return self._slots[index]

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes of RAM in use, including blocks shared with other ranks."""
        return sum(memory.nbytes for memory in self._memories())

    @property
    def device_bytes(self) -> int:
        """Device memory in use, in bytes."""
        return self._resident.device_bytes

    @property
    def locked_bytes(self) -> int:
        """Page-locked RAM in bytes."""
        in_place = 0 if self._in_place is None else self._in_place.locked_bytes
        return in_place + sum(memory.locked_bytes for memory in self._memories())

    @property
    def in_flight(self) -> int:
        """Number of blocks to read at the same time. 1 if they pass through one host buffer to the device."""
        return blocks_in_flight(self._largest) if isinstance(self._resident, HostPages) else 1

    def contents(self) -> dict[int, BlockKey]:
        """Return the blocks still in the slots after the last run. A new program may keep them."""
        return {s.index: s.key for s in self._slots if s.state is BufferState.DONE and s.key is not None}

    def bytes_for(self, residents: RamResidency, staging: int) -> int:
        """Return the RAM in bytes for these slots if all are in use."""
        sizes = {key: in_pages(nbytes) for key, nbytes in self._sizes.items()}
        resident_bytes = sum(nbytes for key, nbytes in sizes.items() if residents.residency.keeps(*key))
        return resident_bytes + self._staging_slots(residents, staging) * in_pages(self._largest)

    def check_available(self, residents: RamResidency, staging: int, *, freed: int = 0) -> None:
        """Raise InsufficientRamError, with figures, if RAM for these slots is not available.

        Args:
            freed: bytes of RAM to be released before the slots are filled.
        """
        if needed := self.bytes_for(residents, staging):
            if self._resident is not self._staging:
                freed += self._staging.nbytes
            slots = residents.slots + self._staging_slots(residents, staging)
            self._resident.check_available(slots, needed, available=available_bytes() + freed)

    def resize(self, residents: RamResidency, staging: int) -> None:
        """Set the number of slots to `residents.slots + staging`. Blocks resident before and after keep their slots.

        No run may be active and no copy from a slot may be in progress.
        """
        kept: dict[BlockKey, RamSlot] = {}
        for index, key in self.contents().items():
            if residents.residency.keeps(*key):
                kept.setdefault(key, self._slots[index])
        of_residents = list(kept.values())
        free = [slot for slot in self._slots if slot not in of_residents and slot.capacity == self._largest]
        free = free[: self._staging_slots(residents, staging)]
        slots = [*_padded(of_residents, residents.slots), *_padded(free, staging)]
        for slot in self._slots:
            if slot not in slots:
                self._drop(slot)
        for index, slot in enumerate(slots):
            slot.index = index
        self._slots, self._residents = tuple(slots), residents
        if not residents.slots:
            self._resident.release_shared()

    def read(
        self, slot: RamSlot, key: BlockKey, source: BlockSource, ranges: NvtxRanges | None = None
    ) -> ReadSpan | None:
        """Read a block into a free slot, unless another rank has read it into shared memory, and lock it (read thread).

        Waits until the last copy from the slot has ended. Returns the measured read. None without a read, as for a
        block copied in place. Several threads may read, each into another slot.

        Raises:
            SourceError: the bytes could not be read, or there is not enough memory for them.
        """
        if slot.drained is not None:
            slot.drained()
            slot.drained = None
        slot.begin_fill(key)
        if self._in_place is not None and key in self._in_place:
            slot.memory = self._in_place.take(key)
            slot.issued()
            return None
        resident = slot.index < self._residents.slots
        nbytes = self._sizes[key]
        slot.capacity = nbytes if resident else self._largest
        memory, unused = (self._resident, self._staging) if resident else (self._staging, self._resident)
        if unused is not memory:
            unused.drop(slot)  # the slot may have been of the other kind before `resize`
        with memory.reserve(slot, key, nbytes, capacity=slot.capacity) as reservation:
            span = timed_read(source, key, reservation.view, ranges) if reservation.needs_fill else None
        locked_from = time.perf_counter()
        if memory.lock(slot, nbytes) and span is not None:
            span = span._replace(locked=(locked_from, time.perf_counter()))
        slot.memory = reservation.memory
        source.scales(key)  # read here, so that the fetch thread finds them in memory
        slot.issued()
        return span

    def end_run(self) -> None:
        """End the run: no thread uses a slot any more."""
        for slot in self._slots:
            slot.end_run()

    def close(self) -> None:
        """Free all memory. No copy from a slot may be in progress."""
        for slot in self._slots:
            self._drop(slot)
        self._slots = ()
        for memory in self._memories():
            memory.close()
        if self._in_place is not None:
            self._in_place.close()

    def _staging_slots(self, residents: RamResidency, staging: int) -> int:
        """Return the number of staging slots in use: none if every block is resident."""
        return 0 if all(residents.residency.keeps(*key) for key in self._sizes) else staging

    def _drop(self, slot: RamSlot) -> None:
        slot.memory = slot.drained = None
        for memory in self._memories():
            memory.drop(slot)

    def _memories(self) -> tuple[SlotMemory, ...]:
        return (self._staging,) if self._resident is self._staging else (self._staging, self._resident)


def _padded(slots: list[RamSlot], length: int) -> list[RamSlot]:
    """Return `length` slots: the given ones first, then new ones."""
    return slots[:length] + [RamSlot() for _ in range(length - len(slots))]


def _map(nbytes: int) -> torch.Tensor:
    try:
        return map_memory(nbytes)
    except OSError as err:
        raise InsufficientRamError(
            f"{nbytes / 1e9:.1f} GB of RAM for a block were refused ({err.strerror}): {REMEDY}"
        ) from err
