"""One execution of the two programs of a run.

The computing thread calls `begin` and `end` for the visits in the program's order; the fetch thread goes through the
program's fetches in bus order; the read thread (`ram_run.py`) brings their blocks into RAM before.
"""

from __future__ import annotations

import atexit
from collections import deque
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from ...devices import Clock, DeviceEvent, clock_for
from ...plan import AT_ONCE, KEPT, Fetch, RunPrograms, Visit
from ...schema import StateError
from ...telemetry import BlockArrival, Ranges, Recorder, ranged
from ..host_memory.ram_run import RamRun
from ..sharding.group import GATHERS_AHEAD, GatheringState, StoppedTogether
from ..transfers.base import PendingBlock
from .buffers import BlockBuffer
from .thread_sync import RunStopped, ThreadSync
from .threads import RunThread

if TYPE_CHECKING:
    from .engine import OffloadEngine

PACE = 2  # visits the host may be ahead of the device: enough to hide launches, few enough to cancel within two blocks


class EngineRun:
    """One execution of a device program and the RAM program below it."""

    def __init__(self, engine: OffloadEngine, programs: RunPrograms, recorder: Recorder | None) -> None:
        self.programs = programs
        self.program = programs.device
        self.fetched: list[Fetch] = []
        self._engine = engine
        self._ranges: Ranges | None = None if recorder is None else recorder.ranges
        self._range: int | None = None  # of the visit that goes on
        self._ram = RamRun(engine.ram, programs.ram, engine.block_source, recorder)
        self._recorder = recorder
        self._clock: Clock = recorder.clock if recorder is not None else clock_for(engine.device)
        self._progress = ThreadSync()
        self._thread = RunThread("wanstream-fetch", self._fetch_all, failed=self._progress.no_more)
        self._arrivals: list[PendingBlock | None] = [None] * len(self.program.fetches)
        self._latest: deque[DeviceEvent] = deque(maxlen=PACE)
        """Ends of the last visits."""
        self._awaited = frozenset(fetch.start_after for fetch in self.program.fetches)
        self._freed: dict[int, DeviceEvent] = {}
        """Ends of visits that a fetch to come waits for; no two wait for the same one, which frees one buffer."""
        self._next = 0
        self._going_on = False
        self._leaves_early = False

    @property
    def reads(self) -> list[Fetch]:
        """What was really read into slots so far: fetches of the RAM program."""
        return self._ram.reads

    def __enter__(self) -> EngineRun:
        self._engine.claim()
        try:
            self._start()
        except BaseException:
            self._finish(alike=False)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish(alike=error is None or isinstance(error, StoppedTogether))
        whole = error is None and self._next == len(self.program.visits)
        assert not whole or tuple(self.fetched) == self.program.fetches, "what was fetched is not what was planned"
        assert not whole or self._ram.is_whole, "what was read is not what was planned"

    def _start(self) -> None:
        engine = self._engine
        engine.check_size(self.programs)
        if engine.gathering is not None:
            engine.gathering.begin(self.program)
        engine.restore_buffers(self.program)
        for buffer in engine.buffers:
            key = self.program.initial.get(buffer.index)
            if key is not None:
                buffer.keep(key)
        engine.streams.begin_run()
        if self._recorder is not None:
            self._recorder.run_began(lambda: engine.pinned_bytes)
        # A buffer may still be read by work given to the device before this run.
        self._origin = self._clock.mark()
        self._going_on = True
        atexit.register(self._end_threads)
        self._ram.start()
        if self.program.fetches:
            self._thread.start()

    def _finish(self, *, alike: bool) -> None:
        self._going_on = False
        try:
            try:
                self._end_threads(alike=alike)
                if alike and self._leaves_early:
                    self._settle_issued()
            finally:  # also when interrupted again: nothing may be overwritten under visits that are under way
                self._engine.streams.end_run()
        finally:
            for buffer in self._engine.buffers:
                buffer.end_run()
            if self._engine.gathering is not None and self._engine.gathering.state is GatheringState.BROKEN:
                self._engine.drop_buffers()  # a gather that was left may still write there
            self._ram.end()
            if self._recorder is not None:
                self._recorder.run_ended()
            self._close_range()
            self._arrivals.clear()
            self._engine.unbind_all()
            self._engine.release()

    def _end_threads(self, *, alike: bool = False) -> None:
        """End both threads. Until they have left they may write into a place: a second interrupt waits for them too.

        Ranks that gather and end `alike` issue first what the visits so far allow, as all of them do.
        """
        gathering = self._engine.gathering
        try:
            if gathering is not None and alike:
                self._progress.end()
                self._thread.join()
                alike = self._thread.error is None
            if gathering is not None:
                gathering.end(alike=alike)
            self._progress.stop()
            self._ram.stop()
            self._thread.join()
            self._ram.join()
            atexit.unregister(self._end_threads)
        except KeyboardInterrupt:
            self._end_threads()
            raise

    def leave(self) -> None:
        """No more visits of this program will come, and what was fetched for them is wanted soon: end the run next.

        Every block that was issued is then there for the next program to keep. Its bytes count for the open step.
        """
        assert self._going_on, "a run is left before it is over"
        self._leaves_early = True

    def _settle_issued(self) -> None:
        """Do what visits would have done with the blocks that were issued and that none has asked for."""
        for number, arrival in enumerate(self._arrivals):
            if arrival is None:
                continue
            fetch = self.program.fetches[number]
            asked = self._clock.mark()
            arrival.wait()
            arrived = ready = self._clock.mark()
            if arrival.unpack is not None:
                arrival.unpack()
                ready = self._clock.mark()
            self._note_arrival(number, arrival, (asked, arrived, ready))
            buffer = self._engine.buffers[fetch.buffer]
            buffer.acquire(fetch.block)
            buffer.release(last=True)

    def _note_arrival(
        self, number: int, arrival: PendingBlock, marks: tuple[DeviceEvent, DeviceEvent, DeviceEvent]
    ) -> None:
        if self._recorder is None:
            return
        asked, arrived, ready = marks
        key = self.program.fetches[number].block
        decoded = (arrived, ready) if arrival.unpack is not None else arrival.decoded
        nbytes, read = self._engine.fetch_bytes(key), self._ram.read_for(number)
        self._recorder.block_arrived(BlockArrival(key.block, nbytes, asked, arrived, read, arrival.copied, decoded))

    def visit(self, step: int, expert: str, block: int) -> VisitContext:
        """The next visit of the program; inside this context the block's weights are on the device.

        Raises:
            VisitOrderError: on entering, if another visit is due.
        """
        return VisitContext(self, Visit(step, expert, block))

    def begin(self, visit: Visit) -> tuple[BlockBuffer, DeviceEvent, DeviceEvent, DeviceEvent]:
        """Wait for the block of `visit`, bind it, and return its buffer and the marks 'asked', 'arrived', 'ready'."""
        number, program = self._next, self.program
        if not self._going_on:
            raise StateError(f"{visit} is outside its run, which is not going on: enter the run with `with` first")
        if number >= len(program.visits) or program.visits[number] != visit:
            due = program.visits[number] if number < len(program.visits) else "the end of the program"
            raise StateError(f"visit {number} of the program is {due}, not {visit}")
        if number >= PACE:
            self._clock.keep_pace(self._latest[0])
        if self._ranges is not None:
            self._range = self._ranges.start(f"{visit.expert} {visit.block}")
        fetch, key = program.visit_fetch[number], visit.key
        asked = self._clock.mark()
        arrival = self._await_issued(fetch)
        if arrival is not None:
            arrival.wait()
        arrived = ready = self._clock.mark()
        if arrival is not None and arrival.unpack is not None:
            arrival.unpack()
            ready = self._clock.mark()
        if arrival is not None:
            self._note_arrival(fetch, arrival, (asked, arrived, ready))
        buffer = self._engine.buffers[program.visit_buffer[number]]
        buffer.acquire(key)
        self._engine.bind(key, buffer)
        return buffer, asked, arrived, ready

    def end(self, buffer: BlockBuffer, asked: DeviceEvent, arrived: DeviceEvent, ready: DeviceEvent) -> None:
        """Record that the visit was given to the device, and unbind its block after the last visit of its tenancy."""
        done = self._clock.mark()
        number = self._next
        self._latest.append(done)
        if number in self._awaited:
            self._freed[number] = done
        last, visit = number in self.program.last_use, self.program.visits[number]
        buffer.release(last=last)
        self._next += 1
        self._progress.note_released(number)
        if self._recorder is not None:
            self._recorder.visit(visit.block, asked, arrived, ready, done)
        if self._range is not None:
            self._close_range()
        if last:
            self._engine.unbind(visit.key)

    def _close_range(self) -> None:
        if self._range is not None:
            assert self._ranges is not None
            self._ranges.end(self._range)
            self._range = None

    def _await_issued(self, fetch: int) -> PendingBlock | None:
        """What is left to do for a fetch that serves this visit; None when an earlier visit has done it."""
        if fetch == KEPT:
            return None
        try:
            self._progress.await_issued(fetch)
        except RunStopped:
            self._thread.result()  # raises what ended the fetch thread
            raise
        arrival, self._arrivals[fetch] = self._arrivals[fetch], None
        return arrival

    def _fetch_all(self) -> None:
        for number, fetch in enumerate(self.program.fetches):
            with ranged(self._ranges, f"fetch {fetch.block.expert} {fetch.block.block}"):
                self._fetch(number, fetch)

    def _fetch(self, number: int, fetch: Fetch) -> None:
        slot = self._ram.take(number)
        if self._engine.gathering is not None and number >= GATHERS_AHEAD:
            self._progress.await_released(self.program.fetches[number - GATHERS_AHEAD].needed_by)
        self._progress.await_released(fetch.start_after)
        after = self._origin if fetch.start_after == AT_ONCE else self._freed.pop(fetch.start_after)
        buffer = self._engine.buffers[fetch.buffer]
        buffer.begin_fill(fetch.block)
        if slot is None:
            key, stored = fetch.block, None
            self._ram.read_straight(number, key, buffer.memory[: self._engine.formats[key].stored.nbytes])
        else:
            assert slot.key is not None, f"slot {slot.index} was taken and holds nothing"
            key, stored = slot.key, slot.memory
        leave = partial(self._ram.leave, number)
        self._arrivals[number] = self._engine.streams.land(key, stored, buffer.memory, after, leave)
        buffer.issued()
        self.fetched.append(fetch._replace(block=key, buffer=buffer.index))
        self._progress.note_issued(number)


class VisitContext:
    """`with` around the work of one visit. A class, not a generator: it is entered once per block and step."""

    __slots__ = ("_begun", "_run", "_visit")

    def __init__(self, run: EngineRun, visit: Visit) -> None:
        self._run, self._visit = run, visit

    def __enter__(self) -> None:
        self._begun = self._run.begin(self._visit)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._run.end(*self._begun)
