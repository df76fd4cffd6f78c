"""RAM program execution: read threads fill RAM slots, and the fetch thread copies from them.

Several blocks are in flight: while one is page-locked, the next ones are read. They share the
source threads, which work off one block after the other, so the first block in the program also
arrives first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ...devices import NvtxRanges
from ...plan.programs import DIRECT, IMMEDIATE, KEPT, BlockKey, Fetch, RamProgram
from ...telemetry import ReadSpan
from ..core.threads import RunStopped, RunThread, ThreadSync
from ..sources.base import BlockSource, reads_until, timed_read
from .ram_slots import RamSlot, RamSlots


class RamRun:
    """Starts the reads in a RAM program in order. The fetch thread takes and releases slots.

    Args:
        slots: slots to read into.
        ram: program to execute.
        source: source for the stored bytes.
        ranges: profiler ranges, one per read. None for none.
        device: target device for the copies.
    """

    def __init__(
        self,
        slots: RamSlots,
        ram: RamProgram,
        source: BlockSource,
        ranges: NvtxRanges | None,
        *,
        device: torch.device,
    ) -> None:
        self._slots = slots
        self._ram = ram
        self._source = source
        self._ranges = ranges
        self._spans: dict[int, ReadSpan] = {}  # by the first RAM program visit that needs the read
        self._straight: dict[int, ReadSpan] = {}  # by device program fetch
        self._sync = ThreadSync()
        self._cuts_reads = False
        count = min(slots.in_flight, ram.program.buffers, len(ram.program.fetches))
        self._threads = [
            RunThread(f"wanstream-ram-{number}", device=device, failed=self._sync.end_issuing)
            for number in range(count)
        ]
        self._lock = threading.Lock()
        self._numbers = iter(range(len(ram.program.fetches)))  # of the reads to start
        self._read: set[int] = set()
        self._errors: dict[int, BaseException] = {}
        self._last_taken: dict[int, int] = {}  # slot -> visit

    @property
    def reads(self) -> list[Fetch]:
        """Finished RAM program fetches, in order."""
        with self._lock:
            return [self._ram.program.fetches[number] for number in sorted(self._read)]

    @property
    def is_whole(self) -> bool:
        """True if all reads in the program have ended."""
        return len(self._read) == len(self._ram.program.fetches)

    def start(self) -> None:
        """Keep expected blocks in their slots, and start the read threads."""
        for index, key in self._ram.program.initial.items():
            self._slots[index].keep(key)
        for thread in self._threads:
            thread.start(self._read_on)

    def stop(self, *, whole_blocks: bool = False) -> None:
        """Wake all waiting threads to raise `RunStopped`, and end reads after the present piece.

        With `whole_blocks`, reads in progress finish their block, and the next run finds it in the
        slot.
        """
        # Once a call has cut the reads short, a later one with `whole_blocks` does not undo this.
        self._cuts_reads = self._cuts_reads or not whole_blocks
        self._sync.stop()

    def join(self) -> None:
        """Wait until the read threads have ended."""
        for thread in self._threads:
            thread.join()

    def read_for(self, fetch: int) -> ReadSpan | None:
        """Return the read for this device program fetch, and forget it.

        The fetch must have been issued. Returns None if the block was in RAM already, or if another
        rank has read it.
        """
        visit = self._ram.visit_of_fetch[fetch]
        if visit == DIRECT:
            return self._straight.pop(fetch, None)
        return self._spans.pop(visit, None)

    def read_straight(self, fetch: int, key: BlockKey, into: torch.Tensor) -> None:
        """Read a fetch's block into its buffer, without a slot (fetch thread).

        Raises:
            RunStopped: the run has ended.
            SourceError: the bytes could not be read.
        """
        with reads_until(lambda: self._cuts_reads):
            self._straight[fetch] = timed_read(self._source, key, into, self._ranges, straight=True)

    def take(self, fetch: int) -> RamSlot | None:
        """Wait until a fetch's block was read, and return the slot.

        None for a read into the buffer.

        Raises:
            RunStopped: the run has ended.
            SourceError: the block could not be read.
        """
        visit = self._ram.visit_of_fetch[fetch]
        if visit == DIRECT:
            return None
        program = self._ram.program
        slot = self._slots[program.visit_buffer[visit]]
        # A CPU decodes from the slot when the visit computes, so the last fetch may not have left
        # the slot yet.
        self._sync.await_released(self._last_taken.get(slot.index, IMMEDIATE))
        self._await_read(program.visit_fetch[visit])
        slot.acquire(program.visits[visit].key)
        self._last_taken[slot.index] = visit
        return slot

    def leave(self, fetch: int, drained: Callable[[], object] | None = None) -> None:
        """Release a fetch's slot (fetch thread, or compute thread if it decodes from the slot).

        Args:
            drained: waits until the copy from the slot has ended. None if it has.
        """
        visit = self._ram.visit_of_fetch[fetch]
        slot = self._slots[self._ram.program.visit_buffer[visit]]
        # A read thread waits for the copy before it reads into the slot again. This thread need
        # not.
        slot.drained = drained
        slot.release(last=visit in self._ram.program.last_use)
        self._sync.note_released(visit)

    def _await_read(self, read: int) -> None:
        if read == KEPT:
            return
        try:
            self._sync.await_issued(read)
        except RunStopped:
            if read in self._errors:
                # `from None`, because RunStopped only ended the wait.
                raise self._errors[read] from None
            for thread in self._threads:
                if thread.error is not None:
                    thread.result()  # raises it
            raise

    def _read_on(self) -> None:
        """Read the next program block until all are read, or one cannot be (read thread)."""
        while (number := self._take_number()) is not None:
            fetch = self._ram.program.fetches[number]
            try:
                self._sync.await_released(fetch.start_after)
                with reads_until(lambda: self._cuts_reads):
                    span = self._slots.read(
                        self._slots[fetch.buffer], fetch.block, self._source, self._ranges
                    )
            except RunStopped:
                raise
            except BaseException as err:  # noqa: BLE001 - raised to the thread that waits for this block
                self._errors[number] = err
                # Earlier blocks, read by other threads, still arrive.
                self._sync.end_issuing(number)
                return
            with self._lock:
                if span is not None:
                    self._spans[fetch.needed_by] = span
                self._read.add(number)
            # The span is stored before this, because the compute thread may read it from now on.
            self._sync.note_issued(number)

    def _take_number(self) -> int | None:
        with self._lock:
            if self._errors:
                return None
            return next(self._numbers, None)
