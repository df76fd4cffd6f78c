"""RAM slots: RAM-resident blocks, and staging slots for others on the way from file to buffer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager

import torch

from ...devices import NvtxRanges
from ...devices.machine import available_bytes
from ...plan.programs import BlockKey, BufferSizes, RamResidency
from ...schema import Residency
from ...telemetry import ReadSpan
from ..core.buffers import BlockStorage, BufferState, contents
from ..core.pages import HostBlock, PageLock, in_pages, map_memory
from ..sources.base import BlockSource, InsufficientRamError, timed_read
from ..transfers.patches import SlotPatch, StagedPatch
from .base import Reservation, SlotMemory
from .in_place import InPlaceBlocks
from .shared_segment import SharedSegment

REMEDY = (
    "keep fewer blocks in RAM, stream from the file instead, or close other programs that use RAM"
)


class HostPages(SlotMemory):
    """Slot memory in RAM, locked in place: pages of this process, or places in a shared segment.

    A slot has exactly the memory for the block, from the first `reserve` until `drop` or `close`.

    Args:
        lock: see `SlotMemory`.
        shared: memory shared by the ranks on one machine. If a block has a place there, one rank
            reads it, and the other ranks find it filled. Blocks without a place get pages of this
            process.
    """

    def __init__(self, *, lock: PageLock | None, shared: SharedSegment | None = None) -> None:
        super().__init__(lock)
        self._pages: dict[Hashable, torch.Tensor] = {}
        self._shared = shared
        self._in_segment: set[Hashable] = set()
        """Slots whose memory is in the shared segment."""
        self._filling: dict[Hashable, int] = {}
        """New memory to fill in bytes, by slot. The system counts the untouched pages as
        available."""
        self._filled = threading.Condition()

    @property
    def nbytes(self) -> int:
        # A list, because other threads read this while read threads reserve.
        return sum(in_pages(memory.numel()) for memory in list(self._pages.values()))

    def check_available(self, blocks: int, nbytes: int, *, available: int) -> None:
        own = self.nbytes
        if self._shared is not None:
            own = max(own, self._shared.filled_bytes)
        usable = available + own
        if nbytes > usable:
            raise InsufficientRamError(
                f"{nbytes / 1e9:.1f} GB of RAM for {blocks} blocks, {usable / 1e9:.1f} GB are "
                f"available: {REMEDY}"
            )

    @contextmanager
    def reserve(
        self, slot: Hashable, key: BlockKey, nbytes: int, *, capacity: int = 0
    ) -> Iterator[Reservation]:
        if self._shared is not None and key in self._shared:
            with self._shared.reserve(key) as reservation:
                memory = reservation.memory
                assert memory.numel() == nbytes, (
                    f"{key} has {memory.numel()} shared bytes, not {nbytes}"
                )
                yield reservation
            old = self._pages.get(slot)
            if old is None or old.data_ptr() != memory.data_ptr():
                self.drop(slot)
                self._pages[slot] = memory
                self._in_segment.add(slot)
        else:
            try:
                memory = self._private(slot, max(nbytes, capacity))
                yield Reservation(memory=memory[:nbytes], view=memory[:nbytes], needs_fill=True)
            finally:
                self._end_filling(slot)

    def lock(self, slot: Hashable, filled: int) -> bool:
        # After the read: the driver would fault in untouched pages one by one.
        return self.locked.add(self._pages[slot], filled=filled)

    def drop(self, slot: Hashable) -> None:
        memory = self._pages.pop(slot, None)
        self._in_segment.discard(slot)
        if memory is not None:
            self.locked.remove(memory)

    def release_shared(self) -> None:
        if self._shared is not None and not self._pages:
            self._shared.release()

    def close(self) -> None:
        for slot in list(self._pages):
            self.drop(slot)

    def _private(self, slot: Hashable, nbytes: int) -> torch.Tensor:
        old = self._pages.get(slot)
        if old is None or slot in self._in_segment or old.numel() < nbytes:
            self.drop(slot)  # before the new memory is mapped: there may not be enough RAM for both
            del old  # this name would keep the memory mapped
            self._begin_filling(slot, nbytes)
            self._pages[slot] = _map(nbytes)
        return self._pages[slot]

    def _begin_filling(self, slot: Hashable, nbytes: int) -> None:
        """Wait until slots filled by other threads leave `nbytes` of RAM.

        Raises InsufficientRamError if none do.
        """
        with self._filled:
            while nbytes + sum(self._filling.values()) > (available := available_bytes()):
                if not self._filling:
                    raise InsufficientRamError(
                        f"{nbytes / 1e9:.1f} GB of RAM for one more block, {available / 1e9:.1f} "
                        f"GB are available: {REMEDY}"
                    )
                self._filled.wait()
            self._filling[slot] = nbytes

    def _end_filling(self, slot: Hashable) -> None:
        with self._filled:
            self._filling.pop(slot, None)
            self._filled.notify_all()


class RamSlot(BlockStorage):
    """One slot.

    `begin_fill`: a read starts. `issued`: the read has ended. `acquire`: a fetch copies from the
    slot.

    Attributes:
        memory: stored block bytes. None before the first read.
        capacity: size of the largest block for this slot, in bytes.
        drained: waits for the last copy from the slot. None if no copy is in progress.
        patch: patch in the block bytes.
    """

    word = "slot"

    def __init__(self, capacity: int = 0) -> None:
        super().__init__(0)
        self.memory: HostBlock | None = None
        self.capacity = capacity
        self.drained: Callable[[], object] | None = None
        self.patch = SlotPatch()

    def end_run(self) -> None:
        """End the run. A finished read has left a complete block, even if no fetch has taken it."""
        # The base class would empty a buffer in this state.
        if self.state is BufferState.ISSUED:
            self.state = BufferState.DONE
        super().end_run()
        if self.patch.is_partial and self.state is BufferState.DONE:
            self.invalidate()


FLIGHT_BYTES = 256 * 1024**2
"""Bytes to read while a block is page-locked: 8 MB for each of a source's 32 threads."""

