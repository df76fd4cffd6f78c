"""Small block stacks, and a source that is slow in a repeatable way."""

from __future__ import annotations

import copy
import functools
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from wanstream.devices import DeviceRuntime, Event, PageLockError, runtime_for
from wanstream.offload.sharding.group import GatherBrokenError, Sharded
from wanstream.offload.sources.base import BlockSource, SourceError
from wanstream.offload.sources.module import ModuleSource
from wanstream.plan.programs import BlockKey


class Block(nn.Module):
    """A residual block with the kinds of tensors in a Wan block: matrices, biases, norm, table."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width, dtype=dtype)
        self.down = nn.Linear(3 * width, width, bias=False, dtype=dtype)
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.table = nn.Parameter(torch.randn(1, width, dtype=torch.float32))
        self.register_buffer("step", torch.ones(1, dtype=dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = torch.nn.functional.gelu(self.up(self.norm(hidden)))
        return hidden + self.down(inner) * self.step + self.table.to(hidden.dtype)


class SlowSource:
    """Passes on to another source after a random pause, and fails on demand."""

    def __init__(self, inner: BlockSource, *, seed: int, longest_s: float = 0.004) -> None:
        self.inner = inner
        self.formats = inner.formats
        self.reads: list[BlockKey] = []
        self.fail_at: int | None = None
        self._random = random.Random(seed)
        self._longest_s = longest_s

    def scales(self, key: BlockKey) -> Mapping[str, torch.Tensor]:
        return self.inner.scales(key)

    def file_bytes(self, key: BlockKey) -> int:
        return self.inner.file_bytes(key)

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        time.sleep(self._random.random() * self._longest_s)
        if self.fail_at == len(self.reads):
            raise SourceError(f"the disk went away at {key}")
        self.reads.append(key)
        self.inner.read_block(key, into)

    def close(self) -> None:
        self.inner.close()


class GatedSource(ModuleSource):
    """Notes the first read of `key`, or of any block, and waits there until it is opened."""

    def __init__(self, stacks: Mapping[str, Sequence[nn.Module]], key: BlockKey | None = None):
        super().__init__(stacks)
        self.entered = threading.Event()
        self.opened = threading.Event()
        self._gated = key

    def read_block(self, key: BlockKey, into: torch.Tensor) -> None:
        if self._gated in (None, key):
            self.entered.set()
            assert self.opened.wait(60)
        super().read_block(key, into)


def in_threads(jobs: Sequence[Callable[[], Any]], name: str = "job") -> list[Any]:
    """Run each job on a separate thread, and return results or errors."""
    results: list[Any] = [None] * len(jobs)

    def do(number: int) -> None:
        try:
            results[number] = jobs[number]()
        except BaseException as err:  # noqa: BLE001 - returned
            results[number] = err.with_traceback(None)

    start = functools.partial(threading.Thread, target=do, daemon=True)
    threads = [start(args=(n,), name=f"{name}-{n}") for n in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    return results


class LimitedPageLock:
    """A driver that locks up to `limit` pieces of memory and remembers them."""

    def __init__(self, *, limit: int = 1000) -> None:
        self.limit = limit
        self.attempts = 0
        self.locked: list[tuple[int, int]] = []

    def lock_pages(self, memory: torch.Tensor) -> None:
        self.attempts += 1
        if len(self.locked) == self.limit:
            raise PageLockError("no more pages")
        self.locked.append((memory.data_ptr(), memory.numel()))

    def unlock_pages(self, memory: torch.Tensor) -> None:
        self.locked.remove((memory.data_ptr(), memory.numel()))


@pytest.fixture
def make_stack() -> Callable[..., nn.ModuleList]:
    def make(count, *, seed=0, width=32, dtype=torch.float32) -> nn.ModuleList:
        return copy.deepcopy(_random_stack(count, seed, width, dtype))

    return make


@functools.cache
def _random_stack(count: int, seed: int, width: int, dtype: torch.dtype) -> nn.ModuleList:
    """Return a stack to copy: drawing 38 million values on a real device takes twice as long."""
    torch.manual_seed(seed)
    return nn.ModuleList(Block(width, dtype) for _ in range(count)).requires_grad_(False)


class ThreadGroup:
    """Gathers for ranks on threads in this process.

    `gathers[rank]` counts each rank's calls.
    """

    def __init__(self, size: int, *, wait_s: float = 30.0) -> None:
        self.size = size
        self.gathers = [0] * size
        self.owns: list[torch.Tensor | None] = [None] * size
        self.arrived: list[Event | None] = [None] * size
        self.done: list[Event | None] = [None] * size
        self.statements = [b""] * size
        self.meeting, self.gathering = (threading.Barrier(size, timeout=wait_s) for _ in range(2))

    def ranks(self, *, on_device: bool = False) -> list[Sharded]:
        gathers = [ThreadGather(self, rank) for rank in range(self.size)]
        return [Sharded(gather=gather, on_device=on_device) for gather in gathers]


class ThreadGather:
    """Gather for one rank."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.size = group.size

    def compare(self, statements: bytes) -> tuple[bytes, ...]:
        self.group.statements[self.rank] = statements
        self._wait(self.group.meeting)
        every = tuple(self.group.statements)
        self._wait(self.group.meeting)
        return every

    def all_gather(self, into: torch.Tensor, own: torch.Tensor) -> None:
        assert into.numel() == self.size * own.numel()
        self.group.owns[self.rank] = own
        runtime = runtime_for(own.device)
        self._meet(runtime, self.group.arrived)
        for part, other in zip(into.split(own.numel()), self.group.owns, strict=True):
            part.copy_(other)
        self._meet(runtime, self.group.done)
        self.group.gathers[self.rank] += 1

    def abort(self) -> None:
        self.group.gathering.abort()

    def _meet(self, runtime: DeviceRuntime | None, events: list[Event | None]) -> None:
        """Wait for all ranks, and order their current streams behind each other.

        The host does not wait for the device.
        """
        if runtime is None:
            self._wait(self.group.gathering)
            return
        stream = runtime.current_stream()
        event = runtime.event()
        event.record(stream)
        events[self.rank] = event
        self._wait(self.group.gathering)
        for other in events:
            stream.wait_event(other)

    def _wait(self, barrier: threading.Barrier) -> None:
        try:
            barrier.wait()
        except threading.BrokenBarrierError as err:
            raise GatherBrokenError("a rank was aborted") from err
