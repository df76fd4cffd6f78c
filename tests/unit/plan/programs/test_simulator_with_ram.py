"""The simulator with disk and RAM before the bus.

Every program's properties, and figures from the design's tables.

Figures are in visits: a visit takes 1 s, a copy r s and a read d s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from statistics import median
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from wanstream.plan.programs import (
    DIRECT,
    BlockKey,
    RamProgram,
    RamResidency,
    TransferProgram,
    check_program,
    check_ram,
    compile_program,
    compile_ram,
    plan_ram,
    step_visits,
)
from wanstream.plan.programs.simulator import Hardware, simulate
from wanstream.schema import OffloadPolicy, Residency, spread_evenly
from wanstream.schema.records import StepRecord, Timeline
from wanstream.shapes import T2V_A14B
from wanstream.tests.support.plan_fixtures import buffers_needed, final_contents, kept_in_ram

PROPERTY = settings(deadline=None, max_examples=50)
BLOCKS = 40
BLOCK_BYTES = 1000
EXPERTS = ("high", "low")
WAN = dict.fromkeys(EXPERTS, BLOCKS)

RamResidencyOf = Callable[[Residency], RamResidency]


def hardware(r: float, d: float, **values: Any) -> Hardware:
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


def device_program(
    residents: int, streaming: int, high: int, low: int
) -> tuple[TransferProgram, Residency]:
    device = Residency(residents=dict.fromkeys(EXPERTS, spread_evenly(residents, BLOCKS)))
    visits = step_visits(["high"] * high + ["low"] * low, WAN)
    return compile_program(visits, device, residents + streaming), device


def run(
    machine: Hardware,
    ram_residency: RamResidencyOf,
    *,
    residents: int = 0,
    streaming: int = 2,
    staging: int = 2,
    high: int = 12,
    low: int = 0,
) -> Timeline:
    program, device = device_program(residents, streaming, high, low)
    return simulate(program, machine, compile_ram(program, ram_residency(device), staging=staging))


def steady_step(timeline: Timeline) -> float:
    return median(step.wall_s for step in timeline.steps[3:-1])


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
def any_ram_residency(draw: st.DrawFn) -> RamResidency:
    residents = {expert: draw(st.frozensets(st.integers(0, 9))) for expert in EXPERTS}
    return RamResidency(
        residency=Residency(residents=residents, permanent=True),
        slots=sum(map(len, residents.values())),
    )


@st.composite
def pairs(draw: st.DrawFn, runs: Any) -> tuple[TransferProgram, RamProgram]:
    case = draw(runs)
    buffers = buffers_needed(case.visits, case.residency) + case.spare_buffers
    program = compile_program(case.visits, case.residency, buffers, contents=case.contents)
    block = st.builds(BlockKey, st.sampled_from(EXPERTS), st.integers(0, 10))
    ram = compile_ram(
        program,
        draw(any_ram_residency()),
        staging=draw(st.integers(0, 3)),
        contents=draw(st.dictionaries(st.integers(0, 12), block, max_size=8)),
    )
    return program, ram


@PROPERTY
@given(data=st.data(), machine=machines)
def test_no_prefix_beats_compute_bus_disk_or_decoding(
    runs: Any, data: Any, machine: Hardware
) -> None:
    """A step's true bound is over all steps so far: bytes may come in the step before."""
    program, ram = data.draw(pairs(runs))
    copies = _bytes_over_the_bus(program, ram, machine)
    elapsed = computed = decoded = moved = read = 0.0
    for step in simulate(program, machine, ram).steps:
        elapsed, computed, decoded = (
            elapsed + step.wall_s,
            computed + step.compute_s,
            decoded + step.decode_s,
        )
        moved, read = (
            moved + copies.get((step.index, step.expert), 0),
            read + step.transfers.read_bytes,
        )
        on_the_device = computed + decoded if machine.decode_computes else max(computed, decoded)
        bound = max(on_the_device, moved / machine.bus_bytes_per_s, read / machine.disk_bytes_per_s)
        assert elapsed >= bound * (1 - 1e-9)
        assert min(step.stall_s, step.decode_s, step.transfers.read_bytes) >= 0
        assert -1e-12 <= step.transfers.stall_on_read_s <= step.stall_s * (1 + 1e-9)
        assert step.transfers.copied_bytes == copies.get((step.index, step.expert), 0)
        assert step.transfers.copy_s == pytest.approx(
            step.transfers.copied_bytes / machine.bus_bytes_per_s
        )
        assert step.transfers.read_s == pytest.approx(
            step.transfers.read_bytes / machine.disk_bytes_per_s
        )
        inside = step.compute_s + step.stall_s + (step.decode_s if machine.decode_computes else 0.0)
        assert step.wall_s == pytest.approx(inside)


