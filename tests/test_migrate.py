"""Statements in the migration pages about our nodes: names, settings, sums, switch steps."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from wanstream.nodes import WanStreamExtension
from wanstream.plan.programs.visits import split_at_boundary
from wanstream.sampling.steps.schedules import simple_schedule
from wanstream.shapes.expert import T2V_A14B

DOCS = Path(__file__).parent.parent / "docs"
PAGE = "".join(
    (DOCS / name).read_text(encoding="ascii") for name in ("migrate.md", "migrate-packs.md")
)
NODES = [node.define_schema() for node in asyncio.run(WanStreamExtension().get_node_list())]


def rows(title: str) -> list[list[str]]:
    """Return the table cells in a section, without heads and rules."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, title
    lines = [
        line
        for line in found[1].splitlines()
        if line.startswith("|") and not line.startswith("|---")
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_node_it_names_in_bold_is_ours() -> None:
    assert {*re.findall(r"\*\*(.+?)\*\*", PAGE)} <= {schema.display_name for schema in NODES}


def test_every_setting_that_a_table_maps_to_is_an_input_of_ours() -> None:
    sockets = [socket for schema in NODES for socket in schema.inputs]
    inputs = {socket.id for socket in sockets}
    options = {str(option) for socket in sockets for option in socket.as_dict().get("options", ())}
    titles = re.findall(r"^## (From .*)$", PAGE, re.MULTILINE)
    named = {
        word for title in titles for row in rows(title) for word in re.findall(r"`(\w+)`", row[1])
    }
    assert named <= inputs | options | {"guider"}
    assert len(named) > 20


def switch(steps: int, shift: float, boundary: float) -> int:
    timesteps = [1000 * sigma for sigma in simple_schedule(steps, shift).sigmas[:-1]]
    return split_at_boundary(timesteps, boundary)


@pytest.mark.parametrize(
    ("steps", "shift", "boundary", "after"),
    [(20, 8, 0.875, 11), (20, 5, 0.9, 8), (20, 8, 0.9, 10), (4, 5, 0.875, 2), (4, 5, 0.9, 2)],
)
def test_the_switch_of_the_templates_graphs(
    steps: int, shift: float, boundary: float, after: int
) -> None:
    assert switch(steps, shift, boundary) == after


def test_the_switch_beside_that_of_another_pack() -> None:
    table = [row for row in rows("From WanMoeKSampler") if re.match(r"\d+, \d+, 0", row[0])]
    assert len(table) == 5
    for case, theirs, ours in table:
        steps, shift, boundary = case.split(", ")
        assert switch(int(steps), float(shift), float(boundary)) == int(ours)
        assert int(theirs) == int(ours) - 1


def test_the_sum_of_device_memory() -> None:
    (swapped,) = map(int, re.findall(r"10 GB with one block ahead make (\d+)", PAGE))
    block, outer = T2V_A14B.streamed_bytes() / 1e9, 2 * T2V_A14B.resident_bytes() / 1e9
    assert (f"{block:.2f}", f"{outer:.2f}") == ("0.70", "0.03")
    assert (41 - swapped + 1) * block + outer <= 10 < (41 - (swapped - 1) + 1) * block + outer
