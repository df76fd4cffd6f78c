"""The policies that a planner may choose from, and how fast each could be at best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from ..schema import OffloadPolicy, Residency, plan_residency
from .machine import Machine
from .memory import MemoryBudget, MemoryNeeds, memory_needs
from .offload_job import OffloadJob
from .predict import hardware_of
from .ram_program import RamResidency, plan_ram

DEPTHS = (1, 2, 3)
CHUNKS = (None, 32768, 16384, 8192, 4096, 2048)
"""Tokens at once, from many to few: each costs more time than the one before and less memory."""


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """A policy that there is too little memory for."""

    policy: OffloadPolicy
    needs: MemoryNeeds
    why: str


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A policy that there is memory for."""

    policy: OffloadPolicy
    needs: MemoryNeeds


def device_choices(blocks: int) -> Iterator[OffloadPolicy]:
    """Every number of residents with every depth, all of one expert, and all of both."""
    for depth in DEPTHS:
        yield OffloadPolicy.layerwise(depth)
    for residents in range(1, blocks):
        for depth in DEPTHS:
            yield OffloadPolicy.block_swap(blocks - residents, depth)
    yield OffloadPolicy.block_swap(0, 1)
    yield OffloadPolicy.resident()


def fitting_policies(job: OffloadJob, machine: Machine, room: MemoryBudget) -> tuple[list[Fit], list[Misfit]]:
    """Every choice on the device with no home in RAM, as many as fit, and all; and what others lack.

    Only usual policies are told of that do not fit.
    """
    fits: list[Fit] = []
    misfits: list[Misfit] = []
    for on_device in device_choices(job.expert.blocks):
        found, lacking = _with_tokens(job, machine, on_device, room)
        fits += found
        misfits += [misfit for misfit in lacking if is_usual(misfit.policy, job)]
    return fits, misfits


