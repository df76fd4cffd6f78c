"""Native model loaders in a real ComfyUI: inputs as in the loaders there, results, templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wanstream.host.embedded.workflow.validate import Socket, converted, sockets_of, value_fault
from wanstream.tools.comfyui import Server

pytestmark = pytest.mark.comfy

LOADED = """
from installed_pack import load_pack

load_pack()
import comfy.sample, comfy.sd, torch
from native_families import FAMILIES, given_configuration
from wanstream.host.comfy.adapter import native_models as adapter
from wanstream.nodes.native.models import WanStreamLoadDiffusionModel, WanStreamStreamModel
from wanstream.plan import AutoOffload
from wanstream.schema import OffloadPolicy

limits = {"smallest_block": 0, "smallest_model": 0}
adapter._native_limits = lambda: limits
family, folder = FAMILIES["flux"], arguments[0]
folder_paths.folder_names_and_paths["diffusion_models"][0][:] = [folder]
family.write(f"{folder}/flux1-dev.safetensors", "fp16")

def sampled(model):
    positive, negative = family.conditioning()
    latent = family.latent()
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(3))
    settings = (2, 3.0, "euler", "simple", positive, negative, latent)
    return comfy.sample.sample(model, noise, *settings, disable_pbar=True, seed=3)

def loaded(**policy):
    execute = WanStreamLoadDiffusionModel.execute
    return execute(unet_name="flux1-dev.safetensors", weight_dtype="default", **policy).args[0]

def streamed(**policy):
    return WanStreamStreamModel.execute(model=own, **policy).args[0]

def refusal(make):
    try:
        make(policy=OffloadPolicy.block_swap(99))
    except ValueError as err:
        return str(err)

with torch.inference_mode(), given_configuration(family):
    own = comfy.sd.load_diffusion_model(f"{folder}/flux1-dev.safetensors", model_options={})
    native = sampled(own)
    policies = {
        "none": {},
        "auto": {"policy": AutoOffload()},
        "swap": {"policy": OffloadPolicy.block_swap(5, prefetch_blocks=2)},
    }
    models = {
        f"{make.__name__}, {name}": make(**policy)
        for make in (loaded, streamed)
        for name, policy in policies.items()
    }
    answer = {
        # Bytes of the policies: none is loaded yet.
        "bytes": {name: model.model_size() for name, model in models.items()},
        "equal": {name: torch.equal(sampled(model), native) for name, model in models.items()},
        "blocks": {name: model.weights.block_counts["model"] for name, model in models.items()},
        "refusals": [refusal(make) for make in (loaded, streamed)],
    }
"""


def test_the_nodes_give_the_results_of_comfyuis_own_loader_and_refuse_a_wrong_policy_at_once(
    in_comfyui: Callable[..., Any], tmp_path: Path
) -> None:
    found = in_comfyui(LOADED, str(tmp_path))
    models = [
        f"{node}, {policy}"
        for node in ("loaded", "streamed")
        for policy in ("none", "auto", "swap")
    ]
    assert found["equal"] == dict.fromkeys(models, True)
    (blocks,) = {*found["blocks"].values()}
    assert blocks > 5
    for node in ("loaded", "streamed"):
        none, auto, swap = (
            found["bytes"][f"{node}, {policy}"] for policy in ("none", "auto", "swap")
        )
        assert none == auto < swap
    for refusal in found["refusals"]:
        assert "blocks_to_swap is 99" in refusal
        assert f"only {blocks} blocks" in refusal


def test_inputs_choices_and_output_are_those_of_comfyuis_own_loader(server: Server) -> None:
    """A graph stays valid when the loader class is exchanged."""
    shown = server.get("/object_info")
    own, ours = shown["UNETLoader"], shown["WanStreamLoadDiffusionModel"]
    assert [*ours["input"]["required"]] == [*own["input"]["required"]]
    assert [*ours["input"]["optional"]] == ["policy", "share_visits"]
    assert ours["output"] == own["output"] == ["MODEL"]
    assert _choices(ours, "weight_dtype") == _choices(own, "weight_dtype")
    readable = [name for name in _choices(own, "unet_name") if name.endswith(".safetensors")]
    assert (
        [name for name in _choices(ours, "unet_name") if not name.endswith(".gguf")]
        == readable
        != []
    )


TWINS = {
    "WanStreamLoadCheckpoint": ("CheckpointLoaderSimple", ["policy", "share_visits"]),
    "WanStreamLoadCLIP": ("CLIPLoader", ["device", "policy"]),
    "WanStreamDualCLIP": ("DualCLIPLoader", ["device", "policy"]),
    "WanStreamTripleCLIP": ("TripleCLIPLoader", ["policy"]),
    "WanStreamQuadrupleCLIP": ("QuadrupleCLIPLoader", ["policy"]),
}


@pytest.mark.parametrize("name", TWINS)
def test_loaders_of_checkpoints_and_encoders_have_the_inputs_of_comfyuis(
    server: Server, name: str
) -> None:
    twin, optional = TWINS[name]
    shown = server.get("/object_info")
    own = shown[twin]
    ours = shown[name]
    assert [*ours["input"]["required"]] == [*own["input"]["required"]]
    assert [*ours["input"]["optional"]] == optional
    assert ours["output"] == own["output"]
    if "type" in own["input"]["required"]:
        assert _choices(ours, "type") == _choices(own, "type")


def _choices(info: dict[str, Any], name: str) -> list[str]:
    """An input's choices in `/object_info`, where older nodes list them in place of the type."""
    kind, *options = info["input"]["required"][name]
    return list(kind if isinstance(kind, list) else options[0]["options"])


