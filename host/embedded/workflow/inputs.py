"""Input values for a workflow, named `node.input`, from `--set` or a batch row."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from ...input_values import shortened
from .graph import MOST_NESTED, Prompt, nested_deeper
from .io import ComfyNode
from .near_names import names_listed, nearest
from .validate import NESTED, Socket, converted, sockets_of

Sockets: TypeAlias = Mapping[str, Mapping[str, Socket]]
"""Inputs by node class: class -> name -> input."""

# Values of these types are used as typed. All others are JSON.
_TYPED_AS_TEXT = ("STRING", "COMBO")
_MAX_SHOWN = 80
"""Limit for value characters in a message."""
_VALUES = {"INT": "a whole number", "FLOAT": "a number", "BOOLEAN": "true or false"}


def class_sockets(classes: Mapping[str, type[ComfyNode]]) -> Sockets:
    """Return the inputs of node classes."""
    return {name: sockets_of(node.INPUT_TYPES()) for name, node in classes.items()}


class InputError(ValueError):
    """A value for a missing node or input, or text that does not fit the input type."""


def names_an_input(key: str) -> bool:
    """Return True if the text has the form `node.input`."""
    node, dot, socket = key.partition(".")
    return bool(node and dot and socket)


def apply_overrides(workflow: Prompt, changes: Iterable[str], sockets: Sockets) -> Prompt:
    """Return a copy of the workflow with each `--set` change, `node.input=value`.

    Raises InputError.
    """
    for change in changes:
        key, equals, text = change.partition("=")
        if not (equals and names_an_input(key)):
            raise InputError(f"--set {_shortened(change)}: write node.input=value")
        try:
            workflow = with_inputs(workflow, {key: text}, sockets, as_text=True)
        except InputError as err:
            raise InputError(f"--set {_shortened(change)}: {err}") from err
    return workflow


def with_inputs(
    workflow: Prompt, values: Mapping[str, Any], sockets: Sockets, *, as_text: bool
) -> Prompt:
    """Return a copy of the workflow with these input values, by `node.input`.

    Text is converted if `as_text`.

    Ranges and choices are not checked here, but by the workflow validation. Raises InputError for
    an unknown node or input, for an input under two names, and for text that does not fit the input
    type.
    """
    # Batch rows share one workflow, so each gets a deep copy.
    changed: dict[str, Any] = copy.deepcopy(dict(workflow))
    keys: dict[tuple[str, str], str] = {}
    for key, value in values.items():
        node_id, name = target = _target(key, workflow)
        if keys.setdefault(target, key) != key:
            raise InputError(f"{keys[target]} and {key} are the same input: give one of them")
        node = changed[node_id]
        inputs = node.setdefault("inputs", {})
        known = sockets.get(node.get("class_type", ""))
        given = value
        # Workflow validation has a better message for an unknown class.
        if known is not None:
            socket = _socket(node, name, known)
            if as_text:
                given = _typed(key, value, socket, inputs.get(name))
            _check_type(key, given, socket)
        if nested_deeper(given, MOST_NESTED):
            raise InputError(f"{key}: the value is nested deeper than {MOST_NESTED} levels")
        inputs[name] = given
    return changed


def _target(key: str, workflow: Prompt) -> tuple[str, str]:
    """Return node id and input name. Both may contain dots. Raises InputError."""
    parts = key.split(".")
    splits = [(".".join(parts[:place]), ".".join(parts[place:])) for place in range(1, len(parts))]
    nodes = [_nodes(name, workflow) for name, _ in splits]
    for (_, socket), found in zip(splits, nodes, strict=True):
        if len(found) == 1:
            return found[0], socket
    if nodes[0]:
        name = splits[0][0]
        raise InputError(
            f"{key}: several nodes are of the class {name}: use an id, {', '.join(nodes[0])}"
        )
    classes = (node.get("class_type") for node in workflow.values())
    near = nearest(splits[0][0], [*workflow, *(name for name in classes if isinstance(name, str))])
    hint = f"; did you mean {near}?" if near else ""
    raise InputError(f"{key}: no such node; the workflow has {', '.join(workflow)}{hint}")


def _nodes(name: str, workflow: Prompt) -> list[str]:
    """Return the id `name` if there is such a node, else the ids of all nodes with class `name`."""
    if name in workflow:
        return [name]
    return [node_id for node_id, node in workflow.items() if node.get("class_type") == name]


def _socket(node: Mapping[str, Any], name: str, known: Mapping[str, Socket]) -> Socket | None:
    """Return the class's input description, or None if only the workflow has the input.

    Raises InputError.
    """
    if name in known:
        return known[name]
    above = known.get(name.partition(".")[0])
    if name in node.get("inputs", {}) or (above is not None and above.io_type.startswith(NESTED)):
        return None
    names = dict.fromkeys((*known, *node.get("inputs", {})))
    raise InputError(f"{node.get('class_type')} has no input {name}; {names_listed(name, names)}")


def _typed(key: str, text: str, socket: Socket | None, before: object) -> object:
    """Convert text to the input type or, if unknown, to the type of the current value."""
    if socket is None and isinstance(before, str):
        return text
    if socket is not None and socket.io_type in _TYPED_AS_TEXT:
        # Some choices are numbers.
        options = socket.options.get("options") or ()
        return next(
            (option for option in options if text not in options and str(option) == text), text
        )
    if socket is not None and socket.io_type == "BOOLEAN" and text.lower() in {"true", "false"}:
        return text.lower() == "true"  # as spreadsheets write it
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as err:
        shown = _shortened(text)
        if socket is not None and socket.io_type in _VALUES:
            raise InputError(
                f"{key} is {socket.io_type}, but '{shown}' is not {_VALUES[socket.io_type]}"
            ) from err
        kind = getattr(socket, "io_type", "not a text")
        raise InputError(f"{key} is {kind}, but '{shown}' is not a JSON value: {err}") from err


def _check_type(key: str, value: object, socket: Socket | None) -> None:
    """Refuse a constant that ComfyUI would convert to another value, such as "false" to true.

    Raises InputError.
    """
    if socket is None or isinstance(value, list):  # a link
        return
    _, fault = converted(socket, value)
    if fault is not None:
        raise InputError(
            f"{key} is {socket.io_type}, but {fault['extra_info']['exception_message']}"
        )


def _shortened(text: str) -> str:
    return shortened(text, _MAX_SHOWN)
