"""RAM programs: resident blocks, and reads for the bus, with disk, bus and device at any speed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanstream.plan.programs import IMMEDIATE, Fetch, TransferProgram, compile_program, compile_ram
from wanstream.plan.programs.ram_program import DIRECT, RamProgram, RamResidency, plan_ram
from wanstream.plan.programs.transfer_program import ProgramError
from wanstream.plan.programs.verify import check_ram
from wanstream.plan.programs.visits import BlockKey, step_visits
from wanstream.schema import OffloadPolicy, Residency, plan_residency, spread_evenly
from wanstream.tests.support.plan_fixtures import (
    Replay,
    any_ram_residency,
    any_run,
    buffers_needed,
    final_contents,
    ram_residents,
)

PROPERTY = settings(deadline=None, max_examples=25)
EXPERTS = ("high", "low")
WAN = dict.fromkeys(EXPERTS, 40)
HIGH = tuple(BlockKey("high", block) for block in range(3))


def policy(blocks_to_swap: int | None = None, **in_ram: Any) -> OffloadPolicy:
    """Return a policy that streams every block, or `blocks_to_swap` blocks."""
    swap = OffloadPolicy.block_swap
    usual = OffloadPolicy.layerwise() if blocks_to_swap is None else swap(blocks_to_swap)
    return replace(usual, source="pinned", **in_ram)


def ram_residency_of(requested: OffloadPolicy, block_counts: Mapping[str, int]) -> RamResidency:
    return plan_ram(requested, plan_residency(requested, block_counts)[0], block_counts)


# --- residents ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "block_counts", "high", "low"),
    [
        (OffloadPolicy.layerwise(), WAN, 0, 0),
        (OffloadPolicy.resident(source="pinned"), WAN, 40, 40),
        (policy(), WAN, 40, 40),
        (policy(ram_blocks=1), WAN, 0, 1),
        (policy(ram_blocks=20), WAN, 10, 10),
        (policy(ram_blocks=99), WAN, 40, 40),
        (policy(ram_blocks=35), {"high": 40, "low": 30}, 20, 15),
    ],
)
def test_number_of_ram_residents(requested, block_counts, high, low):
    ram = ram_residency_of(requested, block_counts)
    found = {expert: len(blocks) for expert, blocks in ram.residency.residents.items()}
    assert found == {"high": high, "low": low}
    assert ram.slots == high + low
    assert ram.residency.permanent


def test_device_residents_become_ram_residents_last():
    """Half is resident on the device: the first 20 RAM slots are for the other blocks.

    10 slots are for every second one.
    """
    on_device = spread_evenly(20, 40)
    one = {"high": 40}
    for blocks, in_ram in ((10, 10), (20, 20), (25, 20)):
        high = ram_residency_of(policy(20, ram_blocks=blocks), one).residency.residents["high"]
        assert len(high) == blocks
        assert len(high - on_device) == in_ram
    ten = ram_residency_of(policy(20, ram_blocks=10), one).residency.residents["high"]
    assert sorted(ten) == [*range(3, 40, 4)]


@given(st.integers(0, 40), st.integers(0, 90))
def test_blocks_from_the_file_are_spread_over_the_streamed_ones(swapped, blocks):
    requested = policy(swapped, ram_blocks=blocks)
    ram_residency = ram_residency_of(requested, WAN).residency
    device = plan_residency(requested, WAN)[0]
    streamed = [key for key in product(EXPERTS, range(40)) if not device.keeps(*key)]
    from_file = [place for place, key in enumerate(streamed) if not ram_residency.keeps(*key)]
    gaps = [after - before for before, after in pairwise([*from_file, len(streamed)])]
    assert not from_file or from_file[0] == 0
    assert max(gaps, default=0) - min(gaps, default=0) <= 1


# --- programs: any speed --------------------------------------------------------------------------


block = st.builds(BlockKey, st.sampled_from((*EXPERTS, "other")), st.integers(0, 10))
slot_contents = st.dictionaries(st.integers(-1, 12), block, max_size=14)


@PROPERTY
@given(data=st.data(), ram_residency=any_ram_residency(), slots=slot_contents, bus=st.booleans())
def test_every_visit_finds_its_block_at_any_speed(data, ram_residency, slots, bus):
    """A second run starts from the reads of the first.

    Reads not done at the first run's end are dropped. A slot still being filled counts as empty.
    """
    staging = data.draw(st.integers(0, 3))
    seed = data.draw(st.integers(0, 2**16))
    for _ in range(2):
        run = data.draw(any_run())
        buffers = buffers_needed(run.visits, run.residency) + run.spare_buffers
        program = compile_program(run.visits, run.residency, buffers, contents=run.contents)
        ram = compile_ram(program, ram_residency, staging=staging, contents=slots)
        check_ram(program, ram)
        assert ram.program.buffers == ram_residency.slots + staging
        replay = Replay(slots, run.contents)
        replay.run(program, ram, seed, bus=bus)
        slots = {slot: block for slot, block in replay.slots.items() if block is not None}


@PROPERTY
@given(run=any_run(whole_steps=True), ram_residency=any_ram_residency(), staging=st.integers(0, 3))
def test_reads_are_every_other_block_and_each_resident_once(run, ram_residency, staging):
    program = compile_program(run.visits, run.residency, buffers_needed(run.visits, run.residency))
    ram = compile_ram(program, ram_residency, staging=staging)

    def split(blocks: Iterable[BlockKey]) -> tuple[list[BlockKey], list[BlockKey]]:
        every = list(blocks)
        residents = [key for key in every if ram_residency.residency.keeps(*key)]
        return residents, [key for key in every if key not in residents]

    fetched, streamed = split(fetch.block.stored for fetch in program.fetches)
    read, read_again = split(fetch.block for fetch in ram.program.fetches)
    assert ram.visit_of_fetch.count(DIRECT) == (0 if staging else len(streamed))
    assert read_again == (streamed if staging else [])
    assert len(read) == len(set(read))
    assert set(read) == set(fetched)


# --- programs: cases ------------------------------------------------------------------------------


def layerwise(high, low=0, *, block_counts=None) -> TransferProgram:
    visits = step_visits(["high"] * high + ["low"] * low, block_counts or dict.fromkeys(EXPERTS, 3))
    return compile_program(visits, Residency(residents={}), 2)


def test_a_ram_program_that_fits_on_a_page():
    """Two steps with three streamed blocks, block 1 RAM-resident, one staging slot."""
    ram = compile_ram(layerwise(2), ram_residents(high={1}), staging=1)
    assert ram.visit_of_fetch == (0, 1, 2, 3, 4, 5)
    assert [visit.key for visit in ram.program.visits] == [*HIGH, *HIGH]
    assert [visit.step for visit in ram.program.visits] == [0, 0, 0, 1, 1, 1]
    assert ram.program.fetches == (
        Fetch(HIGH[0], buffer=1, start_after=IMMEDIATE, needed_by=0, last=0),
        Fetch(HIGH[1], buffer=0, start_after=IMMEDIATE, needed_by=1, last=4),
        Fetch(HIGH[2], buffer=1, start_after=0, needed_by=2, last=2),
        Fetch(HIGH[0], buffer=1, start_after=2, needed_by=3, last=3),
        Fetch(HIGH[2], buffer=1, start_after=3, needed_by=5, last=5),
    )
    assert ram.program.visit_buffer == (1, 0, 1, 1, 0, 1)


@pytest.mark.parametrize("order", [EXPERTS, EXPERTS[::-1]])
def test_permanent_residents_outlive_runs_of_the_other_expert(order):
    """A sampler runs one expert, another one the other, then the first again: no second read."""
    ram_residency = ram_residency_of(policy(ram_blocks=20), WAN)
    slots: dict[int, BlockKey] = {}
    reads = []
    for expert in order * 2:
        program = compile_program(step_visits([expert] * 2, WAN), Residency(residents={}), 2)
        ram = compile_ram(program, ram_residency, staging=2, contents=slots)
        slots = final_contents(ram.program)
        keeps = ram_residency.residency.keeps
        reads.append(sum(keeps(*read.block) for read in ram.program.fetches))
    assert reads == [10, 10, 0, 0]


def test_a_resident_takes_the_slot_of_a_former_resident():
    """Another policy: slots contain former residents, one twice, and one in a staging slot."""
    program = layerwise(1)
    contents = {0: HIGH[1], 1: HIGH[1], 2: HIGH[2], 7: HIGH[0]}
    ram = compile_ram(program, ram_residents(high={1, 2}), staging=1, contents=contents)
    check_ram(program, ram)
    reads = [(read.block, read.buffer) for read in ram.program.fetches]
    assert reads == [(HIGH[0], 2), (HIGH[2], 1)]
    assert ram.program.initial == {0: HIGH[1]}


def test_a_resident_never_takes_the_slot_of_another():
    """A non-resident block's slot is reused, not a resident's that this run never visits."""
    program = layerwise(0, 1, block_counts={"low": 1})
    residents = ram_residents(high={1}, low={0})
    ram = compile_ram(program, residents, staging=0, contents={0: HIGH[1], 1: HIGH[0]})
    assert final_contents(ram.program) == {0: HIGH[1], 1: BlockKey("low", 0)}


def test_contents_of_staging_slots_serve_the_next_run():
    contents = {1: HIGH[1], 2: HIGH[0]}
    ram = compile_ram(layerwise(1), ram_residents(high={2}), staging=2, contents=contents)
    assert ram.program.initial == contents
    assert [read.block for read in ram.program.fetches] == [HIGH[2]]


def test_reads_count_for_the_step_that_asks_first():
    """A device-resident block is fetched for the stage's first step and used in all."""
    visits = step_visits(["high"] * 3, {"high": 2})
    program = compile_program(visits, Residency(residents={"high": frozenset({0})}), 2)
    ram = compile_ram(program, ram_residents(), staging=1)
    found = [(visit.step, visit.block) for visit in ram.program.visits]
    assert found == [(0, 0), (0, 1), (1, 1), (2, 1)]


