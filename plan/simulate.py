"""Discrete-event model of a transfer program: one copy queue, one compute queue, both in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from .program import AT_ONCE, KEPT, TransferProgram
from .ram import RamProgram
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
    disk_bytes_per_s: float | None = None
    """None where nothing is read from files."""
    file_bytes: Mapping[str, int] | None = None
    """Bytes that one read of a block of this expert takes from its file; None: as many as the bus moves."""
    decode_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of decoding and patching one block of this expert on arrival; 0 for experts that are not named."""
    decode_computes: bool = False
    """The computing thread decodes, between stall and compute, and reads the RAM slot itself, without a bus: a CPU.
    Otherwise decoding is a queue of its own behind the bus: a GPU."""

    def __post_init__(self) -> None:
        for name, rate in (("bus_bytes_per_s", self.bus_bytes_per_s), ("disk_bytes_per_s", self.disk_bytes_per_s)):
            if rate is not None and not rate > 0:
                raise ValueError(f"{name} is {rate}, it must be above 0")
        sizes = (*self.block_bytes.values(), *(self.file_bytes or {}).values())
        times = (self.step_overhead_s, *self.visit_s.values(), *self.decode_s.values())
        smallest = min((*sizes, *times))
        if smallest < 0:
            raise ValueError(f"bytes and seconds must be 0 or more, one is {smallest}")


def simulate(program: TransferProgram, hardware: Hardware, ram: RamProgram | None = None) -> Timeline:
    """Predict the run of `program`, which must pass `check_program`.

    A step that has no visits has no record. Raises ValueError when `hardware` does not know an expert of the program.
    """
    experts = {visit.expert for visit in program.visits}
    if unknown := sorted(experts - (hardware.block_bytes.keys() & hardware.visit_s.keys())):
        raise ValueError(f"no block_bytes or visit_s for the {unknown[0]!r} expert")

    queues = _Queues(program, hardware)
    needed_by = {fetch.needed_by for fetch in program.fetches}
    steps = []
    for (index, expert), visits in _steps(program):
        compute_s, stall_s = queues.run_step(visits)
        steps.append(
            StepRecord(
                index=index,
                expert=expert,
                sigma=None,
                wall_s=compute_s + stall_s,
                compute_s=compute_s,
                stall_s=stall_s,
                bytes_moved=len(needed_by.intersection(visits)) * hardware.block_bytes[expert],
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
    """The two queues: when each fetch has arrived, and when each visit is done."""

    def __init__(self, program: TransferProgram, hardware: Hardware) -> None:
        self.first_block_s: float | None = None
        self._program = program
        self._hardware = hardware
        self._now = 0.0
        self._arrived: list[float] = []
        self._done: list[float] = []

    def run_step(self, visits: range) -> tuple[float, float]:
        """Go through the visits of one step; the seconds in which the device computed and in which it waited."""
        compute_s = self._hardware.step_overhead_s
        stall_s = 0.0
        for visit in visits:
            wait_s = max(0.0, self._arrival(self._program.visit_fetch[visit]) - self._now)
            visit_s = self._hardware.visit_s[self._program.visits[visit].expert]
            if self.first_block_s is None:
                self.first_block_s = wait_s
            self._now += wait_s + visit_s
            self._done.append(self._now)
            compute_s += visit_s
            stall_s += wait_s
        self._now += self._hardware.step_overhead_s
        return compute_s, stall_s

    def _arrival(self, number: int) -> float:
        """When fetch `number` has arrived, after every fetch before it on the bus; 0 for kept contents."""
        if number == KEPT:
            return 0.0
        for fetch in self._program.fetches[len(self._arrived) : number + 1]:
            bus_free = self._arrived[-1] if self._arrived else 0.0
            buffer_free = 0.0 if fetch.start_after == AT_ONCE else self._done[fetch.start_after]
            copy_s = self._hardware.block_bytes[fetch.block.expert] / self._hardware.bus_bytes_per_s
            self._arrived.append(max(bus_free, buffer_free) + copy_s)
        return self._arrived[number]
