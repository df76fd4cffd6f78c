"""The English locale equals the schemas, and the Chinese locale translates it."""

import json
import re
from collections import Counter, defaultdict

import pytest

from wanstream.tests.support.host.given_nodes import PACK as NODES
from wanstream.tools.locales import (
    DOCS,
    LOCALES,
    english_names,
    page_texts,
    read,
    read_locale,
    refresh,
    texts,
    untranslated,
)

NAMES = english_names(NODES)
ENGLISH = read_locale(LOCALES / "en") | {"nodeDefs": NAMES}
CHINESE = read_locale(LOCALES / "zh")
MADE_FROM = read(LOCALES / "zh" / "made_from.json")
PAGE = (LOCALES.parent / "web" / "overlay" / "page.mjs").read_text(encoding="utf-8")
I18N = (LOCALES.parent / "web" / "overlay" / "i18n.mjs").read_text(encoding="utf-8")

# Terms left as they are in Chinese, or written in Latin letters.
SAME = {"VAE", "Latent", "Sigmas"}
IDEOGRAPH = re.compile(r"[\u4e00-\u9fff]")
NUMBER = re.compile(r"\d+(?:\.\d+)?")

KEYS = [key for key in texts(ENGLISH) if key in texts(CHINESE) and not key.endswith(".name")]
PAIRS = {key: (texts(ENGLISH)[key], texts(CHINESE)[key]) for key in KEYS}
"""English and Chinese texts by key."""


