"""The queues of a simulated run: when each block has arrived, and when each visit is done."""

from __future__ import annotations

from typing import NamedTuple

from .hardware import Hardware
from .memory_needs import RAW_SLOTS
from .program import AT_ONCE, KEPT, TransferProgram
from .ram import DIRECT, RamProgram


class StepTimes(NamedTuple):
    """Seconds of one step."""

    wall_s: float
    compute_s: float
    stall_s: float
    decode_s: float
    began_s: float
    """Since the run began, as `computed_from_s`."""
    computed_from_s: float
    """When the first block began to compute."""
    stall_file_s: float
    """The part of the stall in which a block had not left its file."""


class Queues:
    """Where disk, bus, decoding and computing have got to.

    Each works in order and one thing at a time. A visit that asks for its block makes the others catch up, so every
    time that they need is known by then.
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
        self._arrived: list[float] = []
        self._left_file: list[float] = []
        """Per fetch: when its bytes had left their file; 0 if RAM held them before."""
        self._bus_free = 0.0
        self._disk_free = 0.0
        self._decoded = [0.0] * RAW_SLOTS
        """When the last blocks that were decoded on the way were ready, as many as there are raw slots."""
        self._read: list[float] = []
        self._slot_free: list[float | None] = [] if ram is None else [None] * len(ram.program.visits)
        """Per visit of the RAM program: when its slot had been read; None: not yet."""

    def run_step(self, visits: range) -> StepTimes:
        """Go through the visits of one step."""
        program, hardware = self._program, self._hardware
        compute_s = hardware.step_overhead_s
        stall_s = stall_file_s = decode_s = 0.0
        began = self._now
        computed_from: float | None = None
        for number in visits:
            fetch = program.visit_fetch[number]
            expert = program.visits[number].expert
            if fetch != KEPT:
                wait_s = self._arrival(fetch) - self._now
                if wait_s > 0:
                    stall_s += wait_s
                    stall_file_s += min(max(self._left_file[fetch] - self._now, 0.0), wait_s)
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
        return StepTimes(self._now - began, compute_s, stall_s, decode_s, began, computed_from, stall_file_s)

    def _arrival(self, number: int) -> float:
        """When the block of fetch `number` is in its buffer, after all fetches before it."""
        while len(self._arrived) <= number:
            self._arrived.append(self._fetch(len(self._arrived)))
        return self._arrived[number]

    def _fetch(self, number: int) -> float:
        """Let fetch `number` take its place in the queues; when its block can be visited."""
        fetch = self._program.fetches[number]
        expert = fetch.block.expert
        visit = None if self._ram is None else self._ram.visit_of_fetch[number]
        ready = 0.0 if visit is None or visit == DIRECT else self._ready_in_ram(visit)
        self._left_file.append(ready)
        if self._hardware.decode_computes and visit is not None and visit != DIRECT:
            return ready
        buffer_free = 0.0 if fetch.start_after == AT_ONCE else self._done[fetch.start_after]
        decodes = self._decode_s[expert] > 0 and not self._hardware.decode_computes
        # What is decoded on the way waits for its buffer behind the bus, in a raw slot.
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
        """When the slot that visit `visit` of the RAM program reads has been filled."""
        assert self._ram is not None
        number = self._ram.program.visit_fetch[visit]
        while len(self._read) <= number:
            start = self._read_start()
            assert start is not None, "a read waits for a slot that is read after it"
            self._read_next(start)
        return 0.0 if number == KEPT else self._read[number]

    def _read_until(self, time: float) -> None:
        """The disk goes ahead with the reads that it can start before `time`."""
        while (start := self._read_start()) is not None and start < time:
            self._read_next(start)

    def _read_start(self) -> float | None:
        """When the next read can start; None: there is none, or its slot is still to be read."""
        assert self._ram is not None
        fetches = self._ram.program.fetches
        if len(self._read) == len(fetches):
            return None
        after = fetches[len(self._read)].start_after
        slot_free = 0.0 if after == AT_ONCE else self._slot_free[after]
        return None if slot_free is None else max(self._disk_free, slot_free)

    def _read_next(self, start: float) -> None:
        assert self._ram is not None
        self._disk_free = start + self._read_s[self._ram.program.fetches[len(self._read)].block.expert]
        self._read.append(self._disk_free)
