"""RAM programs: resident blocks, and reads for the bus, with disk, bus and device at any speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanstream.plan.programs import (
    DIRECT,
    IMMEDIATE,
    KEPT,
    BlockKey,
    RamProgram,
    RamResidency,
    TransferProgram,
    Visit,
    check_ram,
    compile_program,
    compile_ram,
    plan_ram,
    step_visits,
)
from wanstream.plan.programs.transfer_program import ProgramError
from wanstream.schema import OffloadPolicy, Residency, plan_residency, spread_evenly
from wanstream.tests.support.plan_fixtures import buffers_needed, final_contents

PROPERTY = settings(deadline=None, max_examples=50)
EXPERTS = ("high", "low")
WAN = dict.fromkeys(EXPERTS, 40)


def policy(blocks_to_swap: int | None = None, **in_ram: Any) -> OffloadPolicy:
    """Return a policy that streams every block, or `blocks_to_swap` blocks."""
    if blocks_to_swap is None:
        return replace(OffloadPolicy.layerwise(source="pinned"), **in_ram)
    return replace(OffloadPolicy.block_swap(blocks_to_swap, source="pinned"), **in_ram)


def ram_residency_of(requested: OffloadPolicy, block_counts: Mapping[str, int]) -> RamResidency:
    return plan_ram(requested, plan_residency(requested, block_counts)[0], block_counts)


# --- residents ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "block_counts", "expected", "slots"),
    [
        (OffloadPolicy.layerwise(), WAN, {"high": 0, "low": 0}, 0),
        (OffloadPolicy.layerwise(source="pinned"), WAN, {"high": 40, "low": 40}, 80),
        (OffloadPolicy.resident(source="pinned"), WAN, {"high": 40, "low": 40}, 80),
        (policy(ram_blocks=0), WAN, {"high": 0, "low": 0}, 0),
        (policy(ram_blocks=1), WAN, {"high": 0, "low": 1}, 1),
        (policy(ram_blocks=20), WAN, {"high": 10, "low": 10}, 20),
        (policy(ram_blocks=99), WAN, {"high": 40, "low": 40}, 80),
        (policy(ram_blocks=35), {"high": 40, "low": 30}, {"high": 20, "low": 15}, 35),
    ],
)
def test_number_of_ram_residents(
    requested: OffloadPolicy, block_counts: dict[str, int], expected: dict[str, int], slots: int
) -> None:
    ram_residency = ram_residency_of(requested, block_counts)
    assert {
        expert: len(blocks) for expert, blocks in ram_residency.residency.residents.items()
    } == expected
    assert ram_residency.slots == slots
    assert ram_residency.residency.permanent


def test_device_residents_become_ram_residents_last() -> None:
    """Half is resident on the device: the first 20 RAM slots are for the other blocks.

    10 slots are for every second one.
    """
    on_device, one = spread_evenly(20, 40), {"high": 40}
    for blocks, in_ram in ((10, 10), (20, 20), (25, 20)):
        high = ram_residency_of(policy(20, ram_blocks=blocks), one).residency.residents["high"]
        assert len(high) == blocks
        assert len(high - on_device) == in_ram
    ten = ram_residency_of(policy(20, ram_blocks=10), one).residency.residents["high"]
    assert sorted(ten) == [3, 7, 11, 15, 19, 23, 27, 31, 35, 39]


@given(st.integers(0, 40), st.integers(0, 90))
def test_blocks_from_the_file_are_spread_evenly_over_the_streamed_ones(
    swapped: int, blocks: int
) -> None:
    requested = policy(swapped, ram_blocks=blocks)
    ram_residency = ram_residency_of(requested, WAN).residency
    device = plan_residency(requested, WAN)[0]
    streamed = [
        key
        for expert in EXPERTS
        for block in range(40)
        if not device.keeps(*(key := BlockKey(expert, block)))
    ]
    from_file = [place for place, key in enumerate(streamed) if not ram_residency.keeps(*key)]
    gaps = [after - before for before, after in pairwise([*from_file, len(streamed)])]
    assert not from_file or from_file[0] == 0
    assert max(gaps, default=0) - min(gaps, default=0) <= 1


# --- programs: any speed --------------------------------------------------------------------------


class Replay:
    """Disk, bus and device, each at any speed: all that a program pair allows may happen.

    Fails if a slot or buffer is overwritten before or while it is read, or if a visit is never
    reached. Shares nothing with the compiler, the checks or the simulator.
    """

    def __init__(self, slots: Mapping[int, BlockKey], buffers: Mapping[int, BlockKey]) -> None:
        self.slots: dict[int, BlockKey | None] = dict(slots)
        self.buffers: dict[int, BlockKey | None] = dict(buffers)

    def run(
        self, program: TransferProgram, ram: RamProgram, seed: int, *, bus: bool = True
    ) -> None:
        """`bus` False: a fetch does nothing, and the visit that needs it reads the slot."""
        self._program, self._ram, self._bus = program, ram, bus
        self._at = {"disk": 0, "bus": 0, "device": 0}
        self._busy: set[str] = set()
        self._emptied: set[int] = set()  # RAM visits done
        pick = Random(seed)
        while self._at["device"] < len(program.visits):
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
        assert self._at["bus"] == len(program.fetches)

    def _may_begin(self, who: str) -> bool:
        number, program, ram = self._at[who], self._program, self._ram
        if who == "disk":
            if number == len(ram.program.fetches):
                return False
            after = ram.program.fetches[number].start_after
            return after == IMMEDIATE or after in self._emptied
        if who == "device":
            return self._at["bus"] > program.visit_fetch[number]
        if (
            number == len(program.fetches)
            or self._at["device"] <= program.fetches[number].start_after
        ):
            return False
        visit = ram.visit_of_fetch[number]
        return visit == DIRECT or self._at["disk"] > ram.program.visit_fetch[visit]

    def _begin(self, who: str, number: int) -> None:
        program, ram = self._program, self._ram
        if who == "disk":
            slot = ram.program.fetches[number].buffer
            assert slot not in self._slots_being_read(), "a slot was filled while it was read"
            self.slots[slot] = None
        elif who == "bus":
            fetch, visit = program.fetches[number], ram.visit_of_fetch[number]
            if visit != DIRECT:
                assert self.slots[ram.program.visit_buffer[visit]] == fetch.block.stored, (
                    "another block was read"
                )
            in_use = program.visit_buffer[self._at["device"]] if "device" in self._busy else None
            assert fetch.buffer != in_use, "a buffer was overwritten while it was read"
            self.buffers[fetch.buffer] = None
        else:
            if (slot := self._slot_of_visit(number)) is not None:
                assert self.slots[slot] == program.visits[number].key.stored, (
                    "a slot was overwritten before it was read"
                )
            assert self.buffers[program.visit_buffer[number]] == program.visits[number].key

    def _end(self, who: str, number: int) -> None:
        program, ram = self._program, self._ram
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
        if (
            self._bus
            and "bus" in self._busy
            and self._ram.visit_of_fetch[self._at["bus"]] != DIRECT
        ):
            reading.add(self._ram.program.visit_buffer[self._ram.visit_of_fetch[self._at["bus"]]])
        if "device" in self._busy:
            reading.add(self._slot_of_visit(self._at["device"]))
        return reading


@st.composite
def any_ram_residency(draw: st.DrawFn) -> RamResidency:
    residents = {expert: draw(st.frozensets(st.integers(0, 9))) for expert in EXPERTS}
    return RamResidency(
        residency=Residency(residents=residents, permanent=True),
        slots=sum(map(len, residents.values())),
    )


block = st.builds(BlockKey, st.sampled_from((*EXPERTS, "other")), st.integers(0, 10))
slot_contents = st.dictionaries(st.integers(-1, 12), block, max_size=14)


@PROPERTY
@given(
    data=st.data(),
    ram_residency=any_ram_residency(),
    staging=st.integers(0, 3),
    contents=slot_contents,
    seed=st.integers(0, 2**16),
    bus=st.booleans(),
)
def test_every_visit_finds_its_block_whatever_is_fast_and_whatever_is_slow(
    runs: Any,
    data: Any,
    ram_residency: RamResidency,
    staging: int,
    contents: Mapping[int, BlockKey],
    seed: int,
    bus: bool,
) -> None:
    run = data.draw(runs)
    buffers = buffers_needed(run.visits, run.residency) + run.spare_buffers
    program = compile_program(run.visits, run.residency, buffers, contents=run.contents)
    ram = compile_ram(program, ram_residency, staging=staging, contents=contents)
    check_ram(program, ram)
    assert ram.program.buffers == ram_residency.slots + staging
    Replay(contents, run.contents).run(program, ram, seed, bus=bus)


@PROPERTY
@given(
    data=st.data(), ram_residency=any_ram_residency(), staging=st.integers(0, 3), bus=st.booleans()
)
def test_a_second_run_starts_from_the_reads_of_the_first(
    runs: Any, data: Any, ram_residency: RamResidency, staging: int, bus: bool
) -> None:
    """Reads not done at the first run's end are dropped.

    A slot still being filled counts as empty.
    """
    slots: dict[int, BlockKey] = {}
    for seed in range(3):
        run = data.draw(runs)
        program = compile_program(
            run.visits, run.residency, buffers_needed(run.visits, run.residency)
        )
        ram = compile_ram(program, ram_residency, staging=staging, contents=slots)
        check_ram(program, ram)
        replay = Replay(slots, {})
        replay.run(program, ram, seed, bus=bus)
        slots = {slot: block for slot, block in replay.slots.items() if block is not None}


@PROPERTY
@given(data=st.data(), ram_residency=any_ram_residency(), staging=st.integers(0, 3))
def test_reads_are_every_other_block_and_each_resident_once(
    runs_of_whole_steps: Any, data: Any, ram_residency: RamResidency, staging: int
) -> None:
    run = data.draw(runs_of_whole_steps)
    program = compile_program(run.visits, run.residency, buffers_needed(run.visits, run.residency))
    ram = compile_ram(program, ram_residency, staging=staging)
    not_resident = [
        fetch for fetch in program.fetches if not ram_residency.residency.keeps(*fetch.block)
    ]
    assert ram.visit_of_fetch.count(DIRECT) == (0 if staging else len(not_resident))
    read = [fetch.block for fetch in ram.program.fetches]
    if staging:
        assert [key for key in read if not ram_residency.residency.keeps(*key)] == [
            fetch.block.stored for fetch in not_resident
        ]
    of_residents = [key for key in read if ram_residency.residency.keeps(*key)]
    assert len(of_residents) == len(set(of_residents))
    assert set(of_residents) == {
        fetch.block.stored
        for fetch in program.fetches
        if ram_residency.residency.keeps(*fetch.block)
    }


# --- programs: cases ------------------------------------------------------------------------------


def layerwise(
    high: int, low: int, *, buffers: int = 2, block_counts: Mapping[str, int] = WAN
) -> TransferProgram:
    visits = step_visits(["high"] * high + ["low"] * low, block_counts)
    return compile_program(visits, Residency(residents={}), buffers)


def test_a_ram_program_that_fits_on_a_page() -> None:
    """Two steps with three streamed blocks, block 1 RAM-resident, one staging slot."""
    program = layerwise(2, 0, block_counts={"high": 3})
    ram_residency = RamResidency(
        residency=Residency(residents={"high": frozenset({1})}, permanent=True), slots=1
    )
    ram = compile_ram(program, ram_residency, staging=1)
    high = [BlockKey("high", block) for block in range(3)]
    assert ram.visit_of_fetch == (0, 1, 2, 3, 4, 5)
    assert [visit.key for visit in ram.program.visits] == [*high, *high]
    assert [visit.step for visit in ram.program.visits] == [0, 0, 0, 1, 1, 1]
    reads = [
        (read.block.block, read.buffer, read.start_after, read.needed_by)
        for read in ram.program.fetches
    ]
    assert reads == [
        (0, 1, IMMEDIATE, 0),
        (1, 0, IMMEDIATE, 1),
        (2, 1, 0, 2),
        (0, 1, 2, 3),
        (2, 1, 3, 5),
    ]
    assert ram.program.visit_buffer == (1, 0, 1, 1, 0, 1)


def test_without_staging_only_residents_pass_through_ram() -> None:
    program = layerwise(2, 0, block_counts={"high": 3})
    ram_residency = RamResidency(
        residency=Residency(residents={"high": frozenset({1})}, permanent=True), slots=1
    )
    ram = compile_ram(program, ram_residency, staging=0)
    assert ram.visit_of_fetch == (DIRECT, 0, DIRECT, DIRECT, 1, DIRECT)
    assert len(ram.program.fetches) == 1
    nothing = compile_ram(
        program, RamResidency(residency=Residency(residents={}), slots=0), staging=0
    )
    assert (nothing.program.visits, nothing.program.buffers) == ((), 0)


@pytest.mark.parametrize("first", EXPERTS)
def test_permanent_residents_outlive_runs_of_the_other_expert(first: str) -> None:
    """A sampler runs one expert, another one the other, then the first again: no second read."""
    ram_residency = ram_residency_of(policy(ram_blocks=20), WAN)
    second = EXPERTS[1 - EXPERTS.index(first)]
    slots: dict[int, BlockKey] = {}
    reads = []
    for expert in (first, second, first, second):
        program = compile_program(step_visits([expert] * 2, WAN), Residency(residents={}), 2)
        ram = compile_ram(program, ram_residency, staging=2, contents=slots)
        slots = final_contents(ram.program)
        reads.append(
            sum(ram_residency.residency.keeps(*read.block) for read in ram.program.fetches)
        )
    assert reads == [10, 10, 0, 0]


def test_a_resident_takes_the_slot_of_a_former_resident() -> None:
    """Another policy: slots contain former residents, one twice, and one in a staging slot."""
    ram_residency = RamResidency(
        residency=Residency(residents={"high": frozenset({1, 2})}, permanent=True), slots=2
    )
    high = [BlockKey("high", block) for block in range(3)]
    program = layerwise(1, 0, block_counts={"high": 3})
    ram = compile_ram(
        program, ram_residency, staging=1, contents={0: high[1], 1: high[1], 2: high[2], 7: high[0]}
    )
    check_ram(program, ram)
    assert [(read.block, read.buffer) for read in ram.program.fetches] == [
        (high[0], 2),
        (high[2], 1),
    ]
    assert ram.program.initial == {0: high[1]}


def test_a_resident_never_takes_the_slot_of_another() -> None:
    """A non-resident block's slot is reused, not a resident's that this run never visits."""
    ram_residency = RamResidency(
        residency=Residency(
            residents={"high": frozenset({1}), "low": frozenset({0})}, permanent=True
        ),
        slots=2,
    )
    program = layerwise(0, 1, block_counts={"low": 1})
    ram = compile_ram(
        program, ram_residency, staging=0, contents={0: BlockKey("high", 1), 1: BlockKey("high", 0)}
    )
    assert final_contents(ram.program) == {0: BlockKey("high", 1), 1: BlockKey("low", 0)}


def test_contents_of_staging_slots_serve_the_next_run() -> None:
    ram_residency = RamResidency(
        residency=Residency(residents={"high": frozenset({2})}, permanent=True), slots=1
    )
    program = layerwise(1, 0, block_counts={"high": 3})
    contents = {1: BlockKey("high", 1), 2: BlockKey("high", 0)}
    ram = compile_ram(program, ram_residency, staging=2, contents=contents)
    assert ram.program.initial == contents
    assert [read.block for read in ram.program.fetches] == [BlockKey("high", 2)]


def test_reads_count_for_the_step_that_asks_first() -> None:
    """A device-resident block is fetched for the stage's first step and used in all."""
    visits = step_visits(["high"] * 3, {"high": 2})
    program = compile_program(visits, Residency(residents={"high": frozenset({0})}), 2)
    ram = compile_ram(program, ram_residency_of(OffloadPolicy.layerwise(), {"high": 2}), staging=1)
    assert [(visit.step, visit.block) for visit in ram.program.visits] == [
        (0, 0),
        (0, 1),
        (1, 1),
        (2, 1),
    ]


