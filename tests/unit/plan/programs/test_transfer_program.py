"""The compiler: every run's properties, and tables for typical cases."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanstream.plan.programs import IMMEDIATE, Fetch, check_program, compile_program, eviction_order
from wanstream.plan.programs.transfer_program import ProgramError
from wanstream.plan.programs.visits import BlockKey, Visit, step_visits
from wanstream.schema import OffloadPolicy, Residency, plan_residency, spread_evenly
from wanstream.tests.support.plan_fixtures import (
    Replay,
    Run,
    any_run,
    buffers_needed,
    final_contents,
)

PROPERTY = settings(deadline=None, max_examples=25)
HIGH_LOW = ("high", "low")


def even(residents: int, blocks: int = 40) -> Residency:
    return Residency(residents={expert: spread_evenly(residents, blocks) for expert in HIGH_LOW})


def wan_steps(high: int, low: int) -> tuple[Visit, ...]:
    return step_visits(["high"] * high + ["low"] * low, dict.fromkeys(HIGH_LOW, 40))


def stages(visits: tuple[Visit, ...]) -> list[list[Visit]]:
    return [list(stage) for _, stage in groupby(visits, lambda visit: (visit.expert, visit.patch))]


def with_buffers(run: Run) -> int:
    return buffers_needed(run.visits, run.residency) + run.spare_buffers


def overlap(visits: tuple[Visit, ...], residency: Residency) -> int:
    """Return the most blocks needed on the device at one visit.

    Count visit by visit from the definition of a resident.
    """
    most = 0
    for now, current in enumerate(visits):
        own = current.expert, current.patch
        other = [i for i, visit in enumerate(visits) if (visit.expert, visit.patch) != own]
        stage_first = max((i + 1 for i in other if i < now), default=0)
        stage_past = min((i for i in other if i > now), default=len(visits))
        before, after = (0, len(visits)) if residency.permanent else (stage_first, stage_past)
        # With several patches for a block: the last one used before, and the first one after.
        used_before = {visit.key.stored: visit.key for visit in visits[before : now + 1]}.values()
        used_after = {visit.key.stored: visit.key for visit in reversed(visits[now:after])}.values()
        stay = {key for key in {*used_before} & {*used_after} if residency.keeps(*key)}
        most = max(most, len(stay | {current.key}))
    return most


# --- every run ------------------------------------------------------------------------------------


@PROPERTY
@given(run=any_run(), seed=st.integers(0, 2**16))
def test_visits_find_their_blocks_at_any_speed(run, seed):
    buffers = with_buffers(run)
    program = compile_program(run.visits, run.residency, buffers, contents=run.contents)
    check_program(program)
    usable = {buffer: block for buffer, block in run.contents.items() if 0 <= buffer < buffers}
    assert Replay({}, usable).run_device(program, seed) == final_contents(program)
    without = compile_program(run.visits, run.residency, buffers)
    assert len(program.fetches) == len(without.fetches) - len(program.initial)
    # Release times and deadlines rise along the queue: no other order starts a copy earlier.
    for before, after in pairwise(program.fetches):
        assert before.start_after <= after.start_after
        assert before.needed_by < after.needed_by
    for fetch in program.fetches:
        assert IMMEDIATE <= fetch.start_after < fetch.needed_by <= fetch.last
    # The buffer is free from exactly then on: no fetch waits longer than it must, and no two
    # wait for the same visit.
    awaited = [fetch.start_after for fetch in program.fetches if fetch.start_after != IMMEDIATE]
    assert set(awaited) <= program.last_use
    assert len(set(awaited)) == len(awaited)


@PROPERTY
@given(run=any_run())
def test_it_works_exactly_from_the_largest_overlap_on(run):
    needed = buffers_needed(run.visits, run.residency)
    assert needed == overlap(run.visits, run.residency)
    compile_program(run.visits, run.residency, needed)
    with pytest.raises(ProgramError, match=f"^{needed - 1} buffers are too few: .* need {needed}$"):
        compile_program(run.visits, run.residency, needed - 1)


@PROPERTY
@given(run=any_run(whole_steps=True))
def test_bytes_are_one_pass_of_the_streamed_blocks_per_step(run):
    program = compile_program(run.visits, run.residency, with_buffers(run))
    expected = 0
    for stage in stages(run.visits):
        residents = {visit.key for visit in stage if run.residency.keeps(visit.expert, visit.block)}
        steps = len({visit.step for visit in stage})
        expected += steps * len({visit.key for visit in stage} - residents)
        expected += 0 if run.residency.permanent else len(residents)
    if run.residency.permanent:
        keys = [visit.key for visit in run.visits if run.residency.keeps(*visit.key)]
        for stored in {key.stored for key in keys}:  # once, and once more for each patch change
            expected += sum(1 for _ in groupby(key for key in keys if key.stored == stored))
    assert len(program.fetches) == expected


@PROPERTY
@given(run=any_run(), data=st.data(), seed=st.integers(0, 2**16))
def test_a_chain_of_recompilations_runs_as_one(run, data, seed):
    """Stop anywhere, skip some later visits, continue from issued fetches, complete or not."""
    rest = run.visits
    contents = {}
    replay = Replay({}, {})
    buffers = with_buffers(run)
    for turn in range(4):
        program = compile_program(rest, run.residency, buffers, contents=contents)
        check_program(program)
        stop = data.draw(st.integers(0, len(rest)))
        contents = replay.run_device(program, seed + turn, stop)
        rest = tuple(visit for visit in rest[stop:] if data.draw(st.integers(0, 3)))
        # A rest may do with fewer buffers, and giving some up must not break it. It may need more
        # where the stage between two others was skipped.
        needed = buffers_needed(rest, run.residency)
        buffers = data.draw(st.integers(needed, max(needed, buffers)))
        contents = {buffer: block for buffer, block in contents.items() if buffer < buffers}
    replay.run_device(compile_program(rest, run.residency, buffers, contents=contents), seed)


@PROPERTY
@given(run=any_run(), data=st.data())
def test_stopping_and_going_on_costs_no_fetch(run, data):
    buffers = with_buffers(run)
    program = compile_program(run.visits, run.residency, buffers)
    stop = data.draw(st.integers(0, len(run.visits)))
    issued = [fetch for fetch in program.fetches if fetch.start_after < stop]
    contents = {fetch.buffer: fetch.block for fetch in issued}
    rest = compile_program(run.visits[stop:], run.residency, buffers, contents=contents)
    assert len(issued) + len(rest.fetches) <= len(program.fetches)


# --- cases ----------------------------------------------------------------------------------------


def test_a_program_that_fits_on_a_page():
    """Two steps with three blocks, block 0 resident, two more buffers."""
    visits = step_visits(["high", "high"], {"high": 3})
    program = compile_program(visits, Residency(residents={"high": frozenset({0})}), 3)
    high = [BlockKey("high", block) for block in range(3)]
    assert program.fetches == (
        Fetch(high[0], buffer=0, start_after=IMMEDIATE, needed_by=0, last=3),
        Fetch(high[1], buffer=1, start_after=IMMEDIATE, needed_by=1, last=1),
        Fetch(high[2], buffer=2, start_after=IMMEDIATE, needed_by=2, last=2),
        Fetch(high[1], buffer=1, start_after=1, needed_by=4, last=4),
        Fetch(high[2], buffer=2, start_after=2, needed_by=5, last=5),
    )
    assert program.visit_buffer == (0, 1, 2, 0, 1, 2)
    assert program.visit_fetch == (0, 1, 2, 0, 3, 4)
    assert program.last_use == {1, 2, 3, 4, 5}
    assert final_contents(program) == {0: high[0], 1: high[1], 2: high[2]}


def test_permanent_resident_stays_when_its_patch_returns():
    """It occupies a buffer from the start in the first lifetime only: two buffers suffice."""
    residency = Residency(residents={"high": frozenset({3})}, permanent=True)
    contents = {1: BlockKey("high", 3)}
    visits = step_visits(["high"] * 3, {"high": 4}, patches_of_steps=[0, 1, 0])
    program = compile_program(visits, residency, 2, contents=contents)
    check_program(program)
    assert program.initial == contents
    assert len(program.fetches) == 3 * 4 - 1


def test_contents_of_no_use_are_overwritten_last():
    low = {buffer: BlockKey("low", buffer) for buffer in range(2)}
    program = compile_program(step_visits(["high"], {"high": 2}), even(0, 2), 4, contents=low)
    assert {fetch.buffer for fetch in program.fetches} == {2, 3}
    assert program.untouched == low


def test_a_step_skipped_after_its_first_block_wastes_no_copy():
    """The probe is a resident: the blocks prefetched after it are the next computed step's."""
    visits = wan_steps(4, 0)
    program = compile_program(visits, even(20), 22)
    issued = [fetch for fetch in program.fetches if fetch.start_after < 40 + 1]
    contents = {fetch.buffer: fetch.block for fetch in issued}
    rest = compile_program(visits[80:], even(20), 22, contents=contents)
    assert len(issued) + len(rest.fetches) == len(program.fetches) - 20


