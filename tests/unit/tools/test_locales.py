"""The English locale equals the schemas, and the Chinese locale translates it."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from wanstream.nodes import WanStreamExtension
from wanstream.tools.locales import (
    DOCS,
    LOCALES,
    english_names,
    fingerprints,
    page_texts,
    read,
    read_locale,
    refresh,
    texts,
    untranslated,
)

NODES = asyncio.run(WanStreamExtension().get_node_list())
NAMES = english_names(NODES)
ENGLISH, CHINESE = read_locale(LOCALES / "en") | {"nodeDefs": NAMES}, read_locale(LOCALES / "zh")
MADE_FROM = read(LOCALES / "zh" / "made_from.json")
PAGE = (LOCALES.parent / "web" / "overlay" / "page.mjs").read_text(encoding="utf-8")
I18N = (LOCALES.parent / "web" / "overlay" / "i18n.mjs").read_text(encoding="utf-8")

# Terms left as they are in Chinese, or written in Latin letters.
SAME = {"VAE", "Latent", "Sigmas"}
IDEOGRAPH = re.compile(r"[\u4e00-\u9fff]")
NUMBER = re.compile(r"\d+(?:\.\d+)?")

PAIRS = {
    key: (english, texts(CHINESE)[key])
    for key, english in texts(ENGLISH).items()
    if key in texts(CHINESE) and not key.endswith(".name")
}
"""English and Chinese texts by key."""


def glossary() -> list[tuple[str, str]]:
    """Return English and Chinese terms, longest first to find `noise level` before `noise`."""
    page = (LOCALES / "zh" / "glossary.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line[:1] == "|"
    ]
    pairs = [(term, chinese) for terms, chinese in rows[2:] for term in terms.split(", ")]
    return sorted(pairs, key=lambda pair: -len(pair[0]))


def names(kind: str) -> dict[str, str]:
    """Return English and Chinese names for all nodes or inputs, as written in prose."""
    if kind == "nodes":
        return {
            node["display_name"]: CHINESE["nodeDefs"][node_id]["display_name"]
            for node_id, node in NAMES.items()
        }
    return {
        name: CHINESE["nodeDefs"][node_id]["inputs"][name]["name"]
        for node_id, node in NAMES.items()
        for name in node["inputs"]
        if "_" in name
    }


def test_the_english_locale_is_what_the_schemas_say() -> None:
    assert read(LOCALES / "en" / "nodeDefs.json") == NAMES, "run scripts/locales"


def test_the_english_locale_has_all_that_a_schema_says() -> None:
    assert [*NAMES] == [node.define_schema().node_id for node in NODES]
    for node in NODES:
        schema, said = node.define_schema(), NAMES[node.define_schema().node_id]
        assert (said["display_name"], said["description"]) == (
            schema.display_name,
            schema.description,
        )
        assert {name: each.get("tooltip") for name, each in said["inputs"].items()} == {
            socket.id: socket.tooltip for socket in schema.inputs
        }
        assert [each["name"] for each in said["outputs"].values()] == [
            socket.display_name or socket.io_type for socket in schema.outputs
        ]


def test_the_english_locale_has_what_the_page_registers() -> None:
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


def test_every_chinese_text_was_made_from_what_is_said_now() -> None:
    english, chinese = (
        texts(locale) | page_texts(DOCS, NAMES, language)
        for locale, language in ((ENGLISH, "en"), (CHINESE, "zh"))
    )
    assert untranslated(english, chinese, MADE_FROM) == [], (
        "translate, then scripts/locales --translated"
    )


def test_everything_is_chinese() -> None:
    for key, text in texts(CHINESE).items():
        assert (
            IDEOGRAPH.search(text)
            or text in SAME
            or text == f"Wan {texts(ENGLISH)[key].split()[-1]}"
        ), key


def test_one_thing_has_one_name() -> None:
    """Inputs and outputs with one name and type have one Chinese name in all nodes."""
    called: dict[tuple[str, str], set[str]] = {}
    for node in NODES:
        schema = node.define_schema()
        said = CHINESE["nodeDefs"][schema.node_id]
        for socket in schema.inputs:
            called.setdefault((socket.id, socket.io_type), set()).add(
                said["inputs"][socket.id]["name"]
            )
        for index, socket in enumerate(schema.outputs):
            name = socket.display_name or socket.io_type
            called.setdefault((name, socket.io_type), set()).add(
                said["outputs"][str(index)]["name"]
            )
    assert {thing: found for thing, found in called.items() if len(found) > 1} == {}


def test_a_translation_has_the_same_figures() -> None:
    for key, (english, chinese) in PAIRS.items():
        assert Counter(NUMBER.findall(chinese)) == Counter(NUMBER.findall(english)), key


def test_a_translation_names_the_same_nodes_and_settings() -> None:
    nodes, inputs = names("nodes"), names("inputs")
    for key, (english, chinese) in PAIRS.items():
        for name, translated in nodes.items():
            for form in (name, name.partition(" (")[0]):
                if form in english:
                    assert translated.partition("（")[0] in chinese, f"{key}: {form}"
        for name, translated in inputs.items():
            if re.search(rf"\b{name}\b", english):
                assert translated in chinese, f"{key}: {name}"


def test_a_translation_keeps_to_the_glossary() -> None:
    nodes, terms = names("nodes"), glossary()
    for key, (english, chinese) in PAIRS.items():
        for name in nodes:
            english = english.replace(name, "").replace(name.partition(" (")[0], "")
        for term, translated in terms:
            # A word before a colon is a choice in a list, which stays as it is.
            english, found = re.subn(rf"\b{term}\b(?!:)", "", english)
            assert not found or translated in chinese, f"{key}: {term}"


@pytest.mark.parametrize("locale", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_no_text_holds_what_the_frontend_takes_for_a_command(locale: dict[str, Any]) -> None:
    """Texts are patterns for the frontend: these signs mark values, links and plurals."""
    for key, text in texts(locale).items():
        assert not {*text} & {*"{}@|"}, key


def test_a_new_a_dropped_and_a_changed_text_are_noticed(tmp_path: Path) -> None:
    english = {
        "Node": {"display_name": "A node", "description": "It is.", "inputs": {"a": {"name": "a"}}}
    }
    (tmp_path / "zh").mkdir()
    chinese = {
        "Node": {"display_name": "节点", "inputs": {"a": {"name": "甲"}, "b": {"name": "乙"}}}
    }
    (tmp_path / "zh" / "nodeDefs.json").write_text(json.dumps(chinese), encoding="utf-8")
    left = ["lacks nodeDefs.Node.description: It is.", "unused nodeDefs.Node.inputs.b.name"]
    assert refresh(tmp_path, english, translated=True) == left
    assert read(tmp_path / "en" / "nodeDefs.json") == english
    changed = {"Node": english["Node"] | {"display_name": "Another node"}}
    assert refresh(tmp_path, changed, translated=False) == [
        *left,
        "changed nodeDefs.Node.display_name: Another node",
    ]
    assert refresh(tmp_path, changed, translated=True) == left


def test_a_fingerprint_is_that_of_the_text() -> None:
    assert fingerprints({"a": "one"}) == fingerprints({"a": "one"}) != fingerprints({"a": "One"})
