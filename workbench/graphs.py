"""Graphs in API format as values: numbered, ordered and compared. Pure functions.

In a shipped workflow every node has a title of its own, so a title says which node is meant whatever its id is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Prompt: TypeAlias = Mapping[str, Mapping[str, Any]]


def title_of(node: Mapping[str, Any]) -> str:
    """The title that a node of an API file carries."""
    title: str = node["_meta"]["title"]
    return title


def links_of(node: Mapping[str, Any]) -> dict[str, str]:
    """The ids of the nodes that a node's inputs are linked to, by input."""
    return {name: value[0] for name, value in node["inputs"].items() if isinstance(value, list)}


def numbered(prompt: Prompt) -> dict[str, dict[str, Any]]:
    """The same graph with ids "1", "2", ..., in the order of the file: the canvas counts its nodes."""
    ids = {old: str(number) for number, old in enumerate(prompt, start=1)}

    def renamed(value: object) -> object:
        return [ids[value[0]], value[1]] if isinstance(value, list) else value

    return {
        ids[old]: {**node, "inputs": {name: renamed(value) for name, value in node["inputs"].items()}}
        for old, node in prompt.items()
    }


def by_title(prompt: Prompt) -> dict[str, tuple[str, dict[str, Any]]]:
    """What a graph says whatever its ids are: for each title the class and the inputs, links as (title, output).

    Two graphs are the same up to their ids exactly if these are equal. Raises ValueError if two nodes share a title.
    """
    titles = {node_id: title_of(node) for node_id, node in prompt.items()}
    if len({*titles.values()}) != len(titles):
        raise ValueError(f"two nodes share a title: {sorted(titles.values())}")

    def named(value: object) -> object:
        return (titles[value[0]], value[1]) if isinstance(value, list) else value

    return {
        titles[node_id]: (node["class_type"], {name: named(value) for name, value in node["inputs"].items()})
        for node_id, node in prompt.items()
    }
