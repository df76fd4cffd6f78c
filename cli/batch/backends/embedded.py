"""Embedded host as a batch backend: `outcome` runs the workflow in this process."""

from __future__ import annotations

import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from ....host.embedded import EmbeddedHost, History, NodeFailedError, NodeProgress, Prompt, Workflow
from ....schema import Cancelled
from ..journal import FULL_DISK, FileError
from ..output_store import LATENT
from .base import Ended, JobFailed, MadeFile, Outcome, RefusedError, Unknown


class DiskFullError(FileError):
    """A node could not write its file because the disk is full, which ends the batch. `errno` is the node's."""


Load: TypeAlias = Callable[[Prompt, EmbeddedHost, Path], Workflow]
"""Validates a workflow for the host; its files are saved below the folder."""


class EmbeddedBackend:
    """`BatchBackend` in this process. The experts are kept open between rows and closed at the end of the `with`."""

    window = 1

    def __init__(self, load: Load, folder: Path, on_progress: Callable[[NodeProgress], None]) -> None:
        """Create a backend whose workflows save their files below `folder`, until they are fetched."""
        self._load = load
        self._folder = folder
        self._on_progress = on_progress
        self._host = EmbeddedHost()
        self._posted: dict[str, Workflow] = {}
        self._ended: dict[str, Ended] = {}

    def __enter__(self) -> EmbeddedBackend:
        return self

    def __exit__(self, *error: object) -> None:
        self._host.free_experts()

    def post(self, prompt_id: str, prompt: Prompt) -> None:
        workflow = self._load(prompt, self._host, self._folder / prompt_id)
        if faults := workflow.verdict.lines():
            raise RefusedError("; ".join(faults))
        self._posted[prompt_id] = workflow

    def outcome(self, prompt_id: str) -> Outcome:
        if prompt_id in self._ended:
            return self._ended[prompt_id]
        if prompt_id not in self._posted:
            return Unknown()
        try:
            history = self._posted.pop(prompt_id).run(on_progress=self._on_progress)
        except NodeFailedError as err:
            if isinstance(err.__cause__, OSError) and err.__cause__.errno in FULL_DISK:
                raise DiskFullError(err.__cause__.errno, str(err)) from err
            if not isinstance(err.__cause__, ValueError | OSError):  # not a refusal but a bug, ours or a library's
                traceback.print_exception(err.__cause__)
            return JobFailed(reason=str(err))
        except Cancelled:
            return Unknown()
        self._ended[prompt_id] = Ended(files=_files(prompt_id, history))
        return self._ended[prompt_id]

    def fetch(self, file: MadeFile, part: Path) -> None:
        (self._folder / file.subfolder / file.filename).replace(part)

    def withdraw(self, prompt_id: str) -> None:
        self._posted.pop(prompt_id, None)

    def interrupt(self, prompt_id: str) -> None:
        """Do nothing: `outcome` blocks, so no workflow is running when the batch calls this."""

    def release(self, prompt_id: str) -> None:
        self._ended.pop(prompt_id, None)
        folder = self._folder / prompt_id
        # A latent is kept, because its video does not exist yet.
        if folder.is_dir() and not any(folder.rglob(f"*{LATENT}")):
            shutil.rmtree(folder)

    def halt(self) -> None:
        self._host.stop()


def _files(prompt_id: str, history: History) -> tuple[MadeFile, ...]:
    return tuple(
        MadeFile(node_id=node_id, filename=file["filename"], subfolder=str(Path(prompt_id, file["subfolder"])))
        for node_id, shown in sorted(history.outputs.items())
        for values in shown.values()
        for file in values
        if isinstance(file, dict) and file.get("type") == "output"
    )
