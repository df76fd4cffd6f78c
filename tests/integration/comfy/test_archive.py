"""The Comfy Registry archive, unpacked into a real ComfyUI."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from wanstream.nodes import WanStreamExtension
from wanstream.tests.support.archive import ROOT, archived_files
from wanstream.tools.comfyui import ComfyUI, running_server

pytestmark = pytest.mark.comfy


@pytest.fixture(scope="module")
def served(comfyui: ComfyUI, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Responses by route, from a server whose only pack is the archive."""
    base = tmp_path_factory.mktemp("archive")
    for name in archived_files():
        file = base / "custom_nodes" / "wanstream" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, file)
    with running_server(comfyui, base) as server:
        routes = ("/object_info", "/extensions", "/workflow_templates", "/wanstream/about")
        return {route: server.get(route) for route in routes}


def test_a_server_lists_all_nodes_of_the_archive(served: dict[str, Any]) -> None:
    nodes = {
        node.define_schema().node_id for node in asyncio.run(WanStreamExtension().get_node_list())
    }
    assert nodes
    found = {
        name: node["python_module"]
        for name, node in served["/object_info"].items()
        if name.startswith("WanStream")
    }
    assert found == dict.fromkeys(nodes, "custom_nodes.wanstream")
    assert served["/wanstream/about"]["version"]


def test_a_server_has_the_overlay_and_the_templates_of_the_archive(served: dict[str, Any]) -> None:
    assert "/extensions/wanstream/wanstream.js" in served["/extensions"]
    templates = {path.stem for path in Path(ROOT, "workflows").glob("*.json")}
    assert {*served["/workflow_templates"]["wanstream"]} == templates