@pytest.mark.parametrize("seed", range(60))
def test_no_prefix_of_a_whole_run_beats_compute_bus_or_disk(seed: int) -> None:
    """Real-size runs: both experts, any residents, RAM blocks and rates."""
    pick = Random(seed)
    residents, high, low = pick.randint(0, BLOCKS), pick.randint(0, 6), pick.randint(1, 6)
    machine = hardware(pick.choice((0.1, 0.9, 1.1, 3.0)), pick.choice((0.1, 0.9, 1.1, 3.0)))
    ram_residency = pinned(pick.randint(0, 2 * BLOCKS))
    program, device = device_program(residents, pick.randint(1, 3), high, low)
    ram = compile_ram(program, ram_residency(device), staging=pick.randint(1, 3))
    check_program(program)
    check_ram(program, ram)
    elapsed = computed = moved = read = 0.0
    for step in simulate(program, machine, ram).steps:
        elapsed, computed = elapsed + step.wall_s, computed + step.compute_s
        moved, read = moved + step.bytes_moved, read + step.transfers.read_bytes
        bound = max(computed, moved / machine.bus_bytes_per_s, read / machine.disk_bytes_per_s)
        assert elapsed >= bound * (1 - 1e-9)


def _bytes_over_the_bus(
    program: TransferProgram, ram: RamProgram, machine: Hardware
) -> Mapping[tuple[int, str], float]:
    """Return the bytes per step copied from RAM at the bus rate."""
    moved: dict[tuple[int, str], float] = {}
    for fetch, visit in zip(program.fetches, ram.visit_of_fetch, strict=True):
        step = program.visits[fetch.needed_by].step, fetch.block.expert
        if visit != DIRECT and not machine.decode_computes:
            moved[step] = moved.get(step, 0) + machine.block_bytes
    return moved


@PROPERTY
@given(data=st.data(), machine=machines)
def test_a_step_reads_the_missing_blocks_of_its_visits(
    runs: Any, data: Any, machine: Hardware
) -> None:
    program, ram = data.draw(pairs(runs))
    expected: dict[tuple[int, str], int] = {}
    for fetch, visit in zip(program.fetches, ram.visit_of_fetch, strict=True):
        read = None if visit == DIRECT else ram.program.visit_fetch[visit]
        first_use = read is None or (read >= 0 and ram.program.fetches[read].needed_by == visit)
        step = program.visits[fetch.needed_by].step, fetch.block.expert
        expected[step] = expected.get(step, 0) + (machine.file_bytes if first_use else 0)
    timeline = simulate(program, machine, ram)
    for step in timeline.steps:
        assert step.transfers.read_bytes == expected.get((step.index, step.expert), 0)
    assert timeline.transfers.read_bytes == sum(expected.values())


@PROPERTY
@given(data=st.data(), machine=machines)
def test_a_disk_that_takes_no_time_changes_nothing(runs: Any, data: Any, machine: Hardware) -> None:
    program, ram = data.draw(pairs(runs))
    assume(DIRECT not in ram.visit_of_fetch)
    at_once = replace(machine, file_bytes=0, decode_computes=False)
    without = simulate(program, at_once, kept_in_ram(program))
    found = simulate(program, at_once, ram)
    assert [step.wall_s for step in found.steps] == pytest.approx(
        [step.wall_s for step in without.steps]
    )


@settings(deadline=None, max_examples=60)
@given(data=st.data(), machine=machines, faster=st.sampled_from([1.1, 2.0, 1e6]))
def test_a_faster_disk_is_never_slower(
    runs: Any, data: Any, machine: Hardware, faster: float
) -> None:
    program, ram = data.draw(pairs(runs))
    assume(DIRECT not in ram.visit_of_fetch)
    fast = replace(machine, disk_bytes_per_s=machine.disk_bytes_per_s * faster)
    assert simulate(program, fast, ram).wall_s <= simulate(program, machine, ram).wall_s * (
        1 + 1e-9
    )


