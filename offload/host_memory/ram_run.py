"""One execution of one RAM program: a thread that reads, and the slots that the fetch thread takes blocks out of."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...plan import AT_ONCE, DIRECT, KEPT, BlockKey, Fetch, RamProgram
from ...telemetry import ReadSpan, Recorder
from ..engine.thread_sync import RunStopped, ThreadSync
from ..engine.threads import RunThread
from ..sources.base import BlockSource
from ..sources.timed import TimedSource
from .ram_slots import RamSlot, RamSlots


class RamRun:
    """The read thread goes through the program's reads in their order; the fetch thread takes and leaves.

    Args:
        slots: slots to read into.
        ram: program to execute.
        source: source of the stored bytes.
        recorder: recorder of the run; the reads are measured for it.
    """

    def __init__(self, slots: RamSlots, ram: RamProgram, source: BlockSource, recorder: Recorder | None) -> None:
        self.reads: list[Fetch] = []
        self._slots = slots
        self._ram = ram
        self._timed = None if recorder is None else TimedSource(source, recorder.ranges)
        self._source: BlockSource = self._timed or source
        self._spans: dict[int, ReadSpan] = {}  # by number of the read
        self._straight: dict[int, ReadSpan] = {}  # by number of the fetch
        self._progress = ThreadSync()
        self._thread = RunThread("wanstream-ram", self._read_all, failed=self._progress.no_more)
        self._last_taken: dict[int, int] = {}  # slot -> visit

    @property
    def is_whole(self) -> bool:
        """Whether everything was read that the program has."""
        return tuple(self.reads) == self._ram.program.fetches

    def start(self) -> None:
        """Take over what the slots hold, and begin to read."""
        for index, key in self._ram.program.initial.items():
            self._slots[index].keep(key)
        if self._ram.program.fetches:
            self._thread.start()

    def stop(self) -> None:
        """Wake every thread that waits here."""
        self._progress.stop()

    def join(self) -> None:
        """Return when the read thread has ended: a read that is under way is waited for."""
        self._thread.join()

    def end(self) -> None:
        """Nobody uses a slot any more."""
        self._slots.end_run()

    def read_for(self, fetch: int) -> ReadSpan | None:
        """How a file was read for this fetch of the device program; None if it was read for one before, or by others.

        The fetch must have been issued, by a run that has a meter. It is told once, so that a long run keeps nothing.
        """
        visit = self._ram.visit_of_fetch[fetch]
        if visit == DIRECT:
            return self._straight.pop(fetch, None)
        read = self._ram.program.visit_fetch[visit]
        if read == KEPT or self._ram.program.fetches[read].needed_by != visit:
            return None
        return self._spans.pop(read, None)

    def read_straight(self, fetch: int, key: BlockKey, into: torch.Tensor) -> None:
        """Read the block of a fetch that has no slot into its buffer (fetch thread).

        Raises:
            SourceError: the bytes could not be read.
        """
        self._source.read_block(key, into)
        if self._timed is not None and (span := self._timed.take_span(key, straight=True)) is not None:
            self._straight[fetch] = span

    def take(self, fetch: int) -> RamSlot | None:
        """The slot that holds the block of a fetch, once it was read; None where it is to be read straight.

        Raises:
            RunStopped: the run is over.
            SourceError: what the read thread raised before it came to this block.
        """
        visit = self._ram.visit_of_fetch[fetch]
        if visit == DIRECT:
            return None
        program = self._ram.program
        slot = self._slots[program.visit_buffer[visit]]
        # A CPU decodes out of the slot when it computes: the fetch before may not have left it yet.
        self._progress.await_released(self._last_taken.get(slot.index, AT_ONCE))
        self._await_read(program.visit_fetch[visit])
        slot.acquire(program.visits[visit].key)
        self._last_taken[slot.index] = visit
        return slot

    def leave(self, fetch: int, drained: Callable[[], object] | None = None) -> None:
        """The bytes of a fetch were taken; `drained` waits for the copy of them that is under way.

        Called by the fetch thread, or by the computing thread where that decodes out of the slot.
        """
        visit = self._ram.visit_of_fetch[fetch]
        slot = self._slots[self._ram.program.visit_buffer[visit]]
        slot.drained = drained
        slot.release(last=visit in self._ram.program.last_use)
        self._progress.note_released(visit)

    def _await_read(self, read: int) -> None:
        if read == KEPT:
            return
        try:
            self._progress.await_issued(read)
        except RunStopped:
            if self._thread.error is not None:
                self._thread.result()
            raise

    def _read_all(self) -> None:
        for number, fetch in enumerate(self._ram.program.fetches):
            self._progress.await_released(fetch.start_after)
            self._slots.read(self._slots[fetch.buffer], fetch.block, self._source)
            if self._timed is not None and (span := self._timed.take_span(fetch.block)) is not None:
                self._spans[number] = span
            self.reads.append(fetch)
            self._progress.note_issued(number)
