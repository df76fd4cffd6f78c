"""The pack inside a real ComfyUI server, loaded under an awkward folder name.

The server describes it as the embedded host does.
"""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest

from wanstream.host.embedded.files import Folders
from wanstream.nodes import WanStreamExtension
from wanstream.tests.support.embedded import embedded_host
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


def test_every_node_of_the_pack_is_loaded(described: dict[str, Any]) -> None:
    loaded = {name for name in described if name.startswith("WanStream")}
    assert loaded == {node.define_schema().node_id for node in NODES}
    assert described["WanStreamSampler"]["python_module"] == "custom_nodes.ComfyUI-WanStream.test-1"


def without_advanced(node: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the node's inputs without the mark, and the marked inputs' names."""
    marked: set[str] = set()
    inputs = copy.deepcopy(node["input"])
    for part in ("required", "optional"):
        for name, declared in inputs.get(part, {}).items():
            if len(declared) > 1 and declared[1].pop("advanced", None):
                marked.add(name)
    return inputs, marked


def test_rare_inputs_are_advanced_where_comfyui_has_the_argument(
    described: dict[str, Any],
) -> None:
    ours = [node for name, node in described.items() if name.startswith("WanStream")]
    marked = set().union(*(without_advanced(node)[1] for node in ours))
    assert marked == (ADVANCED if find_comfyui().version() >= (0, 18) else set())


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.__name__)
def test_a_node_looks_the_same_to_both_hosts(
    described: dict[str, Any], base: Path, node: Any
) -> None:
    with embedded_host.opened(
        Folders(models=base / "models", output=base / "output", input=base / "input")
    ):
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
    assert theirs["output_name"] == [
        output.display_name or output.io_type for output in schema.outputs
    ]
    assert theirs["output_node"] == schema.is_output_node
    assert theirs["display_name"] == schema.display_name


def test_the_server_serves_the_pack_alone_from_its_base(server: Any) -> None:
    assert {"high.safetensors", "low.safetensors"} <= set(server.get("/models/diffusion_models"))
