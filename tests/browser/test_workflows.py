"""The shipped canvas workflows in ComfyUI's own frontend: nothing is missing, and what it exports is the API twin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wanstream.workbench.base_directory import PACK
from wanstream.workbench.comfyui import Server
from wanstream.workbench.frontend import Frontend
from wanstream.workbench.graphs import by_title, numbered

pytestmark = [pytest.mark.comfy, pytest.mark.browser]

WORKFLOWS = Path(__file__).parents[2] / "workflows"
NAMES = sorted(path.stem for path in WORKFLOWS.glob("*.json"))


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
