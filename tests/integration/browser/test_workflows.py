"""Shipped canvas workflows in ComfyUI's frontend: no node missing, export equal to the API twin."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any
from urllib.parse import quote

import pytest

from wanstream.tools.arrange import NOTE
from wanstream.tools.build_workflows import DRAWN, SHOW
from wanstream.tools.comfyui import PACK, find_comfyui
from wanstream.tools.frontend import CLASSIC, NODES_2, opened_frontend
from wanstream.tools.graphs import by_name, numbered
from wanstream.tools.shown_run import charted_classes, populate_results, show_run
from wanstream.tools.templates import TITLES, WORKFLOWS, template, template_path

pytestmark = [pytest.mark.comfy, pytest.mark.browser]

NAMES = sorted(TITLES)


def api(name: str) -> dict[str, dict[str, Any]]:
    prompt: dict[str, dict[str, Any]] = json.loads(
        (WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8")
    )
    return prompt


def content(
    exported: dict[str, dict[str, Any]], twin: Mapping[str, tuple[str, Mapping[str, Any]]]
) -> dict[str, tuple[str, dict[str, Any]]]:
    """`by_name`, without inputs on ComfyUI's own nodes that the twin lacks.

    Newer ComfyUI versions add some, with defaults.
    """
    found = {}
    for name, (kind, inputs) in by_name(exported).items():
        names = inputs if kind.startswith("WanStream") else inputs.keys() & twin[name][1].keys()
        found[name] = kind, {key: inputs[key] for key in names}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_frontend_misses_nothing_and_exports_the_api_twin(frontend, name):
    workflow = template(name)
    frontend.load_workflow(workflow)
    assert frontend.complaints() == []
    exported = frontend.export()
    twin = by_name(api(name))
    assert content(exported.prompt, twin) == twin
    assert len(exported.workflow["links"]) == len(workflow["links"])
    assert {group["title"] for group in exported.workflow["groups"]} == {
        group["title"] for group in workflow["groups"]
    }


# Nodes with title bars, and the charts on them, in graph pixels.
SHOWN = """() => Object.fromEntries(window.app.rootGraph.nodes.map(node => {
    const [x, y] = node.pos, [width, height] = node.size
    const widget = node.widgets?.find(widget => widget.name === 'wanstream_run')
    const chart = widget?.element.dataset.open ?? null
    return [node.id, { title: node.title, chart, box: [x, y - 30, x + width, y + height] }]
}))"""
GROUPS = """() => window.app.rootGraph.groups.map(group =>
    [group.title, [
        group.pos[0], group.pos[1],
        group.pos[0] + group.size[0], group.pos[1] + group.size[1]]])"""
TOLERANCE = 2


def shifted(workflow: Mapping[str, Any], by: int) -> dict[str, Any]:
    """The same graph under other ids.

    In Nodes 2.0 no node becomes lower than a previous one with the same id.
    """
    nodes = [{**node, "id": node["id"] + by} for node in workflow["nodes"]]
    links = [
        [link, source + by, output, target + by, socket, kind]
        for link, source, output, target, socket, kind in workflow["links"]
    ]
    return {
        **workflow,
        "nodes": nodes,
        "links": links,
        "last_node_id": workflow["last_node_id"] + by,
    }


def inside(box: Sequence[float], frame: Sequence[float]) -> bool:
    grown = [frame[0] - TOLERANCE, frame[1] - TOLERANCE, frame[2] + TOLERANCE, frame[3] + TOLERANCE]
    return all(low <= at for low, at in zip(grown[:2], box[:2], strict=True)) and all(
        at <= high for at, high in zip(box[2:], grown[2:], strict=True)
    )


def apart(one: Sequence[float], other: Sequence[float]) -> bool:
    beside = one[2] <= other[0] + TOLERANCE or other[2] <= one[0] + TOLERANCE
    return beside or one[3] <= other[1] + TOLERANCE or other[3] <= one[1] + TOLERANCE


@pytest.mark.parametrize("renderer", [CLASSIC, NODES_2], ids=["classic", "nodes-2"])
def test_no_node_is_covered_or_outside_its_group_after_a_run(browser, server, renderer):
    if renderer is NODES_2 and find_comfyui().version() < (0, 4):
        pytest.skip("the Nodes 2.0 of this ComfyUI is a trial that shows no widgets of others")
    populate_results(server.base)
    faults = []
    with opened_frontend(browser, server, width=2600, height=1600, settings=renderer) as frontend:
        for number, name in enumerate(NAMES):
            workflow = shifted(template(name), 100 * number)
            workflow["extra"].pop("ds", None)
            frontend.load_workflow(workflow)
            frontend.page.evaluate(SHOW, [0.9, 60, 60])
            if renderer is NODES_2:
                frontend.page.wait_for_function(DRAWN)
            groups = dict(frontend.page.evaluate(GROUPS))
            group_of = {
                node_id: next(
                    title
                    for title, frame in groups.items()
                    if inside([*shown["box"][:2]] * 2, frame)
                )
                for node_id, shown in frontend.page.evaluate(SHOWN).items()
                if shown["title"] != NOTE
            }
            show_run(frontend, {str(node["id"]): node["type"] for node in workflow["nodes"]})
            nodes = frontend.page.evaluate(SHOWN)
            charts = any(shown["chart"] == "true" for shown in nodes.values())
            assert charts == bool(charted_classes([node["type"] for node in workflow["nodes"]])), (
                f"{name}: no chart"
            )
            for one, other in combinations(nodes.values(), 2):
                if not apart(one["box"], other["box"]):
                    faults.append(f"{name}: {one['title']} and {other['title']} overlap")
            faults += [
                f"{name}: {shown['title']} {shown['box']} leaves {group_of[node_id]} "
                f"{groups[group_of[node_id]]}"
                for node_id, shown in nodes.items()
                if node_id in group_of and not inside(shown["box"], groups[group_of[node_id]])
            ]
    assert not faults, "\n".join(faults)


def test_an_api_file_dropped_on_the_canvas_is_the_same_graph(frontend):
    for name in NAMES:
        frontend.load_prompt(numbered(api(name)))
        twin = by_name(api(name))
        assert content(frontend.export().prompt, twin) == twin, name
    assert frontend.complaints() == []


def test_missing_models_nodes_and_links_are_seen(browser, server):
    workflow = template("t2v")
    (node,) = (node for node in workflow["nodes"] if node["type"] == "WanStreamExperts")
    node["widgets_values"][0] = node["properties"]["models"][0]["name"] = "no_such_file.safetensors"
    with opened_frontend(browser, server) as frontend:
        frontend.load_workflow(workflow)
        said = " ".join(frontend.complaints())
        assert "Missing Models" in said or "missing a required model" in said, said
        workflow = template("t2v")
        workflow["nodes"][0]["type"] = "WanStreamNoSuchNode"
        frontend.load_workflow(workflow)
        assert any("Missing" in text and "Node" in text for text in frontend.complaints())
        workflow = template("t2v")
        _, _, _, target, socket, _ = workflow["links"].pop()
        (node,) = (node for node in workflow["nodes"] if node["id"] == target)
        node["inputs"][socket]["link"] = None
        frontend.load_workflow(workflow)
        assert by_name(frontend.export().prompt) != by_name(api("t2v"))


def test_templates_are_listed_with_their_thumbnails(server, frontend):
    assert sorted(server.get("/api/workflow_templates")[PACK]) == sorted(TITLES.values())
    for name, title in TITLES.items():
        address = f"/api/workflow_templates/{PACK}/{quote(title)}"
        picture = frontend.page.request.get(f"{server.url}{address}.jpg")
        assert (picture.status, picture.headers["content-type"]) == (200, "image/jpeg")
        assert picture.body() == template_path(name).with_suffix(".jpg").read_bytes()
        assert server.get(f"{address}.json") == template(name)
