"""The simulator: every program's properties, and figures from the design's tables.

Figures are in visits: a visit takes 1 s, a copy r s and a read d s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from wanstream.plan.programs import DIRECT, RamProgram, RamResidency, compile_ram, plan_ram
from wanstream.plan.programs.simulator import Hardware, simulate
from wanstream.plan.programs.transfer_program import TransferProgram, compile_program
from wanstream.plan.programs.visits import BlockKey, step_visits
from wanstream.schema import OffloadPolicy, Residency, spread_evenly
from wanstream.schema.records import StepRecord, Timeline
from wanstream.tests.support.plan_fixtures import (
    any_ram_residency,
    any_run,
    buffers_needed,
    final_contents,
    kept_in_ram,
    ram_residents,
)

PROPERTY = settings(deadline=None, max_examples=25)
BLOCKS = 40
BLOCK_BYTES = 1000
EXPERTS = ("high", "low")
WAN = dict.fromkeys(EXPERTS, BLOCKS)

Pair = tuple[TransferProgram, RamProgram]
RamResidencyOf = Callable[[Residency], RamResidency]


def hardware(r: float, d: float = 1.0, **values: Any) -> Hardware:
    usual: dict[str, Any] = {
        "bus_bytes_per_s": BLOCK_BYTES / r,
        "block_bytes": BLOCK_BYTES,
        "visit_s": dict.fromkeys(EXPERTS, 1.0),
        "disk_bytes_per_s": BLOCK_BYTES / d,
        "file_bytes": BLOCK_BYTES,
    }
    return Hardware(**{**usual, **values})


def pinned(blocks: int, *, experts: Sequence[str] = EXPERTS) -> RamResidencyOf:
    """Return a function that makes `blocks` blocks in these experts RAM-resident.

    A user's policy does the same.
    """
    policy = replace(OffloadPolicy.layerwise(source="pinned"), ram_blocks=blocks)
    return lambda device: plan_ram(policy, device, dict.fromkeys(experts, BLOCKS))


def run(machine, ram_residency=None, *, residents=0, streaming=2, staging=2, high=12, low=0):
    """Simulate steps. Without `ram_residency` all blocks are in RAM."""
    device = Residency(residents=dict.fromkeys(EXPERTS, spread_evenly(residents, BLOCKS)))
    visits = step_visits(["high"] * high + ["low"] * low, WAN)
    program = compile_program(visits, device, residents + streaming)
    if ram_residency is None:
        return simulate(program, machine, kept_in_ram(program))
    return simulate(program, machine, compile_ram(program, ram_residency(device), staging=staging))


def steady_step(timeline: Timeline) -> float:
    """Return the middle steps' median time.

    A first step is cold, and the last one need not keep residents.
    """
    return median(step.wall_s for step in timeline.steps[3:-1])


def bound(residents: int, r: float) -> float:
    """No steady step is shorter: everything computes, and streamed blocks cross the bus."""
    return max(BLOCKS, (BLOCKS - residents) * r)


# --- every program --------------------------------------------------------------------------------

seconds = st.sampled_from([0.0, 0.1, 0.9, 1.0, 1.1, 4.0])
rates = st.sampled_from([1.0, 3.0, 7.0, 1e3])
machines = st.builds(
    Hardware,
    bus_bytes_per_s=rates,
    block_bytes=st.integers(0, 10),
    visit_s=st.fixed_dictionaries(dict.fromkeys(EXPERTS, seconds)),
    step_overhead_s=seconds,
    disk_bytes_per_s=rates,
    file_bytes=st.integers(0, 10),
    decode_s=seconds,
    decode_computes=st.booleans(),
)


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    case = draw(any_run())
    buffers = buffers_needed(case.visits, case.residency) + case.spare_buffers
    program = compile_program(case.visits, case.residency, buffers, contents=case.contents)
    block = st.builds(BlockKey, st.sampled_from(EXPERTS), st.integers(0, 10))
    slots = draw(st.dictionaries(st.integers(0, 12), block, max_size=8))
    given = {"staging": draw(st.integers(0, 3)), "contents": slots}
    return program, compile_ram(program, draw(any_ram_residency()), **given)


def bytes_of_steps(program, ram, machine) -> dict[tuple[int, str], tuple[int, int, int]]:
    """Return the bytes to buffers, on the bus and from files, per step and expert."""
    found: dict[tuple[int, str], tuple[int, int, int]] = {}
    for fetch, visit in zip(program.fetches, ram.visit_of_fetch, strict=True):
        read = None if visit == DIRECT else ram.program.visit_fetch[visit]
        is_read = read is None or (read >= 0 and ram.program.fetches[read].needed_by == visit)
        is_copied = visit != DIRECT and not machine.decode_computes
        step = program.visits[fetch.needed_by].step, fetch.block.expert
        moved, copied, from_file = found.get(step, (0, 0, 0))
        copied += is_copied * machine.block_bytes
        from_file += is_read * machine.file_bytes
        found[step] = (moved + machine.block_bytes, copied, from_file)
    return found


@PROPERTY
@given(pair=pairs(), machine=machines)
def test_no_prefix_beats_compute_bus_disk_or_decoding(pair, machine):
    """A step's true bound is over all steps so far: bytes may come in the step before."""
    program, ram = pair
    expected = bytes_of_steps(program, ram, machine)
    elapsed = computed = decoded = copied = read = 0.0
    timeline = simulate(program, machine, ram)
    for step in timeline.steps:
        transfers = step.transfers
        assert step.start_s == pytest.approx(elapsed)
        elapsed += step.wall_s
        computed += step.compute_s
        decoded += step.decode_s
        copied += transfers.copied_bytes
        read += transfers.read_bytes
        on_the_device = computed + decoded if machine.decode_computes else max(computed, decoded)
        on_the_way = max(copied / machine.bus_bytes_per_s, read / machine.disk_bytes_per_s)
        assert elapsed >= max(on_the_device, on_the_way) * (1 - 1e-9)
        assert min(step.stall_s, step.decode_s) >= 0
        assert -1e-12 <= transfers.stall_on_read_s <= step.stall_s * (1 + 1e-9)
        found = (step.bytes_moved, transfers.copied_bytes, transfers.read_bytes)
        assert found == expected.get((step.index, step.expert), (0, 0, 0))
        assert transfers.copy_s == pytest.approx(transfers.copied_bytes / machine.bus_bytes_per_s)
        assert transfers.read_s == pytest.approx(transfers.read_bytes / machine.disk_bytes_per_s)
        inside = step.compute_s + step.stall_s + (step.decode_s if machine.decode_computes else 0.0)
        assert step.wall_s == pytest.approx(inside)
    assert timeline.bytes_moved == machine.block_bytes * len(program.fetches)
    reached = 0.0
    for phase in timeline.phases:
        assert phase.start_s == pytest.approx(reached)
        assert phase.wall_s >= 0
        reached = phase.start_s + phase.wall_s
    assert reached == pytest.approx(elapsed)


