"""The static check accepts compiled programs and refuses reads from a wrong block.

The accepted programs are in `test_transfer_program`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanstream.plan.programs import KEPT, BlockKey, TransferProgram, compile_program, step_visits
from wanstream.plan.programs.transfer_program import ProgramError
from wanstream.plan.programs.verify import check_program
from wanstream.schema import Residency
from wanstream.tests.support.plan_fixtures import any_run, buffers_needed

# Three steps with three blocks in three buffers. Block 0 is resident and already there.
VISITS = step_visits(["high"] * 3, {"high": 3})
FIRST = Residency(residents={"high": frozenset({0})})
PROGRAM = compile_program(VISITS, FIRST, 3, contents={2: BlockKey("high", 0)})


def with_fetches(*fetches) -> TransferProgram:
    return replace(PROGRAM, fetches=fetches)


def with_fetch(number: int, **values: Any) -> TransferProgram:
    fetches = list(PROGRAM.fetches)
    fetches[number] = fetches[number]._replace(**values)
    return with_fetches(*fetches)


def with_order(*order: int) -> TransferProgram:
    """Return the fetches in another order on the bus, with every reference to them updated."""
    visit_fetch = tuple(each if each == KEPT else order.index(each) for each in PROGRAM.visit_fetch)
    fetches = tuple(PROGRAM.fetches[number] for number in order)
    return replace(PROGRAM, fetches=fetches, visit_fetch=visit_fetch)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (replace(PROGRAM, buffers=2), "buffer 2 is used, there are 2"),
        (replace(PROGRAM, visit_buffer=(2, 0)), "9 visits, but 2 buffers"),
        (with_fetch(2, buffer=7), "buffer 7 is used, there are 3"),
        (replace(PROGRAM, visit_fetch=(KEPT, 0, 1, KEPT, 2, 3, KEPT, 4, 9)), "there are 6"),
        (replace(PROGRAM, initial={}), "visit 0 needs .* gets None"),
        (replace(PROGRAM, initial={2: BlockKey("low", 0)}), "visit 0 needs .*low"),
        (with_fetch(0, block=BlockKey("high", 2)), "visit 1 needs"),
        (with_fetch(0, buffer=1), "visit 1 needs .* in buffer 0.* in buffer 1"),
        # Held longer than used, needed before its visit, without a visit.
        (with_fetch(1, last=5), "fetch 1 claims visits 2 to 5, it serves"),
        (with_fetch(3, needed_by=4), "fetch 3 claims visits 4 to 5"),
        (with_fetches(*PROGRAM.fetches, PROGRAM.fetches[-1]), "fetch 6 claims .* it serves None"),
        # Waits for its own visit, or for the fetch before.
        (with_fetch(2, start_after=4), "reaches it only after visit 4"),
        (with_order(0, 1, 4, 2, 3, 5), "fetch 3 is needed by visit 4"),
        (with_fetch(2, start_after=-2), "fetch 2 is needed"),
        # Overwrites a block in use.
        (with_fetch(2, start_after=0), "its buffer 0 is read until visit 1"),
        (with_fetch(4, start_after=3), "its buffer 0 is read until visit 4"),
    ],
)
def test_a_wrong_program_is_refused(broken, message):
    """The unbroken one passes, also with fetches in another order that start at once."""
    check_program(PROGRAM)
    check_program(with_order(1, 0, 2, 3, 4, 5))
    with pytest.raises(ProgramError, match=message):
        check_program(broken)


def test_overwriting_kept_contents_too_early_is_refused():
    visits = step_visits(["high"], {"high": 2})
    kept = compile_program(visits, Residency(residents={}), 1, contents={0: BlockKey("high", 0)})
    check_program(kept)
    early = replace(kept, fetches=(kept.fetches[0]._replace(start_after=-1),))
    with pytest.raises(ProgramError, match="its buffer 0 is read until visit 0"):
        check_program(early)


@settings(deadline=None, max_examples=25)
@given(run=any_run(), data=st.data())
def test_no_fetch_of_ours_could_start_earlier(run, data):
    buffers = buffers_needed(run.visits, run.residency) + run.spare_buffers
    ours = compile_program(run.visits, run.residency, buffers, contents=run.contents)
    waiting = [number for number, fetch in enumerate(ours.fetches) if fetch.start_after >= 0]
    if waiting:
        number = data.draw(st.sampled_from(waiting))
        fetches = list(ours.fetches)
        fetches[number] = fetches[number]._replace(start_after=fetches[number].start_after - 1)
        with pytest.raises(ProgramError, match="is read until visit"):
            check_program(replace(ours, fetches=tuple(fetches)))
