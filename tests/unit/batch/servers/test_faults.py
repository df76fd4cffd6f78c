"""Workflow faults by a server's `/object_info`, with choices described in both forms."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.batch.backend import check_classes
from wanstream.batch.errors import SetupError
from wanstream.batch.servers.server_backend import ServerBackend
from wanstream.host.embedded.object_info import ObjectInfo
from wanstream.host.embedded.workflow.validate import sockets_of
from wanstream.host.workers.clusters import VARIABLE
from wanstream.tests.faults.comfy_like import object_info
from wanstream.tests.faults.replaced import named_models
from wanstream.tests.support.batch.command import shipped

SEED = ["INT", {"default": 0, "min": 0, "max": 100}]
SOLVER = ["COMBO", {"options": ["euler", "unipc"]}]
SAMPLER = {
    "required": {"model": ["MODEL"], "seed": SEED, "solver": SOLVER},
    "optional": {"mask": ["MASK", {}], "many": ["COMFY_AUTOGROW_V3", {}]},
    "hidden": {"prompt": ["PROMPT"]},
}
FILES = [["a.safetensors", "b.safetensors"], {"tooltip": "x"}]


def node(
    inputs: dict[str, Any], *outputs: object, saves: bool = False, **kinds: object
) -> dict[str, Any]:
    return {"input": {"required": inputs, **kinds}, "output": [*outputs], "output_node": saves}


INFO: dict[str, Any] = {
    "Loader": node({"file": FILES}, "MODEL", ["euler", "unipc"]),
    "Picture": node({"image": [["a.png"], {"image_upload": True}]}, "IMAGE", "MASK"),
    "Sampler": node(SAMPLER["required"], "LATENT", **SAMPLER),
    "Save": node({"latent": ["LATENT,IMAGE"], "any": ["*"]}, saves=True),
}
INPUTS = {"model": ["1", 0], "seed": 7, "solver": ["1", 1], "mask": ["2", 1]}
WORKFLOW: dict[str, Any] = {
    "1": {"class_type": "Loader", "inputs": {"file": "a.safetensors"}},
    "2": {"class_type": "Picture", "inputs": {"image": "sub/other.png"}},
    "3": {"class_type": "Sampler", "inputs": INPUTS},
    "4": {"class_type": "Save", "inputs": {"latent": ["3", 0], "any": ["2", 0]}},
}


def faults_of(workflow: dict[str, Any], info: ObjectInfo = INFO) -> list[str]:
    backend = ServerBackend("http://127.0.0.1:1")
    backend._info = info
    backend.sockets = {name: sockets_of(node.get("input") or {}) for name, node in info.items()}
    return backend.faults(workflow)


def test_a_sound_workflow_has_no_faults():
    check_classes(WORKFLOW, INFO, "")
    # The server does not check a node that no output reads either.
    unread = {"class_type": "Sampler", "inputs": {"seed": -1}}
    for workflow in (WORKFLOW, {**WORKFLOW, "5": unread}):
        assert faults_of(workflow) == []
    nothing = "the workflow has no node that saves or shows anything"
    assert faults_of({"1": WORKFLOW["1"]}) == [nothing]


@pytest.mark.parametrize(
    ("node", "name", "value", "fault"),
    [
        ("1", "file", "c", "node 1 (Loader): Value not in list: file: 'c' not in ['a.safetensors'"),
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
def test_a_fault_is_told_with_its_node_and_input(node, name, value, fault):
    broken = copy.deepcopy(WORKFLOW)
    broken[node]["inputs"][name] = value
    if value is None:
        del broken[node]["inputs"][name]
    (told,) = faults_of(broken)
    assert fault in told


def test_unknown_classes_are_listed():
    broken = {**WORKFLOW, "5": {"class_type": "KSampler"}, "6": {}}
    with pytest.raises(SetupError) as refused:
        check_classes(broken, INFO, "not here:")
    unknown = ["node 5: unknown class KSampler", "node 6: unknown class None"]
    assert str(refused.value).splitlines() == ["not here:", *unknown]


def test_odd_descriptions_and_types_are_left_to_the_server():
    described = {"a": [], "b": "INT", "c": None, "d": ["INT", {"max": 3}]}
    odd = node(described, saves=True, optional=None)
    assert list(sockets_of(odd["input"])) == ["d"]
    info = {**INFO, "Odd": odd, "Bare": {"input": None}}
    info["Own"] = node({"x": ["INT,FLOAT", {"min": 0}]}, saves=True)
    for name, inputs in (("Odd", {"d": 3}), ("Own", {"x": "seven"})):
        assert faults_of({"1": {"class_type": name, "inputs": inputs}}, info) == []


@pytest.fixture
def server_of_many_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectInfo:
    """Nodes from a server with the cluster "lab"; here are the cluster "mine" and one GPU."""
    lists = {name: tmp_path / f"{name}.json" for name in ("lab", "mine")}
    for name, path in lists.items():
        path.write_text(json.dumps({name: {"address": "127.0.0.1:6379"}}), encoding="utf-8")
    monkeypatch.setenv(VARIABLE, str(lists["lab"]))
    info = object_info(named_models(tmp_path / "models", shipped("workers")))
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
        ({"cluster": "lab", "layout": "manual", "count": 3}, "there are 3 workers: change one"),
        ({"cluster": "lab", "layout": "x"}, "the layout is 'x'"),
    ],
)
def test_workers_are_checked_against_the_server(server_of_many_gpus, changes, said):
    workflow = shipped("workers")
    (node,) = [node for node in workflow.values() if node["class_type"] == "WanStreamWorkers"]
    node["inputs"].update(changes)
    faults = faults_of(workflow, server_of_many_gpus)
    assert len(faults) == bool(said)
    assert said in "".join(faults)


@pytest.mark.parametrize("listed", [["none"], ["none", "latents/a.latent"]])
def test_any_saved_latent_of_a_server_may_be_chosen(tmp_path, listed):
    mine = "clips/mine.latent"
    workflow = shipped("continue_video", clip={"previous_file": mine})
    info = copy.deepcopy(object_info(named_models(tmp_path / "models", workflow)))
    info["LoadImage"] = INFO["Picture"]
    for name, kind, file in (
        ("ContinueVideo", "optional", "previous_file"),
        ("LoadLatent", "required", "file"),
    ):
        info[f"WanStream{name}"]["input"][kind][file][1]["options"] = listed
    workflow["loaded"] = {"class_type": "WanStreamLoadLatent", "inputs": {"file": mine}}
    workflow["kept"] = shipped("continue_video", keep={"latent": ["loaded", 0]})["keep"]
    assert "clips/mine" not in "".join(faults_of(workflow, info))
    workflow["clip"]["inputs"]["overlap"] = 40
    # Other inputs are checked.
    assert "an overlap of 40 latent frames need" in "".join(faults_of(workflow, info))
