"""Batch targets: node inputs and workflow validation of a server or of this process.

Own checks of nodes run only on the server, except those of this pack's classes, which can run here. The faults found
here are a subset of the server's: a value that an own check might accept is not refused here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch

from ...host.embedded import (
    ComfyNode,
    EmbeddedHost,
    Folders,
    LoadImage,
    NodeProgress,
    NodeRules,
    Prompt,
    Socket,
    Workflow,
    load_workflow,
    nodes_by_id,
    sockets_of,
    validate_nodes,
)
from ...nodes import WanStreamExtension
from ..arguments import ArgumentError, check_models, device_of
from ..inputs import Sockets
from .backends.base import BatchBackend, UnreachableError
from .backends.embedded import EmbeddedBackend
from .backends.server import ObjectInfo, ServerBackend

OnProgress: TypeAlias = Callable[[NodeProgress], None]


@dataclass(frozen=True, kw_only=True)
class BatchTarget:
    """Server or process that runs a batch."""

    sockets: Sockets
    """Inputs of all node classes there."""
    faults: Callable[[Prompt], list[str]]
    """Returns the faults of a workflow, a line each."""
    unchecked: Callable[[Prompt], str]
    """Describes the checks that only a run can do; empty if there are none."""
    opened: Callable[[Path, OnProgress], AbstractContextManager[BatchBackend]]
    """`opened(folder, on_progress)` is the backend, open inside the `with`; it may save files in `folder`."""


def server_target(url: str, workflow: Prompt) -> BatchTarget:
    """Return the ComfyUI server at `url`. Raises ValueError if it is none, or lacks a node of the workflow."""
    backend = ServerBackend(url)
    try:
        version = backend.version()
        info = backend.object_info()
    except UnreachableError as err:
        raise ArgumentError(f"--server {url}: {err}; is ComfyUI running there?") from err
    missing = unknown_classes(workflow, info)
    if missing:
        raise ArgumentError("\n".join([f"the workflow cannot run on {url} (ComfyUI {version}):", *missing]))
    sockets = sockets_of_server(info)

    def faults(prompt: Prompt) -> list[str]:
        with own_checks() as folder:
            return [line.replace(folder, "output") for line in server_faults(prompt, info, sockets, own_nodes())]

    def unchecked(prompt: Prompt) -> str:
        others = sorted({node["class_type"] for node in prompt.values()} - own_nodes().keys())
        if not others:
            return ""
        return (
            f"only types, ranges and choices of {', '.join(others)} were checked: a node's own checks run only on the "
            "server"
        )

    opened = nullcontext(backend)
    return BatchTarget(sockets=sockets, faults=faults, unchecked=unchecked, opened=lambda folder, on_progress: opened)


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
        own=own,
        elsewhere=_elsewhere(own, sockets),
        others_refused=False,
    )


def _elsewhere(own: type[ComfyNode] | None, sockets: Mapping[str, Socket]) -> frozenset[str]:
    """Return the names of the inputs with other choices on the server than on this machine."""
    here = sockets_of(own.INPUT_TYPES()) if own is not None else {}
    shared = here.keys() & sockets.keys()
    return frozenset(
        name for name in shared if sockets[name].options.get("options") != here[name].options.get("options")
    )


@contextmanager
def own_checks() -> Iterator[str]:
    """Inside the `with` the own checks of this pack's nodes can run; yields their placeholder of an output folder."""
    # Checks of output names need a folder: the server's is not accessible, so an empty one replaces it. The server's
    # GPUs are not known either; the device is a CPU, for which no check limits the number of workers.
    with TemporaryDirectory() as temporary:
        empty = Path(temporary).resolve()
        folders = Folders(models=empty, output=empty, input=empty)
        with EmbeddedHost().opened(folders, device=torch.device("cpu")):
            yield str(empty)


@cache
def own_nodes() -> Mapping[str, type[ComfyNode]]:
    """Return the nodes of this pack by their `class_type`."""
    return nodes_by_id(asyncio.run(WanStreamExtension().get_node_list()))


def embedded_target(
    workflow: Prompt, *, models: Path, input_dir: Path, output: Path, device: str | None, strict: bool
) -> BatchTarget:
    """Return this process as a target. Raises ValueError for foreign nodes in the workflow, or without models."""
    check_models(models)
    chosen = device_of(device)
    own = own_nodes()
    classes = {**own, **nodes_by_id([LoadImage])}
    missing = unknown_classes(workflow, classes)
    if missing:
        hint = "only the nodes of this pack run without ComfyUI: start a server, and give its address with --server"
        raise ArgumentError("\n".join([hint, *missing]))

    def load(prompt: Prompt, host: EmbeddedHost, output: Path) -> Workflow:
        folders = Folders(models=models, output=output, input=input_dir)
        return load_workflow(prompt, host=host, nodes=[*own.values()], folders=folders, device=chosen, strict=strict)

    return BatchTarget(
        sockets={name: sockets_of(node.INPUT_TYPES()) for name, node in classes.items()},
        faults=lambda prompt: load(prompt, EmbeddedHost(), output).verdict.lines(),
        unchecked=lambda prompt: "",
        opened=lambda folder, on_progress: EmbeddedBackend(load, folder, on_progress),
    )
