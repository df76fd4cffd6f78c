"""What ComfyUI's menus say about our nodes: English from the schemas, and which English the Chinese was made from.

`locales/en/nodeDefs.json` is written by `scripts/locales`, all else in `locales/` by hand: the Chinese, and what
settings and commands of our page are called. `locales/zh/made_from.json` keeps a fingerprint of each English text
that was translated, so that a changed tooltip is noticed; ComfyUI reads neither it nor the glossary beside it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..host import io
from ..nodes import WanStreamExtension
from .help_pages import DOCS, LANGUAGE, page_file, refresh_page, translated_by_hand

LOCALES = Path(__file__).parent.parent / "locales"

FILES = ("nodeDefs", "settings", "commands", "main")
"""Those of a locale that ComfyUI reads."""

Texts = dict[str, str]
"""Texts by where they stand in a locale: `nodeDefs.WanStreamSampler.inputs.steps.tooltip`."""


def main(arguments: Sequence[str]) -> int:
    """Write the English locale and print which Chinese texts are to be looked at; returns 1 if there are any.

    With `--translated` all of them have been looked at, and that is written down.
    """
    if {*arguments} - {"--translated"}:
        print("scripts/locales [--translated]", file=sys.stderr)
        return 2
    nodes = asyncio.run(WanStreamExtension().get_node_list())
    left = refresh(LOCALES, english_names(nodes), translated=bool(arguments), docs=DOCS)
    for schema in (node.define_schema() for node in nodes):
        if page_file(DOCS, schema.node_id, LANGUAGE).exists():
            refresh_page(DOCS, schema, read_locale(LOCALES / LANGUAGE)["nodeDefs"][schema.node_id])
    for text in left:
        print(text)
    return 1 if left else 0


def refresh(locales: Path, names: Mapping[str, Any], *, translated: bool, docs: Path | None = None) -> list[str]:
    """Write what nodes are called in English and return which Chinese texts are to be looked at.

    `translated` says that the Chinese texts which are there were made from this English. The help pages below `docs`
    are among them.
    """
    write(locales / "en" / "nodeDefs.json", names)
    english, chinese = texts(read_locale(locales / "en")), texts(read_locale(locales / "zh"))
    if docs is not None:
        english |= page_texts(docs, names, "en")
        chinese |= page_texts(docs, names, LANGUAGE)
    made_from = locales / "zh" / "made_from.json"
    if translated:
        write(made_from, {key: digits for key, digits in fingerprints(english).items() if key in chinese})
    return untranslated(english, chinese, read(made_from))


def english_names(nodes: Sequence[type[io.ComfyNode]]) -> dict[str, Any]:
    """`nodeDefs.json` as the schemas say it: names and tooltips of every node, input and output.

    What an input has no name for goes by its id, as in ComfyUI's own locale. Category and choices cannot be translated
    there.
    """
    locale: dict[str, Any] = {}
    for node in nodes:
        schema = node.define_schema()
        locale[schema.node_id] = {
            "display_name": schema.display_name,
            "description": schema.description,
            "inputs": {socket.id: _said(socket, socket.id) for socket in schema.inputs},
            "outputs": {str(index): _said(socket, socket.io_type) for index, socket in enumerate(schema.outputs)},
        }
    return locale


def texts(locale: Mapping[str, Any], before: str = "") -> Texts:
    """All texts of a locale by where they stand."""
    found: Texts = {}
    for name, value in locale.items():
        found |= {before + name: value} if isinstance(value, str) else texts(value, f"{before}{name}.")
    return found


def page_texts(docs: Path, names: Iterable[str], language: str) -> Texts:
    """The text that is written by hand in the help page of each of these nodes, as far as it has one."""
    pages = {f"docs.{name}": translated_by_hand(docs, name, language) for name in names}
    return {key: page for key, page in pages.items() if page}


def fingerprints(english: Texts) -> Texts:
    """Eight digits of each text: enough to notice that it changed."""
    return {key: hashlib.sha256(text.encode()).hexdigest()[:8] for key, text in english.items()}


def untranslated(english: Texts, chinese: Texts, made_from: Texts) -> list[str]:
    """What the Chinese locale lacks, has beyond the English one, or made from an English that is no longer said."""
    now = fingerprints(english)
    lacks = [f"lacks {key}: {_shortened(text)}" for key, text in english.items() if key not in chinese]
    beyond = [f"nobody needs {key}" for key in chinese if key not in english]
    stale = [key for key in english if key in chinese and made_from.get(key) != now[key]]
    changed = [f"changed {key}: {_shortened(english[key])}" for key in stale]
    return [*lacks, *beyond, *changed]


def _shortened(text: str) -> str:
    """A tooltip as it is; of a help page the title."""
    return text.partition("\n")[0]


def read_locale(folder: Path) -> dict[str, Any]:
    """All that ComfyUI reads of a language, by the names of its files."""
    return {name: read(folder / f"{name}.json") for name in FILES}


def read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return content


def write(file: Path, content: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _said(socket: io.Input | io.Output, name: str) -> dict[str, str]:
    said = {"name": socket.display_name or name}
    return said | {"tooltip": socket.tooltip} if socket.tooltip else said


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
