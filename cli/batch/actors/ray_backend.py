"""Actors of Ray as batch backends: one for each GPU, with the embedded host in its process.

Ray places the actors, ends them with this process, and restarts one that is lost. A restarted actor does not have the
workflows of the one before, so they are unknown there, and the batch posts their rows again.
"""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as LateError
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from ....devices import core_count, gpu_count
from ....distributed import WorkerLostError, open_services
from ....host import OutsideFolderError, annotated_name, check_ray, cluster, inside
from ....host.embedded import Prompt
from ....schema import IN_PROCESS, LOCAL, WorkersRef
from ...arguments import ArgumentError, check_models
from ...inputs import Sockets
from ...options import BatchOptions
from ..backend import (
    BatchBackend,
    Ended,
    Lost,
    MadeFile,
    OnProgress,
    Outcome,
    RayEndedError,
    UnreachableError,
    UnsuitableError,
)
from ..embedded_backend import embedded_sockets
from ..job_queue import MAX_LOSSES
from ..output_store import OutputStore
from ..rows import Row
from .row_service import FINISHED, PATH, STOP_TIMEOUT_S, RowReply, digest_of

LIMIT_S = 15.0
"""Seconds for the answer to a call, all of which are short, until the actor counts as unreachable."""
PIECE = 8 << 20
"""Bytes of a file in one message, which passes through Ray's object store."""
MAX_BROKEN = MAX_LOSSES + 1
"""Failures of its device in a row after which an actor gets no more rows: one more than a single row can cause."""
MIN_CPU_ACTORS = 2
"""Actors on CPUs that any machine may have, so that several can be tried out on one core."""


class Actor(Protocol):
    """Handle of a `RowService` in another process."""

    @property
    def rank(self) -> int:
        """Number of the actor, from 0."""

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call a method of the process's worker."""

    def serve(self, method: str, *args: Any) -> Future[Any]:
        """Call a method of the service with built-in types. The future raises its error, or WorkerLostError."""

    def restarted(self, started: Any) -> None:
        """Set the report of a new process."""

    def has_ray(self) -> bool:
        """Return False if the Ray that would start it again has ended."""


