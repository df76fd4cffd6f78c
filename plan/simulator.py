"""Discrete-event simulation of a run, with disk, bus, decoding and compute as queues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

from ..schema import StepRecord, Timeline, run_phases
from .memory import RAW_SLOTS
from .ram_program import DIRECT, RamProgram
from .transfer_program import IMMEDIATE, KEPT, TransferProgram


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
    step_visit_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds per visit of single steps, by step index; they override `visit_s`."""
    step_overhead_s: float = 0.0
    """Seconds of each step outside the blocks (output layers, solver), spent after the last block."""
    disk_bytes_per_s: float | None = None
    """Read rate; None if the run reads no files."""
    file_bytes: Mapping[str, int] | None = None
    """Bytes that one read of a block of this expert takes from its file; None: equal to `block_bytes`."""
    decode_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds for decoding and patching one block of this expert on arrival; 0 for experts that are not listed."""
    decode_computes: bool = False
    """True on a CPU: the computing thread decodes, between stall and compute, and reads the RAM slot without a bus.
    False on a GPU: decoding is a separate queue between the bus and the buffers."""

    def __post_init__(self) -> None:
        for name, rate in (("bus_bytes_per_s", self.bus_bytes_per_s), ("disk_bytes_per_s", self.disk_bytes_per_s)):
            if rate is not None and not rate > 0:
                raise ValueError(f"{name} is {rate}, it must be above 0")
        sizes = (*self.block_bytes.values(), *(self.file_bytes or {}).values())
        times = (self.step_overhead_s, *self.visit_s.values(), *self.step_visit_s.values(), *self.decode_s.values())
        smallest = min((*sizes, *times))
        if smallest < 0:
            raise ValueError(f"bytes and seconds must be 0 or more, one is {smallest}")

    def read_bytes(self, expert: str) -> int:
        """Return the bytes that one read of a block takes from its file."""
        return (self.file_bytes or {}).get(expert, self.block_bytes[expert])


class Queues:
    """State of the disk, bus, decode and compute queues.

    Each queue works in order on one block at a time. It is advanced lazily: a visit that needs its block advances the
    other queues up to that block, and all times that they depend on are known by then.
    """

    def __init__(self, program: TransferProgram, hardware: Hardware, ram: RamProgram | None) -> None:
        self._program = program
        self._ram = ram
        self._hardware = hardware
        self._copy_s = {expert: size / hardware.bus_bytes_per_s for expert, size in hardware.block_bytes.items()}
        self._read_s = {
            expert: hardware.read_bytes(expert) / (hardware.disk_bytes_per_s or 1.0) for expert in hardware.block_bytes
        }
        self._decode_s = {expert: hardware.decode_s.get(expert, 0.0) for expert in hardware.block_bytes}
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
        self._slot_free: list[float | None] = [] if ram is None else [None] * len(ram.program.visits)
        """For each visit of the RAM program: the time at which its slot is free again; None: not simulated yet."""

    def run_step(self, visits: range) -> tuple[StepRecord, float]:
        """Simulate the visits of one step; return its times, and the start of its first block's compute."""
        program, hardware = self._program, self._hardware
        compute_s = hardware.step_overhead_s
        stall_s = stall_on_read_s = decode_s = 0.0
        began = self._now
        computed_from: float | None = None
        for number in visits:
            fetch = program.visit_fetch[number]
            expert = program.visits[number].expert
            if fetch != KEPT:
                wait_s = self._arrival(fetch) - self._now
                if wait_s > 0:
                    stall_s += wait_s
                    stall_on_read_s += min(max(self._left_file[fetch] - self._now, 0.0), wait_s)
                    self._now += wait_s
                if program.fetches[fetch].needed_by == number:
                    decode_s += self._decode_s[expert]
                    if hardware.decode_computes:
                        self._now += self._decode_s[expert]
                        self._free_slot(fetch, self._now)
            if computed_from is None:
                computed_from = self._now
            visit_s = hardware.step_visit_s.get(program.visits[number].step, hardware.visit_s[expert])
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
            bytes_moved=0,
            decode_s=decode_s,
            start_s=began,
            stall_on_read_s=stall_on_read_s,
        )
        return step, computed_from

    def _arrival(self, number: int) -> float:
        """Return the time at which the block of fetch `number` is in its buffer; simulate the fetches up to it."""
        while len(self._arrived) <= number:
            self._arrived.append(self._fetch(len(self._arrived)))
        return self._arrived[number]

    def _fetch(self, number: int) -> float:
        """Simulate fetch `number` and return the time at which its block can be visited."""
        fetch = self._program.fetches[number]
        expert = fetch.block.expert
        visit = None if self._ram is None else self._ram.visit_of_fetch[number]
        ready = 0.0 if visit is None or visit == DIRECT else self._ready_in_ram(visit)
        self._left_file.append(ready)
        if self._hardware.decode_computes and visit is not None and visit != DIRECT:
            return ready
        buffer_free = 0.0 if fetch.start_after == IMMEDIATE else self._done[fetch.start_after]
        decodes = self._decode_s[expert] > 0 and not self._hardware.decode_computes
        # A block that is decoded on arrival crosses the bus into a raw slot; only its decoding waits for the buffer.
        start = max(self._bus_free, ready, self._decoded[-RAW_SLOTS] if decodes else buffer_free)
        if visit == DIRECT:
            self._read_until(start)
            start = max(start, self._disk_free)
            self._left_file[number] = self._disk_free = self._bus_free = start + self._read_s[expert]
        else:
            self._bus_free = start + self._copy_s[expert]
        self._free_slot(number, self._bus_free)
        if not decodes:
            return self._bus_free
        self._decoded.append(max(self._bus_free, buffer_free, self._decoded[-1]) + self._decode_s[expert])
        return self._decoded[-1]

    def _free_slot(self, fetch: int, at: float) -> None:
        if self._ram is not None and (visit := self._ram.visit_of_fetch[fetch]) != DIRECT:
            self._slot_free[visit] = at

    def _ready_in_ram(self, visit: int) -> float:
        """Return the time at which the slot of visit `visit` of the RAM program is filled."""
        assert self._ram is not None
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
        assert self._ram is not None
        fetches = self._ram.program.fetches
        if len(self._read) == len(fetches):
            return None
        after = fetches[len(self._read)].start_after
        slot_free = 0.0 if after == IMMEDIATE else self._slot_free[after]
        return None if slot_free is None else max(self._disk_free, slot_free)

    def _read_next(self, start: float) -> None:
        assert self._ram is not None
        self._disk_free = start + self._read_s[self._ram.program.fetches[len(self._read)].block.expert]
        self._read.append(self._disk_free)