@pytest.mark.parametrize("staging", [-1, -2])
def test_staging_below_nothing_is_refused(staging: int) -> None:
    with pytest.raises(ProgramError, match=f"staging is {staging}, it must be 0 or more"):
        compile_ram(
            layerwise(1, 0), ram_residency_of(OffloadPolicy.layerwise(), WAN), staging=staging
        )


def test_too_few_slots_are_refused_with_the_number_that_is_needed() -> None:
    ram_residency = RamResidency(
        residency=Residency(residents={"high": frozenset(range(5))}, permanent=True), slots=3
    )
    with pytest.raises(ProgramError, match=r"3 buffers are too few: .* need 5"):
        compile_ram(layerwise(2, 0), ram_residency, staging=0)


# --- the static check -----------------------------------------------------------------------------


def pair() -> tuple[TransferProgram, RamProgram]:
    """Two steps with three blocks, one RAM-resident, and one staging slot."""
    program = layerwise(2, 0, block_counts={"high": 3})
    ram_residency = RamResidency(
        residency=Residency(residents={"high": frozenset({1})}, permanent=True), slots=1
    )
    return program, compile_ram(program, ram_residency, staging=1)


def with_read(number: int, **values: Any) -> RamProgram:
    ram = pair()[1]
    reads = list(ram.program.fetches)
    reads[number] = reads[number]._replace(**values)
    return replace(ram, program=replace(ram.program, fetches=tuple(reads)))


