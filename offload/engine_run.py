"""One execution of one program.

The computing thread calls `begin` and `end` for the visits in the program's order; the fetch thread goes through the
program's fetches in bus order.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from types import TracebackType
from typing import TYPE_CHECKING

from ..metrics import Clock, Mark, Recorder, clock_for
from ..plan import AT_ONCE, KEPT, BlockKey, Fetch, TransferProgram, Visit
from .buffers import BlockBuffer
from .progress import RunProgress, RunStopped
from .streams import Arrival

if TYPE_CHECKING:
    from .engine import StreamEngine

PACE = 2  # visits the host may be ahead of the device: enough to hide launches, few enough to cancel within two blocks


class VisitOrderError(RuntimeError):
    """A visit was asked for that is not the next one of the program, or outside a run."""


class EngineRun:
    """One execution of one program."""

    def __init__(self, engine: StreamEngine, program: TransferProgram, recorder: Recorder | None) -> None:
        self.program = program
        self.fetched: list[Fetch] = []
        self._engine = engine
        self._recorder = recorder
        self._clock: Clock = recorder.clock if recorder is not None else clock_for(engine.device)
        self._progress = RunProgress()
        self._arrivals: list[Arrival | None] = [None] * len(program.fetches)
        self._done: list[Mark] = []
        self._next = 0
        self._going_on = False
        # A daemon that is stopped `atexit`: a run that nobody ended (a forward raised) must not keep the process alive.
        self._thread = threading.Thread(target=self._fetch_all, name="wanstream-fetch", daemon=True)
        self._fetching: Future[None] = Future()

    def __enter__(self) -> EngineRun:
        self._engine.claim()
        try:
            self._start()
        except BaseException:
            self._finish()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish()
        whole = error is None and self._next == len(self.program.visits)
        assert not whole or tuple(self.fetched) == self.program.fetches, "what was fetched is not what was planned"

    def _start(self) -> None:
        engine = self._engine
        engine.restore_buffers(self.program)
        for buffer in engine.buffers:
            key = self.program.initial.get(buffer.index)
            if key is not None:
                buffer.keep(key)
        engine.streams.begin_run()
        # A buffer may still be read by work given to the device before this run.
        self._origin = self._clock.mark()
        self._going_on = True
        if self.program.fetches:
            atexit.register(self._stop_fetching)
            self._thread.start()

    def _finish(self) -> None:
        self._going_on = False
        try:
            self._stop_fetching()
            self._engine.streams.end_run()
        finally:
            for buffer in self._engine.buffers:
                buffer.end_run()
            self._arrivals.clear()
            self._engine.release()

    def _stop_fetching(self) -> None:
        """End the fetch thread. Until it has left it may write into a buffer: a second interrupt waits for it too."""
        try:
            self._progress.stop()
            self._engine.streams.stop()
            if self._thread.ident is not None:
                # Not `join`: interrupted once, it takes the thread for ended (Python before 3.13).
                wait([self._fetching])
                self._thread.join()
            atexit.unregister(self._stop_fetching)
        except KeyboardInterrupt:
            self._stop_fetching()
            raise

    def begin(self, visit: Visit) -> tuple[BlockBuffer, Mark, Mark]:
        """Wait for the block of `visit`; returns its buffer and the marks 'asked' and 'ready'."""
        number, program = self._next, self.program
        if not self._going_on:
            raise VisitOrderError(f"{visit} is outside its run, which is not going on: enter the run with `with` first")
        if number >= len(program.visits) or program.visits[number] != visit:
            due = program.visits[number] if number < len(program.visits) else "the end of the program"
            raise VisitOrderError(f"visit {number} of the program is {due}, not {visit}")
        if number >= PACE:
            self._clock.keep_pace(self._done[number - PACE])
        asked = self._clock.mark()
        arrival = self._await_issued(program.visit_fetch[number])
        if arrival is not None:
            arrival.wait()
        ready = self._clock.mark()
        if self._recorder is not None:
            self._recorder.block_ready(0 if arrival is None else self._engine.fetch_bytes(visit.key))
        if arrival is not None:
            arrival.unpack()
        buffer = self._engine.buffers[program.visit_buffer[number]]
        buffer.acquire(visit.key)
        return buffer, asked, ready

    def end(self, buffer: BlockBuffer, asked: Mark, ready: Mark) -> bool:
        """The visit was given to the device; returns whether the block's tenancy is over."""
        done = self._clock.mark()
        self._done.append(done)
        last = self._next in self.program.last_use
        buffer.release(last=last)
        self._next += 1
        self._progress.note_released()
        if self._recorder is not None:
            self._recorder.visit(asked, ready, done)
        return last

    def _await_issued(self, fetch: int) -> Arrival | None:
        """What is left to do for a fetch that serves this visit; None when an earlier visit has done it."""
        if fetch == KEPT:
            return None
        try:
            self._progress.await_issued(fetch)
        except RunStopped:
            self._fetching.result()  # raises what ended the fetch thread
            raise
        arrival, self._arrivals[fetch] = self._arrivals[fetch], None
        return arrival

    def _fetch_all(self) -> None:
        try:
            for number, fetch in enumerate(self.program.fetches):
                self._fetch(number, fetch)
        except RunStopped:
            self._fetching.set_result(None)
        except BaseException as err:  # noqa: BLE001 - it is raised again on the computing thread
            self._fetching.set_exception(err)
            self._progress.stop()
        else:
            self._fetching.set_result(None)

    def _fetch(self, number: int, fetch: Fetch) -> None:
        streams = self._engine.streams
        staged = streams.stage(fetch.block)
        self._progress.await_released(fetch.start_after)
        after = self._origin if fetch.start_after == AT_ONCE else self._done[fetch.start_after]
        buffer = self._engine.buffers[fetch.buffer]
        buffer.begin_fill(staged.key)
        self._arrivals[number] = streams.land(staged, buffer.memory, after)
        buffer.issued()
        self.fetched.append(fetch._replace(block=staged.key, buffer=buffer.index))
        self._progress.note_issued()


BindBlock = Callable[[BlockKey, BlockBuffer], None]
UnbindBlock = Callable[[BlockKey], None]


class VisitContext:
    """`with` around the work of one visit. A class, not a generator: it is entered once per block and step.

    `bind(key, buffer)` is called when the block is there, `unbind(key)` when its tenancy is over.
    """

    __slots__ = ("_bind", "_buffer", "_marks", "_run", "_unbind", "_visit")

    def __init__(self, run: EngineRun, visit: Visit, bind: BindBlock, unbind: UnbindBlock) -> None:
        self._run, self._visit, self._bind, self._unbind = run, visit, bind, unbind

    def __enter__(self) -> None:
        self._buffer, *self._marks = self._run.begin(self._visit)
        self._bind(self._visit.key, self._buffer)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._run.end(self._buffer, *self._marks):
            self._unbind(self._visit.key)