@PROPERTY
@given(pair=pairs(), machine=machines, faster=st.sampled_from([1.1, 2.0, 1e6]))
def test_a_faster_disk_is_never_slower(pair, machine, faster):
    """A disk that takes no time is as fast as blocks in RAM."""
    program, ram = pair
    assume(DIRECT not in ram.visit_of_fetch)
    fast = replace(machine, disk_bytes_per_s=machine.disk_bytes_per_s * faster)
    usual_s = simulate(program, machine, ram).wall_s
    assert simulate(program, fast, ram).wall_s <= usual_s * (1 + 1e-9)
    at_once = replace(machine, file_bytes=0, decode_computes=False)
    without = simulate(program, at_once, kept_in_ram(program))
    found = [step.wall_s for step in simulate(program, at_once, ram).steps]
    assert found == pytest.approx([step.wall_s for step in without.steps])


loads = st.sampled_from([0.3, 0.5, 0.9, 1.0, 1.1, 1.6, 3.0])


@PROPERTY
@given(
    residents=st.integers(0, BLOCKS - 1),
    bus=loads,
    disk=loads,
    staging=st.integers(2, 3),
    data=st.data(),
)
def test_a_steady_step_is_within_two_percent_of_its_bound(residents, bus, disk, staging, data):
    """Bus and disk may each be slack, critical or the limit.

    Together critical, two staging slots are too few. Two streaming buffers are too few where
    streamed blocks come in runs with single gaps.

    `bus` and `disk` are how long either works for a step, in steps' worth of computing.
    """
    streamed = BLOCKS - residents
    from_file = data.draw(st.integers(1, streamed))
    has_single_gaps = 1 <= residents <= 12 or residents == 15
    streaming = data.draw(st.integers(3 if has_single_gaps else 2, 3))
    if staging == 2:
        assume(max(bus, disk) < 0.9 or max(bus, disk) / min(bus, disk) > 1.3)
    machine = hardware(bus * BLOCKS / streamed, disk * BLOCKS / from_file)
    ram = pinned(streamed - from_file, experts=("high",))
    timeline = run(machine, ram, residents=residents, streaming=streaming, staging=staging)
    bound = BLOCKS * max(1.0, bus, disk)
    assert bound * (1 - 1e-9) <= steady_step(timeline) <= 1.02 * bound


