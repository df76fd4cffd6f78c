"""Memory shared with other models through ComfyUI's memory manager."""

from __future__ import annotations

from functools import partial

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher

from ....devices import runtime_for
from ...auto_policy import AutoPlanner
from ...machine_profile import load_machine_profile
from ...memory import Memory
from ...workers.plan import WorkersPlanner
from ...workers.registry import WorkerRegistry
from .. import versions
from ..experts.patcher import ExpertsPatcher, OpenExperts, make_room_for_probes, workers_patcher

ALL = 1e30
"""Bytes, as in ComfyUI's own requests to unload everything."""


class ComfyMemory(Memory):
    """Memory on ComfyUI's device.

    Args:
        experts: the open experts. They are closed when workers need the memory.
        planner: chooses policies. By default one that measures the machine after ComfyUI has made
            room.
    """

    def __init__(self, experts: OpenExperts, planner: AutoPlanner | None = None) -> None:
        self.planner = planner or AutoPlanner(
            partial(load_machine_profile, make_room=make_room_for_probes)
        )
        self.worker_registry = WorkerRegistry()
        self.workers_planner = WorkersPlanner()
        self._experts = experts
        # A strong reference, because ComfyUI's list of loaded models keeps only weak ones.
        self._workers_patcher: ModelPatcher | None = None

    def device(self) -> torch.device:
        device: torch.device = comfy.model_management.get_torch_device()
        return device

    def free_vram(self, *, evicting: bool = False) -> int:
        # ComfyUI's minimum covers --reserve-vram and memory that no model accounts for.
        management = comfy.model_management
        device = self.device()
        free = int(management.get_free_memory(device) - management.minimum_inference_memory())
        if evicting:
            free += _evictable(device)
        return free

    def dynamic_bytes(self) -> int | None:
        return versions.dynamic_vram_bytes()

    def evict(self, wanted: int) -> None:
        # `free_vram` subtracts this reserve, so ComfyUI must free the reserve in addition.
        reserved = int(comfy.model_management.minimum_inference_memory())
        comfy.model_management.free_memory(wanted + reserved, self.device())

    def make_room_for_workers(self) -> None:
        management = comfy.model_management
        self._experts.free()
        self._workers_patcher = self._workers_patcher or workers_patcher(
            self.worker_registry.release_memory, self.device()
        )
        # This adds the workers to ComfyUI's list, so that unloading all models reaches them too.
        management.load_models_gpu([self._workers_patcher])
        if runtime_for(self.device()) is not None:
            # One worker shares this process's GPU, so this process's models must be evicted.
            ours = [
                entry for entry in versions.loaded_models() if entry.model is self._workers_patcher
            ]
            management.free_memory(ALL, self.device(), keep_loaded=ours)


def _evictable(device: torch.device) -> int:
    """Return the bytes on `device` in other, evictable models."""
    others = [
        entry
        for entry in versions.loaded_models(device)
        # The model is None if the MODEL was collected: entries hold weak references.
        if not isinstance(entry.model, ExpertsPatcher | None)
    ]
    return sum(int(entry.model_loaded_memory()) for entry in others)