loads = st.sampled_from([0.3, 0.5, 0.9, 1.0, 1.1, 1.6, 3.0])


@settings(deadline=None, max_examples=50)
@given(
    residents=st.integers(0, BLOCKS - 1),
    bus=loads,
    disk=loads,
    staging=st.integers(2, 3),
    data=st.data(),
)
def test_a_steady_step_is_within_two_percent_of_its_bound(
    residents: int, bus: float, disk: float, staging: int, data: Any
) -> None:
    """Bus and disk may each be slack, critical or the limit.

    Together critical, two staging slots are too few.

    `bus` and `disk` are how long either works for a step, in steps' worth of computing.
    """
    streamed = BLOCKS - residents
    from_file = data.draw(st.integers(1, streamed))
    gap = 2 if 1 <= residents <= 12 or residents == 15 else 1
    streaming = data.draw(st.integers(gap + 1, 3))
    if staging == 2:
        assume(max(bus, disk) < 0.9 or max(bus, disk) / min(bus, disk) > 1.3)
    machine = hardware(bus * BLOCKS / streamed, disk * BLOCKS / from_file)
    ram_residency = pinned(streamed - from_file, experts=("high",))
    timeline = run(
        machine, ram_residency, residents=residents, streaming=streaming, staging=staging
    )
    bound = BLOCKS * max(1.0, bus, disk)
    assert bound * (1 - 1e-9) <= steady_step(timeline) <= 1.02 * bound


# --- figures: staging and residents ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("staging", "r", "expected"),
    [
        (1, 0.2, {0.5: 1.0, 0.8: 1.0, 0.9: 1.1, 1.0: 1.2, 1.1: 1.182, 1.5: 1.133, 2.0: 1.1}),
        (1, 0.8, {0.5: 1.3, 0.8: 1.6, 0.9: 1.7, 1.0: 1.8, 1.1: 1.727, 1.5: 1.533, 2.0: 1.4}),
        (2, 0.2, dict.fromkeys((0.5, 0.8, 0.9, 1.0, 1.1, 1.5, 2.0), 1.0)),
        (2, 0.8, dict.fromkeys((0.5, 0.8, 0.9, 1.0, 1.1, 1.5, 2.0), 1.0)),
    ],
)
def test_two_staging_slots_hide_the_second_hop(
    staging: int, r: float, expected: Mapping[float, float]
) -> None:
    """Everything from file: step over bound, per d."""
    found = {
        d: steady_step(run(hardware(r, d), pinned(0), staging=staging)) / (BLOCKS * max(1.0, d))
        for d in expected
    }
    assert found == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize("residents", [0, 4, 8, 20, 32])
def test_two_staging_slots_reach_the_bound_for_any_residents(residents: int) -> None:
    streamed = BLOCKS - residents
    for d in (0.3, 0.8, 1.0, 1.1, 1.5, 2.0, 4.0):
        timeline = run(hardware(0.2, d), pinned(0), residents=residents)
        assert steady_step(timeline) == pytest.approx(max(BLOCKS, streamed * d), rel=5e-4)


@pytest.mark.parametrize(
    ("residents", "blocks", "contiguous"),
    [
        (0, 20, {1.5: 1.185, 2.0: 1.410, 3.0: 1.240, 4.0: 1.155}),
        (0, 30, {1.5: 1.060, 2.0: 1.160, 3.0: 1.360, 4.0: 1.560}),
        (20, 10, {1.5: 1.000, 2.0: 1.000, 3.0: 1.085, 4.0: 1.285}),
    ],
)
def test_the_choice_of_ram_residents_decides_at_equal_ram(
    residents: int, blocks: int, contiguous: Mapping[float, float]
) -> None:
    """Spread over the streamed blocks: the bound.

    With the first ones instead: `contiguous`, per d.
    """
    streamed = BLOCKS - residents

    def first_ones(device: Residency) -> RamResidency:
        names = [block for block in range(BLOCKS) if not device.keeps("high", block)][:blocks]
        return RamResidency(residency=Residency(residents={"high": frozenset(names)}), slots=blocks)

    for d, expected in contiguous.items():
        bound = max(BLOCKS, (streamed - blocks) * d)
        machine = hardware(0.2, d)
        assert steady_step(
            run(machine, pinned(blocks, experts=("high",)), residents=residents)
        ) == pytest.approx(bound)
        assert steady_step(run(machine, first_ones, residents=residents)) / bound == pytest.approx(
            expected, abs=6e-4
        )


