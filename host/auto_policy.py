"""Automatic offload policy: the planner, applied to this machine, its free memory and the activations of the run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..devices import available_bytes, runtime_for
from ..plan import (
    RAM_SHARE,
    AutoOffload,
    Budgets,
    DoesNotFitError,
    Machine,
    OffloadJob,
    OffloadPlan,
    calibrate_machine,
    describe_policy,
    describe_ram,
    plan_offload,
    predict,
)
from ..schema import ExpertShape, OffloadPolicy, StepRecord
from ..wan import ExpertPair
from .machine_profile import load_machine_profile, stored_machine

WORTH = 0.05
"""Share of the remaining time that a revised policy must save.

Predictions are not more accurate than this, and a change of policy fetches blocks again.
"""

AVAILABLE_SHARE = 0.9
"""Share of the free RAM that a run may use; the rest is for growth of other processes during the run."""

logger = logging.getLogger("wanstream.planner")


@dataclass(frozen=True, kw_only=True)
class PolicyChoice:
    """The policy of one run. `reason` is empty for the user's own choice."""

    policy: OffloadPolicy
    reason: str = ""
    revise: Callable[[StepRecord], OffloadPolicy | None] | None = None
    """Called with the record of the first step; returns a better policy for the rest, or None."""

    def revise_under(self, policy: OffloadPolicy) -> Callable[[StepRecord], OffloadPolicy | None] | None:
        """Return `revise` if the host loaded the chosen policy; None if it loaded a smaller one."""
        return self.revise if policy == self.policy else None


def free_memory(pair: ExpertPair, device: torch.device, free_vram: int) -> Budgets:
    """Return the bytes that `pair` may use now, including those it uses already; no `vram_bytes` if those are RAM."""
    # Blocks that another process has filled are not available, but cost this one nothing.
    ram = int(AVAILABLE_SHARE * available_bytes()) + max(pair.host_bytes, pair.shared_bytes)
    if runtime_for(device) is None:
        return Budgets(ram_bytes=ram + pair.loaded_bytes)
    return Budgets(vram_bytes=max(0, free_vram + pair.loaded_bytes), ram_bytes=ram)


def usable_bytes(device: torch.device, free_vram: int) -> int:
    """Return the bytes that a run may use: `free_vram` of a GPU, or most of the available RAM."""
    return max(0, free_vram) if runtime_for(device) is not None else int(AVAILABLE_SHARE * available_bytes())


def limited(requested: Budgets, free: Budgets, machine: Machine) -> Budgets:
    """Return the requested budgets, limited to the free memory; the default for RAM is `RAM_SHARE` of the machine's."""
    ram = requested.ram_bytes if requested.ram_bytes is not None else int(RAM_SHARE * machine.ram_bytes)
    return Budgets(
        vram_bytes=smaller_limit(requested.vram_bytes, free.vram_bytes), ram_bytes=smaller_limit(ram, free.ram_bytes)
    )


def smaller_limit(*limits: int | None) -> int | None:
    """Return the smallest limit; None is no limit."""
    return min((limit for limit in limits if limit is not None), default=None)


class AutoPlanner:
    """Chooses policies, and corrects the machine profile for later runs by the first step of each run."""

    def __init__(
        self,
        profile_of: Callable[..., Machine] = load_machine_profile,
        stored: Callable[..., Machine | None] = stored_machine,
    ) -> None:
        self._profile_of, self._stored = profile_of, stored
        self._corrected: dict[tuple[torch.device, ExpertShape, Path], Machine] = {}

    def known_machine(self, device: torch.device, expert: ExpertShape, weights: Path) -> Machine | None:
        """Return the corrected or stored profile of the machine, None without one. Measures nothing.

        Args:
            device: the compute device.
            expert: shape of the blocks.
            weights: a file on the disk that the blocks are read from.
        """
        key = (device, expert, weights)
        return self._corrected.get(key) or self._stored(*key)

    def machine(self, device: torch.device, expert: ExpertShape, weights: Path) -> Machine:
        """Return the profile as `known_machine`, or measure the machine now, which takes some seconds."""
        key = (device, expert, weights)
        return self._corrected.get(key) or self._profile_of(*key)

    def choose(
        self,
        auto: AutoOffload,
        job: OffloadJob,
        *,
        device: torch.device,
        weights: Path,
        free_memory_now: Callable[[bool], Budgets],
        starts_empty: bool,
    ) -> PolicyChoice:
        """Return the best policy for `job` on `device` within the budgets of `auto` and the free memory.

        Args:
            auto: the user's budgets.
            job: the run.
            device: the compute device.
            weights: a file on the disk that the blocks are read from.
            free_memory_now: returns the free memory; its argument is True to count evictable memory of other models.
            starts_empty: True if no block is loaded yet; the first step is comparable to its prediction only then.

        Raises:
            DoesNotFitError: memory is too small for any policy; a ValueError with numbers.
        """
        key = (device, job.expert, weights)
        machine = self.machine(*key)
        plan = plan_offload(job, machine, limited(auto.budgets, free_memory_now(True), machine))
        reason = _describe(plan, job)
        logger.info("%s", reason)

        def revise(record: StepRecord) -> OffloadPolicy | None:
            # Samplers that are not ours may not call the model once per sigma, as the job assumes.
            if record.expert != job.experts_of_steps[0] or len(job.experts_of_steps) == 1:
                return None
            first = replace(record, index=0)  # a run may start at a later step
            self._corrected[key] = corrected = calibrate_machine(machine, job, plan, first)
            now = limited(auto.budgets, free_memory_now(False), corrected)
            if now.vram_bytes is not None:  # the memory of the plan is allocated already
                now = replace(now, vram_bytes=max(now.vram_bytes, plan.device_bytes))
            return _better_policy(plan, job, corrected, now)

        return PolicyChoice(policy=plan.policy, reason=reason, revise=revise if starts_empty else None)


def _better_policy(plan: OffloadPlan, job: OffloadJob, machine: Machine, budgets: Budgets) -> OffloadPolicy | None:
    """Return a policy that saves at least `WORTH` of the time after the first step, None without one."""
    rest = job.of_steps(range(1, len(job.experts_of_steps)))
    present = predict(rest, machine, plan.policy)
    try:
        better = plan_offload(rest, machine, budgets)
    except DoesNotFitError:  # other processes have allocated memory since; the present policy continues
        return None
    if better.total_s >= (1 - WORTH) * present.total_s:
        return None
    logger.info("the first step was not as predicted; for the rest %s", _describe(better, rest))
    return better.policy


def _describe(plan: OffloadPlan, job: OffloadJob) -> str:
    on_device = describe_policy(plan.policy, job.expert.blocks)
    return f"chosen: {on_device}, {describe_ram(plan.policy)} ({plan.total_s:.1f} s predicted): {plan.reason}"
