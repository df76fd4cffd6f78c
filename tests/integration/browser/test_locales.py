"""Our nodes' Chinese texts and the help pages in ComfyUI's frontend."""

import json

import pytest

from wanstream.tools.frontend import GRAPH
from wanstream.tools.graphs import by_name, numbered
from wanstream.tools.templates import template

from ..comfy.servers import ROOT, shipped
from .overlay_page import SAMPLER, Page, need_frontend_of_0_4

pytestmark = [pytest.mark.comfy, pytest.mark.browser]

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
def chinese(frontends):
    return frontends.get(settings={"Comfy.Locale": "zh"})


@pytest.fixture(scope="module")
def locale():
    """The Chinese texts by node type."""
    return json.loads((ROOT / "locales/zh/nodeDefs.json").read_text(encoding="utf-8"))


def test_nodes_widgets_and_sockets_are_named_in_chinese(chinese, locale):
    prompt = shipped("i2v")
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


def test_tooltips_come_through_whole(chinese, locale):
    """The frontend reads tooltips as patterns: a sign taken as a command is lost or breaks them."""
    i18n = "document.querySelector('#vue-app').__vue_app__.config.globalProperties.$t"
    expected = {
        f"nodeDefs.{kind}.inputs.{name}.tooltip": socket["tooltip"]
        for kind, node in locale.items()
        for name, socket in node["inputs"].items()
    }
    shown = chinese.page.evaluate(f"keys => keys.map(key => {i18n}(key))", [*expected])
    assert dict(zip(expected, shown, strict=True)) == expected


HEADS = {"zh": "错误", "en": "Errors"}

# Elements wider than their panel.
TOO_WIDE = """head => {
    const title = [...document.querySelectorAll('h2')].find(found => found.textContent === head)
    const page = title.parentElement, right = page.getBoundingClientRect().right
    return [...page.querySelectorAll('table, li, p')]
        .filter(part => part.getBoundingClientRect().right > right + 1)
        .map(part => part.textContent.slice(0, 60))
}"""


@pytest.mark.parametrize("language", HEADS)
def test_help_page_has_its_language_and_fits_the_panel(frontends, server, language):
    need_frontend_of_0_4("the panel of this ComfyUI is opened in another way")
    page = Page(frontends.get(settings={"Comfy.Locale": language}), server)
    page.frontend.load_workflow(template("t2v"))
    page.look_at(SAMPLER)
    page.js("window.app.canvas.selectNodes([find(title)])")
    page.page.locator('[data-testid="info-button"]').click()
    page.page.locator("h2", has_text=HEADS[language]).wait_for()
    assert page.page.evaluate(TOO_WIDE, HEADS[language]) == []
    # It stays open otherwise, also in another graph.
    page.page.locator('[data-testid="info-button"]').click()
