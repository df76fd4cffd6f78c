"""Runs to compile, and a machine that replays programs with random times for copies and visits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st

from wanstream.plan import BlockCosts, memory_needs, predict
from wanstream.plan import Machine as RatedMachine
from wanstream.plan.memory import MemoryNeeds
from wanstream.plan.predict import Prediction
from wanstream.plan.programs import IMMEDIATE, BlockKey, TransferProgram, Visit, step_visits
from wanstream.plan.programs.ram_program import RamProgram, RamResidency, compile_ram
from wanstream.plan.programs.transfer_program import list_lifetimes, max_overlap
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


class Machine:
    """A bus and a device that run programs in turn, every copy and visit at a random speed.

    Asserts the invariants at any speed: a visit finds the complete block, and no buffer is written
    while it is read. Shares nothing with the compiler or with `check_program`.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._computed_until = 0.0
        self._copied_until = 0.0
        self._holds: dict[int, tuple[BlockKey, float]] = {}
        self._read_until: dict[int, float] = {}

    def fill(self, contents: Mapping[int, BlockKey]) -> None:
        self._holds.update({buffer: (block, 0.0) for buffer, block in contents.items()})

    def run(self, program: TransferProgram, visits: int | None = None) -> dict[int, BlockKey]:
        """Run the first `visits` visits (default: all) and return the buffer contents.

        They are as the issued fetches leave them.
        """
        visits = len(program.visits) if visits is None else visits
        done = {IMMEDIATE: self._computed_until}
        waiting = list(program.fetches)
        for visit in range(visits + 1):
            while waiting and waiting[0].start_after < visit:
                fetch = waiting.pop(0)
                begin = max(self._copied_until, done[fetch.start_after])
                free = self._read_until.get(fetch.buffer, 0.0)
                assert begin >= free, "a buffer was overwritten while it was read"
                self._copied_until = begin + self._duration()
                self._holds[fetch.buffer] = (fetch.block, self._copied_until)
            if visit < visits:
                buffer = program.visit_buffer[visit]
                assert 0 <= buffer < program.buffers
                block, arrived = self._holds[buffer]
                assert block == program.visits[visit].key, "a visit found another block"
                self._computed_until = max(self._computed_until, arrived) + self._duration()
                done[visit] = self._read_until[buffer] = self._computed_until
        if visits == len(program.visits):
            assert not waiting, "a fetch was never issued"
        return {buffer: block for buffer, (block, _) in self._holds.items()}

    def _duration(self) -> float:
        return self._random.choice((0.01, 0.5, 1.0, 7.0))


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


@pytest.fixture(scope="session")
def rate_machine() -> Callable[..., RatedMachine]:
    """Create a machine as `rated` does."""
    return rated


@pytest.fixture(scope="session")
def rate_cpu() -> Callable[..., RatedMachine]:
    """Create a machine as `rated_cpu` does."""
    return rated_cpu
