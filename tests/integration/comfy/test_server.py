"""The pack inside a real ComfyUI server, loaded under an awkward folder name.

The server describes it as the embedded host does.
"""

import asyncio
import copy
import json
from urllib.parse import quote

import httpx
import pytest

from wanstream.host.embedded.files import Folders
from wanstream.nodes import WanStreamExtension
from wanstream.tests.integration.comfy.conftest import PACK
from wanstream.tests.support.host.embedded import embedded_host
from wanstream.tools.comfyui import find_comfyui
from wanstream.tools.templates import TITLES, template, template_path

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
def described(server):
    """Node definitions as the server sends them to the frontend."""
    return server.get("/object_info")


def test_every_node_of_the_pack_is_loaded(server, described):
    """The archive has all nodes, and the overlay."""
    loaded = {name for name in described if name.startswith("WanStream")}
    assert loaded == {node.define_schema().node_id for node in NODES}
    assert described["WanStreamSampler"]["python_module"] == f"custom_nodes.{PACK}"
    assert f"/extensions/{PACK}/wanstream.js" in server.get("/extensions")


def test_every_shipped_workflow_is_served_as_a_template_with_its_thumbnail(server):
    """ComfyUI takes templates from one folder of a pack: `examples` would hide `workflows`."""
    assert sorted(server.get("/api/workflow_templates")[PACK]) == sorted(TITLES.values())
    for name, title in TITLES.items():
        address = f"/api/workflow_templates/{PACK}/{quote(title)}"
        assert server.get(f"{address}.json") == template(name)
        picture = httpx.get(f"{server.url}{address}.jpg", trust_env=False)
        assert (picture.status_code, picture.headers["content-type"]) == (200, "image/jpeg")
        assert picture.content == template_path(name).with_suffix(".jpg").read_bytes()


def without_advanced(node):
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


TWINS = {
    "WanStreamLoadDiffusionModel": ("UNETLoader", ["policy", "share_visits"]),
    "WanStreamLoadCheckpoint": ("CheckpointLoaderSimple", ["policy", "share_visits"]),
    "WanStreamLoadCLIP": ("CLIPLoader", ["device", "policy"]),
    "WanStreamDualCLIP": ("DualCLIPLoader", ["device", "policy"]),
    "WanStreamTripleCLIP": ("TripleCLIPLoader", ["policy"]),
    "WanStreamQuadrupleCLIP": ("QuadrupleCLIPLoader", ["policy"]),
}


@pytest.mark.parametrize("name", TWINS)
def test_loaders_have_the_inputs_of_comfyuis(described, name):
    """A graph stays valid when the loader class is exchanged, as in each template of ComfyUI."""
    twin, optional = TWINS[name]
    own, ours = (described[each] for each in (twin, name))
    assert [*ours["input"]["required"]] == [*own["input"]["required"]]
    assert [*ours["input"]["optional"]] == optional
    assert ours["output"] == own["output"]
    for choice in own["input"]["required"].keys() & {"type", "weight_dtype"}:
        assert _choices(ours, choice) == _choices(own, choice)


def _choices(info, name):
    """An input's choices in `/object_info`, where older nodes list them in place of the type."""
    kind, *options = info["input"]["required"][name]
    return list(kind if isinstance(kind, list) else options[0]["options"])


ASK = """
from wanstream.host import current_host
from wanstream.nodes.loaders import WanStreamExperts, WanStreamLora
fingerprints = [node.fingerprint_inputs()[0] for node in (WanStreamExperts, WanStreamLora)]
(answer,) = {current_host().settings().strict, *fingerprints}
"""


def test_settings_of_the_page_are_read(server, in_comfyui):
    """ComfyUI's own route writes the one that turns a warning into an error."""
    assert in_comfyui(ASK) is False
    for value in (True, False):
        status, _ = server.post("/settings/WanStream.Strict", value)
        assert status == 200
        assert in_comfyui(ASK) is value