# --- figures: blocks in RAM -----------------------------------------------------------------------

RATIOS = (0.05, 0.2, 0.5, 0.9, 1.0, 1.1, 1.5, 2.0, 4.0)


@pytest.mark.parametrize(
    ("residents", "streaming", "expected"),
    [
        (0, 1, (1.050, 1.200, 1.500, 1.900, 2.000, 1.909, 1.667, 1.500, 1.250)),
        (0, 2, (1.0,) * 9),
        (8, 1, (1.030, 1.120, 1.300, 1.540, 1.600, 1.680, 1.667, 1.500, 1.250)),
        (8, 2, (1.0, 1.0, 1.0, 1.0, 1.0, 1.040, 1.0, 1.0, 1.0)),
        (20, 1, (1.0, 1.0, 1.0, 1.0, 1.0, 1.050, 1.250, 1.500, 1.250)),
    ],
)
def test_steady_step_over_its_bound(residents, streaming, expected):
    how = {"residents": residents, "streaming": streaming}
    found = [steady_step(run(hardware(r), **how)) / bound(residents, r) for r in RATIOS]
    assert found == pytest.approx(expected, abs=6e-4)


EXPECTED = [(8, {0.9: 0, 1.1: -3.0, 1.5: 12, 4.0: 32})]
EXPECTED += [(20, {1.1: 0, 1.5: 9.5, 2.0: 40, 4.0: 80}), (32, {1.5: 0, 2.0: 15, 4.0: 109})]


@pytest.mark.parametrize(("residents", "expected"), EXPECTED)
def test_cost_of_the_switch(residents, expected):
    """Twelve steps with a switch in the middle against twelve steps with one expert.

    The first low step pays it all.
    """
    for r, cost_s in expected.items():
        alone = run(hardware(r), residents=residents)
        switched = run(hardware(r), residents=residents, high=6, low=6)
        assert switched.wall_s - alone.wall_s == pytest.approx(cost_s, abs=0.05)
        assert switched.steps[5].wall_s <= steady_step(alone) * (1 + 1e-9)


def test_work_outside_the_blocks_is_compute_and_hides_copies():
    plain, more = (run(hardware(1.1, step_overhead_s=each), high=6) for each in (0.0, 2.0))
    assert more.steps[3].compute_s == plain.steps[3].compute_s + 2
    assert more.first_block_s == plain.first_block_s
    assert more.stall_s < plain.stall_s


