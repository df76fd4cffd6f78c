"""Memory needs of a run under a policy, term by term, and the budget that they must fit into."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..schema import KernelNeeds, OffloadPolicy, format_need, plan_residency
from .machine import Machine
from .offload_job import Budgets, OffloadJob
from .ram_program import RamResidency, plan_ram

STAGING_SLOTS = 2
"""RAM slots for blocks that pass from the file to the bus: two keep a disk busy, and a third gains nothing."""
RAW_SLOTS = 2
"""Device slots for stored blocks that a GPU decodes: one is copied into while the other is decoded."""

VRAM_SHARE, VRAM_RESERVE = 0.95, 600_000_000
"""Default budget on a GPU: a share of its memory, less the bytes that driver and screen use."""
RAM_SHARE = 0.5
"""Default budget in RAM as a share of all RAM: Windows page-locks at most half of it."""


class DoesNotFitError(ValueError):
    """Run for which memory is too small under every policy."""


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """Memory needs of one policy in bytes. On a CPU the device bytes are RAM too."""

    buffers: int
    buffer_bytes: int
    """Bytes of one buffer."""
    resident_bytes: int
    """Bytes on the device that do not stream."""
    raw_bytes: int
    """Bytes of the slots for stored blocks that a GPU decodes."""
    working_bytes: int
    """Bytes of the activations of a step."""
    ram_slots: int
    slot_bytes: int
    """Bytes of one RAM slot."""
    host_resident_bytes: int
    """Bytes in RAM in addition to the slots."""

    @property
    def device_bytes(self) -> int:
        """Sum of all device memory."""
        return self.buffers * self.buffer_bytes + self.resident_bytes + self.raw_bytes + self.working_bytes

    @property
    def host_bytes(self) -> int:
        """Sum of all RAM, without `device_bytes`."""
        return self.ram_slots * self.slot_bytes + self.host_resident_bytes

    def describe_device(self) -> str:
        """Format the device memory as `2 buffers of 0.70 GB + 0.03 GB resident + 4.20 GB to compute in`."""
        terms = [f"{self.buffers} buffer{'s' * (self.buffers != 1)} of {format_need(self.buffer_bytes)}"]
        terms.append(f"{format_need(self.resident_bytes)} resident")
        if self.raw_bytes:
            terms.append(f"{format_need(self.raw_bytes)} for decoding")
        terms.append(f"{format_need(self.working_bytes)} to compute in")
        return " + ".join(terms)

    def describe_host(self) -> str:
        """Format the RAM as `12 slots of 0.70 GB + 0.10 GB resident`."""
        slots = f"{self.ram_slots} slot{'s' * (self.ram_slots != 1)} of {format_need(self.slot_bytes)}"
        return slots + (f" + {format_need(self.host_resident_bytes)} resident" if self.host_resident_bytes else "")


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """Bytes that a run may take: `Budgets` with the defaults of a machine filled in. Either may be infinite."""

    device: float
    host: float
    shared: bool
    """True if the device computes in RAM: then `host` limits the sum of both."""

    def shortage(self, needs: MemoryNeeds) -> str | None:
        """Return the reason, with numbers, for which `needs` do not fit; None if they fit."""
        if needs.device_bytes > self.device:
            return (
                f"needs {needs.describe_device()} = {format_need(needs.device_bytes)}; {format_need(self.device)} given"
            )
        taken = needs.host_bytes + (needs.device_bytes if self.shared else 0)
        if taken <= self.host:
            return None
        words = [needs.describe_device()] if self.shared else []
        if needs.ram_slots or not self.shared:
            words.append(needs.describe_host())
        return f"needs {' and '.join(words)} = {format_need(taken)} of RAM; {format_need(self.host)} given"

    def slots(self, needs: MemoryNeeds) -> int:
        """Return the number of RAM slots that fit in addition to everything else of `needs`."""
        taken = needs.host_resident_bytes + (needs.device_bytes if self.shared else 0)
        return max(0, int((self.host - taken) // needs.slot_bytes))


def memory_budget(machine: Machine, budgets: Budgets) -> MemoryBudget:
    """Return `budgets` with a default share of `machine` for each one that is None."""
    on_cpu = machine.computes_on == "cpu"
    host = RAM_SHARE * machine.ram_bytes if budgets.ram_bytes is None else budgets.ram_bytes
    device: float
    if budgets.vram_bytes is not None:
        device = budgets.vram_bytes
    elif on_cpu:
        device = math.inf
    else:
        device = max(0.0, VRAM_SHARE * machine.vram_bytes - VRAM_RESERVE)
    return MemoryBudget(device=device, host=host, shared=on_cpu)


def memory_needs(job: OffloadJob, machine: Machine, policy: OffloadPolicy) -> MemoryNeeds:
    """Return the memory needs of `job` on `machine` under `policy`.

    Raises ValueError if the policy swaps more blocks than an expert has.
    """
    residency, buffers = plan_residency(policy, job.block_counts)
    ram_residency = plan_ram(policy, residency, job.block_counts)
    on_gpu = machine.computes_on == "cuda"
    return MemoryNeeds(
        buffers=buffers,
        buffer_bytes=job.computed_bytes + job.patch_bytes,
        resident_bytes=job.resident_bytes,
        raw_bytes=RAW_SLOTS * job.stored_bytes if on_gpu and job.decodes else 0,
        working_bytes=working_bytes(job, policy.chunk_tokens),
        ram_slots=ram_residency.slots + staging_slots(job, machine, ram_residency),
        slot_bytes=job.stored_bytes,
        host_resident_bytes=job.host_resident_bytes,
    )


def working_bytes(job: OffloadJob, chunk_tokens: int | None) -> int:
    """Return the activation bytes of a step of the expert with the most tokens."""
    lane_tokens = max(map(job.lane_tokens, job.lanes), key=sum)
    return job.expert.lanes_bytes(
        [tokens * job.ring * job.ulysses for tokens in lane_tokens],
        value_bytes=job.value_bytes,
        chunk_tokens=chunk_tokens,
        ring=job.ring,
        ulysses=job.ulysses,
        cached_states=job.cached_states,
        kernels=KernelNeeds(attention_bytes=job.attention_bytes, linear_format=job.linear_format),
    )


def staging_slots(job: OffloadJob, machine: Machine, ram_residency: RamResidency) -> int:
    """Return the number of staging slots: 0 if all blocks are RAM-resident, or if a CPU reads directly into buffers."""
    direct_reads = machine.computes_on == "cpu" and not job.decodes
    return 0 if direct_reads or ram_residency.slots == sum(job.block_counts.values()) else STAGING_SLOTS
