"""Runs to compile, and a replay of programs with disk, bus and device at any speed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

from hypothesis import strategies as st

from wanstream.plan import BlockCosts, memory_needs, predict
from wanstream.plan import Machine as RatedMachine
from wanstream.plan.memory import MemoryNeeds
from wanstream.plan.predict import Prediction
from wanstream.plan.programs import DIRECT, IMMEDIATE, KEPT, BlockKey, Visit, step_visits
from wanstream.plan.programs.ram_program import RamProgram, RamResidency, compile_ram
from wanstream.plan.programs.transfer_program import TransferProgram, list_lifetimes, max_overlap
from wanstream.schema import OffloadPolicy, Residency, spread_evenly
from wanstream.shapes import ExpertShape, KernelNeeds, RunShape, StepShape

EXPERTS = ("high", "low")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Arguments for `compile_program`.

    `contents` is arbitrary, with doubled, foreign and out-of-range entries.
    """

    visits: tuple[Visit, ...]
    residency: Residency
    contents: Mapping[int, BlockKey]
    spare_buffers: int


def buffers_needed(visits: Sequence[Visit], residency: Residency) -> int:
    """Return the smallest number of buffers that `visits` can run with."""
    return max_overlap(list_lifetimes(visits, residency)[0])


def final_contents(program: TransferProgram) -> dict[int, BlockKey]:
    """Return the buffer contents after the last fetch: `contents` for the next program."""
    fetched = {fetch.buffer: fetch.block for fetch in program.fetches}
    return {**program.untouched, **program.initial, **fetched}


def kept_in_ram(program: TransferProgram) -> RamProgram:
    """Return a RAM program without reads: all blocks are in slots from an earlier run."""
    blocks = sorted({fetch.block.stored for fetch in program.fetches})
    experts = {key.expert for key in blocks}
    residents = {name: [key.block for key in blocks if key.expert == name] for name in experts}
    contents = dict(enumerate(blocks))
    return compile_ram(program, ram_residents(**residents), staging=0, contents=contents)


def ram_residents(**blocks: Iterable[int]) -> RamResidency:
    """Return permanent RAM residents by expert, with a slot for each."""
    residents = {expert: frozenset(each) for expert, each in blocks.items()}
    residency = Residency(residents=residents, permanent=True)
    return RamResidency(residency=residency, slots=sum(map(len, residents.values())))


def any_ram_residency() -> st.SearchStrategy[RamResidency]:
    return st.builds(ram_residents, **dict.fromkeys(EXPERTS, st.frozensets(st.integers(0, 9))))


@st.composite
def any_run(draw: st.DrawFn, *, whole_steps: bool = False) -> Run:
    """One expert or two, any switch points and patch changes.

    Some visits skipped unless `whole_steps`.
    """
    block_counts = {expert: draw(st.integers(1, 10)) for expert in EXPERTS}
    residents = {}
    for expert, blocks in block_counts.items():
        even = st.integers(0, blocks).map(lambda count, blocks=blocks: spread_evenly(count, blocks))
        residents[expert] = draw(even | st.frozensets(st.integers(0, blocks - 1)))
    patch = st.just(0) | st.integers(0, 2)
    stage = st.tuples(st.sampled_from(EXPERTS), st.integers(1, 4), patch)
    stages = draw(st.lists(stage, max_size=4))
    experts = [expert for expert, steps, _ in stages for _ in range(steps)]
    patches = [patch for _, steps, patch in stages for _ in range(steps)]
    visits = step_visits(experts, block_counts, patches_of_steps=patches)
    if not whole_steps and draw(st.booleans()):
        skips = Random(draw(st.integers(0, 2**16)))
        visits = tuple(visit for visit in visits if skips.random() > 0.3)
    key = st.builds(BlockKey, st.sampled_from((*EXPERTS, "other")), st.integers(0, 10), patch)
    residency = Residency(residents=residents, permanent=draw(st.booleans()))
    contents = draw(st.dictionaries(st.integers(-1, 12), key, max_size=14))
    spare = draw(st.integers(0, 4))
    return Run(visits=visits, residency=residency, contents=contents, spare_buffers=spare)


