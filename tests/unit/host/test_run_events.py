"""Run events, and the bounded log for pages opened later, with notices and settings."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from wanstream.host import NOTICES_EVENT, RunEvents, run_settings
from wanstream.host.distilled_models import cfg_notices, node_with_cfg
from wanstream.host.run_events import (
    BEGIN,
    END,
    KEPT_NOTICES,
    KEPT_RUNS,
    LONGEST_NAME,
    STEP,
    VISITS,
    RunLog,
    contents_of,
    short_text,
)
from wanstream.plan import AutoOffload
from wanstream.schema import OffloadPolicy, StateError
from wanstream.schema.records import Advice, MemorySample, StepRecord, Timeline
from wanstream.schema.refs import ExpertsRef, LoraRef, WorkersRef
from wanstream.tests.support.host.shipped import node

EXPERTS = ["high", "high", "low"]
Graph = dict[str, Any]


def record(index: int) -> StepRecord:
    figures = {"wall_s": 1.5, "compute_s": 1.0, "stall_s": 0.25, "bytes_moved": 7}
    return StepRecord.of(index=index, expert=EXPERTS[index], sigma=0.5, **figures)


TIMELINE = Timeline(steps=tuple(map(record, range(3))), kind="measured")
PREDICTED = Timeline(steps=(record(0),), kind="simulated")


class Told(list[tuple[str, dict[str, Any]]]):
    """List of announced events after a JSON round trip."""

    def __call__(self, event: str, payload) -> None:
        self.append((event, json.loads(json.dumps(payload))))

    def of(self, kind: str):
        return [payload for event, payload in self if event == kind]


def announced(told: Told, **options) -> RunEvents:
    return RunEvents(told, **{"prompt_id": "p", "node_id": "7", "experts": EXPERTS, **options})


class TestEvents:
    def test_run_is_announced_from_beginning_to_end(self):
        told = Told()
        settings = run_settings(REF, LAYERWISE, LAYERWISE, SHAPE, CPU)
        with announced(told, predicted=PREDICTED, settings=settings) as run:
            for step in TIMELINE.steps:
                run.step(step)
            run.ended(TIMELINE)
        assert [event for event, _ in told] == [BEGIN, STEP, STEP, STEP, END]
        begin, *steps, end = (payload for _, payload in told)
        assert (begin["steps"], begin["experts"], begin["switch_step"]) == (3, EXPERTS, 2)
        assert begin["settings"] == asdict(settings)
        assert begin["predicted"] == end["predicted"] == json.loads(json.dumps(PREDICTED.to_dict()))
        assert [(step["done"], step["total"]) for step in steps] == [(1, 3), (2, 3), (3, 3)]
        assert Timeline.from_dict(end["timeline"]) == TIMELINE
        assert [StepRecord.of(**step["record"]) for step in steps] == list(TIMELINE.steps)
        assert (end["error"], end["advice"]) == (None, None)
        assert {payload["run"] for _, payload in told} == {begin["run"]}
        for _, payload in told:
            assert (payload["prompt_id"], payload["node"], payload["shown_at"]) == ("p", "7", "7")

    def test_workers_and_advice_are_announced_at_the_end(self):
        told = Told()
        memory = MemorySample(at_s=0.0, device_bytes=None, device_used_bytes=None, rss_bytes=5)
        ranks = {1: replace(TIMELINE, memory=(memory,)), 0: PREDICTED}
        with announced(told) as run:
            run.ended(TIMELINE, ranks=ranks, advice=Advice(policy="all in RAM", gain=1.5))
        (end,) = told.of(END)
        found = {rank: Timeline.from_dict(each) for rank, each in end["ranks"].items()}
        assert found == {"0": PREDICTED, "1": TIMELINE}, "without memory samples"
        assert end["advice"] == {"policy": "all in RAM", "gain": 1.5}

    def test_runs_of_one_expert_have_no_switch(self):
        told = Told()
        for _ in range(2):
            with announced(told, experts=["low", "low"], shown_at="3"):
                pass
        begins = told.of(BEGIN)
        assert len({begin["run"] for begin in begins}) == 2, "each run has its own number"
        assert begins[0]["switch_step"] is None
        assert (begins[0]["node"], begins[0]["shown_at"]) == ("7", "3")

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (ValueError("no room"), "no room"),
            (KeyboardInterrupt(), "KeyboardInterrupt"),
            # ComfyUI's bar raises an interrupt without text if it notices the button first.
            (LookupError(), "cancelled"),
        ],
    )
    def test_failed_run_has_its_reason(self, error, said):
        told = Told()
        with pytest.raises(type(error)):
            with announced(told, is_stop=lambda err: isinstance(err, LookupError)) as run:
                run.step(record(0))
                raise error
        assert [event for event, _ in told] == [BEGIN, STEP, END]
        assert (told[-1][1]["error"], told[-1][1]["timeline"]) == (said, None)

    def test_progress_within_a_step_and_changes(self):
        told = Told()
        run = announced(told, notes=["chosen"], experts=["high"])
        assert run.visits(3, 40) == (0, 3 / 40)
        with run:
            assert run.visits(12, 40) == (0, 0.3)
            assert run.visits(41, 40) == (0, 41 / 80), "a call may pass through its blocks twice"
            run.step(record(0), ["smaller"])
            assert run.visits(0, 40) == (1, 0.0)
            run.step(record(1))
        visits = [(each["step"], each["done"], each["total"]) for each in told.of(VISITS)]
        assert visits == [(0, 12, 40), (0, 41, 80), (1, 0, 40)]
        assert told.of(BEGIN)[0]["changes"] == ["chosen"]
        steps = [(each["total"], each["changes"]) for each in told.of(STEP)]
        # More calls than expected.
        assert steps == [(1, ["chosen", "smaller"]), (2, ["chosen"])]

    def test_wrong_order_is_refused(self):
        run = announced(Told())
        with pytest.raises(StateError, match="the run is new"):
            run.step(record(0))
        with run, pytest.raises(StateError, match="the run is running"):
            run.__enter__()
        with pytest.raises(StateError, match="the run is over"):
            run.ended(TIMELINE)


CPU = torch.device("cpu")
SHAPE = (1, 16, 21, 60, 104)
LAYERWISE = OffloadPolicy.layerwise()
REF = ExpertsRef(high_noise=Path("high.safetensors"), low_noise=Path("low.safetensors"))


class TestSettings:
    def test_settings_are_words(self):
        for shape, words in (
            (SHAPE, "832x480x81"),
            ((3, 16, 1, 8, 8), "64x64x1, 3 videos"),
            ((1, 48, 31, 44, 80), "1280x704x121"),
        ):
            assert run_settings(REF, LAYERWISE, LAYERWISE, shape, CPU).size == words
        half = replace(REF, compute_dtype="float16")
        found = run_settings(half, LAYERWISE, LAYERWISE, SHAPE, CPU)
        assert (found.dtype, found.policy, found.lora) == ("fp16", "layerwise, 1 ahead", "")
        low = Path("low.safetensors")
        one = Path("one.safetensors")
        pair = LoraRef(high_noise=Path("a/high.safetensors"), low_noise=low, strength_low=0.5)
        loras = replace(REF, loras=(pair, LoraRef(high_noise=one, low_noise=one)))
        swap = OffloadPolicy.block_swap(12, 2, source="pinned")
        found = run_settings(loras, AutoOffload(), swap, SHAPE, CPU)
        assert found.policy == "auto: block_swap 12, 2 ahead, RAM"
        assert found.lora == "high 1, low 0.5, one 1"

    def test_memory_is_known_where_this_process_computes(self):
        ram = psutil.virtual_memory().total
        for workers, expected in (
            (None, (None, None, ram)),
            (WorkersRef(count=2), (2, None, None)),
        ):
            found = run_settings(REF, LAYERWISE, LAYERWISE, SHAPE, CPU, workers=workers)
            assert (found.workers, found.device_total, found.ram_total) == expected


def run_in(log: RunLog, node_id: str = "7") -> RunEvents:
    return RunEvents(log.record, prompt_id="p", node_id=node_id, experts=["high", "low"])


class TestLog:
    def test_page_opened_in_the_middle_sees_the_steps_so_far(self):
        log = RunLog()
        with run_in(log) as run:
            run.visits(3, 40)
            (kept,) = log.snapshot()["runs"]
            assert kept["visits"] == {"step": 0, "done": 3, "total": 40}
            assert 0 <= kept["age_s"] < 60
            run.step(record(0))
            (kept,) = log.snapshot()["runs"]
            assert (len(kept["records"]), kept["ended"], kept["timeline"]) == (1, False, None)
            run.step(record(0))
            assert len(kept["records"]) == 1, "an answer does not change any more"
            run.ended(TIMELINE)
        (kept,) = log.snapshot()["runs"]
        assert (kept["ended"], kept["error"], kept["records"]) == (True, None, [])
        assert kept["timeline"] == TIMELINE.to_dict(), "alone is kept"

    def test_failed_run_keeps_its_steps(self):
        log = RunLog()
        with pytest.raises(ValueError, match="no room"), run_in(log) as run:
            run.step(record(0))
            raise ValueError("no room")
        (kept,) = log.snapshot()["runs"]
        assert (kept["ended"], kept["error"], len(kept["records"])) == (True, "no room", 1)

    def test_log_is_bounded(self):
        log = RunLog()
        numbers = [str(number) for number in range(KEPT_RUNS)]
        with run_in(log, "first") as first:
            for number in numbers:
                with run_in(log, number):
                    pass
            first.step(record(0))
        log.record("wanstream.other", {"at": 1.0})
        assert [run["node"] for run in log.snapshot()["runs"]] == numbers

    def test_last_notices_of_each_node_are_kept(self):
        log = RunLog()
        for number in range(KEPT_NOTICES + 5):
            announce(log, f"{number}", ["wrong"])
        announce(log, "9", ["other"])
        announce(log, "9", ["elsewhere"], workflow="v")
        announce(log, "10", [])
        kept = [
            (each["workflow"], each["node"], *(notice["text"] for notice in each["notices"]))
            for each in log.snapshot()["notices"]
        ]
        assert len(kept) == KEPT_NOTICES - 1
        assert kept[-2:] == [("w", "9", "other"), ("v", "9", "elsewhere")]
        assert not any(node in ("0", "4", "5", "10") for _, node, _ in kept)


def announce(log, node_id, texts, *, workflow="w", **more):
    notices = [{"text": text} for text in texts]
    payload = {"workflow": workflow, "node": node_id, "notices": notices, **more}
    return log.record(NOTICES_EVENT, payload)


def places(log: RunLog) -> list[tuple[str, str]]:
    return [(each["workflow"], each["node"]) for each in log.snapshot()["notices"]]


def graph(prefix: str = "", *, strength: object = 1, file: str = "a", **loader: object) -> Graph:
    """A loader, a LoRA on it and a sampler, as posted."""
    return {
        f"{prefix}2": node("Lora", model=[f"{prefix}1", 0], strength=strength),
        f"{prefix}3": node("Sampler", model=[f"{prefix}2", 0], seed=2**60 + 1),
        f"{prefix}1": {**node("Loader", file=file), **loader},
    }


MORE = {"4": node("Loader", file="b"), "x": "no node", "y": {}}
EQUAL: dict[str, tuple[Graph, str]] = {
    "ids": (graph("5:", _meta={"title": "mine"}), "123"),
    "number": (graph(strength=1.0), "123"),
    "strength": (graph(strength=2), "1"),
    "file": (graph(file="b"), ""),
    "class": (graph(class_type="Other"), ""),
    "more": ({**graph(), **MORE}, "123"),
    "cycle": ({**graph(), "1": node("Loader", file=["3", 0])}, ""),
}


class TestNotices:
    @pytest.mark.parametrize(("other", "equal"), EQUAL.values(), ids=EQUAL)
    def test_nodes_are_equal_with_all_before_them(self, other, equal):
        here = contents_of(graph())
        there = contents_of(other)
        assert len({*here.values()}) == 3
        assert "".join(key for key in "123" if here[key] in there.values()) == equal

    def test_equal_node_of_another_graph_has_the_notices(self):
        log = RunLog()
        off = graph(strength=0)
        announce(log, "3", ["guidance"], workflow="here", content=contents_of(graph())["3"])
        assert log.queued(graph(), "here") == [], "it has them"
        (event,) = log.queued(graph("5:"), "there")
        assert (event["workflow"], event["node"]) == ("there", "5:3")
        assert event["notices"] == [{"text": "guidance"}]
        assert places(log) == [("here", "3"), ("there", "5:3")]
        announce(log, "3", [], workflow="here", content=contents_of(off)["3"])
        assert places(log) == [("there", "5:3")]
        (event,) = log.queued(graph("5:", strength=0), "there")
        assert (event["notices"], places(log)) == ([], [])
        assert len(log.queued(graph(), "here")) == 1, "ComfyUI may have both in its cache"

    @pytest.mark.parametrize("guider", [False, True])
    @pytest.mark.parametrize(
        ("later", "kept"),
        [
            ({"seed": 1}, True),
            ({"cfg": 4}, True),
            ({"cfg": 1.0}, False),
            ({"file": "wan2.2_14B.safetensors"}, False),
            ({"file": "other_8steps.safetensors"}, False),
            ({"cfg": ["1", 0]}, False),
        ],
    )
    def test_notice_of_a_graph_leaves_with_its_cause(self, later, guider, kept):
        log = RunLog()

        def sampled(file="wan2.2_lightx2v_4steps.safetensors", cfg=4.0, seed=0):
            """A ComfyUI sampler as node "3"; with `guider`, node "3" is a guider."""
            sampler = node("KSampler", model=["1", 0], cfg=cfg, seed=seed)
            custom = {"4": node("Custom", guider=["3", 0])} if guider else {}
            return {"1": node("Loader", unet_name=file), "3": sampler, **custom}

        def ran(graph: Graph, workflow: str, cfg: float = 4.0) -> bool:
            node_id = node_with_cfg(graph, "4" if guider else "3")
            notices = [asdict(each) for each in cfg_notices(graph, node_id, cfg, is_wan=False)]
            content = contents_of(graph)[node_id or ""]
            payload = {"workflow": workflow, "node": node_id, "content": content}
            return log.record(NOTICES_EVENT, {**payload, "notices": notices, "of_graph": True})

        assert [ran(sampled(), workflow) for workflow in ("here", "there")] == [True, True]
        events = log.queued(sampled(**later), "here")
        found = [(each["workflow"], each["node"], each["notices"]) for each in events]
        assert found == [("here", "3", [])] * (not kept)
        assert places(log) == [("here", "3"), ("there", "3")][not kept :]
        assert ran(sampled(), "here")
        fixed = sampled(cfg=1.0)
        assert ran(fixed, "here", 1.0), "it was queued before the first ran"
        assert not ran(fixed, "here", 1.0)
        assert places(log) == [("there", "3")]

    def test_run_without_notices_of_its_graph_leaves_others(self):
        log = RunLog()
        assert announce(log, "3", ["ours"])
        assert not announce(log, "3", [], of_graph=True)
        assert log.queued(graph(), "w") == []
        assert places(log) == [("w", "3")]


TITLE = ("_meta", "title")
CANVAS = ("extra_pnginfo", "workflow", "id")
IMAGE = ["img", {"src": "x", "onerror": "alert(1)"}]


@pytest.mark.parametrize("hostile", [IMAGE, {"toString": "x"}, 7, None, True])
def test_only_short_texts_of_a_posted_prompt_are_passed_on(hostile):
    def title(meta: object) -> str | None:
        return short_text({"7": {"_meta": meta}}, "7", *TITLE)

    assert title({"title": "Sampler"}) == "Sampler"
    assert title({"title": "x" * 10**6}) == "x" * LONGEST_NAME
    assert title({"title": hostile}) is None
    assert title(hostile) is None
    assert short_text({"extra_pnginfo": {"workflow": {"id": "a graph"}}}, *CANVAS) == "a graph"
    for info in ({"workflow": {"id": hostile}}, {"workflow": hostile}, hostile):
        assert short_text({"extra_pnginfo": info}, *CANVAS) is None
    assert short_text({}, "7", *TITLE) is None
    assert short_text({"7": {}}, None, *TITLE) is None
    assert short_text({}, *CANVAS) is None
