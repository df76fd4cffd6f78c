"""Candidate policies of the planner, their memory needs, and a lower bound of their run time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..schema import OffloadPolicy, plan_residency
from .machine import Machine
from .memory import MemoryBudget, MemoryNeeds, memory_needs
from .offload_job import OffloadJob
from .predict import hardware_of
from .ram_program import plan_ram

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
    computed.
    """
    residency, _ = plan_residency(policy, job.block_counts)
    in_ram_residency = plan_ram(policy, residency, job.block_counts).residency
    hardware = hardware_of(job, machine, policy.chunk_tokens)
    read_s, copy_s = hardware.read_s, 0.0 if hardware.decode_computes else hardware.copy_s
    late_decode_s = 0.0 if hardware.decode_computes else hardware.decode_s
    # A CPU that does not decode reads files directly into buffers: one transfer, which disk and bus count both.
    # Otherwise a block leaves the disk first and the bus last.
    direct_reads = machine.computes_on == "cpu" and not job.decodes
    if direct_reads:
        # Keeps the bound monotonic: more RAM-resident blocks never raise it, even if RAM is slower than the disk.
        copy_s = min(copy_s, read_s)
    first_hop_s, last_hop_s = (0.0, 0.0) if direct_reads else (read_s, copy_s)
    disk_s = bus_s = computed_s = 0.0
    late_s = read_s + last_hop_s + late_decode_s  # the most by which the device has to be late so far
    stage, seen = "", set[str]()
    for expert in job.experts_of_steps:
        residents, in_ram = (each.residents.get(expert, frozenset()) for each in (residency, in_ram_residency))
        first = expert != stage and not (residency.permanent and expert in seen)
        fetches = job.expert.blocks if first else job.expert.blocks - len(residents)
        ram_fetches = len(in_ram if first else in_ram - residents)
        file_fetches, ram_fills = fetches - ram_fetches, 0 if expert in seen else len(in_ram)
        disk_s += (file_fetches + ram_fills) * read_s
        bus_s += ram_fetches * copy_s + file_fetches * (read_s if direct_reads else copy_s)
        computed_s += job.expert.blocks * hardware.visit_s[expert]
        if hardware.decode_computes:
            computed_s += fetches * hardware.decode_s
        if fetches:
            # The bus starts after the first block has left the disk, and the last block still has to pass the bus.
            arrival_s = max(disk_s + last_hop_s, bus_s + first_hop_s) + late_decode_s
            late_s = max(late_s, arrival_s + hardware.visit_s[expert] - computed_s)
        stage = expert
        seen.add(expert)
    return late_s + computed_s
