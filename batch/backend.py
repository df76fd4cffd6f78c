"""Interface for batch backends: a ComfyUI server, or the embedded host in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from ..host.embedded import ComfyNode, NodeProgress, Prompt, Sockets, nodes_by_id
from ..nodes import WanStreamExtension
from .errors import SetupError

OnProgress: TypeAlias = Callable[[NodeProgress], None]


@dataclass(frozen=True, kw_only=True)
class MadeFile:
    """A file in the backend's output folder, and the node that saved it."""

    node_id: str
    filename: str
    subfolder: str


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """The workflow is in the backend's queue, or running if `begun`."""

    begun: bool
    progress: NodeProgress | None = None
    """Progress of the running node, for backends that cannot report it otherwise."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The workflow has finished. `files` are the output files, in node order."""

    files: tuple[MadeFile, ...]


@dataclass(frozen=True, kw_only=True)
class JobFailed:
    """The workflow failed."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Interrupted:
    """A user stopped the workflow while it was running."""


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """The backend has no such workflow.

    It never arrived, was removed from the queue, or was lost in a restart.
    """


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The workflow is lost with the backend's process, which ends and is started again."""

    reason: str


Outcome: TypeAlias = UnderWay | Ended | JobFailed | Interrupted | Unknown | Lost


class BatchBackend(Protocol):
    """Runs workflows under ids chosen by the batch.

    Every method except `halt` may raise UnreachableError. Methods with a default body do nothing.
    """

    name: str
    """Unique name for messages."""
    address: str | None = None
    """Address under which a later command finds the same workflows; None: they end with this
    process."""
    window: int
    """Number of workflows to post at once, so that the backend is never idle."""
    sockets: Sockets
    """Inputs of all node classes there."""

    def faults(self, prompt: Prompt) -> list[str]:
        """Return a workflow's faults, a line each."""

    def unchecked(self, prompt: Prompt) -> str:
        """Describe the checks that only a run can do; empty if there are none."""
        return ""

    def check(self) -> None:
        """Check again that it can run the batch's workflow, after a time without responses.

        Raises UnreachableError, or UnsuitableError.
        """
        return

    def opened(self, folder: Path, on_progress: OnProgress) -> AbstractContextManager[object]:
        """Keep it ready to run workflows inside the `with`. It may save files in `folder`."""
        return nullcontext()

    def provide(self, prompt_id: str, latent: Path, name: str) -> None:
        """Copy a latent to `name` below the output folder, for the next workflow under this id.

        Raises RefusedError if it is too large, or OSError if it cannot be read or written here.
        """

    def post(self, prompt_id: str, prompt: Prompt) -> None:
        """Queue a workflow. Raises RefusedError unless all its outputs are valid."""

    def outcome(self, prompt_id: str) -> Outcome:
        """Return a workflow's state.

        The embedded backend runs it in this call, and has the outcome only once.
        """

    def fetch(self, file: MadeFile, part: Path) -> None:
        """Write the whole file to `part`.

        Raises NoSuchFileError, or OSError if it cannot be written.
        """

    def withdraw(self, prompt_id: str) -> None:
        """Remove a workflow from the queue. Does nothing if it has started."""

    def interrupt(self, prompt_id: str) -> None:
        """Stop a running workflow. Does nothing if it has ended."""
        return

    def release(self, prompt_id: str) -> None:
        """Release a workflow's results: the files are fetched or not needed."""

    def halt(self) -> None:
        """Request the end of a running `outcome`. Called by a signal handler, at any time."""
        return


def output_files(outputs: Mapping[str, Any]) -> tuple[MadeFile, ...]:
    """Return the files in the output folder. Previews are in the temporary folder."""
    # A dict and not a set: it keeps the order of the nodes, and drops duplicates.
    files: dict[MadeFile, None] = {}
    # Sorted, because this order numbers the files, and nodes may run in any order.
    for node_id, shown in sorted(outputs.items()):
        if not isinstance(shown, dict):  # other packs' nodes may return anything
            continue
        for value in chain.from_iterable(
            values for values in shown.values() if isinstance(values, list)
        ):
            if isinstance(value, dict) and value.get("type") == "output" and value.get("filename"):
                subfolder = str(value.get("subfolder") or "")
                files[
                    MadeFile(node_id=node_id, filename=str(value["filename"]), subfolder=subfolder)
                ] = None
    return tuple(files)


@cache
def own_nodes() -> Mapping[str, type[ComfyNode]]:
    """Return this pack's nodes by `class_type`."""
    # asyncio.run fails inside a running event loop, so this is for commands only.
    return nodes_by_id(asyncio.run(WanStreamExtension().get_node_list()))


def check_classes(prompt: Prompt, known: Container[object], hint: str) -> None:
    """Raise SetupError with the hint and a line for each node with an unknown class."""
    missing = class_faults(
        {node_id: node.get("class_type") for node_id, node in prompt.items()}, known
    )
    if missing:
        raise SetupError("\n".join([hint, *missing]))


def class_faults(classes: Mapping[str, object], known: Container[object]) -> list[str]:
    """Return a line for each node with an unknown class.

    Adds a question if none of this pack's nodes is known.
    """
    missing = {node_id: kind for node_id, kind in classes.items() if kind not in known}
    lines = [f"node {node_id}: unknown class {kind}" for node_id, kind in missing.items()]
    ours = own_nodes()
    if any(kind in ours for kind in missing.values()) and not any(kind in known for kind in ours):
        lines.append("is WanStream installed there?")
    return lines
