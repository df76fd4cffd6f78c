"""Turns a wish for the best policy into one: the planner, this machine, and the memory that is really free."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..plan import (
    RAM_SHARE,
    AutoOffload,
    Budgets,
    DoesNotFitError,
    Machine,
    OffloadJob,
    OffloadPlan,
    describe_policy,
    describe_ram,
    plan_offload,
    predict,
    updated_machine,
)
from ..schema import ExpertShape, OffloadPolicy, StepRecord

if TYPE_CHECKING:
    import torch

    from ..wan import ExpertPair

WORTH = 0.05
"""Share of the rest of a run that another policy must save: a prediction is not better than that, and blocks that have
to be fetched anew cost time too."""

AVAILABLE_SHARE = 0.9
"""What a run may take of the RAM that is free when it is planned: the rest is for what others take while it goes on."""

logger = logging.getLogger("wanstream.planner")


@dataclass(frozen=True, kw_only=True)
class FreeMemory:
    """Bytes that the experts may take by what is free now, their own counted in; `vram_bytes` None: not a GPU."""

    vram_bytes: int | None
    ram_bytes: int

    def within(self, asked: Budgets, machine: Machine) -> Budgets:
        """The budgets that were asked for, and no more than there is; RAM of which nothing was said is half of all."""
        ram = asked.ram_bytes if asked.ram_bytes is not None else int(RAM_SHARE * machine.ram_bytes)
        vram = asked.vram_bytes
        if self.vram_bytes is not None:
            vram = self.vram_bytes if vram is None else min(vram, self.vram_bytes)
        return Budgets(vram_bytes=vram, ram_bytes=min(ram, self.ram_bytes))


@dataclass(frozen=True, kw_only=True)
class PolicyChoice:
    """The policy of one run. `reason` is empty where a user has chosen it."""

    policy: OffloadPolicy
    reason: str = ""
    revise: Callable[[StepRecord], OffloadPolicy | None] | None = None

    def revise_under(self, policy: OffloadPolicy) -> Callable[[StepRecord], OffloadPolicy | None] | None:
        """What to ask after the first step; nothing where the host had room for another policy only."""
        return self.revise if policy == self.policy else None


def free_memory(pair: ExpertPair, device: torch.device, *, free: int, reserved: int) -> FreeMemory:
    """The room for `pair` where a GPU has `free` bytes beside it, and `reserved` of these are for others."""
    from ..devices import available_bytes

    ram = int(AVAILABLE_SHARE * available_bytes()) + pair.host_bytes
    if device.type != "cuda":
        return FreeMemory(vram_bytes=None, ram_bytes=ram + pair.loaded_bytes)
    return FreeMemory(vram_bytes=max(0, free + pair.loaded_bytes - reserved), ram_bytes=ram)


ProfileOf = Callable[["torch.device", ExpertShape, Path], Machine]
"""Device, experts and a file of weights -> the machine, measured or kept."""

KnownProfileOf = Callable[["torch.device", ExpertShape, Path], Machine | None]
"""The same, None where it would have to be measured."""


def measured_machine(
    device: torch.device, expert: ExpertShape, weights: Path, *, make_room: Callable[[], object] = lambda: None
) -> Machine:
    """The kept profile of this machine; where there is none, `make_room` is called and the machine measured now."""
    import torch

    from .machine_profile import load_machine_profile

    # Hosts run nodes in inference mode, and what probes measure with is changed in other threads.
    with torch.inference_mode(False):
        return load_machine_profile(device, expert=expert, models=weights, make_room=make_room)


def known_machine(device: torch.device, expert: ExpertShape, weights: Path) -> Machine | None:
    """The kept profile of this machine, None where there is none; nothing is measured."""
    from .machine_profile import kept_machine

    return kept_machine(device, expert=expert, models=weights)


class AutoPlanner:
    """Chooses policies, and keeps for later runs what a first step has taught about the machine."""

    def __init__(self, profile_of: ProfileOf = measured_machine, known: KnownProfileOf = known_machine) -> None:
        self._profile_of, self._known = profile_of, known
        self._learned: dict[tuple[torch.device, ExpertShape, Path], Machine] = {}

    def known(self, expert: ExpertShape, *, device: torch.device, weights: Path) -> Machine | None:
        """The machine as a run has taught it, or as it was measured before; None where neither was. Measures nothing.

        Args:
            expert: whose blocks are computed.
            device: what computes them.
            weights: a file on the disk that they are read from.
        """
        key = (device, expert, weights)
        return self._learned.get(key) or self._known(*key)

    def machine(self, expert: ExpertShape, *, device: torch.device, weights: Path) -> Machine:
        """The same, measured now where it is not known, which takes some seconds."""
        key = (device, expert, weights)
        return self._learned.get(key) or self._profile_of(*key)

    def choose(
        self,
        auto: AutoOffload,
        job: OffloadJob,
        *,
        device: torch.device,
        weights: Path,
        room: Callable[[bool], FreeMemory],
        starts_empty: bool,
    ) -> PolicyChoice:
        """The best policy for `job` on `device` within the budgets of `auto` and the `room` that there is.

        `room(evicting)` tells it, with or without what other models would have to give up for it.
        `starts_empty` says that no block is there yet: only then does a first step tell what the planner foretold.
        Raises DoesNotFitError, a ValueError with numbers, where there is too little memory for any policy.
        """
        key = (device, job.expert, weights)
        machine = self.machine(job.expert, device=device, weights=weights)
        budgets = room(True).within(auto.budgets, machine)
        plan = plan_offload(job, machine, budgets)
        reason = _words(plan, job)
        logger.info("%s", reason)

        def revise(record: StepRecord) -> OffloadPolicy | None:
            if record.expert != job.experts_of_steps[0] or len(job.experts_of_steps) == 1:
                return None  # a sampler that is not ours calls the model in another way than its sigmas say
            first = replace(record, index=0)  # a run may start late
            self._learned[key] = learned = updated_machine(machine, job, plan, first)
            now = room(False).within(auto.budgets, learned)
            if now.vram_bytes is not None:  # what the plan takes has been given to us
                now = replace(now, vram_bytes=max(now.vram_bytes, plan.device_bytes))
            return _better(plan, job, learned, now)

        return PolicyChoice(policy=plan.policy, reason=reason, revise=revise if starts_empty else None)


def _better(plan: OffloadPlan, job: OffloadJob, machine: Machine, budgets: Budgets) -> OffloadPolicy | None:
    """Another policy for the steps behind the first, where it saves enough of their time."""
    rest = replace(job, experts_of_steps=job.experts_of_steps[1:], lanes_of_steps=job.lanes_of_steps[1:])
    present = predict(rest, machine, plan.policy)
    try:
        better = plan_offload(rest, machine, budgets)
    except DoesNotFitError:  # others have taken memory since; what runs goes on
        return None
    if better.total_s >= (1 - WORTH) * present.total_s:
        return None
    logger.info("the first step was not as foretold; for the rest %s", _words(better, rest))
    return better.policy


def _words(plan: OffloadPlan, job: OffloadJob) -> str:
    on_device = describe_policy(plan.policy, job.expert.blocks)
    return f"chosen: {on_device}, {describe_ram(plan.policy)} ({plan.total_s:.1f} s predicted): {plan.reason}"
