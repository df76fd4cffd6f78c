"""Thread that samples memory between events."""

import mmap
import threading
import time

import numpy as np
import pytest
import torch

from wanstream.schema.records import MemorySample
from wanstream.telemetry.memory_sampler import MemorySampler, downsample
from wanstream.tests.support.polling import eventually

CPU = torch.device("cpu")


def sampler(device=CPU, *, on_tick=None, **settings):
    made = MemorySampler(device, run_start=time.perf_counter(), on_tick=on_tick)
    vars(made).update({"interval_s": 0.001, **settings})
    return made


def samplers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "wanstream-memory"]


def sample(at, *, device=None, used=None, rss=1) -> MemorySample:
    return MemorySample(at_s=at, device_bytes=device, device_used_bytes=used, rss_bytes=rss)


def test_thread_is_gone_after_the_end_of_its_only_block():
    with sampler(interval_s=1000.0) as running:
        (thread,) = samplers()
        assert thread.daemon
        assert eventually(lambda: len(running.samples()) == 1)
        with pytest.raises(RuntimeError, match="only be started once"):
            running.__enter__()
    assert samplers() == []
    assert len(running.samples()) == 2, "the end is sampled at once"
    memory = {(each.device_bytes, each.device_used_bytes) for each in running.samples()}
    assert memory == {(None, None)}
    with pytest.raises(RuntimeError, match="only be started once"), running:
        pass
    with pytest.raises(KeyboardInterrupt), sampler():
        raise KeyboardInterrupt
    assert samplers() == []


def test_peak_between_two_events_is_seen():
    nbytes = 200_000_000
    with sampler() as running:
        assert eventually(lambda: bool(running.samples()))
        before = running.samples()[-1].rss_bytes
        held = mmap.mmap(-1, nbytes)  # the allocator could return memory freed by earlier tests
        np.frombuffer(held, np.uint8).fill(1)
        assert eventually(lambda: running.samples()[-1].rss_bytes > before + nbytes // 2)
        del held
    times = [each.at_s for each in running.samples()]
    assert times == sorted(times)
    assert times[0] >= 0


def test_long_run_keeps_a_bounded_number_and_ticks_as_before():
    ticks: list[int] = []
    with sampler(max_samples=8, on_tick=lambda: ticks.append(len(ticks))) as running:
        assert eventually(lambda: running._ticks_per_sample > 1)
        assert eventually(lambda: len(running.samples()) >= 5)
    assert len(running.samples()) <= 9
    assert len(ticks) > len(running.samples())


@pytest.mark.parametrize("count", [0, 1, 2, 5, 8])
def test_thinning_keeps_peaks_and_the_first_time(count):
    samples = [sample(at, device=at % 3, used=at % 5, rss=1 + at * 7 % 10) for at in range(count)]
    fewer = downsample(samples)
    assert [each.at_s for each in fewer] == [each.at_s for each in samples[::2]]
    for name in ("device_bytes", "device_used_bytes", "rss_bytes"):
        peak = max((getattr(each, name) for each in samples), default=0)
        assert max((getattr(each, name) for each in fewer), default=0) == peak


def test_thinning_takes_known_values():
    both = [sample(0, device=None, rss=3), sample(1, device=7, rss=2)]
    assert downsample(both) == [sample(0, device=7, rss=3)]
    assert downsample([sample(0), sample(1)]) == [sample(0)]


def test_memory_of_a_device_is_sampled_beside_it(gpu):
    nbytes = 256 * 2**20
    torch.zeros(1, device=gpu.device)
    with sampler(gpu.device) as running:
        assert eventually(lambda: bool(running.samples()))
        before = running.samples()[-1].device_bytes
        assert before is not None
        held = torch.zeros(nbytes, dtype=torch.uint8, device=gpu.device)
        assert eventually(lambda: (running.samples()[-1].device_bytes or 0) >= before + nbytes)
        del held
    for each in running.samples():
        assert (each.device_used_bytes or 0) >= (each.device_bytes or 0)
