"""Automatic offload policy: the planner, applied to this machine, its free memory and the activations of the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..devices import available_bytes, free_bytes
from ..plan import (
    RAM_SHARE,
    VRAM_RESERVE,
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
from ..sampling import CacheSettings, computed_shape, working_bytes
from ..schema import ContextWindows, ExpertShape, OffloadPolicy, StepRecord
from ..wan import ExpertPair

WORTH = 0.05
"""Share of the remaining time that a revised policy must save.

Predictions are not more accurate than this, and a change of policy fetches blocks again.
"""

AVAILABLE_SHARE = 0.9
"""Share of the free RAM that a run may use; the rest is for growth of other processes during the run."""

logger = logging.getLogger("wanstream.planner")


@dataclass(frozen=True, kw_only=True)
class FreeMemory:
    """Bytes that the experts may use now, including those they use already; `vram_bytes` is None on a CPU."""

    vram_bytes: int | None
    ram_bytes: int

    def within(self, requested: Budgets, machine: Machine) -> Budgets:
        """Return the requested budgets, limited to this memory; the default for RAM is `RAM_SHARE` of the machine's."""
        ram = requested.ram_bytes if requested.ram_bytes is not None else int(RAM_SHARE * machine.ram_bytes)
        vram = requested.vram_bytes
        if self.vram_bytes is not None:
            vram = self.vram_bytes if vram is None else min(vram, self.vram_bytes)
        return Budgets(vram_bytes=vram, ram_bytes=min(ram, self.ram_bytes))


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


def free_memory(pair: ExpertPair, device: torch.device, *, free: int, reserved: int) -> FreeMemory:
    """Return the memory for `pair` on a GPU with `free` bytes, of which `reserved` must stay free."""
    ram = int(AVAILABLE_SHARE * available_bytes()) + pair.host_bytes
    if device.type != "cuda":
        return FreeMemory(vram_bytes=None, ram_bytes=ram + pair.loaded_bytes)
    return FreeMemory(vram_bytes=max(0, free + pair.loaded_bytes - reserved), ram_bytes=ram)


ProfileOf = Callable[[torch.device, ExpertShape, Path], Machine]
"""Device, expert shape and a file of weights -> the machine, from its stored profile or measured now."""

StoredProfileOf = Callable[[torch.device, ExpertShape, Path], Machine | None]
"""The same, but None instead of a measurement."""


def measured_machine(
    device: torch.device, expert: ExpertShape, weights: Path, *, make_room: Callable[[], object] = lambda: None
) -> Machine:
    """Return the stored profile of this machine; without one, call `make_room` and measure it now."""
    from .machine_profile import load_machine_profile

    # Hosts run nodes in inference mode, which is thread-local: other threads could not write to the probes' buffers.
    with torch.inference_mode(False):
        return load_machine_profile(device, expert=expert, models=weights, make_room=make_room)


def known_machine(device: torch.device, expert: ExpertShape, weights: Path) -> Machine | None:
    """Return the stored profile of this machine, None without one. Measures nothing."""
    from .machine_profile import stored_machine

    return stored_machine(device, expert=expert, models=weights)


class AutoPlanner:
    """Chooses policies, and corrects the machine profile for later runs by the first step of each run."""

    def __init__(self, profile_of: ProfileOf = measured_machine, stored: StoredProfileOf = known_machine) -> None:
        self._profile_of, self._stored = profile_of, stored
        self._corrected: dict[tuple[torch.device, ExpertShape, Path], Machine] = {}

    def known_machine(self, expert: ExpertShape, *, device: torch.device, weights: Path) -> Machine | None:
        """Return the corrected or stored profile of the machine, None without one. Measures nothing.

        Args:
            expert: shape of the blocks.
            device: the compute device.
            weights: a file on the disk that the blocks are read from.
        """
        key = (device, expert, weights)
        return self._corrected.get(key) or self._stored(*key)

    def machine(self, expert: ExpertShape, *, device: torch.device, weights: Path) -> Machine:
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
        free_memory_now: Callable[[bool], FreeMemory],
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
        machine = self.machine(job.expert, device=device, weights=weights)
        budgets = free_memory_now(True).within(auto.budgets, machine)
        plan = plan_offload(job, machine, budgets)
        reason = _describe(plan, job)
        logger.info("%s", reason)

        def revise(record: StepRecord) -> OffloadPolicy | None:
            # Samplers that are not ours may not call the model once per sigma, as the job assumes.
            if record.expert != job.experts_of_steps[0] or len(job.experts_of_steps) == 1:
                return None
            first = replace(record, index=0)  # a run may start at a later step
            self._corrected[key] = corrected = calibrate_machine(machine, job, plan, first)
            now = free_memory_now(False).within(auto.budgets, corrected)
            if now.vram_bytes is not None:  # the memory of the plan is allocated already
                now = replace(now, vram_bytes=max(now.vram_bytes, plan.device_bytes))
            return _better_policy(plan, job, corrected, now)

        return PolicyChoice(policy=plan.policy, reason=reason, revise=revise if starts_empty else None)


def _better_policy(plan: OffloadPlan, job: OffloadJob, machine: Machine, budgets: Budgets) -> OffloadPolicy | None:
    """Return a policy that saves at least `WORTH` of the time after the first step, None without one."""
    rest = replace(job, experts_of_steps=job.experts_of_steps[1:], lanes_of_steps=job.lanes_of_steps[1:])
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


@dataclass(frozen=True, kw_only=True)
class MemoryEstimateInputs:
    """Settings of a run that determine its activation memory, in addition to the size of the latents."""

    chunk_tokens: int | None = None
    """Tokens per chunk of the feed-forward; None: all at once."""
    cache: CacheSettings | None = None
    windows: ContextWindows | None = None
    steps: int = 1

    def working_bytes(self, pair: ExpertPair, shape: Sequence[int]) -> int:
        """Return activation bytes for latents of `shape` [B, C, T, h, w], with a negative lane for each sample."""
        return working_bytes(
            pair,
            computed_shape(shape, self.windows, range(self.steps)),
            guided=True,
            chunk_tokens=self.chunk_tokens,
            cache=self.cache,
        )


def usable_bytes(device: torch.device, *, free: int | None = None, reserved: int = VRAM_RESERVE) -> int:
    """Return the bytes that a run may use: free VRAM minus `reserved` on a GPU, most of the available RAM on a CPU.

    Args:
        device: the compute device.
        free: free bytes of the GPU; None: as reported by the driver.
        reserved: bytes of the GPU to leave free.
    """
    if device.type != "cuda":
        return int(AVAILABLE_SHARE * available_bytes())
    return max(0, (free_bytes(device) or 0 if free is None else free) - reserved)