class RayBackend(BatchBackend):
    """Backend on one actor. It has two workflows, so that it computes one while files of the other are fetched."""

    window = 2

    def __init__(
        self,
        actor: Actor,
        options: BatchOptions,
        sockets: Sockets,
        mark: str,
        *,
        check_machine: Callable[[Any], None],
        stop: Callable[[], object],
    ) -> None:
        """Create a backend.

        Args:
            actor: handle of the actor.
            options: options of the batch.
            sockets: inputs of all nodes.
            mark: name of a folder by which the actor finds the output folder.
            check_machine: called after a restart, maybe on another machine; raises ValueError or OSError if that does
                not have the same models and versions.
            stop: stops all actors of the batch; it is called at the end of each backend.
        """
        self._actor, self._options, self.sockets, self._mark = actor, options, sockets, mark
        self.name = f"actor {actor.rank}"
        self._check_machine, self._stop = check_machine, stop
        self._folder = options.output
        self._on_progress: OnProgress | None = None
        self._lost = False
        self._broken = 0
        """Number of failures of its device since the last row that it has finished."""

    @contextmanager
    def opened(self, folder: Path, on_progress: OnProgress) -> Iterator[None]:
        """Inside the `with`, actors whose machine has `folder` save their files there, others send them."""
        self._folder, self._on_progress = folder, on_progress
        (folder / self._mark).mkdir(parents=True, exist_ok=True)
        try:
            yield
        finally:
            self._stop()

    def faults(self, prompt: Prompt) -> list[str]:
        lines: list[str] = self._call("faults", prompt, self._send_inputs(prompt))
        return lines

    def provide(self, prompt_id: str, latent: Path, name: str) -> None:
        self._send(latent, "write_latent", prompt_id, name)

    def post(self, prompt_id: str, prompt: Prompt) -> None:
        """Queue a workflow, which is validated when its turn comes."""
        self._call("post", prompt_id, prompt, self._send_inputs(prompt))

    def outcome(self, prompt_id: str) -> Outcome:
        reply: RowReply = self._call("outcome", prompt_id)
        if reply.progress is not None and self._on_progress is not None:
            self._on_progress(reply.progress)
        if isinstance(reply.outcome, Ended):
            self._broken = 0
        elif isinstance(reply.outcome, Lost):
            self._restart(reply.outcome.reason)
        return reply.outcome

    def fetch(self, file: MadeFile, part: Path) -> None:
        name = os.path.join(file.subfolder, file.filename)
        shared = self._folder / name
        part.unlink(missing_ok=True)  # an existing one could be a link
        if shared.is_file():
            # Not renamed: a fetch of several files that fails starts again with the first one.
            try:
                os.link(shared, part)
            except OSError:  # a file system without links; one that is full fails again
                shutil.copyfile(shared, part)
            return
        with part.open("xb") as written:
            piece = self._call("read", name, 0, PIECE)
            while len(piece) == PIECE:
                ahead = self._actor.serve("read", name, written.tell() + PIECE, PIECE)
                written.write(piece)
                piece = self._result(ahead)
            written.write(piece)

    def withdraw(self, prompt_id: str) -> None:
        self._call("withdraw", prompt_id)

    def interrupt(self, prompt_id: str) -> None:
        self._call("interrupt", prompt_id)

    def release(self, prompt_id: str) -> None:
        # Not awaited: an actor that is lost has released them.
        self._actor.serve("release", prompt_id)

    def _send_inputs(self, prompt: Prompt) -> dict[str, str]:
        """Send the input files of a workflow that the actor's machine lacks; return the digest of each by its name."""
        found = input_files(prompt, self._options.input, self._options.output)
        digests = {name: digest_of(path) for name, path in found.items()}
        missing = self._call("missing_inputs", digests) if digests else []
        for name in missing:
            self._send(found[name], "write_input", name)
        return digests

    def _send(self, path: Path, method: str, *args: Any) -> None:
        with path.open("rb") as file:
            for offset in range(0, max(1, path.stat().st_size), PIECE):
                self._call(method, *args, offset, file.read(PIECE))

    def _call(self, method: str, *args: Any) -> Any:
        if self._lost:
            self._reconnect()
        return self._result(self._actor.serve(method, *args))

    def _restart(self, reason: str) -> None:
        """End the process, so that Ray starts another one. Raises UnsuitableError after too many failures."""
        self._broken += 1
        if self._broken >= MAX_BROKEN:
            raise UnsuitableError(
                f"{self.name}: its device has failed {self._broken} times in a row, in a new process each time: check "
                f"it, or leave it out; the last error: {reason}"
            )
        self._actor.serve("end")  # not awaited: it does not answer
        self._lost = True

    def _reconnect(self) -> None:
        """Use the process that Ray has started. Raises UnreachableError, or UnsuitableError on an unlike machine."""
        try:
            self._actor.restarted(self._result(self._actor.call("started")))
            self._check_machine(self._actor)
        except (UnreachableError, RayEndedError):
            raise
        except (WorkerLostError, LateError) as err:
            self._check_ray(err)
            raise UnreachableError(f"{self.name} was restarted, and does not answer: {err}") from err
        except (ValueError, OSError, RuntimeError) as err:  # the last one from a device that is gone
            raise UnsuitableError(f"{self.name} was restarted, and cannot run the batch: {err}") from err
        self._lost = False

    def _result(self, answer: Future[Any]) -> Any:
        """Return the answer of the actor. Raises UnreachableError while Ray restarts it, or RayEndedError."""
        try:
            return answer.result(LIMIT_S)
        except WorkerLostError as err:
            self._lost = True
            self._check_ray(err)
            raise UnreachableError(f"{err}\nRay starts it again where a slot is free") from err
        except LateError as err:
            if self._lost:  # not started again
                self._check_ray(err)
            raise UnreachableError(f"{self.name} has not answered within {LIMIT_S:g} s") from err
        except UnsuitableError as err:
            raise UnsuitableError(f"{self.name}: {err}") from err

    def _check_ray(self, err: Exception) -> None:
        if not self._actor.has_ray():
            raise RayEndedError("Ray has ended on this machine: run the same command again to go on") from err


def input_files(prompt: Prompt, input: Path, output: Path) -> dict[str, Path]:
    """Return the files named by workflow inputs, in both folders, by name in an actor's input folder."""
    of_input = (input, "")
    of_output = (output, f"{FINISHED}/")
    # A name without a mark is an input file, or a latent or a calibration in the output folder.
    folders = {"input": (of_input,), "output": (of_output,), "": (of_input, of_output)}
    found: dict[str, Path] = {}
    for node in prompt.values():
        for value in node.get("inputs", {}).values():
            bare, kind = annotated_name(value if isinstance(value, str) else "", "")
            for folder, below in folders.get(kind, ()):
                with suppress(OutsideFolderError):
                    for name in (bare, bare.replace("\\", "/")):  # the second one as the embedded host reads it
                        path = inside(folder, name)
                        if os.path.isfile(path):  # unlike Path.is_file, for any text
                            found[f"{below}{name}"] = path
    return found


def model_files(workflow: Prompt, rows: Sequence[Row], models: Path) -> list[Path]:
    """Return the files and folders in `models` that the workflow or a row names."""
    values = [value for node in workflow.values() for value in node.get("inputs", {}).values()]
    values += [value for row in rows for value in row.values.values()]
    names = {value for value in values if isinstance(value, str) and value}
    kinds = sorted(kind for kind in models.iterdir() if kind.is_dir()) if models.is_dir() else []
    found = []
    for kind in kinds:
        for name in sorted(names):
            with suppress(OutsideFolderError):
                path = inside(kind, name)
                found += [path] if os.path.exists(path) else []
    return found