def test_ram_slots_for_blocks_resident_on_the_device_are_wasted() -> None:
    """Half is resident on the device.

    With ten RAM blocks spread over all, half serve one fetch per stage.
    """

    def over_all(device: Residency) -> RamResidency:
        return RamResidency(
            residency=Residency(residents={"high": spread_evenly(10, BLOCKS)}), slots=10
        )

    for d, expected in ((3.0, 1.5), (4.0, 2.0)):
        bound = max(BLOCKS, 10 * d)
        assert steady_step(run(hardware(0.2, d), over_all, residents=20)) / bound == pytest.approx(
            expected, abs=6e-4
        )


@pytest.mark.parametrize(
    ("residents", "blocks", "d", "expected"),
    [
        (0, 20, 1.5, (23.31, 620)),
        (0, 20, 2.0, (31.06, 620)),
        (0, 40, 2.0, (22.06, 440)),
        (0, 40, 3.0, (33.06, 440)),
        (20, 20, 3.0, (23.67, 260)),
    ],
)
def test_ram_is_shared_by_both_experts_in_halves(
    residents: int, blocks: int, d: float, expected: tuple[float, int]
) -> None:
    """Twenty steps with a switch after eight, r = 0.3: total in hidden steps, and reads."""
    timeline = run(hardware(0.3, d), pinned(blocks), residents=residents, high=8, low=12)
    assert (
        round(timeline.wall_s / BLOCKS, 2),
        timeline.transfers.read_bytes // BLOCK_BYTES,
    ) == expected


def test_slots_filled_by_an_earlier_run_are_not_read_again() -> None:
    program, device = device_program(0, 2, 2, 2)
    ram_residency = pinned(20)(device)
    first = compile_ram(program, ram_residency, staging=2)
    again = compile_ram(program, ram_residency, staging=2, contents=final_contents(first.program))
    machine = hardware(0.2, 0.9)
    cold, warm = simulate(program, machine, first), simulate(program, machine, again)
    assert (cold.transfers.read_bytes, warm.transfers.read_bytes) == (
        140 * BLOCK_BYTES,
        120 * BLOCK_BYTES,
    )
    assert warm.wall_s <= cold.wall_s


# --- figures: real cases --------------------------------------------------------------------------

RTX_4090_81, FAST_81, FAST_17 = 0.280, 0.105, 0.0151
"""Seconds per lane and block at 832x480: on an RTX 4090, and at 400 TFLOPS, with 81 and with 17
frames."""


def real(lane_s: float, lanes: tuple[int, int], steps: tuple[int, int]) -> Callable[..., Timeline]:
    """bf16, bus 25 GB/s, `lanes` in high and low steps.

    Per disk rate (None: from RAM) and residents.
    """
    size = T2V_A14B.streamed_bytes()
    visit_s = {expert: count * lane_s for expert, count in zip(EXPERTS, lanes, strict=True)}

    def timeline(disk: float | None, residents: int = 0) -> Timeline:
        program, device = device_program(residents, 2, *steps)
        machine = Hardware(
            bus_bytes_per_s=25e9,
            block_bytes=size,
            visit_s=visit_s,
            disk_bytes_per_s=disk or 1.0,
            file_bytes=size,
        )
        ram = (
            kept_in_ram(program)
            if disk is None
            else compile_ram(program, pinned(0)(device), staging=3)
        )
        return simulate(program, machine, ram)

    return timeline


