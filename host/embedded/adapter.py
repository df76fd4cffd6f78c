"""Host API without ComfyUI: folders given by the caller, progress callbacks, a stop flag."""

from __future__ import annotations

import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...devices import compute_device, free_bytes
from ...plan import VRAM_RESERVE
from ...sampling import SCHEDULES, schedule_sigmas
from ...schema import Cancelled, ExpertsRef, OffloadPolicy, StateError
from ...telemetry import QueueItemPhases
from ...wan import EmbeddingCache, ExpertPair, ExpertsRegistry, with_resolved_precision
from ..api import HostApi, LoadedExperts, ModelRun, NeedsComfyUIError, ProgressBar, use_host
from ..auto_policy import AutoPlanner, usable_bytes
from ..folders import (
    GGUF_FILES,
    GGUF_FOLDERS,
    WEIGHT_FILES,
    annotated_name,
    diffusers_folders,
    inside,
    repaired_prefix,
    weight_files,
)
from ..workers import WorkerRegistry
from .near_names import near_files
from .validate import NEEDS_COMFYUI


@dataclass(frozen=True, kw_only=True)
class EmbeddedBar:
    """Progress bar that calls `report`, without previews."""

    report: Callable[[int, int], None]
    """Called with `done` and `total`."""
    total: int

    def update(self, done: int, denoised: torch.Tensor | None = None) -> None:
        """See `ProgressBar.update`."""
        self.report(done, self.total)

    def advance(self, done: float) -> None:
        """See `ProgressBar.advance`."""

    def close(self) -> None:
        """See `ProgressBar.close`."""


@dataclass(frozen=True, kw_only=True)
class Folders:
    """Folders for a run. `models` has ComfyUI's layout (`diffusion_models/`, `vae/`, ...)."""

    models: Path
    output: Path
    input: Path
    states: Path | None = None
    """Folder for unfinished run states. None: one below `output`."""
    finished: Path | None = None
    """Folder for files with " [output]" in their names, and for latents and calibrations missing in `output`.

    None: `output`.
    """


@dataclass(frozen=True, kw_only=True)
class NodeProgress:
    """Node progress: `done` of `total`."""

    node_id: str
    class_type: str
    done: int
    total: int


