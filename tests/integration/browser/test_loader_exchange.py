"""Exchange between ComfyUI's loaders and streaming ones, by the context menu and the command."""

import json

import pytest

from wanstream.tests.support.host.shipped import node
from wanstream.tools.frontend import CLASSIC, GRAPH, NODES_2

pytestmark = [pytest.mark.comfy, pytest.mark.browser]

STREAMED = {
    "UNETLoader": "WanStreamLoadDiffusionModel",
    "CheckpointLoaderSimple": "WanStreamLoadCheckpoint",
    "CLIPLoader": "WanStreamLoadCLIP",
    "DualCLIPLoader": "WanStreamDualCLIP",
    "TripleCLIPLoader": "WanStreamTripleCLIP",
    "QuadrupleCLIPLoader": "WanStreamQuadrupleCLIP",
}
LORA = node("LoraLoader", model=["1", 0], clip=["3", 0])
LOADERS = {str(number): node(kind) for number, kind in enumerate(STREAMED, start=1)}

# Shared look, values and links on a loader and the counterpart, by id. One side lacks two widgets.
NODES = f"""() => Object.fromEntries({GRAPH}.nodes.filter(node => node.type !== 'LoraLoader')
    .map(({{ id, type, title, pos, size, mode, color, flags, widgets, outputs }}) => [id, {{
        type, look: JSON.stringify([title, [...pos], size[0], mode, color, flags]),
        values: widgets.filter(each => each.name !== 'share_visits' && each.name !== 'device')
            .map(each => [each.name, each.value]),
        links: outputs.map(output => (output.links ?? []).length),
    }}]))"""
PREPARE = f"""() => {{
    const node = {GRAPH}.getNodeById(1)
    Object.assign(node, {{ title: 'mine', pos: [200, 160], color: '#223', mode: 4 }})
    node.setSize([430, 120])
    node.widgets[1].value = 'fp8_e4m3fn'
    Object.assign(window.app.canvas.ds, {{ scale: 1, offset: [0, 0] }})
    window.app.canvas.setDirty(true, true)
}}"""
INTO_A_SUBGRAPH = f"""() => {{
    const {{ node }} = {GRAPH}.convertToSubgraph(new Set({GRAPH}.nodes.slice(0, 7)))
    window.app.canvas.openSubgraph(node.subgraph, node)
}}"""
EXCHANGE = """async () => {
    const graph = window.app.canvas.graph
    for (const node of graph.nodes) window.app.canvas.selectNode(node, true)
    await window.app.extensionManager.command.execute('WanStream.ExchangeLoaders')
}"""


def nodes(page):
    page.wait_for_timeout(500)
    return page.evaluate(NODES)


def without_types(found):
    return [{**node, "type": None} for _, node in sorted(found.items())]


@pytest.mark.parametrize("renderer", [CLASSIC, NODES_2], ids=["classic", "nodes-2"])
def test_the_menu_exchanges_a_loader_and_one_undo_takes_it_back(frontends, renderer):
    frontend = frontends.get(settings=renderer)
    page = frontend.page
    frontend.load_prompt({"1": LOADERS["1"], "3": LOADERS["3"], "9": LORA})
    page.evaluate(PREPARE)
    page.keyboard.press("Shift")  # the changes so far are a step of undo
    before = nodes(page)
    corner = page.locator("canvas#graph-canvas").bounding_box()
    title = {"x": corner["x"] + 300, "y": corner["y"] + 145}
    for step, text in enumerate(("Stream this model", "Stop streaming")):
        page.mouse.click(**title, button="right")
        page.wait_for_timeout(500)
        item = page.get_by_text(text, exact=True)
        if not item.count() and not page.evaluate("'collectNodeMenuItems' in window.app"):
            return  # no such menus in ComfyUI 0.3.64
        item.click()
        after = nodes(page)
        kind = "UNETLoader" if step else "WanStreamLoadDiffusionModel"
        assert after["1"]["type"] == kind
        assert without_types(after) == without_types(before)
    page.keyboard.press("Control+z")
    assert nodes(page)["1"]["type"] == "WanStreamLoadDiffusionModel"
    page.keyboard.press("Control+z")
    assert nodes(page) == before


def test_command_exchanges_all_kinds_of_loaders(frontend):
    page = frontend.page
    frontend.load_prompt({**LOADERS, "9": LORA})
    before = nodes(page)
    page.evaluate(EXCHANGE)
    after = nodes(page)
    assert [after[n]["type"] for n in LOADERS] == [*STREAMED.values()]
    assert all(json.loads(each["look"])[0].endswith(" (streamed)") for each in after.values())
    values = [[each["values"] for each in found.values()] for found in (before, after)]
    assert values[0] == values[1]
    assert frontend.export().prompt["9"]["inputs"]["clip"] == ["3", 0]
    page.evaluate(INTO_A_SUBGRAPH)
    inside = {n.split(":")[-1]: node for n, node in frontend.export().prompt.items()}
    page.evaluate(EXCHANGE)
    page.wait_for_timeout(500)
    prompt = {n.split(":")[-1]: node for n, node in frontend.export().prompt.items()}
    assert [prompt[n]["class_type"] for n in LOADERS] == [*STREAMED]
    assert prompt["9"]["inputs"] == inside["9"]["inputs"], "its links"
