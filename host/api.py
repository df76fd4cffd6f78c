"""Host API: the interface between nodes and their host, and the values passed through it.

`current_host` returns the executing node's host, so that several hosts can run in one process.

Nodes see only `HostApi`. `comfy/adapter.py` implements it with ComfyUI, `embedded/adapter.py` without. Names from a
graph are untrusted: a host returns paths inside the model and output folders, or raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ..distributed import Driver, Pool
from ..plan import AutoOffload, Machine, OffloadJob
from ..schema import ExpertShape, ExpertsRef, Mesh, OffloadPolicy, Timeline, WorkersRef
from ..telemetry import QueueItemPhases, TelemetryOptions
from ..wan import ExpertPair
from .auto_policy import AutoPlanner, PolicyChoice, free_memory, usable_bytes
from .comfy.guider_session import GuiderSettings
from .folders import (
    MODEL_KINDS,
    STATE_FOLDER,
    OutputFile,
    check_output,
    find_model,
    latent_names,
    latent_path,
    listed_name,
    output_file,
    saved_path,
)
from .workers import SharedRun, WorkerRegistry, WorkersPlan

SAVING_NODE = "wanstream_node"
"""Metadata key for the id of the saving node: the `prompt` next to it may contain several saving nodes."""


WEIGHT_DTYPES = ("default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2")
"""Choices for `load_model`, as in ComfyUI's own loader."""


class NeedsComfyUIError(ValueError):
    """The embedded host does not support a ComfyUI operation. The message has the alternative."""


class LoadedExperts(NamedTuple):
    """An open pair, the device, and the policy that fits there, maybe with less memory than requested."""

    pair: ExpertPair
    policy: OffloadPolicy
    device: torch.device


class ShareVisits(str, Enum):
    """Setting for conditions computed one after the other: whether they share each visit to a block."""

    AUTO = "auto"
    """For tested models without other packs' code in their layers, if the memory is there and it saves time."""
    ON = "on"
    """Unless something is known to prevent it."""
    OFF = "off"


@dataclass(frozen=True, kw_only=True)
class ModelStreaming:
    """Block settings for a native model."""

    policy: OffloadPolicy | AutoOffload
    """An AutoOffload is resolved after the first model call of a run."""
    share_visits: ShareVisits = ShareVisits.AUTO
    lora_on_arrival: bool = False
    """True to add plain LoRAs to a block once, when it arrives, not each time a layer computes."""


@dataclass(frozen=True, kw_only=True)
class ModelRun:
    """Finished run with a streamed native model and a host sampler."""

    timeline: Timeline
    settings: Mapping[str, str]
    """Settings as text, by name."""
    device: torch.device
    node_id: str | None
    """Sampler node id."""


class ProgressBar(Protocol):
    """Node progress bar."""

    def update(self, done: int, denoised: torch.Tensor | None = None) -> None:
        """Set the bar to `done`.

        `denoised` [B, C, T, h, w], normalised, is the current estimate of the final latents. A host with previews shows
        it. Raises the host's interrupt if the user has stopped the run and the host checks for that here.
        """

    def advance(self, done: float) -> None:
        """Move the bar forward to a fraction of a step, on any thread. A host without such bars does nothing."""

    def close(self) -> None:
        """End the line of the bar on the console, also of one that is not complete."""