class Replay:
    """Disk, bus and device, each at any speed: all that a program pair allows may happen.

    Fails if a slot or buffer is overwritten before or while it is read, or if a visit is never
    reached. `run` shares nothing with the compiler, the checks or the simulator.
    """

    def __init__(self, slots: Mapping[int, BlockKey], buffers: Mapping[int, BlockKey]) -> None:
        self.slots: dict[int, BlockKey | None] = dict(slots)
        self.buffers: dict[int, BlockKey | None] = dict(buffers)

    def run_device(self, program: TransferProgram, seed: int, visits: int | None = None) -> Any:
        """Run without a RAM program up to a visit (default: all), and return the buffer contents.

        They are as the issued fetches leave them.
        """
        ram = compile_ram(program, ram_residents(), staging=0)
        self.run(program, ram, seed, bus=True, visits=visits)
        for fetch in program.fetches[self._at["bus"] :]:
            if fetch.start_after < visits:
                self.buffers[fetch.buffer] = fetch.block
        return dict(self.buffers)

    def run(self, program, ram, seed: int, *, bus: bool, visits: int | None = None) -> None:
        """`bus` False: a fetch does nothing, and the visit that needs it reads the slot."""
        self._program = program
        self._ram = ram
        self._bus = bus
        self._at = {"disk": 0, "bus": 0, "device": 0}
        self._busy: set[str] = set()
        self._emptied: set[int] = set()  # RAM visits done
        pick = Random(seed)
        while self._at["device"] < (len(program.visits) if visits is None else visits):
            able = [who for who in self._at if who in self._busy or self._may_begin(who)]
            assert able, f"disk, bus and device wait for each other at {self._at}"
            who = pick.choice(able)
            if who in self._busy:
                self._busy.discard(who)
                self._end(who, self._at[who])
                self._at[who] += 1
            else:
                self._busy.add(who)
                self._begin(who, self._at[who])
        ended = self._at["device"] == len(program.visits)
        assert not ended or self._at["bus"] == len(program.fetches)

    def _may_begin(self, who: str) -> bool:
        number = self._at[who]
        program = self._program
        ram = self._ram
        if who == "disk":
            if number == len(ram.program.fetches):
                return False
            after = ram.program.fetches[number].start_after
            return after == IMMEDIATE or after in self._emptied
        if who == "device":
            return self._at["bus"] > program.visit_fetch[number]
        fetches = program.fetches
        if number == len(fetches) or self._at["device"] <= fetches[number].start_after:
            return False
        visit = ram.visit_of_fetch[number]
        return visit == DIRECT or self._at["disk"] > ram.program.visit_fetch[visit]

    def _begin(self, who: str, number: int) -> None:
        program = self._program
        ram = self._ram
        if who == "disk":
            slot = ram.program.fetches[number].buffer
            assert slot not in self._slots_being_read(), "a slot was filled while it was read"
            self.slots[slot] = None
        elif who == "bus":
            fetch = program.fetches[number]
            visit = ram.visit_of_fetch[number]
            if visit != DIRECT:
                slot = ram.program.visit_buffer[visit]
                assert self.slots[slot] == fetch.block.stored, "another block was read"
            in_use = program.visit_buffer[self._at["device"]] if "device" in self._busy else None
            assert fetch.buffer != in_use, "a buffer was overwritten while it was read"
            self.buffers[fetch.buffer] = None
        else:
            if (slot := self._slot_of_visit(number)) is not None:
                assert self.slots[slot] == program.visits[number].key.stored, "it was overwritten"
            assert 0 <= program.visit_buffer[number] < program.buffers
            assert self.buffers[program.visit_buffer[number]] == program.visits[number].key

    def _end(self, who: str, number: int) -> None:
        program = self._program
        ram = self._ram
        if who == "disk":
            fetch = ram.program.fetches[number]
            self.slots[fetch.buffer] = fetch.block
        elif who == "bus":
            self.buffers[program.fetches[number].buffer] = program.fetches[number].block
            if self._bus and ram.visit_of_fetch[number] != DIRECT:
                self._emptied.add(ram.visit_of_fetch[number])
        elif self._slot_of_visit(number) is not None:
            self._emptied.add(ram.visit_of_fetch[program.visit_fetch[number]])

    def _slot_of_visit(self, number: int) -> int | None:
        """Return the slot that a device visit reads itself."""
        fetch = self._program.visit_fetch[number]
        if self._bus or fetch == KEPT or self._program.fetches[fetch].needed_by != number:
            return None
        visit = self._ram.visit_of_fetch[fetch]
        return None if visit == DIRECT else self._ram.program.visit_buffer[visit]

    def _slots_being_read(self) -> set[int | None]:
        reading: set[int | None] = set()
        if self._bus and "bus" in self._busy:
            visit = self._ram.visit_of_fetch[self._at["bus"]]
            reading.add(None if visit == DIRECT else self._ram.program.visit_buffer[visit])
        if "device" in self._busy:
            reading.add(self._slot_of_visit(self._at["device"]))
        return reading


