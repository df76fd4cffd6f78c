"""Execution without ComfyUI: the environment for nodes, and run results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wanstream.host import current_host, io
from wanstream.host.api import Host
from wanstream.host.embedded.adapter import EmbeddedHost
from wanstream.host.embedded.events import NodeProgress
from wanstream.host.embedded.files import Folders
from wanstream.host.embedded.run import History, NodeFailedError, load_workflow
from wanstream.host.embedded.workflow.graph import (
    Link,
    UnsupportedNodeError,
    nodes_by_id,
    plan_steps,
)
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.schema import Cancelled, StateError
from wanstream.tests.support.embedded import embedded_host

# Node 1 is read twice, and node 5 not at all.
PROMPT: dict[str, Any] = {
    "4": {"class_type": "Show", "inputs": {"number": ["3", 0]}},
    "3": {"class_type": "Add", "inputs": {"a": ["1", 0], "b": ["2", 0]}},
    "2": {"class_type": "Add", "inputs": {"a": ["1", 0], "b": "1"}},
    "1": {"class_type": "Number", "inputs": {"value": 20}},
    "5": {"class_type": "Number", "inputs": {"value": 1}},
}


def test_steps_are_planned_once_each_in_order(nodes: SimpleNamespace) -> None:
    steps = plan_steps(PROMPT, nodes_by_id(nodes.all), ["4"])
    assert [step.node_id for step in steps] == ["1", "2", "3", "4"]
    assert steps[1].constants == {"b": "1"}
    assert steps[2].links == {"a": Link("1", 0), "b": Link("2", 0)}
    assert [step.done_with for step in steps] == [(), (), ("1", "2"), ("3", "4")]


def test_a_long_chain_needs_no_deep_stack(nodes: SimpleNamespace) -> None:
    chain = {
        f"{i}": {"class_type": "Add", "inputs": {"a": [f"{i - 1}", 0], "b": 1}}
        for i in range(1, 3000)
    }
    prompt = {"0": {"class_type": "Number", "inputs": {"value": 0}}, **chain}
    assert len(plan_steps(prompt, nodes_by_id(nodes.all), ["2999"])) == 3000


def test_a_run_leaves_its_history(run: Callable[..., History]) -> None:
    history = run(PROMPT, keep=["1", "3"])
    assert list(history.outputs) == ["4"]
    assert history.outputs["4"]["shown"] == [{"number": 41, "inference": True, "id": "4"}]
    assert history.outputs["4"]["info"] == [None]
    assert history.outputs["4"]["prompt"][0]["2"]["inputs"]["b"] == 1
    assert history.results == {"1": (20, "20"), "3": (41,)}
    assert history.node_errors == {}


def test_hidden_values_are_not_left_on_the_class(
    run: Callable[..., History], nodes: SimpleNamespace
) -> None:
    run(PROMPT)
    assert nodes.Show.hidden == io.HiddenHolder()


def test_progress_names_the_node(run: Callable[..., History]) -> None:
    seen: list[NodeProgress] = []
    run(PROMPT, on_progress=seen.append)
    assert [(p.node_id, p.done, p.total) for p in seen if p.node_id in {"3", "4"}] == [
        ("3", 0, 1),
        ("3", 1, 1),
        ("4", 0, 1),
        ("4", 1, 2),
        ("4", 2, 2),
        ("4", 1, 1),
    ]
    assert seen[0].class_type == "Number"


def test_invalid_workflows_are_refused_before_anything_runs(run: Callable[..., History]) -> None:
    seen: list[NodeProgress] = []
    prompt = {**PROMPT, "1": {"class_type": "Number", "inputs": {"value": 2000}}}
    with pytest.raises(
        InvalidWorkflowError, match=r"node 1 \(Number\): Value 2000 bigger than max of 100"
    ):
        run(prompt, on_progress=seen.append)
    assert seen == []


def test_a_broken_output_does_not_hold_up_a_good_one(run: Callable[..., History]) -> None:
    history = run({**PROMPT, "6": {"class_type": "Show", "inputs": {}}})
    assert list(history.outputs) == ["4"]
    assert list(history.node_errors) == ["6"]


def test_a_node_that_raises_is_named_and_the_host_stays_usable(run: Callable[..., History]) -> None:
    failing = {**PROMPT, "7": {"class_type": "Fail", "inputs": {"number": ["3", 0]}}}
    with pytest.raises(NodeFailedError, match=r"node 7 \(Fail\): KeyError: 'gone'") as raised:
        run(failing)
    assert isinstance(raised.value.__cause__, KeyError)
    assert run(PROMPT).outputs["4"]["shown"][0]["number"] == 41


def test_a_stopped_run_ends_and_the_next_one_runs(run: Callable[..., History]) -> None:
    def stop_at_three(progress: NodeProgress) -> None:
        if progress.node_id == "3":
            embedded_host.stop()

    with pytest.raises(Cancelled):
        run(PROMPT, on_progress=stop_at_three)
    assert current_host().events.should_stop() is False
    assert run(PROMPT).outputs["4"]["shown"][0]["number"] == 41


def test_stopping_inside_a_node_is_no_failure_of_the_node(run: Callable[..., History]) -> None:
    def stop_in_show(progress: NodeProgress) -> None:
        if progress.total == 2:
            embedded_host.stop()

    with pytest.raises(Cancelled):
        run(PROMPT, on_progress=stop_in_show)


def test_two_runs_at_once_are_refused(run: Callable[..., History]) -> None:
    refused: list[BaseException] = []

    def start_another(progress: NodeProgress) -> None:
        if not refused:
            with pytest.raises(StateError) as raised:
                run(PROMPT)
            refused.append(raised.value)

    assert run(PROMPT, on_progress=start_another).outputs
    assert "use another EmbeddedHost" in str(refused[0])


def test_two_hosts_run_in_one_process_at_once(nodes: SimpleNamespace, tmp_path: Path) -> None:
    """Each node reaches the host running it, inside another run as well as on another thread."""
    hosts = {name: EmbeddedHost() for name in ("outer", "inner", "thread")}

    def start(name: str, on_progress: Callable[[NodeProgress], None] | None = None) -> History:
        folders = Folders(models=tmp_path, output=tmp_path / name, input=tmp_path)
        workflow = load_workflow(PROMPT, host=hosts[name], nodes=nodes.all, folders=folders)
        return workflow.run(on_progress=on_progress)

    reached: dict[str, list[Host]] = {name: [] for name in hosts}
    histories: list[History] = []

    def follow(name: str) -> Callable[[NodeProgress], None]:
        return lambda progress: reached[name].append(current_host())

    def start_others(progress: NodeProgress) -> None:
        if not histories:
            thread = threading.Thread(
                target=lambda: histories.append(start("thread", follow("thread")))
            )
            thread.start()
            histories.append(start("inner", follow("inner")))
            thread.join()
        reached["outer"].append(current_host())

    histories.append(start("outer", start_others))
    assert [history.outputs["4"]["shown"][0]["number"] for history in histories] == [41, 41, 41]
    for name, host in hosts.items():
        assert reached[name]
        assert set(map(id, reached[name])) == {id(host)}
    assert current_host() not in hosts.values()


def test_a_stop_from_another_thread_is_seen(run: Callable[..., History]) -> None:
    def stop(progress: NodeProgress) -> None:
        thread = threading.Thread(target=embedded_host.stop)
        thread.start()
        thread.join()

    with pytest.raises(Cancelled):
        run(PROMPT, on_progress=stop)


def test_results_must_match_the_promised_outputs(
    run: Callable[..., History], nodes: SimpleNamespace
) -> None:
    class Short(nodes.Number):  # type: ignore[name-defined, misc]
        @classmethod
        def execute(cls, value: int) -> io.NodeOutput:
            return io.NodeOutput(value)

    with pytest.raises(NodeFailedError, match="the node returned 1 results, but has 2 outputs"):
        run(PROMPT, nodes=[Short, nodes.Add, nodes.Show])


def test_nodes_of_a_real_comfyui_are_refused() -> None:
    class Foreign:
        """Class derived from a foreign `io.ComfyNode`, not the embedded one."""

    with pytest.raises(UnsupportedNodeError, match="Foreign was built for the ComfyUI"):
        nodes_by_id([Foreign])  # type: ignore[list-item]


def test_models_are_named_only_inside_a_run(run: Callable[..., History], tmp_path: Path) -> None:
    folder = tmp_path / "models" / "vae"
    folder.mkdir(parents=True)
    (folder / "wan.safetensors").touch()
    assert current_host().files.model_names("vae") == []
    with pytest.raises(StateError):
        current_host().files.model_path("wan.safetensors", "vae")
    seen: list[list[str]] = []
    run(
        PROMPT,
        on_progress=lambda progress: seen.append(
            current_host().files.model_names("vae", "diffusers")
        ),
    )
    assert seen[0] == ["wan.safetensors"]
