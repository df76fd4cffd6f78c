"""Discrete-event simulation of a run, with disk, bus, decoding and compute as queues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby

from ..schema import StepRecord, Timeline, run_phases
from .memory import RAW_SLOTS
from .ram_program import DIRECT, RamProgram
from .transfer_program import IMMEDIATE, KEPT, TransferProgram


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Speeds of one machine for one run; all blocks have the same size."""

    bus_bytes_per_s: float
    block_bytes: int
    """Bytes that one fetch of a block moves."""
    visit_s: Mapping[str, float]
    """Seconds that all lanes together spend in one block of this expert."""
    step_visit_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds per visit of single steps, by step index; they override `visit_s`."""
    step_overhead_s: float = 0.0
    """Seconds of each step outside the blocks (output layers, solver), spent after the last block."""
    disk_bytes_per_s: float
    """Read rate."""
    file_bytes: int
    """Bytes that one read of a block takes from its file."""
    decode_s: float = 0.0
    """Seconds for decoding and patching one block on arrival."""
    decode_computes: bool = False
    """True on a CPU: the computing thread decodes, between stall and compute, and reads the RAM slot without a bus.
    False on a GPU: decoding is a separate queue between the bus and the buffers."""

    @property
    def copy_s(self) -> float:
        """Seconds of one block on the bus."""
        return self.block_bytes / self.bus_bytes_per_s

    @property
    def read_s(self) -> float:
        """Seconds of one read of a block from its file."""
        return self.file_bytes / self.disk_bytes_per_s


class Queues:
    """State of the disk, bus, decode and compute queues.

    Each queue works in order on one block at a time. It is advanced lazily: a visit that needs its block advances the
    other queues up to that block, and all times that they depend on are known by then.
    """

    def __init__(self, program: TransferProgram, hardware: Hardware, ram: RamProgram) -> None:
        self._program = program
        self._ram = ram
        self._read_for = {fetch.needed_by for fetch in ram.program.fetches}
        """Visits of the RAM program for which a block is read from its file."""
        self._hardware = hardware
        self._now = 0.0
        self._done: list[float] = []
        """For each visit: its end."""
        self._arrived: list[float] = []
        """For each fetch: the time at which its block is in the buffer."""
        self._left_file: list[float] = []
        """For each fetch: the end of its file read; 0 if its block was in RAM before the run."""
        self._bus_free = 0.0
        self._disk_free = 0.0
        self._decoded = [0.0] * RAW_SLOTS
        """End of decoding of each block so far, after one initial entry for each raw slot."""
        self._read: list[float] = []
        """For each fetch of the RAM program: the end of its file read."""
        self._slot_free: list[float | None] = [None] * len(ram.program.visits)
        """For each visit of the RAM program: the time at which its slot is free again; None: not simulated yet."""

    def run_step(self, visits: range) -> tuple[StepRecord, float]:
        """Simulate the visits of one step; return its record, and the start of its first block's compute."""
        program, hardware = self._program, self._hardware
        compute_s = hardware.step_overhead_s
        stall_s = stall_on_read_s = decode_s = 0.0
        fetched = copied = read = 0
        began = self._now
        computed_from: float | None = None
        for number in visits:
            fetch = program.visit_fetch[number]
            if fetch != KEPT:
                wait_s = self._arrival(fetch) - self._now
                if wait_s > 0:
                    stall_s += wait_s
                    stall_on_read_s += min(max(self._left_file[fetch] - self._now, 0.0), wait_s)
                    self._now += wait_s
                if program.fetches[fetch].needed_by == number:
                    ram_visit = self._ram.visit_of_fetch[fetch]
                    fetched += 1
                    copied += ram_visit != DIRECT and not hardware.decode_computes
                    read += ram_visit == DIRECT or ram_visit in self._read_for
                    decode_s += hardware.decode_s
                    if hardware.decode_computes:
                        self._now += hardware.decode_s
                        self._free_slot(fetch, self._now)
            if computed_from is None:
                computed_from = self._now
            visit = program.visits[number]
            visit_s = hardware.step_visit_s.get(visit.step, hardware.visit_s[visit.expert])
            self._now += visit_s
            compute_s += visit_s
            self._done.append(self._now)
        self._now += hardware.step_overhead_s
        assert computed_from is not None, "a step has visits"
        first = program.visits[visits.start]
        step = StepRecord(
            index=first.step,
            expert=first.expert,
            sigma=None,
            wall_s=self._now - began,
            compute_s=compute_s,
            stall_s=stall_s,
            bytes_moved=fetched * hardware.block_bytes,
            decode_s=decode_s,
            start_s=began,
            stall_on_read_s=stall_on_read_s,
            read_bytes=read * hardware.file_bytes,
            read_s=read * hardware.read_s,
            copied_bytes=copied * hardware.block_bytes,
            copy_s=copied * hardware.copy_s,
        )
        return step, computed_from

    def _arrival(self, number: int) -> float:
        """Return the time at which the block of fetch `number` is in its buffer; simulate the fetches up to it."""
        while len(self._arrived) <= number:
            self._arrived.append(self._fetch(len(self._arrived)))
        return self._arrived[number]

    def _fetch(self, number: int) -> float:
        """Simulate fetch `number` and return the time at which its block can be visited."""
        fetch, hardware = self._program.fetches[number], self._hardware
        visit = self._ram.visit_of_fetch[number]
        ready = 0.0 if visit == DIRECT else self._ready_in_ram(visit)
        self._left_file.append(ready)
        if hardware.decode_computes and visit != DIRECT:
            return ready
        buffer_free = 0.0 if fetch.start_after == IMMEDIATE else self._done[fetch.start_after]
        decodes = hardware.decode_s > 0 and not hardware.decode_computes
        # A block that is decoded on arrival crosses the bus into a raw slot; only its decoding waits for the buffer.
        start = max(self._bus_free, ready, self._decoded[-RAW_SLOTS] if decodes else buffer_free)
        if visit == DIRECT:
            self._read_until(start)
            start = max(start, self._disk_free)
            self._left_file[number] = self._disk_free = self._bus_free = start + hardware.read_s
        else:
            self._bus_free = start + hardware.copy_s
        self._free_slot(number, self._bus_free)
        if not decodes:
            return self._bus_free
        self._decoded.append(max(self._bus_free, buffer_free, self._decoded[-1]) + hardware.decode_s)
        return self._decoded[-1]

    def _free_slot(self, fetch: int, at: float) -> None:
        if (visit := self._ram.visit_of_fetch[fetch]) != DIRECT:
            self._slot_free[visit] = at

    def _ready_in_ram(self, visit: int) -> float:
        """Return the time at which the slot of visit `visit` of the RAM program is filled."""
        number = self._ram.program.visit_fetch[visit]
        while len(self._read) <= number:
            start = self._read_start()
            assert start is not None, "a read waits for a slot that a later fetch reads"
            self._read_next(start)
        return 0.0 if number == KEPT else self._read[number]

    def _read_until(self, time: float) -> None:
        """Simulate the reads that the disk can start before `time`."""
        while (start := self._read_start()) is not None and start < time:
            self._read_next(start)

    def _read_start(self) -> float | None:
        """Return the time at which the next read can start; None if there is none, or if its slot is still in use."""
        fetches = self._ram.program.fetches
        if len(self._read) == len(fetches):
            return None
        after = fetches[len(self._read)].start_after
        slot_free = 0.0 if after == IMMEDIATE else self._slot_free[after]
        return None if slot_free is None else max(self._disk_free, slot_free)

    def _read_next(self, start: float) -> None:
        self._disk_free = start + self._hardware.read_s
        self._read.append(self._disk_free)


def simulate(program: TransferProgram, hardware: Hardware, ram: RamProgram) -> Timeline:
    """Predict the run of `program`, which must pass `check_program` and, with `ram`, `check_ram`.

    A step without visits has no record.
    """
    queues = Queues(program, hardware, ram)
    steps: list[StepRecord] = []
    computed_from: list[float] = []
    first = 0
    for _, visits in groupby(program.visits, key=lambda visit: (visit.step, visit.expert)):
        past = first + sum(1 for _ in visits)
        step, computes = queues.run_step(range(first, past))
        steps.append(step)
        computed_from.append(computes)
        first = past
    return Timeline(
        steps=tuple(steps),
        kind="simulated",
        first_block_s=computed_from[0] if computed_from else None,
        phases=run_phases(steps, computed_from),
    )
