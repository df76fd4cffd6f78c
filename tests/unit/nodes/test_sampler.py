"""The sampler in the shipped workflows, in the embedded host."""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import av
import pytest
import torch

from wanstream.host import io
from wanstream.host.auto_policy import AutoPlanner
from wanstream.host.embedded import NodeFailedError, NodeProgress
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.host.models import LoadedExperts
from wanstream.host.run_events import END, NOTICES_EVENT, STEP, VISITS
from wanstream.nodes.runs import run_experts
from wanstream.sampling import denoise
from wanstream.schema import Cancelled, OffloadPolicy
from wanstream.tests.support.host.embedded import embedded_host
from wanstream.tests.support.host.given_nodes import constant
from wanstream.tests.support.host.shipped import latent, node, shipped, timeline
from wanstream.tests.support.plan_fixtures import CPU_MACHINE
from wanstream.tests.support.sampling.steps import changed_step

CACHE = node("WanStreamCache", kind="first_block_cache", preset="usual", threshold=0.05)
AUTO = node("WanStreamAutoOffload", vram_budget_gb=0.0, ram_budget_gb=0.0)
ONLY = {"only": ["sampler"]}


def sampler(**inputs):
    return shipped(sampler=inputs)


def samples(run, nodes):
    return latent(run(nodes, **ONLY))


@pytest.mark.parametrize(("name", "high_steps"), [("t2v", 3), ("i2v", 2)])
def test_shipped_workflow_ends_with_its_video(run, output, name, high_steps):
    nodes = shipped(name)
    history = run(nodes)
    file = f"wan2.2_{name}_00001_.mp4"
    place = {"filename": file, "subfolder": "video", "type": "output"}
    assert history.outputs["save"]["images"] == [place]
    with av.open(str(output / "video" / file)) as container:
        stream = container.streams.video[0]
        assert (stream.frames, stream.width, stream.height, stream.average_rate) == (5, 32, 32, 16)
        assert json.loads(container.metadata["prompt"]) == nodes
    steps = timeline(history).steps
    assert [step.expert for step in steps] == ["high"] * high_steps + ["low"] * (4 - high_steps)
    assert len({step.bytes_moved for step in steps}) == 1


def test_queue_item_has_all_its_phases(run):
    names = ["open", "text", "first block", "high", "switch", "low"]
    events = embedded_host.events
    ledgers = {}

    def look(progress):
        ledgers[events.executing().prompt_id] = events.ledger()

    for _ in range(2):
        phases = timeline(run(shipped(), on_progress=look)).phases
        assert [phase.name for phase in phases] == names
        for before, phase in pairwise(phases):
            assert before.start_s + before.wall_s <= phase.start_s + 1e-9
        assert phases[1].start_s < 0 <= phases[2].start_s
    assert len(ledgers) == 2
    for ledger in ledgers.values():
        assert [phase.name for phase in ledger.phases()] == [*names, "decode", "save"]
    assert (events.executing().prompt_id, events.ledger().phases()) == (None, ()), "nothing runs"


def in_two(**second):
    """Text to video with euler in 4 steps: two samplers joined at step 2, with these inputs."""
    nodes = sampler(solver="euler")
    inputs = nodes["sampler"]["inputs"]
    before = {**inputs, "end_step": 2, "leftover_noise": True}
    nodes["first"] = {**nodes["sampler"], "inputs": before}
    inputs |= {"latent": ["first", 0], "start_step": 2, "add_noise": False, **second}
    return nodes


def test_two_samplers_are_one_run_in_two_parts(run):
    whole = samples(run, sampler(solver="euler"))
    history = run(in_two(), **ONLY)
    assert (latent(history) - whole).norm() <= 1e-2 * whole.norm(), "bf16, and one rounding more"
    assert [step.index for step in timeline(history).steps] == [2, 3]
    message = r"left at sigma 0.9\d+, and step 2 starts at sigma 0.8\d+: give both samplers"
    with pytest.raises(NodeFailedError, match=message):
        run(in_two(flow_shift=5.0))


def swapped(blocks):
    inputs = {"blocks_to_swap": blocks, "prefetch_blocks": 1, "weights_source": "RAM"}
    return shipped(policy=node("WanStreamBlockSwap", **inputs))


def test_policy_changes_nothing_but_the_transfers(run):
    without = shipped()
    del without["sampler"]["inputs"]["policy"]
    assert torch.equal(samples(run, swapped(2)), samples(run, without))
    with pytest.raises(NodeFailedError, match="only 4 blocks"):
        run(swapped(20))


