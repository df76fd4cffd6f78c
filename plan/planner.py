"""Planner: picks an offload policy by compiling and simulating the candidates that fit.

Run costs come from the model's shape (`plan_offload`) or from its first call (`plan_passes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, partial

from ..schema import OffloadPolicy
from ..schema.records import StepRecord
from .candidates import (
    Candidates,
    Fit,
    is_usual,
    last_step_bound_s,
    lower_bound_s,
    with_ram_blocks,
)
from .costs import BlockCosts, Budgets, RunModel, measured_costs
from .describe import plan_reason
from .machine import Machine
from .memory import DoesNotFitError, MemoryBudget, memory_budget, memory_needs
from .predict import Prediction, compile_programs, predict
from .programs.transfer_program import TransferProgram

WORTH = 0.05
"""Share of the time another policy must save to replace the present one.

Predictions are not more accurate than this, and a new policy fetches blocks again.
"""


@dataclass(frozen=True, kw_only=True)
class Candidate(Prediction):
    """Prediction for a fitting policy, with the bytes it takes."""

    device_bytes: int
    host_bytes: int

    @property
    def rank(self) -> tuple[float, int, int]:
        """Sort key, best first: time, then device memory, then RAM."""
        return (self.total_s, self.device_bytes, self.host_bytes)

    @property
    def last_step_s(self) -> float:
        """Duration of the last step in seconds."""
        return self.timeline.steps[-1].wall_s


@dataclass(frozen=True, kw_only=True)
class OffloadPlan(Candidate):
    """Chosen policy with the candidates considered."""

    candidates: tuple[Candidate, ...]
    """Simulated policies, best first. A policy whose lower bound is worse than the best is not
    simulated."""
    misfits: tuple[Fit, ...]
    """Usual policies that do not fit into memory."""
    reason: str
    """Explanation with numbers."""


def plan_offload(run: RunModel, machine: Machine, budgets: Budgets) -> OffloadPlan:
    """Return the policy with the shortest predicted time for `run` on `machine` within `budgets`.

    Candidates are the fitting ones from `Candidates`, and the best one again with fewer
    RAM-resident blocks. Others with fewer would multiply the simulations, and may be faster by some
    thousandths. Policies equal to the millisecond are ranked by device memory, then by RAM. Raises
    DoesNotFitError if no policy fits into memory.
    """
    # Hundreds of candidates share a few token counts.
    costs = cache(partial(run.costs, machine))
    budget = memory_budget(machine, budgets)
    search = _Search(Candidates(costs=costs, chunks=run.chunks, budget=budget))
    fitting, misfits = search.space.fitting()
    if not fitting:
        least = min(misfits, key=lambda fit: (fit.needs.device_bytes, fit.needs.host_bytes))
        remedy = "make" if budgets == Budgets() else "give more, or make"
        raise DoesNotFitError(
            f"{machine.name}: {least.shortage}; {remedy} the video smaller or shorter"
        )
    search.find_shortest(fitting)
    search.reduce_ram_blocks()
    candidates = tuple(sorted(search.candidates.values(), key=lambda candidate: candidate.rank))
    chosen = candidates[0]
    return OffloadPlan(
        policy=chosen.policy,
        timeline=chosen.timeline,
        device_bytes=chosen.device_bytes,
        host_bytes=chosen.host_bytes,
        candidates=candidates,
        misfits=tuple(misfits),
        reason=plan_reason(search.space.costs(chosen.policy.chunk_tokens), machine, chosen),
    )


class _Search:
    """Candidates simulated so far."""

    def __init__(self, space: Candidates) -> None:
        self.space = space
        self.candidates: dict[OffloadPolicy, Candidate] = {}
        self._programs: dict[OffloadPolicy, TransferProgram] = {}
        self._blocks = space.costs(None).blocks

    @property
    def best(self) -> Candidate:
        """Best candidate so far. There must be at least one."""
        return min(self.candidates.values(), key=lambda candidate: candidate.rank)

    def find_shortest(self, fitting: list[Fit]) -> None:
        """Simulate usual policies, then others by lower bound until none can be the best."""
        for fit in fitting:
            if is_usual(fit.policy, self._blocks.blocks):
                self.simulate(fit.policy)
        for bound, fit in sorted(
            ((self._lower_bound(fit), fit) for fit in fitting), key=lambda pair: pair[0]
        ):
            # The bounds ascend, so no later policy can be the best either.
            if bound >= self.best.rank:
                break
            self.simulate(fit.policy)

    def _lower_bound(self, fit: Fit) -> tuple[float, int, int]:
        """Return a lower bound on the policy's rank."""
        # Rounded like totals, after subtracting a tolerance. Another summation order must not
        # exclude a policy.
        bound_s = round(
            lower_bound_s(self.space.costs(fit.policy.chunk_tokens), fit.policy) - 1e-6, 3
        )
        return (bound_s, fit.needs.device_bytes, fit.needs.host_bytes)

    def smallest_of_fastest(self, fits: list[Fit], tolerance: float) -> Candidate | None:
        """Return the policy with the least memory among the shortest last steps.

        None without policies. Others are simulated until no further one can be the result.
        """
        bounds = {fit.policy: last_step_bound_s(self.space.costs(None), fit.policy) for fit in fits}
        least_s = min(bounds.values(), default=0.0)
        near = 1 + tolerance
        shortest_s = math.inf
        by_memory = sorted(
            fits,
            key=lambda fit: (fit.needs.device_bytes, fit.needs.host_bytes, bounds[fit.policy]),
        )
        # With the most memory first: its last step is short, and excludes most others.
        for fit in by_memory[-1:] + by_memory:
            if bounds[fit.policy] <= near * shortest_s:
                last_step_s = self.simulate(fit.policy).last_step_s
                shortest_s = min(shortest_s, last_step_s)
                # All later ones take at least as much memory, and none is faster than `least_s`.
                if fit is not by_memory[-1] and last_step_s <= near * least_s:
                    break
        fast_enough = [
            each for each in self.candidates.values() if each.last_step_s <= near * shortest_s
        ]
        return min(
            fast_enough,
            key=lambda each: (each.device_bytes, each.host_bytes, each.last_step_s),
            default=None,
        )

    def reduce_ram_blocks(self) -> None:
        """Search for the fewest RAM-resident blocks at which the best policy is equally fast."""
        best = self.best
        if best.policy.source == "file":
            return
        # The most blocks that fit need not be the fastest. One fewer may spread the reads better
        # over a pass.
        while (ram_blocks := best.policy.ram_blocks or 0) > 1:
            fewer = self.simulate(with_ram_blocks(best.policy, ram_blocks - 1))
            if fewer.total_s >= best.total_s:
                break
            best = fewer
        enough = len(self._blocks.stacks) * self._blocks.blocks
        if best.policy.ram_blocks is not None:
            enough = best.policy.ram_blocks
        too_few = 0
        while enough - too_few > 1:
            ram_blocks = (enough + too_few) // 2
            if self.simulate(with_ram_blocks(best.policy, ram_blocks)).total_s <= best.total_s:
                enough = ram_blocks
            else:
                too_few = ram_blocks

    def simulate(self, policy: OffloadPolicy) -> Candidate:
        """Return the candidate for this policy, and add it if it is new."""
        if policy not in self.candidates:
            costs = self.space.costs(policy.chunk_tokens)
            # The device program does not depend on RAM or chunks, so it is compiled once and
            # shared.
            on_device = replace(policy, source="file", ram_blocks=None, chunk_tokens=None)
            programs = compile_programs(costs, policy, device=self._programs.get(on_device))
            self._programs[on_device] = programs.device
            needs = self.space.needs(policy)
            self.candidates[policy] = Candidate(
                policy=policy,
                timeline=predict(costs, policy, programs=programs).timeline,
                device_bytes=needs.device_bytes,
                host_bytes=needs.host_bytes,
            )
        return self.candidates[policy]


