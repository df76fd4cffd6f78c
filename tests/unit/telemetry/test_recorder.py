"""The recorder against an independent clock, and the resources it starts and stops."""

import json
import logging
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from wanstream.devices import NvtxRanges
from wanstream.telemetry import BlockArrival, QueueItemPhases, ReadSpan, Recorder, TelemetryOptions
from wanstream.telemetry import recorder as recorder_module
from wanstream.telemetry.trace import ranged

CPU = torch.device("cpu")
GB = 10**9
CLOCKS_DIFFER = 0.001
"""Share by which two clocks on one machine may drift."""


def outside() -> float:
    """Read a clock independent of the recorder's, never adjusted."""
    return time.clock_gettime(time.CLOCK_MONOTONIC_RAW)


def samplers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "wanstream-memory"]


def take_step(recorder: Recorder, index: int = 0, expert: str = "high", *, blocks: int = 2) -> None:
    """Record a step with visits that wait, decode and compute for about a millisecond each."""
    with recorder.step(index, expert, sigma=0.5):
        for block in range(blocks):
            asked = recorder.clock.mark()
            time.sleep(0.001)
            arrived = recorder.clock.mark()
            time.sleep(0.001)
            ready = recorder.clock.mark()
            decoded = (arrived, ready)
            recorder.record_arrival(BlockArrival(block, 100, asked, arrived, None, None, decoded))
            time.sleep(0.001)
            recorder.visit((block, asked, arrived, ready, recorder.clock.mark()))


def recorder_with(**options):
    return Recorder(CPU, observe=TelemetryOptions(**options))


def trace_in(folder):
    (file,) = folder.iterdir()
    return json.loads(file.read_text(encoding="utf-8"))


def test_visits_are_reported_only_within_a_step(monkeypatch):
    ticks = []
    told: list[tuple[str, int]] = []

    def sampler(*_, on_tick, **__):
        ticks.append(on_tick)

    monkeypatch.setattr(recorder_module, "MemorySampler", sampler)
    recorder = recorder_with(on_visits=lambda *visits: told.append(visits))
    (tick,) = ticks
    tick()
    for step, expert in enumerate(("high", "low")):
        with recorder.step(step, expert):
            tick()
        tick()  # the solver computes now: this step is counted, and the next one has no visits
    assert told == [("high", 0), ("low", 0)]


@pytest.mark.skipif(not hasattr(time, "CLOCK_MONOTONIC_RAW"), reason="there is one clock only")
def test_steps_and_visits_take_what_an_outside_clock_measures():
    """The time lies between the inner work's time and the whole call's."""
    recorder = Recorder(CPU)
    around = 0.0
    within = 0.0
    called = outside()
    with recorder.step(0, "high"):
        entered = outside()
        for block in range(5):
            before = outside()
            asked = recorder.clock.mark()
            after_asked = outside()
            time.sleep(0.005)
            before_arrived = outside()
            arrived = recorder.clock.mark()
            around += outside() - before
            within += before_arrived - after_asked
            recorder.visit((block, asked, arrived, arrived, recorder.clock.mark()))
        left = outside()
    returned = outside()
    step = recorder.last
    whole = (left - entered, step.wall_s, returned - called)
    for least, found, most in (whole, (within, step.stall_s, around)):
        assert least * (1 - CLOCKS_DIFFER) <= found <= most * (1 + CLOCKS_DIFFER)


def test_parts_of_a_step_fit_into_it_and_steps_follow_each_other():
    recorder = Recorder(CPU)
    for index, expert in enumerate(["high", "high", "low"]):
        take_step(recorder, index, expert)
    timeline = recorder.timeline()
    reached = 0.0
    for step in timeline.steps:
        assert min(step.compute_s, step.stall_s, step.decode_s) > 0
        assert step.compute_s + step.stall_s + step.decode_s <= step.wall_s
        assert step.start_s >= reached
        reached = step.start_s + step.wall_s
    assert [phase.name for phase in timeline.phases] == ["first block", "high", "switch", "low"]
    assert timeline.phases[0].wall_s == timeline.first_block_s
    assert sum(phase.wall_s for phase in timeline.phases) == pytest.approx(reached)
    assert timeline.switch_step == 2


def test_failed_step_is_not_recorded():
    recorder = Recorder(CPU)
    with pytest.raises(OSError, match="gone"), recorder.step(0, "high"):
        recorder.record_arrival(BlockArrival(0, 100, 0.0, 0.0, None, None, None))
        raise OSError("gone")
    take_step(recorder, blocks=1)
    (step,) = recorder.timeline().steps
    assert step.bytes_moved == 100


