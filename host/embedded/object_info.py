"""Node classes as a ComfyUI server describes them (`/object_info`), and a workflow check with them.

The faults found here are a subset of the server's. A value is not refused here if a node's own
check might accept it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

from .adapter import EmbeddedHost
from .files import Folders
from .workflow.graph import Prompt
from .workflow.inputs import Sockets
from .workflow.io import ComfyNode
from .workflow.validate import NodeRules, Socket, Verdict, sockets_of, validate_nodes

ObjectInfo: TypeAlias = Mapping[str, Mapping[str, Any]]
"""A server's description of every node class."""

ELSEWHERE = Path("/wanstream-folder-on-the-server").absolute()
"""Stands for the server's folders when output names are checked. No such folder exists here.

It is at the root because messages show longer paths without their folders.
"""


def described_sockets(info: ObjectInfo) -> Sockets:
    """Return the inputs of all classes on a server."""
    return {name: sockets_of(node.get("input") or {}) for name, node in info.items()}


def faults_elsewhere(
    prompt: Prompt,
    info: ObjectInfo,
    own: Mapping[str, type[ComfyNode]],
    any_file: Mapping[str, str],
) -> list[str]:
    """Return the faults in a workflow on a server, one per line.

    Args:
        prompt: workflow with classes in `info`.
        info: the server's class descriptions.
        own: classes whose own checks can run here.
        any_file: by class, an input that accepts any file, not only the listed choices.
    """
    # The server's GPUs are unknown: the device is a CPU, because checks for one allow any number of
    # workers.
    folders = Folders(models=ELSEWHERE, output=ELSEWHERE, input=ELSEWHERE)
    host = EmbeddedHost()
    with host.opened(folders, device=torch.device("cpu")):
        classes = {node["class_type"] for node in prompt.values()}
        rules = {name: _rules(info[name], own.get(name), any_file.get(name)) for name in classes}
        if not any(each.is_output for each in rules.values()):
            return ["the workflow has no node that saves or shows anything"]
        lines = validate_nodes(prompt, rules, host.files).lines()
    return [line.replace(str(ELSEWHERE), "output") for line in lines]


def refusal_text(answer: Mapping[str, Any]) -> str:
    """Return the faults in a server's answer to a workflow.

    These are the node faults or, without any, the workflow fault.

    Raises LookupError, TypeError or AttributeError for any other answer.
    """
    error = answer.get("error")
    if error is not None and not isinstance(error, dict):
        return str(error)
    return "; ".join(
        Verdict(prompt={}, error=error, node_errors=answer.get("node_errors") or {}).lines()
    )


def _rules(info: Mapping[str, Any], own: type[ComfyNode] | None, any_file: str | None) -> NodeRules:
    sockets = sockets_of(info.get("input") or {})
    here: Mapping[str, Socket] = {}
    if own is not None:
        here = sockets_of(own.INPUT_TYPES())
    other_choices = [
        name
        for name in here.keys() & sockets.keys()
        if sockets[name].options.get("options") != here[name].options.get("options")
    ]
    return NodeRules(
        sockets=sockets,
        outputs=[
            "COMBO" if isinstance(kind, list) else str(kind) for kind in info.get("output") or ()
        ],
        is_output=bool(info.get("output_node")),
        own=own,
        elsewhere=frozenset(other_choices),
        unchecked=frozenset(filter(None, [any_file])),
        others_refused=False,
    )
