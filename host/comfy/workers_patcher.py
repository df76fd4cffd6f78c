"""Workers on the GPU of this process as a model that ComfyUI's memory manager can unload."""

from __future__ import annotations

import logging
from collections.abc import Callable

import comfy.model_management
import comfy.model_patcher
import torch

ALL = 1e30
"""Bytes, as in ComfyUI's own requests to unload everything."""

logger = logging.getLogger("wanstream.memory")


class WorkersModel(torch.nn.Module):
    """Model object for ComfyUI, without parameters: the weights are in other processes."""

    def __init__(self) -> None:
        super().__init__()
        self.device: torch.device | None = None


class WorkersPatcher(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    """Entry of the workers in ComfyUI's list of loaded models, from their first run until ComfyUI unloads it.

    Its size is 0, as the model has no parameters: ComfyUI makes no room for it, and unloads it whole.

    Args:
        release_memory: releases the workers' weights; returns False during a run, when it cannot.
        load_device: device of this process, which one of the workers shares.
    """

    def __init__(self, release_memory: Callable[[], bool], load_device: torch.device) -> None:
        # Set before the base class's __init__, which calls methods of this class.
        self._release_memory = release_memory
        super().__init__(WorkersModel(), load_device, torch.device("cpu"))

    def load_exclusively(self) -> None:
        """Put this entry into ComfyUI's list and evict all other models of the GPU."""
        management = comfy.model_management
        management.load_models_gpu([self])
        if self.load_device.type == "cuda":
            ours = [entry for entry in management.current_loaded_models if entry.model is self]
            management.free_memory(ALL, self.load_device, keep_loaded=ours)

    def detach(self, unpatch_all: bool = True) -> WorkersModel:
        """Release the workers' weights, unless `unpatch_all` is False: ComfyUI is about to load them again."""
        model: WorkersModel = self.model
        if unpatch_all:
            released = self._release_memory()
            logger.info(
                "the workers have unloaded their experts" if released else "the workers are running: not unloaded"
            )
        super().detach(unpatch_all)
        return model
