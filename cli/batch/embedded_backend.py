"""Embedded host as a batch backend: `outcome` runs the workflow in this process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ...batch import (
    BatchBackend,
    BrokenDeviceError,
    Ended,
    JobFailed,
    MadeFile,
    OnProgress,
    Outcome,
    RefusedError,
    Unknown,
    is_full_disk,
    output_files,
    own_nodes,
    release_folder,
)
from ...devices import is_broken_device
from ...host.embedded import (
    EmbeddedHost,
    Folders,
    NodeFailedError,
    Prompt,
    Sockets,
    Workflow,
    load_workflow,
)
from ...schema import Cancelled
from ..arguments import check_models, device_of
from ..options import LocalOptions
from ..terminal import print_bug


class EmbeddedBackend(BatchBackend):
    """Backend in this process. `outcome` blocks.

    So no workflow is running when the batch calls `interrupt`. The experts stay open between rows,
    until the end of the `with`.
    """

    name = "this process"
    window = 1

    def __init__(
        self,
        options: LocalOptions,
        host: EmbeddedHost,
        sockets: Sockets,
        *,
        output: Path,
        strict: bool,
    ) -> None:
        """Create a backend on `host`, with the `sockets` of the nodes.

        `output` is the folder for finished files, see `Folders`. Raises ArgumentError without
        models or the device.
        """
        check_models(options.models)
        self._device = device_of(options.device)
        self.sockets = sockets
        self._options = options
        self._strict = strict
        self._folder = output
        self._finished = output
        self._on_progress: OnProgress | None = None
        self._host = host
        self._posted: dict[str, Workflow] = {}

    @contextmanager
    def opened(self, folder: Path, on_progress: OnProgress) -> Iterator[None]:
        """Inside the `with`, workflows save files below `folder`, until they are fetched."""
        self._folder = folder
        self._on_progress = on_progress
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
        faults = workflow.verdict.lines()
        if faults:
            raise RefusedError("; ".join(faults))
        self._posted[prompt_id] = workflow

    def outcome(self, prompt_id: str) -> Outcome:
        if prompt_id not in self._posted:
            return Unknown()
        try:
            history = self._posted.pop(prompt_id).run(on_progress=self._on_progress)
        except NodeFailedError as err:
            # On a full disk every later row would fail, too.
            if is_full_disk(err):
                raise OSError(str(err)) from err  # ends the batch
            print_bug(err)
            if is_broken_device(err):
                raise BrokenDeviceError(
                    f"{err}\nrun the same command again, with a new process, to resume"
                ) from err
            return JobFailed(reason=str(err))
        except Cancelled:
            # A stop request: the row waits for the next command.
            return Unknown()
        made = output_files(history.outputs)
        # The files are in a folder named by `prompt_id`, and `fetch` starts in the parent folder.
        files = (replace(file, subfolder=str(Path(prompt_id, file.subfolder))) for file in made)
        return Ended(files=tuple(files))

    def fetch(self, file: MadeFile, part: Path) -> None:
        # A rename: both are below the output folder.
        (self._folder / file.subfolder / file.filename).replace(part)

    def withdraw(self, prompt_id: str) -> None:
        self._posted.pop(prompt_id, None)

    def release(self, prompt_id: str) -> None:
        release_folder(self._folder / prompt_id)

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
                # Not below `output`, because it changes with a restart.
                states=self._folder.parent / "states",
            ),
            device=self._device,
            strict=self._strict,
        )
