"""Validation of workflows against a ComfyUI server's `/object_info`. Pure functions.

Own checks of nodes run only on the server, except those of this pack's classes, which can run here. The faults found
here are a subset of the server's: a value that an own check might accept is not refused here.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any, TypeAlias

from ....host.embedded import (
    ComfyNode,
    Fault,
    Prompt,
    Socket,
    converted,
    exception_fault,
    fault,
    link_shape_fault,
    link_type_fault,
    missing_fault,
    own_check,
    own_faults,
    sockets_of,
    value_fault,
)
from ..rows import Sockets

ObjectInfo: TypeAlias = Mapping[str, Mapping[str, Any]]

_KINDS = ("required", "optional")
# Options of choices that change while the server runs: nodes with such an input check the file themselves.
_GROWING = ("image_upload", "video_upload", "audio_upload", "file_upload", "remote")
_NESTED = "COMFY_"
_CHOICE = "COMBO"
_COMPARED = ("INT", "FLOAT", "STRING", "BOOLEAN", _CHOICE)
"""Types of inputs with generic checks; values of other types are checked only by their nodes."""


def sockets_of_server(info: ObjectInfo) -> Sockets:
    """Return the inputs of every node class."""
    return {class_type: {socket.name: socket for socket in _sockets(node)} for class_type, node in info.items()}


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
    lines = []
    for node_id, node in prompt.items():
        here = (own or {}).get(node["class_type"])
        for found in _node_faults(prompt, node, info, sockets[node["class_type"]], here):
            lines.append(f"node {node_id} ({node['class_type']}): {found['message']}: {found['details']}")
    if not any(info[node["class_type"]].get("output_node") for node in prompt.values()):
        lines.append("the workflow has no node that saves or shows anything")
    return lines


def _sockets(node: Mapping[str, Any]) -> Iterator[Socket]:
    for kind in _KINDS:
        # Tolerant of malformed descriptions: some packs have them, also for classes that the workflow does not use.
        described = (node.get("input") or {}).get(kind) or {}
        for name, (io_type, *rest) in ((name, of) for name, of in described.items() if of and isinstance(of, list)):
            options = dict(rest[0]) if rest and isinstance(rest[0], Mapping) else {}
            if isinstance(io_type, list):  # the older format of a choice
                io_type, options = "COMBO", {**options, "options": io_type}
            yield Socket(name=name, io_type=str(io_type), options=options, required=kind == "required")


def _node_faults(
    prompt: Prompt,
    node: Mapping[str, Any],
    info: ObjectInfo,
    sockets: Mapping[str, Socket],
    own: type[ComfyNode] | None,
) -> list[Fault]:
    """Return the faults of one node, last those of its own check, which runs only if the constants have valid types."""
    inputs = dict(node.get("inputs", {}))
    check = own_check(own) if own is not None else None
    # Checked against the server's choices; the own check, which has this machine's, gets None for them as for links.
    elsewhere = _of_the_server(own, sockets) if own is not None and check is not None else set[str]()
    faults, typed = [], True
    for socket in sockets.values():
        if socket.io_type.startswith(_NESTED):
            continue
        if socket.name not in inputs:
            found = missing_fault(socket)
        elif isinstance(inputs[socket.name], list):
            found = _link_fault(prompt, socket, inputs[socket.name], info)
        else:
            inputs[socket.name], found = converted(socket, inputs[socket.name])
            typed &= found is None
            if found is None and (socket.name in elsewhere or not (check and check.covers(socket.name))):
                found = _constant_fault(socket, inputs[socket.name])
        faults += [found] if found is not None else []
    if own is not None and check is not None and typed:
        try:
            faults += own_faults(own, check, {**inputs, **dict.fromkeys(elsewhere & inputs.keys())}, {})
        except Exception as err:  # noqa: BLE001 (a node's own check may raise anything; it is reported)
            faults.append(exception_fault(err))
    return faults


def _of_the_server(own: type[ComfyNode], sockets: Mapping[str, Socket]) -> set[str]:
    """Return the names of inputs with other choices on the server than on this machine, such as its Ray clusters."""
    here = {socket.name: socket.options.get("options") for socket in sockets_of(own) if socket.io_type == _CHOICE}
    return {name for name in here.keys() & sockets.keys() if sockets[name].options.get("options") != here[name]}


def _constant_fault(socket: Socket, value: object) -> Fault | None:
    if any(socket.options.get(key) for key in _GROWING) or socket.io_type not in _COMPARED:
        return None
    return value_fault(socket, value)


def _link_fault(prompt: Prompt, socket: Socket, link: list[Any], info: ObjectInfo) -> Fault | None:
    found = link_shape_fault(socket, link)
    if found is not None:
        return found
    source, index = link
    offered = info[prompt[source]["class_type"]].get("output", ()) if source in prompt else ()
    if not isinstance(index, int) or not -len(offered) <= index < len(offered):
        return fault("dangling_link", "Linked to an output that does not exist", f"{socket.name}: {link}")
    received = offered[index]
    return link_type_fault(socket, link, "COMBO" if isinstance(received, list) else str(received))
