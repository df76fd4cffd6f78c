"""Machine of the checked device: streams, events, late execution, memory, page locks, problems.

Work is executed when the host waits for it, and before then in any order allowed by the streams and
events, chosen by a seed. Fresh memory is poisoned. A missing wait is reported as a race and usually
gives a wrong value as well.
"""

from __future__ import annotations

import functools
import math
import mmap
import random
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from wanstream.devices import PageLockError

from .clocks import Actor, Clock, History
from .mappings import Pages

ROOT = Path(__file__).parents[3]
GRANULE = 512
"""Allocations are multiples of this size, as in torch's allocator."""
POISON = 0xFF
"""Byte in fresh memory: NaN in every floating-point type."""


class Work:
    """Issued work on a stream, executed or not."""

    __slots__ = ("before", "end", "run", "slow", "stream")

    def __init__(self, stream, run, before, *, slow) -> None:
        self.stream = stream
        self.before = before
        self.run: Callable[[], object] | None = run
        self.end = 0.0
        """Execution time, for `Event.elapsed_time`."""
        self.slow = slow
        """True for work executed only when the host waits for it."""

    @property
    def done(self) -> bool:
        return self.run is None

    def execute(self) -> None:
        machine = self.stream.machine
        machine.executing = True
        try:
            self.run()
        except Exception as err:  # noqa: BLE001 - the thread that executes it now need not be the one that issued it
            machine.report(f"work on {self.stream.name} fails: {err}")
        finally:
            machine.executing = False
        self.end = time.perf_counter()
        self.run = None
        self.before = []


class Stream(Actor):
    """Work queue on one device. Implements `devices.Stream`."""

    def __init__(self, device: Device, name: str) -> None:
        super().__init__(name)
        self.device = device
        self.machine = device.machine
        self.pending: deque[Work] = deque()
        self.last: Work | None = None
        self._waits: list[Work] = []

    def issue(self, run, accesses, words, *, slow=False) -> Work:
        """Append work that reads and writes the ranges in `accesses`."""
        machine = self.machine
        with machine.lock:
            machine.check_only_thread()
            self.join(machine.host().clock)
            self.tick()
            place = f"{words} on {self.name}"
            for each in accesses:
                each.history.add(each.start, each.stop, actor=self, words=place, write=each.write)
            before = [work for work in (self.last, *self._waits) if work and not work.done]
            self._waits.clear()
            work = Work(self, run, before, slow=slow)
            self.last = work
            self.pending.append(work)
            machine.note(Issued, self, work, accesses, words)
            machine.host().tick()
            machine.drift()
            return work

    def delay(self) -> None:
        """Execute the work issued from now on only when the host waits for it."""
        with self.machine.lock:
            self.issue(lambda: None, (), "delay", slow=True)

    def wait_event(self, event: Event) -> None:
        with self.machine.lock:
            if event.clock is None:
                self.machine.report(
                    f"{self.name} waits for an event that was not recorded, at {site()}"
                )
                return
            self.join(event.clock)
            self.machine.note(StreamWait, self, event.work)
            if not event.work.done:
                self._waits.append(event.work)

    def wait_stream(self, stream: Stream) -> None:
        event = Event(self.machine)
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        with self.machine.lock:
            # Waits without work behind them count too.
            self.machine.wait_on_host(self.issue(lambda: None, (), "synchronize"), dict(self.clock))

    def query(self) -> bool:
        return all(work.done for work in (self.last, *self._waits) if work)


