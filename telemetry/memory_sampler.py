"""A thread that looks at memory now and then, so that peaks between the events of a run are seen too."""

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
    """Where a sampler is; the value completes the sentence "this sampler ..."."""

    NEW = "was not started"
    RUNNING = "is running"
    STOPPED = "was stopped"


class MemorySampler:
    """Samples memory from `start` to `stop`, the first and the last moment included; use with `with`.

    Where a run gets long, neighbours become one sample with the larger figures of both, at the time of the first, and
    the interval doubles: peaks stay.

    Args:
        device: whose memory is sampled, beside the RAM of this process.
        began: when the run began, a value of `time.perf_counter()`.
        interval_s: seconds between two samples.
        most: how many samples are kept.
    """

    def __init__(
        self, device: torch.device, *, began: float, interval_s: float = INTERVAL_S, most: int = MAX_SAMPLES
    ) -> None:
        self.state = SamplerState.NEW
        self._meter = MemoryMeter(device)
        self._began, self._interval_s, self._most = began, interval_s, most
        self._samples: list[MemorySample] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample_on, name="wanstream-memory", daemon=True)

    def start(self) -> None:
        """Begin; raises RuntimeError unless it is new."""
        self._advance(SamplerState.NEW, SamplerState.RUNNING)
        self._thread.start()

    def stop(self) -> None:
        """End, and return when the thread is gone; raises RuntimeError unless it is running."""
        self._advance(SamplerState.RUNNING, SamplerState.STOPPED)
        self._over.set()
        self._thread.join()

    def samples(self) -> tuple[MemorySample, ...]:
        """What was sampled so far; any thread may ask."""
        with self._lock:
            return tuple(self._samples)

    def _advance(self, before: SamplerState, after: SamplerState) -> None:
        if self.state is not before:
            raise RuntimeError(f"this sampler {self.state.value}: it cannot become one that {after.value}")
        self.state = after

    def _sample_on(self) -> None:
        ending = False
        while True:
            self._sample()
            if ending:
                return
            ending = self._over.wait(self._interval_s)

    def _sample(self) -> None:
        sample = MemorySample(
            at_s=time.perf_counter() - self._began,
            device_bytes=self._meter.allocated_bytes(),
            device_used_bytes=self._meter.used_bytes(),
            rss_bytes=self._meter.rss_bytes(),
        )
        with self._lock:
            self._samples.append(sample)
            if len(self._samples) > self._most:
                self._samples = downsample(self._samples)
                self._interval_s *= 2

    def __enter__(self) -> MemorySampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def downsample(samples: list[MemorySample]) -> list[MemorySample]:
    """Half as many samples, each with the larger figures of two neighbours, at the time of the first."""
    return [first if second is None else _larger(first, second) for first, second in _pairs(samples)]


def _pairs(samples: list[MemorySample]) -> list[tuple[MemorySample, MemorySample | None]]:
    return list(zip_longest(samples[::2], samples[1::2]))


def _larger(first: MemorySample, second: MemorySample) -> MemorySample:
    return MemorySample(
        at_s=first.at_s,
        device_bytes=_most(first.device_bytes, second.device_bytes),
        device_used_bytes=_most(first.device_used_bytes, second.device_used_bytes),
        rss_bytes=max(first.rss_bytes, second.rss_bytes),
    )


def _most(*values: int | None) -> int | None:
    return max((value for value in values if value is not None), default=None)