def test_kept_contents_start_at_once_and_no_visits_make_no_steps():
    visits = step_visits(["high"], {"high": 4})
    residency = Residency(residents={"high": frozenset(range(4))}, permanent=True)
    first = compile_program(visits, residency, 4)
    again = compile_program(visits, residency, 4, contents=final_contents(first))
    timeline = from_ram(again, hardware(3.0))
    assert (timeline.first_block_s, timeline.stall_s, timeline.bytes_moved) == (0.0, 0.0, 0)
    nothing = compile_program((), Residency(residents={}), 2)
    assert from_ram(nothing, hardware(1.0)) == Timeline(steps=(), kind="simulated")


# --- figures: blocks in files ---------------------------------------------------------------------


def test_a_stall_is_the_files_until_the_block_has_left_it():
    """Behind a slow disk a block arrives every 2 s.

    The last 0.3 s are the bus's, and the visit before hides 1 s.
    """
    slow_disk = run(hardware(0.3, 2.0), pinned(0)).steps[5].transfers
    assert (slow_disk.stall_s, slow_disk.stall_on_read_s) == pytest.approx((40.0, 28.0))
    assert (slow_disk.read_s, slow_disk.copy_s, slow_disk.overlap) == pytest.approx((80, 12, 0.5))
    slow_bus = run(hardware(2.0, 0.3), pinned(0)).steps[5].transfers
    assert (slow_bus.stall_s, slow_bus.stall_on_read_s) == pytest.approx((40.0, 0.0))


# --- decoding, and reads without a bus ------------------------------------------------------------


def one_expert(steps: int = 4, blocks: int = 4, buffers: int = 2) -> TransferProgram:
    visits = step_visits(["high"] * steps, {"high": blocks})
    return compile_program(visits, Residency(residents={}), buffers)


def from_file(program, machine, staging=0, **in_ram) -> Timeline:
    ram = compile_ram(program, ram_residents(**in_ram), staging=staging)
    return simulate(program, machine, ram)


def from_ram(program: TransferProgram, machine: Hardware) -> Timeline:
    return simulate(program, machine, kept_in_ram(program))


def step_times(step: StepRecord) -> tuple[float, ...]:
    times = (step.wall_s, step.compute_s, step.stall_s, step.decode_s)
    return tuple(round(value, 9) for value in times)


@pytest.mark.parametrize(
    ("buffers", "copy", "decode", "first_block", "first", "later"),
    [
        # Decoding is a queue of its own: hidden behind the visits, or the limit.
        (3, 0.5, 0.9, 1.4, (5.4, 4, 1.4, 3.6), (4, 4, 0, 3.6)),
        (3, 0.5, 1.5, 2.0, (7.5, 4, 3.5, 6), (6, 4, 2, 6)),
        # Two raw slots: the bus runs on while a block is decoded.
        (4, 1.0, 1.0, 2.0, (6, 4, 2, 4), (4, 4, 0, 4)),
        # The copy is there before the buffer is free.
        (2, 0.9, 0.5, 1.4, (5.4, 4, 1.4, 2), (4, 4, 0, 2)),
        # One buffer: the copy hides behind the visit before, decoding cannot.
        (1, 0.5, 0.25, 0.75, (5.5, 4, 1.5, 1), (5, 4, 1, 1)),
    ],
)
def test_decoding_on_a_gpu(buffers, copy, decode, first_block, first, later):
    timeline = from_ram(one_expert(buffers=buffers), hardware(copy, decode_s=decode))
    assert timeline.first_block_s == pytest.approx(first_block)
    assert [step_times(step) for step in timeline.steps] == [first, *[later] * 3]


