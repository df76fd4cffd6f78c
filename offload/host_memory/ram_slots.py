"""Slots of RAM: homes of blocks, and places through which blocks pass on their way from a file to a buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import count

import torch

from ...devices import available_bytes
from ...plan import BlockKey, RamResidency
from ...schema import Residency
from ...telemetry import ReadSpan, ReadTimer
from ..engine.buffers import BlockPlace, BufferState
from ..sharding.device_slots import DeviceSlots
from ..sources.base import BlockSource
from .host_slots import HostSlots, SlotMemory
from .page_lock import PageLock
from .pages import in_pages
from .shared_segment import SharedSegment


class RamSlot(BlockPlace):
    """One slot. `begin_fill`: a read begins; `issued`: its bytes are there; `acquire`: a fetch takes them.

    `number` is that of its memory, and stays when slots are numbered anew. `drained` waits for the last copy out of it.
    """

    word = "slot"

    def __init__(self, index: int, number: int) -> None:
        super().__init__(index)
        self.number = number
        self.memory: torch.Tensor | None = None
        self.room = 0
        self.drained: Callable[[], object] | None = None

    def end_run(self) -> None:
        """The run is over. A read that has ended left the block whole, whether anybody asked for it or not."""
        if self.state is BufferState.ISSUED:
            self.state = BufferState.DONE
        super().end_run()


class RamSlots:
    """The slots of one engine. Memory is taken when a slot is first read into.

    Args:
        source: where blocks are read from.
        sizes: bytes of every block there is, as the source gives it.
        lock: locks the pages of slots, so that a device copies out of them by itself; None for a CPU.
        shared: memory that the ranks of one machine hold together; it takes the homes that are kept for later runs.
        on_device: memory of the device itself; it takes them instead.
    """

    def __init__(
        self,
        source: BlockSource,
        sizes: Mapping[BlockKey, int],
        *,
        lock: PageLock | None,
        shared: SharedSegment | None = None,
        on_device: DeviceSlots | None = None,
    ) -> None:
        self._source = source
        self._sizes = sizes
        self._largest = max(sizes.values())
        self._passing = HostSlots(lock=lock)
        self._homes_memory: SlotMemory = self._passing if shared is None else HostSlots(lock=lock, shared=shared)
        if on_device is not None:
            self._homes_memory = on_device
        self._numbers = count()
        self._homes = RamResidency(residency=Residency(residents={}, permanent=True), slots=0)
        self._slots: tuple[RamSlot, ...] = ()

    def __getitem__(self, index: int) -> RamSlot:
        return self._slots[index]

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that the slots take now, blocks that ranks share included."""
        return sum(memory.nbytes for memory in self._memories())

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that homes take there."""
        return self._homes_memory.device_bytes

    @property
    def locked_bytes(self) -> int:
        """Those of them that are page-locked."""
        return sum(memory.locked_bytes for memory in self._memories())

    def contents(self) -> dict[int, BlockKey]:
        """What the slots still hold from the run before; a new program may keep it."""
        return {s.index: s.key for s in self._slots if s.state is BufferState.DONE and s.key is not None}

    def bytes_for(self, homes: RamResidency, staging: int) -> int:
        """Bytes of RAM that these slots take when all of them are in use."""
        sizes = {key: in_pages(nbytes) for key, nbytes in self._sizes.items()}
        at_home = sum(nbytes for key, nbytes in sizes.items() if homes.residency.keeps(*key))
        return at_home + self._passing_slots(homes, staging) * in_pages(self._largest)

    def check_room(self, homes: RamResidency, staging: int, *, freed: int = 0) -> None:
        """Raise NoRamError, with numbers, unless there is RAM for these slots; `freed` bytes come on top."""
        if wanted := self.bytes_for(homes, staging):
            if self._homes_memory is not self._passing:
                freed += self._passing.nbytes
            slots = homes.slots + self._passing_slots(homes, staging)
            self._homes_memory.check_room(slots, wanted, available=available_bytes() + freed)

    def resize(self, homes: RamResidency, staging: int) -> None:
        """Have `homes.slots + staging` slots, of which homes that were there before keep theirs.

        No run may go on, and no copy out of a slot may be under way.
        """
        slots = [slot or RamSlot(0, next(self._numbers)) for slot in self._kept(homes, staging)]
        stay = {slot.number for slot in slots}
        for slot in self._slots:
            if slot.number not in stay:
                self._drop(slot)
        for index, slot in enumerate(slots):
            slot.index = index
        self._slots, self._homes = tuple(slots), homes
        if not homes.slots:
            self._homes_memory.rest()

    def fill(self, slot: RamSlot, key: BlockKey, meter: ReadTimer | None = None) -> ReadSpan | None:
        """Read a block into a slot that nobody uses (read thread); waits for the copy that is still to leave it.

        Returns what `meter` measured; None without one, and where another rank has read the block.

        Raises:
            SourceError: the bytes could not be read, or there is no memory for them.
        """
        if slot.drained is not None:
            slot.drained()
            slot.drained = None
        slot.begin_fill(key)
        at_home = slot.index < self._homes.slots
        nbytes = self._sizes[key]
        slot.room = nbytes if at_home else self._largest
        if self._homes_memory is not self._passing:
            (self._passing if at_home else self._homes_memory).drop(slot.number)
        memory = self._homes_memory if at_home else self._passing
        measured: list[ReadSpan | None] = []

        def read(into: torch.Tensor) -> None:
            measured.append(self.read(key, into, meter))

        slot.memory = memory.fill(slot.number, key, nbytes, read, room=slot.room)
        self._source.scales(key)  # here, so that the fetch thread finds them
        slot.issued()
        return measured[0] if measured else None

    def read(
        self,
        key: BlockKey,
        into: torch.Tensor,
        meter: ReadTimer | None = None,
        *,
        straight: bool = False,
    ) -> ReadSpan | None:
        """Read a block into `into`, 1-D uint8 CPU memory of its stored bytes; returns what `meter` measured.

        Raises:
            SourceError: the bytes could not be read.
        """
        read = partial(self._source.read_block, key, into)
        if meter is not None:
            name = f"read {key.expert} {key.block}"
            return meter.measure(read, self._source.file_bytes(key), name=name, straight=straight)
        read()
        return None

    def end_run(self) -> None:
        """No thread of a run uses a slot any more."""
        for slot in self._slots:
            slot.end_run()

    def close(self) -> None:
        """Give all memory back. No copy out of a slot may be under way."""
        for slot in self._slots:
            self._drop(slot)
        self._slots = ()
        for memory in self._memories():
            memory.close()

    def _kept(self, homes: RamResidency, staging: int) -> list[RamSlot | None]:
        """Per slot to be: the one that takes its place, or None. Homes come first, each with a slot of its own."""
        at_home: dict[BlockKey, RamSlot] = {}
        for index, key in self.contents().items():
            if homes.residency.keeps(*key):
                at_home.setdefault(key, self._slots[index])
        theirs: list[RamSlot | None] = list(at_home.values())
        taken = {slot.number for slot in at_home.values()}
        passing: list[RamSlot | None] = [s for s in self._slots if s.number not in taken and s.room == self._largest]
        passing = passing[: self._passing_slots(homes, staging)]
        return _padded(theirs, homes.slots) + _padded(passing, staging)

    def _passing_slots(self, homes: RamResidency, staging: int) -> int:
        """How many of the staging slots are ever used."""
        return 0 if all(homes.residency.keeps(*key) for key in self._sizes) else staging

    def _drop(self, slot: RamSlot) -> None:
        slot.memory = slot.drained = None
        for memory in self._memories():
            memory.drop(slot.number)

    def _memories(self) -> tuple[SlotMemory, ...]:
        if self._homes_memory is self._passing:
            return (self._passing,)
        return (self._passing, self._homes_memory)


def _padded(slots: list[RamSlot | None], length: int) -> list[RamSlot | None]:
    return slots[:length] + [None] * (length - len(slots))
