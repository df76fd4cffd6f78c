"""Discrete-event model of a transfer program: one copy queue, one compute queue, both in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from .program import AT_ONCE, KEPT, TransferProgram
from .timeline import StepRecord, Timeline


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Speeds of one machine for one run.

    Raises ValueError for a bandwidth of 0 or less and for negative times or bytes.
    """

    bus_bytes_per_s: float
    block_bytes: Mapping[str, int]
    """Bytes that one fetch of a block of this expert moves."""
    visit_s: Mapping[str, float]
    """Seconds that all lanes together spend in one block of this expert."""
    step_overhead_s: float = 0.0
    """Seconds of each step outside the blocks (output layers, solver), spent after the last block."""

    def __post_init__(self) -> None:
        if not self.bus_bytes_per_s > 0:
            raise ValueError(f"bus_bytes_per_s is {self.bus_bytes_per_s}, it must be above 0")
        smallest = min([self.step_overhead_s, *self.block_bytes.values(), *self.visit_s.values()])
        if smallest < 0:
            raise ValueError(f"bytes and seconds must be 0 or more, one is {smallest}")


def simulate(program: TransferProgram, hardware: Hardware) -> Timeline:
    """Predict the run of `program`, which must pass `check_program`.

    A step that has no visits has no record. Raises ValueError when `hardware` does not know an expert of the program.
    """
    experts = {visit.expert for visit in program.visits}
    if unknown := sorted(experts - (hardware.block_bytes.keys() & hardware.visit_s.keys())):
        raise ValueError(f"no block_bytes or visit_s for the {unknown[0]!r} expert")

    queues = _Queues(program, hardware)
    steps = []
    for (index, expert), visits in _steps(program):
        began = queues.now
        compute_s = queues.compute_step(visits) + hardware.step_overhead_s
        queues.now += hardware.step_overhead_s
        wall_s = queues.now - began
        steps.append(
            StepRecord(
                index=index,
                expert=expert,
                sigma=None,
                wall_s=wall_s,
                compute_s=compute_s,
                stall_s=max(0.0, wall_s - compute_s),
                bytes_moved=sum(
                    hardware.block_bytes[expert]
                    for visit in visits
                    if (number := program.visit_fetch[visit]) != KEPT and program.fetches[number].needed_by == visit
                ),
            )
        )
    return Timeline(steps=tuple(steps), kind="simulated", first_block_s=queues.first_block_s)


def _steps(program: TransferProgram) -> Iterator[tuple[tuple[int, str], range]]:
    """Each step's index and expert with the range of its visits."""
    first = 0
    for step, visits in groupby(program.visits, key=lambda visit: (visit.step, visit.expert)):
        past = first + sum(1 for _ in visits)
        yield step, range(first, past)
        first = past


class _Queues:
    """The two queues. `now` is the end of everything computed so far."""

    def __init__(self, program: TransferProgram, hardware: Hardware) -> None:
        self.now = 0.0
        self.first_block_s: float | None = None
        self._program = program
        self._hardware = hardware
        self._copy_end = 0.0
        self._arrived: list[float] = []
        self._done: list[float] = []

    def compute_step(self, visits: range) -> float:
        """Run the visits of one step; the seconds spent in blocks."""
        for visit in visits:
            start = max(self.now, self._ready(self._program.visit_fetch[visit]))
            if self.first_block_s is None:
                self.first_block_s = start
            self.now = start + self._hardware.visit_s[self._program.visits[visit].expert]
            self._done.append(self.now)
        return sum(self._hardware.visit_s[self._program.visits[visit].expert] for visit in visits)

    def _ready(self, fetch: int) -> float:
        """When the fetch has arrived, after every fetch before it on the bus."""
        if fetch == KEPT:
            return 0.0
        for ahead in self._program.fetches[len(self._arrived) : fetch + 1]:
            free = 0.0 if ahead.start_after == AT_ONCE else self._done[ahead.start_after]
            seconds = self._hardware.block_bytes[ahead.block.expert] / self._hardware.bus_bytes_per_s
            self._copy_end = max(self._copy_end, free) + seconds
            self._arrived.append(self._copy_end)
        return self._arrived[fetch]
