"""Planner: chooses the offload policy of a run by compiling and simulating every candidate that fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from ..schema import OffloadPolicy, Timeline, plan_residency
from .candidates import Fit, Misfit, fitting_policies, is_usual, least_seconds, with_homes
from .machine import Machine
from .memory import DoesNotFitError, memory_budget, memory_needs
from .offload_job import Budgets, OffloadJob
from .predict import Prediction, compile_programs, predict, visit_seconds
from .transfer_program import TransferProgram


def plan_reason(job: OffloadJob, machine: Machine, chosen: Prediction) -> str:
    """`32 of 40 blocks stream: 13.1 GB/s needed, the bus gives 24.6; ...; 0.3 % stall predicted; switch +0.0 s`."""
    parts = [_streaming(job, machine, chosen.policy), _reading(machine, chosen)]
    if chosen.policy.chunk_tokens is not None:
        parts.append(f"{chosen.policy.chunk_tokens} of {job.tokens} tokens at once, so that it fits")
    wall_s = chosen.timeline.wall_s
    parts.append(f"{100 * chosen.timeline.stall_s / wall_s:.1f} % stall predicted")
    if len(set(job.experts_of_steps)) > 1:
        parts.append(f"switch +{chosen.switch_s:.1f} s")
    return "; ".join(parts)


def describe_policy(policy: OffloadPolicy, blocks: int) -> str:
    """`30 of 40 stream, 2 ahead` and the like: what a policy does on the device."""
    if policy.kind == "resident":
        return "both experts stay"
    streamed = blocks if policy.kind == "layerwise" else policy.blocks_to_swap
    return f"{streamed} of {blocks} stream, {policy.prefetch_blocks} ahead" if streamed else "one expert stays"


def describe_ram(policy: OffloadPolicy) -> str:
    """Where what streams comes from."""
    if policy.source == "file":
        return "file"
    if policy.ram_blocks is None:
        return "all in RAM"
    return f"{policy.ram_blocks} in RAM"


def _streaming(job: OffloadJob, machine: Machine, policy: OffloadPolicy) -> str:
    if policy.kind == "resident":
        return "both experts stay on the device"
    residency, _ = plan_residency(policy, job.block_counts)
    blocks = job.expert.blocks
    needed, rate = 0.0, machine.h2d_bytes_per_s
    for expert in set(job.experts_of_steps):
        streamed = blocks - len(residency.residents[expert])
        needed = max(needed, streamed * job.stored_bytes / (blocks * _visit_s(job, machine, expert, policy)))
    if not needed:
        return f"all {blocks} blocks of the expert that runs stay on the device"
    text = f"{streamed} of {blocks} blocks stream"
    return text if rate is None else f"{text}: {needed / 1e9:.1f} GB/s needed, the bus gives {rate / 1e9:.1f}"


def _reading(machine: Machine, chosen: Prediction) -> str:
    """What the files must give in usual steps."""
    usual = [step for before, step in pairwise(chosen.timeline.steps) if before.expert == step.expert]
    # A GPU decodes beside its computing, a CPU between.
    decodes_between = machine.computes_on == "cpu"
    needed = max((s.read_bytes / (s.compute_s + (s.decode_s if decodes_between else 0)) for s in usual), default=0.0)
    if not needed:
        return "each block is read from its file once"
    return f"{needed / 1e9:.1f} GB/s needed from files, the disk gives {machine.disk_bytes_per_s / 1e9:.1f}"


def _visit_s(job: OffloadJob, machine: Machine, expert: str, policy: OffloadPolicy) -> float:
    return visit_seconds(job, machine, expert, policy.chunk_tokens)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A policy that fits, and what it is predicted to take. `total_s` is told to the millisecond."""

    policy: OffloadPolicy
    total_s: float
    stall_s: float
    switch_s: float
    """Seconds by which the steps after a change of expert wait longer than usual ones."""
    device_bytes: int
    host_bytes: int

    @property
    def rank(self) -> tuple[float, int, int]:
        """The smaller, the better: time, then device memory, then RAM."""
        return (self.total_s, self.device_bytes, self.host_bytes)


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """The chosen policy with the simulated timeline of the run, and what it was chosen from."""

    policy: OffloadPolicy
    timeline: Timeline
    device_bytes: int
    host_bytes: int
    candidates: tuple[Candidate, ...]
    """Every policy that was simulated, the best first. Policies that cannot be faster than the chosen one, by the bytes
    that they move, are not simulated."""
    misfits: tuple[Misfit, ...]
    """Usual policies for which there is too little memory."""
    reason: str
    """Why this one, in words with numbers."""

    @property
    def total_s(self) -> float:
        return self.candidates[0].total_s


