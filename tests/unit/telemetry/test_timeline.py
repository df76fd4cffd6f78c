"""The recorder against an independent clock, and the resources it starts and stops."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from wanstream.telemetry import Recorder, TelemetryOptions
from wanstream.telemetry import recorder as recorder_module
from wanstream.telemetry.phases import QueueItemPhases
from wanstream.telemetry.step_events import BlockArrival, ReadSpan
from wanstream.tests.support.accelerator import Accelerator

CPU = torch.device("cpu")
GB = 10**9
CLOCKS_DIFFER = 0.001
"""Share by which two clocks on one machine may drift."""


def outside() -> float:
    """Read a clock independent of the recorder's, never adjusted."""
    return time.clock_gettime(time.CLOCK_MONOTONIC_RAW)


needs_raw_clock = pytest.mark.skipif(
    not hasattr(time, "CLOCK_MONOTONIC_RAW"), reason="this system has one clock only"
)


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
            recorder.record_arrival(
                BlockArrival(block, 100, asked, arrived, None, None, (arrived, ready))
            )
            time.sleep(0.001)
            recorder.visit((block, asked, arrived, ready, recorder.clock.mark()))


def test_visits_are_reported_only_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[Callable[[], None]] = []
    monkeypatch.setattr(
        recorder_module, "MemorySampler", lambda *_, on_tick, **__: ticks.append(on_tick)
    )
    told: list[tuple[str, int]] = []
    recorder = Recorder(
        CPU, observe=TelemetryOptions(on_visits=lambda *visits: told.append(visits))
    )
    (tick,) = ticks
    tick()
    for step, expert in enumerate(("high", "low")):
        with recorder.step(step, expert):
            tick()
        tick()  # the solver computes now: this step is counted, and the next one has no visits
    assert told == [("high", 0), ("low", 0)]


@needs_raw_clock
def test_a_step_takes_what_an_outside_clock_says() -> None:
    """The step time lies between the inner work's time and the whole call's."""
    recorder = Recorder(CPU)
    for index in range(3):
        called = outside()
        with recorder.step(index, "high"):
            entered = outside()
            time.sleep(0.02)
            left = outside()
        returned = outside()
        wall_s = recorder.last.wall_s
        assert (
            (left - entered) * (1 - CLOCKS_DIFFER)
            <= wall_s
            <= (returned - called) * (1 + CLOCKS_DIFFER)
        )


@needs_raw_clock
def test_visits_take_what_an_outside_clock_says() -> None:
    recorder, around, within = Recorder(CPU), 0.0, 0.0
    with recorder.step(0, "high"):
        for block in range(5):
            before = outside()
            asked = recorder.clock.mark()
            after_asked = outside()
            time.sleep(0.005)
            before_arrived = outside()
            arrived = recorder.clock.mark()
            around, within = around + outside() - before, within + before_arrived - after_asked
            recorder.visit((block, asked, arrived, arrived, recorder.clock.mark()))
    assert within * (1 - CLOCKS_DIFFER) <= recorder.last.stall_s <= around * (1 + CLOCKS_DIFFER)


def test_parts_of_a_step_fit_into_it_and_steps_follow_each_other() -> None:
    recorder = Recorder(CPU)
    for index, expert in enumerate(["high", "high", "low"]):
        take_step(recorder, index, expert)
    timeline = recorder.timeline()
    reached = 0.0
    for step in timeline.steps:
        assert min(step.compute_s, step.stall_s, step.decode_s) > 0
        assert step.compute_s + step.stall_s + step.decode_s <= step.wall_s
        assert step.start_s is not None
        assert step.start_s >= reached
        reached = step.start_s + step.wall_s
    assert [phase.name for phase in timeline.phases] == ["first block", "high", "switch", "low"]
    assert timeline.phases[0].wall_s == timeline.first_block_s
    assert sum(phase.wall_s for phase in timeline.phases) == pytest.approx(reached)
    assert timeline.switch_step == 2


def test_a_step_that_fails_is_not_recorded_and_leaves_nothing_to_the_next() -> None:
    recorder = Recorder(CPU)
    with pytest.raises(OSError, match="gone"), recorder.step(0, "high"):
        recorder.record_arrival(BlockArrival(0, 100, 0.0, 0.0, None, None, None))
        raise OSError("gone")
    take_step(recorder, blocks=1)
    (step,) = recorder.timeline().steps
    assert step.bytes_moved == 100


