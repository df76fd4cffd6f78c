"""Ray actors as batch backends: one per GPU, each with an embedded host.

Ray places the actors, ends them with this process, and restarts a lost one. A restarted actor does
not have the earlier workflows. They are unknown there, and the batch posts their rows again.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as LateError
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

from ...batch import (
    MAX_LOSSES,
    BatchBackend,
    Ended,
    Lost,
    MadeFile,
    OnProgress,
    Outcome,
    OutputStore,
    UnderWay,
    UnreachableError,
    UnsuitableError,
)
from ...devices import core_count, gpu_count
from ...distributed import RayWorkerHandle, WorkerLostError, open_services
from ...host import OutsideFolderError, annotated_name, inside
from ...host.embedded import Prompt, Sockets
from ...host.workers import check_ray, cluster
from ...schema.refs import IN_PROCESS, LOCAL
from ..arguments import ArgumentError, check_models
from ..options import BatchOptions
from ..terminal import print_note
from .row_messages import FINISHED, PATH, STOP_TIMEOUT_S, digest_of

LIMIT_S = 15.0
"""Seconds for the answer to a call before the actor counts as unreachable. All calls are short."""
PIECE = 8 << 20
"""File bytes in one message. It passes through Ray's object store."""
MAX_BROKEN = MAX_LOSSES + 1
"""Device failures in a row before an actor gets no more rows: one more than a single row can
cause."""
MIN_CPU_ACTORS = 2
"""Actors on CPUs that any machine may have: one core is enough to try several."""


class RayEndedError(OSError):
    """The Ray behind all backends has ended. The batch cannot go on."""


