"""The pack inside a real ComfyUI server, loaded under an awkward folder name.

The server describes it as the embedded host does.
"""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest

from wanstream.host.embedded.files import Folders
from wanstream.nodes import WanStreamExtension
from wanstream.tests.integration.comfy.conftest import PACK
from wanstream.tests.support.host.embedded import embedded_host
from wanstream.tools.comfyui import find_comfyui

pytestmark = pytest.mark.comfy

MORE_CHOICES = {
    "WanStreamSigmas": "schedule",
    "WanStreamLoadCLIP": "type",
    "WanStreamDualCLIP": "type",
}
"""Inputs with more choices in ComfyUI."""
ADVANCED = {
    *("schedule", "boundary_ratio", "switch_step", "start_step", "end_step"),
    *("add_noise", "leftover_noise", "weight_dtype", "share_visits", "device"),
}
"""Inputs folded away by newer frontends."""
NODES = asyncio.run(WanStreamExtension().get_node_list())


@pytest.fixture(scope="module")
def described(server: Any) -> dict[str, Any]:
    """Node definitions as the server sends them to the frontend."""
    info: dict[str, Any] = server.get("/object_info")
    return info


def test_every_node_of_the_pack_is_loaded(server, described):
    """The archive has all nodes, and the overlay."""
    loaded = {name for name in described if name.startswith("WanStream")}
    assert loaded == {node.define_schema().node_id for node in NODES}
    assert described["WanStreamSampler"]["python_module"] == f"custom_nodes.{PACK}"
    assert f"/extensions/{PACK}/wanstream.js" in server.get("/extensions")


def without_advanced(node: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the node's inputs without the mark, and the marked inputs' names."""
    inputs = copy.deepcopy(node["input"])
    declared = {**inputs.get("required", {}), **inputs.get("optional", {})}
    marked = {
        name
        for name, (_, *options) in declared.items()
        if options and options[0].pop("advanced", None)
    }
    return inputs, marked


def test_rare_inputs_are_advanced(described):
    ours = [node for name, node in described.items() if name.startswith("WanStream")]
    marked = set().union(*(without_advanced(node)[1] for node in ours))
    assert marked == (ADVANCED if find_comfyui().version() >= (0, 18) else set())


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.__name__)
def test_node_looks_the_same_to_both_hosts(described, base, node):
    folders = Folders(models=base / "models", output=base / "output", input=base / "input")
    with embedded_host.opened(folders):
        schema = node.define_schema()
        inputs = json.loads(json.dumps(node.INPUT_TYPES()))
    theirs = described[schema.node_id]
    if schema.node_id in MORE_CHOICES:
        name = MORE_CHOICES[schema.node_id]
        ours = inputs["required"][name][1]
        offered = theirs["input"]["required"][name][1]
        assert {*ours["options"]} < {*offered["options"]}
        ours["options"] = offered["options"]
    assert without_advanced(theirs)[0] == inputs
    assert theirs["output"] == [output.io_type for output in schema.outputs]
    names = [output.display_name or output.io_type for output in schema.outputs]
    assert theirs["output_name"] == names
    assert theirs["output_node"] == schema.is_output_node
    assert theirs["display_name"] == schema.display_name
