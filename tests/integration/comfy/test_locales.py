"""Both locales on a real ComfyUI server: they translate the texts in node definitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.comfy

LOCALES = Path(__file__).parents[3] / "locales"


@pytest.fixture(scope="module")
def translations(server: Any) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/i18n")
    return found


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_server_hands_out_a_locale(translations: dict[str, Any], language: str) -> None:
    """main.json is the root, the other files are branches."""
    files = {
        file.stem: json.loads(file.read_text(encoding="utf-8"))
        for file in (LOCALES / language).glob("*.json")
    }
    files.pop("made_from", None)
    assert "nodeDefs" in files
    given = translations[language]
    expected = files.pop("main") | files
    assert {name: given[name] for name in expected} == expected


@pytest.mark.parametrize("language", ["en", "zh"])
def test_it_names_what_the_server_says_of_the_nodes(
    server: Any, translations: dict[str, Any], language: str
) -> None:
    nodes = {
        name: node
        for name, node in server.get("/object_info").items()
        if name.startswith("WanStream")
    }
    translated = translations[language]["nodeDefs"]
    assert translated.keys() == nodes.keys()
    for name, node in nodes.items():
        inputs = {**node["input"]["required"], **node["input"].get("optional", {})}
        tips = {id for id, (_, options) in inputs.items() if options.get("tooltip")}
        assert translated[name]["inputs"].keys() == inputs.keys()
        assert {
            id for id, socket in translated[name]["inputs"].items() if socket.get("tooltip")
        } == tips
        assert [*translated[name]["outputs"]] == [
            str(index) for index in range(len(node["output"]))
        ]
    if language == "en":
        assert {name: node["display_name"] for name, node in translated.items()} == {
            name: node["display_name"] for name, node in nodes.items()
        }
