"""Our nodes' Chinese texts in ComfyUI's frontend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wanstream.tools.frontend import GRAPH, Frontend, SharedFrontends
from wanstream.tools.graphs import by_name, numbered

pytestmark = [pytest.mark.comfy, pytest.mark.browser]

ROOT = Path(__file__).parents[3]

# By node type: the title in the menus, the labels on widgets, sockets and outputs.
SAID = f"""() => Object.fromEntries({GRAPH}.nodes.map(node => [node.type, {{
    title: node.constructor.title,
    widgets: Object.fromEntries(
        (node.widgets ?? []).filter(widget => widget.name in node.constructor.nodeData.inputs)
            .map(widget => [widget.name, widget.label])
    ),
    sockets: Object.fromEntries(node.inputs.map(socket => [socket.name, socket.localized_name])),
    outputs: node.outputs.map(socket => socket.localized_name),
}}]))"""


@pytest.fixture
def chinese(frontends: SharedFrontends) -> Frontend:
    return frontends.get(settings={"Comfy.Locale": "zh"})


def test_nodes_widgets_and_sockets_are_named_in_chinese(chinese: Frontend) -> None:
    locale: dict[str, Any] = json.loads(
        (ROOT / "locales" / "zh" / "nodeDefs.json").read_text(encoding="utf-8")
    )
    prompt = json.loads((ROOT / "workflows" / "api" / "i2v.json").read_text(encoding="utf-8"))
    chinese.load_prompt(numbered(prompt))
    labels = {kind: node for kind, node in chinese.page.evaluate(SAID).items() if kind in locale}
    assert len(labels) >= 6
    for kind, node in labels.items():
        expected = {name: socket["name"] for name, socket in locale[kind]["inputs"].items()}
        assert node["title"] == locale[kind]["display_name"]
        assert node["widgets"] == {name: expected[name] for name in node["widgets"]}
        assert node["sockets"] == {name: expected[name] for name in node["sockets"]}
        assert node["outputs"] == [output["name"] for output in locale[kind]["outputs"].values()]
    # Names are for display only: queued and saved workflows use the ids.
    assert by_name(chinese.export().prompt) == by_name(prompt)


def test_a_tooltip_comes_through_whole(chinese: Frontend) -> None:
    """The frontend reads tooltips as patterns: a sign taken as a command is lost or breaks them."""
    locale: dict[str, Any] = json.loads(
        (ROOT / "locales" / "zh" / "nodeDefs.json").read_text(encoding="utf-8")
    )
    i18n = "document.querySelector('#vue-app').__vue_app__.config.globalProperties.$t"
    expected = {
        f"nodeDefs.{kind}.inputs.{name}.tooltip": socket["tooltip"]
        for kind, node in locale.items()
        for name, socket in node["inputs"].items()
    }
    shown = chinese.page.evaluate(f"keys => keys.map(key => {i18n}(key))", [*expected])
    assert dict(zip(expected, shown, strict=True)) == expected