def plan_offload(job: OffloadJob, machine: Machine, budgets: Budgets) -> OffloadPlan:
    """The policy under which `job` is predicted to end first on `machine`.

    Of equal ones (to the millisecond) the one with the smallest device memory is chosen, then with the least RAM.
    Raises DoesNotFitError when there is too little memory for any.
    """
    fitting, misfits = fitting_policies(job, machine, memory_budget(machine, budgets))
    if not fitting:
        raise DoesNotFitError(_nothing_fits(misfits, machine, budgets))
    search = _Search(job, machine)
    for fit in fitting:
        if is_usual(fit.policy, job):
            search.simulate(fit.policy)
    for hope, fit in sorted(((search.hope(fit), fit) for fit in fitting), key=lambda pair: pair[0]):
        if hope >= search.best.rank:
            break
        search.simulate(fit.policy)
    search.spare_homes()
    candidates = tuple(sorted(search.candidates.values(), key=lambda candidate: candidate.rank))
    chosen = search.predictions[candidates[0].policy]
    return OffloadPlan(
        policy=chosen.policy,
        timeline=chosen.timeline,
        device_bytes=candidates[0].device_bytes,
        host_bytes=candidates[0].host_bytes,
        candidates=candidates,
        misfits=tuple(misfits),
        reason=plan_reason(job, machine, chosen),
    )


class _Search:
    """The candidates that were simulated so far, and the best of them."""

    def __init__(self, job: OffloadJob, machine: Machine) -> None:
        self._job = job
        self._machine = machine
        self.candidates: dict[OffloadPolicy, Candidate] = {}
        self.predictions: dict[OffloadPolicy, Prediction] = {}
        self._programs: dict[OffloadPolicy, TransferProgram] = {}

    @property
    def best(self) -> Candidate:
        """The best of them; there must be one."""
        return min(self.candidates.values(), key=lambda candidate: candidate.rank)

    def hope(self, fit: Fit) -> tuple[float, int, int]:
        """The rank that this policy could have at best."""
        # Rounded as totals are, from a hair below: a sum in another order must not hide a policy.
        least_s = round(least_seconds(self._job, self._machine, fit.policy) - 1e-6, 3)
        return (least_s, fit.needs.device_bytes, fit.needs.host_bytes)

    def spare_homes(self) -> None:
        """Look for fewer homes in RAM with which the best policy is as fast."""
        best = self.best
        if best.policy.source == "file":
            return
        distinct = sum(self._job.block_counts.values())
        enough = distinct if best.policy.ram_blocks is None else best.policy.ram_blocks
        too_few = 0
        while enough - too_few > 1:
            homes = (enough + too_few) // 2
            if self.simulate(with_homes(best.policy, homes)).total_s <= best.total_s:
                enough = homes
            else:
                too_few = homes

    def simulate(self, policy: OffloadPolicy) -> Candidate:
        """The candidate of this policy, added if it is not there yet."""
        if policy not in self.candidates:
            on_device = replace(policy, source="file", ram_blocks=None, chunk_tokens=None)
            programs = compile_programs(self._job, self._machine, policy, device=self._programs.get(on_device))
            self._programs[on_device] = programs.device
            prediction = predict(self._job, self._machine, policy, programs=programs)
            needs = memory_needs(self._job, self._machine, policy)
            self.predictions[policy] = prediction
            self.candidates[policy] = Candidate(
                policy=policy,
                total_s=prediction.total_s,
                stall_s=prediction.timeline.stall_s,
                switch_s=prediction.switch_s,
                device_bytes=needs.device_bytes,
                host_bytes=needs.host_bytes,
            )
        return self.candidates[policy]


def _nothing_fits(misfits: list[Misfit], machine: Machine, budgets: Budgets) -> str:
    """What the smallest policy lacks, and what helps."""
    least = min(misfits, key=lambda misfit: (misfit.needs.device_bytes, misfit.needs.host_bytes))
    asked = budgets.vram_bytes is not None or budgets.ram_bytes is not None
    remedy = "give more, or make" if asked else "make"
    return f"{machine.name}: {least.why}; {remedy} the video smaller or shorter"
