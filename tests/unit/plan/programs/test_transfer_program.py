"""The compiler: every run's properties, and tables for typical cases."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanstream.plan.programs import (
    IMMEDIATE,
    KEPT,
    BlockKey,
    Fetch,
    TransferProgram,
    Visit,
    check_program,
    compile_program,
    step_visits,
)
from wanstream.plan.programs.transfer_program import ProgramError
from wanstream.schema import OffloadPolicy, Residency, plan_residency, spread_evenly
from wanstream.tests.support.plan_fixtures import buffers_needed, final_contents

PROPERTY = settings(deadline=None, max_examples=50)
HIGH_LOW = ("high", "low")


def even(residents: int, blocks: int = 40) -> Residency:
    return Residency(residents={expert: spread_evenly(residents, blocks) for expert in HIGH_LOW})


def wan_steps(high: int, low: int, blocks: int = 40) -> tuple[Visit, ...]:
    return step_visits(["high"] * high + ["low"] * low, dict.fromkeys(HIGH_LOW, blocks))


def stages(visits: tuple[Visit, ...]) -> list[list[Visit]]:
    return [
        list(stage) for _, stage in groupby(visits, key=lambda visit: (visit.expert, visit.patch))
    ]


def overlap(visits: tuple[Visit, ...], residency: Residency) -> int:
    """Return the most blocks needed on the device at one visit.

    Count visit by visit from the definition of a resident.
    """
    most = 0
    for now, current in enumerate(visits):
        other = [
            i
            for i, visit in enumerate(visits)
            if (visit.expert, visit.patch) != (current.expert, current.patch)
        ]
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
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_every_visit_finds_its_block_at_any_speed(
    runs: Any, new_machine: Callable[[int], Any], data: Any, seed: int
) -> None:
    run = data.draw(runs)
    buffers = buffers_needed(run.visits, run.residency) + run.spare_buffers
    program = compile_program(run.visits, run.residency, buffers)
    check_program(program)
    left = new_machine(seed).run(program)
    assert left == final_contents(program)


@PROPERTY
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_the_same_from_any_contents(
    runs: Any, new_machine: Callable[[int], Any], data: Any, seed: int
) -> None:
    run = data.draw(runs)
    buffers = buffers_needed(run.visits, run.residency) + run.spare_buffers
    program = compile_program(run.visits, run.residency, buffers, contents=run.contents)
    check_program(program)
    machine = new_machine(seed)
    machine.fill({buffer: block for buffer, block in run.contents.items() if 0 <= buffer < buffers})
    assert machine.run(program) == final_contents(program)
    without = compile_program(run.visits, run.residency, buffers)
    assert len(program.fetches) == len(without.fetches) - len(program.initial)


@PROPERTY
@given(data=st.data())
def test_it_works_exactly_from_the_largest_overlap_on(runs: Any, data: Any) -> None:
    run = data.draw(runs)
    needed = buffers_needed(run.visits, run.residency)
    assert needed == overlap(run.visits, run.residency)
    compile_program(run.visits, run.residency, needed)
    with pytest.raises(ProgramError, match=f"^{needed - 1} buffers are too few: .* need {needed}$"):
        compile_program(run.visits, run.residency, needed - 1)


@PROPERTY
@given(data=st.data())
def test_the_bus_goes_forward_only(runs: Any, data: Any) -> None:
    """Release times and deadlines rise along the queue: no other order starts a copy earlier."""
    run = data.draw(runs)
    buffers = buffers_needed(run.visits, run.residency) + run.spare_buffers
    program = compile_program(run.visits, run.residency, buffers, contents=run.contents)
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
@given(data=st.data())
def test_bytes_are_one_pass_of_the_streamed_blocks_per_step(
    runs_of_whole_steps: Any, data: Any
) -> None:
    run = data.draw(runs_of_whole_steps)
    buffers = buffers_needed(run.visits, run.residency) + run.spare_buffers
    program = compile_program(run.visits, run.residency, buffers)
    expected = 0
    for stage in stages(run.visits):
        residents = {visit.key for visit in stage if run.residency.keeps(visit.expert, visit.block)}
        blocks = {visit.key for visit in stage}
        steps = len({visit.step for visit in stage})
        expected += steps * (len(blocks) - len(residents)) + (
            0 if run.residency.permanent else len(residents)
        )
    if run.residency.permanent:
        keys = [visit.key for visit in run.visits if run.residency.keeps(*visit.key)]
        for stored in {key.stored for key in keys}:  # once, and once more for each patch change
            expected += sum(1 for _ in groupby(key for key in keys if key.stored == stored))
    assert len(program.fetches) == expected


@PROPERTY
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_a_chain_of_recompilations_runs_as_one(
    runs: Any, new_machine: Callable[[int], Any], data: Any, seed: int
) -> None:
    """Stop anywhere, skip some later visits, continue from issued fetches, complete or not."""
    run = data.draw(runs)
    rest, contents, machine = run.visits, {}, new_machine(seed)
    buffers = buffers_needed(rest, run.residency) + run.spare_buffers
    for _ in range(4):
        program = compile_program(rest, run.residency, buffers, contents=contents)
        check_program(program)
        stop = data.draw(st.integers(0, len(rest)))
        contents = machine.run(program, stop)
        rest = tuple(visit for visit in rest[stop:] if data.draw(st.integers(0, 3)))
        # A rest may do with fewer buffers, and giving some up must not break it. It may need more
        # where the stage between two others was skipped.
        needed = buffers_needed(rest, run.residency)
        buffers = data.draw(st.integers(needed, max(needed, buffers)))
        contents = {buffer: block for buffer, block in contents.items() if buffer < buffers}
    machine.run(compile_program(rest, run.residency, buffers, contents=contents))


@PROPERTY
@given(data=st.data())
def test_stopping_and_going_on_costs_no_fetch(runs: Any, data: Any) -> None:
    run = data.draw(runs)
    buffers = buffers_needed(run.visits, run.residency) + run.spare_buffers
    program = compile_program(run.visits, run.residency, buffers)
    stop = data.draw(st.integers(0, len(run.visits)))
    issued = [fetch for fetch in program.fetches if fetch.start_after < stop]
    contents = {fetch.buffer: fetch.block for fetch in issued}
    rest = compile_program(run.visits[stop:], run.residency, buffers, contents=contents)
    assert len(issued) + len(rest.fetches) <= len(program.fetches)


# --- cases ----------------------------------------------------------------------------------------


def test_a_program_that_fits_on_a_page() -> None:
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


@pytest.mark.parametrize("residents", [0, 8, 20, 32, 40])
def test_fetches_of_a_whole_run(residents: int) -> None:
    program = compile_program(wan_steps(12, 8), even(residents), residents + 2)
    assert len(program.fetches) == 20 * (40 - residents) + 2 * residents


def test_the_switch_rolls() -> None:
    """A resident's buffer is refilled right after the last use.

    The last high step is computing then.
    """
    program = compile_program(wan_steps(6, 6), even(20), 22)
    last_high_step = range(5 * 40, 6 * 40)
    refills = [
        f for f in program.fetches if f.block.expert == "low" and f.start_after in last_high_step
    ]
    assert len(refills) == 22
    assert all(program.visits[fetch.start_after].expert == "high" for fetch in refills)
    assert (
        sum(fetch.last > fetch.needed_by for fetch in refills) == 11
    )  # every second low block is a resident


def test_the_prefetch_wraps_from_one_step_to_the_next() -> None:
    program = compile_program(wan_steps(2, 0), even(0), 3)
    first_of_second_step = program.fetches[40]
    assert first_of_second_step.block == BlockKey("high", 0)
    assert first_of_second_step.start_after == 37  # with 3 buffers: two blocks before the step ends


@pytest.mark.parametrize(
    ("residents", "streaming", "pairs"),
    [(20, 2, 72), (20, 3, 130), (0, 2, 80), (0, 3, 240)],
)
def test_a_blocks_buffer_changes_from_step_to_step(
    residents: int, streaming: int, pairs: int
) -> None:
    program = compile_program(wan_steps(5, 4), even(residents), residents + streaming)
    steady = {
        (visit.key, buffer)
        for visit, buffer in zip(program.visits, program.visit_buffer, strict=True)
        if visit.step not in (0, 5) and visit.block not in spread_evenly(residents, 40)
    }
    assert len(steady) == pairs


def test_all_resident_without_a_streaming_buffer_still_hands_over() -> None:
    program = compile_program(wan_steps(3, 3), even(40), 40)
    assert len(program.fetches) == 80
    assert [f.start_after for f in program.fetches[40:]] == list(range(80, 120))


def test_one_buffer_is_legal_and_serial() -> None:
    program = compile_program(wan_steps(2, 2), even(0), 1)
    assert [fetch.start_after for fetch in program.fetches] == list(range(-1, 159))


@pytest.mark.parametrize("residents", [1, 20, 39])
def test_no_streaming_buffer_with_streamed_blocks_is_refused(residents: int) -> None:
    with pytest.raises(
        ProgramError, match=f"{residents} buffers are too few: .* need {residents + 1}"
    ):
        compile_program(wan_steps(2, 0), even(residents), residents)


def test_a_refusal_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="0 buffers are too few"):
        compile_program(wan_steps(1, 0), even(0), 0)


@pytest.mark.parametrize(("high", "low"), [(5, 0), (0, 5)])
def test_a_switch_outside_the_run_makes_one_stage(high: int, low: int) -> None:
    program = compile_program(wan_steps(high, low), even(20), 22)
    assert len(program.fetches) == 5 * 20 + 20


def test_residents_of_a_single_step_are_a_deep_ring() -> None:
    """No block is visited twice: every block is fetched once, and one buffer is enough."""
    assert buffers_needed(wan_steps(1, 0), even(20)) == 1
    program = compile_program(wan_steps(1, 0), even(20), 22)
    assert len(program.fetches) == 40
    assert [fetch.start_after for fetch in program.fetches] == [IMMEDIATE] * 22 + list(range(18))


def test_experts_of_different_depth_share_the_pool() -> None:
    visits = step_visits(["high"] * 3 + ["low"] * 3, {"high": 40, "low": 30})
    residency = Residency(residents={"high": spread_evenly(20, 40), "low": spread_evenly(5, 30)})
    program = compile_program(visits, residency, 22)
    check_program(program)
    assert len(program.fetches) == 3 * 20 + 20 + 3 * 25 + 5
    ahead = max(fetch.needed_by - fetch.start_after for fetch in program.fetches[-30:])
    assert ahead > 2  # buffers unused by the smaller expert deepen the prefetch


def test_permanent_residents_are_fetched_once_whatever_the_order_of_experts() -> None:
    counts = {"high": 40, "low": 30}
    residency, buffers = plan_residency(OffloadPolicy.resident(), counts)
    visits = step_visits(["high", "low", "high", "low"], counts)
    assert len(compile_program(visits, residency, buffers).fetches) == 70


def test_permanent_residents_serve_the_next_run_too() -> None:
    counts = {"high": 40, "low": 40}
    residency, buffers = plan_residency(OffloadPolicy.resident(), counts)
    low_only = compile_program(step_visits(["low"], counts), residency, buffers)
    high_only = compile_program(
        step_visits(["high"], counts), residency, buffers, contents=final_contents(low_only)
    )
    assert len(high_only.fetches) == 40
    both = compile_program(
        step_visits(["high", "low"], counts), residency, buffers, contents=final_contents(high_only)
    )
    assert both.fetches == ()
    assert set(both.visit_fetch) == {KEPT}


def test_a_permanent_resident_is_kept_also_where_its_patch_returns() -> None:
    """It occupies a buffer from the start in the first lifetime only: two buffers suffice."""
    residency, contents = (
        Residency(residents={"high": frozenset({3})}, permanent=True),
        {1: BlockKey("high", 3)},
    )
    visits = step_visits(["high"] * 3, {"high": 4}, patches_of_steps=[0, 1, 0])
    program = compile_program(visits, residency, 2, contents=contents)
    check_program(program)
    assert program.initial == contents
    assert len(program.fetches) == 3 * 4 - 1


def test_several_known_runs_are_one_list_of_visits() -> None:
    run = wan_steps(2, 2)
    program = compile_program(run + run, even(8), 10)
    assert len(program.fetches) == 2 * (4 * 32 + 2 * 8)
    first_of_second_run = next(fetch for fetch in program.fetches if fetch.needed_by == len(run))
    assert first_of_second_run.start_after < len(run) - 1


def test_a_next_run_starts_from_the_contents_of_the_last_one() -> None:
    residency = even(20)
    first = compile_program(wan_steps(0, 2), residency, 22)
    second = compile_program(wan_steps(0, 2), residency, 22, contents=final_contents(first))
    # Half the residents are gone: in the last step their buffers deepened the look-ahead.
    assert len(second.initial) == 11
    assert len(second.fetches) == 2 * 20 + 20 - 11


def test_contents_of_another_model_are_forgotten() -> None:
    contents = {buffer: BlockKey("encoder", buffer) for buffer in range(22)}
    program = compile_program(wan_steps(1, 1), even(20), 22, contents=contents)
    assert program == compile_program(wan_steps(1, 1), even(20), 22)


def test_contents_beyond_the_pool_are_forgotten() -> None:
    """After an out-of-memory retry there are fewer buffers than before."""
    contents = {1: BlockKey("high", 0), 5: BlockKey("high", 1)}
    program = compile_program(wan_steps(1, 0), even(0), 2, contents=contents)
    assert program.initial == {1: BlockKey("high", 0)}


def test_empty_buffers_are_filled_before_useful_ones() -> None:
    low = {buffer: BlockKey("low", buffer) for buffer in range(2)}
    program = compile_program(step_visits(["high"], {"high": 2}), even(0, 2), 4, contents=low)
    assert {fetch.buffer for fetch in program.fetches} == {2, 3}
    assert program.untouched == low


@pytest.mark.parametrize("contents", [{}, {0: BlockKey("high", 3)}])
def test_no_visits_make_no_fetches(contents: dict[int, BlockKey]) -> None:
    program = compile_program((), even(0), 2, contents=contents)
    assert program.fetches == ()
    assert final_contents(program) == contents


@pytest.mark.parametrize("residents", [8, 20, 32])
def test_a_step_skipped_after_its_first_block_wastes_no_copy(residents: int) -> None:
    """The probe is a resident: the blocks prefetched after it are the next computed step's."""
    visits = wan_steps(4, 0)
    residency = even(residents)
    program = compile_program(visits, residency, residents + 2)
    probed = 40 + 1
    issued = [fetch for fetch in program.fetches if fetch.start_after < probed]
    contents = {fetch.buffer: fetch.block for fetch in issued}
    rest = compile_program(visits[80:], residency, residents + 2, contents=contents)
    assert len(issued) + len(rest.fetches) == len(program.fetches) - (40 - residents)


def test_a_rest_without_returning_residents_may_use_fewer_buffers() -> None:
    """The only buffer is not set aside for a later resident.

    None would be left for the first block.
    """
    visits = step_visits(["high"], {"high": 10})
    residency = Residency(residents={"high": frozenset({5})})
    program = compile_program(visits, residency, 1, contents={0: BlockKey("high", 5)})
    check_program(program)
    assert program.initial == {}


def test_two_copies_of_one_block_serve_two_visits() -> None:
    one_block = step_visits(["high"] * 3, {"high": 1})
    program = compile_program(one_block, even(0, 1), 2)
    again = compile_program(one_block, even(0, 1), 2, contents=final_contents(program))
    assert len(again.initial) == 2
    assert len(again.fetches) == 1


def test_the_same_input_makes_the_same_program() -> None:
    """Every rank in a group compiles for itself and must find the same order."""
    contents = {3: BlockKey("low", 4), 0: BlockKey("high", 7), 9: BlockKey("high", 7)}
    programs: list[TransferProgram] = [
        compile_program(wan_steps(3, 3), even(8), 10, contents=dict(order))
        for order in (sorted(contents.items()), sorted(contents.items(), reverse=True))
    ]
    assert programs[0] == programs[1]
