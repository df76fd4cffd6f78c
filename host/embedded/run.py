"""Execution of API-format workflows without ComfyUI: validate, sort the nodes, execute each once.

As in ComfyUI, nodes run in inference mode and get hidden inputs, `ui` results are in the history, and invalid outputs
are dropped if others are valid. Results are not cached between runs; the host only keeps the experts open.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...schema import Cancelled
from ..error_texts import folders_last
from .adapter import EmbeddedHost, Folders, NodeProgress
from .graph import Prompt, nodes_by_id, plan_steps
from .io import ComfyNode, Hidden, HiddenHolder, NodeOutput
from .load_image import LoadImage
from .load_video import GetVideoComponents, LoadVideo
from .validate import InvalidWorkflowError, Verdict, validate_prompt

CORE_NODES: tuple[type[ComfyNode], ...] = (LoadImage, LoadVideo, GetVideoComponents)
"""Nodes of ComfyUI that workflows of our nodes may have."""


@dataclass(frozen=True, kw_only=True)
class History:
    """Results of a run, by node id."""

    outputs: Mapping[str, Mapping[str, list[Any]]]
    """The `ui` dictionary of every node that has one."""
    results: Mapping[str, tuple[Any, ...]]
    """The outputs of the nodes in `keep`."""
    node_errors: Mapping[str, Mapping[str, Any]]
    """Faults of dropped outputs; empty if the whole workflow was valid."""


class NodeFailedError(RuntimeError):
    """A node raised an exception, the `__cause__`."""

    def __init__(self, node_id: str, class_type: str, cause: Exception) -> None:
        kind = "" if isinstance(cause, ValueError | OSError) else f"{type(cause).__name__}: "
        super().__init__(folders_last(f"node {node_id} ({class_type}): {kind}{cause}"))
        self.node_id = node_id
        self.class_type = class_type


@dataclass(frozen=True, kw_only=True)
class Workflow:
    """A workflow, validated for a host; see `load_workflow`."""

    host: EmbeddedHost
    nodes: Mapping[str, type[ComfyNode]]
    verdict: Verdict
    folders: Folders
    device: torch.device | None
    strict: bool

    def run(
        self,
        *,
        on_progress: Callable[[NodeProgress], None] | None = None,
        on_event: Callable[[str, Mapping[str, Any]], None] | None = None,
        extra_pnginfo: Mapping[str, Any] | None = None,
        keep: Collection[str] = (),
    ) -> History:
        """Execute the nodes that the valid outputs depend on.

        Args:
            on_progress: called with the progress of each node, on this thread.
            on_event: called with the events that nodes announce.
            extra_pnginfo: the hidden input of that name.
            keep: ids of nodes whose outputs are added to the history.

        Raises:
            InvalidWorkflowError: no output of the workflow is valid; nothing was run.
            NodeFailedError: a node raised.
            Cancelled: `EmbeddedHost.stop` was called.
            StateError: the host is running another workflow.
        """
        if self.verdict.error is not None:
            raise InvalidWorkflowError(self.verdict)
        with (
            self.host.opened(self.folders, on_progress, self.device, on_event, strict=self.strict),
            torch.inference_mode(),
        ):
            return _execute(self, extra_pnginfo, keep)


def load_workflow(
    prompt: Prompt | None,
    *,
    host: EmbeddedHost,
    nodes: Sequence[type[ComfyNode]],
    folders: Folders,
    device: torch.device | None = None,
    strict: bool = False,
) -> Workflow:
    """Validate a workflow of `nodes` and `CORE_NODES` against the files in `folders`. Runs nothing.

    Args:
        prompt: workflow in API format; None gets a verdict with an error, as in ComfyUI.
        host: the host that will run it.
        nodes: the node classes.
        folders: folders of models, inputs and outputs.
        device: the compute device; None: a GPU if there is one.
        strict: raise an error instead of a warning for suspicious inputs.
    """
    by_id = nodes_by_id([*nodes, *CORE_NODES])
    with host.opened(folders, device=device, strict=strict):
        verdict = validate_prompt(prompt, by_id)
    return Workflow(host=host, nodes=by_id, verdict=verdict, folders=folders, device=device, strict=strict)


def _execute(workflow: Workflow, extra_pnginfo: Mapping[str, Any] | None, keep: Collection[str]) -> History:
    """Execute the nodes that the valid outputs depend on; free each result after the last node that reads it."""
    live: dict[str, tuple[Any, ...]] = {}
    shown: dict[str, dict[str, list[Any]]] = {}
    kept: dict[str, tuple[Any, ...]] = {}
    verdict, nodes = workflow.verdict, workflow.nodes
    for step in plan_steps(verdict.prompt, nodes, verdict.outputs):
        workflow.host.raise_if_stopped()
        node_id = step.node_id
        linked = {name: live[link.node_id][link.output] for name, link in step.links.items()}
        hidden = {Hidden.unique_id: node_id, Hidden.prompt: verdict.prompt, Hidden.extra_pnginfo: extra_pnginfo}
        node = nodes[verdict.prompt[node_id]["class_type"]]
        output = _call(workflow.host, node_id, node, {**step.constants, **linked}, hidden)
        live[node_id] = output.args
        if node_id in keep:
            kept[node_id] = output.args
        if output.ui is not None:
            ui = output.ui if isinstance(output.ui, Mapping) else output.ui.as_dict()
            shown[node_id] = {key: list(values) for key, values in ui.items()}
        for read in step.done_with:
            del live[read]
    return History(outputs=shown, results=kept, node_errors=verdict.node_errors)


def _call(
    host: EmbeddedHost, node_id: str, node: type[ComfyNode], arguments: Mapping[str, Any], hidden: Mapping[Hidden, Any]
) -> NodeOutput:
    """Execute one node on a copy of its class, as ComfyUI does, so that no state can stay on the class."""
    schema = node.define_schema()
    holder = HiddenHolder(**{each.name: hidden[each] for each in schema.all_hidden()})
    running: type[ComfyNode] = type(node.__name__, (node,), {"hidden": holder})
    with host.node(node_id, schema.node_id):
        try:
            returned = running.execute(**arguments)
            return _as_output(asyncio.run(returned) if inspect.iscoroutine(returned) else returned, len(schema.outputs))
        except Cancelled:
            raise
        except Exception as err:
            raise NodeFailedError(node_id, schema.node_id, err) from err


def _as_output(returned: object, expected: int) -> NodeOutput:
    if isinstance(returned, NodeOutput):
        output = returned
    elif returned is None or isinstance(returned, tuple):
        output = NodeOutput(*(returned or ()))
    else:
        raise TypeError(f"a node returns NodeOutput, a tuple or None, not {type(returned).__name__}")
    if len(output.args) != expected:
        raise TypeError(f"the node returned {len(output.args)} results, but has {expected} outputs")
    return output
