"""Where a batch runs, before anything does: what its nodes take, and what is wrong with a workflow there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ...host.embedded import ComfyNode, Prompt, nodes_by_id
from ..arguments import ArgumentError, check_models
from .backends.base import BatchBackend, UnreachableError
from .backends.comfy_client import ComfyClient
from .backends.object_info import server_faults, sockets_of_server, unknown_classes
from .backends.server import ServerBackend
from .jobs import Sockets

if TYPE_CHECKING:
    from ...host.embedded import NodeProgress

OnProgress = Callable[["NodeProgress"], None]


@dataclass(frozen=True, kw_only=True)
class BatchTarget:
    """`sockets` are the inputs of all nodes there, `faults` says what is wrong with a workflow, a line each.

    `opened(made, on_progress)` is the host, open inside its `with`; it may leave files in the folder `made`.
    """

    sockets: Sockets
    faults: Callable[[Prompt], list[str]]
    unjudged: Callable[[Prompt], str]
    """Says what of a workflow only a run can judge; empty for nothing."""
    opened: Callable[[Path, OnProgress], AbstractContextManager[BatchBackend]]


def server_ground(url: str, workflow: Prompt) -> BatchTarget:
    """A ComfyUI server that has all nodes of the workflow. Raises ValueError for anything else at that address."""
    client = ComfyClient(url)
    try:
        version = client.version()
        info = client.object_info()
    except UnreachableError as err:
        raise ArgumentError(f"--server {url}: {err}; is ComfyUI running there?") from err
    missing = unknown_classes(workflow, info)
    if missing:
        raise ArgumentError("\n".join([f"the workflow cannot run on {url} (ComfyUI {version}):", *missing]))
    sockets = sockets_of_server(info)

    @contextmanager
    def opened(made: Path, on_progress: OnProgress) -> Iterator[BatchBackend]:
        yield ServerBackend(client, info)

    def faults(prompt: Prompt) -> list[str]:
        with own_checks() as (own, folder):
            return [line.replace(folder, "output") for line in server_faults(prompt, info, sockets, own)]

    def unjudged(prompt: Prompt) -> str:
        with own_checks() as (own, _):
            others = sorted({node["class_type"] for node in prompt.values()} - own.keys())
        if not others:
            return ""
        return (
            f"of {', '.join(others)} only types, ranges and choices were judged: a check that such a node makes itself "
            "runs on the server alone"
        )

    return BatchTarget(sockets=sockets, faults=faults, unjudged=unjudged, opened=opened)


@contextmanager
def own_checks() -> Iterator[tuple[Mapping[str, type[ComfyNode]], str]]:
    """The nodes of this pack, whose own checks can be run inside, and the path that stands for the output folder.

    There are none where torch is not installed.
    """
    try:
        own = _own_nodes()
    except ModuleNotFoundError as err:
        if err.name != "torch":
            raise
        yield {}, "output"
        return
    import torch

    from ...host.embedded import EmbeddedHost, Folders

    # Output names are judged by a folder: that of the server cannot be seen from here, and this one is empty. Nor can
    # its GPUs be counted from here; on a CPU no check limits them.
    with TemporaryDirectory() as folder:
        nowhere = Path(folder).resolve()
        folders = Folders(models=nowhere, output=nowhere, input=nowhere)
        with EmbeddedHost().opened(folders, device=torch.device("cpu")):
            yield own, str(nowhere)


@cache
def _own_nodes() -> Mapping[str, type[ComfyNode]]:
    from ...nodes import WanStreamExtension

    return nodes_by_id(asyncio.run(WanStreamExtension().get_node_list()))


def embedded_ground(
    workflow: Prompt, *, models: Path, input_dir: Path, output: Path, device: str | None, strict: bool = False
) -> BatchTarget:
    """This process. Raises ValueError for a workflow with other nodes than ours, and where there are no models."""
    check_models(models)
    # Only here: neither torch nor our nodes are needed where a server computes.
    import torch

    from ...host.embedded import LoadImage, sockets_of
    from ...nodes import WanStreamExtension
    from .backends.embedded import EmbeddedBackend, EmbeddedOptions

    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device cuda: this torch finds no CUDA device")
    nodes = asyncio.run(WanStreamExtension().get_node_list())
    classes = nodes_by_id([*nodes, LoadImage])
    missing = unknown_classes(workflow, classes)
    if missing:
        hint = "only the nodes of this pack run without ComfyUI: start one, and give its address with --server"
        raise ArgumentError("\n".join([hint, *missing]))
    computes = torch.device(device) if device else None
    around = EmbeddedOptions(nodes=nodes, models=models, input=input_dir, output=output, device=computes, strict=strict)
    return BatchTarget(
        sockets={name: {socket.name: socket for socket in sockets_of(node)} for name, node in classes.items()},
        faults=around.faults,
        unjudged=lambda prompt: "",
        opened=lambda made, on_progress: EmbeddedBackend(around, made, on_progress),
    )
