"""Help pages agree with node schemas."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import wanstream.nodes
from wanstream.host import io
from wanstream.tests.support.host.given_nodes import PACK as NODES
from wanstream.tools.locales import input_lines as input_lines_in_chinese
from wanstream.tools.locales import section, translated_by_hand

EACH_NODE = pytest.mark.parametrize("node", NODES, ids=lambda node: node.__name__)

WEB = Path(wanstream.nodes.__file__).parents[1] / "web"
DOCS = WEB / "docs"

BOLD = r"\*\*(.+?)\*\*"
WIDGETS = {"INT", "FLOAT", "STRING", "COMBO", "BOOLEAN"}


def page_of(node: type[io.ComfyNode]) -> str:
    return (DOCS / f"{node.__name__}.md").read_text(encoding="ascii")


def chinese_page_of(node: type[io.ComfyNode]) -> str:
    """Return the page shown when ComfyUI's language is Chinese."""
    return (DOCS / node.__name__ / "zh.md").read_text(encoding="utf-8")


class InputLine(NamedTuple):
    """Line in the list of inputs: - `name` (default `value`, limits): text."""

    name: str
    default: str
    """`connected`, `optional` or words for an input without a default."""
    limits: str
    what: str


def input_lines(page: str) -> list[InputLine]:
    found = []
    for line in section(page, "Inputs").splitlines():
        if line.startswith("- "):
            parts = re.fullmatch(r"- `(\w+)` \((.+?)\): (.+)", line)
            assert parts, line
            told = re.fullmatch(r"(?:default )?(`[^`]*`|[^`,]+)(?:, (.+))?", parts[2])
            assert told, line
            found.append(InputLine(parts[1], told[1], told[2] or "", parts[3]))
    return found


def fixed_options(options: dict[str, Any]) -> list[str]:
    """Return the choices shipped with the node, [] if they depend on installed models."""
    return list(options.get("options", ())) if "default" in options else []


def test_every_node_has_its_pages():
    """The English page serves all languages without a page."""
    expected = {f"{node.__name__}{page}.md" for node in NODES for page in ("", "/zh")}
    assert {file.relative_to(DOCS).as_posix() for file in DOCS.rglob("*.md")} == expected


def test_only_script_in_web_names_every_module():
    """ComfyUI imports every .js below the folder into the page.

    Browsers may cache old .mjs files.
    """
    (script,) = WEB.rglob("*.js")
    assert script == WEB / "wanstream.js"
    modules = sorted(file.relative_to(WEB / "overlay").as_posix() for file in WEB.rglob("*.mjs"))
    named = re.findall(r'^  "(.+\.mjs)"', script.read_text(encoding="utf-8"), re.MULTILINE)
    assert named == modules


@EACH_NODE
def test_page_has_its_parts(node):
    page = page_of(node)
    schema = node.define_schema()
    assert page.splitlines()[0] == f"# {schema.display_name}"
    for title in ("Inputs", "Outputs", "Recommendations", "Example", "Errors"):
        assert section(page, title).strip(), title
    assert len(page.splitlines()) <= 72
    for output in schema.outputs:
        assert f"`{output.display_name}`" in section(page, "Outputs")
    # The side panel is about 300 pixels wide: three or more columns do not fit.
    for line in [*page.splitlines(), *chinese_page_of(node).splitlines()]:
        assert line.count("|") <= 3 or not line.startswith("|"), line


@EACH_NODE
def test_inputs_have_the_defaults_and_limits_of_the_schema(node):
    lines = input_lines(page_of(node))
    sockets = node.define_schema().inputs
    assert [line.name for line in lines] == [socket.id for socket in sockets]
    for socket, (_, default, limits, what) in zip(sockets, lines, strict=True):
        options = socket.as_dict()
        if "default" in options:
            assert default == f"`{options['default']}`", socket.id
        else:
            assert "`" not in default, f"{socket.id} has no default"
            assert (default == "optional") == bool(socket.optional), socket.id
        if "min" in options:
            # A 20-digit number cannot be broken and would be wider than the panel.
            most = "2^64-1" if options["max"] == 2**64 - 1 else options["max"]
            assert limits == f"`{options['min']}..{most}`", socket.id
        for option in fixed_options(options):
            assert f"`{option}`" in limits, socket.id
        assert what.endswith("."), socket.id


@EACH_NODE
def test_example_sets_every_widget_to_a_valid_value(node):
    found = re.search(r"```json\n(.*?)```", section(page_of(node), "Example"), re.DOTALL)
    assert found
    values = json.loads(found[1])
    sockets = node.define_schema().inputs
    widgets = {each.id: each.as_dict() for each in sockets if each.io_type in WIDGETS}
    assert values.keys() == widgets.keys()
    for name, options in widgets.items():
        if "min" in options:
            assert options["min"] <= values[name] <= options["max"], name
        elif fixed := fixed_options(options):
            assert values[name] in fixed or values[name].endswith(".safetensors"), name


@EACH_NODE
def test_page_names_only_nodes_links_and_settings_that_exist(node):
    """The help panel resolves links against the canvas, so pages name nodes in bold, not files.

    A word in code that looks like a setting is a node's input, output or option.
    """
    page = page_of(node)
    schemas = [other.define_schema() for other in NODES]
    assert set(re.findall(BOLD, page)) <= {schema.display_name for schema in schemas}
    for target in re.findall(r"\]\(([^)\s]+)\)", page):
        assert target.startswith("https://") or (DOCS / target).is_file(), target
    known = {"text_encoder", "diffusion_models", "wanstream_timeline", "fp8_scaled"}
    for socket in (socket for schema in schemas for socket in schema.inputs):
        known |= {socket.id, *fixed_options(socket.as_dict())}
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    assert set(re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)`", prose)) <= known


LOCALE = WEB.parent / "locales" / "zh" / "nodeDefs.json"
CHINESE: dict[str, Any] = json.loads(LOCALE.read_text(encoding="utf-8"))
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
CODE = re.compile(r"`[^`\n]+`")
RUN = "run scripts/locales"


def messages_in(page: str, title: str) -> list[list[str]]:
    rows = [line for line in section(page, title).splitlines() if line.startswith("| ")]
    return [CODE.findall(row.split("|")[1]) for row in rows[1:]]


@EACH_NODE
def test_chinese_page_agrees_with_the_english_one(node):
    schema, english, chinese = node.define_schema(), page_of(node), chinese_page_of(node)
    said = CHINESE[schema.node_id]
    assert chinese.splitlines()[0] == f"# {said['display_name']}"
    lines = section(chinese, "输入").split("\n")[1:-2]
    assert lines == input_lines_in_chinese(schema, said), RUN
    assert section(chinese, "示例").strip() == section(english, "Example").strip(), RUN
    assert messages_in(english, "Errors") == messages_in(chinese, "错误") != []
    assert chinese.count("\n## ") == english.count("\n## ")


@EACH_NODE
def test_chinese_page_has_the_same_figures_and_nodes(node):
    names = {
        other.define_schema().display_name: CHINESE[other.__name__]["display_name"]
        for other in NODES
    }
    english, chinese = (translated_by_hand(DOCS, node.__name__, lang) for lang in ("en", "zh"))
    assert Counter(NUMBER.findall(chinese)) == Counter(NUMBER.findall(english))
    named = {names[name] for name in re.findall(BOLD, english)}
    assert set(re.findall(BOLD, chinese)) == named
    # Emphasis closed right after a bracket does not end before an ideograph.
    assert not re.search(r"）\*\*[\u4e00-\u9fff]", chinese)
    assert {*CODE.findall(english)} == {*CODE.findall(chinese)}