def test_fetches_are_counted_by_their_own_rates():
    """Two steps, each with a fast copy, a slow copy after a file read, and a block in a buffer."""
    recorder = Recorder(CPU)
    read = ReadSpan(1.0, 5.0, 2 * GB, False)
    for index in range(2):
        with recorder.step(index, "high"):
            for span, copied in ((None, (7.0, 7.1)), (read, (7.0, 9.0)), (None, None)):
                recorder.record_arrival(BlockArrival(0, 3 * GB, 9.0, 9.0, span, copied, None))
    timeline = recorder.timeline()
    copies = {rates.from_gb_per_s: (rates.fetches, rates.nbytes) for rates in timeline.copy_rates}
    assert copies == {20: (2, 6 * GB), 1: (2, 6 * GB)}
    (reads,) = timeline.read_rates
    assert (reads.from_gb_per_s, reads.fetches, reads.busy_s) == (0, 2, 8.0)
    transfers = timeline.transfers
    assert sum(rates.nbytes for rates in timeline.copy_rates) == transfers.copied_bytes
    assert reads.nbytes == transfers.read_bytes
    assert sum(rates.busy_s for rates in timeline.copy_rates) == pytest.approx(transfers.copy_s)


def test_steps_have_the_pinned_and_dynamic_memory_of_their_time():
    held = iter([3, None, 4])
    recorder = recorder_with(dynamic_bytes=lambda: next(held))
    take_step(recorder)
    recorder.begin_run(lambda: 77)
    take_step(recorder)
    recorder.end_run()
    take_step(recorder)
    memory = [step.memory for step in recorder.timeline().steps]
    assert [each.pinned_bytes for each in memory] == [None, 77, None]
    assert [each.dynamic_bytes for each in memory] == [3, None, 4]


def test_memory_is_watched_inside_and_not_after():
    recorder = Recorder(CPU)
    assert recorder.timeline().memory == ()
    with recorder.watching():
        assert len(samplers()) == 1
        take_step(recorder)
    assert samplers() == []
    samples = recorder.timeline().memory
    assert len(samples) >= 2
    assert all(sample.rss_bytes > 0 for sample in samples)
    (step,) = recorder.timeline().steps
    assert samples[-1].at_s >= (step.start_s or 0) + step.wall_s


def test_phases_are_exchanged_with_the_ledger():
    """Repeated benchmark runs have no "open" phase.

    A second sampler gets the phases before itself only.
    """
    ledger = QueueItemPhases()
    before_runs = []
    for opens in ([], ["open", "text", "decode"], [], ["open"]):
        for name in opens:
            with ledger.phase(name, CPU):
                pass
        recorder = recorder_with(ledger=ledger)
        with recorder.watching():
            take_step(recorder)
        *before, first_block, high = recorder.timeline().phases
        assert (first_block.name, high.name) == ("first block", "high")
        assert all(phase.start_s + phase.wall_s <= 0 for phase in before)
        before_runs.append([phase.name for phase in before])
    assert before_runs == [[], ["open", "text"], [], ["open"]]
    run = ["first block", "high"]
    opened = ["open", "text", "decode"]
    assert [phase.name for phase in ledger.phases()] == [*run, *opened, *run, *run, "open", *run]


def test_run_that_fails_is_noted_as_far_as_it_came(tmp_path):
    ledger = QueueItemPhases()
    recorder = recorder_with(ledger=ledger, trace=tmp_path)
    with pytest.raises(OSError, match="gone"), recorder.watching():
        take_step(recorder)
        raise OSError("gone")
    assert samplers() == []
    assert [phase.name for phase in ledger.phases()] == ["first block", "high"]
    assert trace_in(tmp_path)["traceEvents"]


def test_trace_is_left_only_on_request(tmp_path, caplog):
    folder = tmp_path / "traces"
    for asked in (None, folder):
        recorder = recorder_with(trace=asked)
        with caplog.at_level(logging.INFO), recorder.watching():
            take_step(recorder)
    events = trace_in(folder)["traceEvents"]
    computed = [event["name"] for event in events if event.get("cat") == "compute"]
    assert computed == ["high 0", "high 1"]
    assert [*tmp_path.iterdir()] == [folder]
    assert [each.getMessage() for each in caplog.records] == [f"trace: {next(folder.iterdir())}"]


