"""The Chinese help pages, as far as they follow from other texts: written by `scripts/locales`.

Of `web/docs/<node>/zh.md` the title and the list of inputs come from the Chinese locale and the schema, and the example
from the English page, so that they cannot become older than these. The rest is translated by hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..host import io

DOCS = Path(__file__).parent.parent / "web" / "docs"
INPUTS, EXAMPLE = "输入", "示例"
LANGUAGE = "zh"
LARGEST = 2**64 - 1


def page_file(docs: Path, node_id: str, language: str) -> Path:
    """The path at which ComfyUI looks for the page of a node; the English one serves all languages that have none."""
    return docs / f"{node_id}.md" if language == "en" else docs / node_id / f"{language}.md"


def refresh_page(docs: Path, schema: io.Schema, said: Mapping[str, Any]) -> None:
    """Write those parts of the Chinese page again; `said` is what the locale calls the node."""
    file = page_file(docs, schema.node_id, LANGUAGE)
    english = page_file(docs, schema.node_id, "en").read_text(encoding="utf-8")
    page = file.read_text(encoding="utf-8")
    page = re.sub(r"\A# .*", lambda _: f"# {said['display_name']}", page)
    page = with_section(page, INPUTS, "".join(f"{line}\n" for line in input_lines(schema, said)))
    page = with_section(page, EXAMPLE, section(english, "Example").strip() + "\n")
    file.write_text(page, encoding="utf-8")


def input_lines(schema: io.Schema, said: Mapping[str, Any]) -> list[str]:
    """A line for each input: its id, its name in the menus, default and limits, and its tooltip."""
    return [
        f"- `{socket.id}` {said['inputs'][socket.id]['name']}（{_default(socket)}{_limits(socket)}）："
        f"{said['inputs'][socket.id]['tooltip']}"
        for socket in schema.inputs
    ]


def translated_by_hand(docs: Path, node_id: str, language: str) -> str:
    """The page of a node without what `refresh_page` writes; empty where there is none."""
    file = page_file(docs, node_id, language)
    page = file.read_text(encoding="utf-8") if file.exists() else ""
    for title in ("Inputs", "Example", INPUTS, EXAMPLE):
        page = re.sub(_pattern(title), "", page, flags=re.MULTILINE | re.DOTALL)
    return page


def section(page: str, title: str) -> str:
    """The lines under `## title`, up to the next heading. Raises ValueError where there is none."""
    found = re.search(_pattern(title), page, re.MULTILINE | re.DOTALL)
    if not found:
        raise ValueError(f"the page has no section {title}")
    return found[1]


def with_section(page: str, title: str, text: str) -> str:
    """The page with this text under `## title`."""
    section(page, title)
    return re.sub(_pattern(title), lambda _: f"## {title}\n\n{text}\n", page, count=1, flags=re.MULTILINE | re.DOTALL)


def _pattern(title: str) -> str:
    return rf"^## {title}\n(.*?)(?=^## |\Z)"


def _default(socket: io.Input) -> str:
    options: Mapping[str, Any] = socket.as_dict()
    if "default" in options:
        return f"默认 `{options['default']}`"
    if options.get("options"):
        return "默认为列表的第一项"
    return "可选" if socket.optional else "需连接"


def _limits(socket: io.Input) -> str:
    options: Mapping[str, Any] = socket.as_dict()
    if "min" in options:
        most = "2^64-1" if options["max"] == LARGEST else options["max"]
        return f"；`{options['min']}..{most}`"
    if "default" in options and options.get("options"):
        # Names of model files differ from machine to machine; of such a list only the fixed choice is named.
        fixed = [option for option in options["options"] if "/" not in option and "." not in option]
        return "；" + "、".join(f"`{option}`" for option in fixed)
    return ""
