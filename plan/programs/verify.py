"""Static check of transfer programs, valid at any bus and device speed."""

from __future__ import annotations

from .ram_program import DIRECT, RamProgram
from .transfer_program import IMMEDIATE, KEPT, ProgramError, TransferProgram


def check_program(program: TransferProgram) -> None:
    """Raise ProgramError unless the program is correct at every bus and device speed.

    Any program can be checked, not only a `compile_program` result.
    """
    _check_sizes(program)
    _check_visits(program)
    _check_queue(program)
    _check_buffers(program)


def check_ram(program: TransferProgram, ram: RamProgram) -> None:
    """Raise ProgramError unless `ram` serves the fetches in `program` without a deadlock.

    `program` must pass `check_program`. Then a read waits only for the slots of earlier fetches on
    the bus, and a fetch only for earlier visits. Reads, fetches and visits therefore have a common
    order in which each waits only for earlier ones. This also holds if the visit itself reads the
    slot, without a bus.
    """
    check_program(ram.program)
    if len(ram.visit_of_fetch) != len(program.fetches):
        raise ProgramError(
            f"{len(program.fetches)} fetches, but {len(ram.visit_of_fetch)} of them are served "
            "from RAM"
        )
    due = 0
    needed_by = IMMEDIATE
    visits = len(ram.program.visits)
    for number, (fetch, visit) in enumerate(zip(program.fetches, ram.visit_of_fetch, strict=True)):
        if visit == DIRECT:
            continue
        if visit != due or due >= visits:
            raise ProgramError(
                f"fetch {number} is visit {visit} of RAM, visit {due} of {visits} is due"
            )
        if ram.program.visits[visit].key != fetch.block.stored:
            raise ProgramError(
                f"fetch {number} needs {fetch.block}, but visit {visit} of RAM is "
                f"{ram.program.visits[visit].key}"
            )
        if fetch.needed_by <= needed_by:
            raise ProgramError(
                f"fetch {number} is needed by visit {fetch.needed_by}, an earlier one by visit "
                f"{needed_by}: the slots of RAM would be read in another order than they are filled"
            )
        due = due + 1
        needed_by = fetch.needed_by
    if due != visits:
        raise ProgramError(f"visit {due} of {visits} visits of RAM serves no fetch")


def _check_sizes(program: TransferProgram) -> None:
    """Check for one buffer and one fetch per visit, and for indices out of range."""
    visits = len(program.visits)
    if not len(program.visit_buffer) == len(program.visit_fetch) == visits:
        raise ProgramError(
            f"{visits} visits, but {len(program.visit_buffer)} buffers and "
            f"{len(program.visit_fetch)} fetches for them"
        )
    filled = [fetch.buffer for fetch in program.fetches]
    used = {*program.visit_buffer, *program.initial, *program.untouched, *filled}
    for buffer in used:
        if not 0 <= buffer < program.buffers:
            raise ProgramError(f"buffer {buffer} is used, there are {program.buffers}")
    if program.sizes is not None:
        fetched = [(fetch.buffer, fetch.block) for fetch in program.fetches]
        for buffer, block in (*program.initial.items(), *fetched):
            capacity = program.sizes.capacities[buffer]
            needed = program.sizes.blocks[block.stored]
            if needed > capacity:
                raise ProgramError(f"{block} needs {needed} bytes, buffer {buffer} has {capacity}")
    for number in program.visit_fetch:
        if not (number == KEPT or 0 <= number < len(program.fetches)):
            raise ProgramError(f"fetch {number} serves a visit, there are {len(program.fetches)}")


def _check_visits(program: TransferProgram) -> None:
    """Check the block found by each visit, and `needed_by` and `last` in each fetch."""
    spans: dict[int, tuple[int, int]] = {}
    for visit, (use, buffer, number) in enumerate(
        zip(program.visits, program.visit_buffer, program.visit_fetch, strict=True)
    ):
        if number == KEPT:
            found = program.initial.get(buffer)
            source = buffer
        else:
            found = program.fetches[number].block
            source = program.fetches[number].buffer
            spans[number] = (spans.get(number, (visit, visit))[0], visit)
        if source != buffer or found != use.key:
            raise ProgramError(
                f"visit {visit} needs {use.key} in buffer {buffer}, but it gets {found} in buffer "
                f"{source}"
            )
    for number, fetch in enumerate(program.fetches):
        if spans.get(number) != (fetch.needed_by, fetch.last):
            raise ProgramError(
                f"fetch {number} claims visits {fetch.needed_by} to {fetch.last}, it serves "
                f"{spans.get(number)}"
            )


def _check_queue(program: TransferProgram) -> None:
    """Check that a queue processing the fetches in this order cannot deadlock."""
    waited_for = IMMEDIATE
    for number, fetch in enumerate(program.fetches):
        # Fetches run in order, so one also waits for all that earlier ones wait for.
        waited_for = max(waited_for, fetch.start_after)
        if fetch.start_after < IMMEDIATE or waited_for >= fetch.needed_by:
            raise ProgramError(
                f"fetch {number} is needed by visit {fetch.needed_by}, "
                f"but the queue reaches it only after visit {waited_for}"
            )


def _check_buffers(program: TransferProgram) -> None:
    """Check that no block is replaced before the last visit to it is done."""
    # The loop below changes this dict. `kept_until` returns a new one for each call.
    occupied_until = program.kept_until
    for number, fetch in enumerate(program.fetches):
        if fetch.start_after < occupied_until.get(fetch.buffer, IMMEDIATE):
            raise ProgramError(
                f"fetch {number} may start after visit {fetch.start_after}, "
                f"but its buffer {fetch.buffer} is read until visit {occupied_until[fetch.buffer]}"
            )
        occupied_until[fetch.buffer] = fetch.last
