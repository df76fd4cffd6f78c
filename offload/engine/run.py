"""Execution of a device program and the RAM program below it.

The compute thread calls `begin` and `end` for visits in program order. The fetch thread issues the
fetches in bus order. Read threads (`ram_run.py`) read the blocks into RAM before that.
"""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from ...devices import Clock, DeviceEvent, LateDeviceError, NvtxRanges, clock_for, raise_late
from ...plan.programs import IMMEDIATE, KEPT, Fetch, RunPrograms, Visit
from ...schema import StateError
from ...telemetry import BlockArrival, Recorder, ranged
from ..core.buffers import BlockBuffer
from ..core.threads import RunStopped, RunThread, ThreadSync
from ..host_memory.ram_run import RamRun
from ..sharding.group import GATHERS_AHEAD, StoppedTogether
from ..transfers.base import BlockCopy, PendingBlock
from .block_pool import BlockPool

PACE = 2
"""Visits that the host may be ahead of the device: enough to hide launches, few enough to cancel
within two blocks."""


class EngineRun:
    """One execution of a device program and the RAM program below it. Enter it with `with`.

    Attributes:
        programs: both programs.
        program: the device program.
        fetched: fetches issued so far. A completed run has issued all fetches in program order.
    """

    def __init__(self, pool: BlockPool, programs: RunPrograms, recorder: Recorder | None) -> None:
        self.programs = programs
        self.program = programs.device
        self.fetched: list[Fetch] = []
        self._pool = pool
        self._ranges: NvtxRanges | None = None
        self._clock: Clock = clock_for(pool.device)
        if recorder is not None:
            self._ranges = recorder.ranges
            self._clock = recorder.clock
        self._range: int | None = None  # profiler range of the current visit
        self._ram = RamRun(
            pool.ram, programs.ram, pool.route.block_source, self._ranges, device=pool.device
        )
        self._recorder = recorder
        self._sync = ThreadSync()
        self._thread = RunThread(
            "wanstream-fetch", device=pool.device, failed=self._sync.end_issuing
        )
        self._pending_blocks: list[PendingBlock | None] = [None] * len(self.program.fetches)
        self._factor_bytes = [0] * len(self.program.fetches)
        self._recent_ends: deque[DeviceEvent] = deque(maxlen=PACE)
        """Ends of the last `PACE` visits."""
        self._visits_to_record = frozenset(fetch.start_after for fetch in self.program.fetches)
        self._visit_ends: dict[int, DeviceEvent] = {}
        """Ends of visits that a later fetch waits for. It is exactly one fetch, because a visit
        frees one buffer."""
        self._next = 0
        self._open: tuple[BlockBuffer, DeviceEvent, DeviceEvent, DeviceEvent] | None = None
        """The open visit's buffer and events: the block was requested, has arrived, and is
        decoded."""
        self._running = False
        self._stops_early = False

    @property
    def reads(self) -> list[Fetch]:
        """RAM program fetches read so far."""
        return self._ram.reads

    def __enter__(self) -> EngineRun:
        self._pool.claim()
        try:
            self._start()
        except BaseException as err:
            # Python calls no `__exit__` after an error in `__enter__`.
            self.__exit__(type(err), err, err.__traceback__)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._finish(in_sync=error is None or isinstance(error, StoppedTogether))
        except RuntimeError as err:
            if isinstance(error, LateDeviceError):
                return  # every call fails after it: the first one names the place
            raise_late(err, self._place())
            raise
        raise_late(error, self._place())
        completed = error is None and self._next == len(self.program.visits)
        assert not completed or tuple(self.fetched) == self.program.fetches, (
            "the fetches differ from the program"
        )
        assert not completed or self._ram.is_whole, "the reads differ from the program"

    def _place(self) -> str:
        """Return the place of an error, outside a visit or in one."""
        if not self._next:
            return "the start of a run"
        return f"the end of {place_of(self.program.visits[self._next - 1])}"

    def _start(self) -> None:
        pool = self._pool
        pool.check_size(self.programs)
        if pool.route.gathering is not None:
            pool.route.gathering.begin(self.program)
        pool.restore_buffers(self.program)
        for buffer in pool.buffers:
            key = self.program.initial.get(buffer.index)
            if key is not None:
                buffer.keep(key)
        pool.backend.begin_run()
        if self._recorder is not None:
            self._recorder.begin_run(lambda: pool.pinned_bytes)
        # The first fetches wait for this event, because work issued before this run may still read
        # the buffers.
        self._origin = self._clock.mark()
        self._running = True
        # A daemon thread that copies while the interpreter shuts down could crash the process.
        atexit.register(self._end_threads)
        self._ram.start()
        if self.program.fetches:
            self._thread.start(self._fetch_all)

    def _finish(self, *, in_sync: bool) -> None:
        self._running = False
        try:
            try:
                self._end_threads(in_sync=in_sync)
                if in_sync and self._stops_early:
                    self._settle_issued()
            finally:
                # Even if interrupted again: later copies must not overwrite buffers that visits
                # still read.
                self._pool.backend.end_run()
        finally:
            for buffer in self._pool.buffers:
                buffer.end_run()
            self._pool.ram.end_run()
            if self._recorder is not None:
                self._recorder.end_run()
            self._close_range()
            self._pending_blocks.clear()
            self._pool.unbind_all()
            self._pool.release()

    def _end_threads(self, *, in_sync: bool = False) -> None:
        """End both threads, and wait for them even after a second interrupt.

        Until they end, they may write into buffers. If ranks gather and stop `in_sync`, the fetch
        thread first issues all gathers that the visits so far allow, so all ranks have issued the
        same ones.
        """
        gathering = self._pool.route.gathering
        keeps = in_sync and self._stops_early
        try:
            try:
                if gathering is not None and in_sync:
                    self._sync.end_visits()
                    self._thread.join()
                    in_sync = self._thread.error is None
                if gathering is not None:
                    gathering.end(in_sync=in_sync)
            finally:
                # Even if the group cannot be ended: the caller releases what these threads use.
                self._sync.stop()
                self._ram.stop(whole_blocks=keeps)
                self._thread.join()
                self._ram.join()
            atexit.unregister(self._end_threads)
        except KeyboardInterrupt:
            self._end_threads()
            raise

    def leave(self) -> None:
        """Keep issued blocks and blocks being read for the next program.

        The caller ends the run next, and the remaining visits are skipped. Reads in progress finish
        their block, because the next program would read it again from the start. An error or a
        cancel cuts them short. These blocks' bytes count for the open step.
        """
        assert self._running, "leave() must be called before the run has ended"
        self._stops_early = True

    def _settle_issued(self) -> None:
        """Finish all issued copies that no visit has consumed."""
        for number, pending in enumerate(self._pending_blocks):
            if pending is None:
                continue
            fetch = self.program.fetches[number]
            self._finish_block(number, pending, self._clock.mark())
            buffer = self._pool.buffers[fetch.buffer]
            # The block counts as visited, so `end_run` keeps it.
            buffer.acquire(fetch.block)
            buffer.release(last=True)

    def _finish_block(
        self, number: int, pending: PendingBlock, requested: DeviceEvent
    ) -> tuple[DeviceEvent, DeviceEvent]:
        """Finish an issued block on the compute thread, and record the arrival.

        Return the events for arrival and the end of decoding.
        """
        pending.wait()
        arrived = ready = self._clock.mark()
        decoded = pending.decoded
        if pending.decode is not None:
            pending.decode()
            ready = self._clock.mark()
            decoded = (arrived, ready)
        if self._recorder is not None:
            key = self.program.fetches[number].block
            nbytes = self._pool.route.sizes[key.stored] + self._factor_bytes[number]
            read = self._ram.read_for(number)
            self._recorder.record_arrival(
                BlockArrival(key.block, nbytes, requested, arrived, read, pending.copied, decoded)
            )
        return arrived, ready

    @contextmanager
    def visit(
        self,
        step: int,
        expert: str,
        block: int,
        patch: int = 0,
        *,
        poll: Callable[[Visit], object] | None = None,
    ) -> Iterator[None]:
        """Make the program's next visit in the `with`, for callers that name the visits.

        Inside it, the block's weights are on the device.

        Args:
            step, expert, block, patch: see `Visit`.
            poll: called with the visit while it waits for the block's read. It ends the wait by
                raising.

        Raises:
            StateError: on entering, if another visit is due or the run is not active.
        """
        self.begin(Visit(step, expert, block, patch), poll)
        try:
            yield
        except GeneratorExit:  # dropped without an exit: the run may have gone on
            raise
        except BaseException as err:
            self.end(err)
            raise
        self.end()

    def begin(self, visit: Visit, poll: Callable[[Visit], object] | None = None) -> None:
        """Wait for the block of `visit` and bind it. `visit` documents the arguments and errors."""
        number = self._next
        program = self.program
        if not self._running:
            raise StateError(
                f"{visit} is outside its run, which is not active: enter the run with `with` first"
            )
        due = program.visits[number] if number < len(program.visits) else "the end of the program"
        if due != visit:
            raise StateError(f"visit {number} of the program is {due}, not {visit}")
        fetch = program.visit_fetch[number]
        key = visit.key
        try:
            if number >= PACE:
                # The oldest end is from `PACE` visits ago, so the host never gets further ahead.
                self._clock.wait_for(self._recent_ends[0])
            if self._ranges is not None:
                self._range = self._ranges.start(f"{visit.expert} {visit.block}")
            requested = self._clock.mark()
            # First the host waits until the copy is *issued*: an event that was not recorded yet
            # would let the compute stream pass. Then `wait` makes the compute stream wait for the
            # copy. The host never waits for the bytes, so it can launch this block's kernels while
            # the copy is still running.
            pending = self._wait_issued(fetch, None if poll is None else partial(poll, visit))
            if pending is None:
                arrived = ready = self._clock.mark()
            else:
                arrived, ready = self._finish_block(fetch, pending, requested)
            buffer = self._pool.buffers[program.visit_buffer[number]]
            buffer.acquire(key)
            self._pool.bindings[key.stored].bind(buffer, self._pool.patches.get(key))
        except RuntimeError as err:
            raise_late(err, place_of(visit))
            raise
        self._open = (buffer, requested, arrived, ready)

    def end(self, error: BaseException | None = None) -> None:
        """Record the visit as issued to the device.

        Unbind the block after the last visit in the lifetime.

        After an `error` in the visit only name its place: the run ends next, and the buffer's
        `end_run` closes it.
        """
        visit = self.program.visits[self._next]
        # The events are freed here, not with an object held by the caller. Python frees that one
        # while the exception is set, and freeing a CUDA event then ended the process (torch 2.11,
        # H100: 13 out of 13 crashes).
        begun = self._open
        self._open = None
        if error is not None:
            raise_late(error, place_of(visit))
            return
        assert begun is not None, "no visit has begun"
        buffer, requested, arrived, ready = begun
        number = self._next
        last = number in self.program.last_use
        try:
            done = self._clock.mark()
            self._recent_ends.append(done)
            if number in self._visits_to_record:
                # Before `note_released`, which lets the fetch thread read it.
                self._visit_ends[number] = done
            buffer.release(last=last)
            self._next += 1
            self._sync.note_released(number)
            if self._recorder is not None:
                self._recorder.visit((visit.block, requested, arrived, ready, done))
            if self._range is not None:
                self._close_range()
            if last:
                self._pool.bindings[visit.key.stored].unbind()  # another block gets the buffer
        except RuntimeError as err:
            raise_late(err, place_of(visit))
            raise

    def _close_range(self) -> None:
        if self._range is not None:
            assert self._ranges is not None
            self._ranges.end(self._range)
            self._range = None

    def _wait_issued(self, fetch: int, poll: Callable[[], object] | None) -> PendingBlock | None:
        """Wait until a fetch was issued.

        Return the pending work, or None if an earlier visit has finished it.
        """
        if fetch == KEPT:
            return None
        try:
            self._sync.await_issued(fetch, poll)
        except RunStopped:
            self._thread.result()  # raises the error of the fetch thread, if it failed
            raise
        pending = self._pending_blocks[fetch]
        self._pending_blocks[fetch] = None
        return pending

    # The fetch thread reads bytes and issues copies only. Device streams or the compute thread do
    # the arithmetic: torch arithmetic here would start a second thread pool next to the one that
    # computes.

    def _fetch_all(self) -> None:
        for number, fetch in enumerate(self.program.fetches):
            with ranged(self._ranges, f"fetch {fetch.block.expert} {fetch.block.block}"):
                try:
                    self._fetch(number, fetch)
                except RuntimeError as err:
                    raise_late(
                        err, f"the fetch of {place_of(self.program.visits[fetch.needed_by])}"
                    )
                    raise

    def _fetch(self, number: int, fetch: Fetch) -> None:
        slot = self._ram.take(number)
        if self._pool.route.gathering is not None and number >= GATHERS_AHEAD:
            self._sync.await_released(self.program.fetches[number - GATHERS_AHEAD].needed_by)
        # The end of visit `start_after` must be recorded before a stream can wait for it.
        self._sync.await_released(fetch.start_after)
        after = self._origin
        if fetch.start_after != IMMEDIATE:
            after = self._visit_ends.pop(fetch.start_after)
        buffer = self._pool.buffers[fetch.buffer]
        buffer.begin_fill(fetch.block)
        if slot is None:
            key = fetch.block
            stored = None
            memory = buffer.memory[: self._pool.formats[key.stored].stored.nbytes]
            self._ram.read_straight(number, key.stored, memory)
        else:
            assert slot.key is not None, f"slot {slot.index} was taken, but it is empty"
            # The key is the slot's own. With a wrong slot, `fetched` then differs from the program.
            key = slot.key._replace(patch=fetch.block.patch)
            stored = slot.memory
        patch = self._pool.patches.get(key)
        slot_patch = None
        if slot is not None and slot.patch.patch is not None:
            assert slot.patch.patch is patch, f"slot {slot.index} has another patch of {key}"
            # The slot's bytes include the patch already.
            patch = None
        if patch is not None:
            self._factor_bytes[number] = patch.layout.nbytes
            if slot is not None and patch.is_computed and self._pool.ram.keeps_patch(slot):
                slot_patch = slot.patch
        copy = BlockCopy(
            key, stored, buffer.memory, after, partial(self._ram.leave, number), patch, slot_patch
        )
        self._pending_blocks[number] = self._pool.backend.copy_in(copy)
        buffer.issued()
        self.fetched.append(fetch._replace(block=key, buffer=buffer.index))
        # This comes last: the compute thread then takes the block and acquires the buffer at once.
        self._sync.note_issued(number)


def place_of(visit: Visit) -> str:
    """Return a visit in words for an error."""
    return f"block {visit.block} of {visit.expert!r}, step {visit.step}"
