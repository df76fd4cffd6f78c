"""What workers hold on the GPU of this process, as ComfyUI's memory manager sees it: a model that it can unload."""

from __future__ import annotations

import logging
from collections.abc import Callable

import comfy.model_management
import comfy.model_patcher
import torch

ALL = 1e30
"""Bytes; as ComfyUI asks for when it unloads everything."""

logger = logging.getLogger("wanstream.memory")


class WorkersModel(torch.nn.Module):
    """Stands where ComfyUI expects a model. It has no parameters: weights are in other processes."""

    def __init__(self) -> None:
        super().__init__()
        self.device: torch.device | None = None


class WorkersPatcher(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    """Lies in ComfyUI's list of loaded models from a run of workers on, until ComfyUI wants their memory.

    Args:
        rest: lets the workers give back what weights take; says whether it did, which it does not during a run.
        load_device: of this process; one of the workers computes there too.
    """

    def __init__(self, rest: Callable[[], bool], load_device: torch.device) -> None:
        # Before the base class, which asks for the size.
        self._rest = rest
        super().__init__(WorkersModel(), load_device, torch.device("cpu"))

    def list_alone(self) -> None:
        """Be in ComfyUI's list, and of the GPU's models the only one there."""
        management = comfy.model_management
        management.load_models_gpu([self])
        if self.load_device.type == "cuda":
            ours = [entry for entry in management.current_loaded_models if entry.model is self]
            management.free_memory(ALL, self.load_device, keep_loaded=ours)

    def is_dynamic(self) -> bool:
        return False

    def model_size(self) -> int:
        """Nothing for which room must be made: the workers find out themselves what there is."""
        return 0

    def loaded_size(self) -> int:
        return 0

    def lowvram_patch_counter(self) -> int:
        return 0

    def pinned_memory_size(self) -> int:
        return 0

    def model_mmap_residency(self, free: bool = False) -> tuple[int, int]:
        return 0, 0

    def partially_load(
        self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> int:
        self.model.device = device_to
        return 0

    def partially_unload(
        self, device_to: torch.device, memory_to_free: float = 0, force_patch_weights: bool = False
    ) -> int:
        """Nothing: ComfyUI detaches us then."""
        return 0

    def partially_unload_ram(self, ram_to_unload: float) -> None:
        """Blocks in RAM are shared between workers, and go with everything else."""

    def detach(self, unpatch_all: bool = True) -> WorkersModel:
        """Let the workers give everything back; `unpatch_all` False means that ComfyUI is about to load us again."""
        model: WorkersModel = self.model
        if unpatch_all:
            logger.info(
                "the workers have unloaded their experts" if self._rest() else "the workers are running and stay"
            )
        super().detach(unpatch_all)
        return model