@pytest.mark.parametrize(
    ("case", "in_ram", "ssd_7", "ssd_3", "ssd_2", "half_resident", "at_the_switch"),
    [
        (real(RTX_4090_81, (2, 2), (8, 12)), 1.000, 1.000, 1.001, 1.001, 1.001, 0.0),
        (real(RTX_4090_81, (2, 1), (8, 12)), 1.000, 1.000, 1.001, 1.107, 1.001, 0.0),
        (real(RTX_4090_81, (1, 1), (2, 2)), 1.001, 1.003, 1.006, 1.262, 1.071, 0.0),
        (real(FAST_81, (2, 2), (8, 12)), 1.000, 1.001, 1.117, 1.675, 1.054, 3.1),
        (real(FAST_81, (1, 1), (2, 2)), 1.002, 1.008, 2.239, 3.355, 2.518, 7.0),
        (real(FAST_17, (2, 1), (8, 12)), 1.370, 4.752, 11.08, 16.6, 9.15, 7.0),
    ],
)
def test_real_cases(
    case: Callable[..., Timeline],
    in_ram: float,
    ssd_7: float,
    ssd_3: float,
    ssd_2: float,
    half_resident: float,
    at_the_switch: float,
) -> None:
    """Total over computing, all from file.

    With half the blocks resident and 2 GB/s, also the switch cost.
    """
    found = [
        timeline.wall_s / timeline.compute_s
        for timeline in (case(None), case(7e9), case(3e9), case(2e9))
    ]
    assert found == pytest.approx([in_ram, ssd_7, ssd_3, ssd_2], rel=2e-3)
    half = case(2e9, 20)
    assert half.wall_s / half.compute_s == pytest.approx(half_resident, rel=2e-3)
    switch = next(place for place, step in enumerate(half.steps) if step.expert == "low")
    usual = median(step.stall_s for step in half.steps[switch + 1 : -1] or half.steps[-1:])
    assert half.steps[switch].stall_s - usual == pytest.approx(at_the_switch, abs=0.06)


def test_a_step_that_starts_from_an_ssd_waits_more_in_the_first_step_than_at_the_switch() -> None:
    half = real(RTX_4090_81, (1, 1), (2, 2))(2e9, 20)
    assert half.steps[0].stall_s == pytest.approx(3.2, abs=0.06)
    assert half.steps[2].stall_s == 0.0


# --- decoding, and reads without a bus ------------------------------------------------------------


def one_expert(steps: int = 4, blocks: int = 4, buffers: int = 2) -> TransferProgram:
    return compile_program(
        step_visits(["high"] * steps, {"high": blocks}), Residency(residents={}), buffers
    )


def timeline_of(program: TransferProgram, machine: Hardware, staging: int) -> Timeline:
    ram_residency = RamResidency(residency=Residency(residents={}), slots=0)
    return simulate(program, machine, compile_ram(program, ram_residency, staging=staging))


def from_ram(program: TransferProgram, machine: Hardware) -> Timeline:
    return simulate(program, machine, kept_in_ram(program))


def test_a_stall_is_the_files_as_long_as_the_block_has_not_left_it() -> None:
    """Behind a slow disk a block arrives every 2 s.

    The last 0.3 s are the bus's, and the visit before hides 1 s.
    """
    slow_disk = run(hardware(0.3, 2.0), pinned(0))
    step = slow_disk.steps[5]
    assert (step.stall_s, step.transfers.stall_on_read_s) == pytest.approx((40.0, 28.0))
    assert (step.transfers.read_s, step.transfers.copy_s, step.transfers.overlap) == pytest.approx(
        (80.0, 12.0, 0.5)
    )
    slow_bus = run(hardware(2.0, 0.3), pinned(0)).steps[5]
    assert (slow_bus.stall_s, slow_bus.transfers.stall_on_read_s) == pytest.approx((40.0, 0.0))
    of_residents = run(hardware(2.0, 0.3), pinned(2 * BLOCKS)).steps[5]
    assert (
        of_residents.transfers.read_bytes,
        of_residents.transfers.read_s,
        of_residents.transfers.stall_on_read_s,
    ) == (0, 0, 0)
    assert of_residents.transfers.copied_bytes == of_residents.bytes_moved == 40 * BLOCK_BYTES


