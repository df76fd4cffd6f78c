"""Execution without ComfyUI: the environment for nodes, and run results."""

from __future__ import annotations

import threading

import pytest

from wanstream.host import Host, current_host, io
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
from wanstream.tests.support.host.embedded import embedded_host
from wanstream.tests.support.host.shipped import node

# Node 1 is read twice, and node 5 not at all.
PROMPT = {
    "4": node("Show", number=["3", 0]),
    "3": node("Add", a=["1", 0], b=["2", 0]),
    "2": node("Add", a=["1", 0], b="1"),
    "1": node("Number", value=20),
    "5": node("Number", value=1),
}


def test_steps_are_planned_once_each_in_order(nodes):
    by_id = nodes_by_id(nodes.all)
    steps = plan_steps(PROMPT, by_id, ["4"])
    assert [step.node_id for step in steps] == ["1", "2", "3", "4"]
    assert steps[1].constants == {"b": "1"}
    assert steps[2].links == {"a": Link("1", 0), "b": Link("2", 0)}
    assert [step.done_with for step in steps] == [(), (), ("1", "2"), ("3", "4")]
    chain = {f"{i}": node("Add", a=[f"{i - 1}", 0], b=1) for i in range(1, 3000)}
    prompt = {"0": node("Number", value=0), **chain}
    assert len(plan_steps(prompt, by_id, ["2999"])) == 3000, "no deep stack"


def test_run_leaves_its_history_and_progress(run, nodes):
    seen: list[NodeProgress] = []
    history = run(PROMPT, keep=["1", "3"], on_progress=seen.append)
    assert list(history.outputs) == ["4"]
    shown = history.outputs["4"]
    assert shown["shown"] == [{"number": 41, "inference": True, "id": "4"}]
    assert shown["info"] == [None]
    assert shown["prompt"][0]["2"]["inputs"]["b"] == 1
    assert history.results == {"1": (20, "20"), "3": (41,)}
    assert history.node_errors == {}
    assert nodes.Show.hidden == io.HiddenHolder(), "no value is left on the class"
    progress = [(each.node_id, each.done, each.total) for each in seen if each.node_id in "34"]
    ends = [("4", 0, 1), ("4", 1, 2), ("4", 2, 2), ("4", 1, 1)]
    assert progress == [("3", 0, 1), ("3", 1, 1), *ends]
    assert seen[0].class_type == "Number"


def test_invalid_workflow_is_refused_before_anything_runs(run):
    seen: list[NodeProgress] = []
    message = r"node 1 \(Number\): Value 2000 bigger than max of 100"
    with pytest.raises(InvalidWorkflowError, match=message):
        run({**PROMPT, "1": node("Number", value=2000)}, on_progress=seen.append)
    assert seen == []
    history = run({**PROMPT, "6": node("Show")})
    assert list(history.outputs) == ["4"], "a broken output does not stop a valid one"
    assert list(history.node_errors) == ["6"]


def test_failed_node_is_named_and_the_next_run_succeeds(run, nodes):
    message = r"node 7 \(Fail\): KeyError: 'gone'"
    with pytest.raises(NodeFailedError, match=message) as raised:
        run({**PROMPT, "7": node("Fail", number=["3", 0])})
    assert isinstance(raised.value.__cause__, KeyError)

    class Short(nodes.Number):  # type: ignore[name-defined, misc]
        @classmethod
        def execute(cls, value: int) -> io.NodeOutput:
            return io.NodeOutput(value)

    with pytest.raises(NodeFailedError, match="the node returned 1 results, but has 2 outputs"):
        run(PROMPT, nodes=[Short, nodes.Add, nodes.Show])
    assert run(PROMPT).outputs["4"]["shown"][0]["number"] == 41


def stop_from_a_thread(progress: NodeProgress) -> None:
    thread = threading.Thread(target=embedded_host.stop)
    thread.start()
    thread.join()


def stop_at_three(progress: NodeProgress) -> None:
    if progress.node_id == "3":
        embedded_host.stop()


def stop_inside_show(progress: NodeProgress) -> None:
    if progress.total == 2:
        embedded_host.stop()


@pytest.mark.parametrize("stop", [stop_from_a_thread, stop_at_three, stop_inside_show])
def test_stopped_run_ends_and_the_next_one_runs(run, stop):
    with pytest.raises(Cancelled):
        run(PROMPT, on_progress=stop)
    assert current_host().events.should_stop() is False
    assert run(PROMPT).outputs["4"]["shown"][0]["number"] == 41


def test_two_runs_of_one_host_at_once_are_refused(run):
    refused: list[str] = []

    def start_another(progress: NodeProgress) -> None:
        if not refused:
            with pytest.raises(StateError) as raised:
                run(PROMPT)
            refused.append(str(raised.value))

    assert run(PROMPT, on_progress=start_another).outputs
    assert "use another EmbeddedHost" in refused[0]


def test_two_hosts_run_in_one_process_at_once(nodes, tmp_path):
    """Each node reaches the host running it, inside another run as well as on another thread."""
    hosts = {name: EmbeddedHost() for name in ("outer", "inner", "thread")}
    reached: dict[str, list[Host]] = {name: [] for name in hosts}
    histories: list[History] = []

    def start(name: str) -> None:
        folders = Folders(models=tmp_path, output=tmp_path / name, input=tmp_path)
        workflow = load_workflow(PROMPT, host=hosts[name], nodes=nodes.all, folders=folders)

        def follow(progress: NodeProgress) -> None:
            if name == "outer" and not histories:
                thread = threading.Thread(target=start, args=("thread",))
                thread.start()
                start("inner")
                thread.join()
            reached[name].append(current_host())

        histories.append(workflow.run(on_progress=follow))

    start("outer")
    assert [history.outputs["4"]["shown"][0]["number"] for history in histories] == [41, 41, 41]
    for name, host in hosts.items():
        assert {*map(id, reached[name])} == {id(host)}
    assert current_host() not in hosts.values()


def test_node_of_a_real_comfyui_is_refused():
    class Foreign:
        """Class derived from a foreign `io.ComfyNode`, not the embedded one."""

    with pytest.raises(UnsupportedNodeError, match="Foreign was built for the ComfyUI"):
        nodes_by_id([Foreign])  # type: ignore[list-item]


def test_models_are_named_only_inside_a_run(run, tmp_path):
    folder = tmp_path / "models" / "vae"
    folder.mkdir(parents=True)
    (folder / "wan.safetensors").touch()
    assert current_host().files.model_names("vae") == []
    with pytest.raises(StateError):
        current_host().files.model_path("wan.safetensors", "vae")
    seen: list[list[str]] = []

    def list_models(progress: NodeProgress) -> None:
        seen.append(current_host().files.model_names("vae", "diffusers"))

    run(PROMPT, on_progress=list_models)
    assert seen[0] == ["wan.safetensors"]