CPU_MACHINE = RatedMachine(
    name="a CPU",
    origin="a test",
    vram_bytes=0,
    ram_bytes=2**40,
    bus=None,
    disk_bytes_per_s=1e9,
    flops_per_s=1e12,
    decode_bytes_per_s=2e9,
    copy_bytes_per_s=8e9,
    quantise_bytes_per_s=2e9,
)
"""A machine without a GPU, with round rates."""


SMALL = ExpertShape(width=256, ffn_width=512, blocks=8)
TOKENS = 1000


def block_costs(expert: ExpertShape = SMALL, **changes: Any) -> BlockCosts:
    """Return the costs of bf16 blocks in two experts.

    Blocks are decoded on arrival if their stored size differs.
    """
    block = expert.streamed_bytes()
    sizes = {"file_bytes": block, "stored_bytes": block, "computed_bytes": block, **changes}
    if sizes["stored_bytes"] != sizes["computed_bytes"]:
        sizes.setdefault("decoded_bytes", sizes["stored_bytes"])
    usual = {"stacks": EXPERTS, "blocks": expert.blocks, "outside_bytes": 1000}
    return BlockCosts(**{**usual, **sizes})


def run_shape(high=4, low=4, *, tokens=TOKENS, expert=SMALL, linear_format="", **changes):
    """Return the shape of a two-expert run in bf16, with one lane each.

    `tokens` are for the longest lane.
    """
    names = {each.name for each in fields(BlockCosts)}
    blocks = block_costs(expert, **{name: changes.pop(name) for name in names & set(changes)})
    values: dict[str, Any] = {
        "expert": expert,
        "steps": [
            StepShape(expert=name)
            for name, steps in (("high", high), ("low", low))
            for _ in range(steps)
        ],
        "video_tokens": tokens - max(changes.get("extra_tokens", ()), default=0),
        "sides": {"high": 1, "low": 1},
        "kernels": KernelNeeds(linear_format=linear_format),
        **changes,
    }
    blocks = replace(blocks, stacks=tuple(values["sides"]))
    return RunShape(**{**values, "steps": tuple(values["steps"]), "blocks": blocks})


def predicted(run, machine, policy, *, by_step=False) -> Prediction:
    """Return the simulated run."""
    costs = run.costs(machine, policy.chunk_tokens)
    return predict(costs.by_step if by_step else costs, policy)


def needs_of(run: RunShape, machine: RatedMachine, policy: OffloadPolicy) -> MemoryNeeds:
    """Return the run's memory needs."""
    working_bytes = run.working_bytes(policy.chunk_tokens)
    return memory_needs(run.blocks, policy, has_bus=machine.has_bus, working_bytes=working_bytes)


def visit_seconds(run, machine, expert, chunk_tokens=None) -> float:
    """Return the seconds for a visit with all lanes in an expert."""
    return run.costs(machine, chunk_tokens).hardware.visit_s[expert]


def rated(read: float = 0.5, copy: float = 0.1, visit: float = 1.0, **changes: Any) -> RatedMachine:
    """Return a GPU with spare memory.

    The GPU has more memory than `run_shape()` takes. `read`, `copy` and `visit` are that run's
    seconds per block on the disk, on the bus, and in one lane.
    """
    block = SMALL.streamed_bytes()
    figures: dict[str, Any] = {
        "name": "test",
        "origin": "made up",
        "computes_on": "cuda",
        "vram_bytes": 100 * block + 2 * 10**9,
        "ram_bytes": 200 * block,
        "h2d_bytes_per_s": block / copy,
        "h2d_pageable_bytes_per_s": block / copy / 4,
        "d2h_bytes_per_s": block / copy,
        "disk_bytes_per_s": block / read,
        "flops_per_s": SMALL.block_flops(TOKENS) / visit,
        "decode_bytes_per_s": block / 0.01,
        "copy_bytes_per_s": block / 0.05,
        "quantise_bytes_per_s": block / 0.2,
    }
    return RatedMachine.from_dict({**figures, **changes})


def rated_cpu(**changes: Any) -> RatedMachine:
    """Return the same without a GPU and bus."""
    return rated(**{"computes_on": "cpu", "vram_bytes": 0, **changes})