def glossary() -> list[tuple[str, str]]:
    """Return English and Chinese terms, longest first to find `noise level` before `noise`."""
    page = (LOCALES / "zh" / "glossary.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line[:1] == "|"]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    pairs = [(term, chinese) for terms, chinese in rows[2:] for term in terms.split(", ")]
    return sorted(pairs, key=lambda pair: -len(pair[0]))


def names(kind: str) -> dict[str, str]:
    """Return English and Chinese names for all nodes or inputs, as written in prose."""
    chinese = CHINESE["nodeDefs"]
    if kind == "nodes":
        return {node["display_name"]: chinese[key]["display_name"] for key, node in NAMES.items()}
    inputs = ((key, name) for key, node in NAMES.items() for name in node["inputs"] if "_" in name)
    return {name: chinese[key]["inputs"][name]["name"] for key, name in inputs}


def test_english_locale_has_all_texts_of_a_schema():
    assert read(LOCALES / "en" / "nodeDefs.json") == NAMES, "run scripts/locales"
    schemas = [node.define_schema() for node in NODES]
    assert [*NAMES] == [schema.node_id for schema in schemas]
    for schema in schemas:
        said = NAMES[schema.node_id]
        assert said["display_name"] == schema.display_name
        assert said["description"] == schema.description
        tooltips = {name: each.get("tooltip") for name, each in said["inputs"].items()}
        assert tooltips == {socket.id: socket.tooltip for socket in schema.inputs}
        outputs = [socket.display_name or socket.io_type for socket in schema.outputs]
        assert [each["name"] for each in said["outputs"].values()] == outputs


def test_english_locale_has_what_the_page_registers():
    """ComfyUI looks up texts for settings and panel commands by id."""
    ids = re.findall(r"""^const \w+_SETTING = "(.+)\"""", PAGE, re.MULTILINE)
    assert [*ENGLISH["settings"]] == [name.replace(".", "_") for name in ids]
    (tab,) = re.findall(r"""id: "([\w-]+)",\n +get title\(\)""", PAGE)
    title, translated = re.findall(r"""^ +tab: "(.+)\"""", I18N, re.MULTILINE)
    assert translated in CHINESE["commands"][f"Workspace_ToggleBottomPanelTab_{tab}"]["label"]
    label = f"Toggle {title} Bottom Panel"
    ((command, does),) = re.findall(r"""id: "(.+)",\n +label: "(.+)",\n +function""", PAGE)
    assert ENGLISH["commands"] == {
        command.replace(".", "_"): {"label": does},
        f"Workspace_ToggleBottomPanelTab_{tab}": {"label": label},
    }
    said = [text for setting in ENGLISH["settings"].values() for text in setting.values()]
    for text in (*said, *ENGLISH["main"]["settingsCategories"]):
        assert f'"{text}"' in PAGE


def test_every_chinese_text_was_made_from_what_is_said_now():
    english = texts(ENGLISH) | page_texts(DOCS, NAMES, "en")
    left = untranslated(english, texts(CHINESE) | page_texts(DOCS, NAMES, "zh"), MADE_FROM)
    assert left == [], "translate, then scripts/locales --translated"


def test_everything_is_chinese():
    english = texts(ENGLISH)
    for key, text in texts(CHINESE).items():
        same = {*SAME, f"Wan {english[key].split()[-1]}"}
        assert IDEOGRAPH.search(text) or text in same, key


def test_one_thing_has_one_name():
    """Inputs and outputs with one name and type have one Chinese name in all nodes."""
    called = defaultdict[tuple[str, str], set[str]](set)
    for schema in (node.define_schema() for node in NODES):
        said = CHINESE["nodeDefs"][schema.node_id]
        for socket in schema.inputs:
            called[socket.id, socket.io_type].add(said["inputs"][socket.id]["name"])
        for index, socket in enumerate(schema.outputs):
            name = socket.display_name or socket.io_type
            called[name, socket.io_type].add(said["outputs"][str(index)]["name"])
    assert {thing: found for thing, found in called.items() if len(found) > 1} == {}


def test_translation_has_the_same_figures():
    for key, (english, chinese) in PAIRS.items():
        assert Counter(NUMBER.findall(chinese)) == Counter(NUMBER.findall(english)), key


def test_translation_names_the_same_nodes_and_settings():
    nodes = names("nodes")
    inputs = names("inputs")
    for key, (english, chinese) in PAIRS.items():
        for name, translated in nodes.items():
            for form in (name, name.partition(" (")[0]):
                if form in english:
                    assert translated.partition("（")[0] in chinese, f"{key}: {form}"
        for name, translated in inputs.items():
            if re.search(rf"\b{name}\b", english):
                assert translated in chinese, f"{key}: {name}"


def test_translation_keeps_to_the_glossary():
    nodes = names("nodes")
    terms = glossary()
    for key, (english, chinese) in PAIRS.items():
        for name in nodes:
            english = english.replace(name, "").replace(name.partition(" (")[0], "")
        for term, translated in terms:
            # A word before a colon is a choice in a list, which stays as it is.
            english, found = re.subn(rf"\b{term}\b(?!:)", "", english)
            assert not found or translated in chinese, f"{key}: {term}"


@pytest.mark.parametrize("locale", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_no_text_holds_what_the_frontend_takes_for_a_command(locale):
    """Texts are patterns for the frontend: these signs mark values, links and plurals."""
    for key, text in texts(locale).items():
        assert not {*text} & {*"{}@|"}, key


def test_new_a_dropped_and_a_changed_text_are_noticed(tmp_path):
    node = {"display_name": "A node", "description": "It is.", "inputs": {"a": {"name": "a"}}}
    inputs = {"a": {"name": "甲"}, "b": {"name": "乙"}}
    chinese = {"Node": {"display_name": "节点", "inputs": inputs}}
    (tmp_path / "zh").mkdir()
    (tmp_path / "zh" / "nodeDefs.json").write_text(json.dumps(chinese), encoding="utf-8")
    left = ["lacks nodeDefs.Node.description: It is.", "unused nodeDefs.Node.inputs.b.name"]
    assert refresh(tmp_path, {"Node": node}, translated=True) == left
    assert read(tmp_path / "en" / "nodeDefs.json") == {"Node": node}
    changed = {"Node": node | {"display_name": "Another node"}}
    noticed = [*left, "changed nodeDefs.Node.display_name: Another node"]
    assert refresh(tmp_path, changed, translated=False) == noticed
    assert refresh(tmp_path, changed, translated=True) == left