class RayBackend(BatchBackend):
    """Backend on one actor.

    It has two workflows: it computes one while the other's files are fetched.
    """

    window = 2

    def __init__(
        self,
        actor: RayWorkerHandle,
        options: BatchOptions,
        sockets: Sockets,
        mark: str,
        *,
        check_machine: Callable[[Any], None],
        stop: Callable[[], object],
    ) -> None:
        """Create a backend.

        Args:
            actor: the actor's handle.
            options: batch options.
            sockets: inputs of all nodes.
            mark: name of a folder by which the actor finds the output folder.
            check_machine: called after a restart, maybe on another machine. Raises ValueError or
                OSError without the same models and versions there.
            stop: stops all the batch's actors. It is called at the end of each backend.
        """
        self._actor = actor
        self._options = options
        self.sockets = sockets
        self._mark = mark
        self.name = f"actor {actor.rank}"
        self._check_machine = check_machine
        self._stop = stop
        self._folder = options.output
        self._on_progress: OnProgress | None = None
        self._lost = False
        self._broken = 0
        """Number of device failures since the last finished row."""

    @contextmanager
    def opened(self, folder: Path, on_progress: OnProgress) -> Iterator[None]:
        """Inside the `with`, actors save files in `folder` if their machine has it.

        Other actors send them.
        """
        self._folder = folder
        self._on_progress = on_progress
        # An actor whose machine shows this folder shares the disk with the driver.
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
        """Queue a workflow. It is validated right before it runs."""
        self._call("post", prompt_id, prompt, self._send_inputs(prompt))

    def outcome(self, prompt_id: str) -> Outcome:
        outcome: Outcome = self._call("outcome", prompt_id)
        if isinstance(outcome, Ended):
            self._broken = 0
        elif isinstance(outcome, Lost):
            self._restart(outcome.reason)
        elif isinstance(outcome, UnderWay) and outcome.progress and self._on_progress:
            self._on_progress(outcome.progress)
        return outcome

    def fetch(self, file: MadeFile, part: Path) -> None:
        name = os.path.join(file.subfolder, file.filename)
        shared = self._folder / name
        part.unlink(missing_ok=True)  # an existing one could be a link
        if shared.is_file():
            # Not renamed: a failed fetch with several files starts again with the first one.
            try:
                os.link(shared, part)
            except OSError:  # a file system without links; a full one fails again
                shutil.copyfile(shared, part)
            return
        with part.open("xb") as written:
            piece = self._call("read", name, 0, PIECE)
            # A shorter piece is the last one.
            while len(piece) == PIECE:
                # Requested before the write: sending and writing overlap.
                ahead = self._actor.serve("read", name, written.tell() + PIECE, PIECE)
                written.write(piece)
                piece = self._result(ahead)
            written.write(piece)

    def withdraw(self, prompt_id: str) -> None:
        self._call("withdraw", prompt_id)

    def interrupt(self, prompt_id: str) -> None:
        self._call("interrupt", prompt_id)

    def release(self, prompt_id: str) -> None:
        # Not awaited: a lost actor has released them.
        self._actor.serve("release", prompt_id)

    def _send_inputs(self, prompt: Prompt) -> dict[str, str]:
        """Send a workflow's input files that the actor's machine lacks.

        Return their digests by name.
        """
        found = input_files(prompt, self._options.local.input, self._options.output)
        # Names alone are not enough: the machine may have another file there.
        digests = {name: digest_of(path) for name, path in found.items()}
        if digests:
            for name in self._call("missing_inputs", digests):
                self._send(found[name], "write_input", name)
        return digests

    def _send(self, path: Path, method: str, *args: Any) -> None:
        with path.open("rb") as file:
            # An empty file needs one message, too.
            for offset in range(0, max(1, path.stat().st_size), PIECE):
                self._call(method, *args, offset, file.read(PIECE))

    def _call(self, method: str, *args: Any) -> Any:
        if self._lost:
            self._reconnect()
        return self._result(self._actor.serve(method, *args))

    def _restart(self, reason: str) -> None:
        """End the process, so that Ray starts another one.

        Raises UnsuitableError after too many failures.
        """
        self._broken += 1
        if self._broken >= MAX_BROKEN:
            raise UnsuitableError(
                f"{self.name}: its device has failed {self._broken} times in a row, in a new "
                f"process each time: check it, or leave it out; the last error: {reason}"
            )
        self._actor.serve("end")  # not awaited: it does not answer
        self._lost = True

    def _reconnect(self) -> None:
        """Use the process that Ray has started.

        Raises UnreachableError, or UnsuitableError on an unlike machine.
        """
        try:
            self._actor.restarted(self._result(self._actor.call("started")))
            self._check_machine(self._actor)
        # Both are OSErrors. Otherwise they would count as an unlike machine below.
        except (UnreachableError, RayEndedError):
            raise
        except (WorkerLostError, LateError) as err:
            self._check_ray(err)
            raise UnreachableError(
                f"{self.name} was restarted, and does not answer: {err}"
            ) from err
        # RuntimeError: from a missing device.
        except (ValueError, OSError, RuntimeError) as err:
            raise UnsuitableError(
                f"{self.name} was restarted, and cannot run the batch: {err}"
            ) from err
        self._lost = False

    def _result(self, answer: Future[Any]) -> Any:
        """Return the actor's answer.

        Raises UnreachableError while Ray restarts the actor, or RayEndedError.
        """
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
            raise RayEndedError(
                "Ray has ended on this machine: run the same command again to go on"
            ) from err


def input_files(prompt: Prompt, input: Path, output: Path) -> dict[str, Path]:
    """Return the files in both folders that inputs name, by name in an actor's input folder."""
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
                    # The second one as the embedded host reads it.
                    for name in (bare, bare.replace("\\", "/")):
                        path = inside(folder, name)
                        if os.path.isfile(path):  # unlike Path.is_file, for any text
                            found[f"{below}{name}"] = path
    return found


def model_files(workflow: Prompt, rows: Iterable[Mapping[str, object]], models: Path) -> list[Path]:
    """Return the files and folders in `models` named by the workflow or by row values."""
    if not models.is_dir():
        return []
    inputs = (node.get("inputs", {}) for node in workflow.values())
    values = chain.from_iterable(each.values() for each in chain(inputs, rows))
    names = {value for value in values if isinstance(value, str) and value}
    kinds = sorted(kind for kind in models.iterdir() if kind.is_dir())
    found = []
    for kind in kinds:
        for name in sorted(names):
            with suppress(OutsideFolderError):
                path = inside(kind, name)
                if os.path.exists(path):
                    found.append(path)
    return found


