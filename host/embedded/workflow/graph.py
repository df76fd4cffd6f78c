"""API-format workflows: nodes by id, with constants or links as inputs. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from ...input_values import shown
from .io import ComfyNode

Prompt: TypeAlias = Mapping[str, Mapping[str, Any]]
"""`{node id: {"class_type": ..., "inputs": {name: constant or [node id, output index]}}}`."""


MOST_NESTED = 100
"""Maximum nesting of lists and objects in an input. Copying and serialising recurse once per
level."""


_NO_NODE = "remove it, or export the workflow again with Workflow > Export (API)"


class WorkflowFormatError(ValueError):
    """The document is not an API-format workflow."""


class UnsupportedNodeError(ValueError):
    """A node class was built for another ComfyUI."""


class Link(NamedTuple):
    """Output number `output` on the node `node_id`."""

    node_id: str
    output: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """One node in a run, with constant inputs and links."""

    node_id: str
    constants: Mapping[str, Any]
    links: Mapping[str, Link]
    done_with: tuple[str, ...]
    """Nodes whose results no later step reads."""


def api_prompt(document: object) -> Prompt:
    """Return the workflow in a parsed JSON document: itself or a `POST /prompt` body.

    Raises WorkflowFormatError for anything else, such as a workflow in canvas format.
    """
    prompt = document.get("prompt", document) if isinstance(document, dict) else document
    if not isinstance(prompt, dict):
        raise WorkflowFormatError(
            "this is not a workflow: an object with one entry per node is expected"
        )
    if isinstance(prompt.get("nodes"), list):
        raise WorkflowFormatError(
            "this workflow is in the canvas format: save it with Workflow > Export (API)"
        )
    for node_id, node in prompt.items():
        if not isinstance(node, dict):
            raise WorkflowFormatError(
                f"node '{node_id}' is {shown(node)}, and not an object with 'class_type' and "
                f"'inputs': {_NO_NODE}"
            )
        if "class_type" not in node and "inputs" not in node:
            raise WorkflowFormatError(
                f"node '{node_id}' has no 'class_type' and no 'inputs': {_NO_NODE}"
            )
        if not isinstance(node.get("inputs", {}), dict):
            raise WorkflowFormatError(
                f"node '{node_id}': the inputs are {shown(node['inputs'])}, and not an object of "
                "names and values"
            )
        if nested_deeper(node, MOST_NESTED):
            raise WorkflowFormatError(
                f"node '{node_id}' has values nested deeper than {MOST_NESTED} levels"
            )
        if not isinstance(node.get("class_type"), str | None):
            raise WorkflowFormatError(
                f"node '{node_id}': class_type {node['class_type']!r:.80} is not the name of a "
                "class"
            )
    return prompt


def class_of(node: Mapping[str, Any]) -> str | None:
    """Return a node's class, or None without a valid one."""
    class_type = node.get("class_type")
    if isinstance(class_type, str):
        return class_type
    return None


def nested_deeper(value: object, most: int) -> bool:
    """Return True if lists and objects in a parsed JSON value are nested more than `most` deep."""
    level = [value]
    for _ in range(most + 1):
        below: list[object] = []
        for each in level:
            if isinstance(each, dict):
                below += each.values()
            elif isinstance(each, list):
                below += each
        level = below
        if not level:
            return False
    return True


def as_link(value: object) -> Link | None:
    """Return an input value as a link, or None for a constant."""
    if (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], int | float)
    ):
        return Link(*value)
    return None


def nodes_by_id(nodes: Iterable[type[ComfyNode]]) -> dict[str, type[ComfyNode]]:
    """Return the node classes by `class_type`. Raises UnsupportedNodeError."""
    by_id = {}
    for node in nodes:
        if not issubclass(node, ComfyNode):
            raise UnsupportedNodeError(
                f"{node.__name__} was built for the ComfyUI that this Python can import: run it in "
                "ComfyUI, or start Python in another folder"
            )
        by_id[node.define_schema().node_id] = node
    return by_id


def plan_steps(
    prompt: Prompt, nodes: Mapping[str, type[ComfyNode]], outputs: Iterable[str]
) -> tuple[Step, ...]:
    """Return every node that `outputs` depend on, once, after its sources.

    `nodes` are the classes by `class_type`. The workflow must be valid, without cycles and dangling
    links. Undeclared inputs are dropped.
    """
    constants: dict[str, dict[str, Any]] = {}
    links: dict[str, dict[str, Link]] = {}
    for node_id, node in prompt.items():
        declared = {socket.id for socket in nodes[node["class_type"]].define_schema().inputs}
        constants[node_id] = {}
        links[node_id] = {}
        for name, value in node.get("inputs", {}).items():
            link = as_link(value)
            if name in declared and link is None:
                constants[node_id][name] = value
            elif name in declared and link is not None:
                links[node_id][name] = link
    sources = {
        node_id: [link.node_id for link in given.values()] for node_id, given in links.items()
    }
    order = execution_order(sources, outputs)
    # A result without a reader is freed after the node itself.
    last_reader = {node_id: node_id for node_id in order}
    last_reader |= {source: reader for reader in order for source in sources[reader]}
    return tuple(
        Step(
            node_id=node_id,
            constants=constants[node_id],
            links=links[node_id],
            done_with=tuple(read for read in order if last_reader[read] == node_id),
        )
        for node_id in order
    )


def execution_order(
    sources: Mapping[str, Iterable[str]], outputs: Iterable[str]
) -> tuple[str, ...]:
    """Return every node that `outputs` depend on, each after the nodes it reads (`sources`)."""
    order: dict[str, None] = {}
    pending = [*outputs][::-1]
    while pending:
        unmet = [source for source in sources[pending[-1]] if source not in order]
        if unmet:
            pending += unmet[::-1]
        else:
            order[pending.pop()] = None
    return tuple(order)