TEMPLATES = """
from importlib.metadata import distributions
answer = sorted(
    str(each.locate_file(file))
    for each in distributions()
    if (each.metadata["Name"] or "").startswith("comfyui-workflow-templates")
    for file in each.files or ()
    if file.suffix == ".json" and file.parent.name == "templates"
)
"""


def loaders(workflow: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield ComfyUI's own loaders in a canvas file and the subgraphs."""
    for graph in (workflow, *workflow.get("definitions", {}).get("subgraphs", ())):
        yield from (node for node in graph["nodes"] if node["type"] == "UNETLoader")


def _faults(
    node: Mapping[str, Any], sockets: Mapping[str, Socket], outputs: list[str]
) -> Iterator[str]:
    """Yield features of a canvas node that are missing in the server's description of our class."""
    for saved in node.get("inputs", ()):
        if saved["name"] not in sockets or saved["type"] != sockets[saved["name"]].io_type:
            yield f"input {saved['name']} of type {saved['type']}"
    if [saved["type"] for saved in node["outputs"]] != outputs:
        yield f"outputs {node['outputs']}"
    # The optional ones follow, and keep their defaults.
    widgets = [
        socket for socket in sockets.values() if socket.io_type == "COMBO" and socket.required
    ]
    values = node["widgets_values"]
    if len(values) != len(widgets):
        yield f"values {values}"
    for socket, value in zip(widgets, values, strict=False):
        if socket.name == "unet_name":
            # The file is not installed here, so only the format is checked.
            if not str(value).endswith((".safetensors", ".sft")):
                yield f"the file {value}"
            continue
        if fault := converted(socket, value)[1] or value_fault(socket, value):
            yield str(fault["details"])


def test_the_loader_can_be_exchanged_in_every_template_of_comfyui(
    in_comfyui: Callable[..., Any], server: Server
) -> None:
    info = server.get("/object_info/WanStreamLoadDiffusionModel")["WanStreamLoadDiffusionModel"]
    sockets = sockets_of(info["input"])
    templates, nodes, faults = 0, 0, []
    for path in map(Path, in_comfyui(TEMPLATES)):
        workflow = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(workflow, dict) or "nodes" not in workflow:  # a template list
            continue
        found = list(loaders(workflow))
        templates += bool(found)
        nodes += len(found)
        for node in found:
            exchanged = {**node, "type": "WanStreamLoadDiffusionModel"}
            faults += [
                f"{path.name}: {fault}" for fault in _faults(exchanged, sockets, info["output"])
            ]
    assert faults == []
    assert templates > 20
    assert nodes > templates


def test_a_loader_that_does_not_fit_would_be_seen(server: Server) -> None:
    info = server.get("/object_info/WanStreamLoadDiffusionModel")["WanStreamLoadDiffusionModel"]
    sockets = sockets_of(info["input"])
    output = {"type": "MODEL"}
    good = {
        "inputs": [],
        "outputs": [output],
        "widgets_values": ["flux1-dev.safetensors", "default"],
    }
    assert list(_faults(good, sockets, info["output"])) == []
    bad = [
        {"widgets_values": ["flux1-dev.safetensors", "nf4"]},
        {"widgets_values": ["flux1-dev.safetensors"]},
        {"widgets_values": ["flux1-dev.gguf", "default"]},
        {"outputs": [output, output]},
        {"inputs": [{"name": "unet", "type": "COMBO"}]},
        {"inputs": [{"name": "unet_name", "type": "STRING"}]},
    ]
    assert [len(list(_faults({**good, **change}, sockets, info["output"]))) for change in bad] == [
        1
    ] * len(bad)
    renamed = {name: replace(socket, io_type="STRING") for name, socket in sockets.items()}
    assert list(_faults(good, renamed, info["output"])) != []
