"""Run recorder: converts run events into the same `Timeline` that the simulator writes.

A caller or environment variables add a trace, NVTX ranges or the phases of a queue item.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from pathlib import Path

import torch

from ..devices import MemoryMeter, NvtxRanges, clock_for
from ..schema.records import (
    MemorySample,
    PhaseRecord,
    RateRange,
    StepMemory,
    StepRecord,
    Timeline,
    largest_known,
    run_phases,
    together,
)
from .memory_sampler import MemorySampler
from .phases import QueueItemPhases
from .step_events import BlockArrival, StepEvents, VisitEvents
from .trace import MAX_SPANS, TraceSpan, chrome_trace, ranged, write_trace

TRACE = "WANSTREAM_TRACE"
"""Environment variable: folder in which every run writes a trace for ui.perfetto.dev or
chrome://tracing."""

NVTX = "WANSTREAM_NVTX"
"""Environment variable: 1 makes steps, visits, fetches and reads NVTX ranges for NVIDIA's
profilers."""


def _no_figure() -> None:
    return None


@dataclass(frozen=True, kw_only=True, eq=False)
class TelemetryOptions:
    """Run outputs in addition to the timeline. Nothing by default."""

    trace: Path | None = None
    """Folder for the trace, created if it does not exist."""
    nvtx: bool = False
    """Emit NVTX ranges."""
    ledger: QueueItemPhases | None = None
    """Queue item phases. The run's phases are added, and earlier ones appear in the run's
    timeline."""
    dynamic_bytes: Callable[[], int | None] = _no_figure
    """Returns the device bytes now used by the host's dynamic VRAM. None without dynamic VRAM."""
    on_visits: Callable[[str, int], None] | None = None
    """Called with each memory sample, on its thread: the running step's expert, and the visits so
    far."""

    @classmethod
    def from_environment(cls) -> TelemetryOptions:
        """Return the options set by `WANSTREAM_TRACE` and `WANSTREAM_NVTX`.

        Raises:
            ValueError: `WANSTREAM_NVTX` is not 0, 1 or empty.
        """
        nvtx = os.environ.get(NVTX, "") or "0"
        if nvtx not in ("0", "1"):
            raise ValueError(f"{NVTX} is {nvtx!r}: set it to 1 for ranges, or to 0")
        folder = os.environ.get(TRACE, "")
        return cls(trace=Path(folder) if folder else None, nvtx=nvtx == "1")


PHASES_BEFORE_RUN = ("open", "text")
"""Queue item phases that appear in the timeline of the next run."""

RUN_PHASES = ("first block", "high", "switch", "low", "model")
"""Phases of a run itself."""

logger = logging.getLogger("wanstream.metrics")


