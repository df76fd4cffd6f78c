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
        self._visits: list[tuple[Mark, Mark, Mark]] = []
        self._moved = 0
        self.outer_bytes = 0

    @contextmanager
    def step(self, index: int, expert: str, sigma: float | None = None) -> Iterator[None]:
        """Everything inside belongs to step `index`; nothing is recorded when it raises."""
        self._visits.clear()
        self._moved = 0
        self._memory.restart()
        began = time.perf_counter()
        yield
        end = self.clock.mark()
        self.clock.settle()
        now = time.perf_counter()
        seconds = self.clock.seconds
        if self._first_block_s is None and self._visits:
            _, first_ready, _ = self._visits[0]
            self._first_block_s = now - self._began - seconds(first_ready, end)
        self._steps.append(
            StepRecord(
                index=index,
                expert=expert,
                sigma=sigma,
                wall_s=now - began,
                compute_s=sum(seconds(ready, done) for _, ready, done in self._visits),
                stall_s=sum(seconds(asked, ready) for asked, ready, _ in self._visits),
                bytes_moved=self._moved,
                device_bytes=self._memory.device_bytes(),
                rss_bytes=self._memory.rss_bytes(),
            )
        )

    def visit(self, asked: Mark, ready: Mark, done: Mark) -> None:
        """One visit: when its block was asked for, when it was there, when the last lane had passed."""
        self._visits.append((asked, ready, done))

    def block_ready(self, nbytes: int) -> None:
        """A visit may start; its block was fetched for it with `nbytes` stored bytes, 0 if it was there already."""
        self._moved += nbytes

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
