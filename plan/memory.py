"""The memory that a run takes under a policy, term by term, and whether it is there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..schema import OffloadPolicy, Residency, need_text, plan_residency
from .machine import Machine
from .offload_job import Budgets, OffloadJob
from .ram_program import RamResidency, plan_ram

STAGING_SLOTS = 2
"""Of whole blocks: two keep a disk busy, a third gains nothing."""
RAW_SLOTS = 2
"""On a GPU, for blocks that are decoded there: one is copied into while the other is decoded."""

VRAM_SHARE, VRAM_RESERVE = 0.95, 600_000_000
"""What a run may take of a GPU by itself: a share, less what the driver and the screen hold."""
RAM_SHARE = 0.5
"""What a run may take of all RAM by itself: Windows locks half of it and no more, and others want to live too."""


class DoesNotFitError(ValueError):
    """A run for which there is too little memory, whatever the policy."""


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """Bytes of one policy. On a CPU `device_bytes` are RAM too."""

    buffers: int
    buffer_bytes: int
    """Of one buffer."""
    resident_bytes: int
    raw_bytes: int
    """Stored forms of blocks that are being decoded, on a GPU."""
    working_bytes: int
    """What a step computes in."""
    ram_slots: int
    slot_bytes: int
    """Of one slot."""
    host_resident_bytes: int

    @property
    def device_bytes(self) -> int:
        return self.buffers * self.buffer_bytes + self.resident_bytes + self.raw_bytes + self.working_bytes

    @property
    def host_bytes(self) -> int:
        return self.ram_slots * self.slot_bytes + self.host_resident_bytes

    def describe_device(self) -> str:
        """`2 buffers of 0.70 GB + 0.03 GB that stays + 4.20 GB to compute in`."""
        terms = [f"{self.buffers} buffer{'s' * (self.buffers != 1)} of {need_text(self.buffer_bytes)}"]
        terms.append(f"{need_text(self.resident_bytes)} that stays")
        if self.raw_bytes:
            terms.append(f"{need_text(self.raw_bytes)} for what is being decoded")
        terms.append(f"{need_text(self.working_bytes)} to compute in")
        return " + ".join(terms)

    def describe_host(self) -> str:
        """`12 slots of 0.70 GB + 0.10 GB beside them`."""
        slots = f"{self.ram_slots} slot{'s' * (self.ram_slots != 1)} of {need_text(self.slot_bytes)}"
        return slots + (f" + {need_text(self.host_resident_bytes)} beside them" if self.host_resident_bytes else "")


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """Bytes that a run may take: the budgets, with numbers in every place. Either may be infinite.

    With `shared` the device computes in RAM, and `host` is for both together.
    """

    device: float
    host: float
    shared: bool

    def lacks(self, needs: MemoryNeeds) -> str | None:
        """Why `needs` do not fit, in words with numbers; None when they do."""
        if needs.device_bytes > self.device:
            return f"needs {needs.describe_device()} = {need_text(needs.device_bytes)}; {need_text(self.device)} given"
        if self.shared and needs.device_bytes + needs.host_bytes > self.host:
            both = (
                f"{needs.describe_device()} and {needs.describe_host()}" if needs.ram_slots else needs.describe_device()
            )
            whole = need_text(needs.device_bytes + needs.host_bytes)
            return f"needs {both} = {whole} of RAM; {need_text(self.host)} given"
        if needs.host_bytes > self.host:
            return f"needs {needs.describe_host()} = {need_text(needs.host_bytes)} of RAM; {need_text(self.host)} given"
        return None

    def slots(self, needs: MemoryNeeds) -> int:
        """Slots of RAM for which there is room beside everything else of `needs`."""
        taken = needs.host_resident_bytes + (needs.device_bytes if self.shared else 0)
        return max(0, int((self.host - taken) // needs.slot_bytes))


def memory_budget(machine: Machine, budgets: Budgets) -> MemoryBudget:
    """The budgets on `machine`; what they leave open is what the machine can spare."""
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
    """What `job` takes on `machine` under `policy`. Raises ValueError when the policy does not fit the blocks."""
    residency, buffers = plan_residency(policy, job.block_counts)
    homes = plan_ram(policy, residency, job.block_counts)
    on_gpu = machine.computes_on == "cuda"
    return MemoryNeeds(
        buffers=buffers,
        buffer_bytes=job.computed_bytes,
        resident_bytes=job.resident_bytes,
        raw_bytes=RAW_SLOTS * job.stored_bytes if on_gpu and job.decodes else 0,
        working_bytes=working_bytes(job, policy.chunk_tokens),
        ram_slots=homes.slots + staging_slots(job, machine, homes),
        slot_bytes=job.stored_bytes,
        host_resident_bytes=job.host_resident_bytes,
    )


def working_bytes(job: OffloadJob, chunk_tokens: int | None) -> int:
    """What a step of the expert with the most lanes computes in, beside the weights."""
    return job.expert.working_bytes(
        job.tokens * job.ring * job.ulysses,
        lanes=max(job.lanes.values()),
        value_bytes=job.value_bytes,
        chunk_tokens=chunk_tokens,
        ring=job.ring,
        ulysses=job.ulysses,
        kept_states=job.kept_states,
    )


def staging_slots(job: OffloadJob, machine: Machine, homes: RamResidency) -> int:
    """Slots beside the homes; none where every block keeps one, and where a CPU reads straight into its buffers."""
    straight_in = machine.computes_on == "cpu" and not job.decodes
    return 0 if straight_in or _all_are_resident(homes.residency, job.block_counts) else STAGING_SLOTS


def _all_are_resident(residency: Residency, block_counts: Mapping[str, int]) -> bool:
    every = (residency.keeps(expert, block) for expert, blocks in block_counts.items() for block in range(blocks))
    return all(every)
