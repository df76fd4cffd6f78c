"""Statements in the migration pages about our nodes: names, settings, sums, switch steps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from wanstream.plan.programs.visits import split_at_boundary
from wanstream.sampling.steps.schedules import simple_schedule
from wanstream.shapes.expert import T2V_A14B
from wanstream.tests.support.host.given_nodes import PACK

DOCS = Path(__file__).parent.parent / "docs"
NAMES = ("migrate", "migrate-packs", "coming-from-wanvideowrapper")
PAGES = {name: (DOCS / f"{name}.md").read_text(encoding="ascii") for name in NAMES}
PACKS = PAGES["migrate"] + PAGES["migrate-packs"]
NODES = [node.define_schema() for node in PACK]


def rows_in(text: str) -> list[list[str]]:
    """Return the table cells in a text, without rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if not row[0].startswith("---")]


def section(title: str) -> list[list[str]]:
    """Return the table cells in a section."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PACKS, re.MULTILINE | re.DOTALL)
    assert found, title
    return rows_in(found[1])


def names_of(schemas: list[Any]) -> set[str]:
    """Return the inputs of nodes, and their options."""
    sockets = [socket for schema in schemas for socket in schema.inputs]
    options = {str(option) for socket in sockets for option in socket.as_dict().get("options", ())}
    return options | {socket.id for socket in sockets}


@pytest.mark.parametrize("page", PAGES)
def test_every_node_in_bold_is_ours(page):
    names = {schema.display_name for schema in NODES}
    assert {*re.findall(r"\*\*(.+?)\*\*", PAGES[page])} <= names


def test_every_setting_of_a_table_is_an_input_of_ours():
    titles = re.findall(r"^## (From .*)$", PACKS, re.MULTILINE)
    rows = [row for title in titles for row in section(title)]
    named = {word for row in rows for word in re.findall(r"`(\w+)`", row[1])}
    assert named <= names_of(NODES) | {"guider"}
    assert len(named) > 20


OF_WRAPPER = [row for row in rows_in(PAGES[NAMES[2]]) if row[0] != "there"]


@pytest.mark.parametrize("row", OF_WRAPPER, ids=lambda row: row[0][:40])
def test_every_setting_for_the_wrapper_is_one_of_ours(row):
    """If a row names nodes, its settings belong to these nodes."""
    _, here = row
    named = [schema for schema in NODES if f"**{schema.display_name}**" in here]
    assert {*re.findall(r"`([^`]+)`", here)} <= names_of(named or NODES)


def test_page_for_the_wrapper_has_everything():
    assert len(OF_WRAPPER) > 40
    assert all(len(row) == 2 and all(row) for row in OF_WRAPPER)
    assert sum(row[1].startswith("not here") for row in OF_WRAPPER) >= 10


def switch(steps: int, shift: float, boundary: float) -> int:
    timesteps = [1000 * sigma for sigma in simple_schedule(steps, shift).sigmas[:-1]]
    return split_at_boundary(timesteps, boundary)


@pytest.mark.parametrize(
    ("steps", "shift", "boundary", "after"),
    [(20, 8, 0.875, 11), (20, 5, 0.9, 8), (20, 8, 0.9, 10), (4, 5, 0.875, 2), (4, 5, 0.9, 2)],
)
def test_switch_of_the_templates(steps, shift, boundary, after):
    assert switch(steps, shift, boundary) == after


def test_switch_beside_that_of_another_pack():
    table = [row for row in section("From WanMoeKSampler") if re.match(r"\d+, \d+, 0", row[0])]
    assert len(table) == 5
    for case, theirs, ours in table:
        steps, shift, boundary = case.split(", ")
        assert switch(int(steps), float(shift), float(boundary)) == int(ours)
        assert int(theirs) == int(ours) - 1


def test_sum_of_device_memory():
    (swapped,) = map(int, re.findall(r"10 GB with one block ahead make (\d+)", PACKS))
    block = T2V_A14B.streamed_bytes() / 1e9
    outer = 2 * T2V_A14B.resident_bytes() / 1e9
    assert (f"{block:.2f}", f"{outer:.2f}") == ("0.70", "0.03")
    assert (41 - swapped + 1) * block + outer <= 10 < (41 - (swapped - 1) + 1) * block + outer
