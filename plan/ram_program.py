"""RAM between file and bus: the function that plans the device, one level down.

The fetches of the device program, in bus order, are the visits of the RAM program; a slot of RAM is its buffer, and a
read of the file its fetch. A block either has a home in RAM, or passes through a staging slot, or is read straight into
its buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..schema import OffloadPolicy, Residency, spread_evenly
from .transfer_program import AT_ONCE, KEPT, Fetch, ProgramError, TransferProgram, compile_program
from .visits import BlockKey, Visit

DIRECT = -1
"""`visit_of_fetch` of a fetch that is read from its file straight into its buffer."""


@dataclass(frozen=True, kw_only=True)
class RamResidency:
    """Blocks that stay in RAM for this run and later ones, and the slots that they take there."""

    residency: Residency
    slots: int


@dataclass(frozen=True, kw_only=True)
class RamProgram:
    """How blocks come into RAM for the fetches of one device program.

    A visit of `program` is one fetch over the bus, which reads a RAM slot; a fetch of `program` is one read of the file
    into a slot.
    """

    program: TransferProgram
    visit_of_fetch: tuple[int, ...]
    """Per fetch of the device program: its visit here, or `DIRECT`."""


@dataclass(frozen=True, kw_only=True)
class RunPrograms:
    """The two programs of a run, over the bus and into RAM: what a run executes, and what `simulate` predicts."""

    device: TransferProgram
    ram: RamProgram


def plan_ram(policy: OffloadPolicy, residency: Residency, block_counts: Mapping[str, int]) -> RamResidency:
    """Homes in RAM for stacks of `block_counts[expert]` blocks whose residents on the device are `residency`.

    Only what streams crosses the bus again and again, so it gets homes first; what stays on the device gets those that
    are left. Blocks without a home lie at equal distances in the list of streamed blocks, so that the disk has the same
    time for each.
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
    homes = _spread_residents(wanted, streamed, resident)
    residents = {expert: frozenset(key.block for key in homes if key.expert == expert) for expert in block_counts}
    return RamResidency(residency=Residency(residents=residents, permanent=True), slots=wanted)


def compile_ram(
    program: TransferProgram,
    homes: RamResidency,
    *,
    staging: int,
    contents: Mapping[int, BlockKey] | None = None,
) -> RamProgram:
    """The reads that bring the blocks of `program`'s fetches into `homes.slots + staging` slots of RAM.

    Without `staging` every block that has no home is read straight into its buffer. `contents` says what slots hold
    from before (slot -> block). Homes keep the slots below `homes.slots` for themselves, whatever runs; all other slots
    are staging. Raises ProgramError when there are too few slots.
    """
    if staging < 0:
        raise ProgramError(f"staging is {staging}, it must be 0 or more slots")
    visits: list[Visit] = []
    visit_of_fetch: list[int] = []
    for fetch in program.fetches:
        through_ram = staging > 0 or homes.residency.keeps(*fetch.block)
        visit_of_fetch.append(len(visits) if through_ram else DIRECT)
        if through_ram:
            visits.append(Visit(program.visits[fetch.needed_by].step, *fetch.block))
    compiled = _compile_with_residents(visits, homes, staging, contents or {})
    return RamProgram(program=compiled, visit_of_fetch=tuple(visit_of_fetch))


def _spread_residents(wanted: int, streamed: Sequence[BlockKey], resident: Sequence[BlockKey]) -> list[BlockKey]:
    """`wanted` of the blocks (or all): streamed ones first, and what is left to the file of each kind evenly spread."""
    first = min(wanted, len(streamed))
    homes = []
    for blocks, count in ((streamed, first), (resident, min(wanted - first, len(resident)))):
        from_file = spread_evenly(len(blocks) - count, len(blocks))
        homes += [key for place, key in enumerate(blocks) if place not in from_file]
    return homes


def _compile_with_residents(
    visits: Sequence[Visit], homes: RamResidency, staging: int, contents: Mapping[int, BlockKey]
) -> TransferProgram:
    """Homes in slots of their own, all other visits through the staging slots behind them."""
    at_home: dict[BlockKey, int] = {}
    for slot, block in sorted(contents.items()):
        if slot < homes.slots and homes.residency.keeps(*block):
            at_home.setdefault(block, slot)
    passing = {slot - homes.slots: block for slot, block in contents.items() if slot >= homes.slots}
    numbers: dict[bool, list[int]] = {True: [], False: []}
    for number, visit in enumerate(visits):
        numbers[homes.residency.keeps(*visit.key)].append(number)

    # There are as many slots as homes. What else lies in them is forgotten, so that no home takes the slot of another.
    kept = {slot: block for block, slot in at_home.items()}
    home = compile_program([visits[n] for n in numbers[True]], homes.residency, homes.slots, contents=kept)
    rest = compile_program([visits[n] for n in numbers[False]], Residency(residents={}), staging, contents=passing)
    return _side_by_side(visits, (numbers[True], 0, home), (numbers[False], homes.slots, rest))


def _side_by_side(visits: Sequence[Visit], *parts: tuple[Sequence[int], int, TransferProgram]) -> TransferProgram:
    """One program of several that share no slot: the numbers of its visits, its first slot, and each part."""
    slot_of = [0] * len(visits)
    served_at = [KEPT] * len(visits)  # per visit: the visit that its fetch is needed by
    fetches: list[Fetch] = []
    initial: dict[int, BlockKey] = {}
    untouched: dict[int, BlockKey] = {}
    for numbers, first_slot, part in parts:
        for block, slot, start_after, needed_by, last in part.fetches:
            start = AT_ONCE if start_after == AT_ONCE else numbers[start_after]
            fetches.append(Fetch(block, first_slot + slot, start, numbers[needed_by], numbers[last]))
        for number, slot, fetch in zip(numbers, part.visit_buffer, part.visit_fetch, strict=True):
            slot_of[number] = first_slot + slot
            if fetch != KEPT:
                served_at[number] = numbers[part.fetches[fetch].needed_by]
        initial |= {first_slot + slot: block for slot, block in part.initial.items()}
        untouched |= {first_slot + slot: block for slot, block in part.untouched.items()}
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