MOST_IN_FLIGHT = 8


def blocks_in_flight(block_bytes: int) -> int:
    """Return the number of blocks to read and page-lock at the same time.

    At least two: one is locked while the other is read. More if a small block does not have a piece
    for each source thread. A cancelled run waits for each thread's piece, and for page locks on
    blocks already read.
    """
    return min(MOST_IN_FLIGHT, 1 + -(-FLIGHT_BYTES // max(block_bytes, 1)))


class RamSlots:
    """Slots for one engine.

    The first ones belong to RAM-resident blocks, the others are staging slots.

    The first read into a slot allocates memory: the exact size for a RAM-resident block, and for a
    staging slot the largest size among all other blocks.

    Args:
        sizes: stored bytes per block.
        lock: driver that page-locks slots, so a device can copy from them asynchronously. None for
            a CPU.
        shared: memory for RAM-resident blocks, shared by the ranks on one machine.
        on_device: memory for RAM-resident blocks on the device itself, instead.
        in_place: blocks copied from source memory. Their slots have no memory.
        keeps_patches: blocks whose patched bytes replace the stored ones while they are resident,
            if they are not copied in place.
    """

    def __init__(
        self,
        sizes: Mapping[BlockKey, int],
        *,
        lock: PageLock | None,
        shared: SharedSegment | None = None,
        on_device: SlotMemory | None = None,
        in_place: InPlaceBlocks | None = None,
        keeps_patches: Collection[BlockKey] = (),
    ) -> None:
        self._keeps_patches = frozenset(keeps_patches) - frozenset(in_place or ())
        self._in_place = in_place
        self._sizes = dict(sizes)
        if in_place is not None:
            self._sizes |= dict.fromkeys(in_place, 0)
        self._largest = max(self._sizes.values())
        self._staging: SlotMemory = HostPages(lock=lock)
        self._resident = on_device or self._staging
        if shared is not None:
            self._resident = HostPages(lock=lock, shared=shared)
        self._residents = RamResidency(residency=Residency(residents={}, permanent=True), slots=0)
        self._slots: tuple[RamSlot, ...] = ()

    def __getitem__(self, index: int) -> RamSlot:
        return self._slots[index]

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        """RAM in use in bytes, including blocks shared with other ranks."""
        return sum(memory.nbytes for memory in self._memories())

    @property
    def device_bytes(self) -> int:
        """Device memory in use, in bytes."""
        return self._resident.device_bytes

    @property
    def locked_bytes(self) -> int:
        """Page-locked RAM in bytes."""
        locked = sum(memory.locked.nbytes for memory in self._memories())
        if self._in_place is not None:
            locked += self._in_place.locked.nbytes
        return locked

    @property
    def in_flight(self) -> int:
        """Blocks to read at the same time. 1 if they pass through one host buffer to the device."""
        if isinstance(self._resident, HostPages):
            return blocks_in_flight(self._largest)
        return 1

    def contents(self) -> dict[int, BlockKey]:
        """See `buffers.contents`."""
        return contents(self._slots)

    @property
    def sizes(self) -> BufferSizes:
        """Sizes for slots and blocks."""
        capacities = tuple(slot.capacity for slot in self._slots)
        return BufferSizes(capacities=capacities, blocks=self._sizes)

    def bytes_for(self, residents: RamResidency, staging: int) -> int:
        """Return the RAM in bytes for these slots if all are in use."""
        resident = sum(map(in_pages, self._resident_sizes(residents).values()))
        return resident + staging * in_pages(self._staged_bytes(residents))

    def check_available(self, residents: RamResidency, staging: int, *, freed: int = 0) -> None:
        """Raise InsufficientRamError, with figures, if RAM for these slots is not available.

        Args:
            freed: bytes of RAM to be released before the slots are filled.
        """
        if needed := self.bytes_for(residents, staging):
            if self._resident is not self._staging:
                freed += self._staging.nbytes
            slots = residents.slots + staging * bool(self._staged_bytes(residents))
            self._resident.check_available(slots, needed, available=available_bytes() + freed)

    def resize(self, residents: RamResidency, staging: int) -> None:
        """Set the number of slots to `residents.slots + staging`.

        Blocks resident before and after keep their slots. Blocks that become resident in a slot of
        their size keep it too.

        No run may be active and no copy from a slot may be in progress.
        """
        sizes = self._resident_sizes(residents)
        kept: dict[BlockKey, RamSlot] = {}
        for index, key in self.contents().items():
            if sizes.get(key) == self._slots[index].capacity:
                kept.setdefault(key, self._slots[index])
        of_residents = list(kept.values())
        others = (slot for slot in self._slots if slot not in of_residents)
        of_residents += (RamSlot(sizes[key]) for key in sizes if key not in kept)
        staged = self._staged_bytes(residents)
        free = [slot for slot in others if slot.capacity == staged > 0][:staging]
        free += (RamSlot(staged) for _ in range(staging - len(free)))
        slots = [*of_residents[: residents.slots], *free]
        for slot in self._slots:
            if slot not in slots:
                self._drop(slot)
        for index, slot in enumerate(slots):
            slot.index = index
        self._slots = tuple(slots)
        self._residents = residents
        if not residents.slots:
            self._resident.release_shared()

    def read(
        self, slot: RamSlot, key: BlockKey, source: BlockSource, ranges: NvtxRanges | None = None
    ) -> ReadSpan | None:
        """Read a block into a free slot and lock it (read thread).

        A block that another rank has read into shared memory is not read again. Waits until the
        last copy from the slot has ended. Returns the measured read. None without a read, as for a
        block copied in place. Several threads may read, each into another slot.

        Raises:
            SourceError: the bytes could not be read, or there is not enough memory for them.
        """
        if slot.drained is not None:
            slot.drained()
            slot.drained = None
        slot.begin_fill(key)
        slot.patch = SlotPatch()
        if self._in_place is not None and key in self._in_place:
            slot.memory = self._in_place.take(key)
            slot.issued()
            return None
        nbytes = self._sizes[key]
        memory = self._staging
        unused = self._resident
        if slot.index < self._residents.slots:
            memory, unused = unused, memory
        if unused is not memory:
            unused.drop(slot)  # the slot may have been of the other kind before `resize`
        span = None
        with memory.reserve(slot, key, nbytes, capacity=slot.capacity) as reservation:
            if reservation.needs_fill:
                span = timed_read(source, key, reservation.view, ranges)
        locked_from = time.perf_counter()
        if memory.lock(slot, nbytes) and span is not None:
            span = span._replace(locked=(locked_from, time.perf_counter()))
        slot.memory = reservation.memory
        source.scales(key)  # read here, so that the fetch thread finds them in memory
        slot.issued()
        return span

    def keeps_patch(self, slot: RamSlot) -> bool:
        """Return True if patched bytes may replace the stored ones: the block stays in the slot."""
        return slot.index < self._residents.slots and slot.key in self._keeps_patches

    def drop_patched(self, patches: Collection[StagedPatch]) -> None:
        """Discard blocks whose bytes have a patch other than these. No run may be active."""
        for slot in self._slots:
            if slot.patch.patch is not None and slot.patch.patch not in patches:
                slot.invalidate()
                slot.patch = SlotPatch()

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

    def _resident_sizes(self, residents: RamResidency) -> dict[BlockKey, int]:
        return {key: size for key, size in self._sizes.items() if residents.residency.keeps(*key)}

    def _staged_bytes(self, residents: RamResidency) -> int:
        """Return the size of a staging slot: the largest block that is not RAM-resident, or 0."""
        sizes = self._sizes.items()
        return max((size for key, size in sizes if not residents.residency.keeps(*key)), default=0)

    def _drop(self, slot: RamSlot) -> None:
        slot.memory = slot.drained = None
        for memory in self._memories():
            memory.drop(slot)

    def _memories(self) -> tuple[SlotMemory, ...]:
        # Both may be the same object, and the bytes must count once.
        return tuple(dict.fromkeys((self._staging, self._resident)))


def _map(nbytes: int) -> torch.Tensor:
    try:
        return map_memory(nbytes)
    except OSError as err:
        raise InsufficientRamError(
            f"{nbytes / 1e9:.1f} GB of RAM for a block were refused ({err.strerror}): {REMEDY}"
        ) from err
