"""Telemetry for a run with both experts: times, phases, memory, and a trace on request."""

from __future__ import annotations

import json
import threading
import time

import pytest

from wanstream.sampling import ModelCalls, RunPolicy
from wanstream.sampling.steps import SamplingCancelled, StepProgress
from wanstream.schema.records import Timeline
from wanstream.telemetry import Recorder, TelemetryOptions
from wanstream.telemetry.phases import QueueItemPhases
from wanstream.tests.support.sampling.runs import CPU, LAYERWISE, SHAPE, run

NOT_ON_A_CPU = {"device_bytes", "reserved_bytes", "device_used_bytes", "dynamic_bytes"}


def samplers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "wanstream-memory"]


def test_a_step_has_every_figure(open_pair, make_request):
    called = time.perf_counter()
    seen = list[int]()
    result = run(open_pair(), make_request(), on_step=lambda _: seen.append(len(samplers())))
    took = time.perf_counter() - called
    timeline = result.timeline
    for step in timeline.steps:
        unknown = {name for name, value in step.to_dict().items() if value is None}
        assert unknown == {*NOT_ON_A_CPU, "limit_s"}
        assert step.memory.pinned_bytes == 0
    assert [phase.name for phase in timeline.phases] == ["first block", "high", "switch", "low"]
    assert Timeline.from_dict(json.loads(json.dumps(timeline.to_dict()))) == timeline
    last = timeline.steps[-1]
    assert timeline.wall_s <= last.start_s + last.wall_s <= took, "from the call on"
    assert timeline.memory[-1].at_s <= took
    assert (seen, samplers()) == ([1] * 5, []), "memory is watched during the run only"


def test_steps_end_at_the_times_of_an_outside_clock(open_pair, make_request):
    """For some start time, steps end before their report, and the next begins afterwards."""
    reported = list[float]()

    def report(_: StepProgress) -> None:
        reported.append(time.clock_gettime(time.CLOCK_MONOTONIC))

    steps = run(open_pair(), make_request(), on_step=report).timeline.steps
    ends = [step.start_s + step.wall_s for step in steps]
    latest = min(at - end for at, end in zip(reported, ends, strict=True))
    earliest = max(at - step.start_s for at, step in zip(reported, steps[1:], strict=False))
    assert earliest <= latest + 1e-4


@pytest.mark.parametrize("fails", ["cancelled", "callback"])
def test_a_run_that_ends_early_leaves_no_thread(open_pair, make_request, fails):
    pair = open_pair()
    stop = threading.Event()
    ledger = QueueItemPhases()

    def on_step(step: StepProgress) -> None:
        if fails == "callback":
            raise OSError("no room for the preview")
        stop.set()

    how = {"on_step": on_step, "should_stop": stop.is_set}
    with pytest.raises((SamplingCancelled, OSError)):
        run(pair, make_request(), **how, observe=TelemetryOptions(ledger=ledger))
    assert samplers() == []
    assert not pair.running
    assert [phase.name for phase in ledger.phases()] == ["first block", "high"], "as far as it came"


def test_the_environment_asks_for_a_trace(open_pair, make_request, tmp_path, monkeypatch):
    monkeypatch.setenv("WANSTREAM_TRACE", str(tmp_path / "traces"))
    pair, request = open_pair(), make_request()
    timeline = run(pair, request).timeline
    run(pair, request, observe=TelemetryOptions())
    (file,) = (tmp_path / "traces").iterdir()
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    computed = [event["name"] for event in events if event.get("cat") == "compute"]
    names = {f"{expert} {block}" for expert in ("high", "low") for block in range(4)}
    assert (len(computed), {*computed}) == (5 * 4, names)
    steps = [event["name"] for event in events if event.get("cat") == "steps"]
    assert steps == [f"{step.expert} {step.index}" for step in timeline.steps]


def test_model_calls_are_watched_from_entering_to_leaving(open_pair):
    recorder = Recorder(CPU)
    policy = RunPolicy(open_pair(), LAYERWISE, CPU, shape=SHAPE, sides=(0,))
    with ModelCalls(policy, ["high"], recorder=recorder):
        assert len(samplers()) == 1
    assert samplers() == []
    assert len(recorder.timeline().memory) >= 2
