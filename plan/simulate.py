"""Discrete-event model of a run: disk, bus, decoding and computing as queues, each in its order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from .hardware import Hardware
from .phases import run_phases
from .program import TransferProgram
from .queues import Queues
from .ram import DIRECT, RamProgram
from .timeline import StepRecord, Timeline


def simulate(program: TransferProgram, hardware: Hardware, ram: RamProgram | None = None) -> Timeline:
    """Predict the run of `program`, which must pass `check_program`, with `ram` also `check_ram`.

    Without `ram` every fetch starts from RAM. A step that has no visits has no record. Raises ValueError when
    `hardware` does not know an expert of the program, or no disk that `ram` reads from.
    """
    experts = {visit.expert for visit in program.visits}
    if unknown := sorted(experts - (hardware.block_bytes.keys() & hardware.visit_s.keys())):
        raise ValueError(f"no block_bytes or visit_s for the {unknown[0]!r} expert")
    read_for: frozenset[int] = frozenset() if ram is None else _visits_read_for(program, ram)
    if read_for and hardware.disk_bytes_per_s is None:
        raise ValueError(f"disk_bytes_per_s is None, but {len(read_for)} fetches read from files: give its rate")

    queues = Queues(program, hardware, ram)
    needed_by = {fetch.needed_by for fetch in program.fetches}
    copied_for = _visits_copied_for(program, hardware, ram)
    steps: list[StepRecord] = []
    computed_from: list[float] = []
    for (index, expert), visits in _steps(program):
        times = queues.run_step(visits)
        computed_from.append(times.computed_from_s)
        moved = len(needed_by.intersection(visits))
        copied = len(copied_for.intersection(visits)) * hardware.block_bytes[expert]
        read = len(read_for.intersection(visits)) * hardware.read_bytes(expert)
        steps.append(
            StepRecord(
                index=index,
                expert=expert,
                sigma=None,
                wall_s=times.wall_s,
                compute_s=times.compute_s,
                stall_s=times.stall_s,
                bytes_moved=moved * hardware.block_bytes[expert],
                decode_s=times.decode_s,
                read_bytes=read,
                began_s=times.began_s,
                stall_file_s=times.stall_file_s,
                copy_s=copied / hardware.bus_bytes_per_s,
                copied_bytes=copied,
                read_s=read / (hardware.disk_bytes_per_s or 1.0),
            )
        )
    return Timeline(
        steps=tuple(steps),
        kind="simulated",
        first_block_s=computed_from[0] if computed_from else None,
        phases=run_phases(steps, computed_from),
    )


def _visits_copied_for(program: TransferProgram, hardware: Hardware, ram: RamProgram | None) -> frozenset[int]:
    """Visits of the device program whose fetch was copied out of RAM."""
    if ram is None:
        return frozenset(fetch.needed_by for fetch in program.fetches)
    if hardware.decode_computes:
        return frozenset()
    routes = zip(program.fetches, ram.visit_of_fetch, strict=True)
    return frozenset(fetch.needed_by for fetch, visit in routes if visit != DIRECT)


def _visits_read_for(program: TransferProgram, ram: RamProgram) -> frozenset[int]:
    """Visits of the device program whose fetch needed a read of the file in this run."""
    first_use = {fetch.needed_by for fetch in ram.program.fetches}
    return frozenset(
        fetch.needed_by
        for fetch, visit in zip(program.fetches, ram.visit_of_fetch, strict=True)
        if visit == DIRECT or visit in first_use
    )


def _steps(program: TransferProgram) -> Iterator[tuple[tuple[int, str], range]]:
    """Each step's index and expert with the range of its visits."""
    first = 0
    for step, visits in groupby(program.visits, key=lambda visit: (visit.step, visit.expert)):
        past = first + sum(1 for _ in visits)
        yield step, range(first, past)
        first = past
