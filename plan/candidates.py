"""Candidate policies of the planner, their memory needs, and a lower bound of their run time."""

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
"""Values of `chunk_tokens` in descending order: each takes less memory and more time than the one before."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Policy and its memory needs."""

    policy: OffloadPolicy
    needs: MemoryNeeds
    shortage: str | None
    """Reason for which the policy does not fit into memory; None if it fits."""


def device_policies(blocks: int) -> Iterator[OffloadPolicy]:
    """Yield every number of residents with every prefetch depth, one resident expert, and both experts resident."""
    for depth in DEPTHS:
        yield OffloadPolicy.layerwise(depth)
    for residents in range(1, blocks):
        for depth in DEPTHS:
            yield OffloadPolicy.block_swap(blocks - residents, depth)
    yield OffloadPolicy.block_swap(0, 1)
    yield OffloadPolicy.resident()


def fitting_policies(job: OffloadJob, machine: Machine, budget: MemoryBudget) -> tuple[list[Fit], list[Fit]]:
    """Return the candidates that fit into `budget`, and the usual ones that do not.

    Each device policy is tried without RAM-resident blocks, with as many as fit, and with all blocks in RAM.
    """
    fits: list[Fit] = []
    misfits: list[Fit] = []
    for on_device in device_policies(job.expert.blocks):
        found, refused = _fit_tokens_and_ram(job, machine, on_device, budget)
        fits += found
        misfits += [misfit for misfit in refused if is_usual(misfit.policy, job)]
    return fits, misfits


