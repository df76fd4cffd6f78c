"""RAM program: slots and file reads for a run, compiled like the device program one level down.

Fetches in the device program, in bus order, are visits in the RAM program. A RAM slot is a buffer
there, and a file read is a fetch. A block is RAM-resident, passes through a staging slot, or is
read directly into a device buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...schema import OffloadPolicy, Residency, spread_evenly
from .buffer_sizes import BufferSizes
from .transfer_program import ProgramError, TransferProgram, compile_program
from .visits import BlockKey, Visit

STAGING_SLOTS = 2
"""RAM slots for blocks on their way from the file to the bus. Two keep a disk busy, and a third
gains nothing."""

DIRECT = -1
"""`visit_of_fetch` when a fetch reads from the file directly into the buffer."""


@dataclass(frozen=True, kw_only=True)
class RamResidency:
    """RAM-resident blocks, kept for this run and later ones, and their slot count."""

    residency: Residency
    slots: int


@dataclass(frozen=True, kw_only=True)
class RamProgram:
    """File reads into RAM for one device program.

    A visit in `program` is one fetch over the bus, out of a RAM slot. A fetch in `program` is one
    file read into a slot.
    """

    program: TransferProgram
    visit_of_fetch: tuple[int, ...]
    """For each fetch in the device program: the visit in `program`, or `DIRECT`."""


@dataclass(frozen=True, kw_only=True)
class RunPrograms:
    """The two programs for a run, over the bus and into RAM, used by the engine and `simulate`."""

    device: TransferProgram
    ram: RamProgram


def plan_ram(
    policy: OffloadPolicy, residency: Residency, block_counts: Mapping[str, int]
) -> RamResidency:
    """Choose the RAM-resident blocks in stacks with `block_counts[expert]` blocks.

    `residency` has the residents on the device. Streamed blocks are chosen first, because they
    cross the bus in every step. Remaining slots go to blocks resident on the device. Blocks left in
    the file lie at equal distances, so the disk has the same time for each.
    """
    streamed: list[BlockKey] = []
    resident: list[BlockKey] = []
    for expert, blocks in block_counts.items():
        for block in range(blocks):
            key = BlockKey(expert, block)
            (resident if residency.keeps(*key) else streamed).append(key)
    wanted = (len(streamed) + len(resident)) * (policy.source != "file")
    if policy.ram_blocks is not None:
        wanted = min(wanted, policy.ram_blocks)
    chosen: list[BlockKey] = []
    for keys in (streamed, resident):
        count = min(wanted - len(chosen), len(keys))
        from_file = spread_evenly(len(keys) - count, len(keys))
        chosen += [key for place, key in enumerate(keys) if place not in from_file]
    residents = {
        expert: frozenset(key.block for key in chosen if key.expert == expert)
        for expert in block_counts
    }
    return RamResidency(residency=Residency(residents=residents, permanent=True), slots=wanted)


def compile_ram(
    program: TransferProgram,
    ram_residency: RamResidency,
    *,
    staging: int,
    sizes: BufferSizes | None = None,
    contents: Mapping[int, BlockKey] | None = None,
) -> RamProgram:
    """Compile the file reads into RAM slots for the fetches in `program`.

    Args:
        program: the device program.
        ram_residency: RAM-resident blocks. Slots below `ram_residency.slots` are reserved for them.
        staging: number of slots above these, for all other blocks. 0: read these directly into
            their buffers.
        sizes: slot sizes. None: each block fits into each slot.
        contents: slot contents before the program (slot -> block).

    Raises:
        ProgramError: if `staging` is negative, or if there are too few slots.
    """
    if staging < 0:
        raise ProgramError(f"staging is {staging}, it must be 0 or more slots")
    visits: list[Visit] = []
    visit_of_fetch: list[int] = []
    for fetch in program.fetches:
        through_ram = staging > 0 or ram_residency.residency.keeps(*fetch.block)
        visit_of_fetch.append(len(visits) if through_ram else DIRECT)
        if through_ram:
            # Blocks are read from files without patches, so visits in RAM have `stored` keys.
            visits.append(Visit(program.visits[fetch.needed_by].step, *fetch.block.stored))
    residency = ram_residency.residency
    slots = ram_residency.slots
    # There is exactly one slot per resident. Other contents are dropped here: if the compiler kept
    # them, a resident would have to take another one's slot.
    slot_of_resident: dict[BlockKey, int] = {}
    kept: dict[int, BlockKey] = {}
    for slot, block in sorted((contents or {}).items()):
        is_resident = residency.keeps(*block) and slot_of_resident.setdefault(block, slot) == slot
        if is_resident or slot >= slots:
            kept[slot] = block
    compiled = compile_program(
        visits, residency, slots + staging, sizes=sizes, contents=kept, apart=slots
    )
    return RamProgram(program=compiled, visit_of_fetch=tuple(visit_of_fetch))