@pytest.mark.slow
def test_planner_chooses_for_the_measured_machine(run, tmp_path, monkeypatch):
    """The first run measures this machine and saves the profile below the test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    history = run(shipped(policy=AUTO), **ONLY)
    told, *_ = timeline(history).changes
    assert told.startswith("chosen: ")
    assert "stall predicted" in told
    assert history.outputs["sampler"]["text"] == list(timeline(history).changes)
    embedded_host.free_experts()
    plain = run(shipped(), **ONLY)
    assert timeline(plain).changes == ()
    assert torch.equal(latent(history), latent(plain))


INNER = "exception_during_inner_validation"


@pytest.mark.parametrize(
    ("node_id", "inputs", "error_type"),
    [
        ("sampler", {"experts": ["nowhere", 0]}, INNER),
        ("sampler", {"steps": 1001}, INNER),
        ("sampler", {"end_step": 0}, INNER),
        ("policy", {"prefetch_blocks": 9}, "value_bigger_than_max"),
        ("latent", {"width": 1080}, INNER),
        ("experts", {"high_noise": "../../etc/passwd"}, "value_not_in_list"),
        ("save", {"filename_prefix": "../outside"}, "exception_during_validation"),
    ],
)
def test_broken_workflow_is_refused_before_anything_runs(run, output, node_id, inputs, error_type):
    with pytest.raises(InvalidWorkflowError) as refused:
        run(shipped(**{node_id: inputs}))
    (fault,) = refused.value.verdict.node_errors[node_id]["errors"]
    assert fault["type"] == error_type
    assert not output.exists()


@pytest.mark.parametrize(
    ("node_id", "socket", "value", "reason"),
    [
        ("latent", "width", 1080, "width is 1080, it must be a multiple of 16"),
        ("sampler", "start_step", 4, "start step 4 of 4 steps: give 0 to 3"),
    ],
)
def test_linked_number_is_checked_in_the_run(run, node_id, socket, value, reason):
    nodes = shipped(**{node_id: {socket: ["number", 0]}, "number": node("Number")})
    with pytest.raises(NodeFailedError, match=reason):
        run(nodes, more_nodes=[constant("Number", io.Int.Output(), value)])


def test_stop_ends_the_run_and_the_next_one_is_whole(run):
    done = list[int]()
    events = list[tuple[str, Mapping[str, Any]]]()

    def stop_after_the_first_step(progress: NodeProgress) -> None:
        if progress.node_id == "sampler" and progress.total == 4:
            done.append(progress.done)
            embedded_host.stop()

    def stop_at_the_first_step(event: str, payload: Mapping[str, Any]) -> None:
        events.append((event, payload))
        if event == STEP:
            embedded_host.stop()

    with pytest.raises(Cancelled):
        run(shipped(), on_progress=stop_after_the_first_step)
    assert done == [1]
    with pytest.raises(Cancelled):
        run(shipped(), on_event=stop_at_the_first_step)
    last, end = events[-1]
    assert (last, end["timeline"]) == (END, None)
    assert end["error"]
    assert len(timeline(run(shipped(), **ONLY)).steps) == 4


def test_host_may_run_another_policy(run, monkeypatch):
    asked: list[tuple[OffloadPolicy, int]] = []

    def load_experts(ref, policy, working_bytes):
        asked.append((policy, working_bytes))
        given = {"policy": OffloadPolicy.resident(), "device": torch.device("cpu")}
        return LoadedExperts(pair=embedded_host.models.experts(ref), **given)

    monkeypatch.setattr(embedded_host.models, "load_experts", load_experts)
    steps = timeline(run(shipped(), **ONLY)).steps
    ((policy, working_bytes),) = asked
    assert policy.kind != "resident"
    assert working_bytes > 0
    moved = [step.bytes_moved > 0 for step in steps]
    assert moved == [True, False, False, True], "each expert is fetched once"


@pytest.mark.parametrize(
    ("stall_share", "cached", "advised"),
    [(0.5, False, True), (0.01, False, False), (0.5, True, False)],
)
def test_run_that_waited_gets_advice(run, monkeypatch, stall_share, cached, advised):
    """The first step, which reads all weights, does not count."""

    def waiting(*given: Any, **options: Any) -> Any:
        result = denoise(*given, **options)
        first, *later = result.timeline.steps
        steps = [changed_step(first, stall_s=first.wall_s)]
        steps += [changed_step(step, stall_s=step.wall_s * stall_share) for step in later]
        return replace(result, timeline=replace(result.timeline, steps=tuple(steps)))

    monkeypatch.setattr(run_experts, "denoise", waiting)
    machine = replace(CPU_MACHINE, disk_bytes_per_s=1e6)
    monkeypatch.setattr(embedded_host.memory, "planner", AutoPlanner(stored=lambda *_: machine))
    events: list[tuple[str, Mapping[str, Any]]] = []
    nodes = shipped(sampler={"cache": ["cache", 0]}, cache=CACHE) if cached else shipped()
    run(nodes, on_event=lambda *event: events.append(event), **ONLY)
    (advice,) = (payload["advice"] for event, payload in events if event == END)
    assert (advice is not None) == advised
    assert not advised or advice["gain"] > 1.1


def test_run_is_announced_with_the_figures_of_the_history(run, monkeypatch):
    monkeypatch.setattr(run_experts, "thread_notes", lambda device: ["cores are busy"])
    events = list[tuple[str, Mapping[str, Any]]]()
    progress = list[NodeProgress]()
    told = {"on_event": lambda *event: events.append(event), "on_progress": progress.append}
    history = run(shipped(), **told)
    done = [each.done for each in progress if (each.node_id, each.total) == ("sampler", 4)]
    assert done == [1, 2, 3, 4]
    events = [each for each in events if each[0] not in {NOTICES_EVENT, VISITS}]
    names = [event.removeprefix("wanstream.") for event, _ in events]
    assert names == ["begin", *["step"] * 4, "end"]
    begin, *steps, end = (payload for _, payload in events)
    assert (begin["node"], begin["switch_step"]) == ("sampler", 3)
    assert begin["experts"] == ["high"] * 3 + ["low"]
    assert begin["settings"]["size"] == "32x32x5"
    assert begin["settings"]["dtype"] in {"bf16", "fp32"}, "what auto gave on this CPU"
    (kept,) = history.outputs["sampler"]["wanstream_timeline"]
    assert end["timeline"] == kept
    assert kept["changes"] == begin["changes"] == ["cores are busy"]
    assert [payload["record"] for payload in steps] == kept["steps"]
