"""Samplers behind the workers node, in the embedded host, with one worker and no Ray.

Two workers behind Ray: `tests/test_workflows.py` and `tests/integration/comfy/test_workers.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.host.embedded.events import NodeProgress
from wanstream.host.embedded.run import History, NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.host.run_events import NOTICES_EVENT
from wanstream.host.workers.clusters import VARIABLE
from wanstream.nodes import WanStreamExtension
from wanstream.nodes.runs import run_experts
from wanstream.schema import Cancelled
from wanstream.schema.records import Timeline
from wanstream.schema.refs import WorkersRef
from wanstream.tests.support.embedded import embedded_host, run_workflow

NODES = asyncio.run(WanStreamExtension().get_node_list())
WORKFLOW = Path(__file__).parents[3] / "workflows" / "api" / "workers.json"
HERE = {"count": 1, "cluster": "in-process"}

Workflow = dict[str, dict[str, Any]]
Run = Callable[..., History]


def workflow(workers: Mapping[str, Any] | None, **sampler: Any) -> Workflow:
    """The shipped workflow, small, up to the latent; with None, without workers."""
    nodes: Workflow = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    for name in ("frames", "save"):
        del nodes[name]
    nodes["latent"]["inputs"] |= {"width": 32, "height": 32, "frames": 5}
    nodes["sampler"]["inputs"] |= {"steps": 4, **sampler}
    if workers is None:
        del nodes["workers"], nodes["sampler"]["inputs"]["workers"]
    else:
        nodes["workers"]["inputs"] |= workers
    report = {"run": ["sampler", 1], "warmup": 0, "repeats": 1, "cooldown_s": 0.0}
    words = {"policies": "", "prefetch": "", "steps": "", "filename_prefix": "report"}
    nodes["report"] = {"class_type": "WanStreamBenchmark", "inputs": {**report, **words}}
    return nodes


@pytest.fixture
def run(tmp_path: Path, sample_models: Path) -> Iterator[Run]:
    def run(nodes: Workflow, **options: Any) -> History:
        places = {"models": sample_models, "output": tmp_path, "input_dir": tmp_path}
        return run_workflow(nodes, nodes=NODES, only=["sampler"], **places, **options)

    yield run
    embedded_host.memory.worker_registry.close()
    embedded_host.free_experts()


def latent(history: History) -> torch.Tensor:
    samples: torch.Tensor = history.results["sampler"][0]["samples"]
    return samples


@pytest.mark.slow  # runs whole workflows
def test_a_worker_computes_what_this_process_does_whatever_the_graph_says_next(run: Run) -> None:
    seeds = (5, 6, 5)
    alone = [latent(run(workflow(None, seed=seed))) for seed in seeds[:2]]
    assert not torch.equal(*alone)
    for seed in seeds:
        history = run(workflow(HERE, seed=seed))
        assert torch.equal(latent(history), alone[seeds.index(seed)])
    experts = {name: value.replace("fp8_scaled", "fp16") for name, value in t2v_files().items()}
    nodes, other = workflow(None, seed=5), workflow(HERE, seed=5)
    for each in (nodes, other):
        each["experts"]["inputs"] |= experts
    expected = latent(run(nodes))
    assert torch.equal(latent(run(other)), expected)
    assert not torch.equal(expected, alone[0])


def t2v_files() -> dict[str, str]:
    inputs = json.loads(WORKFLOW.read_text(encoding="utf-8"))["experts"]["inputs"]
    return {name: inputs[name] for name in ("high_noise", "low_noise")}


def test_the_run_knows_its_workers_and_is_announced_with_what_each_did(run: Run) -> None:
    told: list[tuple[str, Mapping[str, Any]]] = []
    history = run(workflow(HERE), on_event=lambda event, payload: told.append((event, payload)))
    ran = history.results["sampler"][1]
    assert ran.workers == WorkersRef(count=1, address="in-process")
    told = [(event, payload) for event, payload in told if event != NOTICES_EVENT]
    assert [event.removeprefix("wanstream.") for event, _ in told] == [
        "begin",
        *["step"] * 4,
        "end",
    ]
    end = told[-1][1]
    assert end["ranks"].keys() == {"0"}
    assert len(Timeline.from_dict(end["ranks"]["0"]).steps) == 4
    (kept,) = history.outputs["sampler"]["wanstream_timeline"]
    assert end["timeline"] == kept


def test_a_group_that_is_apart_is_reported_in_the_samplers_text(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        run_experts, "wire_notes", lambda shared, driver: (f"{driver.mesh}: {shared.videos} apart",)
    )
    assert "one worker: 1 apart" in run(workflow(HERE)).outputs["sampler"]["text"]


def test_progress_is_told_step_by_step(run: Run) -> None:
    told: list[tuple[int, int]] = []
    run(
        workflow(HERE),
        on_progress=lambda p: told.append((p.done, p.total)) if p.node_id == "sampler" else None,
    )
    assert [step for step in told if step[1] == 4] == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.slow  # runs whole workflows
def test_a_run_whose_process_ended_continues_and_says_so(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "wanstream.distributed.driver.driver.handover_interval_s", lambda nbytes, groups: 0.0
    )
    expected, states = latent(run(workflow(None))), tmp_path / ".wanstream-states"

    def end_after_two_steps(progress: NodeProgress) -> None:
        if (progress.node_id, progress.done, progress.total) == ("sampler", 2, 4):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(workflow(HERE), on_progress=end_after_two_steps)
    assert len(list(states.iterdir())) == 1
    told: list[tuple[int, int]] = []
    history = run(
        workflow(HERE),
        on_progress=lambda p: told.append((p.done, p.total)) if p.node_id == "sampler" else None,
    )
    assert torch.equal(latent(history), expected)
    assert [step for step in told if step[1] == 4] == [(3, 4), (4, 4)]
    assert "continued from step 2 of an interrupted run" in json.dumps(
        history.outputs["sampler"]["text"]
    )
    assert not states.exists()


@pytest.mark.parametrize("error", [Cancelled, ValueError])
def test_an_interrupt_of_the_progress_bar_is_a_cancel_and_removes_the_states(
    error: type[Exception], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "wanstream.distributed.driver.driver.handover_interval_s", lambda nbytes, groups: 0.0
    )

    def raise_after_two_steps(progress: NodeProgress) -> None:
        if (progress.node_id, progress.done, progress.total) == ("sampler", 2, 4):
            raise error("of the bar")

    with pytest.raises(Cancelled if error is Cancelled else NodeFailedError, match="of the bar"):
        run(workflow(HERE), on_progress=raise_after_two_steps)
    assert (tmp_path / ".wanstream-states").exists() == (error is ValueError)


@pytest.mark.slow  # runs whole workflows
def test_a_stop_ends_the_run_and_leaves_the_worker_usable(run: Run) -> None:
    steps: list[int] = []

    def stop_after_the_first_step(progress: NodeProgress) -> None:
        if progress.node_id == "sampler" and progress.total == 400:
            steps.append(progress.done)
            embedded_host.stop()

    with pytest.raises(Cancelled):
        run(workflow(HERE, steps=400), on_progress=stop_after_the_first_step)
    assert max(steps) < 400
    assert torch.equal(latent(run(workflow(HERE))), latent(run(workflow(None))))


@pytest.mark.slow  # runs whole workflows
def test_this_process_holds_no_experts_while_workers_do(run: Run) -> None:
    run(workflow(None))
    ref = run(workflow(HERE)).results["sampler"][1].experts
    assert embedded_host.models.experts(ref).loaded_bytes == 0


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        (
            {"count": 3, "layout": "manual", "cfg": 2},
            "cfg x ring x ulysses is 1 x 1 x 2 x 1 x 1 = 2",
        ),
        (
            {"count": 3, "layout": "manual", "ulysses": 3},
            "ulysses 3 does not divide the 40 attention heads",
        ),
        ({"count": 2, "cluster": "in-process"}, "2 workers in this process"),
        (
            {"cluster": "10.0.0.7:6379"},
            "the cluster is '10.0.0.7:6379', and there are local, in-process",
        ),
        ({"layout": "diagonal"}, "the layout is 'diagonal'"),
    ],
)
def test_workers_that_cannot_be_are_refused_before_anything_runs(
    run: Run, workers: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidWorkflowError) as refused:
        run(workflow(workers))
    (error,) = refused.value.verdict.node_errors["workers"]["errors"]
    assert error["type"] == "exception_during_inner_validation"
    assert said in error["details"]


def test_a_layout_that_does_not_suit_the_run_is_refused_before_workers_start(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guidance and heads are unknown before the run. No worker would answer at this address."""
    (tmp_path / "clusters.json").write_text('{"nowhere": {"address": "127.0.0.1:1"}}')
    monkeypatch.setenv(VARIABLE, str(tmp_path / "clusters.json"))
    nowhere = {"count": 2, "layout": "manual", "cluster": "nowhere"}
    with pytest.raises(NodeFailedError, match="guidance is 1 under every expert"):
        run(workflow({**nowhere, "cfg": 2}, guidance_high=1.0, guidance_low=1.0))
    with pytest.raises(NodeFailedError, match="ulysses 4 does not divide 2 heads"):
        run(workflow({**nowhere, "count": 4, "ulysses": 4}))
