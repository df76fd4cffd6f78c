"""Host API: the interface between nodes and their host, and the values that pass through it.

Nodes see only `HostApi`; `comfy/adapter.py` implements it with ComfyUI, `embedded/adapter.py` without. Names that come
from a graph are untrusted: a host returns paths inside the model and output folders, or raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..schema import ExpertsRef
from .folders import OutputFile

if TYPE_CHECKING:
    import torch

    from ..distributed import Driver, Pool
    from ..plan import AutoOffload, Machine, OffloadJob
    from ..schema import ExpertShape, Mesh, OffloadPolicy, WorkersRef
    from ..telemetry import QueueItemPhases
    from ..wan import ExpertPair
    from .auto_policy import PolicyChoice
    from .comfy.guider_steps import GuiderSettings
    from .workers_plan import SharedRun, WorkersPlan

SAVING_NODE = "wanstream_node"
"""The key in a saved file for the id of the node that saved it: the `prompt` next to it may have several that save."""


class NeedsComfyUIError(ValueError):
    """The embedded host was asked for what only ComfyUI can do; the message says what to use instead."""


class LoadedExperts(NamedTuple):
    """A pair for which there is room on a device, under a policy that may take less than was asked for."""

    pair: ExpertPair
    policy: OffloadPolicy
    device: torch.device


class ProgressBar(Protocol):
    """The progress bar of one node."""

    def update(self, done: int, denoised: torch.Tensor | None = None) -> None:
        """Set the bar to `done` of its total.

        `denoised` [B, C, T, h, w], normalised, is where the run would end by the present estimate: a host that shows
        previews makes one of it.

        Raises the host's interrupt when the user has stopped the run and the host checks for it here.
        """


class HostApi(Protocol):
    """The services of a host. All of them are called on the thread that executes the node, except `should_stop`."""

    def name(self) -> str:
        """What this host is and its version, for a reader."""

    def device(self) -> torch.device:
        """The device that computes."""

    def model_names(self, *folders: str) -> list[str]:
        """Sorted names of all models in these model folders; an entry of "diffusers" is a folder."""

    def model_path(self, name: str, *folders: str) -> Path:
        """The first of `folders` that holds `name`. Raises OutsideFolderError or ModelNotFoundError."""

    def output_file(self, prefix: str, extension: str, *, width: int = 0, height: int = 0) -> OutputFile:
        """The next free `<prefix>_<counter>_.<extension>`; its folder exists on return.

        `%width%`, `%height%` and `%year%` ... `%second%` in `prefix` are filled in. Raises OutsideFolderError.
        """

    def check_output(self, prefix: str) -> None:
        """Refuse a prefix under which `output_file` could not make a file; makes no folder itself.

        Raises OutsideFolderError or OutputNameError.
        """

    def graph_in_files(self) -> bool:
        """Whether the user lets output files carry the graph that made them."""

    def strict(self) -> bool:
        """True if the user wants an error instead of a warning for suspicious inputs."""

    def output_folder(self) -> Path:
        """The folder that `output_file` puts files into or below; it need not be there."""

    def temp_folder(self) -> Path:
        """An existing folder for files that may be lost."""

    def progress(self, total: int, node_id: str | None, *, unit: str | None = None) -> ProgressBar:
        """A new progress bar over `total` steps for the node with this id (None: the one that executes).

        With a `unit` the console of a server has a line for it too.
        """

    def should_stop(self) -> bool:
        """Whether the user wants the run to end. Asking changes nothing; any thread may ask."""

    def is_stop(self, error: BaseException) -> bool:
        """True for the host's own interrupt, as of `raise_if_stopped`; False for an error."""

    def raise_if_stopped(self) -> None:
        """Raise the host's own interrupt if the user wants the run to end; the wish counts as answered then."""

    def experts(self, ref: ExpertsRef) -> ExpertPair:
        """The open pair that `ref` names, kept open until another one is asked for or `free_experts` is called.

        Its dtype "auto" is resolved for `device()`.
        """

    def free_experts(self) -> None:
        """Close the open pair, if any."""

    def encode_texts(self, path: Path, texts: Sequence[str]) -> list[torch.Tensor]:
        """Embeddings of texts by the encoder at `path`, on the CPU; a host may keep them for equal texts.

        Raises what opening the encoder raises, and PromptError.
        """

    def plan_workers(self, run: SharedRun, ref: ExpertsRef) -> WorkersPlan:
        """Layout and policy of a run of the experts `ref` on workers; equal runs get the same ones.

        The machine is measured where it is not known yet and something is left to the planner. Raises MeshError for a
        layout that does not suit the run, and DoesNotFitError where there is too little memory.
        """

    def workers(self, ref: WorkersRef, mesh: Mesh) -> Driver:
        """The running workers that `ref` names, laid out so; kept until others are asked for or the host ends.

        Makes room for them: this process gives back what its own models hold. Raises RayMissingError, and what starting
        workers raises.
        """

    def worker_pool(self, ref: WorkersRef) -> Pool:
        """The running workers that `ref` names, each for itself; kept, started and refused as of `workers`."""

    def free_workers(self) -> None:
        """End the workers, if there are any."""

    def choose_policy(self, ref: ExpertsRef, policy: OffloadPolicy | AutoOffload, job: OffloadJob) -> PolicyChoice:
        """The policy itself; or, for an AutoOffload, the best one for `job` in the memory that is free here.

        The machine is measured where it is not known yet, which takes some seconds. Raises DoesNotFitError where there
        is too little memory for any policy.
        """

    def known_machine(self, ref: ExpertsRef, expert: ExpertShape) -> Machine | None:
        """What is known of the speed of this machine with the files of `ref`, None if nothing is. Measures nothing."""

    def run_id(self) -> str | None:
        """The id of the queue item that is executed (ComfyUI's prompt id); None outside one."""

    def ledger(self) -> QueueItemPhases:
        """Where the phases of the queue item that is executed are noted; one that nobody reads outside one."""

    def executing_node(self) -> str | None:
        """The id of the node that executes on this thread, as the graph knows it; None outside one."""

    def open_to_browsers(self) -> None:
        """Let pages follow what is announced; called once, before the host's server begins to listen."""

    def announce(self, event: str, payload: Mapping[str, Any]) -> None:
        """Tell whoever watches that something has happened; `payload` is plain JSON. Waits for nobody."""

    def dynamic_bytes(self) -> int | None:
        """Bytes of the device that the host's own dynamic VRAM holds for other models; None where there is none."""

    def make_room(self, wanted: int) -> int:
        """Bytes of the device that a node may compute in now; of RAM on a CPU.

        Other models go until there are as many as `wanted`, or none of them is left.
        """

    def load_experts(self, ref: ExpertsRef, policy: OffloadPolicy, *, working_bytes: int) -> LoadedExperts:
        """The pair that `ref` names, with room made for its weights and for `working_bytes` to compute in.

        Where the host has less room, fewer blocks stay resident than `policy` asks for; the log tells it with numbers.
        """

    def guider(
        self,
        ref: ExpertsRef,
        positive: Sequence[Any],
        negative: Sequence[Any],
        settings: GuiderSettings,
        *,
        flow_shift: float,
        policy: OffloadPolicy | AutoOffload,
    ) -> object:
        """A native GUIDER that runs both experts of `ref`, streamed as `policy` says, for the host's own samplers.

        What it runs is announced as shown at the node that executes now.

        Raises NeedsComfyUIError where there are no such samplers, and `RequestError` for what the experts cannot use.
        """

    def schedule_names(self) -> list[str]:
        """The names that `sigmas` knows; "simple" and "wan" are among them."""

    def sigmas(self, name: str, steps: int, denoise: float, flow_shift: float) -> torch.Tensor:
        """SIGMAS: the last `steps` + 1 values of that schedule over int(steps / denoise) steps, float32, on the CPU.

        Empty for a denoise of 0. Raises `RequestError` for numbers that make no schedule.
        """


RUNNING_HOST: ContextVar[HostApi | None] = ContextVar("wanstream_host", default=None)
"""The host whose node executes in this context; read by `current_host`."""


@contextmanager
def use_host(host: HostApi) -> Iterator[None]:
    """Make `host` the current one inside the `with`."""
    token = RUNNING_HOST.set(host)
    try:
        yield
    finally:
        RUNNING_HOST.reset(token)
