"""Run log: the state needed by a page opened later, for a bounded number of runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from wanstream.host.distilled_models import cfg_notices, node_with_cfg
from wanstream.host.run_events import (
    KEPT_NOTICES,
    KEPT_RUNS,
    LONGEST_NAME,
    NOTICES_EVENT,
    RunEvents,
    RunLog,
    contents_of,
    short_text,
)
from wanstream.schema.records import StepRecord, Timeline

STEP = StepRecord.of(
    index=0, expert="high", sigma=None, wall_s=1.0, compute_s=1.0, stall_s=0.0, bytes_moved=1
)
TIMELINE = Timeline(steps=(STEP,), kind="measured")


def run_in(
    log: RunLog, node_id: str = "7", *, experts: tuple[str, ...] = ("high", "low")
) -> RunEvents:
    return RunEvents(log.record, prompt_id="p", node_id=node_id, experts=experts)


def test_a_page_that_comes_in_the_middle_sees_the_steps_so_far() -> None:
    log = RunLog()
    with run_in(log) as run:
        run.visits(3, 40)
        (kept,) = log.snapshot()["runs"]
        assert kept["visits"] == {"step": 0, "done": 3, "total": 40}
        assert 0 <= kept["age_s"] < 60
        run.step(STEP)
        (kept,) = log.snapshot()["runs"]
        assert (len(kept["records"]), kept["ended"], kept["timeline"]) == (1, False, None)
        run.step(STEP)
        assert len(kept["records"]) == 1, "an answer does not change any more"


def test_a_run_that_is_over_keeps_its_timeline_alone() -> None:
    log = RunLog()
    with run_in(log) as run:
        run.step(STEP)
        run.ended(TIMELINE)
    (kept,) = log.snapshot()["runs"]
    assert (kept["ended"], kept["error"], kept["records"]) == (True, None, [])
    assert kept["timeline"] == TIMELINE.to_dict()


def test_a_run_that_failed_keeps_its_steps() -> None:
    log = RunLog()
    try:
        with run_in(log) as run:
            run.step(STEP)
            raise ValueError("no room")
    except ValueError:
        pass
    (kept,) = log.snapshot()["runs"]
    assert (kept["ended"], kept["error"], len(kept["records"])) == (True, "no room", 1)


def test_the_oldest_runs_are_forgotten_and_their_steps_with_them() -> None:
    log = RunLog()
    with run_in(log, "first") as first:
        for number in range(KEPT_RUNS):
            with run_in(log, str(number)):
                pass
        first.step(STEP)
    assert [run["node"] for run in log.snapshot()["runs"]] == [
        str(number) for number in range(KEPT_RUNS)
    ]


def test_what_is_of_no_use_later_is_not_kept() -> None:
    log = RunLog()
    log.record("wanstream.other", {"at": 1.0})
    assert log.snapshot() == {"runs": [], "notices": []}


def test_the_last_notices_of_each_node_are_kept() -> None:
    log = RunLog()

    def announce(node: str, *texts: str, workflow: str | None = "w") -> None:
        notices = [{"text": text} for text in texts]
        log.record(NOTICES_EVENT, {"workflow": workflow, "node": node, "notices": notices})

    for number in range(KEPT_NOTICES + 5):
        announce(f"{number}", "wrong")
    announce("9", "other")
    announce("9", "elsewhere", workflow="v")
    announce("10")
    kept = [
        (each["workflow"], each["node"], *(notice["text"] for notice in each["notices"]))
        for each in log.snapshot()["notices"]
    ]
    assert len(kept) == KEPT_NOTICES - 1
    assert kept[-2:] == [("w", "9", "other"), ("v", "9", "elsewhere")]
    assert not any(node in ("0", "4", "5", "10") for _, node, _ in kept)


def graph(
    prefix: str = "", *, strength: object = 1, file: str = "a", **loader: object
) -> dict[str, Any]:
    """A loader, a LoRA on it and a sampler, as posted."""
    return {
        f"{prefix}2": {
            "class_type": "Lora",
            "inputs": {"model": [f"{prefix}1", 0], "strength": strength},
        },
        f"{prefix}3": {
            "class_type": "Sampler",
            "inputs": {"model": [f"{prefix}2", 0], "seed": 2**60 + 1},
        },
        f"{prefix}1": {"class_type": "Loader", "inputs": {"file": file}, **loader},
    }


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        (graph("5:", _meta={"title": "mine"}), "123"),
        (graph(strength=1.0), "123"),
        (graph(strength=2), "1"),
        (graph(file="b"), ""),
        (graph(class_type="Other"), ""),
        (
            {
                **graph(),
                "4": {"class_type": "Loader", "inputs": {"file": "b"}},
                "x": "no node",
                "y": {},
            },
            "123",
        ),
        ({**graph(), "1": {"class_type": "Loader", "inputs": {"file": ["3", 0]}}}, ""),
    ],
    ids=["ids", "number", "strength", "file", "class", "more", "cycle"],
)
def test_nodes_are_equal_if_they_and_all_before_them_are(other: dict[str, Any], equal: str) -> None:
    here, there = contents_of(graph()), contents_of(other)
    assert len({*here.values()}) == 3
    assert "".join(key for key in "123" if here[key] in there.values()) == equal


def test_a_node_of_another_graph_has_the_notices_of_an_equal_one() -> None:
    log = RunLog()

    def announce(prompt: dict[str, Any], *texts: str) -> None:
        notices = [{"text": text} for text in texts]
        payload = {
            "workflow": "here",
            "node": "3",
            "notices": notices,
            "content": contents_of(prompt)["3"],
        }
        log.record(NOTICES_EVENT, payload)

    def places() -> list[tuple[str, str]]:
        return [(each["workflow"], each["node"]) for each in log.snapshot()["notices"]]

    announce(graph(), "guidance")
    assert log.queued(graph(), "here") == [], "it has them"
    (event,) = log.queued(graph("5:"), "there")
    assert (event["workflow"], event["node"], event["notices"]) == (
        "there",
        "5:3",
        [{"text": "guidance"}],
    )
    assert places() == [("here", "3"), ("there", "5:3")]
    announce(graph(strength=0))
    assert places() == [("there", "5:3")]
    (event,) = log.queued(graph("5:", strength=0), "there")
    assert (event["notices"], places()) == ([], [])
    assert len(log.queued(graph(), "here")) == 1, "ComfyUI may have both in its cache"


DISTILLED = "wan2.2_lightx2v_4steps.safetensors"


def sampled(
    file: str = DISTILLED, *, cfg: object = 4.0, seed: int = 0, guider: bool = False
) -> dict[str, Any]:
    """Return a ComfyUI sampler as node "3"; with `guider`, node "3" is a guider."""
    model = {"class_type": "Loader", "inputs": {"unet_name": file}}
    sampler = {"class_type": "KSampler", "inputs": {"model": ["1", 0], "cfg": cfg, "seed": seed}}
    return {
        "1": model,
        "3": sampler,
        **({"4": {"class_type": "Custom", "inputs": {"guider": ["3", 0]}}} if guider else {}),
    }


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
def test_a_notice_of_a_graph_leaves_with_what_it_is_about(
    later: dict[str, Any], guider: bool, kept: bool
) -> None:
    log = RunLog()

    def ran(graph: dict[str, Any], workflow: str, cfg: float = 4.0) -> bool:
        node = node_with_cfg(graph, "4" if guider else "3")
        notices = [asdict(notice) for notice in cfg_notices(graph, node, cfg, is_wan=False)]
        payload = {
            "workflow": workflow,
            "node": node,
            "notices": notices,
            "content": contents_of(graph)[node or ""],
        }
        return log.record(NOTICES_EVENT, {**payload, "of_graph": True})

    def places() -> list[str]:
        return [each["workflow"] for each in log.snapshot()["notices"]]

    first = sampled(guider=guider)
    assert [ran(first, workflow) for workflow in ("here", "there")] == [True, True]
    events = log.queued(sampled(**later, guider=guider), "here")
    assert [(each["workflow"], each["node"], each["notices"]) for each in events] == [
        ("here", "3", [])
    ] * (not kept)
    assert places() == ["here", "there"][not kept :]
    fixed = sampled(cfg=1.0, guider=guider)
    assert ran(first, "here")
    assert [ran(fixed, "here", 1.0), ran(fixed, "here", 1.0)] == [True, False], (
        "it was queued before the first ran"
    )
    assert places() == ["there"]


def test_a_run_without_notices_of_its_graph_leaves_those_of_our_nodes() -> None:
    log = RunLog()
    ours = {"workflow": "w", "node": "3", "notices": [{"text": "ours"}]}
    assert log.record(NOTICES_EVENT, ours)
    assert not log.record(NOTICES_EVENT, {**ours, "notices": [], "of_graph": True})
    assert log.queued(sampled(), "w") == []
    assert log.snapshot()["notices"] == [ours]


TITLE, CANVAS = ("_meta", "title"), ("extra_pnginfo", "workflow", "id")
IMAGE = ["img", {"src": "x", "onerror": "alert(1)"}]


@pytest.mark.parametrize("hostile", [IMAGE, {"toString": "x"}, 7, None, True])
def test_of_a_posted_prompt_only_texts_are_passed_on(hostile: object) -> None:
    assert short_text({"7": {"_meta": {"title": "Sampler"}}}, "7", *TITLE) == "Sampler"
    assert short_text({"7": {"_meta": {"title": hostile}}}, "7", *TITLE) is None
    assert short_text({"7": {"_meta": hostile}}, "7", *TITLE) is None
    assert short_text({"extra_pnginfo": {"workflow": {"id": "a graph"}}}, *CANVAS) == "a graph"
    assert short_text({"extra_pnginfo": {"workflow": {"id": hostile}}}, *CANVAS) is None
    assert short_text({"extra_pnginfo": {"workflow": hostile}}, *CANVAS) is None
    assert short_text({"extra_pnginfo": hostile}, *CANVAS) is None


def test_a_node_without_a_title_and_a_post_without_a_canvas_have_none() -> None:
    assert short_text({}, "7", *TITLE) is None
    assert short_text({"7": {}}, None, *TITLE) is None
    assert short_text({}, *CANVAS) is None


def test_a_title_of_any_length_is_kept_short() -> None:
    assert short_text({"7": {"_meta": {"title": "x" * 10**6}}}, "7", *TITLE) == "x" * LONGEST_NAME
