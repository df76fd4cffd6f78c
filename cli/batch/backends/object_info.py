"""Validation of workflows against a ComfyUI server's `/object_info`. Pure functions.

Own checks of nodes run only on the server, except those of this pack's classes, which can run here. The faults found
here are a subset of the server's: a value that an own check might accept is not refused here.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, TypeAlias

from ....host.embedded import ComfyNode, NodeRules, Prompt, Socket, own_check, sockets_of, validate_nodes
from ..rows import Sockets

ObjectInfo: TypeAlias = Mapping[str, Mapping[str, Any]]


def sockets_of_server(info: ObjectInfo) -> Sockets:
    """Return the inputs of every node class."""
    return {class_type: sockets_of(node.get("input") or {}) for class_type, node in info.items()}


def unknown_classes(prompt: Prompt, known: Container[str]) -> list[str]:
    """Return a line for each node with an unknown class."""
    return [
        f"node {node_id}: unknown class {node.get('class_type')}"
        for node_id, node in prompt.items()
        if node.get("class_type") not in known
    ]


def server_faults(
    prompt: Prompt, info: ObjectInfo, sockets: Sockets, own: Mapping[str, type[ComfyNode]] | None = None
) -> list[str]:
    """Return the faults of a workflow of known classes, a line each.

    `own` are the classes whose own checks can run here.
    """
    classes = {node["class_type"] for node in prompt.values()}
    rules = {name: _rules(info[name], sockets[name], (own or {}).get(name)) for name in classes}
    if not any(each.is_output for each in rules.values()):
        return ["the workflow has no node that saves or shows anything"]
    return validate_nodes(prompt, rules).lines()


def _rules(described: Mapping[str, Any], sockets: Mapping[str, Socket], own: type[ComfyNode] | None) -> NodeRules:
    return NodeRules(
        sockets=sockets,
        outputs=["COMBO" if isinstance(kind, list) else str(kind) for kind in described.get("output") or ()],
        is_output=bool(described.get("output_node")),
        check=None if own is None else own_check(own, _elsewhere(own, sockets)),
        others_refused=False,
    )


def _elsewhere(own: type[ComfyNode], sockets: Mapping[str, Socket]) -> frozenset[str]:
    """Return the names of the inputs with other choices on the server than on this machine."""
    here = {name: each.options.get("options") for name, each in sockets_of(own.INPUT_TYPES()).items()}
    shared = here.keys() & sockets.keys()
    return frozenset(name for name in shared if sockets[name].options.get("options") != here[name])
