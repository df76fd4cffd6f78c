"""Workers node: widgets, refusals before anything runs, and samplers behind one worker.

Two workers behind Ray: `tests/test_workflows.py` and `tests/integration/comfy/test_workers.py`.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from wanstream.host.embedded.run import NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.host.run_events import NOTICES_EVENT
from wanstream.host.workers.clusters import VARIABLE
from wanstream.nodes.runs import run_experts
from wanstream.nodes.workers import check_known, workers_inputs, workers_ref
from wanstream.schema import Cancelled, Mesh
from wanstream.schema.records import Timeline
from wanstream.schema.refs import PathMap, WorkersRef
from wanstream.tests.support.host.embedded import embedded_host
from wanstream.tests.support.host.shipped import latent, shipped

AS_IT_IS = {socket.id: socket.as_dict()["default"] for socket in workers_inputs()}
NOT_ASKED = ("weights", "threads", "max_restarts", "timeout_s")


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """Write a cluster list with an entry `lab`, where no worker answers, and return its token."""
    file = tmp_path / "clusters.json"
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o600)
    entry = {"address": "127.0.0.1:1", "token_file": str(token), "remote_machines": True}
    file.write_text(json.dumps({"lab": {**entry, "path_map": ["/a -> /b"]}}))
    monkeypatch.setenv(VARIABLE, str(file))
    return token


def test_every_setting_reaches_the_value(lab):
    assert workers_ref(gpus=None, **AS_IT_IS) == WorkersRef(count=2)
    degrees = {"data": 2, "cfg": 2, "ulysses": 2}
    life = {"threads": 3, "max_restarts": 0, "timeout_s": 60.0, "weights": "sharded"}
    given = {**AS_IT_IS, "layout": "manual", "count": 8, "cluster": "lab", **degrees, **life}
    place = {"address": "127.0.0.1:1", "token_file": str(lab), "beyond_loopback": True}
    paths = (PathMap(here="/a", there="/b"),)
    expected = WorkersRef(count=8, mesh=Mesh(**degrees), paths=paths, **place, **life)
    assert workers_ref(gpus=1, **given) == expected
    # Degrees from an earlier manual layout may stay on the node while the planner chooses.
    ref = workers_ref(gpus=None, **{**AS_IT_IS, "layout": "throughput", "ulysses": 7})
    assert ref == WorkersRef(count=2, goal="throughput")
    assert not {"address", "beyond_loopback", "path_map", "token", "token_file"} & AS_IT_IS.keys()


THERE = "and there are local, in-process, lab"
BY_HAND = {"layout": "manual", "count": 3}
IMPOSSIBLE: list[tuple[dict[str, Any], int | None, str]] = [
    ({"count": 3}, 2, "3 workers, but 2 GPUs here"),
    ({"layout": "manual", "cfg": 2, "data": 2}, None, "= 4, and there are 2 workers"),
    ({**BY_HAND, "ulysses": 3}, None, "ulysses 3 does not divide the 40 attention heads"),
    ({**BY_HAND, "cfg": 3}, None, "cfg is 3"),
    ({"layout": "diagonal"}, None, "choose one of latency, throughput, manual"),
    ({"cluster": "10.0.0.7:6379"}, None, f"the cluster is '10.0.0.7:6379', {THERE}"),
    ({"cluster": "in-process"}, None, "2 workers in this process"),
]


@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize(("settings", "gpus", "said"), IMPOSSIBLE)
def test_impossible_workers_are_refused_before_the_run_and_in_it(settings, gpus, said):
    given = {**AS_IT_IS, **settings}
    known = {name: value for name, value in given.items() if name not in NOT_ASKED}
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        check_known(gpus=gpus, **known)
    with pytest.raises(ValueError, match=re.escape(str(refused.value))):
        workers_ref(gpus=gpus, **given)


@pytest.mark.parametrize("linked", ["count", "layout", "cluster", "ulysses"])
def test_linked_setting_is_checked_when_it_is_known(linked):
    """A linked value is None here, and each one alone could make the rest valid."""
    ones = dict.fromkeys(("data", "stage", "cfg", "ring"), 1)
    many = {"cluster": "local", "count": 3}
    given = many if linked == "cluster" else {**BY_HAND, **ones, "ulysses": 3}
    with pytest.raises(ValueError, match=r"GPUs here|divide"):
        check_known(gpus=2, **{**many, **given})
    check_known(gpus=None if linked != "cluster" else 2, **{**given, linked: None})
    check_known(gpus=2, count="many", ulysses=[])  # the host refuses what is no number


HERE = {"count": 1, "cluster": "in-process"}
ONLY = {"only": ["sampler"]}


def workflow(workers=HERE, **sampler):
    """The shipped workflow; with None, without workers."""
    nodes = shipped("workers", sampler=sampler, workers=dict(workers or {}))
    if workers is None:
        for name in ("sampler", "frames"):
            nodes[name]["inputs"].pop("workers", None)
        del nodes["workers"]
    return nodes


@pytest.mark.slow  # runs whole workflows
def test_worker_computes_what_this_process_does(run):
    seeds = (5, 6, 5)
    alone = {seed: latent(run(workflow(None, seed=seed), **ONLY)) for seed in seeds}
    assert not torch.equal(alone[5], alone[6])
    for seed in seeds:
        history = run(workflow(seed=seed), **ONLY)
        assert torch.equal(latent(history), alone[seed])
    ref = history.results["sampler"][1].experts
    assert embedded_host.models.experts(ref).loaded_bytes == 0, "only workers hold experts"
    found = []
    for nodes in (workflow(None, seed=5), workflow(seed=5)):
        experts = nodes["experts"]["inputs"]
        for name in ("high_noise", "low_noise"):
            experts[name] = experts[name].replace("fp8_scaled", "fp16")
        found.append(latent(run(nodes, **ONLY)))
    assert torch.equal(*found)
    assert not torch.equal(found[0], alone[5])


def test_run_is_announced_with_each_workers_timeline(run, monkeypatch):
    monkeypatch.setattr(
        run_experts, "wire_notes", lambda shared, driver: (f"{driver.mesh}: {shared.videos} apart",)
    )
    events = list[tuple[str, Mapping[str, Any]]]()
    progress = []
    told = {"on_event": lambda *event: events.append(event), "on_progress": progress.append}
    history = run(workflow(), **told, **ONLY)
    assert history.results["sampler"][1].workers == WorkersRef(count=1, address="in-process")
    names = [event for event, _ in events if event != NOTICES_EVENT]
    assert names == ["wanstream.begin", *["wanstream.step"] * 4, "wanstream.end"]
    end = events[-1][1]
    assert end["ranks"].keys() == {"0"}
    assert len(Timeline.from_dict(end["ranks"]["0"]).steps) == 4
    assert history.outputs["sampler"]["wanstream_timeline"] == [end["timeline"]]
    assert "one worker: 1 apart" in history.outputs["sampler"]["text"]
    done = [each.done for each in progress if (each.node_id, each.total) == ("sampler", 4)]
    assert done == [1, 2, 3, 4]


def raising(error):
    """Return a progress function that raises this after two steps."""

    def on_progress(each):
        if (each.node_id, each.done, each.total) == ("sampler", 2, 4):
            raise error

    return on_progress


@pytest.fixture
def states(output, monkeypatch):
    """The folder of states, which every step writes."""
    interval = "wanstream.distributed.driver.driver.handover_interval_s"
    monkeypatch.setattr(interval, lambda nbytes, groups: 0.0)
    return output / ".wanstream-states"


@pytest.mark.slow  # runs whole workflows
def test_run_whose_process_ended_is_continued(run, states):
    expected = latent(run(workflow(None), **ONLY))
    progress = []

    with pytest.raises(KeyboardInterrupt):
        run(workflow(), on_progress=raising(KeyboardInterrupt), **ONLY)
    assert len(list(states.iterdir())) == 1
    history = run(workflow(), on_progress=progress.append, **ONLY)
    assert torch.equal(latent(history), expected)
    done = [each.done for each in progress if (each.node_id, each.total) == ("sampler", 4)]
    assert done == [3, 4]
    text = json.dumps(history.outputs["sampler"]["text"])
    assert "continued from step 2 of an interrupted run" in text
    assert not states.exists()


@pytest.mark.parametrize("error", [Cancelled, ValueError])
def test_cancel_by_the_progress_bar_removes_the_states(error, run, states):
    raised = Cancelled if error is Cancelled else NodeFailedError
    with pytest.raises(raised, match="raised by the bar"):
        run(workflow(), on_progress=raising(error("raised by the bar")), **ONLY)
    assert states.exists() == (error is ValueError)


@pytest.mark.usefixtures("lab")
def test_unsuitable_layout_is_refused_before_workers_start(run):
    """Guidance and heads are unknown before the run."""
    with pytest.raises(InvalidWorkflowError) as refused:
        run(workflow({"layout": "diagonal"}))
    (error,) = refused.value.verdict.node_errors["workers"]["errors"]
    assert error["type"] == "exception_during_inner_validation"
    assert "the layout is 'diagonal'" in error["details"]
    nowhere = {"count": 2, "layout": "manual", "cluster": "lab"}
    with pytest.raises(NodeFailedError, match="guidance is 1 under every expert"):
        run(workflow({**nowhere, "cfg": 2}, guidance_high=1.0, guidance_low=1.0))
    with pytest.raises(NodeFailedError, match="ulysses 4 does not divide 2 heads"):
        run(workflow({**nowhere, "count": 4, "ulysses": 4}))