def test_fetches_are_counted_by_their_own_rates_whatever_their_steps_is() -> None:
    """Two steps, each with a fast copy, a slow copy after a file read, and a block in a buffer."""
    recorder = Recorder(CPU)
    for index in range(2):
        with recorder.step(index, "high"):
            for seconds, read in ((0.1, None), (2.0, ReadSpan(1.0, 5.0, 2 * GB, False))):
                recorder.record_arrival(
                    BlockArrival(0, 3 * GB, 9.0, 9.0, read, (7.0, 7.0 + seconds), None)
                )
            recorder.record_arrival(BlockArrival(2, 3 * GB, 9.0, 9.0, None, None, None))
    timeline = recorder.timeline()
    copies = {rates.from_gb_per_s: (rates.fetches, rates.nbytes) for rates in timeline.copy_rates}
    assert copies == {20: (2, 6 * GB), 1: (2, 6 * GB)}
    assert [
        (rates.from_gb_per_s, rates.fetches, rates.busy_s) for rates in timeline.read_rates
    ] == [(0, 2, 8.0)]
    assert sum(rates.nbytes for rates in timeline.copy_rates) == timeline.transfers.copied_bytes
    assert sum(rates.nbytes for rates in timeline.read_rates) == timeline.transfers.read_bytes
    assert sum(rates.busy_s for rates in timeline.copy_rates) == pytest.approx(
        timeline.transfers.copy_s
    )


def test_pinned_bytes_are_those_of_the_run_that_goes_on() -> None:
    recorder = Recorder(CPU)
    take_step(recorder)
    recorder.begin_run(lambda: 77)
    take_step(recorder)
    recorder.end_run()
    take_step(recorder)
    assert [step.memory.pinned_bytes for step in recorder.timeline().steps] == [None, 77, None]


def test_a_host_tells_its_dynamic_memory() -> None:
    held = iter([3, None])
    recorder = Recorder(CPU, observe=TelemetryOptions(dynamic_bytes=lambda: next(held)))
    take_step(recorder)
    take_step(recorder)
    assert [step.memory.dynamic_bytes for step in recorder.timeline().steps] == [3, None]


def test_memory_is_watched_inside_and_not_after() -> None:
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


def test_phases_before_the_run_come_from_the_ledger_and_those_of_the_run_go_there() -> None:
    ledger = QueueItemPhases()
    for name in ("open", "text", "decode"):
        with ledger.phase(name, CPU):
            pass
    recorder = Recorder(CPU, observe=TelemetryOptions(ledger=ledger))
    with recorder.watching():
        take_step(recorder)
    phases = recorder.timeline().phases
    assert [phase.name for phase in phases] == ["open", "text", "first block", "high"]
    assert all(phase.start_s + phase.wall_s <= 0 for phase in phases[:2])
    assert [phase.name for phase in ledger.phases()] == [
        "open",
        "text",
        "decode",
        "first block",
        "high",
    ]


def test_what_was_opened_for_one_run_is_not_told_of_the_next() -> None:
    """Repeated benchmark runs have no "open" phase.

    A second sampler gets the phases before itself only.
    """
    ledger, before_runs = QueueItemPhases(), []
    for opens in ([], ["open", "text"], [], ["open"]):
        for name in opens:
            with ledger.phase(name, CPU):
                pass
        recorder = Recorder(CPU, observe=TelemetryOptions(ledger=ledger))
        with recorder.watching():
            take_step(recorder)
        before_runs.append([phase.name for phase in recorder.timeline().phases][:-2])
    assert before_runs == [[], ["open", "text"], [], ["open"]]


def test_a_run_that_fails_is_noted_as_far_as_it_came() -> None:
    ledger = QueueItemPhases()
    recorder = Recorder(CPU, observe=TelemetryOptions(ledger=ledger))
    with pytest.raises(OSError, match="gone"), recorder.watching():
        take_step(recorder)
        raise OSError("gone")
    assert samplers() == []
    assert [phase.name for phase in ledger.phases()] == ["first block", "high"]