class HostApi(Protocol):
    """Host services. All are called on the thread that executes the node, except `should_stop`."""

    planner: AutoPlanner
    worker_registry: WorkerRegistry

    def name(self) -> str:
        """Return the host name and version, for display."""

    def device(self) -> torch.device:
        """Return the compute device."""

    def model_names(self, *folders: str) -> list[str]:
        """Return the sorted model names in these model folders. A "diffusers" entry is a folder."""

    def model_folders(self, kind: str) -> list[Path]:
        """Return the model folder paths for this kind. They may not exist."""

    def model_path(self, name: str, *folders: str) -> Path:
        """Return the path of `name` in the first of `folders` that contains it.

        Raises OutsideFolderError or ModelNotFoundError.
        """
        return find_model(name, {kind: self.model_folders(kind) for kind in folders})

    def listed_name(self, name: str, choices: Sequence[object]) -> str:
        """Return the choice for the same model by another path, such as over a link, else `name`."""
        return listed_name(name, choices, (folder for kind in MODEL_KINDS for folder in self.model_folders(kind)))

    def output_file(self, prefix: str, extension: str, *, width: int = 0, height: int = 0) -> OutputFile:
        """Return the next free `<prefix>_<counter>_.<extension>`. The folder exists on return.

        `%width%`, `%height%` and `%year%` ... `%second%` in `prefix` are filled in. Raises OutsideFolderError.
        """
        return output_file(self.output_folder(), prefix, extension, width=width, height=height)

    def check_output(self, prefix: str) -> None:
        """Refuse a prefix that `output_file` could not use. Creates no folder.

        Raises OutsideFolderError or OutputNameError.
        """
        check_output(self.output_folder(), prefix)

    def graph_in_files(self) -> bool:
        """Return True if the user allows the graph in output file metadata."""

    def strict(self) -> bool:
        """Return True if the user wants an error instead of a warning for suspicious inputs."""

    def output_folder(self) -> Path:
        """Return the root folder for `output_file`. It may not exist yet."""

    def state_folder(self) -> Path:
        """Return the folder for unfinished run states, which may not exist. Equal runs must get the same one."""
        return self.output_folder() / STATE_FOLDER

    def input_folder(self) -> Path:
        """Return the folder for the user's files. It may not exist."""

    def latent_names(self) -> list[str]:
        """Return the names of saved latents, as `latent_path` reads them."""
        return latent_names(self.saved_folders(), self.input_folder())

    def latent_path(self, name: str) -> Path:
        """Return the path of a saved latent: relative to the output folder, or with " [input]" to the input folder.

        The file may not exist. Raises OutsideFolderError.
        """
        return latent_path(self.saved_folders(), self.input_folder(), name)

    def saved_folders(self) -> Sequence[Path]:
        """Return the folders searched for saved files. The first match counts."""
        return (self.output_folder(),)

    def saved_path(self, name: str) -> Path:
        """Return the path of a saved file, which may not exist. Raises OutsideFolderError."""
        return saved_path(self.saved_folders(), name)

    def temp_folder(self) -> Path:
        """Return an existing folder for temporary files."""

    def progress(self, total: int, node_id: str | None, *, unit: str | None = None) -> ProgressBar:
        """Return a new progress bar over `total` steps for the node with this id (None: the executing node).

        With a `unit`, the server console shows a line for it too.
        """

    def shows_latents(self) -> bool:
        """Return True if progress bars show previews of the given `denoised`."""
        return False

    def should_stop(self) -> bool:
        """Return True if the user wants the run to end. Has no side effect and may be called on any thread."""

    def is_stop(self, error: BaseException) -> bool:
        """Return True for the host's own interrupt, as raised by `raise_if_stopped`. False for an error."""

    def raise_if_stopped(self) -> None:
        """Raise the host's own interrupt if the user wants the run to end, and clear the request."""

    def experts(self, ref: ExpertsRef) -> ExpertPair:
        """Return the open pair named by `ref`, with dtype "auto" resolved for `device()`.

        It is kept open until another pair is requested or `free_experts` is called.
        """

    def free_experts(self) -> None:
        """Close the open pair, if any."""

    def encode_texts(self, path: Path, texts: Sequence[str]) -> list[torch.Tensor]:
        """Return text embeddings by the encoder at `path`, on the CPU. A host may cache them.

        Raises PromptError, the host's interrupt before a block, and the errors from opening the encoder.
        """

    def plan_workers(self, run: SharedRun, ref: ExpertsRef) -> WorkersPlan:
        """Return layout and policy for a run with the experts `ref` on workers. Equal runs get equal plans.

        Measures the machine, which takes seconds, if the plan depends on its speed and no profile exists. Raises
        MeshError for a layout that does not suit the run, and DoesNotFitError if memory is too small.
        """
        machine = partial(self.planner.machine, self.device(), run.job.expert, ref.high_noise)
        return self.worker_registry.plan(run, machine)

    def workers(self, ref: WorkersRef, mesh: Mesh) -> Driver:
        """Return the driver of the workers named by `ref` with layout `mesh`, and start them if necessary.

        Frees the model memory in this process first. The workers run until others are requested or the host ends.
        Raises RayMissingError, and the errors from starting workers.
        """
        self.make_room_for_workers()
        return self.worker_registry.get(ref, mesh, self.device())

    def worker_pool(self, ref: WorkersRef) -> Pool:
        """Return the workers named by `ref` without a layout, for independent tasks. Otherwise as `workers`."""
        self.make_room_for_workers()
        return self.worker_registry.pool(ref, self.device())

    def make_room_for_workers(self) -> None:
        """Free the model memory in this process."""
        self.free_experts()

    def choose_policy(self, ref: ExpertsRef, policy: OffloadPolicy | AutoOffload, job: OffloadJob) -> PolicyChoice:
        """Return `policy` itself or, for an AutoOffload, the best policy for `job` in the free memory here.

        Measures the machine, which takes seconds, if no profile exists. Raises DoesNotFitError if memory is too small
        for any policy.
        """
        if isinstance(policy, OffloadPolicy):
            return PolicyChoice(policy=policy)
        pair, device = self.experts(ref), self.device()
        return self.planner.choose(
            policy,
            job,
            device=device,
            weights=ref.high_noise,
            free_memory_now=lambda evicting: free_memory(pair, device, self.free_vram(evicting=evicting)),
            starts_empty=not pair.loaded_bytes,
        )

    def free_vram(self, *, evicting: bool = False) -> int:
        """Return the free GPU bytes minus the reserve. `evicting` counts memory used by other models."""

    def known_machine(self, ref: ExpertsRef, expert: ExpertShape) -> Machine | None:
        """Return the stored machine profile for the files of `ref`, None without one. Measures nothing."""
        return self.planner.known_machine(self.device(), expert, ref.high_noise)

    def run_id(self) -> str | None:
        """Return the executing queue item's id (ComfyUI's prompt id). None outside one."""

    def ledger(self) -> QueueItemPhases:
        """Return the executing queue item's phase record. Outside one, a throw-away record."""

    def telemetry_options(self) -> TelemetryOptions:
        """Return the run options for the executing node. Raises ValueError for invalid environment variables."""
        return replace(TelemetryOptions.from_environment(), ledger=self.ledger(), dynamic_bytes=self.dynamic_bytes)

    def executing_node(self) -> str | None:
        """Return the graph id of the node executing on this thread. None outside one."""

    def open_to_browsers(self) -> None:
        """Serve announced events to browsers. Called once, before the host's server starts to listen."""

    def check_prompts(self, nodes: Iterable[type[Any]]) -> None:
        """Check queued workflow constants for these node classes, as `plain_value` does. Called once.

        The host must be open to browsers.
        """

    def has_viewers(self) -> bool:
        """Return True if anybody is connected who receives announced events."""

    def running_graph(self) -> Mapping[str, Any]:
        """Return the graph of the running queue item in API format; empty where the host keeps none."""
        return {}

    def announce(self, event: str, payload: Mapping[str, Any]) -> None:
        """Send an event to all subscribers without waiting. `payload` is plain JSON."""

    def dynamic_bytes(self) -> int | None:
        """Return device bytes in the host's dynamic VRAM, used by other models. None if the host has none."""

    def make_room(self, wanted: int) -> int:
        """Evict other models until `wanted` bytes are free or none is left. Return the usable bytes.

        The bytes are device memory, or RAM on a CPU.
        """
        self.evict(wanted)
        return usable_bytes(self.device(), self.free_vram())

    def evict(self, wanted: int) -> None:
        """Evict other models until `wanted` bytes are free or none is left."""

    def load_experts(self, ref: ExpertsRef, policy: OffloadPolicy, *, working_bytes: int) -> LoadedExperts:
        """Load the pair named by `ref`, and free `working_bytes` for its computation.

        If the host has less memory, fewer blocks are resident than `policy` requests. The log shows the numbers.
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
        """Return a native GUIDER that runs both experts of `ref` under `policy`, for the host's own samplers.

        Its runs are shown at the node that executes now.

        Raises NeedsComfyUIError if the host has no samplers, and `RequestError` for inputs that the experts refuse.
        """

    def load_model(self, path: Path, weight_dtype: str, streaming: ModelStreaming) -> object:
        """Return a native MODEL with blocks streamed from the file `path`, for the host's own samplers.

        Reads the header, and everything outside the blocks.

        Args:
            path: a safetensors or GGUF file in the form of the host's own models.
            weight_dtype: one of `WEIGHT_DTYPES`.
            streaming: block settings.

        Raises NeedsComfyUIError if the host has no native models, `CheckpointFileError` for a file that cannot be
        streamed, and ValueError for a policy that does not fit its blocks.
        """

    def check_model(self, path: Path, weight_dtype: str) -> None:
        """Raise the errors of `load_model` found in the file header: the format, and another model."""

    def stream_model(self, model: object, streaming: ModelStreaming) -> object:
        """Return a MODEL like `model`, with all patches, and with blocks streamed from the file or from RAM.

        Args:
            model: a MODEL from any loader.
            streaming: block settings.

        Raises NeedsComfyUIError if the host has no native models, ValueError for a model that cannot be streamed and
        for a policy that does not fit its blocks, and OSError if its file cannot be read.
        """

    def model_run(self, model: object) -> ModelRun:
        """Return the last run of a MODEL from `load_model` or `stream_model`.

        Raises NeedsComfyUIError if the host has no native models, and ValueError for a MODEL that does not stream or
        has not run.
        """

    def schedule_names(self) -> list[str]:
        """Return the valid names for `sigmas`, with "simple" and "wan" among them."""

    def sigmas(self, name: str, steps: int, denoise: float, flow_shift: float) -> torch.Tensor:
        """Return the last `steps` + 1 sigmas of a schedule over int(steps / denoise) steps, float32, on the CPU.

        Empty for a denoise of 0. Raises `RequestError` for numbers that define no schedule.
        """


RUNNING_HOST: ContextVar[HostApi | None] = ContextVar("wanstream_host", default=None)
"""The executing node's host in this context, for `current_host`."""


@contextmanager
def use_host(host: HostApi) -> Iterator[None]:
    """Make `host` the result of `current_host` inside the `with`."""
    token = RUNNING_HOST.set(host)
    try:
        yield
    finally:
        RUNNING_HOST.reset(token)


def current_host() -> HostApi:
    """Return the running node's host. Outside a run, the only host possible in this process.

    New threads do not inherit a context variable: pass the host's methods, such as `should_stop`, to a thread.
    """
    return RUNNING_HOST.get() or _process_host()


@cache
def _process_host() -> HostApi:
    """Return the host for ComfyUI, which has one queue and memory manager per process, or an idle embedded host."""
    if find_spec("comfy_api") is None:
        from .embedded.adapter import EmbeddedHost

        return EmbeddedHost()
    from .comfy.adapter import ComfyHost

    return ComfyHost()