def test_direct_reads_and_cpu_decoding_are_not_copies() -> None:
    cpu = hardware(0.5, 1.0, decode_s=0.5, decode_computes=True)
    decoded = timeline_of(one_expert(), cpu, staging=2)
    straight = timeline_of(one_expert(), hardware(0.5, 1.0), staging=0)
    for timeline in (decoded, straight):
        assert (
            timeline.transfers.copied_bytes,
            timeline.transfers.copy_s,
            timeline.transfers.copy_bytes_per_s,
        ) == (
            0,
            0,
            None,
        )
        assert timeline.bytes_moved == timeline.transfers.read_bytes == 16 * BLOCK_BYTES
    first = straight.steps[0]
    assert first.transfers.stall_on_read_s == pytest.approx(first.stall_s)


def step_times(step: StepRecord) -> tuple[float, ...]:
    return tuple(
        round(value, 9) for value in (step.wall_s, step.compute_s, step.stall_s, step.decode_s)
    )


def test_on_a_gpu_decoding_is_a_queue_of_its_own() -> None:
    """It is the limit only if it takes longer than a visit, but always delays the first block."""
    program = one_expert(buffers=3)
    hidden = from_ram(program, hardware(0.5, 1.0, decode_s=0.9))
    assert hidden.first_block_s == pytest.approx(1.4)
    assert [step_times(step) for step in hidden.steps] == [
        (5.4, 4, 1.4, 3.6),
        *[(4, 4, 0, 3.6)] * 3,
    ]
    limit = from_ram(program, hardware(0.5, 1.0, decode_s=1.5))
    assert step_times(limit.steps[2]) == (6, 4, 2, 6)


def test_two_raw_slots_let_the_bus_run_on_while_a_block_is_decoded() -> None:
    """Copies and decoding take 1.0 each: one after the other, they would take two visits."""
    timeline = from_ram(one_expert(buffers=4), hardware(1.0, 1.0, decode_s=1.0))
    assert [step_times(step) for step in timeline.steps] == [(6, 4, 2, 4), *[(4, 4, 0, 4)] * 3]


def test_copies_do_not_wait_for_the_buffer_that_their_block_is_decoded_into() -> None:
    """Two buffers: a 0.9 s copy and 0.5 s decoding fit into a visit.

    The copy is there before the buffer is free.
    """
    timeline = from_ram(one_expert(buffers=2), hardware(0.9, 1.0, decode_s=0.5))
    assert [step_times(step) for step in timeline.steps] == [(5.4, 4, 1.4, 2), *[(4, 4, 0, 2)] * 3]


def test_decoding_waits_for_its_buffer() -> None:
    """One buffer: the copy hides behind the visit before, decoding cannot."""
    timeline = from_ram(one_expert(buffers=1), hardware(0.5, 1.0, decode_s=0.25))
    assert [step_times(step) for step in timeline.steps] == [(5.5, 4, 1.5, 1), *[(5, 4, 1, 1)] * 3]


def test_copies_wait_for_a_raw_slot() -> None:
    """One buffer, 3 s copies: the only high visit sees two low blocks copied, not four.

    The visit takes 10 s, and the copies are from 4 s on.

    Decoding the first one waits for the buffer until 14 s. The raw slot is free at 15 s for the
    third copy, until 18 s. The fourth ends at 21 s and is decoded at 22 s.
    """
    program = compile_program(
        step_visits(EXPERTS, {"high": 1, "low": 4}), Residency(residents={}), 1
    )
    machine = hardware(3.0, 1.0, visit_s={"high": 10.0, "low": 0.0}, decode_s=1.0)
    assert from_ram(program, machine).wall_s == pytest.approx(22.0)


def test_on_a_cpu_the_computing_thread_decodes_and_there_is_no_bus() -> None:
    machine = hardware(50.0, 0.5, decode_s=0.25, decode_computes=True)
    timeline = timeline_of(one_expert(), machine, 2)
    assert timeline.first_block_s == pytest.approx(0.75)
    assert [step_times(step) for step in timeline.steps] == [(5.5, 4, 0.5, 1), *[(5, 4, 0, 1)] * 3]


def test_on_a_cpu_a_block_that_was_read_straight_is_patched_by_the_computing_thread_too() -> None:
    timeline = timeline_of(
        one_expert(), hardware(50.0, 0.5, decode_s=0.25, decode_computes=True), 0
    )
    assert timeline.first_block_s == pytest.approx(0.75)
    assert [step_times(step) for step in timeline.steps] == [(5.5, 4, 0.5, 1), *[(5, 4, 0, 1)] * 3]


