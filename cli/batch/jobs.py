"""From rows to what is queued: a workflow with the values of a row in it. Pure functions."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...host.embedded import MOST_NESTED, Prompt, Socket, converted, names_listed, nested_deeper
from ..overrides import ChangeError, node_named
from .rows import Row, RowError
from .sharing import node_traits

Sockets: TypeAlias = Mapping[str, Mapping[str, Socket]]
"""The inputs that each class of nodes describes: class -> name -> input."""

_TYPED_AS_TEXT = ("STRING", "COMBO")
_NESTED = "COMFY_"
"""What the types of inputs begin with that have further inputs below them, called input.further."""


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """One workflow to queue, and the rows that it serves."""

    prompt: Prompt
    rows: tuple[Row, ...]
    saves: Mapping[str, frozenset[str] | None]
    """By the hash of a row: the nodes whose files are that row's. None: all files are."""


Planner: TypeAlias = Callable[[Sequence[Row]], list[BatchJob]]
"""Makes jobs of rows that are known to fit the workflow; every row is in one of them."""


def single_jobs(workflow: Prompt, rows: Sequence[Row], sockets: Sockets) -> list[BatchJob]:
    """One job for each row."""
    return [BatchJob(prompt=with_values(workflow, row, sockets), rows=(row,), saves={row.hash: None}) for row in rows]


def with_values(workflow: Prompt, row: Row, sockets: Sockets) -> Prompt:
    """A copy of the workflow with the values of the row in it.

    Whether a value is allowed is left to the validation of the workflow. Raises RowError for a node or an input that
    the workflow does not have, and for text that is no value of the input's type.
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
            raise RowError(f"{key}: the value is nested more than {MOST_NESTED} deep")
        inputs[name] = given
    return changed


def work_of(prompt: Prompt, sockets: Sockets) -> str:
    """Return a text that is equal for workflows that make the same; titles and the spelling of numbers do not count."""
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
    """The node's id and the name of the input; both may have dots in them."""
    parts = key.split(".")
    splits = [(".".join(parts[:place]), ".".join(parts[place:])) for place in range(1, len(parts))]
    for name, socket in splits:
        try:
            return node_named(name, workflow), socket
        except ChangeError:
            continue
    try:
        return node_named(splits[0][0], workflow), splits[0][1]
    except ChangeError as err:
        raise RowError(f"{key}: {err}") from err


def _socket(node: Mapping[str, Any], name: str, known: Mapping[str, Socket]) -> Socket | None:
    """What the class says of the input; None for one that only the workflow knows. Raises RowError for neither."""
    if name in known:
        return known[name]
    above = known.get(name.partition(".")[0])
    if name in node.get("inputs", {}) or (above is not None and above.io_type.startswith(_NESTED)):
        return None
    names = dict.fromkeys((*known, *node.get("inputs", {})))
    raise RowError(f"{node.get('class_type')} has no input {name}; {names_listed(name, names)}")


def _typed(key: str, text: str, socket: Socket | None, before: object) -> object:
    """A CSV cell as the value that the input takes; where its type is not known, as what the workflow has there."""
    if socket is None and isinstance(before, str):
        return text
    if socket is not None and socket.io_type in _TYPED_AS_TEXT:
        # Some lists offer numbers.
        options = socket.options.get("options") or ()
        return next((option for option in options if text not in options and str(option) == text), text)
    if socket is not None and socket.io_type == "BOOLEAN" and text.lower() in {"true", "false"}:
        return text.lower() == "true"  # as spreadsheets write it
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as err:
        kind = "no text" if socket is None else socket.io_type
        raise RowError(f"{key} is {kind}, and '{text}' is no JSON value: {err}") from err
