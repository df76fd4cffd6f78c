"""Block source interface, reading threads, and measured reads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch

from ...devices import NvtxRanges
from ...plan.programs import BlockKey
from ...telemetry import ReadSpan, ranged
from ..core.threads import RunStopped
from ..formats.layout import BlockFormat


class SourceError(OSError):
    """A block could not be read. The message names the file or block, and the remedy."""


class InsufficientRamError(SourceError):
    """There is not enough RAM for blocks. The message has both figures."""


class BlockSource(Protocol):
    """Source of blocks as flat bytes in their stored dtype: a checkpoint or module weights.

    Any thread may call, and several threads read blocks at once. After an error the source remains
    usable, and the next call tries again.

    Attributes:
        formats: stored and computed layout for every readable block, in model order.
    """

    formats: Mapping[BlockKey, BlockFormat]

    def scales(self, key: BlockKey) -> Mapping[str, torch.Tensor]:
        """Return the fp32 CPU scales by parameter name, each 0-d or [rows, 1].

        Empty if there are none.

        The first call reads them. Later calls return the same tensors.
        """

    def file_bytes(self, key: BlockKey) -> int:
        """Return the bytes read from files by one `read_block`."""

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        """Read a block into `into`, 1-D uint8 CPU memory with `stored.nbytes` bytes.

        Raises:
            SourceError: the bytes could not be read. The contents of `into` are then undefined.
            RunStopped: as for SourceError, inside `reads_until`.
        """

    def close(self) -> None:
        """Release files, threads and memory. Closing twice is allowed."""


class RangeSource(BlockSource, Protocol):
    """Source that can also read a part of a block."""

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        self.read_range(key, range(self.formats[key].stored.nbytes), into)

    def range_file_bytes(self, key: BlockKey, wanted: range) -> int:
        """Return the approximate bytes read from files by `read_range`."""

    def read_range(self, key: BlockKey, wanted: range, into: torch.Tensor) -> None:
        """Read the bytes `wanted` in the stored block into `into`.

        `into` is 1-D uint8 CPU memory, at least as large.

        Raises:
            SourceError: the bytes could not be read. The contents of `into` are then undefined.
        """


# The default `bool` returns False, so a read outside `reads_until` is never stopped.
_is_stopped: ContextVar[Callable[[], bool]] = ContextVar("is_stopped", default=bool)
"""Returns True when this thread should stop reading. A context variable, because sources read from
each other."""


@contextmanager
def reads_until(is_stopped: Callable[[], bool]) -> Iterator[None]:
    """Let this thread's reads raise RunStopped between block pieces once `is_stopped` returns True.

    A Wan2.2 A14B block takes seconds from a slow disk, and a cancelled run waits for the reads.
    """
    token = _is_stopped.set(is_stopped)
    try:
        yield
    finally:
        _is_stopped.reset(token)


def check_not_stopped() -> None:
    """Raise RunStopped if this thread should stop reading."""
    if _is_stopped.get()():
        raise RunStopped


class ReadThreads:
    """A source's threads, which share the reads for one block.

    The first read starts them, `close` ends them.

    Args:
        count: number of threads.
        start: starts a pool with that many threads.

    Raises:
        ValueError: `count` is less than 1.
    """

    def __init__(self, count: int, start: Callable[[int], ThreadPoolExecutor]) -> None:
        if count < 1:
            raise ValueError(f"{count} threads cannot read: use 1 or more")
        self.count = count
        self._start = start
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def run(self, tasks: Iterable[Callable[[], None]]) -> None:
        """Run all tasks and wait for them.

        After an error, raise it and leave out the tasks not yet started.

        Raises:
            SourceError: the threads were closed, or a task has raised it.
            RunStopped: no task has failed, but some were left out because this thread should stop
                reading.
        """
        queue = deque(tasks)
        with self._lock:
            if self._closed:
                raise SourceError("the source was closed; open it again to read from it")
            pool = self._pool = self._pool or self._start(self.count)
        # The variable is read here, because pool threads do not have this thread's context.
        is_stopped = _is_stopped.get()
        futures = [
            pool.submit(_work_off, queue, is_stopped) for _ in range(min(self.count, len(queue)))
        ]
        # Wait for all before raising: no thread may write into the memory after this method has
        # returned.
        wait(futures)
        for future in futures:
            future.result()
        if queue:
            raise RunStopped

    def close(self) -> None:
        """Wait for reads in progress, then stop the threads. Closing twice is allowed."""
        with self._lock:
            self._closed = True
            pool = self._pool
            self._pool = None
        if pool is not None:
            pool.shutdown()


def _work_off(queue: deque[Callable[[], None]], is_stopped: Callable[[], bool]) -> None:
    while queue and not is_stopped():
        try:
            task = queue.popleft()
        except IndexError:  # another thread took the last one
            return
        try:
            task()
        except SourceError:
            queue.clear()  # the block is incomplete anyway, so the other threads can stop
            raise


def timed_read(
    source: BlockSource,
    key: BlockKey,
    into: torch.Tensor,
    ranges: NvtxRanges | None,
    *,
    straight: bool = False,
) -> ReadSpan:
    """Read a block as `BlockSource.read_block` does, and return the measured read.

    Args:
        source: source to read from.
        key: the block.
        into: memory for the block.
        ranges: profiler ranges. One gets the block's name. None for none.
        straight: the block is read into a buffer, not into RAM.
    """
    start = time.perf_counter()
    with ranged(ranges, f"read {key.expert} {key.block}"):
        source.read_block(key, into)
    return ReadSpan(start, time.perf_counter(), source.file_bytes(key), straight)
