"""Execution of API-format workflows without ComfyUI: validate, sort the nodes, execute each once.

As in ComfyUI, nodes run in inference mode and get hidden inputs, `ui` results are in the history,
and invalid outputs are dropped if others are valid. Results are not cached between runs. The host
only keeps the experts open.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...schema import Cancelled
from ..error_texts import folders_last
from .adapter import EmbeddedHost
from .events import OnProgress
from .files import Folders
from .load_image import LoadImage
from .load_video import GetVideoComponents, LoadVideo
from .workflow.graph import Prompt, nodes_by_id, plan_steps
from .workflow.io import ComfyNode, Hidden, HiddenHolder, NodeOutput
from .workflow.validate import InvalidWorkflowError, Verdict, validate_prompt

CORE_NODES: tuple[type[ComfyNode], ...] = (LoadImage, LoadVideo, GetVideoComponents)
"""ComfyUI nodes that workflows may contain next to our own."""


def embedded_nodes(nodes: Iterable[type[ComfyNode]]) -> dict[str, type[ComfyNode]]:
    """Return `nodes` and `CORE_NODES` by `class_type`."""
    return nodes_by_id([*nodes, *CORE_NODES])


@dataclass(frozen=True, kw_only=True)
class History:
    """Results from a run, by node id."""

    outputs: Mapping[str, Mapping[str, list[Any]]]
    """Each node's `ui` dictionary, if it has one."""
    results: Mapping[str, tuple[Any, ...]]
    """Outputs of the nodes in `keep`."""
    node_errors: Mapping[str, Mapping[str, Any]]
    """Faults in dropped outputs. Empty if the whole workflow was valid."""


class NodeFailedError(RuntimeError):
    """A node raised an exception, the `__cause__`."""

    def __init__(self, node_id: str, class_type: str, cause: Exception) -> None:
        kind = "" if isinstance(cause, ValueError | OSError) else f"{type(cause).__name__}: "
        super().__init__(folders_last(f"node {node_id} ({class_type}): {kind}{cause}"))
        self.node_id = node_id
        self.class_type = class_type


@dataclass(frozen=True, kw_only=True)
class Workflow:
    """A workflow validated for a host; see `load_workflow`."""

    host: EmbeddedHost
    nodes: Mapping[str, type[ComfyNode]]
    verdict: Verdict
    folders: Folders
    device: torch.device | None
    strict: bool

    def run(self, *, on_progress: OnProgress | None = None, keep: Collection[str] = ()) -> History:
        """Execute all nodes needed for the valid outputs.

        Args:
            on_progress: called with each node's progress, on this thread.
            keep: ids of nodes whose outputs are added to the history.

        Raises:
            InvalidWorkflowError: no workflow output is valid. Nothing was run.
            NodeFailedError: a node raised.
            Cancelled: `EmbeddedHost.stop` was called.
            StateError: the host is running another workflow.
        """
        if self.verdict.error is not None:
            raise InvalidWorkflowError(self.verdict)
        # Validation opened and closed the host, so another workflow may have run since.
        with (
            self.host.opened(self.folders, on_progress, self.device, strict=self.strict),
            torch.inference_mode(),
        ):
            return _execute(self, keep)


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
        prompt: workflow in API format. For None, the verdict has an error, as in ComfyUI.
        host: the host that will run it.
        nodes: node classes.
        folders: folders for models, inputs and outputs.
        device: compute device. None means a GPU if there is one.
        strict: raise an error instead of a warning for suspicious inputs.
    """
    by_id = embedded_nodes(nodes)
    with host.opened(folders, device=device, strict=strict):
        verdict = validate_prompt(prompt, by_id, host.files)
    return Workflow(
        host=host, nodes=by_id, verdict=verdict, folders=folders, device=device, strict=strict
    )


def _execute(workflow: Workflow, keep: Collection[str]) -> History:
    """Execute all nodes needed for the valid outputs.

    Free each result after the last node that reads it.
    """
    live: dict[str, tuple[Any, ...]] = {}
    shown: dict[str, dict[str, list[Any]]] = {}
    kept: dict[str, tuple[Any, ...]] = {}
    verdict = workflow.verdict
    nodes = workflow.nodes
    for step in plan_steps(verdict.prompt, nodes, verdict.outputs):
        workflow.host.events.raise_if_stopped()
        node_id = step.node_id
        linked = {name: live[link.node_id][link.output] for name, link in step.links.items()}
        hidden = {Hidden.unique_id: node_id, Hidden.prompt: verdict.prompt}
        node = nodes[verdict.prompt[node_id]["class_type"]]
        output = _call(workflow.host, node_id, node, {**step.constants, **linked}, hidden)
        live[node_id] = output.args
        if node_id in keep:
            kept[node_id] = output.args
        if output.ui is not None:
            shown[node_id] = {key: list(values) for key, values in output.ui.items()}
        for read in step.done_with:
            del live[read]
    return History(outputs=shown, results=kept, node_errors=verdict.node_errors)


def _call(
    host: EmbeddedHost,
    node_id: str,
    node: type[ComfyNode],
    arguments: Mapping[str, Any],
    hidden: Mapping[Hidden, Any],
) -> NodeOutput:
    """Execute one node on a copy of the class, as ComfyUI does. The class itself keeps no state."""
    schema = node.define_schema()
    holder = HiddenHolder(**{each.name: hidden.get(each) for each in schema.all_hidden()})
    running: type[ComfyNode] = type(node.__name__, (node,), {"hidden": holder})
    with host.events.node(node_id, schema.node_id):
        try:
            output: NodeOutput = running.execute(**arguments)
            if len(output.args) != len(schema.outputs):
                raise TypeError(
                    f"the node returned {len(output.args)} results, but has {len(schema.outputs)} "
                    "outputs"
                )
            return output
        except Cancelled:
            raise
        except Exception as err:
            raise NodeFailedError(node_id, schema.node_id, err) from err
