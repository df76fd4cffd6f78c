"""Phases of a queue item, collected from all nodes it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import torch

from ..devices import MemoryMeter, clock_for
from ..schema.records import PHASES, PhaseRecord

# Bounds what a long session keeps.
MAX_QUEUE_ITEMS = 16


class QueueItemPhases:
    """Phases of one queue item. Any thread may call any method."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._lock = threading.Lock()
        self._phases: list[PhaseRecord] = []

    @contextmanager
    def phase(self, name: str, device: torch.device) -> Iterator[None]:
        """Record the `with` body as one phase, including the work it issues to `device`.

        Skip it if it raises.

        Args:
            name: one of `PHASES`.
            device: device to synchronise, and to record memory from.
        """
        assert name in PHASES, f"{name!r} is not a phase"
        memory = MemoryMeter(device)
        # torch has one peak counter, so a phase within another one resets the outer phase's peak.
        memory.reset_peaks()
        start = time.perf_counter()
        yield
        # Work may still run on the device, and the phase ends with it.
        clock_for(device).settle()
        record = PhaseRecord(
            name=name,
            start_s=start - self._start,
            wall_s=time.perf_counter() - start,
            device_bytes=memory.device_bytes(),
            device_used_bytes=memory.used_bytes(),
            rss_bytes=memory.rss_bytes(),
        )
        with self._lock:
            self._phases.append(record)

    def add(self, phases: Iterable[PhaseRecord], *, run_start: float) -> None:
        """Add a run's phases. `run_start` is a `time.perf_counter()` value."""
        shift = run_start - self._start
        with self._lock:
            self._phases += [replace(phase, start_s=phase.start_s + shift) for phase in phases]

    def phases(self, *, since: float | None = None) -> tuple[PhaseRecord, ...]:
        """Return the phases recorded so far, by start.

        `start_s` counts from `since`, a `time.perf_counter()` value, or from this object's
        creation.
        """
        shift = 0.0 if since is None else self._start - since
        with self._lock:
            phases = [replace(phase, start_s=phase.start_s + shift) for phase in self._phases]
        return tuple(sorted(phases, key=lambda phase: phase.start_s))


class PhaseRegistry:
    """Phases for the most recently used queue items, by item id."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items = lru_cache(MAX_QUEUE_ITEMS)(lambda run_id: QueueItemPhases())

    def of(self, run_id: str) -> QueueItemPhases:
        """Return a queue item's phases, created on first use.

        The least recently used items are dropped.
        """
        # Without the lock, two threads asking for a new key at the same time may get two objects.
        with self._lock:
            return self._items(run_id)
