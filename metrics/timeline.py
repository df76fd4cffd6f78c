"""Recorder: turns the marks of a run into the same `Timeline` that the simulator writes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..plan import StepRecord, Timeline
from .device import Mark, MemoryMeter, clock_for


class Recorder:
    """Collects what one run did, step by step.

    The engine reports visits and arrived bytes, the sampler opens and closes steps. Everything is read when a step
    closes, with one synchronisation, so that measuring does not disturb what it measures.
    """

    def __init__(self, device: torch.device) -> None:
        self.clock = clock_for(device)
        self._memory = MemoryMeter(device)
        self._began = time.perf_counter()
        self._first_block_s: float | None = None
        self._steps: list[StepRecord] = []
        self._visits: list[tuple[Mark, Mark, Mark, Mark]] = []
        self._decoded: list[tuple[Mark, Mark]] = []
        self._moved = self._read = 0
        self.outer_bytes = 0

    @contextmanager
    def step(self, index: int, expert: str, sigma: float | None = None) -> Iterator[None]:
        """Everything inside belongs to step `index`; nothing is recorded when it raises."""
        self._visits.clear()
        self._decoded.clear()
        self._moved = self._read = 0
        self._memory.restart()
        began = time.perf_counter()
        yield
        end = self.clock.mark()
        self.clock.settle()
        now = time.perf_counter()
        seconds = self.clock.seconds
        if self._first_block_s is None and self._visits:
            _, _, first_ready, _ = self._visits[0]
            self._first_block_s = now - self._began - seconds(first_ready, end)
        self._steps.append(
            StepRecord(
                index=index,
                expert=expert,
                sigma=sigma,
                wall_s=now - began,
                compute_s=sum(seconds(ready, done) for _, _, ready, done in self._visits),
                stall_s=sum(seconds(asked, arrived) for asked, arrived, _, _ in self._visits),
                bytes_moved=self._moved,
                device_bytes=self._memory.device_bytes(),
                rss_bytes=self._memory.rss_bytes(),
                decode_s=sum(seconds(began, ended) for began, ended in self._decoded),
                read_bytes=self._read,
            )
        )

    def visit(self, asked: Mark, arrived: Mark, ready: Mark, done: Mark) -> None:
        """One visit: when its block was asked for, there, and decoded, and when the last lane had passed.

        `arrived` and `ready` are the same where the computing thread does not decode.
        """
        self._visits.append((asked, arrived, ready, done))

    def block_arrived(self, nbytes: int, *, read_bytes: int = 0, decoded: tuple[Mark, Mark] | None = None) -> None:
        """A visit may start for which a block was fetched.

        Args:
            nbytes: bytes of the fetch.
            read_bytes: bytes that a file was read for it; 0 if RAM held the block from before.
            decoded: when decoding and patching it began and ended, on whichever stream.
        """
        self._moved += nbytes
        self._read += read_bytes
        if decoded is not None:
            self._decoded.append(decoded)

    @property
    def last(self) -> StepRecord:
        """The step that closed last."""
        return self._steps[-1]

    def timeline(self) -> Timeline:
        """What was recorded so far."""
        return Timeline(
            steps=tuple(self._steps),
            kind="measured",
            outer_bytes=self.outer_bytes,
            first_block_s=self._first_block_s,
        )