def test_on_a_cpu_a_slot_is_free_when_its_block_is_decoded() -> None:
    """One slot: the next read starts after decoding and has the visit to hide behind."""
    machine = hardware(50.0, 1.5, decode_s=0.25, decode_computes=True)
    timeline = timeline_of(one_expert(), machine, 1)
    assert step_times(timeline.steps[1]) == (4 * 1.75, 4, 2, 1)


def test_on_a_cpu_a_block_that_stays_is_decoded_once() -> None:
    visits = step_visits(["high"] * 3, {"high": 4})
    program = compile_program(visits, Residency(residents={"high": frozenset(range(4))}), 4)
    machine = hardware(1.0, 0.5, decode_s=0.25, decode_computes=True)
    assert [step.decode_s for step in timeline_of(program, machine, 2).steps] == [1.0, 0.0, 0.0]


def test_a_block_without_a_slot_is_read_straight_into_its_buffer() -> None:
    """Disk and bus are one route then: the bus rate is unused, reads wait for a free buffer."""
    program = one_expert(buffers=2)
    timeline = timeline_of(program, hardware(50.0, 0.75), 0)
    assert timeline.first_block_s == pytest.approx(0.75)
    assert timeline.stall_s == pytest.approx(0.75)
    assert timeline.transfers.read_bytes == 16 * BLOCK_BYTES
    serial = timeline_of(one_expert(buffers=1), hardware(50.0, 0.75), 0)
    assert serial.wall_s == pytest.approx(16 * 1.75)


def test_ram_slots_are_filled_while_direct_reads_wait_for_buffers() -> None:
    """Block 3 is RAM-resident.

    The read starts when the disk waits for a buffer, and delays no other read.
    """
    program = one_expert(steps=2, buffers=2)
    ram_residency = RamResidency(
        residency=Residency(residents={"high": frozenset({3})}, permanent=True), slots=1
    )
    ram = compile_ram(program, ram_residency, staging=0)
    timeline = simulate(program, hardware(0.1, 0.5), ram)
    assert timeline.stall_s == pytest.approx(0.5)
    assert timeline.transfers.read_bytes == 7 * BLOCK_BYTES
    assert [step.transfers.read_bytes // BLOCK_BYTES for step in timeline.steps] == [4, 3]


def test_ram_blocks_of_the_next_expert_are_read_while_the_disk_is_idle() -> None:
    """High blocks are read directly and use half the disk's time.

    Low ones are RAM-resident and cannot hide.
    """
    program = compile_program(
        step_visits(["high", "high", "low"], dict.fromkeys(EXPERTS, 4)), Residency(residents={}), 2
    )
    ram_residency = RamResidency(
        residency=Residency(residents={"low": frozenset(range(4))}, permanent=True), slots=4
    )
    machine = hardware(0.01, 0.5, visit_s={"high": 1.0, "low": 0.01})
    timeline = simulate(program, machine, compile_ram(program, ram_residency, staging=0))
    assert timeline.steps[2].stall_s == pytest.approx(0.0)


def test_one_disk_serves_reads_into_slots_and_into_buffers() -> None:
    program = one_expert(steps=1, buffers=4)
    ram_residency = RamResidency(
        residency=Residency(residents={"high": frozenset({1, 3})}, permanent=True), slots=2
    )
    machine = hardware(0.01, 0.5, visit_s={"high": 0.0, "low": 0.0})
    wall_s = simulate(program, machine, compile_ram(program, ram_residency, staging=0)).wall_s
    assert 4 * 0.5 <= wall_s <= 4 * 0.5 + 2 * 0.01


def test_file_bytes_may_exceed_bus_bytes() -> None:
    """A bf16 file becomes fp8 in RAM."""
    machine = hardware(0.5, 0.5, file_bytes=2 * BLOCK_BYTES)
    timeline = timeline_of(one_expert(), machine, 2)
    assert (timeline.bytes_moved, timeline.transfers.read_bytes) == (
        16 * BLOCK_BYTES,
        32 * BLOCK_BYTES,
    )
    assert timeline.first_block_s == pytest.approx(1.5)
