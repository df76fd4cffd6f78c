"""Host API inside ComfyUI."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import comfy.cli_args
import comfy.model_management
import comfyui_version
import folder_paths
import torch
from comfy.model_patcher import ModelPatcher
from comfy_execution.utils import get_executing_context

from ...devices import auto_dtype, runtime_for
from ...plan import AutoOffload
from ...sampling import policy_with_cache
from ...schema import ExpertsRef, OffloadPolicy
from ...telemetry import PhaseRegistry, QueueItemPhases
from ...wan import ExpertPair, ExpertsRegistry, open_pair, open_text_encoder, with_resolved_precision
from ..api import HostApi, LoadedExperts, ModelRun, ModelStreaming, ProgressBar
from ..auto_policy import AutoPlanner
from ..folders import (
    GGUF_FILES,
    GGUF_FOLDERS,
    WEIGHT_FILES,
    CachedFileNames,
    OutputFile,
    diffusers_folders,
    inside,
    prefix_in_run,
)
from ..machine_profile import PROBE_BYTES, load_machine_profile
from ..workers import WorkerRegistry
from .guider import ExpertsGuider
from .guider_session import GuiderSettings
from .native.block_lists import ANY_SIZE
from .native.build import check_native
from .native.load import last_run, native_patcher
from .native.model import open_native
from .native.patcher import NativePatcher
from .native.stream_model import ModelStreamer
from .patcher import ExpertsModel, ExpertsPatcher, workers_patcher
from .progress import NodeBar
from .prompt_values import PromptValues
from .samplers import FlowSampling, schedule_names, schedule_sigmas
from .user_settings import SETTINGS, SMALL_MODELS, STRICT, setting_is_on

if TYPE_CHECKING:
    # Imported on use, because only a server has ComfyUI's `server` module.
    from .server_events import ServerEvents


ALL = 1e30
"""Bytes, as in ComfyUI's own requests to unload everything."""


