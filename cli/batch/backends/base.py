"""What a batch needs of whoever computes: a ComfyUI server, or the embedded host of this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from ....host.embedded import Prompt


class UnreachableError(OSError):
    """No answer, or half of one: what was asked for may have happened or not. Asking again later may help."""


class RefusedError(ValueError):
    """The host does not run a workflow; the message says why, in words."""


class NoSuchFileError(ValueError):
    """The host does not have a file that it says it made."""


@dataclass(frozen=True, kw_only=True)
class MadeFile:
    """A file in the host's output folder, and the node that saved it."""

    node_id: str
    filename: str
    subfolder: str


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """The workflow is in the host's queue."""

    begun: bool


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The workflow has run to its end; the files that it saved, in the order of its nodes."""

    files: tuple[MadeFile, ...]


@dataclass(frozen=True, kw_only=True)
class JobFailed:
    """The workflow ended early, for this reason."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Interrupted:
    """Somebody has stopped the workflow while it ran."""


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """The host knows no such workflow: it never arrived, was taken out of the queue, or was lost in a restart."""


Outcome: TypeAlias = UnderWay | Ended | JobFailed | Interrupted | Unknown


class BatchBackend(Protocol):
    """Runs workflows under ids that the batch gives them. Every method but `halt` may raise UnreachableError."""

    window: int
    """How many workflows it is given at once, so that it is never idle."""

    def post(self, prompt_id: str, prompt: Prompt) -> None:
        """Queue a workflow. Raises RefusedError unless all its outputs are going to be made."""

    def outcome(self, prompt_id: str) -> Outcome:
        """What has become of a workflow."""

    def fetch(self, file: MadeFile, part: Path) -> None:
        """Write the whole file to `part`. Raises NoSuchFileError, or OSError where it cannot be written."""

    def withdraw(self, prompt_id: str) -> None:
        """Take a workflow out of the queue, if it has not begun."""

    def interrupt(self, prompt_id: str) -> None:
        """Stop a workflow that has begun; nothing happens if it has ended."""

    def forget(self, prompt_id: str) -> None:
        """Its files are fetched, or not wanted."""

    def halt(self) -> None:
        """End an `outcome` that computes, soon. Called by a signal, at any time."""
