"""Workflow faults by a server's `/object_info`, with choices described in both forms."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.batch.backend import (
    check_classes,
)
from wanstream.batch.errors import SetupError
from wanstream.batch.servers.server_backend import ServerBackend
from wanstream.cli import main
from wanstream.cli.arguments import DONE, INVALID
from wanstream.host.embedded.object_info import ObjectInfo
from wanstream.host.embedded.workflow.validate import sockets_of
from wanstream.host.workers.clusters import VARIABLE
from wanstream.tests.faults.comfy_like import State, Trouble, handler_of, object_info
from wanstream.tests.faults.replaced import named_models

INFO: dict[str, Any] = {
    "Loader": {
        "input": {"required": {"file": [["a.safetensors", "b.safetensors"], {"tooltip": "x"}]}},
        "output": ["MODEL", ["euler", "unipc"]],
        "output_node": False,
    },
    "Picture": {
        "input": {"required": {"image": [["a.png"], {"image_upload": True}]}},
        "output": ["IMAGE", "MASK"],
        "output_node": False,
    },
    "Sampler": {
        "input": {
            "required": {
                "model": ["MODEL"],
                "seed": ["INT", {"default": 0, "min": 0, "max": 100}],
                "solver": ["COMBO", {"options": ["euler", "unipc"]}],
            },
            "optional": {"mask": ["MASK", {}], "many": ["COMFY_AUTOGROW_V3", {}]},
            "hidden": {"prompt": ["PROMPT"]},
        },
        "output": ["LATENT"],
        "output_node": False,
    },
    "Save": {
        "input": {"required": {"latent": ["LATENT,IMAGE"], "any": ["*"]}},
        "output": [],
        "output_node": True,
    },
}
WORKFLOW: dict[str, Any] = {
    "1": {"class_type": "Loader", "inputs": {"file": "a.safetensors"}},
    "2": {"class_type": "Picture", "inputs": {"image": "sub/other.png"}},
    "3": {
        "class_type": "Sampler",
        "inputs": {"model": ["1", 0], "seed": 7, "solver": ["1", 1], "mask": ["2", 1]},
    },
    "4": {"class_type": "Save", "inputs": {"latent": ["3", 0], "any": ["2", 0]}},
}


def faults_of(workflow: dict[str, Any], info: ObjectInfo = INFO) -> list[str]:
    backend = ServerBackend("http://127.0.0.1:1")
    backend._info = info
    backend.sockets = {name: sockets_of(node.get("input") or {}) for name, node in info.items()}
    return backend.faults(workflow)


def test_a_sound_workflow_has_no_faults() -> None:
    check_classes(WORKFLOW, INFO, "")
    assert faults_of(WORKFLOW) == []


@pytest.mark.parametrize(
    ("node", "name", "value", "fault"),
    [
        (
            "1",
            "file",
            "c",
            "node 1 (Loader): Value not in list: file: 'c' not in ['a.safetensors', "
            "'b.safetensors']",
        ),
        ("3", "solver", "ddim", "node 3 (Sampler): Value not in list"),
        ("3", "seed", -1, "node 3 (Sampler): Value -1 smaller than min of 0: seed"),
        ("3", "seed", 101, "node 3 (Sampler): Value 101 bigger than max of 100: seed"),
        ("3", "seed", "x", "node 3 (Sampler): Failed to convert an input value to a INT value"),
        ("3", "model", None, "node 3 (Sampler): Required input is missing: model"),
        ("3", "model", ["2", 0], "received_type(IMAGE) mismatch input_type(MODEL)"),
        ("3", "model", ["9", 0], "'model' is linked to node '9', which is not in the workflow"),
        ("3", "model", ["1", 2], "'model' is linked to output 2 of node '1' (Loader), which has 2"),
        ("3", "model", ["1"], "Bad linked input"),
    ],
)
def test_a_fault_is_told_with_its_node_and_input(
    node: str, name: str, value: Any, fault: str
) -> None:
    broken = copy.deepcopy(WORKFLOW)
    broken[node]["inputs"][name] = value
    if value is None:
        del broken[node]["inputs"][name]
    (told,) = faults_of(broken)
    assert fault in told


def test_a_node_that_no_output_reads_is_not_checked() -> None:
    """The server does not check it either."""
    unread = {"class_type": "Sampler", "inputs": {"seed": -1}}
    assert faults_of({**WORKFLOW, "5": unread}) == []


def test_a_workflow_that_shows_nothing() -> None:
    assert faults_of({"1": WORKFLOW["1"]}) == [
        "the workflow has no node that saves or shows anything"
    ]


def test_classes_that_are_not_there() -> None:
    broken = {**WORKFLOW, "5": {"class_type": "KSampler"}, "6": {}}
    with pytest.raises(SetupError) as refused:
        check_classes(broken, INFO, "not here:")
    assert str(refused.value).splitlines() == [
        "not here:",
        "node 5: unknown class KSampler",
        "node 6: unknown class None",
    ]


def test_descriptions_that_are_none_cost_nobody_anything() -> None:
    odd = {
        "input": {
            "required": {"a": [], "b": "INT", "c": None, "d": ["INT", {"max": 3}]},
            "optional": None,
        }
    }
    info = {**INFO, "Odd": {**odd, "output": [], "output_node": True}, "Bare": {"input": None}}
    assert list(sockets_of(odd["input"])) == ["d"]
    assert faults_of({"1": {"class_type": "Odd", "inputs": {"d": 3}}}, info) == []


def test_a_limit_of_a_type_of_somebodys_own_is_left_to_the_server() -> None:
    any_number = {
        "input": {"required": {"x": ["INT,FLOAT", {"min": 0}]}},
        "output": [],
        "output_node": True,
    }
    info = {"Own": any_number}
    workflow = {"1": {"class_type": "Own", "inputs": {"x": "seven"}}}
    assert faults_of(workflow, info) == []


T2V = json.loads(
    (Path(__file__).parents[3] / "workflows" / "api" / "t2v.json").read_text(encoding="utf-8")
)


@pytest.fixture
def server_url(tmp_path: Path) -> Iterator[str]:
    """A server with this pack and the workflow's models."""
    state = State(tmp_path, named_models(tmp_path / "models", T2V))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(state, Trouble()))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"latent.width": 70}, "70"),
        ({"latent.frames": 6}, "frames"),
        ({"sampler.steps": 0}, "steps"),
        ({"sampler.cfg_high": -5}, "cfg_high"),
        ({"save.filename_prefix": "../../x"}, "leaves the folder output"),
        ({"save.crf": 99}, "bigger than max of 51"),
        ({"sampler.solver": "ddim"}, "not in"),
        ({"sampler.seed": 5}, ""),
    ],
)
def test_a_dry_run_judges_a_row_for_a_server_as_it_does_for_this_process(
    server_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    row: dict[str, Any],
    reason: str,
) -> None:
    """The server itself can judge a workflow only by running it."""
    models = tmp_path / "models"
    (tmp_path / "workflow.json").write_text(json.dumps(T2V), encoding="utf-8")
    (tmp_path / "jobs.jsonl").write_text(json.dumps(row), encoding="utf-8")
    call = [
        "batch",
        str(tmp_path / "jobs.jsonl"),
        "--workflow",
        str(tmp_path / "workflow.json"),
        "--dry-run",
    ]
    call += ["--out", str(tmp_path / "out")]
    told = {}
    for where in (["--models", str(models)], ["--server", server_url]):
        told[where[0]] = (main([*call, *where]), capsys.readouterr())
    code, printed = told["--server"]
    assert code == told["--models"][0] == (INVALID if reason else DONE)
    assert reason in printed.err
    assert "were judged" not in printed.err, "all nodes are ours"
    assert not (tmp_path / "out").exists()


