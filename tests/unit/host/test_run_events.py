"""Run events: in order, as plain JSON, with an end event for every kind of end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from wanstream.host.run_events import BEGIN, END, STEP, VISITS, RunEvents
from wanstream.schema import StateError
from wanstream.schema.records import Advice, MemorySample, StepRecord, Timeline

EXPERTS = ["high", "high", "low"]


def record(index: int) -> StepRecord:
    return StepRecord.of(
        index=index,
        expert=EXPERTS[index],
        sigma=0.5,
        wall_s=1.5,
        compute_s=1.0,
        stall_s=0.25,
        bytes_moved=7,
    )


TIMELINE = Timeline(steps=tuple(record(index) for index in range(3)), kind="measured")
PREDICTED = Timeline(steps=(record(0),), kind="simulated")


class Told(list[tuple[str, dict[str, Any]]]):
    """List of announced events after a JSON round trip."""

    def __call__(self, event: str, payload: Mapping[str, Any]) -> None:
        self.append((event, json.loads(json.dumps(payload))))

    def events(self) -> list[str]:
        return [event for event, _ in self]


def announced(told: Told, **options: Any) -> RunEvents:
    return RunEvents(told, **{"prompt_id": "p", "node_id": "7", "experts": EXPERTS, **options})


def test_a_run_is_told_from_its_beginning_to_its_end() -> None:
    told = Told()
    with announced(told, predicted=PREDICTED) as run:
        for step in TIMELINE.steps:
            run.step(step)
        run.ended(TIMELINE)
    assert told.events() == [BEGIN, STEP, STEP, STEP, END]
    begin, *steps, end = (payload for _, payload in told)
    assert (begin["steps"], begin["experts"], begin["switch_step"]) == (3, EXPERTS, 2)
    assert begin["predicted"] == end["predicted"] == json.loads(json.dumps(PREDICTED.to_dict()))
    assert [(step["done"], step["total"]) for step in steps] == [(1, 3), (2, 3), (3, 3)]
    assert Timeline.from_dict(end["timeline"]) == TIMELINE
    assert [StepRecord.of(**step["record"]) for step in steps] == list(TIMELINE.steps)
    assert end["error"] is None
    assert {payload["run"] for _, payload in told} == {begin["run"]}
    assert {
        (payload["prompt_id"], payload["node"], payload["shown_at"]) for _, payload in told
    } == {("p", "7", "7")}


def test_what_each_worker_did_is_told_at_the_end_without_its_memory() -> None:
    told = Told()
    sampled = replace(
        TIMELINE,
        memory=(MemorySample(at_s=0.0, device_bytes=None, device_used_bytes=None, rss_bytes=5),),
    )
    with announced(told) as run:
        run.ended(TIMELINE, ranks={1: sampled, 0: PREDICTED})
    ranks = told[-1][1]["ranks"]
    assert {rank: Timeline.from_dict(each) for rank, each in ranks.items()} == {
        "0": PREDICTED,
        "1": TIMELINE,
    }


def test_the_hosts_own_interrupt_is_named_cancelled() -> None:
    """ComfyUI's bar raises one without text if it notices the button first."""
    told = Told()
    with pytest.raises(LookupError), announced(told, is_stop=lambda e: isinstance(e, LookupError)):
        raise LookupError
    assert told[-1][1]["error"] == "cancelled"


def test_advice_is_announced_at_the_end() -> None:
    told = Told()
    with announced(told) as run:
        run.ended(TIMELINE, advice=Advice(policy="all in RAM", gain=1.5))
    with announced(told) as run:
        run.ended(TIMELINE)
    ends = [payload["advice"] for event, payload in told if event == END]
    assert ends == [{"policy": "all in RAM", "gain": 1.5}, None]


def test_two_runs_of_one_node_are_told_apart() -> None:
    told = Told()
    for _ in range(2):
        with announced(told):
            pass
    assert len({payload["run"] for _, payload in told}) == 2


def test_a_run_of_one_expert_has_no_switch_and_may_be_shown_elsewhere() -> None:
    told = Told()
    with announced(told, experts=["low", "low"], shown_at="3"):
        pass
    assert told[0][1]["switch_step"] is None
    assert (told[0][1]["node"], told[0][1]["shown_at"]) == ("7", "3")


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("no room"), "no room"), (KeyboardInterrupt(), "KeyboardInterrupt")],
)
def test_a_run_that_fails_says_why_and_hides_nothing(error: BaseException, said: str) -> None:
    told = Told()
    with pytest.raises(type(error)), announced(told) as run:
        run.step(record(0))
        raise error
    assert told.events() == [BEGIN, STEP, END]
    assert (told[-1][1]["error"], told[-1][1]["timeline"]) == (said, None)


def test_more_calls_than_were_expected_are_told() -> None:
    told = Told()
    with announced(told, experts=["high"]) as run:
        for step in TIMELINE.steps:
            run.step(step)
    assert [payload["total"] for event, payload in told if event == STEP] == [1, 2, 3]


def test_progress_within_a_step_and_changes_are_told() -> None:
    told = Told()
    run = announced(told, notes=["chosen"])
    assert run.visits(3, 40) == (0, 3 / 40)
    with run:
        assert run.visits(12, 40) == (0, 0.3)
        assert run.visits(41, 40) == (0, 41 / 80), "a call may pass through its blocks twice"
        run.step(record(0), ["smaller"])
        assert run.visits(0, 40) == (1, 0.0)
    assert [
        (each["step"], each["done"], each["total"]) for event, each in told if event == VISITS
    ] == [
        (0, 12, 40),
        (0, 41, 80),
        (1, 0, 40),
    ]
    assert [told[0][1]["changes"], *(each["changes"] for event, each in told if event == STEP)] == [
        ["chosen"],
        ["chosen", "smaller"],
    ]


def test_a_wrong_order_is_refused() -> None:
    run = announced(Told())
    with pytest.raises(StateError, match="the run is new"):
        run.step(record(0))
    with run:
        with pytest.raises(StateError, match="the run is running"):
            run.__enter__()
    with pytest.raises(StateError, match="the run is over"):
        run.ended(TIMELINE)