def is_usual(policy: OffloadPolicy, job: OffloadJob) -> bool:
    """Whether people would ask after this policy: a quarter, half, or all of the blocks resident, one ahead."""
    quarter = max(1, job.expert.blocks // 4)
    return policy.prefetch_blocks <= 1 and (policy.kind != "block_swap" or policy.blocks_to_swap % quarter == 0)


def with_homes(policy: OffloadPolicy, homes: int) -> OffloadPolicy:
    """`policy` with that many homes in RAM."""
    return replace(policy, source="pinned", ram_blocks=homes)


def _with_tokens(
    job: OffloadJob, machine: Machine, on_device: OffloadPolicy, room: MemoryBudget
) -> tuple[list[Fit], list[Misfit]]:
    """`on_device` with as many tokens at once as fit, and every kind of homes; and what lacks for the rest."""
    found: list[Fit] = []
    lacking: list[Misfit] = []
    for chunk in CHUNKS:
        if chunk is not None and chunk >= job.tokens:
            continue
        without = _fit(job, machine, replace(on_device, chunk_tokens=chunk), room)
        if isinstance(without, Misfit):
            lacking = [without]
            continue
        found.append(without)
        homes = min(room.slots(without.needs) - without.needs.ram_slots, sum(job.block_counts.values()) - 1)
        if homes > 0:
            some = with_homes(without.policy, homes)
            found.append(Fit(policy=some, needs=memory_needs(job, machine, some)))
        everything = _fit(job, machine, replace(without.policy, source="pinned"), room)
        if isinstance(everything, Fit):
            return [*found, everything], []
        lacking = [everything]
        # Fewer tokens at once are slower, and pay only where they leave RAM to more homes.
        if not room.shared:
            break
    return found, lacking


def _fit(job: OffloadJob, machine: Machine, policy: OffloadPolicy, room: MemoryBudget) -> Fit | Misfit:
    needs = memory_needs(job, machine, policy)
    why = room.lacks(needs)
    return Fit(policy=policy, needs=needs) if why is None else Misfit(policy=policy, needs=needs, why=why)


def least_seconds(job: OffloadJob, machine: Machine, policy: OffloadPolicy) -> float:
    """Seconds that the run of `policy` takes at the very least.

    At the end of every step, whatever it needed has passed disk and bus, and what comes after is still to be computed.
    Between the first and the last step of a stage that bound is linear, so these two are looked at.
    """
    residency, _ = plan_residency(policy, job.block_counts)
    homes = plan_ram(policy, residency, job.block_counts)
    traffic = _Traffic(job, machine, policy, residency, homes)
    stages = [(expert, sum(1 for _ in steps)) for expert, steps in groupby(job.experts_of_steps)]
    rest_s = sum(traffic.stage_seconds(expert, steps, first) for expert, steps, first in _first_uses(stages, residency))
    least_s = traffic.first_arrival_s + rest_s
    for expert, steps, first in _first_uses(stages, residency):
        for count in (1, steps - 1):
            if not count:
                continue
            traffic.pass_steps(expert, count, first)
            rest_s -= traffic.stage_seconds(expert, count, first)
            if traffic.moved_last:
                least_s = max(least_s, traffic.arrival_s + traffic.visit_s(expert) + rest_s)
            first = False
    return least_s


def _first_uses(stages: list[tuple[str, int]], residency: Residency) -> Iterator[tuple[str, int, bool]]:
    """Each stage with whether its residents are fetched anew in its first step."""
    seen: set[str] = set()
    for expert, steps in stages:
        yield expert, steps, not (residency.permanent and expert in seen)
        seen.add(expert)


class _Traffic:
    """What has passed disk and bus by the end of a step."""

    def __init__(
        self, job: OffloadJob, machine: Machine, policy: OffloadPolicy, residency: Residency, homes: RamResidency
    ) -> None:
        self._hardware = hardware_of(job, machine, policy.chunk_tokens)
        self._blocks = job.expert.blocks
        self._residents = residency
        self._homes = homes
        self._straight_in = machine.computes_on == "cpu" and not job.decodes
        self._read_before: set[str] = set()
        self._disk_s = self._bus_s = 0.0
        self.moved_last = False
        hardware, expert = self._hardware, job.experts_of_steps[0]
        self._read_s = hardware.read_bytes(expert) / (hardware.disk_bytes_per_s or 1.0)
        self._copy_s = 0.0 if hardware.decode_computes else hardware.block_bytes[expert] / hardware.bus_bytes_per_s
        if self._straight_in:
            # Then more homes are never slower by this bound, however slow RAM is.
            self._copy_s = min(self._copy_s, self._read_s)
        self._decode_s = hardware.decode_s.get(expert, 0.0)
        self.first_arrival_s = self._first_hop_s + self._last_hop_s + self._late_decode_s
        if self._straight_in:
            self.first_arrival_s += self._read_s

    @property
    def _late_decode_s(self) -> float:
        return 0.0 if self._hardware.decode_computes else self._decode_s

    @property
    def arrival_s(self) -> float:
        """The earliest time at which the last block of what has passed can be there."""
        # Whatever the queue, the first block has come from the disk before it, and the last passes those behind it.
        return max(self._disk_s + self._last_hop_s, self._bus_s + self._first_hop_s) + self._late_decode_s

    @property
    def _last_hop_s(self) -> float:
        return 0.0 if self._straight_in else self._copy_s

    @property
    def _first_hop_s(self) -> float:
        return 0.0 if self._straight_in else self._read_s

    def visit_s(self, expert: str) -> float:
        return self._hardware.visit_s[expert]

    def stage_seconds(self, expert: str, steps: int, first: bool) -> float:
        """Computing of `steps` steps, with what the computing thread decodes."""
        compute_s = steps * self._blocks * self._hardware.visit_s[expert]
        if self._hardware.decode_computes:
            compute_s += self._fetches(expert, steps, first) * self._decode_s
        return compute_s

    def pass_steps(self, expert: str, steps: int, first: bool) -> None:
        """Let all pass that `steps` steps of `expert` fetch; in the `first` step of a stage its residents too."""
        fetches = self._fetches(expert, steps, first)
        residents = self._residents.residents.get(expert, frozenset())
        at_home = self._homes.residency.residents.get(expert, frozenset())
        home_fetches = steps * len(at_home - residents) + (len(at_home & residents) if first else 0)
        home_reads = 0
        if expert not in self._read_before:
            home_reads = len(at_home)
            self._read_before.add(expert)
        passing = fetches - home_fetches
        self._disk_s += (passing + home_reads) * self._read_s
        self._bus_s += home_fetches * self._copy_s + passing * (self._read_s if self._straight_in else self._copy_s)
        self.moved_last = fetches > 0

    def _fetches(self, expert: str, steps: int, first: bool) -> int:
        residents = len(self._residents.residents.get(expert, frozenset()))
        return steps * (self._blocks - residents) + (residents if first else 0)
