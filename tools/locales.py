"""Node locales: English generated from the schemas, and a check of the Chinese translation.

`scripts/locales` writes `locales/en/nodeDefs.json`. All other files in `locales/` are written by
hand: the Chinese texts, and the page's setting and command names. `locales/zh/made_from.json`
stores a fingerprint for each translated English text, to detect changed tooltips.
ComfyUI reads neither it nor the glossary.

In `web/docs/<node>/zh.md`, title and input list come from the Chinese locale and the schema, and
the example from the English page, so that they are always up to date. The rest is translated by
hand.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..host import io
from ..nodes import WanStreamExtension

LOCALES = Path(__file__).parent.parent / "locales"
DOCS = Path(__file__).parent.parent / "web" / "docs"
INPUTS = "输入"
EXAMPLE = "示例"
LANGUAGE = "zh"
LARGEST = 2**64 - 1

FILES = ("nodeDefs", "settings", "commands", "main")
"""Locale files that ComfyUI reads."""

Texts = dict[str, str]
"""Texts by key in a locale, such as `nodeDefs.WanStreamSampler.inputs.steps.tooltip`."""


def main(arguments: Sequence[str]) -> int:
    """Write the English locale and print the Chinese texts to check.

    Return 1 if there are any.

    `--translated` records all Chinese texts as up to date.
    """
    if {*arguments} - {"--translated"}:
        print("scripts/locales [--translated]", file=sys.stderr)
        return 2
    # ComfyUI's extensions list their nodes in a coroutine.
    nodes = asyncio.run(WanStreamExtension().get_node_list())
    outdated = refresh(LOCALES, english_names(nodes), translated=bool(arguments), docs=DOCS)
    for schema in (node.define_schema() for node in nodes):
        if page_file(DOCS, schema.node_id, LANGUAGE).exists():
            refresh_page(DOCS, schema, read_locale(LOCALES / LANGUAGE)["nodeDefs"][schema.node_id])
    for text in outdated:
        print(text)
    return 1 if outdated else 0


def refresh(
    locales: Path, names: Mapping[str, Any], *, translated: bool, docs: Path | None = None
) -> list[str]:
    """Write the English locale. Return Chinese texts to check, also in help pages below `docs`.

    `translated` records that the existing Chinese texts translate the current English ones.
    """
    write(locales / "en" / "nodeDefs.json", names)
    english = texts(read_locale(locales / "en"))
    chinese = texts(read_locale(locales / "zh"))
    if docs is not None:
        english |= page_texts(docs, names, "en")
        chinese |= page_texts(docs, names, LANGUAGE)
    made_from = locales / "zh" / "made_from.json"
    if translated:
        write(
            made_from,
            {key: digits for key, digits in fingerprints(english).items() if key in chinese},
        )
    return untranslated(english, chinese, read(made_from))


def english_names(nodes: Sequence[type[io.ComfyNode]]) -> dict[str, Any]:
    """Return `nodeDefs.json` from the schemas: names and tooltips for nodes, inputs and outputs.

    An input without a name has the id, as in ComfyUI's own locale. ComfyUI cannot translate
    categories and choices.
    """
    locale: dict[str, Any] = {}
    for node in nodes:
        schema = node.define_schema()
        locale[schema.node_id] = {
            "display_name": schema.display_name,
            "description": schema.description,
            "inputs": {socket.id: _names(socket, socket.id) for socket in schema.inputs},
            "outputs": {
                str(index): _names(socket, socket.io_type)
                for index, socket in enumerate(schema.outputs)
            },
        }
    return locale


def texts(locale: Mapping[str, Any], before: str = "") -> Texts:
    """Return all locale texts by key."""
    found: Texts = {}
    for name, value in locale.items():
        found |= (
            {before + name: value} if isinstance(value, str) else texts(value, f"{before}{name}.")
        )
    return found


def page_texts(docs: Path, names: Iterable[str], language: str) -> Texts:
    """Return the hand-written help page text by node, for nodes with a page."""
    pages = {f"docs.{name}": translated_by_hand(docs, name, language) for name in names}
    return {key: page for key, page in pages.items() if page}


def fingerprints(english: Texts) -> Texts:
    """Return a fingerprint with eight hexadecimal digits for each text."""
    return {key: hashlib.sha256(text.encode()).hexdigest()[:8] for key, text in english.items()}


def untranslated(english: Texts, chinese: Texts, made_from: Texts) -> list[str]:
    """List texts missing or superfluous in the Chinese locale, or translated from older English."""
    now = fingerprints(english)
    lacks = [
        f"lacks {key}: {_shortened(text)}" for key, text in english.items() if key not in chinese
    ]
    beyond = [f"unused {key}" for key in chinese if key not in english]
    stale = [key for key in english if key in chinese and made_from.get(key) != now[key]]
    changed = [f"changed {key}: {_shortened(english[key])}" for key in stale]
    return [*lacks, *beyond, *changed]


def _shortened(text: str) -> str:
    """Return the first line: a whole tooltip, or a help page's title."""
    return text.partition("\n")[0]


