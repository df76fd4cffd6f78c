"""Thread that samples memory at intervals, to record peaks between a run's events too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from ..devices import MemoryMeter
from ..schema.records import MemorySample, largest_known


class MemorySampler:
    """Samples memory during a single `with` block, including both ends.

    With more than `max_samples`, neighbours are merged into one sample with the larger values and
    the first one's time, and the interval doubles. Peaks are preserved.

    Args:
        device: device to sample, in addition to this process's RAM.
        run_start: start of the run, a `time.perf_counter()` value.
        on_tick: called every `interval_s`, also once samples have become rarer.
    """

    interval_s = 0.5
    """Seconds between two samples."""
    max_samples = 600
    """Maximum number of samples kept."""

    def __init__(
        self, device: torch.device, *, run_start: float, on_tick: Callable[[], None] | None = None
    ) -> None:
        self._meter = MemoryMeter(device)
        self._run_start = run_start
        self._on_tick = on_tick
        self._ticks_per_sample = 1
        self._samples: list[MemorySample] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._sample_until_stop, name="wanstream-memory", daemon=True
        )

    def samples(self) -> tuple[MemorySample, ...]:
        """Return the samples so far (any thread)."""
        with self._lock:
            return tuple(self._samples)

    def _sample_until_stop(self) -> None:
        ticks = 0
        while True:
            if ticks % self._ticks_per_sample == 0:
                self._sample()
            if self._on_tick is not None:
                self._on_tick()
            # This pause ends at once at the end of the `with` block.
            if self._stop.wait(self.interval_s):
                break
            ticks += 1
        self._sample()  # one last sample after the end of the block

    def _sample(self) -> None:
        # The sample is taken without the lock, so `samples` never waits for the driver.
        sample = MemorySample(
            at_s=time.perf_counter() - self._run_start,
            device_bytes=self._meter.allocated_bytes(),
            device_used_bytes=self._meter.used_bytes(),
            rss_bytes=self._meter.rss_bytes(),
        )
        with self._lock:
            self._samples.append(sample)
            if len(self._samples) > self.max_samples:
                self._samples = downsample(self._samples)
                self._ticks_per_sample *= 2

    def __enter__(self) -> MemorySampler:
        self._thread.start()  # raises RuntimeError for a second block: a thread starts once
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def downsample(samples: list[MemorySample]) -> list[MemorySample]:
    """Return half as many samples: the larger values in each pair, at the first one's time."""
    merged = list(map(_merge, samples[::2], samples[1::2]))
    # If the number is odd, the last sample has no partner.
    return merged + samples[2 * len(merged) :]


def _merge(first: MemorySample, second: MemorySample) -> MemorySample:
    return replace(
        first,
        device_bytes=largest_known((first.device_bytes, second.device_bytes)),
        device_used_bytes=largest_known((first.device_used_bytes, second.device_used_bytes)),
        rss_bytes=max(first.rss_bytes, second.rss_bytes),
    )