class Event:
    """Implements `devices.Event`."""

    def __init__(self, machine: Machine, *, timing: bool = False) -> None:
        self._machine = machine
        self._timing = timing
        self.work: Work | None = None
        self.clock: Clock | None = None

    def record(self, stream: Stream) -> None:
        with self._machine.lock:
            stream.join(self._machine.host().clock)
            stream.tick()
            # Waits without work behind them count too, so the event is a separate piece of work.
            self.work = stream.issue(lambda: None, (), "event")
            self.clock = dict(stream.clock)

    def synchronize(self) -> None:
        if self.clock is None:
            self._machine.report(f"the host waits for an event that was not recorded, at {site()}")
            return
        self._machine.wait_on_host(self.work, self.clock)

    def query(self) -> bool:
        with self._machine.lock:
            self._machine.drift()
            return self.work is None or self.work.done

    def elapsed_time(self, end: Event) -> float:
        for event in (self, end):
            if not event._timing or event.clock is None:
                raise RuntimeError("the event was made without `timing`, or was not recorded")
            if event.work is not None and not event.work.done:
                raise RuntimeError("device not ready: the event has not passed")
        return 1000 * (end.work.end - self.work.end)


class Range(NamedTuple):
    """Bytes in one memory accessed by a piece of work."""

    history: History
    start: int
    stop: int
    write: bool


class Issued(NamedTuple):
    """Work issued to a stream, or memory released to it, which is no work."""

    stream: Stream
    work: Work | None
    accesses: Sequence[Range]
    words: str


class StreamWait(NamedTuple):
    """A stream's wait for another stream's work."""

    stream: Stream
    work: Work


class HostWait(NamedTuple):
    """A host thread's wait for work."""

    work: Work


class HostAccess(NamedTuple):
    """A host thread's access to page-locked memory."""

    access: Range
    words: str


TraceEntry: TypeAlias = Issued | StreamWait | HostWait | HostAccess


class Slab:
    """Device memory that the allocator hands out as a whole."""

    def __init__(self, nbytes: int, report: Callable[[str], None]) -> None:
        memory = np.empty(nbytes + GRANULE, np.uint8)
        start = -memory.ctypes.data % GRANULE
        with torch.inference_mode(False):
            # The storage starts there.
            self.bytes = torch.from_numpy(memory[start : start + nbytes])
        self.nbytes = nbytes
        self.address = self.bytes.data_ptr()
        self.history = History(nbytes, report)


class Block:
    """Allocated memory: a slab in use until the last tensor in it is deleted."""

    def __init__(self, slab: Slab, stream: Stream) -> None:
        self.slab = slab
        self.stream = stream
        weakref.finalize(self, stream.device.free, slab, stream).atexit = False


