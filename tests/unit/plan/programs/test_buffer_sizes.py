"""Buffers in several sizes: bytes, and programs with them at any speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanstream.plan.programs import BlockKey, check_program, plan_buffers, step_visits
from wanstream.plan.programs.transfer_program import ProgramError, TransferProgram, compile_program
from wanstream.schema import OffloadPolicy, Residency
from wanstream.tests.support.plan_fixtures import Replay, final_contents

PROPERTY = settings(deadline=None, max_examples=40)
FLUX = [680] * 19 + [283] * 38
HIDREAM = [848] * 16 + [611] * 32 + [21] * 49


@st.composite
def any_policy(draw: st.DrawFn, block_bytes: Mapping[str, list[int]]) -> OffloadPolicy:
    ahead = draw(st.integers(0, 3))
    swapped = draw(st.integers(0, min(map(len, block_bytes.values()))))
    swap = OffloadPolicy.block_swap(swapped, ahead)
    pinned = replace(swap, pin_first_block=True)
    layerwise = OffloadPolicy.layerwise(ahead)
    return draw(st.sampled_from([OffloadPolicy.resident(), layerwise, swap, swap, pinned]))


def any_blocks() -> st.SearchStrategy[dict[str, list[int]]]:
    sizes = st.lists(st.sampled_from([1000, 990, 700, 300, 20]), min_size=1, max_size=9)
    return st.fixed_dictionaries({"high": sizes}, optional={"low": sizes})


def check(program: TransferProgram) -> None:
    """Check a program and, apart from `check_program`, block sizes against buffer sizes."""
    check_program(program)
    for fetch in program.fetches:
        assert program.sizes.blocks[fetch.block.stored] <= program.sizes.capacities[fetch.buffer]


@PROPERTY
@given(data=st.data(), blocks=any_blocks(), seed=st.integers(0, 2**16))
def test_every_visit_finds_its_block_through_stops_and_skips(data, blocks, seed):
    """At any speed, from any fitting contents."""
    counts = {expert: len(sizes) for expert, sizes in blocks.items()}
    experts = data.draw(st.lists(st.sampled_from(sorted(counts)), max_size=5))
    patches = [data.draw(st.integers(0, 1)) for _ in experts]
    rest = step_visits(experts, counts, patches_of_steps=patches)
    residency, sizes = plan_buffers(data.draw(any_policy(blocks)), blocks)
    count = len(sizes.capacities)
    programs = (compile_program(rest, residency, count, sizes=each) for each in (sizes, None))
    found, equal = ([fetch.block for fetch in program.fetches] for program in programs)
    assert found == equal, "as many fetches as with equal buffers"
    contents: dict[int, BlockKey] = {}
    for buffer, capacity in enumerate(sizes.capacities):
        fitting = sorted(key for key, needed in sizes.blocks.items() if needed <= capacity)
        if data.draw(st.booleans()):
            contents[buffer] = data.draw(st.sampled_from(fitting))
    replay = Replay({}, contents)
    for turn in range(3):
        program = compile_program(rest, residency, count, sizes=sizes, contents=contents)
        check(program)
        stop = data.draw(st.integers(0, len(rest)))
        contents = replay.run_device(program, seed + turn, stop)
        rest = tuple(visit for visit in rest[stop:] if data.draw(st.integers(0, 3)))
    program = compile_program(rest, residency, count, sizes=sizes, contents=contents)
    check(program)
    assert replay.run_device(program, seed) == {**contents, **final_contents(program)}


@pytest.mark.parametrize("sizes", [FLUX, HIDREAM], ids=["Flux", "HiDream"])
def test_bytes_of_residents_and_buffers(sizes):
    for swapped, ahead in product(range(len(sizes) + 1), (0, 1, 3)):
        policy = OffloadPolicy.block_swap(swapped, ahead)
        residency, planned = plan_buffers(policy, {"model": sizes})
        residents = residency.residents["model"]
        streamed = [nbytes for block, nbytes in enumerate(sizes) if block not in residents]
        streaming = min(ahead + 1, swapped) * max(streamed, default=0)
        assert planned.nbytes == sum(sizes[block] for block in residents) + streaming
    _, resident = plan_buffers(OffloadPolicy.resident(), {"model": sizes})
    assert resident.nbytes == sum(sizes)


def test_similar_sizes_share_buffers():
    """Block 0 is streamed and small: it takes the small buffer, free just as long."""
    _, planned = plan_buffers(OffloadPolicy.resident(), {"model": [1000, 980, 960, 500]})
    assert planned.capacities == (1000, 1000, 960, 500)
    residency = Residency(residents={"model": frozenset({1, 3})})
    _, sizes = plan_buffers(OffloadPolicy.block_swap(2, 0), {"model": [20, 100, 20, 20]})
    program = compile_program(step_visits(["model"], {"model": 4}), residency, 3, sizes=sizes)
    assert sizes.capacities == (100, 20, 20)
    assert [fetch.buffer for fetch in program.fetches] == [1, 0, 2, 1]


def test_too_few_buffers_of_a_size_are_refused():
    residency, sizes = plan_buffers(OffloadPolicy.block_swap(1, 0), {"model": [20, 100, 50]})
    visits = step_visits(["model"] * 2, {"model": 3})
    small = replace(sizes, capacities=(100, 20, 20))
    with pytest.raises(ProgramError, match=r"1 buffers of a size are too few: .* need 2"):
        compile_program(visits, residency, 3, sizes=small)
    program = compile_program(visits, residency, 3, sizes=sizes)
    with pytest.raises(ProgramError, match="needs 100 bytes, buffer 0 has 50"):
        check_program(replace(program, sizes=replace(sizes, capacities=(50, 50, 20))))
