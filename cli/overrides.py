"""Overrides of workflow inputs by `--set node.input=value`. Pure functions."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..host.embedded import MOST_NESTED, ComfyNode, Prompt, names_listed, nested_deeper, sockets_of

# Values of these types are used as typed; all others are JSON.
_TYPED_AS_TEXT = ("STRING", "COMBO")


class OverrideError(ValueError):
    """An override of a missing node or input, or with an unreadable value."""


def apply_overrides(prompt: Prompt, changes: Iterable[str], nodes: Mapping[str, type[ComfyNode]]) -> Prompt:
    """Return a copy of `prompt` with every `node.input=value` applied in order; `nodes` are classes by `class_type`.

    Ranges and choices are not checked here but by the validation of the workflow. Raises OverrideError.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(prompt))
    for change in changes:
        target, equals, text = change.partition("=")
        name, dot, socket = target.rpartition(".")
        if not (equals and dot and name and socket):
            raise OverrideError(f"--set {change}: write node.input=value")
        try:
            node_id = find_node(name, changed)
        except OverrideError as err:
            raise OverrideError(f"--set {name}: {err}") from err
        value = _value(change, changed[node_id], socket, text, nodes)
        if nested_deeper(value, MOST_NESTED):
            raise OverrideError(f"--set {name}.{socket}: the value is nested deeper than {MOST_NESTED} levels")
        changed[node_id].setdefault("inputs", {})[socket] = value
    return changed


def find_node(name: str, prompt: Prompt) -> str:
    """Return the id of the node with the id `name`, or of the only node of that class. Raises OverrideError."""
    if name in prompt:
        return name
    of_class = [node_id for node_id, node in prompt.items() if node.get("class_type") == name]
    if len(of_class) == 1:
        return of_class[0]
    if of_class:
        raise OverrideError(f"several nodes are of the class {name}: use an id, {_listed(of_class)}")
    raise OverrideError(f"no such node; the workflow has {_listed(prompt)}")


def _value(
    change: str, node: Mapping[str, Any], socket: str, text: str, nodes: Mapping[str, type[ComfyNode]]
) -> object:
    """Convert `text` to the type of the input."""
    class_type = node.get("class_type", "")
    if class_type not in nodes:
        return text  # the validation of the workflow has a better message for an unknown class
    types = {known.name: known.io_type for known in sockets_of(nodes[class_type])}
    if socket not in types:
        raise OverrideError(f"--set {change}: {class_type} has no input {socket}; {names_listed(socket, types)}")
    if types[socket] in _TYPED_AS_TEXT:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as err:
        raise OverrideError(
            f"--set {change}: {socket} is {types[socket]}, but {text!r} is not a JSON value: {err}"
        ) from err


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