class EmbeddedHost(HostApi):
    """`HostApi` for one run at a time. The experts are kept open between runs."""

    def __init__(self, planner: AutoPlanner | None = None, experts: ExpertsRegistry | None = None) -> None:
        self.planner = planner or AutoPlanner()
        self._busy = threading.Lock()
        self._folders: Folders | None = None
        self._running: tuple[str, str] | None = None
        self._on_progress: Callable[[NodeProgress], None] | None = None
        self._on_event: Callable[[str, Mapping[str, Any]], None] | None = None
        self._strict = False
        self._device: torch.device | None = None
        self._stop = threading.Event()
        self._temp: Path | None = None
        self._run_id: str | None = None
        self._experts, self._texts = experts or ExpertsRegistry(), EmbeddingCache()
        self._ledger: QueueItemPhases | None = None
        self.worker_registry = WorkerRegistry()

    @contextmanager
    def opened(
        self,
        folders: Folders,
        on_progress: Callable[[NodeProgress], None] | None = None,
        device: torch.device | None = None,
        on_event: Callable[[str, Mapping[str, Any]], None] | None = None,
        *,
        strict: bool = False,
    ) -> Iterator[None]:
        """Make this the current host inside the `with`, with these folders and this device.

        Args:
            folders: folders for models, inputs and outputs.
            on_progress: called with each node's progress.
            device: the compute device. None: a GPU if there is one.
            on_event: called with the events announced by nodes.
            strict: raise an error instead of a warning for suspicious inputs.

        Raises:
            StateError: this host is running another workflow.
        """
        if not self._busy.acquire(blocking=False):
            raise StateError(
                "this embedded host is already running a workflow: wait for it, or use another EmbeddedHost"
            )
        self._stop.clear()
        self._folders, self._on_progress, self._device = folders, on_progress, device
        self._on_event = on_event
        self._strict = strict
        self._run_id = uuid.uuid4().hex
        try:
            with use_host(self):
                yield
        finally:
            self._strict = False
            self._folders = self._on_progress = self._device = self._run_id = self._ledger = self._on_event = None
            self._busy.release()

    @contextmanager
    def node(self, node_id: str, class_type: str) -> Iterator[None]:
        """Make this the executing node inside the `with`. Reports 0 of 1 at the start and 1 of 1 at the end."""
        self._running = (node_id, class_type)
        try:
            self._report(0, 1)
            yield
            self._report(1, 1)
        finally:
            self._running = None

    def stop(self) -> None:
        """Request the end of the run, at the next block or node. May be called on any thread."""
        self._stop.set()

    @property
    def folders(self) -> Folders:
        """Folders of the run. Raises StateError outside one."""
        if self._folders is None:
            raise StateError("no workflow is running: the embedded host has folders only during a run")
        return self._folders

    def name(self) -> str:
        return "without ComfyUI"

    def device(self) -> torch.device:
        return compute_device(self._device)

    def input_names(self) -> list[str]:
        """Return the sorted names of the files directly in the input folder, or [] outside a run."""
        folder = self._folders.input if self._folders else None
        return sorted(path.name for path in folder.iterdir() if path.is_file()) if folder and folder.is_dir() else []

    def input_path(self, name: str) -> Path:
        """Return the path of an input file, or of a file in the " [output]" or " [temp]" folder.

        Raises OutsideFolderError.
        """
        bare, kind = annotated_name(name, "input")
        folders = {"input": self.folders.input, "output": self.folders.finished or self.folders.output}
        folder = folders[kind] if kind in folders else self.temp_folder()
        path = inside(folder, bare)
        # A name written on Windows.
        return path if path.exists() else inside(folder, bare.replace("\\", "/"))

    def model_names(self, *folders: str) -> list[str]:
        if self._folders is None:
            return []
        found: set[str] = set()
        for kind in folders:
            folder = self._folders.models / kind
            endings = WEIGHT_FILES + GGUF_FILES if kind in GGUF_FOLDERS else WEIGHT_FILES
            found.update(diffusers_folders(folder) if kind == "diffusers" else weight_files(folder, endings))
        return sorted(found)

    def model_folders(self, kind: str) -> list[Path]:
        return [self.folders.models / kind]

    def missing_file(self, name: str, endings: tuple[str, ...]) -> str:
        """Return a message for a file that `input_path` does not find. The suggested name has one of these endings."""
        bare, kind = annotated_name(name, "input")
        if kind == "temp":
            return f"{bare} is not in the temp folder, which is empty without ComfyUI: put it into the input folder"
        names = [each for each in self.input_names() if each.lower().endswith(endings)]
        near = near_files(bare, names) if kind == "input" else []
        hint = f"did you mean {' or '.join(near)}? Else put it there" if near else "put it there"
        if kind == "output":
            return f"{bare} is not in the output folder: {hint}\nfolder: {self.folders.finished or self.folders.output}"
        return f"{bare} is not in the input folder: {hint} (or see --input)\nfolder: {self.folders.input}"

    def graph_in_files(self) -> bool:
        return True

    def strict(self) -> bool:
        return self._strict

    def output_folder(self) -> Path:
        return self.folders.output

    def check_output(self, prefix: str) -> None:
        # In a batch, whatever the prefix, the files get the name of their row.
        super().check_output(prefix if self.folders.finished is None else repaired_prefix(prefix))

    def saved_folders(self) -> Sequence[Path]:
        return tuple(filter(None, (self.folders.output, self.folders.finished)))

    def state_folder(self) -> Path:
        return self.folders.states or super().state_folder()

    def input_folder(self) -> Path:
        return self.folders.input

    def latent_names(self) -> list[str]:
        return super().latent_names() if self._folders is not None else []

    def temp_folder(self) -> Path:
        # Never removed: it contains latents that could not be saved anywhere else.
        if self._temp is None:
            self._temp = Path(tempfile.mkdtemp(prefix="wanstream-"))
        return self._temp

    def progress(self, total: int, node_id: str | None, *, unit: str | None = None) -> ProgressBar:
        return EmbeddedBar(report=self._report, total=total)

    def should_stop(self) -> bool:
        return self._stop.is_set()

    def is_stop(self, error: BaseException) -> bool:
        return isinstance(error, Cancelled)

    def raise_if_stopped(self) -> None:
        if self._stop.is_set():
            self._stop.clear()
            raise Cancelled("the run was stopped")

    def experts(self, ref: ExpertsRef) -> ExpertPair:
        return self._experts.get(with_resolved_precision(ref, self.device(), self.free_experts))

    def free_experts(self) -> None:
        self._experts.free()

    def encode_texts(self, path: Path, texts: Sequence[str]) -> list[torch.Tensor]:
        return self._texts.encode(path, texts, device=self.device(), check=self.raise_if_stopped)

    def free_vram(self, *, evicting: bool = False) -> int:
        # `evicting` makes no difference: this host has no other models.
        return (free_bytes(self.device()) or 0) - VRAM_RESERVE

    def run_id(self) -> str | None:
        return self._run_id

    def executing_node(self) -> str | None:
        return None if self._running is None else self._running[0]

    def open_to_browsers(self) -> None:
        return

    def check_prompts(self, nodes: Iterable[type[Any]]) -> None:
        return  # the embedded validation does

    def has_viewers(self) -> bool:
        return False

    def announce(self, event: str, payload: Mapping[str, Any]) -> None:
        if self._on_event is not None:
            self._on_event(event, payload)

    def ledger(self) -> QueueItemPhases:
        if self._run_id is None:
            return QueueItemPhases()
        self._ledger = self._ledger or QueueItemPhases()
        return self._ledger

    def dynamic_bytes(self) -> int | None:
        return None

    def evict(self, wanted: int) -> None:
        if usable_bytes(self.device(), self.free_vram()) < wanted:
            self.free_experts()

    def load_experts(self, ref: ExpertsRef, policy: OffloadPolicy, *, working_bytes: int) -> LoadedExperts:
        # This host has no other models to evict.
        return LoadedExperts(pair=self.experts(ref), policy=policy, device=self.device())

    def guider(self, *_: object, **__: object) -> object:
        raise NeedsComfyUIError(
            "a GUIDER needs ComfyUI, because it works with ComfyUI's samplers: run this workflow there, or use Wan "
            "Sampler, which takes the same experts, texts and sigmas"
        )

    def load_model(self, *_: object, **__: object) -> object:
        raise NeedsComfyUIError(f"Load Diffusion Model (streamed) {NEEDS_COMFYUI['MODEL']}")

    def check_model(self, path: Path, weight_dtype: str) -> None:
        self.load_model(path, weight_dtype)

    def stream_model(self, *_: object, **__: object) -> object:
        raise NeedsComfyUIError(f"Stream Model {NEEDS_COMFYUI['MODEL']}")

    def model_run(self, *_: object) -> ModelRun:
        raise NeedsComfyUIError(f"Run of Streamed Model {NEEDS_COMFYUI['MODEL']}")

    def schedule_names(self) -> list[str]:
        return list(SCHEDULES)

    def sigmas(self, name: str, steps: int, denoise: float, flow_shift: float) -> torch.Tensor:
        return schedule_sigmas(name, steps, denoise, flow_shift)

    def _report(self, done: int, total: int) -> None:
        if self._on_progress is not None and self._running is not None:
            node_id, class_type = self._running
            self._on_progress(NodeProgress(node_id=node_id, class_type=class_type, done=done, total=total))
