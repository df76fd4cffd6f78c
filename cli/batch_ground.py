"""Where a batch runs, before anything does: what its nodes take, and what is wrong with a workflow there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..host.embedded_graph import Prompt
from .arguments import ArgumentError, check_models
from .batch_host import Host, UnreachableError
from .batch_jobs import Sockets
from .batch_server import ServerHost
from .comfy_client import ComfyClient
from .object_info import server_faults, sockets_of_server, unknown_classes

if TYPE_CHECKING:
    from ..host.embedded_door import NodeProgress

Progress = Callable[["NodeProgress"], None]


@dataclass(frozen=True, kw_only=True)
class Ground:
    """`sockets` are the inputs of all nodes there, `faults` says what is wrong with a workflow, a line each.

    `opened(made, on_progress)` is the host, open inside its `with`; it may leave files in the folder `made`.
    """

    sockets: Sockets
    faults: Callable[[Prompt], list[str]]
    opened: Callable[[Path, Progress], AbstractContextManager[Host]]


def server_ground(url: str, workflow: Prompt) -> Ground:
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
    def opened(made: Path, on_progress: Progress) -> Iterator[Host]:
        yield ServerHost(client, info)

    return Ground(sockets=sockets, faults=lambda prompt: server_faults(prompt, info, sockets), opened=opened)


def embedded_ground(
    workflow: Prompt, *, models: Path, input_dir: Path, output: Path, device: str | None, strict: bool = False
) -> Ground:
    """This process. Raises ValueError for a workflow with other nodes than ours, and where there are no models."""
    check_models(models)
    # Only here: neither torch nor our nodes are needed where a server computes.
    import torch

    from ..host.embedded_checks import sockets_of
    from ..host.embedded_graph import nodes_by_id
    from ..host.embedded_load_image import LoadImage
    from ..nodes import WanStreamExtension
    from .batch_embedded import EmbeddedHost, Surroundings

    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device cuda: this torch finds no CUDA device")
    nodes = asyncio.run(WanStreamExtension().get_node_list())
    classes = nodes_by_id([*nodes, LoadImage])
    missing = unknown_classes(workflow, classes)
    if missing:
        hint = "only the nodes of this pack run without ComfyUI: start one, and give its address with --server"
        raise ArgumentError("\n".join([hint, *missing]))
    computes = torch.device(device) if device else None
    around = Surroundings(nodes=nodes, models=models, input=input_dir, output=output, device=computes, strict=strict)
    return Ground(
        sockets={name: {socket.name: socket for socket in sockets_of(node)} for name, node in classes.items()},
        faults=around.faults,
        opened=lambda made, on_progress: EmbeddedHost(around, made, on_progress),
    )