def test_negative_staging_and_too_few_slots_are_refused():
    with pytest.raises(ProgramError, match="staging is -1, it must be 0 or more"):
        compile_ram(layerwise(1), ram_residents(), staging=-1)
    short = replace(ram_residents(high={0, 1, 2}), slots=2)
    with pytest.raises(ProgramError, match=r"2 buffers are too few: .* need 3"):
        compile_ram(layerwise(2), short, staging=0)


# --- the static check -----------------------------------------------------------------------------


def pair() -> tuple[TransferProgram, RamProgram]:
    """Two steps with three blocks, one RAM-resident, and one staging slot."""
    return layerwise(2), compile_ram(layerwise(2), ram_residents(high={1}), staging=1)


def with_read(number: int, **values: Any) -> RamProgram:
    ram = pair()[1]
    reads = list(ram.program.fetches)
    reads[number] = reads[number]._replace(**values)
    return replace(ram, program=replace(ram.program, fetches=tuple(reads)))


def with_visits(*visit_of_fetch: int) -> RamProgram:
    return replace(pair()[1], visit_of_fetch=visit_of_fetch)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (with_read(2, start_after=2), "reaches it only after visit 2"),
        (with_read(2, start_after=IMMEDIATE), "its buffer 1 is read until visit 0"),
        (with_read(2, buffer=0), "in buffer 1, .* in buffer 0"),
        (with_visits(0, 1, 2), "6 fetches, but 3 of them"),
        (with_visits(0, 1, 3, 2, 4, 5), "fetch 2 is visit 3 .* visit 2 of 6 is due"),
        (with_visits(0, 1, 2, 3, 4, DIRECT), "visit 5 of 6 visits of RAM serves no fetch"),
        (with_visits(0, DIRECT, 1, 2, 3, 4), "fetch 2 needs .*block=2"),
    ],
)
def test_ram_program_must_serve_its_device_program(broken, message):
    check_ram(*pair())
    with pytest.raises(ProgramError, match=message):
        check_ram(pair()[0], broken)


def test_fetches_out_of_order_are_refused():
    """Each program alone is right.

    With one slot, a visit reading it directly would wait for the next.
    """
    program = layerwise(1, block_counts={"high": 2})
    swapped = replace(program, fetches=program.fetches[::-1], visit_fetch=program.visit_fetch[::-1])
    ram = compile_ram(swapped, ram_residents(), staging=1)
    assert ram.program.visits[0].key == HIGH[1]
    message = "fetch 1 is needed by visit 0, an earlier one by visit 1"
    with pytest.raises(ProgramError, match=message):
        check_ram(swapped, ram)
    with pytest.raises(AssertionError, match="wait for each other"):
        Replay({}, {}).run(swapped, ram, 0, bus=False)
