"""Memory without ComfyUI: the open experts are the only models."""

from __future__ import annotations

import torch

from ...devices import compute_device, free_bytes
from ...plan import VRAM_RESERVE
from ...wan import ExpertsRegistry
from ..auto_policy import AutoPlanner, usable_bytes
from ..memory import Memory
from ..workers.plan import WorkersPlanner
from ..workers.registry import WorkerRegistry


class EmbeddedMemory(Memory):
    """Memory on a run's device. Outside a run, it is a GPU if there is one.

    Args:
        experts: the open experts. They are closed when the memory is needed.
        planner: chooses policies.
    """

    def __init__(self, experts: ExpertsRegistry, planner: AutoPlanner) -> None:
        self.planner = planner
        self.worker_registry = WorkerRegistry()
        self.workers_planner = WorkersPlanner()
        self._experts = experts
        self.of_run: torch.device | None = None
        """Device of the run. None means a GPU if there is one."""

    def device(self) -> torch.device:
        return compute_device(self.of_run)

    def free_vram(self, *, evicting: bool = False) -> int:
        # `evicting` makes no difference: this host has no other models.
        return (free_bytes(self.device()) or 0) - VRAM_RESERVE

    def dynamic_bytes(self) -> int | None:
        return None

    def evict(self, wanted: int) -> None:
        if usable_bytes(self.device(), self.free_vram()) < wanted:
            self._experts.free()

    def make_room_for_workers(self) -> None:
        self._experts.free()
