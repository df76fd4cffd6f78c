"""Graphs in API format as values: numbered, ordered and compared. Pure functions.

A node is named by class, or by title if a graph has several nodes with that class. So names do not
depend on ids, nor on ComfyUI's language and version, which determine default titles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias

Prompt: TypeAlias = Mapping[str, Mapping[str, Any]]


def links_of(node: Mapping[str, Any]) -> dict[str, str]:
    """Return linked node ids by input."""
    # A link is a list of node id and output number. The frontend wraps other lists in objects.
    return {name: value[0] for name, value in node["inputs"].items() if isinstance(value, list)}


def numbered(prompt: Prompt, *, first: int = 1) -> dict[str, dict[str, Any]]:
    """Return the graph with ids "1", "2", ... in file order, as on the canvas."""
    ids = {old: str(number) for number, old in enumerate(prompt, start=first)}

    def renamed(value: object) -> object:
        return [ids[value[0]], value[1]] if isinstance(value, list) else value

    return {
        ids[old]: {
            **node,
            "inputs": {name: renamed(value) for name, value in node["inputs"].items()},
        }
        for old, node in prompt.items()
    }


def names_of(prompt: Prompt) -> dict[str, str]:
    """Return node names by id.

    Raises ValueError if two nodes have the same class and title.
    """
    counts = Counter(node["class_type"] for node in prompt.values())
    names = {
        node_id: node["class_type"]
        if counts[node["class_type"]] == 1
        else str(node["_meta"]["title"])
        for node_id, node in prompt.items()
    }
    if len({*names.values()}) != len(names):
        raise ValueError(f"two nodes share a title: {sorted(names.values())}")
    return names


def by_name(prompt: Prompt) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return a graph's content without ids: class and inputs by node name, links as (name, output).

    Two graphs differ only in ids if and only if these are equal. Raises ValueError as `names_of`
    does.
    """
    names = names_of(prompt)

    def named(value: object) -> object:
        return (names[value[0]], value[1]) if isinstance(value, list) else value

    return {
        names[node_id]: (
            node["class_type"],
            {name: named(value) for name, value in node["inputs"].items()},
        )
        for node_id, node in prompt.items()
    }
