"""Telemetry for a run with both experts: times, phases, memory, and a trace on request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from wanstream.sampling import ModelCalls, RunPolicy, denoise
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import SamplingCancelled, StepProgress
from wanstream.schema import OffloadPolicy
from wanstream.schema.records import Timeline
from wanstream.telemetry import Recorder, TelemetryOptions
from wanstream.telemetry.phases import QueueItemPhases
from wanstream.wan import ExpertPair

CPU = torch.device("cpu")
LAYERWISE = OffloadPolicy.layerwise(1)
NOT_ON_A_CPU = {"device_bytes", "reserved_bytes", "device_used_bytes", "dynamic_bytes"}

Request, OpenPair = Callable[..., DenoiseRequest], Callable[..., ExpertPair]


def samplers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "wanstream-memory"]


def test_every_figure_of_a_step_is_told(open_pair: OpenPair, make_request: Request) -> None:
    timeline = denoise(open_pair(), make_request(), policy=LAYERWISE, device="cpu").timeline
    for step in timeline.steps:
        unknown = {name for name, value in step.to_dict().items() if value is None}
        assert unknown == {*NOT_ON_A_CPU, "limit_s"}
        assert step.memory.pinned_bytes == 0
    assert [phase.name for phase in timeline.phases] == ["first block", "high", "switch", "low"]
    assert Timeline.from_dict(json.loads(json.dumps(timeline.to_dict()))) == timeline


def test_steps_end_where_an_outside_clock_says(open_pair: OpenPair, make_request: Request) -> None:
    """For some start time, steps end before their report, and the next begins afterwards."""
    reported = list[float]()
    result = denoise(
        open_pair(),
        make_request(),
        policy=LAYERWISE,
        device="cpu",
        on_step=lambda _: reported.append(time.clock_gettime(time.CLOCK_MONOTONIC)),
    )
    steps = result.timeline.steps
    latest = min(
        at - (step.start_s + step.wall_s) for at, step in zip(reported, steps, strict=True)
    )
    earliest = max(at - step.start_s for at, step in zip(reported, steps[1:], strict=False))
    assert earliest <= latest + 1e-4


def test_the_run_begins_with_its_call_and_ends_with_it(
    open_pair: OpenPair, make_request: Request
) -> None:
    called = time.perf_counter()
    timeline = denoise(open_pair(), make_request(), policy=LAYERWISE, device="cpu").timeline
    took = time.perf_counter() - called
    last = timeline.steps[-1]
    assert last.start_s is not None
    assert timeline.wall_s <= last.start_s + last.wall_s <= took
    assert timeline.memory[-1].at_s <= took


def test_memory_is_watched_during_the_run_only(open_pair: OpenPair, make_request: Request) -> None:
    seen = list[int]()
    denoise(
        open_pair(),
        make_request(),
        policy=LAYERWISE,
        device="cpu",
        on_step=lambda _: seen.append(len(samplers())),
    )
    assert seen == [1] * 5
    assert samplers() == []


@pytest.mark.parametrize("fails", ["cancelled", "callback"])
def test_a_run_that_ends_early_leaves_no_thread(
    open_pair: OpenPair, make_request: Request, fails: str
) -> None:
    stop = threading.Event()

    def on_step(step: StepProgress) -> None:
        if fails == "callback":
            raise OSError("no room for the preview")
        stop.set()

    ledger = QueueItemPhases()
    with pytest.raises((SamplingCancelled, OSError)):
        denoise(
            open_pair(),
            make_request(),
            policy=LAYERWISE,
            device="cpu",
            on_step=on_step,
            should_stop=stop.is_set,
            observe=TelemetryOptions(ledger=ledger),
        )
    assert samplers() == []
    assert [phase.name for phase in ledger.phases()] == ["first block", "high"], "as far as it came"


def test_the_environment_asks_for_a_trace(
    open_pair: OpenPair, make_request: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANSTREAM_TRACE", str(tmp_path / "traces"))
    pair, request = open_pair(), make_request()
    timeline = denoise(pair, request, policy=LAYERWISE, device="cpu").timeline
    denoise(pair, request, policy=LAYERWISE, device="cpu", observe=TelemetryOptions())
    (file,) = (tmp_path / "traces").iterdir()
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    computed = [event for event in events if event.get("cat") == "compute"]
    assert len(computed) == 5 * 4
    names = {f"{expert} {block}" for expert in ("high", "low") for block in range(4)}
    assert {event["name"] for event in computed} == names
    assert [event["name"] for event in events if event.get("cat") == "steps"] == [
        f"{step.expert} {step.index}" for step in timeline.steps
    ]


def test_an_unusable_request_of_the_environment_is_refused_before_the_run(
    open_pair: OpenPair, make_request: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANSTREAM_NVTX", "perhaps")
    with pytest.raises(ValueError, match="WANSTREAM_NVTX"):
        denoise(open_pair(), make_request(), policy=LAYERWISE, device="cpu")


def test_passes_are_watched_from_entering_to_leaving(open_pair: OpenPair) -> None:
    recorder = Recorder(CPU)
    policy = RunPolicy(open_pair(), LAYERWISE, CPU, shape=(1, 16, 2, 4, 6), sides=(0,))
    with ModelCalls(policy, ["high"], recorder=recorder):
        assert len(samplers()) == 1
    assert samplers() == []
    assert len(recorder.timeline().memory) >= 2