@dataclass(frozen=True, kw_only=True)
class PassPlan(Candidate):
    """Predicted passes over the blocks under the chosen policy."""

    passes: int
    """Passes per model call, one for each condition computed by itself."""

    @property
    def call_s(self) -> float:
        """Seconds per model call after the first ones."""
        return self.passes * self.last_step_s


def plan_passes(
    blocks: BlockCosts,
    measured: StepRecord,
    *,
    passes: int,
    present: OffloadPolicy,
    budgets: Budgets,
    has_bus: bool,
    keep_present: bool = True,
) -> PassPlan | None:
    """Return the policy predicted to be the fastest.

    The present one stays unless another saves at least `WORTH`.

    Policies within a hundredth count as equal. Among them the least device memory wins, then the
    least RAM. None if the call moved nothing, or without `keep_present` if no policy fits.

    Args:
        blocks: the model's blocks.
        measured: record of a model call.
        passes: passes over the blocks per call from now on.
        present: policy during the call.
        budgets: limits for weights on the device and in RAM. On a CPU the RAM limit covers both.
            None: no limit.
        has_bus: True for a device with dedicated memory. False for a CPU.
        keep_present: True if the present policy may stay without fitting, because it is loaded.
    """
    costs = measured_costs(blocks, measured, passes, has_bus=has_bus)
    if costs is None:
        return None
    in_use = memory_needs(blocks, present, has_bus=has_bus)
    budget = MemoryBudget(
        device=math.inf if budgets.vram_bytes is None else budgets.vram_bytes,
        # The present policy's slots exist already.
        host=math.inf if budgets.ram_bytes is None else max(budgets.ram_bytes, in_use.host_bytes),
        shared=not has_bus,
    )
    search = _Search(Candidates(costs=lambda _: costs, budget=budget))
    fits = [
        fit
        for fit in _most_in_ram(search.space.fitting()[0])
        # Without a copy, the rate from RAM is unknown.
        if fit.policy.source == "file" or measured.transfers.copied_bytes
    ]
    best = search.smallest_of_fastest(fits, tolerance=0.01)
    # After `best`, because the present policy need not fit into the budget.
    now = search.simulate(present)
    stays = keep_present or in_use.device_bytes <= budget.device
    if stays and (best is None or best.last_step_s >= (1 - WORTH) * now.last_step_s):
        best = now
    if best is None:
        return None
    return PassPlan(
        policy=best.policy,
        timeline=best.timeline,
        passes=passes,
        device_bytes=best.device_bytes,
        host_bytes=best.host_bytes,
    )


def _most_in_ram(fits: list[Fit]) -> Iterable[Fit]:
    """Return the fits for each device policy with no RAM-resident blocks, and with the most."""
    # Fits with more RAM-resident blocks come later and replace earlier ones.
    found = {
        (replace(fit.policy, source="file", ram_blocks=None), fit.policy.source): fit
        for fit in fits
    }
    return found.values()