def test_rest_without_residents_may_use_fewer_buffers():
    """The only buffer is not set aside for a later resident.

    None would be left for the first block.
    """
    visits = step_visits(["high"], {"high": 10})
    residency = Residency(residents={"high": frozenset({5})})
    program = compile_program(visits, residency, 1, contents={0: BlockKey("high", 5)})
    check_program(program)
    assert program.initial == {}


def test_two_copies_of_one_block_serve_two_visits():
    one_block = step_visits(["high"] * 3, {"high": 1})
    program = compile_program(one_block, even(0, 1), 2)
    again = compile_program(one_block, even(0, 1), 2, contents=final_contents(program))
    assert len(again.initial) == 2
    assert len(again.fetches) == 1


def test_the_same_input_makes_the_same_program():
    """Every rank in a group compiles for itself and must find the same order."""
    contents = {3: BlockKey("low", 4), 0: BlockKey("high", 7), 9: BlockKey("high", 7)}
    orders = (dict(sorted(contents.items(), reverse=reverse)) for reverse in (False, True))
    one, other = (compile_program(wan_steps(3, 3), even(8), 10, contents=each) for each in orders)
    assert one == other


# --- eviction ---------------------------------------------------------------------------------

FOUR = {"high": 4, "low": 4}


@pytest.mark.parametrize(
    ("policy", "buffers", "contents", "expected"),
    [
        # Empty ones, then streamed blocks, then residents: blocks 0 and 2.
        (OffloadPolicy.block_swap(2, 1), 5, {0: 0, 1: 1, 2: 2, 4: 3}, (3, 4, 1, 2, 0)),
        # The block visited last goes first, and of two copies each buffer once.
        (OffloadPolicy.resident(), 3, {0: 0, 1: 3, 2: 1}, (1, 2, 0)),
        (OffloadPolicy.layerwise(1), 3, {0: 1, 1: 1}, (2, 0, 1)),
    ],
)
def test_order_of_eviction(policy, buffers, contents, expected):
    blocks = {buffer: BlockKey("high", block) for buffer, block in contents.items()}
    assert eviction_order(range(buffers), blocks, plan_residency(policy, FOUR)[0]) == expected


def test_eviction_of_several_experts_and_of_an_unknown_stack():
    residency, _ = plan_residency(OffloadPolicy.resident(), FOUR)
    blocks = [("low", 0), ("high", 3), ("low", 3), ("high", 0)]
    contents = {buffer: BlockKey(*block) for buffer, block in enumerate(blocks)}
    assert eviction_order(range(4), contents, residency) == (2, 0, 1, 3)
    unknown = {0: BlockKey("text", 1), 1: BlockKey("text", 2)}
    assert eviction_order(range(2), unknown, Residency(residents={})) == (1, 0)
