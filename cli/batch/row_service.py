"""Rows in a Ray actor's process: a queue before the embedded host, and files to read and write.

Nothing here depends on Ray. All methods may be called on any thread, and return at once. Rows run
on a separate thread, one after the other, so that the next one starts while the driver fetches the
previous row's files.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import psutil

from ...batch import (
    BrokenDeviceError,
    JobFailed,
    Lost,
    NoSuchFileError,
    Outcome,
    RefusedError,
    UnderWay,
    Unknown,
    UnsuitableError,
    is_full_disk,
    release_folder,
)
from ...distributed import resolve_path
from ...host import inside
from ...host.embedded import EmbeddedHost, NodeProgress, Prompt
from ...schema.refs import PathMap
from ...wan import ExpertsRegistry, open_pair
from ..options import LocalOptions
from .embedded_backend import EmbeddedBackend
from .row_messages import FINISHED, STOP_TIMEOUT_S, digest_of

TEMPORARY = f"wanstream-batch-{platform.node()}-"
"""Prefix of these processes' folders, before the process id. Machines may share their temporary
folder."""


class RowService:
    """Workflow queue in this process. The host keeps experts and texts between workflows.

    Args:
        device: this process's device.
        processes: number of such processes on this machine.
        strict: as `--strict`.
        models: folder on the driver's machine.
        input: folder on the driver's machine.
        marked: a folder in the driver's folder for embedded hosts' files. If this machine has it,
            this process saves files there.
        path_map: pairs of a folder on the driver's machine and a folder here.
    """

    def __init__(
        self,
        device: str,
        processes: int,
        *,
        strict: bool,
        models: str,
        input: str,
        marked: str,
        path_map: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._device = device
        self._strict = strict
        maps = tuple(PathMap(here=here, there=there) for here, there in path_map)
        self._models, self._input = (resolve_path(Path(folder), maps) for folder in (models, input))
        # Resolved later: the driver makes this folder after the start, and only existing candidates
        # count.
        self._marked = partial(resolve_path, Path(marked), maps)
        # The processes on one machine share a copy of each block in RAM, except on Windows, which
        # lacks the locks. A single process reads faster without the page cache, and may have more
        # RAM than a container has shared memory.
        shared = processes > 1 and sys.platform != "win32"
        self._host = EmbeddedHost(experts=ExpertsRegistry(partial(open_pair, shared=shared)))
        self._rows = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wanstream rows")
        self._jobs: dict[str, Future[Outcome]] = {}
        self._running: str | None = None
        self._interrupted: str | None = None
        self._progress: NodeProgress | None = None
        self._broken = False
        """True if the device has failed. This process can compute nothing any more."""
        # Reentrant: `_backend` calls `_output_folder`, which calls `_own_folder`.
        self._lock = threading.RLock()
        self._undo = ExitStack()
        self._own: Path | None = None
        self._output: Path | None = None
        self._backends: dict[Path, EmbeddedBackend] = {}

    def missing_inputs(self, inputs: Mapping[str, str]) -> list[str]:
        """Return the names in `inputs` (name -> SHA-256) that `write_input` has to send first."""
        folder = self._input_folder(inputs)
        return [name for name, digest in inputs.items() if not _has(folder, name, digest)]

    def write_input(self, name: str, offset: int, piece: bytes) -> None:
        """Write a piece of an input file. The first piece begins the file."""
        folder = self._own_folder()
        with self._named_disk(folder):
            _write(inside(folder / "input", name), offset, piece)

    def write_latent(self, prompt_id: str, name: str, offset: int, piece: bytes) -> None:
        """Write a piece of a latent for the workflow posted next under this id."""
        folder = self._output_folder()
        with self._named_disk(folder):
            _write(inside(folder / prompt_id, name), offset, piece)

    def faults(self, prompt: Prompt, inputs: Mapping[str, str]) -> list[str]:
        """Return a workflow's faults, a line each. Not to be called while workflows run."""
        return self._backend(self._input_folder(inputs)).faults(prompt)

    def post(self, prompt_id: str, prompt: Prompt, inputs: Mapping[str, str]) -> None:
        """Queue a workflow with all input files here. A second post under this id does nothing."""
        with self._lock:
            if prompt_id not in self._jobs:
                self._jobs[prompt_id] = self._rows.submit(
                    self._run, prompt_id, prompt, self._input_folder(inputs)
                )

    def outcome(self, prompt_id: str) -> Outcome:
        """Return a workflow's state until it is released.

        Raises UnsuitableError if this machine's disk is full, and OSError if the disk of the
        driver's folder is.
        """
        with self._lock:
            job = self._jobs.get(prompt_id)
            if job is None or job.cancelled():
                return Unknown()
            if job.done():
                return job.result()
            if self._running != prompt_id:
                return UnderWay(begun=False)
            return UnderWay(begun=True, progress=self._progress)

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from an output file. Raises NoSuchFileError.

        Returns fewer at the end of the file.
        """
        path = inside(self._output_folder(), name)
        try:
            with path.open("rb") as opened:
                opened.seek(offset)
                return opened.read(size)
        except FileNotFoundError as err:
            raise NoSuchFileError(
                f"{path} was removed from {platform.node()} before it was fetched"
            ) from err

    def withdraw(self, prompt_id: str) -> None:
        """Remove a workflow from the queue. Does nothing if it has started."""
        with self._lock:
            job = self._jobs.get(prompt_id)
            if job is not None and job.cancel():
                del self._jobs[prompt_id]

    def interrupt(self, prompt_id: str) -> None:
        """Stop a running workflow. Does nothing if it has ended."""
        with self._lock:
            if self._running == prompt_id:
                self._interrupted = prompt_id
                self._host.stop()

    def release(self, prompt_id: str) -> None:
        """Remove a workflow's outcome and files, after the end if it is running."""
        with self._lock:
            job = self._jobs.pop(prompt_id, None)
            output = self._output
        if job is not None and output is not None:
            # The callback runs at once if the workflow has ended.
            job.add_done_callback(lambda _: release_folder(output / prompt_id))

    def stop(self) -> None:
        """Stop the running workflow, cancel the others and release everything."""
        with self._lock:
            self._rows.shutdown(wait=False, cancel_futures=True)
            # `wait` would wait for cancelled ones.
            jobs = [job for job in self._jobs.values() if not job.cancelled()]
            self._interrupted = self._running
            self._host.stop()
        wait(jobs, timeout=STOP_TIMEOUT_S)
        # `_undo` removes folders used by a running workflow, so it comes after the wait.
        self._undo.close()

    def end(self) -> None:
        """End this process at once with a failure code, so that Ray starts another one."""
        # `_exit` drops buffered output.
        sys.stderr.flush()
        os._exit(1)

    def _run(self, prompt_id: str, prompt: Prompt, folder: Path) -> Outcome:
        # The driver posts the row again, in the next process.
        if self._broken:
            return Unknown()
        with self._lock:
            backend = self._backend(folder)
            self._running = prompt_id
            self._progress = None
        try:
            with self._named_disk(self._output_folder()):
                backend.post(prompt_id, prompt)
                return backend.outcome(prompt_id)
        except RefusedError as err:
            return JobFailed(reason=str(err))
        except BrokenDeviceError as err:
            self._broken = True
            # Without torch's advice on debugging. It takes several lines, and the log has it.
            reason = str(err.__cause__).partition("\n")[0]
            return Lost(reason=f"{reason} (on {platform.node()}, {self._device})")
        finally:
            with self._lock:
                self._running = None

    @contextmanager
    def _named_disk(self, folder: Path) -> Iterator[None]:
        """Name the machine in a full disk's error.

        Raises UnsuitableError for a disk that the driver does not use, so that other machines go
        on, else OSError.
        """
        try:
            yield
        except OSError as err:
            if not is_full_disk(err):
                raise
            # Causes are lost on the way to the driver, and with them the error number.
            found = folder if folder.exists() else folder.parent
            free = (
                f"on {platform.node()}, {shutil.disk_usage(found).free:,} bytes are free in "
                f"{folder}"
            )
            if folder != self._marked().parent:
                raise UnsuitableError(f"its disk is full: {free}: {err}") from None
            raise OSError(errno.ENOSPC, f"{err} ({free})") from None

    def _show(self, progress: NodeProgress) -> None:
        self._progress = progress
        # Again, because a host forgets a request from before the run.
        if self._interrupted is not None and self._interrupted == self._running:
            self._host.stop()

    def _backend(self, folder: Path) -> EmbeddedBackend:
        """Return the backend that reads input files from `folder`."""
        with self._lock:
            if folder not in self._backends:
                options = LocalOptions(models=self._models, input=folder, device=self._device)
                finished = folder / FINISHED
                # The driver's `--out`, for a message: files in it are sent.
                if folder == self._input:
                    finished = self._marked().parent.parent.parent
                # Without sockets: the driver checks the rows by them.
                backend = EmbeddedBackend(
                    options, self._host, {}, output=finished, strict=self._strict
                )
                self._undo.enter_context(backend.opened(self._output_folder(), self._show))
                self._backends[folder] = backend
            return self._backends[folder]

    def _input_folder(self, inputs: Mapping[str, str]) -> Path:
        """Return the machine's input folder if it has all these files, else one for sent files."""
        if all(_has(self._input, name, digest) for name, digest in inputs.items()):
            return self._input
        return self._own_folder() / "input"

    def _output_folder(self) -> Path:
        """Return the driver's folder if this machine has it, else a folder of this process."""
        with self._lock:
            if self._output is None:
                marked = self._marked()
                # The driver's folder may be on a share that is mounted read-only here.
                shared = marked.is_dir() and os.access(marked.parent, os.W_OK)
                self._output = marked.parent if shared else self._own_folder() / "output"
            return self._output

    def _own_folder(self) -> Path:
        with self._lock:
            if self._own is None:
                _sweep()
                with self._named_disk(Path(tempfile.gettempdir())):
                    self._own = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{os.getpid()}-"))
                self._undo.callback(shutil.rmtree, self._own, ignore_errors=True)
            return self._own


def _has(folder: Path, name: str, digest: str) -> bool:
    path = inside(folder, name)
    return path.is_file() and digest_of(path) == digest


def _write(path: Path, offset: int, piece: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # The first piece is written with "wb", to drop the rest from an earlier try.
    with path.open("r+b" if offset else "wb") as written:
        written.seek(offset)
        written.write(piece)


def _sweep() -> None:
    """Remove the folders of this user's killed processes."""
    for folder in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*-*"):
        pid = folder.name.removeprefix(TEMPORARY).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