def test_a_dry_run_for_a_server_names_every_bad_row(
    server_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks on several inputs raise a refusal. The other rows must still be judged."""
    rows = [
        {"latent.width": 70},
        {"sampler.seed": 5},
        {"sampler.switch_step": 99},
        {"latent.frames": 6},
    ]
    (tmp_path / "workflow.json").write_text(json.dumps(T2V), encoding="utf-8")
    (tmp_path / "jobs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    call = [
        "batch",
        str(tmp_path / "jobs.jsonl"),
        "--workflow",
        str(tmp_path / "workflow.json"),
        "--dry-run",
    ]
    assert main([*call, "--out", str(tmp_path / "out"), "--server", server_url]) == INVALID
    told = capsys.readouterr().err
    for line, said in {1: "70", 3: "switch step 99", 4: "frames"}.items():
        (reason,) = [each for each in told.splitlines() if f"line {line}:" in each]
        assert "Exception when validating" not in reason
        assert said in reason
    assert "line 2:" not in told


WORKFLOWS = Path(__file__).parents[3] / "workflows" / "api"
WORKERS = json.loads((WORKFLOWS / "workers.json").read_text(encoding="utf-8"))


@pytest.fixture
def server_of_many_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectInfo:
    """Nodes from a server with the cluster "lab"; here are the cluster "mine" and one GPU."""
    lists = {}
    for name in ("lab", "mine"):
        lists[name] = tmp_path / f"{name}.json"
        lists[name].write_text(json.dumps({name: {"address": "127.0.0.1:6379"}}), encoding="utf-8")
    monkeypatch.setenv(VARIABLE, str(lists["lab"]))
    info = object_info(named_models(tmp_path / "models", WORKERS))
    monkeypatch.setenv(VARIABLE, str(lists["mine"]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return info


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cluster": "lab", "count": 8}, ""),
        ({"cluster": "local", "count": 8}, ""),
        ({"cluster": "mine"}, "'mine' not in ['local', 'in-process', 'lab']"),
        (
            {"cluster": "lab", "layout": "manual", "count": 3},
            "there are 3 workers: change one of the degrees",
        ),
        ({"cluster": "lab", "layout": "x"}, "the layout is 'x'"),
    ],
)
def test_workers_are_judged_by_the_clusters_and_gpus_of_the_server(
    server_of_many_gpus: ObjectInfo, changes: dict[str, Any], said: str
) -> None:
    workflow = copy.deepcopy(WORKERS)
    (node,) = [node for node in workflow.values() if node["class_type"] == "WanStreamWorkers"]
    node["inputs"].update(changes)
    faults = faults_of(workflow, server_of_many_gpus)
    assert len(faults) == (1 if said else 0)
    assert said in "".join(faults)


@pytest.mark.parametrize("listed", [["none"], ["none", "latents/a.latent"]])
def test_any_saved_latent_of_a_server_may_be_chosen(tmp_path: Path, listed: list[str]) -> None:
    workflow = json.loads((WORKFLOWS / "continue_video.json").read_text(encoding="utf-8"))
    info = copy.deepcopy(object_info(named_models(tmp_path / "models", workflow))) | {
        "LoadImage": INFO["Picture"]
    }
    kinds = info["WanStreamContinueVideo"]["input"]["optional"]["previous_file"]
    kinds[1]["options"] = listed
    info["WanStreamLoadLatent"]["input"]["required"]["file"][1]["options"] = listed
    workflow["clip"]["inputs"] |= {"previous_file": "clips/mine.latent"}
    workflow["loaded"] = {
        "class_type": "WanStreamLoadLatent",
        "inputs": {"file": "clips/mine.latent"},
    }
    workflow["kept"] = {
        **workflow["keep"],
        "inputs": {**workflow["keep"]["inputs"], "latent": ["loaded", 0]},
    }
    found = faults_of(workflow, info)
    assert not [fault for fault in found if "clips/mine" in fault], found
    workflow["clip"]["inputs"]["overlap"] = 40
    assert "an overlap of 40 latent frames need" in "".join(faults_of(workflow, info)), (
        "other inputs are checked"
    )


def test_what_a_dry_run_cannot_judge_is_named(
    server_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("wanstream.tests.faults.comfy_like.object_info", lambda models: INFO)
    (tmp_path / "workflow.json").write_text(json.dumps(WORKFLOW), encoding="utf-8")
    (tmp_path / "jobs.jsonl").write_text('{"3.seed": 1}', encoding="utf-8")
    call = [
        "batch",
        str(tmp_path / "jobs.jsonl"),
        "--workflow",
        str(tmp_path / "workflow.json"),
        "--dry-run",
    ]
    assert main([*call, "--out", str(tmp_path / "out"), "--server", server_url]) == DONE
    told = capsys.readouterr().err
    assert "only types, ranges and choices of Loader, Picture, Sampler, Save were checked" in told