@contextmanager
def ray_backends(
    options: BatchOptions, workflow: Prompt, sockets: Sockets, rows: Iterable[Mapping[str, object]]
) -> Iterator[tuple[RayBackend, ...]]:
    """Start an actor on every GPU, or as the options say, and end them after the `with`.

    Raises ValueError or OSError as `open_services`. Nothing was queued.
    """
    ref = cluster(str(options.actors.ray), in_process=False)
    check_ray(ref)
    if ref.address == LOCAL:
        check_models(options.local.models)
        check_local(options, gpus=gpu_count(), cores=core_count())
    # Absolute, because actors have other working folders.
    models = options.local.models.absolute()
    needed = [models, *model_files(workflow, rows, models)]
    mark = uuid.uuid4().hex
    output = OutputStore.backend_folder_of(options.output.absolute())
    # Built-in types only: a new process unpickles them before it imports this pack.
    settings: Mapping[str, Any] = {
        "strict": options.strict,
        "models": str(models),
        "input": str(options.local.input.absolute()),
        "marked": str(output / mark),
        "path_map": [(each.here, each.there) for each in ref.paths],
    }
    print_note(note_of_start(options.actors.workers, ref.address))
    with open_services(
        ref,
        (PATH, settings),
        device="cpu" if options.local.device == "cpu" else "cuda",
        count=options.actors.workers,
        paths=needed,
    ) as (actors, check_machine):
        # Once, although every backend calls it.
        stop = cache(partial(stop_all, actors))
        try:
            yield tuple(
                RayBackend(actor, options, sockets, mark, check_machine=check_machine, stop=stop)
                for actor in actors
            )
        finally:
            print_note("ending the actors")
            stop()  # a dry run does not open the backends
            shutil.rmtree(output / mark, ignore_errors=True)


def note_of_start(workers: int | None, address: str) -> str:
    """Return the note before the start. The start takes many seconds."""
    if address != LOCAL:
        return f"starting {_actors(workers)} on the Ray cluster at {address}"
    return f"starting Ray and {_actors(workers or gpu_count())}"


def _actors(count: int | None) -> str:
    return "1 actor" if count == 1 else f"{count or 'the'} actors"


def stop_all(actors: Sequence[RayWorkerHandle]) -> None:
    """Stop the running workflows at the same time, and remove the actors' folders."""
    # A silent actor is ended afterwards in any case.
    # `RowService.stop` waits for half of this time.
    wait([actor.serve("stop") for actor in actors], timeout=2 * STOP_TIMEOUT_S)


def check_ray_options(options: BatchOptions) -> None:
    """Raise ArgumentError for conflicting options."""
    actors = options.actors
    device = options.local.device
    if actors.ray is None:
        if actors.workers is not None:
            raise ArgumentError(f"--workers {actors.workers} needs --ray, which starts them")
        return
    if options.servers:
        raise ArgumentError(
            "--ray and --server: rows run on actors of Ray or on servers, so give one of them"
        )
    if actors.ray == IN_PROCESS:
        raise ArgumentError(f"--ray {IN_PROCESS}: leave out --ray to run the rows in this process")
    if device not in (None, "cpu", "cuda"):
        raise ArgumentError(
            f"--device {device} with --ray: Ray assigns one GPU to each actor; leave out --device, "
            "or give cpu"
        )
    if device == "cpu" and actors.workers is None:
        raise ArgumentError("--device cpu with --ray: give the number of actors with --workers N")


def check_local(options: BatchOptions, *, gpus: int, cores: int) -> None:
    """Raise ArgumentError for more actors than this machine has GPUs or, for CPUs, cores."""
    workers = options.actors.workers or 1
    if options.local.device == "cpu":
        most = max(cores, MIN_CPU_ACTORS)
        if workers > most:
            raise ArgumentError(
                f"--workers {workers}: each actor on a CPU needs a core, and there are {cores}: "
                f"give --workers {most} at most"
            )
        return
    if not gpus:
        raise ArgumentError(
            "--ray: this machine has no GPU that Ray can assign: check that CUDA_VISIBLE_DEVICES "
            "hides none, name a cluster with GPUs (--ray ENTRY), or try it out on CPUs (--device "
            "cpu --workers N)"
        )
    if workers > gpus:
        raise ArgumentError(
            f"--workers {workers}: each actor takes a GPU, and this machine has {gpus}: give "
            f"--workers {gpus} at most, or leave it out. If there are more, CUDA_VISIBLE_DEVICES "
            "hides them"
        )
