"""Host memory: the device, the policy that fits there, and the workers that share it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from ..distributed import Driver, Pool
from ..plan import AutoOffload, Budgets
from ..schema import Mesh, OffloadPolicy
from ..schema.refs import ExpertsRef, WorkersRef
from ..shapes import RunShape
from ..wan import ExpertPair
from .auto_policy import AutoPlanner, PolicyChoice, free_memory, usable_bytes
from .workers.plan import SharedRun, WorkersPlan, WorkersPlanner
from .workers.registry import WorkerRegistry


class Memory(Protocol):
    """Host memory. All methods run on the executing node's thread."""

    planner: AutoPlanner
    worker_registry: WorkerRegistry
    workers_planner: WorkersPlanner

    def device(self) -> torch.device:
        """Return the compute device."""

    def free_vram(self, *, evicting: bool = False) -> int:
        """Return the free GPU bytes minus the reserve.

        `evicting` counts memory used by other models.
        """

    def dynamic_bytes(self) -> int | None:
        """Return device bytes in the host's dynamic VRAM, used by other models.

        Return None if the host has none.
        """

    def evict(self, wanted: int) -> None:
        """Evict other models until `wanted` bytes are free or none is left."""

    def make_room_for_workers(self) -> None:
        """Free the model memory in this process."""

    def make_room(self, wanted: int) -> int:
        """Evict other models until `wanted` bytes are free or none is left.

        Return the usable bytes.

        The bytes are device memory, or RAM on a CPU.
        """
        self.evict(wanted)
        return usable_bytes(self.device(), self.free_vram())

    def choose_policy(
        self,
        pair: ExpertPair,
        ref: ExpertsRef,
        policy: OffloadPolicy | AutoOffload,
        shape: RunShape,
    ) -> PolicyChoice:
        """Return `policy` itself or, for an AutoOffload, the best for `shape` in free memory here.

        Measures the machine (some seconds) if no profile exists. Raises DoesNotFitError if
        memory is too small for any policy.
        """
        device = self.device()
        weights = ref.high_noise

        def free_memory_now(evicting: bool) -> Budgets:
            return free_memory(pair, device, self.free_vram(evicting=evicting))

        advise = partial(
            self.planner.advise,
            shape=shape,
            device=device,
            weights=weights,
            free_memory_now=free_memory_now,
        )
        if isinstance(policy, OffloadPolicy):
            return PolicyChoice(policy=policy, advise=partial(advise, requested=Budgets()))
        choice = self.planner.choose(
            policy,
            shape,
            device=device,
            weights=weights,
            free_memory_now=free_memory_now,
            starts_empty=not pair.loaded_bytes,
        )
        return replace(choice, advise=partial(advise, requested=policy.budgets))

    def plan_workers(self, run: SharedRun, ref: ExpertsRef) -> WorkersPlan:
        """Return layout and policy for a run with the experts `ref` on workers.

        Equal runs get equal plans.

        Measures the machine (some seconds) if the plan depends on the speed and no profile
        exists. Raises MeshError for a layout that does not suit the run, and DoesNotFitError if
        memory is too small.
        """
        machine = partial(self.planner.machine, self.device(), run.shape.expert, ref.high_noise)
        return self.workers_planner.plan(run, machine)

    def workers(self, ref: WorkersRef, mesh: Mesh) -> Driver:
        """Return the driver for the workers in `ref` with layout `mesh`, started if necessary.

        Frees the model memory in this process first. The workers run until others are requested or
        the host ends. Raises RayMissingError, and the errors from starting workers.
        """
        self.make_room_for_workers()
        return self.worker_registry.get(ref, mesh, self.device())

    def worker_pool(self, ref: WorkersRef) -> Pool:
        """Return the workers named by `ref` without a layout, for independent tasks.

        Otherwise as `workers`.
        """
        self.make_room_for_workers()
        return self.worker_registry.pool(ref, self.device())
