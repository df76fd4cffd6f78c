"""Embedded host: runs API workflows of our nodes without ComfyUI."""

from __future__ import annotations

from .adapter import EmbeddedHost, Folders, NodeProgress
from .graph import MOST_NESTED, Link, Prompt, api_prompt, as_link, nested_deeper, nodes_by_id
from .io import ComfyNode
from .load_image import LoadImage
from .run import History, NodeFailedError, Workflow, load_workflow
from .validate import (
    Fault,
    Socket,
    Verdict,
    converted,
    exception_fault,
    fault,
    link_shape_fault,
    link_type_fault,
    missing_fault,
    names_listed,
    own_check,
    own_faults,
    sockets_of,
    value_fault,
)

__all__ = [
    "MOST_NESTED",
    "ComfyNode",
    "EmbeddedHost",
    "Fault",
    "Folders",
    "History",
    "Link",
    "LoadImage",
    "NodeFailedError",
    "NodeProgress",
    "Prompt",
    "Socket",
    "Verdict",
    "Workflow",
    "api_prompt",
    "as_link",
    "converted",
    "exception_fault",
    "fault",
    "link_shape_fault",
    "link_type_fault",
    "load_workflow",
    "missing_fault",
    "names_listed",
    "nested_deeper",
    "nodes_by_id",
    "own_check",
    "own_faults",
    "sockets_of",
    "value_fault",
]
