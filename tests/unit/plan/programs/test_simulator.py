"""The simulator: every program's properties, and figures from the design's tables.

Figures are in visits: a visit takes 1 s and a copy r s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanstream.plan.programs import TransferProgram, compile_program, step_visits
from wanstream.plan.programs.simulator import Hardware, simulate
from wanstream.schema import Residency, spread_evenly
from wanstream.schema.records import Timeline
from wanstream.shapes import T2V_A14B
from wanstream.tests.support.plan_fixtures import buffers_needed, final_contents, kept_in_ram

BLOCKS = 40
BLOCK_BYTES = 1000
EXPERTS = ("high", "low")


def hardware(r: float, *, high_lanes: float = 1.0, step_overhead_s: float = 0.0) -> Hardware:
    return Hardware(
        bus_bytes_per_s=BLOCK_BYTES / r,
        block_bytes=BLOCK_BYTES,
        disk_bytes_per_s=1.0,
        file_bytes=BLOCK_BYTES,
        visit_s={"high": high_lanes, "low": 1.0},
        step_overhead_s=step_overhead_s,
    )


def from_ram(program: TransferProgram, machine: Hardware) -> Timeline:
    return simulate(program, machine, kept_in_ram(program))


def run(
    machine: Hardware, residents: Iterable[int], streaming: int, high: int, low: int = 0
) -> Timeline:
    """Simulate `high` + `low` steps with 40 blocks and the same residents in both experts."""
    kept = frozenset(residents)
    visits = step_visits(["high"] * high + ["low"] * low, dict.fromkeys(EXPERTS, BLOCKS))
    residency = Residency(residents=dict.fromkeys(EXPERTS, kept))
    return from_ram(compile_program(visits, residency, len(kept) + streaming), machine)


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
machines = st.builds(
    Hardware,
    bus_bytes_per_s=st.sampled_from([1.0, 7.0, 1e3]),
    block_bytes=st.integers(0, 10),
    disk_bytes_per_s=st.just(1.0),
    file_bytes=st.just(10),
    visit_s=st.fixed_dictionaries(dict.fromkeys(EXPERTS, seconds)),
    step_overhead_s=seconds,
)


@settings(deadline=None, max_examples=50)
@given(data=st.data(), machine=machines)
def test_time_and_bytes_add_up_and_no_prefix_beats_compute_or_bus(
    runs: Any, data: Any, machine: Hardware
) -> None:
    case = data.draw(runs)
    buffers = buffers_needed(case.visits, case.residency) + case.spare_buffers
    program = compile_program(case.visits, case.residency, buffers, contents=case.contents)
    timeline = from_ram(program, machine)
    assert timeline.kind == "simulated"
    assert timeline.bytes_moved == machine.block_bytes * len(program.fetches)

    elapsed = computed = moved = 0.0
    for step in timeline.steps:
        assert step.stall_s >= 0
        assert step.wall_s == pytest.approx(step.compute_s + step.stall_s)
        elapsed, computed, moved = (
            elapsed + step.wall_s,
            computed + step.compute_s,
            moved + step.bytes_moved,
        )
        assert elapsed >= max(computed, moved / machine.bus_bytes_per_s) * (1 - 1e-9)


@settings(deadline=None, max_examples=50)
@given(data=st.data(), machine=machines)
def test_phases_lie_end_to_end_and_the_bus_is_never_busy_longer_than_the_run(
    runs: Any, data: Any, machine: Hardware
) -> None:
    case = data.draw(runs)
    buffers = buffers_needed(case.visits, case.residency) + case.spare_buffers
    program = compile_program(case.visits, case.residency, buffers, contents=case.contents)
    timeline = from_ram(program, machine)
    began = 0.0
    for step in timeline.steps:
        assert step.start_s == pytest.approx(began)
        assert (
            step.transfers.copied_bytes,
            step.transfers.stall_on_read_s,
            step.transfers.read_s,
        ) == (
            step.bytes_moved,
            0,
            0,
        )
        assert step.transfers.copy_s == pytest.approx(step.bytes_moved / machine.bus_bytes_per_s)
        began += step.wall_s
    assert timeline.transfers.copy_s <= timeline.wall_s * (1 + 1e-9)
    reached = 0.0
    for phase in timeline.phases:
        assert phase.start_s == pytest.approx(reached)
        assert phase.wall_s >= 0
        reached = phase.start_s + phase.wall_s
    assert reached == pytest.approx(timeline.wall_s)


@settings(deadline=None, max_examples=50)
@given(data=st.data(), machine=machines)
def test_the_bytes_of_a_step_are_those_that_its_visits_need(
    runs: Any, data: Any, machine: Hardware
) -> None:
    case = data.draw(runs)
    program = compile_program(
        case.visits, case.residency, buffers_needed(case.visits, case.residency)
    )
    needed: dict[tuple[int, str], int] = {}
    for fetch in program.fetches:
        visit = program.visits[fetch.needed_by]
        step = visit.step, visit.expert
        needed[step] = needed.get(step, 0) + machine.block_bytes
    for step in from_ram(program, machine).steps:
        assert step.bytes_moved == needed.get((step.index, step.expert), 0)


@pytest.mark.parametrize("residents", [0, 1, 7, 20, 33, BLOCKS - 1])
def test_three_streaming_buffers_reach_the_bound_for_any_residents(residents: int) -> None:
    gap = BLOCKS / (BLOCKS - residents)
    for r in (0.5 * gap, 0.9 * gap, gap, 1.1 * gap, 1.6 * gap):
        timeline = run(hardware(r), spread_evenly(residents, BLOCKS), 3, high=12)
        assert steady_step(timeline) <= 1.0005 * bound(residents, r)


@settings(deadline=None, max_examples=50)
@given(
    residents=st.integers(0, BLOCKS - 1),
    r=st.floats(0.02, 6.0),
    lanes=st.integers(1, 4),
    data=st.data(),
)
def test_a_steady_step_is_within_two_percent_of_its_bound(
    residents: int, r: float, lanes: int, data: Any
) -> None:
    """Two streaming buffers are too few where streamed blocks come in runs with single gaps."""
    fewest = 3 if 1 <= residents <= 12 or residents == 15 else 2
    streaming = data.draw(st.integers(fewest, 5))
    machine = hardware(lanes * r, high_lanes=lanes)
    timeline = run(machine, spread_evenly(residents, BLOCKS), streaming, high=12)
    least = lanes * bound(residents, r)
    assert least * (1 - 1e-9) <= steady_step(timeline) <= 1.02 * least


# --- figures --------------------------------------------------------------------------------------

RATIOS = (0.05, 0.2, 0.5, 0.9, 1.0, 1.1, 1.5, 2.0, 4.0)
HIDDEN = (1.0,) * len(RATIOS)


@pytest.mark.parametrize(
    ("residents", "streaming", "expected"),
    [
        (0, 1, (1.050, 1.200, 1.500, 1.900, 2.000, 1.909, 1.667, 1.500, 1.250)),
        (0, 2, HIDDEN),
        (0, 3, HIDDEN),
        (8, 1, (1.030, 1.120, 1.300, 1.540, 1.600, 1.680, 1.667, 1.500, 1.250)),
        (8, 2, (1.0, 1.0, 1.0, 1.0, 1.0, 1.040, 1.0, 1.0, 1.0)),
        (8, 3, HIDDEN),
        (20, 1, (1.0, 1.0, 1.0, 1.0, 1.0, 1.050, 1.250, 1.500, 1.250)),
        (20, 2, HIDDEN),
        (20, 3, HIDDEN),
        (32, 1, HIDDEN),
        (32, 2, HIDDEN),
        (32, 3, HIDDEN),
    ],
)
def test_steady_step_over_its_bound(
    residents: int, streaming: int, expected: tuple[float, ...]
) -> None:
    found = [
        steady_step(run(hardware(r), spread_evenly(residents, BLOCKS), streaming, high=12))
        / bound(residents, r)
        for r in RATIOS
    ]
    assert found == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize(
    ("residents", "r", "contiguous"), [(20, 2.0, 1.450), (32, 4.0, 1.450), (8, 1.5, 1.146)]
)
def test_spreading_residents_pays_where_the_bus_is_the_limit(
    residents: int, r: float, contiguous: float
) -> None:
    machine = hardware(r)
    spread = steady_step(run(machine, spread_evenly(residents, BLOCKS), 2, high=12))
    prefix = steady_step(run(machine, range(residents), 2, high=12))
    assert spread / bound(residents, r) == pytest.approx(1.0, abs=6e-4)
    assert prefix / bound(residents, r) == pytest.approx(contiguous, abs=6e-4)


@pytest.mark.parametrize(
    ("residents", "expected"),
    [
        (8, {0.2: 0, 0.5: 0, 0.9: 0, 1.0: 0, 1.1: -3.0, 1.5: 12, 2.0: 16, 4.0: 32}),
        (20, {0.2: 0, 0.5: 0, 0.9: 0, 1.0: 0, 1.1: 0, 1.5: 9.5, 2.0: 40, 4.0: 80}),
        (32, {0.2: 0, 0.5: 0, 0.9: 0, 1.0: 0, 1.1: 0, 1.5: 0, 2.0: 15, 4.0: 109}),
    ],
)
def test_cost_of_the_switch(residents: int, expected: Mapping[float, float]) -> None:
    """Twelve steps with a switch in the middle against twelve steps with one expert.

    Both have two streaming buffers.
    """
    kept = spread_evenly(residents, BLOCKS)
    found = {
        r: run(hardware(r), kept, 2, high=6, low=6).wall_s
        - run(hardware(r), kept, 2, high=12).wall_s
        for r in expected
    }
    assert found == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("residents", [0, 1, 7, 20, 33, BLOCKS - 1, BLOCKS])
def test_the_switch_costs_no_more_than_the_bytes_force(residents: int) -> None:
    """Cost: the two steps' transfers at the switch, (2N - R) r, minus what these can hide.

    The first low step pays it all. If every block is resident and no buffer is free, the switch
    starts and ends one visit later.
    """
    kept = spread_evenly(residents, BLOCKS)
    for streaming in (0, 2, 3) if residents == BLOCKS else (2, 3):
        spare = 1e-9 if streaming else 2.0
        for r in (0.5, 0.9, 1.0, 1.1, 1.2, 1.33, 1.5, 2.0, 2.5, 4.0):
            timeline = run(hardware(r), kept, streaming, high=6, low=6)
            usual = steady_step(run(hardware(r), kept, streaming, high=12))
            forced = max(0.0, (2 * BLOCKS - residents) * r - 2 * bound(residents, r))
            assert timeline.steps[5].wall_s <= usual * (1 + 1e-9)
            assert timeline.steps[6].wall_s - usual <= forced + spare


@pytest.mark.parametrize(
    ("residents", "free_up_to"), [(8, 1.12), (20, 1.34), (32, 1.68), (40, 2.06)]
)
def test_up_to_where_the_switch_is_free(residents: int, free_up_to: float) -> None:
    """It costs less than 2 % of a step up to this r, and more soon after."""
    kept = spread_evenly(residents, BLOCKS)
    streaming = 3 if residents < 16 else 2
    costs = []
    for r in (free_up_to, free_up_to + 0.05):
        switched = run(hardware(r), kept, streaming, high=6, low=6)
        costs.append(switched.wall_s - run(hardware(r), kept, streaming, high=12).wall_s)
    assert costs[0] < 0.02 * BLOCKS < costs[1]


@pytest.mark.parametrize(("lanes", "hidden_up_to"), [(1, 1.0), (2, 2.0), (4, 4.0)])
def test_lanes_share_the_transfers(lanes: int, hidden_up_to: float) -> None:
    """r in one-lane visits: it may be as many times larger as there are lanes."""
    for r, expected in ((hidden_up_to, 1.0), (2 * hidden_up_to, 2.0)):
        timeline = run(hardware(r, high_lanes=lanes), (), 2, high=10)
        assert steady_step(timeline) / (BLOCKS * lanes) == pytest.approx(expected)
        assert timeline.bytes_moved == 400 * BLOCK_BYTES


def test_a_pass_per_lane_moves_everything_again_and_hides_no_more() -> None:
    """Two lanes at r = 2, ten steps: through one visit each, or in twenty one-lane passes."""
    together = run(hardware(2.0, high_lanes=2), (), 2, high=10)
    apart = run(hardware(2.0), (), 2, high=20)
    assert (together.bytes_moved, apart.bytes_moved) == (400 * BLOCK_BYTES, 800 * BLOCK_BYTES)
    assert steady_step(together) / (2 * BLOCKS) == pytest.approx(1.0)
    assert steady_step(apart) / BLOCKS == pytest.approx(2.0)


def test_the_first_low_step_pays_the_whole_switch() -> None:
    timeline = run(hardware(2.0), spread_evenly(20, BLOCKS), 2, high=6, low=6)
    usual = steady_step(timeline)
    assert timeline.steps[5].wall_s == pytest.approx(usual)
    assert timeline.steps[6].wall_s > usual + 30


def test_a_second_lane_in_the_high_steps_hides_the_switch() -> None:
    kept = spread_evenly(20, BLOCKS)
    for high_lanes, cost in ((1.0, 40.0), (2.0, 0.0)):
        timeline = run(hardware(2.0, high_lanes=high_lanes), kept, 2, high=6, low=6)
        first_low, later_low = timeline.steps[6].wall_s, timeline.steps[9].wall_s
        assert first_low - later_low == pytest.approx(cost, abs=1.0)


@pytest.mark.parametrize("residents", [0, 8, 20, 32])
@pytest.mark.parametrize(
    ("r", "stall"), [(0.2, 0.2), (0.5, 0.5), (0.9, 0.9), (1.0, 1), (1.5, 21), (2.0, 41), (4.0, 121)]
)
def test_a_cold_start_waits_for_one_copy_and_then_only_for_the_bus(
    residents: int, r: float, stall: float
) -> None:
    timeline = run(hardware(r), spread_evenly(residents, BLOCKS), 2, high=12)
    assert timeline.first_block_s == pytest.approx(r)
    assert timeline.steps[0].stall_s == pytest.approx(stall)
    assert stall == pytest.approx(max(r, BLOCKS * r + 1 - BLOCKS))


@pytest.mark.parametrize(("gigabytes_per_s", "stall"), [(3, 0.23), (7, 0.10), (25, 0.03)])
def test_a_4090_at_480p_waits_once(gigabytes_per_s: float, stall: float) -> None:
    """0.28 s compute per block. The whole run waits for the first block and never again."""
    machine = Hardware(
        bus_bytes_per_s=gigabytes_per_s * 1e9,
        block_bytes=T2V_A14B.streamed_bytes(),
        disk_bytes_per_s=1.0,
        file_bytes=T2V_A14B.streamed_bytes(),
        visit_s=dict.fromkeys(EXPERTS, 0.28),
    )
    timeline = run(machine, spread_evenly(32, BLOCKS), 2, high=12, low=8)
    assert timeline.stall_s == pytest.approx(stall, abs=0.006)
    assert timeline.stall_s == pytest.approx(timeline.steps[0].stall_s)


def test_work_outside_the_blocks_counts_as_compute_and_hides_copies_too() -> None:
    plain = run(hardware(1.1), (), 2, high=6)
    with_overhead = run(hardware(1.1, step_overhead_s=2.0), (), 2, high=6)
    assert with_overhead.steps[3].compute_s == plain.steps[3].compute_s + 2
    assert with_overhead.first_block_s == plain.first_block_s
    assert with_overhead.stall_s < plain.stall_s


def test_a_run_on_kept_contents_starts_at_once() -> None:
    visits = step_visits(["high"], {"high": 4})
    residency = Residency(residents={"high": frozenset(range(4))}, permanent=True)
    first = compile_program(visits, residency, 4)
    again = from_ram(
        compile_program(visits, residency, 4, contents=final_contents(first)), hardware(3.0)
    )
    assert (again.first_block_s, again.stall_s, again.bytes_moved) == (0.0, 0.0, 0)


def test_no_visits_make_no_steps() -> None:
    timeline = from_ram(compile_program((), Residency(residents={}), 2), hardware(1.0))
    assert timeline == Timeline(steps=(), kind="simulated")