class Device:
    """One device's streams and allocator.

    As in torch's allocator, each stream has a pool for released memory.
    """

    def __init__(self, machine: Machine, index: int, capacity: int) -> None:
        self.machine = machine
        self.index = index
        self.total = capacity
        self.capacity = capacity
        """Bytes that can be reserved, less than `total` under a limit."""
        self.default_stream = Stream(self, f"the default stream of device {index}")
        self.streams: list[Stream] = [self.default_stream]
        self._pool: dict[tuple[Stream, int], list[Slab]] = {}
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self.allocations = 0
        self.fail_at: int | None = None
        """Number of the allocation that fails as if memory were short, or None."""

    def new_stream(self) -> Stream:
        stream = Stream(self, f"stream {len(self.streams)} of device {self.index}")
        self.streams.append(stream)
        return stream

    def allocate(self, nbytes: int, stream: Stream) -> Block:
        """Return memory for `stream`.

        Raises:
            torch.OutOfMemoryError: there is not enough memory.
        """
        with self.machine.lock:
            if nbytes == 0:
                return Block(Slab(0, self.machine.report), stream)
            self.allocations += 1
            size = -(-nbytes // GRANULE) * GRANULE
            pool = self._pool.get((stream, size))
            if self.allocations == self.fail_at:
                raise torch.OutOfMemoryError(
                    f"allocation {self.allocations} of {size} bytes fails by request"
                )
            if pool:
                slab = pool.pop()
            else:
                if self.reserved + size > self.capacity:
                    self.empty_cache()
                if self.reserved + size > self.capacity:
                    raise torch.OutOfMemoryError(
                        f"{size} bytes requested, {self.capacity - self.reserved} are free"
                    )
                slab = Slab(size, self.machine.report)
                self.reserved += size
            self.allocated += size
            self.peak_allocated = max(self.peak_allocated, self.allocated)
            self.peak_reserved = max(self.peak_reserved, self.reserved)
            whole = Range(slab.history, 0, size, write=True)
            memory = slab.bytes
            stream.issue(lambda: memory.fill_(POISON), (whole,), f"allocation at {site()}")
            return Block(slab, stream)

    def free(self, slab: Slab, stream: Stream) -> None:
        with self.machine.lock:
            if slab.nbytes == 0:
                return
            self.allocated -= slab.nbytes
            # Later work on this stream may write into the memory at once.
            stream.join(self.machine.host().clock)
            stream.tick()
            words = f"release of memory to {stream.name} at {site()}"
            whole = Range(slab.history, 0, slab.nbytes, write=True)
            slab.history.add(0, slab.nbytes, actor=stream, words=words, write=True)
            self.machine.note(Issued, stream, None, [whole], words)
            self._pool.setdefault((stream, slab.nbytes), []).append(slab)

    def empty_cache(self) -> None:
        """After all work is done, return the memory in all pools to the device, like `cudaFree`."""
        for stream in self.streams:
            self.machine.force(stream.last)
        self.reserved -= sum(slab.nbytes for slabs in self._pool.values() for slab in slabs)
        self._pool.clear()


@dataclass
class LockedRange:
    """Page-locked host memory."""

    nbytes: int
    history: History


@dataclass
class ThreadState(threading.local):
    """Host thread: actor, current device, and current stream on each device."""

    actor: Actor | None = None
    device: int | None = None
    streams: dict[int, Stream] = field(default_factory=dict)


class Machine:
    """Devices, host threads and page locks for one test.

    Args:
        seed: chooses the execution order.
        devices: number of devices.
        capacity: bytes per device.
    """

    def __init__(self, seed: int = 0, *, devices: int = 1, capacity: int = 2**33) -> None:
        self.lock = threading.RLock()
        self._random = random.Random(seed)
        self.eagerness = (0.0, 0.5, 0.9)[seed % 3]
        """Share of work executed before the host waits for it."""
        self.problems: list[str] = []
        self.pageable_copies: set[str] = set()
        """Product file and function that copied memory without page-lock to a device."""
        self.host_waits: set[str] = set()
        """Product file and function in which a thread waited for a device."""
        self.trace: list[TraceEntry] | None = None
        """All calls in order of arrival, or None if they are not recorded."""
        self.launches = 0
        self.copies = 0
        self.devices = [Device(self, index, capacity) for index in range(devices)]
        self.locked: dict[int, LockedRange] = {}
        self.refuse_locks_beyond = math.inf
        self.refuse_unlocks = False
        self._mapped: list[Pages] = []
        self._unmapped: dict[int, list[Pages]] = {}
        self._thread = ThreadState()
        self.executing = False
        self.only_thread: int | None = None
        """Thread that alone may use devices without streams. None for devices with streams."""

    @property
    def streams(self) -> list[Stream]:
        return [stream for device in self.devices for stream in device.streams]

    def report(self, problem: str) -> None:
        """Note a problem once."""
        if problem not in self.problems:
            self.problems.append(problem)

    def note(self, entry: Callable[..., TraceEntry], *values: object) -> None:
        """Append an entry to the trace, if there is one."""
        if self.trace is not None:
            self.trace.append(entry(*values))

    def host(self) -> Actor:
        """Return the calling thread."""
        if self._thread.actor is None:
            self._thread.actor = Actor(f"thread {threading.current_thread().name}")
        return self._thread.actor

    @property
    def current_device(self) -> int:
        return self._thread.device or 0

    def set_device(self, index: int) -> None:
        self._thread.device = index

    def check_thread(self) -> None:
        """Report a call from a thread without a device, if there are several devices."""
        if self._thread.device is None and len(self.devices) > 1:
            self.report(f"{self.host().name} has not set its device, at {site()}")

    def check_only_thread(self) -> None:
        """Report work by a second thread for a device without streams."""
        if self.only_thread not in (None, threading.get_ident()):
            self.report(f"{self.host().name} uses a device of another thread, at {site()}")

    def current_stream(self, index: int) -> Stream:
        return self._thread.streams.get(index, self.devices[index].default_stream)

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        index = stream.device.index
        before = self.current_stream(index)
        self._thread.streams[index] = stream
        try:
            yield
        finally:
            self._thread.streams[index] = before

    def force(self, work: Work | None) -> None:
        """Execute `work` and everything before it."""
        with self.lock:
            stack = [] if work is None else [work]
            while stack:
                top = stack[-1]
                waiting = [] if top.done else [each for each in top.before if not each.done]
                if waiting:
                    stack += waiting
                    continue
                stack.pop()
                if not top.done:
                    assert top.stream.pending[0] is top, "a stream works in order"
                    top.stream.pending.popleft()
                    top.execute()

    def drift(self) -> None:
        """Execute some runnable work."""
        # A tensor collected in the middle of work records events: nothing may overtake that work.
        while not self.executing and self._random.random() < self.eagerness:
            heads = [stream.pending[0] for stream in self.streams if stream.pending]
            heads = [work for work in heads if not work.slow]
            ready = [work for work in heads if all(each.done for each in work.before)]
            if not ready:
                return
            work = self._random.choice(ready)
            work.stream.pending.popleft()
            work.execute()

    def wait_on_host(self, work: Work | None, clock: Clock) -> None:
        """Block the calling thread until `work` is done."""
        with self.lock:
            if (place := waiting_function()) is not None:
                self.host_waits.add(place)
            self.force(work)
            self.host().join(clock)
            self.note(HostWait, work)

    def finish(self) -> None:
        """Execute all work."""
        for stream in self.streams:
            self.force(stream.last)

    def lock_pages(self, memory: torch.Tensor) -> None:
        with self.lock:
            start = memory.data_ptr()
            stop = memory.data_ptr() + memory.numel()
            total = sum(each.nbytes for each in self.locked.values())
            if total + memory.numel() > self.refuse_locks_beyond:
                raise PageLockError("no more pages")
            first = start // mmap.PAGESIZE
            last = -(-stop // mmap.PAGESIZE)
            if any(
                first < -(-(other + each.nbytes) // mmap.PAGESIZE) and other // mmap.PAGESIZE < last
                for other, each in self.locked.items()
            ):
                raise PageLockError("part or all of the requested memory range is already mapped")
            self.locked[start] = LockedRange(memory.numel(), History(memory.numel(), self.report))

    def unlock_pages(self, memory: torch.Tensor) -> bool:
        """Return False if the driver refuses, as after a device error."""
        with self.lock:
            if self.refuse_unlocks:
                return False
            locked = self.locked.pop(memory.data_ptr(), None)
            if locked is None:
                self.report(f"memory is unlocked that is not locked, at {site()}")
            else:
                self._access(locked.history, 0, locked.nbytes, f"unlock at {site()}")
            return True

    def map_memory(self, nbytes: int) -> torch.Tensor:
        """Map host memory like the product's function, at the last unmapped address."""
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        with self.lock:
            unmapped = self._unmapped.setdefault(size, [])
            pages = unmapped.pop() if unmapped else Pages(size)
            # The system orders a mapping behind the one before.
            pages.history = History(size, self.report)
            self._mapped.append(pages)
            return pages.mapped(nbytes, self._unmap)

    def _unmap(self, pages: Pages) -> None:
        with self.lock:
            if self._locked_parts(pages.bytes):
                self.report(f"memory is unmapped while it is page-locked, at {site()}")
            self._access(pages.history, 0, pages.nbytes, f"unmapping at {site()}")
            pages.bytes.fill_(POISON)
            self._mapped.remove(pages)
            self._unmapped[pages.nbytes].append(pages)

    def pages_of(self, memory: torch.Tensor) -> Pages | None:
        """Return the pages mapped for `memory`. None if something else owns it."""
        with self.lock:
            at = memory.data_ptr()
            owners = (each for each in self._mapped if each.start <= at < each.start + each.nbytes)
            return next(owners, None)

    def host_writes(self, memory: torch.Tensor, words: str) -> None:
        """Note that the calling thread writes into host memory now."""
        with self.lock:
            for locked, start, stop in self._locked_parts(memory):
                self._access(locked.history, start, stop, words)

    def is_locked(self, memory: torch.Tensor) -> bool:
        """Return whether all `memory` is page-locked, in one piece or in several."""
        return sum(stop - start for _, start, stop in self._locked_parts(memory)) == memory.nbytes

    def locked_range(self, memory: torch.Tensor) -> tuple[LockedRange, int] | None:
        """Return the locked range to copy for `memory`, and the offset in it.

        None if it is not locked.
        """
        parts = self._locked_parts(memory)
        if not parts:
            return None
        locked, start, stop = parts[0]
        if stop - start < memory.nbytes:
            self.report(f"a copy crosses the end of page-locked memory, at {site()}")
            return None
        return locked, start

    def host_ranges(self, memory, locked, *, write) -> list[Range]:
        """Return the byte ranges for page-locked `memory`, in the lock and in the mapping."""
        ranges = [Range(locked[0].history, locked[1], locked[1] + memory.nbytes, write)]
        if (pages := self.pages_of(memory)) is not None:
            start = memory.data_ptr() - pages.start
            ranges.append(Range(pages.history, start, start + memory.nbytes, write))
        return ranges

    def host_view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return contiguous `memory` as the device sees it: it does not keep a mapping alive."""
        pages = self.pages_of(memory)
        return memory.detach() if pages is None else pages.view(memory)

    def _locked_parts(self, memory: torch.Tensor) -> list[tuple[LockedRange, int, int]]:
        """Return the locked ranges in `memory`, each with start and end of the shared bytes."""
        first = memory.data_ptr()
        last = memory.data_ptr() + memory.nbytes
        parts = []
        # Copied, because another thread may lock memory meanwhile.
        for at, locked in list(self.locked.items()):
            start = max(first, at)
            stop = min(last, at + locked.nbytes)
            if start < stop:
                parts.append((locked, start - at, stop - at))
        return parts

    def _access(self, history: History, start: int, stop: int, words: str) -> None:
        host = self.host()
        host.tick()
        history.add(start, stop, actor=host, words=f"{words} in {host.name}", write=True)
        self.note(HostAccess, Range(history, start, stop, write=True), words)


def site() -> str:
    """Return file and line for the innermost caller in the product, else in the tests."""
    frame = sys._getframe(1)
    found = ""
    while frame is not None:
        file = _file_of_project(frame.f_code.co_filename)
        if file is not None:
            where = f"{file}:{frame.f_lineno}"
            if not file.startswith("tests/"):
                return where
            found = found or where
        frame = frame.f_back  # type: ignore[assignment]
    return found


def waiting_function() -> str | None:
    """Return file and function for the innermost caller in the project, or None for a test."""
    frame = sys._getframe(1)
    while frame is not None:
        file = _file_of_project(frame.f_code.co_filename)
        if file is not None and not frame.f_code.co_name.startswith("<"):
            return None if file.startswith("tests/") else f"{file} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


@functools.cache
def _file_of_project(name: str) -> str | None:
    """Return a path in the product or in the tests.

    None for libraries and the checked device.
    """
    path = Path(name)
    if ROOT not in path.parents or "checked_device" in path.parts or "site-packages" in path.parts:
        return None
    return path.relative_to(ROOT).as_posix()