@contextmanager
def ray_backends(options: BatchOptions, workflow: Prompt, rows: Sequence[Row]) -> Iterator[tuple[RayBackend, ...]]:
    """Start an actor on every GPU, or as the options say, and end them after the `with`.

    Raises:
        ArgumentError: foreign nodes in the workflow.
        ValueError, OSError: as `open_services`; nothing was queued.
    """
    sockets = embedded_sockets(workflow)
    ref = _reference(str(options.ray))
    check_ray(ref)
    if ref.address == LOCAL:
        check_models(options.models)
        check_local(options, gpus=gpu_count(), cores=core_count())
    models = options.models.absolute()
    needed = [models, *model_files(workflow, rows, models)]
    mark, output = uuid.uuid4().hex, OutputStore.backend_folder_of(options.output.absolute())
    settings: Mapping[str, Any] = {
        "workflow": workflow,
        "strict": options.strict,
        "models": str(models),
        "input": str(options.input.absolute()),
        "marked": str(output / mark),
        "path_map": [(each.here, each.there) for each in ref.paths],
    }
    print(note_of_start(options.workers, ref.address), file=sys.stderr)
    with open_services(
        ref,
        (PATH, settings),
        device="cpu" if options.device == "cpu" else "cuda",
        count=options.workers,
        paths=needed,
    ) as (actors, check_machine):
        stop = cache(partial(stop_all, actors))
        try:
            yield tuple(
                RayBackend(actor, options, sockets, mark, check_machine=check_machine, stop=stop) for actor in actors
            )
        finally:
            print("ending the actors", file=sys.stderr)
            stop()  # a dry run does not open the backends
            shutil.rmtree(output / mark, ignore_errors=True)


def note_of_start(workers: int | None, address: str) -> str:
    """Return the note before the start, which takes many seconds."""
    number = workers or (gpu_count() if address == LOCAL else None)
    actors = "1 actor" if number == 1 else f"{number or 'the'} actors"
    return f"starting Ray and {actors}" if address == LOCAL else f"starting {actors} on the Ray cluster at {address}"


def stop_all(actors: Sequence[Actor]) -> None:
    """Stop the running workflows at the same time, and remove the folders of the actors."""
    # An actor that does not answer is ended afterwards in any case.
    wait([actor.serve("stop") for actor in actors], timeout=2 * STOP_TIMEOUT_S)


def check_ray_options(options: BatchOptions) -> None:
    """Raise ArgumentError for options that do not fit together."""
    if options.ray is None:
        if options.workers is not None:
            raise ArgumentError(f"--workers {options.workers} needs --ray, which starts them")
        return
    if options.servers:
        raise ArgumentError("--ray and --server: rows run on actors of Ray or on servers, so give one of them")
    if options.ray == IN_PROCESS:
        raise ArgumentError(f"--ray {IN_PROCESS}: leave out --ray to run the rows in this process")
    if options.device not in (None, "cpu", "cuda"):
        raise ArgumentError(
            f"--device {options.device} with --ray: Ray assigns one GPU to each actor; leave out --device, or give cpu"
        )
    if options.device == "cpu" and options.workers is None:
        raise ArgumentError("--device cpu with --ray: give the number of actors with --workers N")


def check_local(options: BatchOptions, *, gpus: int, cores: int) -> None:
    """Raise ArgumentError for more actors than this machine has GPUs or, for CPUs, cores."""
    if options.device == "cpu":
        most = max(cores, MIN_CPU_ACTORS)
        if (options.workers or 1) > most:
            raise ArgumentError(
                f"--workers {options.workers}: each actor on a CPU needs a core, and there are {cores}: give --workers "
                f"{most} at most"
            )
        return
    if not gpus:
        raise ArgumentError(
            "--ray: this machine has no GPU that Ray can assign: check that CUDA_VISIBLE_DEVICES hides none, name a "
            "cluster with GPUs (--ray ENTRY), or try it out on CPUs (--device cpu --workers N)"
        )
    if (options.workers or 1) > gpus:
        raise ArgumentError(
            f"--workers {options.workers}: each actor takes a GPU, and this machine has {gpus}: give --workers "
            f"{gpus} at most, or leave it out. If there are more, CUDA_VISIBLE_DEVICES hides them"
        )


def _reference(name: str) -> WorkersRef:
    entry = cluster(name, in_process=False)
    return WorkersRef(
        count=1,
        address=entry.address,
        token_file=entry.token_file,
        paths=entry.paths,
        beyond_loopback=entry.remote_machines,
    )
