"""The shipped canvas workflows in ComfyUI's own frontend: nothing is missing, and what it exports is the API twin."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from wanstream.workbench.base_directory import PACK
from wanstream.workbench.build_workflows import DRAWN
from wanstream.workbench.comfyui import Server, find_comfyui
from wanstream.workbench.frontend import NODES_2, Frontend, opened_frontend
from wanstream.workbench.graphs import by_title, numbered

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.comfy, pytest.mark.browser]

WORKFLOWS = Path(__file__).parents[2] / "workflows"
NAMES = sorted(path.stem for path in WORKFLOWS.glob("*.json"))

BOXES = """() => Object.fromEntries(window.app.rootGraph.nodes.map(node => {
    const box = document.querySelector(`[data-node-id='${node.id}']`).getBoundingClientRect()
    return [`${node.id} ${node.title}`, [box.left, box.top, box.right, box.bottom]]
}))"""


def canvas(name: str) -> dict[str, Any]:
    workflow: dict[str, Any] = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
    return workflow


def api(name: str) -> dict[str, dict[str, Any]]:
    prompt: dict[str, dict[str, Any]] = json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))
    return prompt


@pytest.mark.parametrize("name", NAMES)
def test_the_frontend_misses_nothing_and_exports_the_api_twin(frontend: Frontend, name: str) -> None:
    workflow = canvas(name)
    frontend.load_workflow(workflow)
    assert frontend.complaints() == []
    exported = frontend.export()
    assert by_title(exported.prompt) == by_title(api(name))
    assert len(exported.workflow["links"]) == len(workflow["links"])
    assert {group["title"] for group in exported.workflow["groups"]} == {group["title"] for group in workflow["groups"]}


@pytest.mark.parametrize("name", ["benchmark", "guider", "wan22_5b_i2v"])
def test_nodes_have_room_in_nodes_2_too(browser: Browser, server: Server, name: str) -> None:
    if find_comfyui().version() < (0, 4):
        pytest.skip("the Nodes 2.0 of this ComfyUI is a trial that shows no widgets of others")
    with opened_frontend(browser, server, settings=NODES_2) as frontend:
        frontend.load_workflow(canvas(name))
        frontend.page.wait_for_function(DRAWN)
        frontend.page.wait_for_timeout(2000)  # heights follow when what is inside has been drawn
        boxes: dict[str, tuple[float, float, float, float]] = frontend.page.evaluate(BOXES)
    assert len(boxes) == len(canvas(name)["nodes"])
    for one, other in combinations(boxes, 2):
        (left, top, right, bottom), (x, y, end, below) = boxes[one], boxes[other]
        assert right <= x or end <= left or bottom <= y or below <= top, f"{one} and {other}"


def test_an_api_file_dropped_on_the_canvas_is_the_same_graph(frontend: Frontend) -> None:
    for name in NAMES:
        frontend.load_prompt(numbered(api(name)))
        assert by_title(frontend.export().prompt) == by_title(api(name)), name
    assert frontend.complaints() == []


def test_a_node_that_is_missing_would_be_seen(frontend: Frontend) -> None:
    workflow = canvas("t2v")
    workflow["nodes"][0]["type"] = "WanStreamNoSuchNode"
    frontend.load_workflow(workflow)
    assert any("Missing" in text and "Node" in text for text in frontend.complaints())


def test_a_model_that_is_missing_would_be_seen(frontend: Frontend) -> None:
    workflow = canvas("t2v")
    (node,) = (node for node in workflow["nodes"] if node["type"] == "WanStreamExperts")
    node["widgets_values"][0] = node["properties"]["models"][0]["name"] = "no_such_file.safetensors"
    frontend.load_workflow(workflow)
    assert any("Missing Models" in text for text in frontend.complaints())


def test_a_link_that_is_missing_would_be_seen(frontend: Frontend) -> None:
    workflow = canvas("t2v")
    _, _, _, target, socket, _ = workflow["links"].pop()
    (node,) = (node for node in workflow["nodes"] if node["id"] == target)
    node["inputs"][socket]["link"] = None
    frontend.load_workflow(workflow)
    assert by_title(frontend.export().prompt) != by_title(api("t2v"))


def test_templates_are_listed_with_their_thumbnails(server: Server, frontend: Frontend) -> None:
    assert sorted(server.get("/api/workflow_templates")[PACK]) == NAMES
    for name in NAMES:
        picture = frontend.page.request.get(f"{server.url}/api/workflow_templates/{PACK}/{name}.jpg")
        assert (picture.status, picture.headers["content-type"]) == (200, "image/jpeg")
        assert picture.body() == (WORKFLOWS / f"{name}.jpg").read_bytes()
        assert server.get(f"/api/workflow_templates/{PACK}/{name}.json") == canvas(name)
