"""Embedded host: runs API workflows of our nodes without ComfyUI."""

from __future__ import annotations

from .adapter import EmbeddedHost, Folders, NodeProgress
from .graph import MOST_NESTED, Link, Prompt, api_prompt, as_link, nested_deeper, nodes_by_id
from .io import ComfyNode
from .near_names import names_listed, nearest
from .run import CORE_NODES, History, NodeFailedError, Workflow, load_workflow
from .validate import (
    NESTED,
    NodeRules,
    Socket,
    Verdict,
    converted,
    sockets_of,
    tidy_workflow,
    validate_nodes,
)

__all__ = [
    "CORE_NODES",
    "MOST_NESTED",
    "NESTED",
    "ComfyNode",
    "EmbeddedHost",
    "Folders",
    "History",
    "Link",
    "NodeFailedError",
    "NodeProgress",
    "NodeRules",
    "Prompt",
    "Socket",
    "Verdict",
    "Workflow",
    "api_prompt",
    "as_link",
    "converted",
    "load_workflow",
    "names_listed",
    "nearest",
    "nested_deeper",
    "nodes_by_id",
    "sockets_of",
    "tidy_workflow",
    "validate_nodes",
]
