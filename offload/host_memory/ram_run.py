"""Execution of a RAM program: the read thread fills RAM slots, and the fetch thread copies from them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...plan import DIRECT, IMMEDIATE, KEPT, BlockKey, Fetch, RamProgram
from ...telemetry import ReadSpan, Recorder
from ..engine.threads import RunStopped, RunThread, ThreadSync
from ..sources.base import BlockSource, timed_read
from .ram_slots import RamSlot, RamSlots


class RamRun:
    """Executes the reads of a RAM program in their order on the read thread; the fetch thread takes and releases slots.

    Attributes:
        reads: fetches of the RAM program that were read so far.

    Args:
        slots: slots to read into.
        ram: program to execute.
        source: source of the stored bytes.
        recorder: recorder of the run; the reads are measured for it.
        device: device that blocks are copied to.
    """

    def __init__(
        self,
        slots: RamSlots,
        ram: RamProgram,
        source: BlockSource,
        recorder: Recorder | None,
        *,
        device: torch.device,
    ) -> None:
        self.reads: list[Fetch] = []
        self._slots = slots
        self._ram = ram
        self._source = source
        self._ranges = None if recorder is None else recorder.ranges
        self._spans: dict[int, ReadSpan] = {}  # by the first visit of the RAM program that needs the read
        self._straight: dict[int, ReadSpan] = {}  # by fetch of the device program
        self._sync = ThreadSync()
        self._thread = RunThread("wanstream-ram", device=device, failed=self._sync.end_issuing)
        self._last_taken: dict[int, int] = {}  # slot -> visit

    @property
    def is_whole(self) -> bool:
        """True if all reads of the program have ended."""
        return tuple(self.reads) == self._ram.program.fetches

    def start(self) -> None:
        """Keep the blocks that the program expects in the slots, and start the read thread."""
        for index, key in self._ram.program.initial.items():
            self._slots[index].keep(key)
        if self._ram.program.fetches:
            self._thread.start(self._read_all)

    def stop(self) -> None:
        """Wake all threads that wait here; they raise `RunStopped`."""
        self._sync.stop()

    def join(self) -> None:
        """Wait until the read thread has ended; a read in progress is not interrupted."""
        self._thread.join()

    def end(self) -> None:
        """End the run of all slots. No thread may use one any more."""
        self._slots.end_run()

    def read_for(self, fetch: int) -> ReadSpan | None:
        """Return the read that was made for this fetch of the device program, and forget it.

        The fetch must have been issued. Returns None if the block was in RAM already, or if another rank has read it.
        """
        visit = self._ram.visit_of_fetch[fetch]
        return self._straight.pop(fetch, None) if visit == DIRECT else self._spans.pop(visit, None)

    def read_straight(self, fetch: int, key: BlockKey, into: torch.Tensor) -> None:
        """Read the block of a fetch without a slot into its buffer (fetch thread).

        Raises:
            SourceError: the bytes could not be read.
        """
        self._straight[fetch] = timed_read(self._source, key, into, self._ranges, straight=True)

    def take(self, fetch: int) -> RamSlot | None:
        """Wait until the block of a fetch was read, and return its slot; None if it is to be read into its buffer.

        Raises:
            RunStopped: the run has ended.
            SourceError: the read thread failed before it had read this block.
        """
        visit = self._ram.visit_of_fetch[fetch]
        if visit == DIRECT:
            return None
        program = self._ram.program
        slot = self._slots[program.visit_buffer[visit]]
        # A CPU decodes from the slot when the visit computes, so the last fetch may not have left the slot yet.
        self._sync.await_released(self._last_taken.get(slot.index, IMMEDIATE))
        self._await_read(program.visit_fetch[visit])
        slot.acquire(program.visits[visit].key)
        self._last_taken[slot.index] = visit
        return slot

    def leave(self, fetch: int, drained: Callable[[], object] | None = None) -> None:
        """Release the slot of a fetch (fetch thread, or compute thread if that decodes from the slot).

        Args:
            drained: waits until the copy from the slot has ended; None if it has.
        """
        visit = self._ram.visit_of_fetch[fetch]
        slot = self._slots[self._ram.program.visit_buffer[visit]]
        # The read thread waits for the copy before it reads into the slot again; this thread need not.
        slot.drained = drained
        slot.release(last=visit in self._ram.program.last_use)
        self._sync.note_released(visit)

    def _await_read(self, read: int) -> None:
        if read == KEPT:
            return
        try:
            self._sync.await_issued(read)
        except RunStopped:
            if self._thread.error is not None:
                self._thread.result()  # raises it
            raise

    def _read_all(self) -> None:
        for number, fetch in enumerate(self._ram.program.fetches):
            self._sync.await_released(fetch.start_after)
            span = self._slots.read(self._slots[fetch.buffer], fetch.block, self._source, self._ranges)
            if span is not None:
                self._spans[fetch.needed_by] = span
            self.reads.append(fetch)
            self._sync.note_issued(number)