def test_a_trace_is_left_only_where_one_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for asked in (None, tmp_path / "traces"):
        recorder = Recorder(CPU, observe=TelemetryOptions(trace=asked))
        with caplog.at_level(logging.INFO), recorder.watching():
            take_step(recorder)
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "compute"] == [
        "high 0",
        "high 1",
    ]
    assert [record.getMessage() for record in caplog.records] == [f"trace: {file}"]


def test_a_trace_of_a_long_run_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step has 20 spans: one wait and one computation per visit."""
    monkeypatch.setattr(recorder_module, "MAX_SPANS", 200)
    recorder = Recorder(CPU, observe=TelemetryOptions(trace=tmp_path))
    with recorder.watching():
        for index in range(12):
            with recorder.step(index, "high"):
                for block in range(10):
                    recorder.visit((block, 0.0, 0.0, 0.0, 0.0))
    (file,) = tmp_path.iterdir()
    trace = json.loads(file.read_text(encoding="utf-8"))
    assert trace["otherData"] == {"visits and fetches": "of the first 10 of 12 steps"}
    assert sum(event.get("cat") in ("wait", "compute") for event in trace["traceEvents"]) == 200
    assert sum(event.get("cat") == "steps" for event in trace["traceEvents"]) == 12


def test_a_run_that_fails_leaves_its_trace(tmp_path: Path) -> None:
    recorder = Recorder(CPU, observe=TelemetryOptions(trace=tmp_path))
    with pytest.raises(OSError, match="gone"), recorder.watching():
        take_step(recorder)
        raise OSError("gone")
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_made_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    recorder = Recorder(CPU, observe=TelemetryOptions(trace=tmp_path / "file" / "traces"))
    with pytest.raises(OSError, match="file"), recorder.watching():
        raise AssertionError("the run has begun")
    assert samplers() == []


def test_a_trace_that_cannot_be_written_does_not_spoil_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "traces"
    recorder = Recorder(CPU, observe=TelemetryOptions(trace=folder))
    with recorder.watching():
        take_step(recorder)
        folder.rmdir()
        folder.write_text("in the way")
    assert len(recorder.timeline().steps) == 1
    assert "cannot be written" in caplog.text


def test_a_step_on_a_device_takes_what_an_outside_clock_says(gpu: Accelerator) -> None:
    gpu.need_kernels("times of a busy device")
    recorder = Recorder(torch.device("cuda", 0))
    torch.cuda._sleep(1000)
    for index in range(3):
        torch.cuda.synchronize()
        called = outside()
        with recorder.step(index, "high"):
            entered = outside()
            asked = recorder.clock.mark()
            torch.cuda._sleep(50_000_000)
            recorder.visit((0, asked, asked, asked, recorder.clock.mark()))
            torch.cuda.synchronize()
            left = outside()
        returned = outside()
        step = recorder.last
        assert (left - entered) * 0.98 <= step.wall_s <= (returned - called) * 1.02
        assert step.compute_s <= step.wall_s * 1.02


def test_a_step_ends_when_the_device_has_done_its_work(gpu: Accelerator) -> None:
    """Nothing else synchronises: the host has issued the work to the device and ends the step."""
    gpu.need_kernels("times of a busy device")
    recorder = Recorder(torch.device("cuda", 0))
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    with recorder.step(0, "high"):
        asked = recorder.clock.mark()
        torch.cuda._sleep(50_000_000)
        recorder.visit((0, asked, asked, asked, recorder.clock.mark()))
    step = recorder.last
    assert step.compute_s > 0.005
    assert step.wall_s >= step.compute_s * 0.98


def test_memory_of_a_device_is_told_in_three_ways(gpu: Accelerator) -> None:
    recorder = Recorder(gpu.device)
    with recorder.step(0, "high"):
        held = torch.zeros(256 * 2**20, dtype=torch.uint8, device=gpu.device)
    step = recorder.last
    assert step.memory.device_bytes is not None
    assert (
        held.nbytes
        <= step.memory.device_bytes
        <= (step.memory.reserved_bytes or 0)
        <= (step.memory.device_used_bytes or 0)
    )
