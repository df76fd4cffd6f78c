"""Shipped canvas workflows in ComfyUI's frontend: no node missing, export equal to the API twin."""

from itertools import combinations

import pytest

from wanstream.tools.arrange import NOTE
from wanstream.tools.build_workflows import DRAWN, SHOW
from wanstream.tools.frontend import opened_frontend
from wanstream.tools.graphs import by_name, numbered
from wanstream.tools.shown_run import charted_classes, populate_results, show_run
from wanstream.tools.templates import TITLES, template

from ..comfy.servers import shipped
from .conftest import RENDERERS
from .overlay_page import add_to_ids, need_frontend_of_0_4

pytestmark = [pytest.mark.comfy, pytest.mark.browser]

NAMES = sorted(TITLES)


def content(exported, twin):
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
    known = frontend.page.evaluate("() => Object.keys(window.LiteGraph.registered_node_types)")
    if missing := {each["class_type"] for each in shipped(name).values()}.difference(known):
        need_frontend_of_0_4(f"this ComfyUI has no {', '.join(sorted(missing))}")
    frontend.load_workflow(workflow)
    assert frontend.complaints() == []
    exported = frontend.export()
    twin = by_name(shipped(name))
    assert content(exported.prompt, twin) == twin
    assert len(exported.workflow["links"]) == len(workflow["links"])
    groups = [{each["title"] for each in one["groups"]} for one in (exported.workflow, workflow)]
    assert groups[0] == groups[1]


# Nodes with title bars, and the charts on them, in graph pixels.
SHOWN = """() => Object.fromEntries(window.app.rootGraph.nodes.map(node => {
    const [x, y] = node.pos, [width, height] = node.size
    const widget = node.widgets?.find(widget => widget.name === 'wanstream_run')
    const chart = widget?.element.dataset.open ?? null
    return [node.id, { title: node.title, chart, box: [x, y - 30, x + width, y + height] }]
}))"""
GROUPS = """() => window.app.rootGraph.groups.map(({ title, pos: [x, y], size: [width, height] }) =>
    [title, [x, y, x + width, y + height]])"""
TOLERANCE = 2


def inside(box, frame):
    limits = zip(box, frame, (-1, -1, 1, 1), strict=True)
    return all((at - limit) * way <= TOLERANCE for at, limit, way in limits)


def apart(one, other):
    beside = one[2] <= other[0] + TOLERANCE or other[2] <= one[0] + TOLERANCE
    return beside or one[3] <= other[1] + TOLERANCE or other[3] <= one[1] + TOLERANCE


def test_no_node_is_covered_or_outside_its_group_after_a_run(browser, server, renderer):
    need_frontend_of_0_4("this ComfyUI lacks nodes in some workflows")
    populate_results(server.base)
    faults = []
    size = {"width": 2600, "height": 1600}
    with opened_frontend(browser, server, **size, settings=RENDERERS[renderer]) as frontend:
        for number, name in enumerate(NAMES):
            workflow = template(name)
            # In Nodes 2.0 no node becomes lower than a previous one with the same id.
            add_to_ids(workflow, 100 * number)
            workflow["extra"].pop("ds", None)
            frontend.load_workflow(workflow)
            frontend.page.evaluate(SHOW, [0.9, 60, 60])
            if renderer == "nodes-2":
                frontend.page.wait_for_function(DRAWN)
            groups = frontend.page.evaluate(GROUPS)
            frames = {}
            for node_id, shown in frontend.page.evaluate(SHOWN).items():
                if shown["title"] != NOTE:
                    corner = [*shown["box"][:2]] * 2
                    frames[node_id] = next(group for group in groups if inside(corner, group[1]))
            show_run(frontend, {str(node["id"]): node["type"] for node in workflow["nodes"]})
            nodes = frontend.page.evaluate(SHOWN)
            charts = any(shown["chart"] == "true" for shown in nodes.values())
            charted = charted_classes([node["type"] for node in workflow["nodes"]])
            assert charts == bool(charted), f"{name}: no chart"
            for one, other in combinations(nodes.values(), 2):
                if not apart(one["box"], other["box"]):
                    faults.append(f"{name}: {one['title']} and {other['title']} overlap")
            for node_id, frame in frames.items():
                if not inside(nodes[node_id]["box"], frame[1]):
                    faults.append(f"{name}: {nodes[node_id]} leaves {frame}")
    assert not faults, "\n".join(faults)


def test_an_api_file_dropped_on_the_canvas_is_the_same_graph(frontend):
    need_frontend_of_0_4("this ComfyUI lacks nodes in some workflows")
    for name in NAMES:
        frontend.load_prompt(numbered(shipped(name)))
        twin = by_name(shipped(name))
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
        assert by_name(frontend.export().prompt) != by_name(shipped("t2v"))
