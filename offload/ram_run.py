"""One execution of one RAM program: a thread that reads, and the slots that the fetch thread takes blocks out of."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ..metrics.reading import ReadMeter, ReadSpan
from ..plan import AT_ONCE, DIRECT, KEPT, BlockKey, Fetch, RamProgram
from .progress import RunProgress, RunStopped
from .ram_slots import RamSlot, RamSlots
from .run_thread import RunThread

logger = logging.getLogger(__name__)


class RamRun:
    """The read thread goes through the program's reads in their order; the fetch thread takes and leaves.

    What only the expected next run needs is read while this one goes on, and dropped where it comes too late. `meter`
    measures all reads, and is closed at the end.
    """

    def __init__(self, slots: RamSlots, ram: RamProgram, meter: ReadMeter | None = None) -> None:
        self.reads: list[Fetch] = []
        self._slots = slots
        self._ram = ram
        self._meter = meter
        self._spans: dict[int, ReadSpan] = {}  # by number of the read
        self._straight: dict[int, ReadSpan] = {}  # by number of the fetch
        self._progress = RunProgress()
        self._thread = RunThread("wanstream-ram", self._read_all, failed=self._progress.no_more)
        self._last_taken: dict[int, int] = {}  # slot -> visit

    @property
    def is_whole(self) -> bool:
        """Whether everything was read that the run itself needed."""
        done = set(self.reads)
        return all(fetch in done for fetch in self._ram.program.fetches if fetch.needed_by < self._ram.expected_from)

    def start(self) -> None:
        """Take over what the slots hold, and begin to read."""
        for index, key in self._ram.program.initial.items():
            self._slots[index].keep(key)
        if self._to_read():
            self._thread.start()

    def stop(self) -> None:
        """Wake every thread that waits here."""
        self._progress.stop()

    def join(self) -> None:
        """Return when the read thread has ended: a read that is under way is waited for."""
        self._thread.join()

    def end(self) -> None:
        """Nobody uses a slot any more. Reads that failed for the next run only are told in the log."""
        if self._meter is not None:
            self._meter.close()
        self._slots.end_run()
        error = self._thread.error
        if error is not None and self.is_whole:
            ours = None if isinstance(error, OSError) else error  # no fault of a disk: our own, with where it is
            logger.warning(
                "nothing more was read ahead for the next run, which will try again: %s", error, exc_info=ours
            )

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

    @property
    def ahead_bytes(self) -> int:
        """Bytes that were read for the expected next run, as far as they were measured."""
        reads, expected = self._ram.program.fetches, self._ram.expected_from
        return sum(span.nbytes for number, span in self._spans.items() if reads[number].needed_by >= expected)

    def read_straight(self, fetch: int, key: BlockKey, into: torch.Tensor) -> None:
        """Read the block of a fetch that has no slot into its buffer (fetch thread).

        Raises:
            SourceError: the bytes could not be read.
        """
        span = self._slots.read(key, into, self._meter, straight=True)
        if span is not None:
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

    def _to_read(self) -> list[tuple[int, Fetch]]:
        """The reads whose slot becomes free in this run. (A later block of such a slot waits for a visit as well.)"""
        expected = self._ram.expected_from
        return [(number, f) for number, f in enumerate(self._ram.program.fetches) if f.start_after < expected]

    def _read_all(self) -> None:
        for number, fetch in self._to_read():
            self._progress.await_released(fetch.start_after)
            slot = self._slots[fetch.buffer]
            span = self._slots.fill(slot, fetch.block, self._meter)
            if span is not None:
                self._spans[number] = span
            self.reads.append(fetch)
            self._progress.note_issued(number)