def is_usual(policy: OffloadPolicy, job: OffloadJob) -> bool:
    """Return True for a typical policy: at most one block ahead, and a multiple of a quarter of the blocks swapped."""
    quarter = max(1, job.expert.blocks // 4)
    return policy.prefetch_blocks <= 1 and (policy.kind != "block_swap" or policy.blocks_to_swap % quarter == 0)


def with_ram_blocks(policy: OffloadPolicy, ram_blocks: int) -> OffloadPolicy:
    """Return `policy` with that many RAM-resident blocks."""
    return replace(policy, source="pinned", ram_blocks=ram_blocks)


def _fit_tokens_and_ram(
    job: OffloadJob, machine: Machine, on_device: OffloadPolicy, budget: MemoryBudget
) -> tuple[list[Fit], list[Fit]]:
    """Return the variants of `on_device` that fit, with the most tokens at once, and those that do not fit."""
    found: list[Fit] = []
    refused: list[Fit] = []
    for chunk in CHUNKS:
        if chunk is not None and chunk >= job.tokens:
            continue
        without_ram = _fit(job, machine, replace(on_device, chunk_tokens=chunk), budget)
        if without_ram.shortage is not None:
            refused = [without_ram]
            continue
        found.append(without_ram)
        needs = without_ram.needs
        ram_blocks = min(budget.slots(needs) - needs.ram_slots, sum(job.block_counts.values()) - 1)
        if ram_blocks > 0:
            policy = with_ram_blocks(without_ram.policy, ram_blocks)
            found.append(Fit(policy=policy, needs=memory_needs(job, machine, policy), shortage=None))
        all_in_ram = _fit(job, machine, replace(without_ram.policy, source="pinned"), budget)
        if all_in_ram.shortage is None:
            return [*found, all_in_ram], []
        refused = [all_in_ram]
        # Fewer tokens at once are slower. They help only if device and RAM share memory, by making space for RAM slots.
        if not budget.shared:
            break
    return found, refused


def _fit(job: OffloadJob, machine: Machine, policy: OffloadPolicy, budget: MemoryBudget) -> Fit:
    needs = memory_needs(job, machine, policy)
    return Fit(policy=policy, needs=needs, shortage=budget.shortage(needs))


def lower_bound_s(job: OffloadJob, machine: Machine, policy: OffloadPolicy) -> float:
    """Return a lower bound of the seconds that the run of `policy` takes.

    At the end of each step all bytes needed so far have passed disk and bus, and the later steps are still to be
    computed. Between the first and the last step of a stage the bound is linear, so these two are sufficient.
    """
    residency, _ = plan_residency(policy, job.block_counts)
    ram_residency = plan_ram(policy, residency, job.block_counts)
    traffic = _Traffic(job, machine, policy, residency, ram_residency)
    stages = [(expert, sum(1 for _ in steps)) for expert, steps in groupby(job.experts_of_steps)]
    rest_s = sum(traffic.stage_seconds(expert, steps, first) for expert, steps, first in _first_uses(stages, residency))
    least_s = traffic.first_arrival_s + rest_s
    for expert, steps, first in _first_uses(stages, residency):
        for count in (1, steps - 1):
            if not count:
                continue
            fetches = traffic.add_steps(expert, count, first)
            rest_s -= traffic.stage_seconds(expert, count, first)
            if fetches:
                least_s = max(least_s, traffic.arrival_s + traffic.hardware.visit_s[expert] + rest_s)
            first = False
    return least_s


def _first_uses(stages: list[tuple[str, int]], residency: Residency) -> Iterator[tuple[str, int, bool]]:
    """Yield (expert, steps, True if the residents are fetched in the first step) for each stage."""
    seen: set[str] = set()
    for expert, steps in stages:
        yield expert, steps, not (residency.permanent and expert in seen)
        seen.add(expert)


class _Traffic:
    """Time that disk and bus need at least for the steps added so far."""

    def __init__(
        self,
        job: OffloadJob,
        machine: Machine,
        policy: OffloadPolicy,
        residency: Residency,
        ram_residency: RamResidency,
    ) -> None:
        self.hardware = hardware_of(job, machine, policy.chunk_tokens)
        self._blocks = job.expert.blocks
        self._residents = residency.residents
        self._ram_residents = ram_residency.residency.residents
        # A CPU that does not decode reads files directly into buffers.
        self._direct_reads = machine.computes_on == "cpu" and not job.decodes
        self._experts_read: set[str] = set()
        self._disk_s = self._bus_s = 0.0
        hardware, expert = self.hardware, job.experts_of_steps[0]
        self._read_s = hardware.read_bytes(expert) / (hardware.disk_bytes_per_s or 1.0)
        self._copy_s = 0.0 if hardware.decode_computes else hardware.block_bytes[expert] / hardware.bus_bytes_per_s
        if self._direct_reads:
            # Keeps the bound monotonic: more RAM-resident blocks never raise it, even if RAM is slower than the disk.
            self._copy_s = min(self._copy_s, self._read_s)
        self._decode_s = hardware.decode_s.get(expert, 0.0)
        self._late_decode_s = 0.0 if hardware.decode_computes else self._decode_s
        # A direct read is one transfer on both routes; otherwise a block leaves the disk first and the bus last.
        self._first_hop_s, self._last_hop_s = (0.0, 0.0) if self._direct_reads else (self._read_s, self._copy_s)
        self.first_arrival_s = self._first_hop_s + self._last_hop_s + self._late_decode_s
        if self._direct_reads:
            self.first_arrival_s += self._read_s

    @property
    def arrival_s(self) -> float:
        """Earliest time at which the last block of the added steps can be in its buffer."""
        # The bus starts after the first block has left the disk, and the last block still has to pass the bus.
        return max(self._disk_s + self._last_hop_s, self._bus_s + self._first_hop_s) + self._late_decode_s

    def stage_seconds(self, expert: str, steps: int, first: bool) -> float:
        """Return the compute seconds of `steps` steps, with the decoding that the computing thread does."""
        compute_s = steps * self._blocks * self.hardware.visit_s[expert]
        if self.hardware.decode_computes:
            compute_s += self._fetches(expert, steps, first) * self._decode_s
        return compute_s

    def add_steps(self, expert: str, steps: int, first: bool) -> int:
        """Add and count the fetches of `steps` steps of `expert`; with `first` those of its residents too."""
        fetches = self._fetches(expert, steps, first)
        residents = self._residents.get(expert, frozenset())
        in_ram = self._ram_residents.get(expert, frozenset())
        ram_fetches = steps * len(in_ram - residents) + (len(in_ram & residents) if first else 0)
        ram_fills = 0
        if expert not in self._experts_read:
            ram_fills = len(in_ram)
            self._experts_read.add(expert)
        file_fetches = fetches - ram_fetches
        self._disk_s += (file_fetches + ram_fills) * self._read_s
        self._bus_s += ram_fetches * self._copy_s + file_fetches * (
            self._read_s if self._direct_reads else self._copy_s
        )
        return fetches

    def _fetches(self, expert: str, steps: int, first: bool) -> int:
        residents = len(self._residents.get(expert, frozenset()))
        return steps * (self._blocks - residents) + (residents if first else 0)
