"""The nodes and settings in `docs/coming-from-wanvideowrapper.md` exist."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from wanstream.nodes import WanStreamExtension

PAGE = (Path(__file__).parent.parent / "docs" / "coming-from-wanvideowrapper.md").read_text(
    encoding="ascii"
)
NODES = [node.define_schema() for node in asyncio.run(WanStreamExtension().get_node_list())]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| there"))
]


def test_every_node_it_names_in_bold_is_ours() -> None:
    names = {schema.display_name for schema in NODES}
    assert {*re.findall(r"\*\*(.+?)\*\*", PAGE)} <= names


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_every_setting_is_one_of_ours(row: list[str]) -> None:
    """If a row names nodes, its settings belong to these nodes."""
    _, here = row
    named = [schema for schema in NODES if f"**{schema.display_name}**" in here]
    known: set[str] = set()
    for socket in (socket for schema in named or NODES for socket in schema.inputs):
        known |= {socket.id, *map(str, socket.as_dict().get("options", ()))}
    assert {*re.findall(r"`([^`]+)`", here)} <= known


def test_it_says_of_everything_whether_it_is_here() -> None:
    assert len(ROWS) > 40
    assert all(len(row) == 2 and all(row) for row in ROWS)
    assert sum(row[1].startswith("not here") for row in ROWS) >= 10
