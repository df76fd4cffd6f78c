"""Discrete-event simulation of a run, with disk, bus, decoding and compute as queues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from ...schema.records import StepRecord, Timeline, Transfers, run_phases
from .ram_program import DIRECT, RamProgram
from .transfer_program import IMMEDIATE, KEPT, TransferProgram

RAW_SLOTS = 2
"""Device slots for stored blocks on a GPU. One is copied into while the other is decoded."""


class BlockSize(NamedTuple):
    """Bytes for one block."""

    file: int
    """Read from the file."""
    stored: int
    """In RAM and on the bus."""
    computed: int
    """In a buffer."""


class FetchCosts(NamedTuple):
    """Bytes and seconds to transfer one block."""

    moved_bytes: int
    file_bytes: int
    copy_s: float
    read_s: float
    decode_s: float


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Speeds on one machine for one run."""

    bus_bytes_per_s: float
    block_bytes: int
    """Bytes moved by one fetch of the largest block."""
    visit_s: Mapping[str, float]
    """Seconds per visit to one block, for all lanes together, by expert."""
    step_visit_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds per visit for single steps, by step index. They override `visit_s`."""
    step_overhead_s: float = 0.0
    """Seconds per step outside the blocks (output layers, solver), spent after the last block."""
    disk_bytes_per_s: float
    """Read rate."""
    file_bytes: int
    """Bytes read from the file for the largest block."""
    decode_s: float = 0.0
    """Seconds to decode and patch the largest block on arrival."""
    decode_computes: bool = False
    """True on a CPU: the computing thread decodes, between stall and compute, and reads the RAM
    slot without a bus. False on a GPU: decoding is a separate queue between bus and buffers."""
    sizes: tuple[BlockSize, ...] = ()
    """Block sizes in stack order. Empty: all blocks are as large as the largest."""
    visit_shares: tuple[float, ...] = ()
    """Seconds per visit as a share of `visit_s`, by block in a stack. Empty: the whole of it for
    each."""

    @property
    def copy_s(self) -> float:
        """Seconds for the largest block on the bus."""
        return self.block_bytes / self.bus_bytes_per_s

    @property
    def read_s(self) -> float:
        """Seconds to read the largest block from the file."""
        return self.file_bytes / self.disk_bytes_per_s

    def fetch_costs(self, blocks: int) -> tuple[FetchCosts, ...]:
        """Return the costs for the first `blocks` blocks in a stack."""
        largest = FetchCosts(
            self.block_bytes, self.file_bytes, self.copy_s, self.read_s, self.decode_s
        )
        if not self.sizes:
            return (largest,) * blocks
        computed = max(size.computed for size in self.sizes)
        return tuple(
            FetchCosts(
                size.stored,
                size.file,
                size.stored / self.bus_bytes_per_s,
                size.file / self.disk_bytes_per_s,
                self.decode_s * size.computed / computed,
            )
            for size in self.sizes
        )


class Queues:
    """State of the disk, bus, decode and compute queues.

    Each queue handles one block at a time, in order, and is advanced lazily. A visit advances the
    other queues up to the block it needs, and by then all times they depend on are known.
    """

    def __init__(self, program: TransferProgram, hardware: Hardware, ram: RamProgram) -> None:
        self._program = program
        self._ram = ram
        self._read_for = {fetch.needed_by for fetch in ram.program.fetches}
        """RAM program visits with a file read."""
        self._hardware = hardware
        # Programs name blocks by index, so the tables need all up to the largest.
        self._costs = hardware.fetch_costs(
            1 + max((fetch.block.block for fetch in program.fetches), default=0)
        )
        self._visit_shares = hardware.visit_shares or (1.0,) * (
            1 + max((visit.block for visit in program.visits), default=0)
        )
        self._now = 0.0
        self._done: list[float] = []
        """End of each visit."""
        self._arrived: list[float] = []
        """Arrival time of each fetched block in the buffer."""
        self._left_file: list[float] = []
        """End of each fetch's file read. 0 if the block was in RAM before the run."""
        self._bus_free = 0.0
        self._disk_free = 0.0
        self._decoded = [0.0] * RAW_SLOTS
        """Decode end for each block so far, after one initial entry per raw slot."""
        self._read: list[float] = []
        """File read end for each fetch in the RAM program."""
        self._slot_free: list[float | None] = [None] * len(ram.program.visits)
        """Times at which RAM program visits free their slots. None: not simulated yet."""

    def run_step(self, visits: range) -> tuple[StepRecord, float]:
        """Return the simulated record for one step, and the start of compute in the first block."""
        program = self._program
        hardware = self._hardware
        compute_s = hardware.step_overhead_s
        stall_s = stall_on_read_s = decode_s = 0.0
        moved = copied = read = 0
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
                # Only the first visit after a fetch counts its bytes.
                if program.fetches[fetch].needed_by == number:
                    ram_visit = self._ram.visit_of_fetch[fetch]
                    costs = self._costs[program.fetches[fetch].block.block]
                    moved += costs.moved_bytes
                    is_copied = ram_visit != DIRECT and not hardware.decode_computes
                    is_read = ram_visit == DIRECT or ram_visit in self._read_for
                    copied += is_copied * costs.moved_bytes
                    read += is_read * costs.file_bytes
                    decode_s += costs.decode_s
                    if hardware.decode_computes:
                        self._now += costs.decode_s
                        # Only now: decoding reads the slot.
                        self._free_slot(fetch, self._now)
            if computed_from is None:
                computed_from = self._now
            visit = program.visits[number]
            visit_s = hardware.step_visit_s.get(visit.step, hardware.visit_s[visit.expert])
            visit_s *= self._visit_shares[visit.block]
            self._now += visit_s
            compute_s += visit_s
            self._done.append(self._now)
        self._now += hardware.step_overhead_s
        assert computed_from is not None, "a step has visits"
        first = program.visits[visits.start]
        transfers = Transfers(
            stall_s=stall_s,
            bytes_moved=moved,
            stall_on_read_s=stall_on_read_s,
            copied_bytes=copied,
            copy_s=copied / hardware.bus_bytes_per_s,
            read_bytes=read,
            read_s=read / hardware.disk_bytes_per_s,
        )
        step = StepRecord(
            index=first.step,
            expert=first.expert,
            sigma=None,
            wall_s=self._now - began,
            compute_s=compute_s,
            transfers=transfers,
            decode_s=decode_s,
            start_s=began,
        )
        return step, computed_from

    def _arrival(self, number: int) -> float:
        """Return when fetch `number` has filled the buffer.

        Fetches up to this one are simulated.
        """
        while len(self._arrived) <= number:
            self._arrived.append(self._fetch(len(self._arrived)))
        return self._arrived[number]

    def _fetch(self, number: int) -> float:
        """Simulate fetch `number` and return when the block can be visited."""
        fetch = self._program.fetches[number]
        hardware = self._hardware
        costs = self._costs[fetch.block.block]
        visit = self._ram.visit_of_fetch[number]
        ready = 0.0 if visit == DIRECT else self._ready_in_ram(visit)
        self._left_file.append(ready)
        # A CPU decodes out of the RAM slot. `run_step` frees it, after the decoding.
        if hardware.decode_computes and visit != DIRECT:
            return ready
        # IMMEDIATE is -1, a valid index: without the test it would read the last visit.
        buffer_free = 0.0 if fetch.start_after == IMMEDIATE else self._done[fetch.start_after]
        decodes = costs.decode_s > 0 and not hardware.decode_computes
        # A block to decode on arrival crosses the bus into a raw slot. Only decoding waits for the
        # buffer.
        # The entry at `-RAW_SLOTS` is the time when the next raw slot is free.
        start = max(self._bus_free, ready, self._decoded[-RAW_SLOTS] if decodes else buffer_free)
        if visit == DIRECT:
            # One disk serves both routes. Reads into RAM with an earlier start go first.
            self._read_until(start)
            start = max(start, self._disk_free)
            self._left_file[number] = self._disk_free = self._bus_free = start + costs.read_s
        else:
            self._bus_free = start + costs.copy_s
        self._free_slot(number, self._bus_free)
        if not decodes:
            return self._bus_free
        self._decoded.append(max(self._bus_free, buffer_free, self._decoded[-1]) + costs.decode_s)
        return self._decoded[-1]

    def _free_slot(self, fetch: int, at: float) -> None:
        if (visit := self._ram.visit_of_fetch[fetch]) != DIRECT:
            self._slot_free[visit] = at

    def _ready_in_ram(self, visit: int) -> float:
        """Return when the slot for RAM program visit `visit` is filled."""
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
        """Return when the next read can start.

        None if no read is left, or if the slot is still in use.
        """
        fetches = self._ram.program.fetches
        if len(self._read) == len(fetches):
            return None
        after = fetches[len(self._read)].start_after
        slot_free = 0.0 if after == IMMEDIATE else self._slot_free[after]
        return None if slot_free is None else max(self._disk_free, slot_free)

    def _read_next(self, start: float) -> None:
        block = self._ram.program.fetches[len(self._read)].block.block
        self._disk_free = start + self._costs[block].read_s
        self._read.append(self._disk_free)


def simulate(program: TransferProgram, hardware: Hardware, ram: RamProgram) -> Timeline:
    """Predict the run of `program`. It must pass `check_program`, and `check_ram` with `ram`.

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
        first_block_s=next(iter(computed_from), None),
        phases=run_phases(steps, computed_from),
    )
