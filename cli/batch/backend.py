"""Interface of the backends of a batch: a ComfyUI server, or the embedded host of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from ...host.embedded import ComfyNode, NodeProgress, Prompt, nodes_by_id
from ...nodes import WanStreamExtension
from ..arguments import ArgumentError
from ..inputs import Sockets

OnProgress: TypeAlias = Callable[[NodeProgress], None]


class UnreachableError(OSError):
    """No response, or an incomplete one: the request may have been executed or not. A retry may succeed."""


class RayEndedError(OSError):
    """The Ray of all backends has ended: the batch cannot go on."""


class ForeignResponseError(ValueError):
    """Another program responds at the address of the backend. A retry may succeed while the backend restarts."""


class UnsuitableError(ValueError):
    """The backend cannot run the batch: it lacks a node, a model or free space, has another version, or is broken."""


class BrokenDeviceError(OSError):
    """The device of this process has failed, and its CUDA context with it: no row can be computed before a restart."""


class RefusedError(ValueError):
    """The backend refuses a workflow; the message contains the reason."""


class NoSuchFileError(ValueError):
    """The backend does not have a file that it has listed as output."""


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


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The workflow has finished; `files` are its output files, in the order of its nodes."""

    files: tuple[MadeFile, ...]


@dataclass(frozen=True, kw_only=True)
class JobFailed:
    """The workflow failed."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Interrupted:
    """The workflow was stopped by a user while it was running."""


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """The backend has no such workflow: it never arrived, was removed from the queue, or was lost in a restart."""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The workflow is lost with the process of the backend, which ends and is started again."""

    reason: str


Outcome: TypeAlias = UnderWay | Ended | JobFailed | Interrupted | Unknown | Lost


class BatchBackend(Protocol):
    """Runs workflows under ids chosen by the batch. Every method except `halt` may raise UnreachableError.

    Where a method has a default, that does nothing.
    """

    name: str
    """Unique name for messages."""
    address: str | None = None
    """Address under which a later command finds the same workflows; None: they end with this process."""
    window: int
    """Number of workflows to post at once, so that the backend is never idle."""
    sockets: Sockets
    """Inputs of all its node classes."""

    def faults(self, prompt: Prompt) -> list[str]:
        """Return the faults of a workflow, a line each."""

    def unchecked(self, prompt: Prompt) -> str:
        """Describe the checks that only a run can do; empty if there are none."""
        return ""

    def check(self) -> None:
        """Check again that it can run the workflow of the batch, after a time without responses.

        Raises UnreachableError, or UnsuitableError.
        """
        return

    def opened(self, folder: Path, on_progress: OnProgress) -> AbstractContextManager[object]:
        """Keep it ready to run workflows inside the `with`; it may save files in `folder`."""
        return nullcontext()

    def provide(self, prompt_id: str, latent: Path, name: str) -> None:
        """Copy a latent to `name` below the output folder, for the workflow that is posted next under this id.

        Raises RefusedError if it is too large, or OSError if it cannot be read or written here.
        """

    def post(self, prompt_id: str, prompt: Prompt) -> None:
        """Queue a workflow. Raises RefusedError unless all its outputs are valid."""

    def outcome(self, prompt_id: str) -> Outcome:
        """Return the state of a workflow; the embedded backend runs it in this call, and has its outcome only once."""

    def fetch(self, file: MadeFile, part: Path) -> None:
        """Write the whole file to `part`. Raises NoSuchFileError, or OSError if it cannot be written."""

    def withdraw(self, prompt_id: str) -> None:
        """Remove a workflow from the queue; does nothing if it has started."""

    def interrupt(self, prompt_id: str) -> None:
        """Stop a running workflow; does nothing if it has ended."""
        return

    def release(self, prompt_id: str) -> None:
        """Release the results of a workflow: its files are fetched or not needed."""

    def halt(self) -> None:
        """Request the end of a running `outcome`. Called by a signal handler, at any time."""
        return


def output_files(outputs: Mapping[str, Any]) -> tuple[MadeFile, ...]:
    """Return the files in the output folder; previews are in the temporary folder."""
    files: dict[MadeFile, None] = {}
    for node_id, shown in sorted(outputs.items()):
        for values in shown.values() if isinstance(shown, dict) else ():
            for value in values if isinstance(values, list) else ():
                if isinstance(value, dict) and value.get("type") == "output" and value.get("filename"):
                    # Converted to text, because nodes of other packs may return anything.
                    filename, subfolder = str(value["filename"]), str(value.get("subfolder") or "")
                    files[MadeFile(node_id=node_id, filename=filename, subfolder=subfolder)] = None
    return tuple(files)


@cache
def own_nodes() -> Mapping[str, type[ComfyNode]]:
    """Return the nodes of this pack by their `class_type`."""
    return nodes_by_id(asyncio.run(WanStreamExtension().get_node_list()))


def check_classes(prompt: Prompt, known: Container[object], hint: str) -> None:
    """Raise ArgumentError with the hint and a line for each node with an unknown class."""
    if missing := class_faults({node_id: node.get("class_type") for node_id, node in prompt.items()}, known):
        raise ArgumentError("\n".join([hint, *missing]))


def class_faults(classes: Mapping[str, object], known: Container[object]) -> list[str]:
    """Return a line for each node with an unknown class, and a question if none of this pack's nodes is known."""
    missing = {node_id: kind for node_id, kind in classes.items() if kind not in known}
    lines = [f"node {node_id}: unknown class {kind}" for node_id, kind in missing.items()]
    ours = own_nodes()
    if any(kind in ours for kind in missing.values()) and not any(kind in known for kind in ours):
        lines.append("is WanStream installed there?")
    return lines
