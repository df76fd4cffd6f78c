"""Runs an API-format workflow without ComfyUI: validate, put the nodes in order, execute each once.

What a node can notice is as in ComfyUI: inference mode, hidden inputs, `ui` results in the history, and outputs that
fail validation are dropped if others pass. Nothing is kept from run to run but the open experts.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...schema import Cancelled
from .adapter import Folders, NodeProgress, embedded_host
from .graph import Prompt, nodes_by_id, plan_steps
from .io import ComfyNode, Hidden, HiddenHolder, NodeOutput
from .load_image import LoadImage
from .validate import InvalidWorkflowError, Verdict, validate_prompt


@dataclass(frozen=True, kw_only=True)
class History:
    """What a run leaves behind.

    `outputs`: the `ui` dictionary of every node that shows something. `results`: the outputs of the nodes that were to
    be kept. `node_errors`: the faults that made outputs drop out; empty if the whole workflow was valid.
    """

    outputs: Mapping[str, Mapping[str, list[Any]]]
    results: Mapping[str, tuple[Any, ...]]
    node_errors: Mapping[str, Mapping[str, Any]]


class NodeFailedError(RuntimeError):
    """A node raised while it ran; `__cause__` is what it raised."""

    def __init__(self, node_id: str, class_type: str, cause: Exception) -> None:
        kind = "" if isinstance(cause, ValueError | OSError) else f"{type(cause).__name__}: "
        super().__init__(f"node {node_id} ({class_type}): {kind}{cause}")
        self.node_id = node_id
        self.class_type = class_type


def validate_workflow(
    prompt: Prompt | None, nodes: Sequence[type[ComfyNode]], *, models: Path, input_dir: Path, output: Path = Path()
) -> Verdict:
    """Judge a workflow made of `nodes` and LoadImage against the files at hand. Runs nothing."""
    with embedded_host.opened(Folders(models=models, output=output, input=input_dir)):
        return validate_prompt(prompt, nodes_by_id([*nodes, LoadImage]))


def run_workflow(  # noqa: PLR0913 (all there is to say about a run, by name)
    prompt: Prompt | None,
    *,
    nodes: Sequence[type[ComfyNode]],
    models: Path,
    output: Path,
    input_dir: Path,
    on_progress: Callable[[NodeProgress], None] | None = None,
    extra_pnginfo: Mapping[str, Any] | None = None,
    keep: Collection[str] = (),
    device: torch.device | None = None,
    on_event: Callable[[str, Mapping[str, Any]], None] | None = None,
    strict: bool = False,
) -> History:
    """Run a workflow made of `nodes` and LoadImage; `keep` names nodes whose outputs the history shall hold.

    `device` None means a GPU if there is one. `on_event` is given what nodes announce. `strict` makes an error of what
    only looks wrong.

    Raises InvalidWorkflowError before anything runs, NodeFailedError, or RunStoppedError after `embedded_host.stop()`.
    """
    folders = Folders(models=models, output=output, input=input_dir)
    with embedded_host.opened(folders, on_progress, device, on_event, strict=strict), torch.inference_mode():
        by_id = nodes_by_id([*nodes, LoadImage])
        verdict = validate_prompt(prompt, by_id)
        if verdict.error is not None:
            raise InvalidWorkflowError(verdict)
        return _execute(verdict, by_id, extra_pnginfo, keep)


def _execute(
    verdict: Verdict,
    nodes: Mapping[str, type[ComfyNode]],
    extra_pnginfo: Mapping[str, Any] | None,
    keep: Collection[str],
) -> History:
    """Execute the nodes that the valid outputs need; a result is dropped after the last node that reads it."""
    live: dict[str, tuple[Any, ...]] = {}
    shown: dict[str, dict[str, list[Any]]] = {}
    kept: dict[str, tuple[Any, ...]] = {}
    for step in plan_steps(verdict.prompt, nodes, verdict.outputs):
        embedded_host.raise_if_stopped()
        node_id = step.node_id
        linked = {name: live[link.node_id][link.output] for name, link in step.links.items()}
        hidden = {Hidden.unique_id: node_id, Hidden.prompt: verdict.prompt, Hidden.extra_pnginfo: extra_pnginfo}
        output = _call(node_id, nodes[verdict.prompt[node_id]["class_type"]], {**step.constants, **linked}, hidden)
        live[node_id] = output.args
        if node_id in keep:
            kept[node_id] = output.args
        if output.ui is not None:
            ui = output.ui if isinstance(output.ui, Mapping) else output.ui.as_dict()
            shown[node_id] = {key: list(values) for key, values in ui.items()}
        for read in step.done_with:
            del live[read]
    return History(outputs=shown, results=kept, node_errors=verdict.node_errors)


def _call(node_id: str, node: type[ComfyNode], arguments: Mapping[str, Any], known: Mapping[Hidden, Any]) -> NodeOutput:
    """Execute one node on a copy of its class, as ComfyUI does, so that nothing can be left on the class."""
    schema = node.define_schema()
    holder = HiddenHolder(**{hidden.name: known[hidden] for hidden in schema.all_hidden()})
    running: type[ComfyNode] = type(node.__name__, (node,), {"hidden": holder})
    with embedded_host.node(node_id, schema.node_id):
        try:
            returned = running.execute(**arguments)
            return _as_output(asyncio.run(returned) if inspect.iscoroutine(returned) else returned, len(schema.outputs))
        except Cancelled:
            raise
        except Exception as err:
            raise NodeFailedError(node_id, schema.node_id, err) from err


def _as_output(returned: object, promised: int) -> NodeOutput:
    if isinstance(returned, NodeOutput):
        output = returned
    elif returned is None or isinstance(returned, tuple):
        output = NodeOutput(*(returned or ()))
    else:
        raise TypeError(f"a node returns NodeOutput, a tuple or None, not {type(returned).__name__}")
    if len(output.args) != promised:
        raise TypeError(f"{len(output.args)} results returned, {promised} outputs promised")
    return output
