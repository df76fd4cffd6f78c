"""Static verification that every visit of a transfer program finds its block, at any speed of bus and device."""

from __future__ import annotations

from .ram_program import DIRECT, RamProgram
from .transfer_program import IMMEDIATE, KEPT, ProgramError, TransferProgram


def check_program(program: TransferProgram) -> None:
    """Raise ProgramError unless the program is correct for every speed of bus and device.

    Any program can be checked, not only a result of `compile_program`.
    """
    _check_sizes(program)
    _check_visits(program)
    _check_queue(program)
    _check_buffers(program)


def check_ram(program: TransferProgram, ram: RamProgram) -> None:
    """Raise ProgramError unless `ram` serves the fetches of `program` without a deadlock.

    `program` must pass `check_program`. Then a read waits only for slots of earlier fetches on the bus, and a fetch
    only for visits before its own: reads, fetches and visits have a common order in which each waits only for earlier
    ones. This is also true if the visit itself reads the slot, without a bus.
    """
    check_program(ram.program)
    if len(ram.visit_of_fetch) != len(program.fetches):
        raise ProgramError(f"{len(program.fetches)} fetches, but {len(ram.visit_of_fetch)} of them are served from RAM")
    due, needed_by, visits = 0, IMMEDIATE, len(ram.program.visits)
    for number, (fetch, visit) in enumerate(zip(program.fetches, ram.visit_of_fetch, strict=True)):
        if visit == DIRECT:
            continue
        if visit != due or due >= visits:
            raise ProgramError(f"fetch {number} is visit {visit} of RAM, visit {due} of {visits} is due")
        if ram.program.visits[visit].key != fetch.block.stored:
            raise ProgramError(
                f"fetch {number} needs {fetch.block}, but visit {visit} of RAM is {ram.program.visits[visit].key}"
            )
        if fetch.needed_by <= needed_by:
            raise ProgramError(
                f"fetch {number} is needed by visit {fetch.needed_by}, an earlier one by visit {needed_by}: "
                "the slots of RAM would be read in another order than they are filled"
            )
        due, needed_by = due + 1, fetch.needed_by
    if due != visits:
        raise ProgramError(f"visit {due} of {visits} visits of RAM serves no fetch")


def _check_sizes(program: TransferProgram) -> None:
    """Check that every visit has one buffer and one fetch, and that no index is out of range."""
    visits = len(program.visits)
    if not len(program.visit_buffer) == len(program.visit_fetch) == visits:
        raise ProgramError(
            f"{visits} visits, but {len(program.visit_buffer)} buffers and {len(program.visit_fetch)} fetches for them"
        )
    used = {*program.visit_buffer, *program.initial, *program.untouched, *(f.buffer for f in program.fetches)}
    for buffer in used:
        if not 0 <= buffer < program.buffers:
            raise ProgramError(f"buffer {buffer} is used, there are {program.buffers}")
    for number in program.visit_fetch:
        if not (number == KEPT or 0 <= number < len(program.fetches)):
            raise ProgramError(f"fetch {number} serves a visit, there are {len(program.fetches)}")


def _check_visits(program: TransferProgram) -> None:
    """Check that each visit finds its block, and that `needed_by` and `last` of each fetch are correct."""
    spans: dict[int, tuple[int, int]] = {}
    for visit, (use, buffer, number) in enumerate(
        zip(program.visits, program.visit_buffer, program.visit_fetch, strict=True)
    ):
        if number == KEPT:
            found, source = program.initial.get(buffer), buffer
        else:
            found, source = program.fetches[number].block, program.fetches[number].buffer
            spans[number] = (spans.get(number, (visit, visit))[0], visit)
        if source != buffer or found != use.key:
            raise ProgramError(
                f"visit {visit} needs {use.key} in buffer {buffer}, but it gets {found} in buffer {source}"
            )
    for number, fetch in enumerate(program.fetches):
        if spans.get(number) != (fetch.needed_by, fetch.last):
            raise ProgramError(
                f"fetch {number} claims visits {fetch.needed_by} to {fetch.last}, it serves {spans.get(number)}"
            )


def _check_queue(program: TransferProgram) -> None:
    """Check that a queue that processes the fetches in this order cannot deadlock."""
    waited_for = IMMEDIATE
    for number, fetch in enumerate(program.fetches):
        waited_for = max(waited_for, fetch.start_after)
        if fetch.start_after < IMMEDIATE or waited_for >= fetch.needed_by:
            raise ProgramError(
                f"fetch {number} is needed by visit {fetch.needed_by}, "
                f"but the queue reaches it only after visit {waited_for}"
            )


def _check_buffers(program: TransferProgram) -> None:
    """Check that no block is replaced before the last visit that reads it is done."""
    occupied_until = {
        program.visit_buffer[visit]: visit for visit, number in enumerate(program.visit_fetch) if number == KEPT
    }
    for number, fetch in enumerate(program.fetches):
        if fetch.start_after < occupied_until.get(fetch.buffer, IMMEDIATE):
            raise ProgramError(
                f"fetch {number} may start after visit {fetch.start_after}, "
                f"but its buffer {fetch.buffer} is read until visit {occupied_until[fetch.buffer]}"
            )
        occupied_until[fetch.buffer] = fetch.last
