"""Automatic offload policy: the planner, applied to this machine and run.

The planner gets the free memory and the run's activations.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch

from ..devices import runtime_for
from ..devices.machine import available_bytes
from ..plan import (
    AVAILABLE_SHARE,
    RAM_SHARE,
    WORTH,
    AutoOffload,
    Budgets,
    DoesNotFitError,
    Machine,
    OffloadPlan,
    calibrate_machine,
    describe_policy,
    describe_ram,
    plan_offload,
    predict,
)
from ..schema import OffloadPolicy
from ..schema.records import Advice, StepRecord
from ..shapes import ExpertShape, RunShape
from ..wan import ExpertPair
from .machine_profile import load_machine_profile, stored_machine

logger = logging.getLogger("wanstream.planner")


Revise: TypeAlias = Callable[[StepRecord], OffloadPolicy | None]


@dataclass(frozen=True, kw_only=True)
class PolicyChoice:
    """The policy for one run. `reason` is empty for the user's own choice."""

    policy: OffloadPolicy
    reason: str = ""
    revise: Revise | None = None
    """Called with the first step's record. Returns a better policy for the rest, or None."""
    advise: Callable[[OffloadPolicy], Advice | None] = lambda policy: None
    """Called with the policy of the run when it has ended. See `AutoPlanner.advise`."""

    def revise_under(self, policy: OffloadPolicy) -> Revise | None:
        """Return `revise` if the host loaded the chosen policy, or None if a smaller one."""
        return self.revise if policy == self.policy else None


def free_memory(pair: ExpertPair, device: torch.device, free_vram: int) -> Budgets:
    """Return the bytes `pair` may use now, including memory it already uses.

    `vram_bytes` is missing if the device memory is RAM.
    """
    # Blocks filled by another process are not available, but cost this process nothing.
    ram = int(AVAILABLE_SHARE * available_bytes()) + max(pair.host_bytes, pair.shared_bytes)
    if runtime_for(device) is None:
        return Budgets(ram_bytes=ram + pair.loaded_bytes)
    return Budgets(vram_bytes=max(0, free_vram + pair.loaded_bytes), ram_bytes=ram)


def usable_bytes(device: torch.device, free_vram: int) -> int:
    """Return the bytes a run may use: `free_vram` on a GPU, or most of the available RAM."""
    if runtime_for(device) is None:
        return int(AVAILABLE_SHARE * available_bytes())
    return max(0, free_vram)


def limited(requested: Budgets, free: Budgets, machine: Machine) -> Budgets:
    """Return the requested budgets, limited to the free memory.

    By default, RAM is limited to `RAM_SHARE` of the total.
    """
    ram = requested.ram_bytes
    if ram is None:
        ram = int(RAM_SHARE * machine.ram_bytes)
    return Budgets(
        vram_bytes=smaller_limit(requested.vram_bytes, free.vram_bytes),
        ram_bytes=smaller_limit(ram, free.ram_bytes),
    )


def smaller_limit(*limits: int | None) -> int | None:
    """Return the smallest limit. None means no limit."""
    return min((limit for limit in limits if limit is not None), default=None)


