"""Thread that samples memory at intervals, to record peaks between the events of a run too."""

from __future__ import annotations

import threading
import time
from enum import Enum
from itertools import zip_longest

import torch

from ..devices import MemoryMeter
from ..schema import MemorySample

INTERVAL_S = 0.5
MAX_SAMPLES = 600


class SamplerState(Enum):
    """States of a sampler, in their order; the values are for messages."""

    NEW = "was not started"
    RUNNING = "is running"
    STOPPED = "was stopped"


class MemorySampler:
    """Samples memory from `start` to `stop`, including both ends; use it with `with`.

    When there are more than `max_samples`, neighbours are merged into one sample with the larger values of both and
    the time of the first, and the interval doubles. Peaks are preserved.

    Args:
        device: device whose memory is sampled, in addition to the RAM of this process.
        run_start: start of the run, a value of `time.perf_counter()`.
        interval_s: seconds between two samples.
        max_samples: maximum number of samples that are kept.
    """

    def __init__(
        self, device: torch.device, *, run_start: float, interval_s: float = INTERVAL_S, max_samples: int = MAX_SAMPLES
    ) -> None:
        self.state = SamplerState.NEW
        self._meter = MemoryMeter(device)
        self._run_start, self._interval_s, self._max_samples = run_start, interval_s, max_samples
        self._samples: list[MemorySample] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stop, name="wanstream-memory", daemon=True)

    def start(self) -> None:
        """Start sampling; raise RuntimeError unless the sampler is new."""
        self._advance(SamplerState.NEW, SamplerState.RUNNING)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling and join the thread; raise RuntimeError unless the sampler is running."""
        self._advance(SamplerState.RUNNING, SamplerState.STOPPED)
        self._stop.set()
        self._thread.join()

    def samples(self) -> tuple[MemorySample, ...]:
        """Return the samples so far (any thread)."""
        with self._lock:
            return tuple(self._samples)

    def _advance(self, before: SamplerState, after: SamplerState) -> None:
        if self.state is not before:
            raise RuntimeError(f"this sampler {self.state.value}, so it cannot go from {before.name} to {after.name}")
        self.state = after

    def _sample_until_stop(self) -> None:
        stopped = False
        while True:
            self._sample()
            if stopped:  # one last sample after `stop`
                return
            stopped = self._stop.wait(self._interval_s)

    def _sample(self) -> None:
        sample = MemorySample(
            at_s=time.perf_counter() - self._run_start,
            device_bytes=self._meter.allocated_bytes(),
            device_used_bytes=self._meter.used_bytes(),
            rss_bytes=self._meter.rss_bytes(),
        )
        with self._lock:
            self._samples.append(sample)
            if len(self._samples) > self._max_samples:
                self._samples = downsample(self._samples)
                self._interval_s *= 2

    def __enter__(self) -> MemorySampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def downsample(samples: list[MemorySample]) -> list[MemorySample]:
    """Return half as many samples, each with the larger values of two neighbours and the time of the first."""
    pairs = zip_longest(samples[::2], samples[1::2])
    return [first if second is None else _merge(first, second) for first, second in pairs]


def _merge(first: MemorySample, second: MemorySample) -> MemorySample:
    return MemorySample(
        at_s=first.at_s,
        device_bytes=_max(first.device_bytes, second.device_bytes),
        device_used_bytes=_max(first.device_used_bytes, second.device_used_bytes),
        rss_bytes=max(first.rss_bytes, second.rss_bytes),
    )


def _max(*values: int | None) -> int | None:
    return max((value for value in values if value is not None), default=None)
