"""RAM program: the slots of RAM and the file reads of a run, compiled like the device program, one level down.

The fetches of the device program, in bus order, are the visits of the RAM program; a RAM slot is its buffer, and a file
read its fetch. A block is RAM-resident, passes through a staging slot, or is read directly into its buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..schema import OffloadPolicy, Residency, spread_evenly
from .transfer_program import IMMEDIATE, KEPT, Fetch, ProgramError, TransferProgram, compile_program
from .visits import BlockKey, Visit

DIRECT = -1
"""`visit_of_fetch` of a fetch that reads from the file directly into its buffer."""


@dataclass(frozen=True, kw_only=True)
class RamResidency:
    """RAM-resident blocks, kept for this run and later ones, and the number of their slots."""

    residency: Residency
    slots: int


@dataclass(frozen=True, kw_only=True)
class RamProgram:
    """File reads that bring the blocks of one device program into RAM.

    A visit of `program` is one fetch over the bus, which reads a RAM slot; a fetch of `program` is one file read into a
    slot.
    """

    program: TransferProgram
    visit_of_fetch: tuple[int, ...]
    """For each fetch of the device program: its visit in `program`, or `DIRECT`."""


@dataclass(frozen=True, kw_only=True)
class RunPrograms:
    """The two programs of a run, over the bus and into RAM, as executed by the engine and by `simulate`."""

    device: TransferProgram
    ram: RamProgram


def plan_ram(policy: OffloadPolicy, residency: Residency, block_counts: Mapping[str, int]) -> RamResidency:
    """Choose the RAM-resident blocks of stacks of `block_counts[expert]` blocks.

    `residency` are the residents on the device. Streamed blocks are chosen first, because they cross the bus in every
    step; slots that are left go to blocks that are resident on the device. The blocks that are not chosen lie at equal
    distances, so that the disk has the same time for each.
    """
    streamed: list[BlockKey] = []
    resident: list[BlockKey] = []
    for expert, blocks in block_counts.items():
        for block in range(blocks):
            key = BlockKey(expert, block)
            (resident if residency.keeps(*key) else streamed).append(key)
    wanted = 0 if policy.source == "file" else len(streamed) + len(resident)
    if policy.ram_blocks is not None:
        wanted = min(wanted, policy.ram_blocks)
    chosen = _spread_residents(wanted, streamed, resident)
    residents = {expert: frozenset(key.block for key in chosen if key.expert == expert) for expert in block_counts}
    return RamResidency(residency=Residency(residents=residents, permanent=True), slots=wanted)


def compile_ram(
    program: TransferProgram,
    ram_residency: RamResidency,
    *,
    staging: int,
    contents: Mapping[int, BlockKey] | None = None,
) -> RamProgram:
    """Compile the file reads that bring the blocks of `program`'s fetches into RAM slots.

    Args:
        program: the device program.
        ram_residency: RAM-resident blocks. The slots below `ram_residency.slots` are reserved for them.
        staging: number of slots above those, for all other blocks; 0: read these directly into their buffers.
        contents: contents of the slots before the program (slot -> block).

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
            visits.append(Visit(program.visits[fetch.needed_by].step, *fetch.block.stored))
    compiled = _compile_with_residents(visits, ram_residency, staging, contents or {})
    return RamProgram(program=compiled, visit_of_fetch=tuple(visit_of_fetch))


def _spread_residents(wanted: int, streamed: Sequence[BlockKey], resident: Sequence[BlockKey]) -> list[BlockKey]:
    """Return `wanted` of the blocks (or all), streamed ones first; the blocks left to the file are spread evenly."""
    first = min(wanted, len(streamed))
    chosen = []
    for blocks, count in ((streamed, first), (resident, min(wanted - first, len(resident)))):
        from_file = spread_evenly(len(blocks) - count, len(blocks))
        chosen += [key for place, key in enumerate(blocks) if place not in from_file]
    return chosen


def _compile_with_residents(
    visits: Sequence[Visit], ram_residency: RamResidency, staging: int, contents: Mapping[int, BlockKey]
) -> TransferProgram:
    """Compile RAM-resident blocks into the first slots, and all other visits into the staging slots after them."""
    residency, slots = ram_residency.residency, ram_residency.slots
    slot_of_resident: dict[BlockKey, int] = {}
    for slot, block in sorted(contents.items()):
        if slot < slots and residency.keeps(*block):
            slot_of_resident.setdefault(block, slot)
    staged = {slot - slots: block for slot, block in contents.items() if slot >= slots}
    numbers: dict[bool, list[int]] = {True: [], False: []}
    for number, visit in enumerate(visits):
        numbers[residency.keeps(*visit.key)].append(number)

    # There is exactly one slot per resident. Other contents are dropped here: if the compiler kept them, a resident
    # would have to take the slot of another one.
    kept = {slot: block for block, slot in slot_of_resident.items()}
    resident = compile_program([visits[n] for n in numbers[True]], residency, slots, contents=kept)
    other = compile_program([visits[n] for n in numbers[False]], Residency(residents={}), staging, contents=staged)
    return _merge_programs(visits, (numbers[True], 0, resident), (numbers[False], slots, other))


def _merge_programs(visits: Sequence[Visit], *parts: tuple[Sequence[int], int, TransferProgram]) -> TransferProgram:
    """Merge programs that share no slot; each part is (its visit numbers, its first slot, its program)."""
    slot_of = [0] * len(visits)
    served_at = [KEPT] * len(visits)  # for each visit: `needed_by` of its fetch
    fetches: list[Fetch] = []
    initial: dict[int, BlockKey] = {}
    untouched: dict[int, BlockKey] = {}
    for numbers, first_slot, part in parts:
        for block, slot, start_after, needed_by, last in part.fetches:
            start = IMMEDIATE if start_after == IMMEDIATE else numbers[start_after]
            fetches.append(Fetch(block, first_slot + slot, start, numbers[needed_by], numbers[last]))
        for number, slot, fetch in zip(numbers, part.visit_buffer, part.visit_fetch, strict=True):
            slot_of[number] = first_slot + slot
            if fetch != KEPT:
                served_at[number] = numbers[part.fetches[fetch].needed_by]
        initial |= {first_slot + slot: block for slot, block in part.initial.items()}
        untouched |= {first_slot + slot: block for slot, block in part.untouched.items()}
    # Reads in the order of the bus: each fetch is needed by a different visit, so the order is unambiguous.
    fetches.sort(key=lambda fetch: fetch.needed_by)
    fetch_at = {KEPT: KEPT} | {fetch.needed_by: number for number, fetch in enumerate(fetches)}
    return TransferProgram(
        visits=tuple(visits),
        fetches=tuple(fetches),
        buffers=sum(part.buffers for _, _, part in parts),
        visit_buffer=tuple(slot_of),
        visit_fetch=tuple(fetch_at[at] for at in served_at),
        initial=initial,
        untouched=untouched,
    )
