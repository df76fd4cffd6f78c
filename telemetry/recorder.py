"""Recorder: turns the events of a run into the same `Timeline` that the simulator writes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from ..devices import DeviceEvent, MemoryMeter, clock_for
from ..schema import RATE_BORDERS, MemorySample, PhaseRecord, RateRange, StepRecord, Timeline, rate_range, run_phases
from .memory_sampler import MemorySampler
from .nvtx import NvtxRanges, Ranges, ranged
from .options import TelemetryOptions
from .step_events import BlockArrival, StepEvents
from .trace import MAX_SPANS, TraceSpan, chrome_trace, write_trace


class RateCounter:
    """The fetches of one route."""

    def __init__(self) -> None:
        self._fetches = dict.fromkeys(RATE_BORDERS, 0)
        self._nbytes = dict.fromkeys(RATE_BORDERS, 0)
        self._busy_s = dict.fromkeys(RATE_BORDERS, 0.0)

    def add(self, moves: Iterable[tuple[int, float]]) -> None:
        """Count moves, each the bytes and seconds of one fetch."""
        for nbytes, seconds in moves:
            border = rate_range(nbytes, seconds)
            self._fetches[border] += 1
            self._nbytes[border] += nbytes
            self._busy_s[border] += seconds

    def ranges(self) -> tuple[RateRange, ...]:
        """What was counted so far: the ranges that hold something, in order."""
        return tuple(
            RateRange(from_gb_per_s=border, fetches=fetches, nbytes=self._nbytes[border], busy_s=self._busy_s[border])
            for border, fetches in self._fetches.items()
            if fetches
        )


BEFORE = ("open", "text")
"""Phases of a queue item that the first run after them shows as its own."""

OF_A_RUN = ("first block", "high", "switch", "low")

logger = logging.getLogger("wanstream.metrics")


class Recorder:
    """Collects what one run did, step by step.

    The engine reports visits and arrived blocks, the sampler opens and closes steps. Everything is read when a step
    closes, with one synchronisation, so that measuring does not disturb what it measures.

    Args:
        device: what computes.
        observe: what is told beside the timeline.
        ranges: named stretches of time for a profiler; None: as `observe` says.
        max_spans: no further step is told in full by a trace that has so many.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        observe: TelemetryOptions | None = None,
        ranges: Ranges | None = None,
        max_spans: int = MAX_SPANS,
    ) -> None:
        self.clock = clock_for(device)
        self.non_block_bytes = 0
        self._observe = observe or TelemetryOptions()
        self.ranges = NvtxRanges() if ranges is None and self._observe.nvtx else ranges
        self._device, self._memory = device, MemoryMeter(device)
        self._began = time.perf_counter()
        self._steps: list[StepRecord] = []
        self._computed_from: list[float | None] = []
        self._marks = StepEvents(self.clock)
        self._copy_rates, self._read_rates = RateCounter(), RateCounter()
        self._spans: list[TraceSpan] = []
        self._traced_steps, self._max_spans = 0, max_spans
        self._sampler: MemorySampler | None = None
        self._before: tuple[PhaseRecord, ...] = ()
        self._pinned_bytes: Callable[[], int] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The run is inside: memory is sampled; at the end, however it ends, its phases and its trace are noted.

        Raises OSError where the folder of the trace cannot be made.
        """
        ledger, folder = self._observe.ledger, self._observe.trace
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        if ledger is not None:
            self._before = _before(ledger.phases(since=self._began))
        self._sampler = MemorySampler(self._device, began=self._began)
        try:
            with self._sampler:
                yield
        finally:
            if ledger is not None:
                ledger.add(self._run_phases(), began=self._began)
            if folder is not None:
                self._write_trace(folder)

    @contextmanager
    def step(self, index: int, expert: str, sigma: float | None = None) -> Iterator[None]:
        """Everything inside belongs to step `index`; nothing is recorded when it raises."""
        self._marks = StepEvents(self.clock)
        self._memory.reset_peaks()
        began = time.perf_counter()
        with ranged(self.ranges, f"step {index} ({expert})"):
            yield
            end = self.clock.mark()
            self.clock.settle()
        now = time.perf_counter()
        marks = self._marks
        computed_from = marks.computed_from(end, now)
        self._computed_from.append(None if computed_from is None else computed_from - self._began)
        copies, reads = marks.copies(), marks.reads()
        self._steps.append(
            StepRecord(
                index=index,
                expert=expert,
                sigma=sigma,
                wall_s=now - began,
                compute_s=marks.compute_s(),
                stall_s=marks.stall_s(),
                bytes_moved=marks.bytes_moved(),
                device_bytes=self._memory.device_bytes(),
                rss_bytes=self._memory.rss_bytes(),
                decode_s=marks.decode_s(),
                read_bytes=sum(read.nbytes for read in reads),
                start_s=began - self._began,
                stall_on_read_s=marks.stall_on_read_s(end, now),
                copy_s=sum(seconds for _, seconds in copies),
                copied_bytes=sum(nbytes for nbytes, _ in copies),
                read_s=marks.read_s(),
                reserved_bytes=self._memory.reserved_bytes(),
                device_used_bytes=self._memory.used_bytes(),
                dynamic_bytes=self._observe.dynamic_bytes(),
                pinned_bytes=None if self._pinned_bytes is None else self._pinned_bytes(),
                skipped_lanes=marks.skipped_lanes,
                skipped_visits=marks.skipped_visits,
            )
        )
        self._copy_rates.add(copies)
        self._read_rates.add((read.nbytes, read.ended - read.began) for read in reads)
        if self._observe.trace is not None and len(self._spans) < self._max_spans:
            self._spans += marks.spans(expert, end, now, self._began)
            self._traced_steps = len(self._steps)

    def begin_run(self, pinned_bytes: Callable[[], int]) -> None:
        """A run of the engine begins; it is requested for its page-locked bytes when a step closes."""
        self._pinned_bytes = pinned_bytes

    def end_run(self) -> None:
        """A run of the engine is over."""
        self._pinned_bytes = None

    def record_arrival(self, arrival: BlockArrival) -> None:
        """A visit may start for which a block was fetched."""
        self._marks.arrivals.append(arrival)

    def visit(
        self, block: int, requested: DeviceEvent, arrived: DeviceEvent, ready: DeviceEvent, done: DeviceEvent
    ) -> None:
        """One visit of `block`; see `VisitEvents`."""
        self._marks.visits.append((block, requested, arrived, ready, done))

    def cached(self, *, lanes: int, visits: int) -> None:
        """A cache took over what `lanes` lanes would have computed, which left out `visits` visits of the step."""
        self._marks.skipped_lanes, self._marks.skipped_visits = lanes, visits

    @property
    def last(self) -> StepRecord:
        """The step that closed last."""
        return self._steps[-1]

    def timeline(self) -> Timeline:
        """What was recorded so far."""
        first_blocks = [computed_from for computed_from in self._computed_from if computed_from is not None]
        return Timeline(
            steps=tuple(self._steps),
            kind="measured",
            non_block_bytes=self.non_block_bytes,
            first_block_s=first_blocks[0] if first_blocks else None,
            phases=(*self._before, *self._run_phases()),
            memory=() if self._sampler is None else self._sampler.samples(),
            copy_rates=self._copy_rates.ranges(),
            read_rates=self._read_rates.ranges(),
        )

    def _write_trace(self, folder: Path) -> None:
        trace = chrome_trace(self.timeline(), self._spans, traced_steps=self._traced_steps)
        try:
            logger.info("trace: %s", write_trace(folder, trace))
        except OSError as err:  # the run itself is whole
            logger.warning("the trace of this run cannot be written to %s: %s", folder, err)

    def _run_phases(self) -> tuple[PhaseRecord, ...]:
        samples = () if self._sampler is None else self._sampler.samples()
        return tuple(_sampled(phase, samples) for phase in run_phases(self._steps, self._computed_from))


def _before(noted: Sequence[PhaseRecord]) -> tuple[PhaseRecord, ...]:
    """What was done for the run that begins now: nothing that an earlier run had before it."""
    runs = [place for place, phase in enumerate(noted) if phase.name in OF_A_RUN]
    return tuple(phase for phase in noted[runs[-1] + 1 if runs else 0 :] if phase.name in BEFORE)


def _sampled(phase: PhaseRecord, samples: tuple[MemorySample, ...]) -> PhaseRecord:
    """The phase with the most that was sampled on the device in it."""
    ended_s = phase.start_s + phase.wall_s
    used = [sample.device_used_bytes for sample in samples if phase.start_s <= sample.at_s <= ended_s]
    known = [value for value in (phase.device_used_bytes, *used) if value is not None]
    return replace(phase, device_used_bytes=max(known, default=None))
