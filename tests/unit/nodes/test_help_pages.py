"""Help pages agree with node schemas."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import wanstream.nodes
from wanstream.host import io
from wanstream.nodes import WanStreamExtension
from wanstream.tools.locales import input_lines as input_lines_in_chinese
from wanstream.tools.locales import section, translated_by_hand

NODES = asyncio.run(WanStreamExtension().get_node_list())
EACH_NODE = pytest.mark.parametrize("node", NODES, ids=lambda node: node.__name__)

WEB = Path(wanstream.nodes.__file__).parents[1] / "web"
DOCS = WEB / "docs"

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


def test_there_is_a_page_for_every_node_and_no_other() -> None:
    """The English page serves all languages without a page."""
    expected = [
        path for node in NODES for path in (f"{node.__name__}.md", f"{node.__name__}/zh.md")
    ]
    assert sorted(file.relative_to(DOCS).as_posix() for file in DOCS.rglob("*.md")) == sorted(
        expected
    )


def test_web_holds_one_script_that_comfyui_loads_and_it_names_every_module() -> None:
    """ComfyUI imports every .js below the folder into the page.

    Browsers may cache old .mjs files.
    """
    (script,) = WEB.rglob("*.js")
    assert script == WEB / "wanstream.js"
    modules = sorted(file.relative_to(WEB / "overlay").as_posix() for file in WEB.rglob("*.mjs"))
    assert (
        re.findall(r'^  "(.+\.mjs)"', script.read_text(encoding="utf-8"), re.MULTILINE) == modules
    )


@EACH_NODE
def test_a_page_has_its_parts(node: type[io.ComfyNode]) -> None:
    page = page_of(node)
    assert page.splitlines()[0] == f"# {node.define_schema().display_name}"
    for title in ("Inputs", "Outputs", "Recommendations", "Example", "Errors"):
        assert section(page, title).strip(), title
    assert len(page.splitlines()) <= 72


@EACH_NODE
def test_the_list_has_the_inputs_of_the_schema(node: type[io.ComfyNode]) -> None:
    named = [line.name for line in input_lines(page_of(node))]
    assert named == [socket.id for socket in node.define_schema().inputs]


@EACH_NODE
def test_the_list_has_the_defaults_and_the_limits_of_the_schema(node: type[io.ComfyNode]) -> None:
    lines = {line.name: line for line in input_lines(page_of(node))}
    for socket in node.define_schema().inputs:
        _, default, limits, what = lines[socket.id]
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
def test_tables_fit_the_panel(node: type[io.ComfyNode]) -> None:
    """The side panel is about 300 pixels wide: three or more columns do not fit."""
    for line in [*page_of(node).splitlines(), *chinese_page_of(node).splitlines()]:
        assert line.count("|") <= 3 or not line.startswith("|"), line


@EACH_NODE
def test_the_outputs_are_named(node: type[io.ComfyNode]) -> None:
    text = section(page_of(node), "Outputs")
    for output in node.define_schema().outputs:
        assert f"`{output.display_name}`" in text


@EACH_NODE
def test_the_example_sets_every_widget_to_a_value_it_takes(node: type[io.ComfyNode]) -> None:
    found = re.search(r"```json\n(.*?)```", section(page_of(node), "Example"), re.DOTALL)
    assert found
    values = json.loads(found[1])
    widgets = {
        socket.id: socket.as_dict()
        for socket in node.define_schema().inputs
        if socket.io_type in WIDGETS
    }
    assert values.keys() == widgets.keys()
    for name, options in widgets.items():
        if "min" in options:
            assert options["min"] <= values[name] <= options["max"], name
        elif fixed := fixed_options(options):
            assert values[name] in fixed or values[name].endswith(".safetensors"), name


@EACH_NODE
def test_what_a_page_refers_to_exists(node: type[io.ComfyNode]) -> None:
    """The help panel resolves links against the canvas, so pages name nodes in bold, not files."""
    page = page_of(node)
    names = {other.define_schema().display_name for other in NODES}
    assert set(re.findall(r"\*\*(.+?)\*\*", page)) <= names
    for target in re.findall(r"\]\(([^)\s]+)\)", page):
        assert target.startswith("https://") or (DOCS / target).is_file(), target


@EACH_NODE
def test_a_page_names_only_settings_that_exist(node: type[io.ComfyNode]) -> None:
    """A word in code that looks like a setting is a node's input, output or option."""
    known = {"text_encoder", "diffusion_models", "wanstream_timeline", "fp8_scaled"}
    for other in NODES:
        for socket in other.define_schema().inputs:
            known |= {socket.id, *fixed_options(socket.as_dict())}
    prose = re.sub(r"```.*?```", "", page_of(node), flags=re.DOTALL)
    assert set(re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)`", prose)) <= known


CHINESE: dict[str, Any] = json.loads(
    (WEB.parent / "locales" / "zh" / "nodeDefs.json").read_text(encoding="utf-8")
)
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
CODE = re.compile(r"`[^`\n]+`")


@EACH_NODE
def test_the_chinese_page_has_the_inputs_the_example_and_the_messages_of_the_english_one(
    node: type[io.ComfyNode],
) -> None:
    schema, english, chinese = node.define_schema(), page_of(node), chinese_page_of(node)
    said = CHINESE[schema.node_id]
    assert chinese.splitlines()[0] == f"# {said['display_name']}"
    assert section(chinese, "输入").split("\n")[1:-2] == input_lines_in_chinese(schema, said), (
        "run scripts/locales"
    )
    assert section(chinese, "示例").strip() == section(english, "Example").strip(), (
        "run scripts/locales"
    )
    messages = [
        [
            CODE.findall(line.split("|")[1])
            for line in section(page, title).splitlines()
            if line.startswith("| ")
        ][1:]
        for page, title in ((english, "Errors"), (chinese, "错误"))
    ]
    assert messages[0] == messages[1] != []
    assert chinese.count("\n## ") == english.count("\n## ")


@EACH_NODE
def test_the_chinese_page_has_the_figures_and_names_the_nodes_of_the_english_one(
    node: type[io.ComfyNode],
) -> None:
    names = {
        other.define_schema().display_name: CHINESE[other.__name__]["display_name"]
        for other in NODES
    }
    english, chinese = (
        translated_by_hand(DOCS, node.__name__, language) for language in ("en", "zh")
    )
    assert Counter(NUMBER.findall(chinese)) == Counter(NUMBER.findall(english))
    named = {names[name] for name in re.findall(r"\*\*(.+?)\*\*", english)}
    assert set(re.findall(r"\*\*(.+?)\*\*", chinese)) == named
    # Emphasis closed right after a bracket does not end before an ideograph.
    assert not re.search(r"）\*\*[\u4e00-\u9fff]", chinese)
    words = Counter(word for word in CODE.findall(english))
    assert {*words} == {*CODE.findall(chinese)}