def test_the_pair_that_is_broken_below_is_right() -> None:
    check_ram(*pair())


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        pytest.param(
            with_read(2, start_after=2),
            "reaches it only after visit 2",
            id="a read that waits for its fetch",
        ),
        pytest.param(
            with_read(2, start_after=IMMEDIATE),
            "its buffer 1 is read until visit 0",
            id="a slot still in use",
        ),
        pytest.param(
            with_read(2, buffer=0), "in buffer 1, .* in buffer 0", id="read into another slot"
        ),
        pytest.param(
            replace(pair()[1], visit_of_fetch=(0, 1, 2)),
            "6 fetches, but 3 of them",
            id="fetches that are not served",
        ),
        pytest.param(
            replace(pair()[1], visit_of_fetch=(0, 1, 3, 2, 4, 5)),
            "fetch 2 is visit 3 .* visit 2 of 6 is due",
            id="order",
        ),
        pytest.param(
            replace(pair()[1], visit_of_fetch=(0, 1, 2, 3, 4, DIRECT)),
            "visit 5 of 6 visits of RAM serves no fetch",
            id="a slot that is never emptied",
        ),
        pytest.param(
            replace(pair()[1], visit_of_fetch=(0, DIRECT, 1, 2, 3, 4)),
            "fetch 2 needs .*block=2",
            id="another block",
        ),
    ],
)
def test_a_ram_program_that_does_not_serve_its_device_program_is_refused(
    broken: RamProgram, message: str
) -> None:
    with pytest.raises(ProgramError, match=message):
        check_ram(pair()[0], broken)


def test_fetches_that_would_empty_ram_in_another_order_than_the_visits_are_refused() -> None:
    """Each program alone is right.

    With one slot, a visit reading it directly would wait for the next.
    """
    block_counts = {"high": 2}
    program = layerwise(1, 0, block_counts=block_counts)
    swapped = replace(program, fetches=program.fetches[::-1], visit_fetch=program.visit_fetch[::-1])
    ram_residency = RamResidency(residency=Residency(residents={}, permanent=True), slots=0)
    ram = compile_ram(swapped, ram_residency, staging=1)
    with pytest.raises(
        ProgramError, match="fetch 1 is needed by visit 0, an earlier one by visit 1"
    ):
        check_ram(swapped, ram)
    with pytest.raises(AssertionError, match="wait for each other"):
        Replay({}, {}).run(swapped, ram, 0, bus=False)
    assert Visit(0, "high", 1).key == ram.program.visits[0].key
