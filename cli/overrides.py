"""`--set node.input=value`: changes to a workflow before it runs. Pure functions."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..host.embedded import MOST_NESTED, ComfyNode, Prompt, names_listed, nested_deeper, sockets_of

# A value for one of these is taken as it is typed; for any other type it is JSON.
_TYPED_AS_TEXT = ("STRING", "COMBO")


class ChangeError(ValueError):
    """A change that names nothing in the workflow, or whose value cannot be read."""


def with_changes(prompt: Prompt, changes: Iterable[str], nodes: Mapping[str, type[ComfyNode]]) -> Prompt:
    """A copy of `prompt` with every `node.input=value` applied in order; `nodes` are the classes by `class_type`.

    Whether a value is allowed is left to the validation of the workflow. Raises ChangeError.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(prompt))
    for change in changes:
        target, equals, text = change.partition("=")
        name, dot, socket = target.rpartition(".")
        if not (equals and dot and name and socket):
            raise ChangeError(f"--set {change}: write node.input=value")
        try:
            node_id = node_named(name, changed)
        except ChangeError as err:
            raise ChangeError(f"--set {name}: {err}") from err
        value = _value(change, changed[node_id], socket, text, nodes)
        if nested_deeper(value, MOST_NESTED):
            raise ChangeError(f"--set {name}.{socket}: the value is nested more than {MOST_NESTED} deep")
        changed[node_id].setdefault("inputs", {})[socket] = value
    return changed


def node_named(name: str, prompt: Prompt) -> str:
    """The id of the node whose id is `name`, or of the only one whose class it is. Raises ChangeError."""
    if name in prompt:
        return name
    of_class = [node_id for node_id, node in prompt.items() if node.get("class_type") == name]
    if len(of_class) == 1:
        return of_class[0]
    if of_class:
        raise ChangeError(f"several nodes are a {name}: use an id, {_listed(of_class)}")
    raise ChangeError(f"no such node; the workflow has {_listed(prompt)}")


def _value(
    change: str, node: Mapping[str, Any], socket: str, text: str, nodes: Mapping[str, type[ComfyNode]]
) -> object:
    """`text` as the input's type wants it."""
    class_type = node.get("class_type", "")
    if class_type not in nodes:
        return text  # The validation of the workflow has more to say about an unknown class.
    types = {known.name: known.io_type for known in sockets_of(nodes[class_type])}
    if socket not in types:
        raise ChangeError(f"--set {change}: {class_type} has no input {socket}; {names_listed(socket, types)}")
    if types[socket] in _TYPED_AS_TEXT:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as err:
        raise ChangeError(f"--set {change}: {socket} is {types[socket]}, and {text!r} is no JSON value: {err}") from err


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