def read_locale(folder: Path) -> dict[str, Any]:
    """Return all locale files in a language, by name."""
    return {name: read(folder / f"{name}.json") for name in FILES}


def read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return content


def write(file: Path, content: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _names(socket: io.Input | io.Output, name: str) -> dict[str, str]:
    names = {"name": socket.display_name or name}
    return names | {"tooltip": socket.tooltip} if socket.tooltip else names


def page_file(docs: Path, node_id: str, language: str) -> Path:
    """Return the path of a node's help page.

    ComfyUI uses the English one for languages without a page.
    """
    return docs / f"{node_id}.md" if language == "en" else docs / node_id / f"{language}.md"


def refresh_page(docs: Path, schema: io.Schema, texts: Mapping[str, Any]) -> None:
    """Write the generated parts of the Chinese page. `texts` is the node's locale entry."""
    file = page_file(docs, schema.node_id, LANGUAGE)
    english = page_file(docs, schema.node_id, "en").read_text(encoding="utf-8")
    page = file.read_text(encoding="utf-8")
    # A function returns the text, because `re` would interpret backslashes in a plain string.
    page = re.sub(r"\A# .*", lambda _: f"# {texts['display_name']}", page)
    page = with_section(page, INPUTS, "".join(f"{line}\n" for line in input_lines(schema, texts)))
    page = with_section(page, EXAMPLE, section(english, "Example").strip() + "\n")
    file.write_text(page, encoding="utf-8")


def input_lines(schema: io.Schema, texts: Mapping[str, Any]) -> list[str]:
    """Return a line per input: id, displayed name, default, limits and tooltip."""
    return [
        f"- `{socket.id}` "
        f"{texts['inputs'][socket.id]['name']}（{_default(socket)}{_limits(socket)}）："
        f"{texts['inputs'][socket.id]['tooltip']}"
        for socket in schema.inputs
    ]


def translated_by_hand(docs: Path, node_id: str, language: str) -> str:
    """Return a node's page without the parts written by `refresh_page`.

    Empty without a page.
    """
    file = page_file(docs, node_id, language)
    page = file.read_text(encoding="utf-8") if file.exists() else ""
    for title in ("Inputs", "Example", INPUTS, EXAMPLE):
        page = re.sub(_pattern(title), "", page, flags=re.MULTILINE | re.DOTALL)
    return page


def section(page: str, title: str) -> str:
    """Return the lines under `## title`, up to the next heading.

    Raises ValueError without such a section.
    """
    found = re.search(_pattern(title), page, re.MULTILINE | re.DOTALL)
    if not found:
        raise ValueError(f"the page has no section {title}")
    return found[1]


def with_section(page: str, title: str, text: str) -> str:
    """Return the page with this text under `## title`."""
    # Raises without such a section, where `re.sub` would return the page unchanged.
    section(page, title)
    return re.sub(
        _pattern(title),
        lambda _: f"## {title}\n\n{text}\n",
        page,
        count=1,
        flags=re.MULTILINE | re.DOTALL,
    )


def _pattern(title: str) -> str:
    return rf"^## {title}\n(.*?)(?=^## |\Z)"


def _default(socket: io.Input) -> str:
    options: Mapping[str, Any] = socket.as_dict()
    if "default" in options:
        return f"默认 `{options['default']}`"
    if options.get("options"):
        return "默认为列表的第一项"
    return "可选" if socket.optional else "需连接"


FILE = re.compile(r"/|\.[a-z][a-z0-9]+$")
"""Choices that are files. Names of models, such as "Wan2.2 5B", have dots too."""


def _limits(socket: io.Input) -> str:
    options: Mapping[str, Any] = socket.as_dict()
    if "min" in options:
        # A seed's limit has 20 digits, too many to read.
        most = "2^64-1" if options["max"] == LARGEST else options["max"]
        return f"；`{options['min']}..{most}`"
    if "default" in options and options.get("options"):
        # Model file names differ between machines, so only the fixed choices in such a list are
        # shown.
        fixed = [option for option in options["options"] if not FILE.search(option)]
        return "；" + "、".join(f"`{option}`" for option in fixed)
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