def test_copies_wait_for_a_raw_slot():
    """One buffer, 3 s copies: the only high visit sees two low blocks copied, not four.

    The visit takes 10 s, and the copies are from 4 s on.

    Decoding the first one waits for the buffer until 14 s. The raw slot is free at 15 s for the
    third copy, until 18 s. The fourth ends at 21 s and is decoded at 22 s.
    """
    visits = step_visits(EXPERTS, {"high": 1, "low": 4})
    program = compile_program(visits, Residency(residents={}), 1)
    machine = hardware(3.0, visit_s={"high": 10.0, "low": 0.0}, decode_s=1.0)
    assert from_ram(program, machine).wall_s == pytest.approx(22.0)


@pytest.mark.parametrize(
    ("staging", "read", "first", "later"),
    [
        (2, 0.5, (5.5, 4, 0.5, 1), (5, 4, 0, 1)),
        # A block that was read straight is patched too.
        (0, 0.5, (5.5, 4, 0.5, 1), (5, 4, 0, 1)),
        # One slot: the next read starts after decoding and has the visit to hide behind.
        (1, 1.5, (8, 4, 3, 1), (7, 4, 2, 1)),
    ],
)
def test_on_a_cpu_the_computing_thread_decodes_without_a_bus(staging, read, first, later):
    cpu = hardware(50.0, read, decode_s=0.25, decode_computes=True)
    timeline = from_file(one_expert(), cpu, staging)
    assert timeline.first_block_s == pytest.approx(read + 0.25)
    assert [step_times(step) for step in timeline.steps] == [first, *[later] * 3]
    assert (timeline.transfers.copied_bytes, timeline.transfers.copy_bytes_per_s) == (0, None)
    assert timeline.bytes_moved == timeline.transfers.read_bytes == 16 * BLOCK_BYTES


def test_on_a_cpu_a_block_that_stays_is_decoded_once():
    visits = step_visits(["high"] * 3, {"high": 4})
    program = compile_program(visits, Residency(residents={"high": frozenset(range(4))}), 4)
    machine = hardware(1.0, 0.5, decode_s=0.25, decode_computes=True)
    assert [step.decode_s for step in from_file(program, machine, 2).steps] == [1.0, 0.0, 0.0]


def test_a_block_without_a_slot_is_read_straight_into_its_buffer():
    """Disk and bus are one route then: the bus rate is unused, reads wait for a free buffer."""
    timeline = from_file(one_expert(), hardware(50.0, 0.75))
    assert timeline.first_block_s == timeline.stall_s == pytest.approx(0.75)
    assert timeline.transfers.stall_on_read_s == pytest.approx(0.75)
    assert timeline.transfers.copy_s == 0
    assert timeline.transfers.read_bytes == 16 * BLOCK_BYTES
    assert from_file(one_expert(buffers=1), hardware(50.0, 0.75)).wall_s == pytest.approx(16 * 1.75)


def test_disk_fills_slots_while_direct_reads_wait():
    """The read into RAM starts when the disk waits for a buffer, and delays no other read."""
    timeline = from_file(one_expert(steps=2), hardware(0.1, 0.5), high={3})
    assert timeline.stall_s == pytest.approx(0.5)
    assert [step.transfers.read_bytes // BLOCK_BYTES for step in timeline.steps] == [4, 3]
    at_once = {"visit_s": {"high": 0.0, "low": 0.0}}
    program = one_expert(steps=1, buffers=4)
    wall_s = from_file(program, hardware(0.01, 0.5, **at_once), high={1, 3}).wall_s
    assert 4 * 0.5 <= wall_s <= 4 * 0.5 + 2 * 0.01


def test_ram_blocks_of_the_next_expert_are_read_early():
    """High blocks are read directly and use half the disk's time.

    Low ones are RAM-resident and cannot hide.
    """
    visits = step_visits(["high", "high", "low"], dict.fromkeys(EXPERTS, 4))
    program = compile_program(visits, Residency(residents={}), 2)
    machine = hardware(0.01, 0.5, visit_s={"high": 1.0, "low": 0.01})
    assert from_file(program, machine, low={0, 1, 2, 3}).steps[2].stall_s == pytest.approx(0.0)
