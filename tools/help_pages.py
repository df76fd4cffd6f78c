"""Generated parts of the Chinese help pages, written by `scripts/locales`.

In `web/docs/<node>/zh.md`, the title and the list of inputs come from the Chinese locale and the schema, and the
example from the English page, so that they are always up to date. The rest is translated by hand.
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
    """Return the path of a node's help page; ComfyUI uses the English one for languages without a page."""
    return docs / f"{node_id}.md" if language == "en" else docs / node_id / f"{language}.md"


def refresh_page(docs: Path, schema: io.Schema, texts: Mapping[str, Any]) -> None:
    """Write the generated parts of the Chinese page; `texts` is the node's entry in the locale."""
    file = page_file(docs, schema.node_id, LANGUAGE)
    english = page_file(docs, schema.node_id, "en").read_text(encoding="utf-8")
    page = file.read_text(encoding="utf-8")
    page = re.sub(r"\A# .*", lambda _: f"# {texts['display_name']}", page)
    page = with_section(page, INPUTS, "".join(f"{line}\n" for line in input_lines(schema, texts)))
    page = with_section(page, EXAMPLE, section(english, "Example").strip() + "\n")
    file.write_text(page, encoding="utf-8")


def input_lines(schema: io.Schema, texts: Mapping[str, Any]) -> list[str]:
    """Return a line for each input: its id, displayed name, default, limits and tooltip."""
    return [
        f"- `{socket.id}` {texts['inputs'][socket.id]['name']}（{_default(socket)}{_limits(socket)}）："
        f"{texts['inputs'][socket.id]['tooltip']}"
        for socket in schema.inputs
    ]


def translated_by_hand(docs: Path, node_id: str, language: str) -> str:
    """Return the page of a node without the parts written by `refresh_page`; empty if there is no page."""
    file = page_file(docs, node_id, language)
    page = file.read_text(encoding="utf-8") if file.exists() else ""
    for title in ("Inputs", "Example", INPUTS, EXAMPLE):
        page = re.sub(_pattern(title), "", page, flags=re.MULTILINE | re.DOTALL)
    return page


def section(page: str, title: str) -> str:
    """Return the lines under `## title`, up to the next heading. Raises ValueError if there is no such section."""
    found = re.search(_pattern(title), page, re.MULTILINE | re.DOTALL)
    if not found:
        raise ValueError(f"the page has no section {title}")
    return found[1]


def with_section(page: str, title: str, text: str) -> str:
    """Return the page with this text under `## title`."""
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
        # Names of model files differ between machines, so only the fixed choices of such a list are shown.
        fixed = [option for option in options["options"] if "/" not in option and "." not in option]
        return "；" + "、".join(f"`{option}`" for option in fixed)
    return ""