def simulate(program: TransferProgram, hardware: Hardware, ram: RamProgram | None = None) -> Timeline:
    """Predict the run of `program`, which must pass `check_program`, with `ram` also `check_ram`.

    Without `ram` every fetch starts from RAM. A step without visits has no record.

    Raises:
        ValueError: if `hardware` has no figures for an expert of the program, or no disk rate although `ram` reads
            files.
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
    for visits in _steps(program):
        step, computes = queues.run_step(visits)
        computed_from.append(computes)
        copied = len(copied_for.intersection(visits)) * hardware.block_bytes[step.expert]
        read = len(read_for.intersection(visits)) * hardware.read_bytes(step.expert)
        steps.append(
            replace(
                step,
                bytes_moved=len(needed_by.intersection(visits)) * hardware.block_bytes[step.expert],
                read_bytes=read,
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
    """Return the visits of the device program whose fetch is copied from RAM."""
    if ram is None:
        return frozenset(fetch.needed_by for fetch in program.fetches)
    if hardware.decode_computes:
        return frozenset()
    routes = zip(program.fetches, ram.visit_of_fetch, strict=True)
    return frozenset(fetch.needed_by for fetch, visit in routes if visit != DIRECT)


def _visits_read_for(program: TransferProgram, ram: RamProgram) -> frozenset[int]:
    """Return the visits of the device program whose fetch needs a file read in this run."""
    first_use = {fetch.needed_by for fetch in ram.program.fetches}
    return frozenset(
        fetch.needed_by
        for fetch, visit in zip(program.fetches, ram.visit_of_fetch, strict=True)
        if visit == DIRECT or visit in first_use
    )


def _steps(program: TransferProgram) -> Iterator[range]:
    """Yield the range of the visits of each step."""
    first = 0
    for _, visits in groupby(program.visits, key=lambda visit: (visit.step, visit.expert)):
        past = first + sum(1 for _ in visits)
        yield range(first, past)
        first = past
