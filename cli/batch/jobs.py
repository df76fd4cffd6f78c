"""Jobs of a batch: the workflow with the values of a row. Pure functions."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...host.embedded import MOST_NESTED, Prompt, Socket, converted, names_listed, nested_deeper
from ..overrides import OverrideError, find_node
from .rows import Row, RowError
from .sharing import node_traits

Sockets: TypeAlias = Mapping[str, Mapping[str, Socket]]
"""Inputs of the node classes: class -> name -> input."""

_TYPED_AS_TEXT = ("STRING", "COMBO")
_NESTED = "COMFY_"
"""Prefix of the types of dynamic inputs, whose nested inputs are called input.nested."""


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """One workflow to queue, and its rows."""

    prompt: Prompt
    rows: tuple[Row, ...]
    saves: Mapping[str, frozenset[str] | None]
    """By hash of a row: the nodes that save the row's files. None: all nodes."""


Planner: TypeAlias = Callable[[Sequence[Row]], list[BatchJob]]
"""Groups rows without faults into jobs; every row is in one of them."""


def single_jobs(workflow: Prompt, rows: Sequence[Row], sockets: Sockets) -> list[BatchJob]:
    """Return one job for each row."""
    return [BatchJob(prompt=apply_row(workflow, row, sockets), rows=(row,), saves={row.hash: None}) for row in rows]


def apply_row(workflow: Prompt, row: Row, sockets: Sockets) -> Prompt:
    """Return a copy of the workflow with the values of the row.

    Ranges and choices are not checked here but by the validation of the workflow. Raises RowError for an unknown node
    or input, and for text that is not a value of the input's type.
    """
    if row.fault is not None:
        raise RowError(row.fault)
    changed: dict[str, Any] = copy.deepcopy(dict(workflow))
    for key, value in row.values.items():
        node_id, name = _target(key, workflow)
        node = changed[node_id]
        socket = _socket(node, name, sockets.get(node.get("class_type", ""), {}))
        inputs = node.setdefault("inputs", {})
        given = _typed(key, value, socket, inputs.get(name)) if row.as_text else value
        if nested_deeper(given, MOST_NESTED):
            raise RowError(f"{key}: the value is nested deeper than {MOST_NESTED} levels")
        inputs[name] = given
    return changed


def workflow_key(prompt: Prompt, sockets: Sockets) -> str:
    """Return a text that is equal for equivalent workflows; titles and the notation of numbers are ignored."""
    traits: dict[str, object] = {}
    for node_id, node in prompt.items():
        known = sockets.get(node.get("class_type", ""), {})
        inputs = {
            name: converted(known[name], value)[0] if name in known and not isinstance(value, list) else value
            for name, value in node.get("inputs", {}).items()
        }
        traits |= node_traits({node_id: {"class_type": node.get("class_type"), "inputs": inputs}}, node_id)
    return json.dumps(traits, sort_keys=True)


def _target(key: str, workflow: Prompt) -> tuple[str, str]:
    """Return the node's id and the name of the input; both may contain dots."""
    parts = key.split(".")
    splits = [(".".join(parts[:place]), ".".join(parts[place:])) for place in range(1, len(parts))]
    for name, socket in splits:
        try:
            return find_node(name, workflow), socket
        except OverrideError:
            continue
    try:
        return find_node(splits[0][0], workflow), splits[0][1]
    except OverrideError as err:
        raise RowError(f"{key}: {err}") from err


def _socket(node: Mapping[str, Any], name: str, known: Mapping[str, Socket]) -> Socket | None:
    """Return the class's description of an input; None if only the workflow has the input. Raises RowError."""
    if name in known:
        return known[name]
    above = known.get(name.partition(".")[0])
    if name in node.get("inputs", {}) or (above is not None and above.io_type.startswith(_NESTED)):
        return None
    names = dict.fromkeys((*known, *node.get("inputs", {})))
    raise RowError(f"{node.get('class_type')} has no input {name}; {names_listed(name, names)}")


def _typed(key: str, text: str, socket: Socket | None, before: object) -> object:
    """Convert a CSV cell to the type of the input or, if that is unknown, of the value in the workflow."""
    if socket is None and isinstance(before, str):
        return text
    if socket is not None and socket.io_type in _TYPED_AS_TEXT:
        # Some choices are numbers.
        options = socket.options.get("options") or ()
        return next((option for option in options if text not in options and str(option) == text), text)
    if socket is not None and socket.io_type == "BOOLEAN" and text.lower() in {"true", "false"}:
        return text.lower() == "true"  # as spreadsheets write it
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as err:
        kind = "not a text" if socket is None else socket.io_type
        raise RowError(f"{key} is {kind}, but '{text}' is not a JSON value: {err}") from err
