"""The static check accepts compiled programs and refuses reads from a wrong block.

The accepted programs are in `test_transfer_program`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanstream.plan.programs import (
    KEPT,
    BlockKey,
    TransferProgram,
    check_program,
    compile_program,
    step_visits,
)
from wanstream.plan.programs.transfer_program import ProgramError
from wanstream.schema import Residency
from wanstream.tests.support.plan_fixtures import buffers_needed


def program() -> TransferProgram:
    """Three steps with three blocks in three buffers. Block 0 is resident and already there."""
    return compile_program(
        step_visits(["high"] * 3, {"high": 3}),
        Residency(residents={"high": frozenset({0})}),
        3,
        contents={2: BlockKey("high", 0)},
    )


def with_fetch(number: int, **values: Any) -> TransferProgram:
    fetches = list(program().fetches)
    fetches[number] = fetches[number]._replace(**values)
    return replace(program(), fetches=tuple(fetches))


def with_order(*order: int) -> TransferProgram:
    """Return the fetches in another order on the bus, with every reference to them updated."""
    return replace(
        program(),
        fetches=tuple(program().fetches[number] for number in order),
        visit_fetch=tuple(
            fetch if fetch == KEPT else order.index(fetch) for fetch in program().visit_fetch
        ),
    )


def test_the_unbroken_program_passes() -> None:
    check_program(program())
    assert program().visit_fetch == (KEPT, 0, 1, KEPT, 2, 3, KEPT, 4, 5)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        pytest.param(
            replace(program(), buffers=2), "buffer 2 is used, there are 2", id="buffer out of range"
        ),
        pytest.param(
            replace(program(), visit_buffer=(2, 0)),
            "9 visits, but 2 buffers",
            id="visits without a buffer",
        ),
        pytest.param(
            with_fetch(2, buffer=7), "buffer 7 is used, there are 3", id="fetch into no buffer"
        ),
        pytest.param(
            replace(program(), visit_fetch=(KEPT, 0, 1, KEPT, 2, 3, KEPT, 4, 9)),
            "there are 6",
            id="no such fetch",
        ),
        pytest.param(
            replace(program(), initial={}), "visit 0 needs .* gets None", id="nothing kept"
        ),
        pytest.param(
            replace(program(), initial={2: BlockKey("low", 0)}),
            "visit 0 needs .*low",
            id="another expert's block kept",
        ),
        pytest.param(
            with_fetch(0, block=BlockKey("high", 2)), "visit 1 needs", id="another block fetched"
        ),
        pytest.param(
            with_fetch(0, buffer=1),
            "visit 1 needs .* in buffer 0.* in buffer 1",
            id="fetched elsewhere",
        ),
        pytest.param(
            with_fetch(1, last=5),
            "fetch 1 claims visits 2 to 5, it serves",
            id="held longer than used",
        ),
        pytest.param(
            with_fetch(3, needed_by=4), "fetch 3 claims visits 4 to 5", id="needed before its visit"
        ),
        pytest.param(
            replace(program(), fetches=(*program().fetches, program().fetches[-1])),
            "fetch 6 claims .* it serves None",
            id="fetch without a visit",
        ),
        pytest.param(
            with_fetch(2, start_after=4),
            "reaches it only after visit 4",
            id="waits for its own visit",
        ),
        pytest.param(
            with_order(0, 1, 4, 2, 3, 5),
            "fetch 3 is needed by visit 4",
            id="blocked by the fetch before",
        ),
        pytest.param(
            with_fetch(2, start_after=-2), "fetch 2 is needed", id="starts before the beginning"
        ),
        pytest.param(
            with_fetch(2, start_after=0),
            "its buffer 0 is read until visit 1",
            id="overwrites a block in use",
        ),
        pytest.param(
            with_fetch(4, start_after=3),
            "its buffer 0 is read until visit 4",
            id="overwrites too early",
        ),
    ],
)
def test_a_wrong_program_is_refused(broken: TransferProgram, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        check_program(broken)


def test_fetches_that_start_at_once_may_change_places() -> None:
    check_program(with_order(1, 0, 2, 3, 4, 5))


def test_overwriting_kept_contents_too_early_is_refused() -> None:
    high = [BlockKey("high", block) for block in range(2)]
    kept = compile_program(
        step_visits(["high"], {"high": 2}),
        Residency(residents={}),
        1,
        contents=dict(enumerate(high[:1])),
    )
    check_program(kept)
    fetch = kept.fetches[0]._replace(start_after=-1)
    with pytest.raises(ProgramError, match="its buffer 0 is read until visit 0"):
        check_program(replace(kept, fetches=(fetch,)))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_no_fetch_of_ours_could_start_earlier(runs: Any, data: Any) -> None:
    run = data.draw(runs)
    buffers = buffers_needed(run.visits, run.residency) + run.spare_buffers
    ours = compile_program(run.visits, run.residency, buffers, contents=run.contents)
    waiting = [number for number, fetch in enumerate(ours.fetches) if fetch.start_after >= 0]
    if waiting:
        number = data.draw(st.sampled_from(waiting))
        fetches = list(ours.fetches)
        fetches[number] = fetches[number]._replace(start_after=fetches[number].start_after - 1)
        with pytest.raises(ProgramError, match="is read until visit"):
            check_program(replace(ours, fetches=tuple(fetches)))