class AutoPlanner:
    """Chooses policies, and corrects the machine profile by each run's first step.

    The correction applies to later runs.
    """

    def __init__(
        self,
        profile_of: Callable[..., Machine] = load_machine_profile,
        stored: Callable[..., Machine | None] = stored_machine,
    ) -> None:
        self._profile_of = profile_of
        self._stored = stored
        self._corrected: dict[tuple[torch.device, ExpertShape, Path], Machine] = {}

    def known_machine(
        self, device: torch.device, expert: ExpertShape, weights: Path
    ) -> Machine | None:
        """Return the corrected or stored machine profile, or None.

        Measures nothing.

        Args:
            device: compute device.
            expert: block shape.
            weights: a file on the disk with the blocks.
        """
        key = (device, expert, weights)
        return self._corrected.get(key) or self._stored(*key)

    def machine(self, device: torch.device, expert: ExpertShape, weights: Path) -> Machine:
        """Return the profile as `known_machine`, or measure the machine now (some seconds)."""
        key = (device, expert, weights)
        return self._corrected.get(key) or self._profile_of(*key)

    def choose(
        self,
        auto: AutoOffload,
        shape: RunShape,
        *,
        device: torch.device,
        weights: Path,
        free_memory_now: Callable[[bool], Budgets],
        starts_empty: bool,
    ) -> PolicyChoice:
        """Return the best policy for `shape` on `device` within `auto`'s budgets and free memory.

        Args:
            auto: user budgets.
            shape: run shape.
            device: compute device.
            weights: a file on the disk with the blocks.
            free_memory_now: returns the free memory. With True, memory evictable from other models
                is included.
            starts_empty: True if no block is loaded yet. Only then is the first step comparable to
                the prediction.

        Raises:
            DoesNotFitError: memory is too small for any policy. It is a ValueError with numbers.
        """
        key = (device, shape.expert, weights)
        machine = self.machine(*key)
        # Other models count as free, because the host evicts them when it loads the experts.
        plan = plan_offload(shape, machine, limited(auto.budgets, free_memory_now(True), machine))
        reason = _describe(plan, shape)
        logger.info("%s", reason)

        def revise(record: StepRecord) -> OffloadPolicy | None:
            # Samplers other than ours may not call the model once per sigma, as the shape assumes.
            if record.expert != shape.steps[0].expert or len(shape.steps) == 1:
                return None
            first = replace(record, index=0)  # a run may start at a later step
            self._corrected[key] = corrected = calibrate_machine(machine, shape, plan, first)
            # Nothing can be evicted in the middle of a run.
            now = limited(auto.budgets, free_memory_now(False), corrected)
            if now.vram_bytes is not None:  # the plan's memory is allocated already
                now = replace(now, vram_bytes=max(now.vram_bytes, plan.device_bytes))
            return _better_policy(plan, shape, corrected, now)

        return PolicyChoice(
            policy=plan.policy, reason=reason, revise=revise if starts_empty else None
        )

    def advise(
        self,
        policy: OffloadPolicy,
        shape: RunShape,
        *,
        device: torch.device,
        weights: Path,
        free_memory_now: Callable[[bool], Budgets],
        requested: Budgets,
    ) -> Advice | None:
        """Return the best policy for `shape` in free memory, and its simulated gain over `policy`.

        None without a machine profile, or if no policy fits. Measures nothing. Arguments as for
        `choose`, with the user budgets in `requested`.
        """
        machine = self.known_machine(device, shape.expert, weights)
        if machine is None:
            return None
        budgets = limited(requested, free_memory_now(True), machine)
        try:
            plan = plan_offload(shape, machine, budgets)
        except DoesNotFitError:
            return None
        present = predict(shape.costs(machine, policy.chunk_tokens), policy)
        return Advice(policy=_words(plan, shape), gain=present.total_s / plan.total_s)


def _better_policy(
    plan: OffloadPlan, shape: RunShape, machine: Machine, budgets: Budgets
) -> OffloadPolicy | None:
    """Return a policy that saves at least `WORTH` of the time after step 1, or None."""
    rest = shape.of_steps(range(1, len(shape.steps)))
    present = predict(rest.costs(machine, plan.policy.chunk_tokens), plan.policy)
    try:
        better = plan_offload(rest, machine, budgets)
    except DoesNotFitError:
        # Other processes have allocated memory in the meantime. The current policy continues.
        return None
    if better.total_s >= (1 - WORTH) * present.total_s:
        return None
    logger.info("the first step was not as predicted; for the rest %s", _describe(better, rest))
    return better.policy


def _describe(plan: OffloadPlan, shape: RunShape) -> str:
    return f"chosen: {_words(plan, shape)} ({plan.total_s:.1f} s predicted): {plan.reason}"


def _words(plan: OffloadPlan, shape: RunShape) -> str:
    return f"{describe_policy(plan.policy, shape.blocks.blocks)}, {describe_ram(plan.policy)}"