def test_trace_of_a_long_run_is_bounded(tmp_path, monkeypatch):
    """Every step has 20 spans: one wait and one computation per visit."""
    monkeypatch.setattr(recorder_module, "MAX_SPANS", 200)
    recorder = recorder_with(trace=tmp_path)
    with recorder.watching():
        for index in range(12):
            with recorder.step(index, "high"):
                for block in range(10):
                    recorder.visit((block, 0.0, 0.0, 0.0, 0.0))
    trace = trace_in(tmp_path)
    assert trace["otherData"] == {"visits and fetches": "of the first 10 of 12 steps"}
    counts = Counter(event.get("cat") for event in trace["traceEvents"])
    assert (counts["wait"] + counts["compute"], counts["steps"]) == (200, 12)


def test_bad_folder_is_refused_before_the_run(tmp_path, caplog):
    (tmp_path / "file").touch()
    recorder = recorder_with(trace=tmp_path / "file" / "traces")
    with pytest.raises(OSError, match="file"), recorder.watching():
        raise AssertionError("the run has begun")
    assert samplers() == []
    folder = tmp_path / "traces"
    recorder = recorder_with(trace=folder)
    with recorder.watching():
        take_step(recorder)
        folder.rmdir()
        folder.write_text("in the way")
    assert len(recorder.timeline().steps) == 1
    assert "cannot be written" in caplog.text


def test_step_on_a_device_takes_what_an_outside_clock_measures(gpu):
    """A step ends when the device has done its work, also where nothing else synchronises."""
    gpu.need_kernels("times of a busy device")
    recorder = Recorder(torch.device("cuda", 0))
    torch.cuda._sleep(1000)
    for synchronise in (True, True, False):
        torch.cuda.synchronize()
        called = outside()
        with recorder.step(0, "high"):
            entered = outside()
            asked = recorder.clock.mark()
            torch.cuda._sleep(50_000_000)
            recorder.visit((0, asked, asked, asked, recorder.clock.mark()))
            if synchronise:
                torch.cuda.synchronize()
            left = outside()
        returned = outside()
        step = recorder.last
        assert (left - entered) * 0.98 <= step.wall_s <= (returned - called) * 1.02
        assert 0.005 < step.compute_s <= step.wall_s * 1.02


def test_memory_of_a_device_is_recorded_in_three_ways(gpu):
    recorder = Recorder(gpu.device)
    with recorder.step(0, "high"):
        held = torch.zeros(256 * 2**20, dtype=torch.uint8, device=gpu.device)
    memory = recorder.last.memory
    sizes = [held.nbytes, memory.device_bytes, memory.reserved_bytes, memory.device_used_bytes]
    assert sizes == sorted(sizes, key=lambda size: size or 0)


# --- options --------------------------------------------------------------------------------------


EXPECTED = [(None, None, (None, False)), ("", "", (None, False)), ("t", "1", (Path("t"), True))]
EXPECTED += [(None, "0", (None, False)), *((None, value, None) for value in ("yes", "2", " 1"))]


@pytest.mark.parametrize(("trace", "nvtx", "expected"), EXPECTED)
def test_options_come_from_the_environment(trace, nvtx, expected, monkeypatch):
    for name, value in (("WANSTREAM_TRACE", trace), ("WANSTREAM_NVTX", nvtx)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if expected is None:
        message = f"WANSTREAM_NVTX is '{nvtx}': set it to 1 for ranges, or to 0"
        with pytest.raises(ValueError, match=message):
            TelemetryOptions.from_environment()
        return
    options = TelemetryOptions.from_environment()
    assert (options.trace, options.nvtx) == expected
    assert (options.ledger, options.dynamic_bytes()) == (None, None)


def test_ranges_are_made_on_request_and_need_cuda():
    assert Recorder(CPU).ranges is None
    if torch.version.cuda is None:
        message = r"WANSTREAM_NVTX\), and torch .* has no CUDA: unset it"
        with pytest.raises(ValueError, match=message):
            recorder_with(nvtx=True)


def test_device_takes_ranges(gpu):
    gpu.need_kernels("NVTX")
    with ranged(NvtxRanges(), "step 0"):
        torch.zeros(1, device="cuda")
    recorder = Recorder(torch.device("cuda", 0), observe=TelemetryOptions(nvtx=True))
    assert isinstance(recorder.ranges, NvtxRanges)
