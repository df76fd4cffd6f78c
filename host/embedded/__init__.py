"""Embedded host: runs API workflows of our nodes without ComfyUI."""

from .adapter import EmbeddedHost
from .events import NodeProgress
from .files import Folders
from .object_info import described_sockets, faults_elsewhere, refusal_text
from .run import History, NodeFailedError, Workflow, embedded_nodes, load_workflow
from .workflow.graph import Prompt, api_prompt, as_link, nodes_by_id
from .workflow.inputs import (
    InputError,
    Sockets,
    apply_overrides,
    class_sockets,
    names_an_input,
    with_inputs,
)
from .workflow.io import ComfyNode
from .workflow.validate import Verdict, converted, tidy_workflow

__all__ = [
    "ComfyNode",
    "EmbeddedHost",
    "Folders",
    "History",
    "InputError",
    "NodeFailedError",
    "NodeProgress",
    "Prompt",
    "Sockets",
    "Verdict",
    "Workflow",
    "api_prompt",
    "apply_overrides",
    "as_link",
    "class_sockets",
    "converted",
    "described_sockets",
    "embedded_nodes",
    "faults_elsewhere",
    "load_workflow",
    "names_an_input",
    "nodes_by_id",
    "refusal_text",
    "tidy_workflow",
    "with_inputs",
]
