"""Memory needs under a policy, term by term, and the budget they must fit into."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..schema import OffloadPolicy
from ..schema.text import format_count, format_need
from .costs import BlockCosts, Budgets
from .machine import Machine
from .programs.ram_program import STAGING_SLOTS, plan_ram
from .programs.simulator import RAW_SLOTS

VRAM_SHARE, VRAM_RESERVE = 0.95, 600_000_000
"""Default GPU budget: a share of its memory, minus what driver and screen use in bytes."""
RAM_SHARE = 0.5
"""Default RAM budget as a share of all RAM. Windows page-locks at most half of it."""
AVAILABLE_SHARE = 0.9
"""Share of free RAM that a run may use. The rest is for growth in other processes during the
run."""


class DoesNotFitError(ValueError):
    """Run that exceeds memory under every policy."""


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """Memory needed under one policy, in bytes. On a CPU the device bytes are RAM too."""

    blocks: BlockCosts
    buffers: tuple[int, ...]
    """Buffer sizes."""
    raw_bytes: int
    """Size of the slots for stored blocks, where a GPU decodes them."""
    working_bytes: int
    """Activation bytes in a step."""
    ram_slots: tuple[int, ...]
    """RAM slot sizes."""

    @property
    def device_bytes(self) -> int:
        """All device memory."""
        buffers = sum(self.buffers)
        return buffers + self.blocks.outside_bytes + self.raw_bytes + self.working_bytes

    @property
    def host_bytes(self) -> int:
        """All RAM except `device_bytes`."""
        return sum(self.ram_slots) + self.blocks.host_outside_bytes

    def describe_device(self) -> str:
        """Format the device memory terms.

        For example, `2 buffers of 0.70 GB + 0.03 GB resident + 4.20 GB to compute in`.
        """
        terms = [
            _describe(self.buffers, "buffer"),
            f"{format_need(self.blocks.outside_bytes)} resident",
        ]
        if self.raw_bytes:
            terms.append(f"{format_need(self.raw_bytes)} for decoding")
        terms.append(f"{format_need(self.working_bytes)} to compute in")
        return " + ".join(terms)

    def describe_host(self) -> str:
        """Format the RAM as `12 slots of 0.70 GB + 0.10 GB resident`."""
        slots = _describe(self.ram_slots, "slot")
        if not self.blocks.host_outside_bytes:
            return slots
        return f"{slots} + {format_need(self.blocks.host_outside_bytes)} resident"


def _describe(places: tuple[int, ...], word: str) -> str:
    """Format places as `2 buffers of 0.70 GB`, or with their sum if sizes differ."""
    if len(set(places)) > 1:
        return f"{format_count(len(places), word)} ({format_need(sum(places))})"
    return f"{format_count(len(places), word)} of {format_need(max(places, default=0))}"


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """Bytes available to a run: `Budgets` with a machine's defaults filled in.

    Either may be infinite.
    """

    device: float
    host: float
    shared: bool
    """True if the device computes in RAM. Then `host` limits the sum of both."""

    def shortage(self, needs: MemoryNeeds) -> str | None:
        """Return why `needs` do not fit, with numbers. None if they fit."""
        if needs.device_bytes > self.device:
            return (
                f"needs {needs.describe_device()} = {format_need(needs.device_bytes)}; "
                f"{format_need(self.device)} given"
            )
        taken = needs.host_bytes + self.shared * needs.device_bytes
        if taken <= self.host:
            return None
        words = [needs.describe_device()] if self.shared else []
        if needs.ram_slots or not self.shared:
            words.append(needs.describe_host())
        return (
            f"needs {' and '.join(words)} = {format_need(taken)} of RAM; {format_need(self.host)} "
            "given"
        )

    def free_ram(self, needs: MemoryNeeds) -> float:
        """Return the bytes left free in RAM by fitting `needs`, possibly infinite."""
        return self.host - needs.host_bytes - self.shared * needs.device_bytes


def memory_budget(machine: Machine, budgets: Budgets) -> MemoryBudget:
    """Return `budgets`, with a default share of `machine` in place of each None."""
    host = RAM_SHARE * machine.ram_bytes
    if budgets.ram_bytes is not None:
        host = budgets.ram_bytes
    # On a CPU all bytes count in `host`.
    device = math.inf
    if budgets.vram_bytes is not None:
        device = budgets.vram_bytes
    elif machine.has_bus:
        device = max(0.0, VRAM_SHARE * machine.vram_bytes - VRAM_RESERVE)
    return MemoryBudget(device=device, host=host, shared=not machine.has_bus)


def memory_needs(
    blocks: BlockCosts, policy: OffloadPolicy, *, has_bus: bool, working_bytes: int = 0
) -> MemoryNeeds:
    """Return the memory `policy` needs on a device with dedicated memory (`has_bus`) or on a CPU.

    Raises ValueError if the policy swaps more blocks than a stack has.
    """
    residency, sizes = blocks.plan_buffers(policy)
    ram = plan_ram(policy, residency, blocks.counts)
    kept = ram.residency.residents
    each = list(enumerate(size.stored for size in blocks.each))
    slots = [nbytes for stack in blocks.stacks for at, nbytes in each if at in kept[stack]]
    staged = (nbytes for stack in blocks.stacks for at, nbytes in each if at not in kept[stack])
    staging = staging_slots(blocks, ram.slots, has_bus=has_bus)
    # Every staging slot may hold any block that is not RAM-resident.
    slots += [max(staged, default=0)] * staging
    return MemoryNeeds(
        blocks=blocks,
        buffers=tuple(nbytes + blocks.patch_bytes for nbytes in sizes.capacities),
        # A CPU decodes out of the RAM slot.
        raw_bytes=RAW_SLOTS * blocks.decoded_bytes * has_bus,
        working_bytes=working_bytes,
        ram_slots=tuple(slots),
    )


def staging_slots(blocks: BlockCosts, ram_blocks: int, *, has_bus: bool) -> int:
    """Return the number of staging slots.

    It is 0 if all blocks are RAM-resident, or if a CPU reads directly into buffers.
    """
    if blocks.reads_directly(has_bus=has_bus) or ram_blocks == len(blocks.stacks) * blocks.blocks:
        return 0
    return STAGING_SLOTS
