"""Ledger: the phases of one queue item, gathered from the several nodes that it runs."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from ..devices import MemoryMeter, clock_for
from ..schema import PHASES, PhaseRecord

MAX_QUEUE_ITEMS = 16


class QueueItemPhases:
    """Phases of one queue item in the order in which they ended; any thread may ask for them."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._lock = threading.Lock()
        self._phases: list[PhaseRecord] = []

    @contextmanager
    def phase(self, name: str, device: torch.device) -> Iterator[None]:
        """Everything inside is one phase, with what it has given to `device`; nothing is noted when it raises.

        Args:
            name: one of `PHASES`.
            device: whose memory is told.
        """
        assert name in PHASES, f"{name!r} is no phase"
        memory = MemoryMeter(device)
        memory.reset_peaks()
        began = time.perf_counter()
        yield
        clock_for(device).settle()
        record = PhaseRecord(
            name=name,
            start_s=began - self._began,
            wall_s=time.perf_counter() - began,
            device_bytes=memory.device_bytes(),
            device_used_bytes=memory.used_bytes(),
            rss_bytes=memory.rss_bytes(),
        )
        with self._lock:
            self._phases.append(record)

    def add(self, phases: Iterable[PhaseRecord], *, began: float) -> None:
        """Note the phases of a run that began when `time.perf_counter()` was `began`."""
        shift = began - self._began
        with self._lock:
            self._phases += [replace(phase, start_s=phase.start_s + shift) for phase in phases]

    def phases(self, *, since: float | None = None) -> tuple[PhaseRecord, ...]:
        """What was noted so far, in order of beginning.

        `start_s` counts from `since`, a value of `time.perf_counter()`, or from the moment when this ledger was opened.
        """
        shift = 0.0 if since is None else self._began - since
        with self._lock:
            noted = [replace(phase, start_s=phase.start_s + shift) for phase in self._phases]
        return tuple(sorted(noted, key=lambda phase: phase.start_s))


class PhaseRegistry:
    """The ledgers of the last queue items, by their id."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ledgers: OrderedDict[str, QueueItemPhases] = OrderedDict()

    def of(self, run_id: str) -> QueueItemPhases:
        """The ledger of that queue item, opened if there is none; the one that was requested for longest ago may go."""
        with self._lock:
            ledger = self._ledgers.setdefault(run_id, QueueItemPhases())
            self._ledgers.move_to_end(run_id)
            while len(self._ledgers) > MAX_QUEUE_ITEMS:
                self._ledgers.popitem(last=False)
            return ledger
