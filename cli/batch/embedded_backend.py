"""Embedded host as a batch backend: `outcome` runs the workflow in this process."""

from __future__ import annotations

import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ...devices import is_broken_device
from ...host.embedded import (
    CORE_NODES,
    EmbeddedHost,
    Folders,
    NodeFailedError,
    Prompt,
    Workflow,
    load_workflow,
    nodes_by_id,
    sockets_of,
    tidy_workflow,
)
from ...schema import Cancelled
from ..arguments import check_models, device_of
from ..inputs import Sockets
from ..options import BatchOptions
from .backend import (
    BatchBackend,
    BrokenDeviceError,
    Ended,
    JobFailed,
    MadeFile,
    OnProgress,
    Outcome,
    RefusedError,
    Unknown,
    check_classes,
    output_files,
    own_nodes,
)
from .folder.own_files import remove_tree
from .journal import is_full_disk
from .output_store import unfinished_latents


def embedded_workflow(workflow: Prompt) -> Prompt:
    """Return a workflow without what only ComfyUI's frontend needs, and print a note for each such part."""
    tidied = tidy_workflow(workflow, {**own_nodes(), **nodes_by_id(CORE_NODES)})
    for note in tidied.notes:
        print(f"note: {note}", file=sys.stderr)
    return tidied.prompt


def embedded_sockets(workflow: Prompt) -> Sockets:
    """Return the inputs of all nodes of the embedded host. Raises ArgumentError for foreign nodes in the workflow."""
    classes = {**own_nodes(), **nodes_by_id(CORE_NODES)}
    hint = "only the nodes of this pack run without ComfyUI: start a server, and give its address with --server"
    check_classes(workflow, classes, hint)
    return {name: sockets_of(node.INPUT_TYPES()) for name, node in classes.items()}


class EmbeddedBackend(BatchBackend):
    """Backend in this process. `outcome` blocks, so that no workflow is running when the batch calls `interrupt`.

    The experts are kept open between rows and closed at the end of the `with`."""

    name = "this process"
    window = 1

    def __init__(
        self, workflow: Prompt, options: BatchOptions, host: EmbeddedHost | None = None, finished: Path | None = None
    ) -> None:
        """Create a backend on `host`, by default a new one; `finished`: see `Folders`, by default the output folder.

        Raises ValueError for foreign nodes in the workflow, or without models.
        """
        check_models(options.models)
        self._device = device_of(options.device)
        self.sockets = embedded_sockets(workflow)
        self._options, self._folder = options, options.output
        self._finished = finished or options.output
        self._on_progress: OnProgress | None = None
        self._host = host or EmbeddedHost()
        self._posted: dict[str, Workflow] = {}

    @contextmanager
    def opened(self, folder: Path, on_progress: OnProgress) -> Iterator[None]:
        """Inside the `with` workflows save their files below `folder`, until they are fetched."""
        self._folder, self._on_progress = folder, on_progress
        try:
            yield
        finally:
            self._host.free_experts()

    def faults(self, prompt: Prompt) -> list[str]:
        return self._load(prompt, self._folder).verdict.lines()

    def provide(self, prompt_id: str, latent: Path, name: str) -> None:
        copied = self._folder / prompt_id / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(latent, copied)

    def post(self, prompt_id: str, prompt: Prompt) -> None:
        workflow = self._load(prompt, self._folder / prompt_id)
        if faults := workflow.verdict.lines():
            raise RefusedError("; ".join(faults))
        self._posted[prompt_id] = workflow

    def outcome(self, prompt_id: str) -> Outcome:
        if prompt_id not in self._posted:
            return Unknown()
        try:
            history = self._posted.pop(prompt_id).run(on_progress=self._on_progress)
        except NodeFailedError as err:
            if is_full_disk(err):
                raise OSError(str(err)) from err  # ends the batch
            if not isinstance(err.__cause__, ValueError | OSError):  # not a refusal but a bug, ours or a library's
                traceback.print_exception(err.__cause__)
            if is_broken_device(err):
                raise BrokenDeviceError(f"{err}\nrun the same command again, with a new process, to resume") from err
            return JobFailed(reason=str(err))
        except Cancelled:
            return Unknown()
        made = output_files(history.outputs)
        return Ended(files=tuple(replace(file, subfolder=str(Path(prompt_id, file.subfolder))) for file in made))

    def fetch(self, file: MadeFile, part: Path) -> None:
        (self._folder / file.subfolder / file.filename).replace(part)

    def withdraw(self, prompt_id: str) -> None:
        self._posted.pop(prompt_id, None)

    def release(self, prompt_id: str) -> None:
        folder = self._folder / prompt_id
        # A latent is kept, because its video does not exist yet.
        if folder.is_dir() and not unfinished_latents(folder):
            remove_tree(folder)

    def halt(self) -> None:
        self._host.stop()

    def _load(self, prompt: Prompt, output: Path) -> Workflow:
        """Validate a workflow whose files are saved below `output`."""
        return load_workflow(
            prompt,
            host=self._host,
            nodes=[*own_nodes().values()],
            folders=Folders(
                models=self._options.models,
                output=output,
                input=self._options.input,
                finished=self._finished,
                states=self._folder.parent / "states",  # not below `output`, which is another one after a restart
            ),
            device=self._device,
            strict=self._options.strict,
        )