class Recorder:
    """Records one run, step by step.

    The engine reports visits and arrived blocks. The sampling loop opens and closes steps. All
    events are read when a step closes, after one synchronisation, so measuring does not change the
    measured times.

    Args:
        device: compute device.
        observe: outputs in addition to the timeline.
    """

    def __init__(self, device: torch.device, *, observe: TelemetryOptions | None = None) -> None:
        self.clock = clock_for(device)
        self.non_block_bytes = 0
        self._observe = observe or TelemetryOptions()
        self.ranges = NvtxRanges() if self._observe.nvtx else None
        self._memory = MemoryMeter(device)
        self._start = time.perf_counter()
        self._steps: list[StepRecord] = []
        self._computed_from: list[float | None] = []
        self._events = StepEvents(self.clock)
        self._copy_rates: tuple[RateRange, ...] = ()
        self._read_rates: tuple[RateRange, ...] = ()
        self._spans: list[TraceSpan] = []
        self._traced_steps = 0
        self._expert: str | None = None
        on_visits = self._observe.on_visits
        tick = None if on_visits is None else partial(self._report_visits, on_visits)
        self._sampler = MemorySampler(device, run_start=self._start, on_tick=tick)
        self._phases_before: tuple[PhaseRecord, ...] = ()
        self._pinned_bytes: Callable[[], int | None] = _no_figure

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the `with` body as the run.

        Sample memory. At the end, even after an error, add phases and a trace.

        Raises:
            OSError: the trace folder cannot be created.
        """
        queue_item = self._observe.ledger
        folder = self._observe.trace
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        if queue_item is not None:
            self._phases_before = _phases_since_last_run(queue_item.phases(since=self._start))
        try:
            with self._sampler:
                yield
        finally:
            if queue_item is not None:
                # Phases take their peaks from the samples, so this comes after the last sample.
                queue_item.add(self._run_phases(), run_start=self._start)
            if folder is not None:
                self._write_trace(folder)

    @contextmanager
    def step(self, index: int, expert: str, sigma: float | None = None) -> Iterator[None]:
        """Record the `with` body as step `index`. Record nothing if it raises."""
        events = self._events = StepEvents(self.clock)
        self._expert = expert
        # After a failed attempt, the repeated step must not have the attempt's peak.
        self._memory.reset_peaks()
        start = time.perf_counter()
        with ranged(self.ranges, f"step {index} ({expert})"):
            yield
            end = self.clock.mark()
            # The only synchronisation in a step. Events must not be read before the device has
            # passed them.
            self.clock.settle()
        self._expert = None  # until the next step, before the visits begin
        now = time.perf_counter()
        self._computed_from.append(events.computed_from(end, now, self._start))
        self._steps.append(
            StepRecord(
                index=index,
                expert=expert,
                sigma=sigma,
                wall_s=now - start,
                compute_s=events.compute_s(),
                transfers=events.transfers(end, now),
                memory=self._step_memory(),
                decode_s=events.decode_s(),
                start_s=start - self._start,
                skipped_lanes=events.skipped_lanes,
                skipped_visits=events.skipped_visits,
            )
        )
        copies = starmap(RateRange.of_fetch, events.copies)
        self._copy_rates = together([*self._copy_rates, *copies])
        reads = starmap(RateRange.of_fetch, events.read_shares)
        self._read_rates = together([*self._read_rates, *reads])
        if self._observe.trace is not None and len(self._spans) < MAX_SPANS:
            self._spans += events.spans(expert, end, now, self._start)
            self._traced_steps = len(self._steps)

    def _step_memory(self) -> StepMemory:
        return StepMemory(
            device_bytes=self._memory.device_bytes(),
            reserved_bytes=self._memory.reserved_bytes(),
            device_used_bytes=self._memory.used_bytes(),
            dynamic_bytes=self._observe.dynamic_bytes(),
            rss_bytes=self._memory.rss_bytes(),
            pinned_bytes=self._pinned_bytes(),
        )

    def begin_run(self, pinned_bytes: Callable[[], int]) -> None:
        """Start an engine run.

        `pinned_bytes` returns the page-locked bytes and is called when a step closes.
        """
        self._pinned_bytes = pinned_bytes

    def end_run(self) -> None:
        """End the engine run. This recorder must not keep the engine alive."""
        self._pinned_bytes = _no_figure

    def record_arrival(self, arrival: BlockArrival) -> None:
        """Record the events of a fetch."""
        self._events.arrivals.append(arrival)

    def visit(self, events: VisitEvents) -> None:
        """Record the events of one visit."""
        self._events.visits.append(events)

    def _report_visits(self, on_visits: Callable[[str, int], None]) -> None:
        expert = self._expert  # once, because a step may end on the other thread
        if expert is not None:
            on_visits(expert, len(self._events.visits))

    def cached(self, *, lanes: int, visits: int) -> None:
        """Record that a cache replaced `lanes` lanes, and skipped `visits` visits in the step."""
        self._events.skipped_lanes = lanes
        self._events.skipped_visits = visits

    @property
    def last(self) -> StepRecord:
        """The last closed step."""
        return self._steps[-1]

    def timeline(self) -> Timeline:
        """Return the timeline so far."""
        return Timeline(
            steps=tuple(self._steps),
            kind="measured",
            non_block_bytes=self.non_block_bytes,
            # A step without visits has no first block.
            first_block_s=next((each for each in self._computed_from if each is not None), None),
            phases=(*self._phases_before, *self._run_phases()),
            memory=self._sampler.samples(),
            copy_rates=self._copy_rates,
            read_rates=self._read_rates,
        )

    def _write_trace(self, folder: Path) -> None:
        trace = chrome_trace(self.timeline(), self._spans, traced_steps=self._traced_steps)
        try:
            logger.info("trace: %s", write_trace(folder, trace))
        except OSError as err:  # not raised: the run itself has succeeded
            logger.warning("the trace of this run cannot be written to %s: %s", folder, err)

    def _run_phases(self) -> tuple[PhaseRecord, ...]:
        samples = self._sampler.samples()
        return tuple(
            _with_sampled_peak(phase, samples)
            for phase in run_phases(self._steps, self._computed_from)
        )


def _phases_since_last_run(phases: Sequence[PhaseRecord]) -> tuple[PhaseRecord, ...]:
    """Return the preparatory phases after the queue item's last run.

    Earlier ones belong to earlier runs.
    """
    found: list[PhaseRecord] = []
    for phase in phases:
        if phase.name in RUN_PHASES:
            found.clear()
        elif phase.name in PHASES_BEFORE_RUN:
            found.append(phase)
    return tuple(found)


def _with_sampled_peak(phase: PhaseRecord, samples: tuple[MemorySample, ...]) -> PhaseRecord:
    """Return the phase with the peak of the device memory samples taken during it."""
    end_s = phase.start_s + phase.wall_s
    used = [sample.device_used_bytes for sample in samples if phase.start_s <= sample.at_s <= end_s]
    return replace(phase, device_used_bytes=largest_known((phase.device_used_bytes, *used)))