class ComfyHost(HostApi):
    """Implements `HostApi` with ComfyUI's folders, devices, memory manager, progress and interrupt."""

    def __init__(
        self, open_experts: Callable[[ExpertsRef], ExpertPair] = open_pair, planner: AutoPlanner | None = None
    ) -> None:
        self._experts = ExpertsRegistry(open_experts)
        self.planner = planner or AutoPlanner(partial(load_machine_profile, make_room=self._make_room_for_probes))
        self._gguf = CachedFileNames(GGUF_FILES)
        self._ledgers = PhaseRegistry()
        self._events: ServerEvents | None = None
        self.worker_registry = WorkerRegistry()
        self._streamer = ModelStreamer()
        # Strong references, because ComfyUI's list of loaded models keeps only weak ones.
        self._workers_patcher: ModelPatcher | None = None
        self._patcher: ExpertsPatcher | None = None  # of the open pair
        self._patchers: WeakValueDictionary[ExpertsRef, ExpertsPatcher] = WeakValueDictionary()  # one for all clones

    def name(self) -> str:
        return f"ComfyUI {comfyui_version.__version__}"

    def device(self) -> torch.device:
        device: torch.device = comfy.model_management.get_torch_device()
        return device

    def model_names(self, *folders: str) -> list[str]:
        found: set[str] = set()
        for kind in folders:
            if kind == "diffusers":
                # ComfyUI lists only files; its own diffusers loader walks these folders as well.
                for folder in self.model_folders(kind):
                    found.update(diffusers_folders(folder))
            else:
                names = folder_paths.get_filename_list(kind)
                found.update(name for name in names if name.lower().endswith(WEIGHT_FILES))
            if kind in GGUF_FOLDERS:
                # Not by registering `.gguf` with ComfyUI: that would change the lists of other nodes.
                for folder in self.model_folders(kind):
                    found.update(self._gguf.below(folder))
        return sorted(found)

    def model_folders(self, kind: str) -> list[Path]:
        return [Path(folder) for folder in folder_paths.get_folder_paths(kind)]

    def output_file(self, prefix: str, extension: str, *, width: int = 0, height: int = 0) -> OutputFile:
        output = folder_paths.get_output_directory()
        # Repaired and normalised: ComfyUI refuses with a bare Exception, and numbers the files of "video/" wrongly.
        prefix = prefix_in_run(prefix)
        inside(Path(output), prefix)
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            os.path.normpath(prefix), output, width, height
        )
        filename = f"{name}_{counter:05}_.{extension.lstrip('.')}"
        return OutputFile(path=Path(folder) / filename, filename=filename, subfolder=subfolder)

    def graph_in_files(self) -> bool:
        return not comfy.cli_args.args.disable_metadata

    def strict(self) -> bool:
        return self._is_on(STRICT)

    def output_folder(self) -> Path:
        return Path(folder_paths.get_output_directory())

    def input_folder(self) -> Path:
        return Path(folder_paths.get_input_directory())

    def temp_folder(self) -> Path:
        folder = Path(folder_paths.get_temp_directory())
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def progress(self, total: int, node_id: str | None, *, unit: str | None = None) -> ProgressBar:
        return NodeBar(total, node_id, unit)

    def shows_latents(self) -> bool:
        return comfy.cli_args.args.preview_method is not comfy.cli_args.LatentPreviewMethod.NoPreviews

    def should_stop(self) -> bool:
        stop: bool = comfy.model_management.processing_interrupted()
        return stop

    def is_stop(self, error: BaseException) -> bool:
        return isinstance(error, comfy.model_management.InterruptProcessingException)

    def raise_if_stopped(self) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()

    def experts(self, ref: ExpertsRef) -> ExpertPair:
        ref = with_resolved_precision(ref, self.device(), self._make_room_for_probes)
        try:
            return self._experts.get(ref)
        finally:
            self._count_pins()
            self._patcher = self._patchers.get(ref.opened)

    def free_experts(self) -> None:
        self._experts.free()
        self._count_pins()
        self._patcher = None

    def encode_texts(self, path: Path, texts: Sequence[str]) -> list[torch.Tensor]:
        # Not cached here: ComfyUI's node cache does not execute the node again for equal texts.
        device = self.device()
        with open_text_encoder(path, compute_dtype=auto_dtype(device)) as encoder:
            return encoder.encode(texts, device=device, check=self.raise_if_stopped)

    def make_room_for_workers(self) -> None:
        management = comfy.model_management
        self.free_experts()
        self._workers_patcher = self._workers_patcher or workers_patcher(
            self.worker_registry.release_memory, self.device()
        )
        management.load_models_gpu([self._workers_patcher])
        if runtime_for(self.device()) is not None:
            # One of the workers shares the GPU of this process, so the models of this process must be evicted.
            ours = [entry for entry in management.current_loaded_models if entry.model is self._workers_patcher]
            management.free_memory(ALL, self.device(), keep_loaded=ours)

    def patcher(self, ref: ExpertsRef, policy: OffloadPolicy, *, flow_shift: float | None = None) -> ExpertsPatcher:
        """Return a patcher of `ref` for ComfyUI's memory manager and guiders.

        It stays valid when other experts are opened. A `flow_shift` of None is ComfyUI's default for Wan. Raises
        ValueError for a policy that does not fit the experts.
        """
        ref = with_resolved_precision(ref, self.device())
        root = self._patchers.get(ref.opened)
        if root is None:
            root = ExpertsPatcher(ExpertsModel(ref, self.experts), self.device(), torch.device("cpu"))
            root.ref = ref
            self._patchers[ref.opened] = self._patcher = root
        patcher = root.clone()
        patcher.ref, patcher.policy = ref, policy
        patcher.model_size()  # raises for a wrong policy here, not later while ComfyUI changes its list of models
        if flow_shift is not None:
            patcher.add_object_patch("model_sampling", FlowSampling(flow_shift))
        return patcher

    def free_vram(self, *, evicting: bool = False) -> int:
        # ComfyUI's minimum covers --reserve-vram and memory that no model accounts for.
        management, device = comfy.model_management, self.device()
        free = management.get_free_memory(device) - management.minimum_inference_memory()
        return int(free) + (_evictable(device) if evicting else 0)

    def run_id(self) -> str | None:
        context = get_executing_context()
        return None if context is None else context.prompt_id

    def executing_node(self) -> str | None:
        context = get_executing_context()
        return None if context is None else context.node_id

    def open_to_browsers(self) -> None:
        from .server_events import ServerEvents

        self._events = ServerEvents()
        self._events.open()

    def check_prompts(self, nodes: Iterable[type[Any]]) -> None:
        if self._events is not None:
            self._events.check_prompts(PromptValues(nodes, self.listed_name))

    def has_viewers(self) -> bool:
        return self._events is not None and self._events.has_viewers()

    def running_graph(self) -> Mapping[str, Any]:
        return {} if self._events is None else self._events.running_graph(self.run_id())

    def announce(self, event: str, payload: Mapping[str, Any]) -> None:
        if self._events is not None:
            self._events.announce(event, payload)

    def ledger(self) -> QueueItemPhases:
        run_id = self.run_id()
        return QueueItemPhases() if run_id is None else self._ledgers.of(run_id)

    def dynamic_bytes(self) -> int | None:
        # ComfyUI 0.12 and later use dynamic VRAM on NVIDIA GPUs under Linux and Windows unless it is disabled.
        if find_spec("comfy.memory_management") is None:
            return None
        from comfy import memory_management

        if not getattr(memory_management, "aimdo_enabled", False):
            return None
        from comfy_aimdo import control

        return int(control.get_total_vram_usage())

    def evict(self, wanted: int) -> None:
        reserved = int(comfy.model_management.minimum_inference_memory())
        comfy.model_management.free_memory(wanted + reserved, self.device())

    def load_experts(self, ref: ExpertsRef, policy: OffloadPolicy, *, working_bytes: int) -> LoadedExperts:
        patcher = self.patcher(ref, policy)
        comfy.model_management.load_models_gpu(
            [patcher], memory_required=working_bytes, minimum_memory_required=working_bytes
        )
        return patcher.loaded_experts()

    def guider(
        self,
        ref: ExpertsRef,
        positive: Sequence[Any],
        negative: Sequence[Any],
        settings: GuiderSettings,
        *,
        flow_shift: float,
        policy: OffloadPolicy | AutoOffload,
    ) -> ExpertsGuider:
        # The smallest policy until the first run, which has the sizes that the planner needs.
        first = OffloadPolicy.layerwise() if isinstance(policy, AutoOffload) else policy
        patcher = self.patcher(ref, policy_with_cache(first, settings.cache), flow_shift=flow_shift)
        guider = ExpertsGuider(self, patcher, settings, policy)
        guider.set_conds(positive, negative)
        return guider

    def load_model(self, path: Path, weight_dtype: str, streaming: ModelStreaming) -> NativePatcher:
        return native_patcher(open_native(path, weight_dtype, **self._native_limits()), streaming)

    def check_model(self, path: Path, weight_dtype: str) -> None:
        check_native(path, weight_dtype)

    def stream_model(self, model: object, streaming: ModelStreaming) -> NativePatcher:
        limits = self._native_limits()
        return self._streamer.stream(model, OffloadPolicy.layerwise(), **limits).with_settings(streaming)

    def model_run(self, model: object) -> ModelRun:
        return last_run(model)

    def schedule_names(self) -> list[str]:
        return schedule_names()

    def sigmas(self, name: str, steps: int, denoise: float, flow_shift: float) -> torch.Tensor:
        return schedule_sigmas(name, steps, denoise, flow_shift)

    @staticmethod
    def _is_on(setting: str) -> bool:
        # The default user's setting applies to all users of a server: a node cannot see who queued it.
        return setting_is_on(Path(folder_paths.get_user_directory()) / "default" / SETTINGS, setting)

    def _native_limits(self) -> Mapping[str, int]:
        return ANY_SIZE if self._is_on(SMALL_MODELS) else {}

    def _make_room_for_probes(self) -> None:
        # A GPU that is full of other models, such as a text encoder, cannot be measured, and nothing else evicts them.
        if self.device().type != "cpu":
            comfy.model_management.free_memory(PROBE_BYTES, self.device())

    def _count_pins(self) -> None:
        # Opening or closing a pair may have closed another one, which unlocks its pages.
        for patcher in list(self._patchers.values()):
            patcher.memory.count_pins(patcher.weights)


def _evictable(device: torch.device) -> int:
    """Return the bytes of `device` in other models, which ComfyUI can evict."""
    loaded = [entry for entry in comfy.model_management.current_loaded_models if entry.device == device]
    others = [entry for entry in loaded if not isinstance(entry.model, ExpertsPatcher | None)]
    return sum(int(entry.model_loaded_memory()) for entry in others)
