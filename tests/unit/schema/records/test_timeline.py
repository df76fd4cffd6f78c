import json

import pytest

from wanstream.schema.records import PHASES, MemorySample, PhaseRecord, StepRecord, Timeline
from wanstream.schema.records.timeline import RATE_BORDERS, RateRange, run_phases, together

USUAL = {"index": 0, "expert": "high", "sigma": None, "wall_s": 4.0, "compute_s": 3.0}


def record(**figures):
    return StepRecord.of(**{**USUAL, "stall_s": 1.0, "bytes_moved": 100, **figures})


def timeline(*steps, **values):
    return Timeline(**{"steps": steps, "kind": "measured", **values})


TIMES = {"decode_s": 0.125, "start_s": 2.25, "stall_on_read_s": 0.0, "copy_s": 0.5, "read_s": 0.25}
SIZES = {"device_bytes": 7, "rss_bytes": 9, "read_bytes": 40, "copied_bytes": 50}
MORE_SIZES = {"reserved_bytes": 8, "device_used_bytes": 12, "dynamic_bytes": 3, "pinned_bytes": 4}
LOW = {"index": 1, "expert": "low", "sigma": 0.5, "wall_s": 1.0, "compute_s": 1.0, "stall_s": 0.0}
TEXT = PhaseRecord(name="text", start_s=-3.0, wall_s=2.0, rss_bytes=9)
TIMELINE = timeline(
    record(sigma=1.0, wall_s=2.0, compute_s=1.5, stall_s=0.5),
    record(**LOW, bytes_moved=50, **TIMES, **SIZES, **MORE_SIZES),
    non_block_bytes=11,
    first_block_s=0.25,
    changes=("step 1: 2 buffers instead of 4, the device was out of memory",),
    phases=(TEXT, PhaseRecord(name="high", start_s=0, wall_s=2)),
    memory=(MemorySample(at_s=0.5, device_bytes=7, device_used_bytes=None, rss_bytes=9),),
    copy_rates=(RateRange(from_gb_per_s=1, fetches=2, nbytes=30, busy_s=0.5),),
    read_rates=(RateRange(from_gb_per_s=0, fetches=1, nbytes=3, busy_s=0.25),),
)


def test_sums_over_the_steps():
    sums = (TIMELINE.wall_s, TIMELINE.compute_s, TIMELINE.stall_s, TIMELINE.bytes_moved)
    assert sums == (3.0, 2.5, 0.5, 150)
    assert (TIMELINE.decode_s, TIMELINE.transfers.read_bytes) == (0.125, 40)
    empty = timeline(kind="simulated")
    assert (empty.wall_s, empty.transfers.overlap, empty.switch_step) == (0, None, None)


def test_share_of_the_transfers_hidden_by_computing():
    for figures, overlap in (
        ({}, None),
        ({"copy_s": 4.0}, 0.75),
        ({"read_s": 4.0}, 0.75),
        ({"copy_s": 2.0, "read_s": 5.0}, 0.8),  # side by side: the busier route counts
        ({"copy_s": 1.0}, 0.0),
        ({"copy_s": 0.5}, 0.0),  # waiting for decoding too
        ({"copy_s": 3.0, "stall_s": 0.0}, 1.0),
    ):
        step = record(**figures)
        found = [each.transfers.overlap for each in (step, timeline(step, step))]
        assert found == [overlap, overlap], figures


def test_rates_are_those_of_busy_routes():
    step = record(copied_bytes=60, copy_s=2.0, read_bytes=90, read_s=3.0)
    both = timeline(step, record())
    rates = [(step.transfers, 30.0), (both.transfers, 30.0), (record().transfers, None)]
    for transfers, rate in rates:
        assert transfers.copy_bytes_per_s == transfers.read_bytes_per_s == rate
    transfers = both.transfers
    sums = (transfers.copy_s, transfers.copied_bytes, transfers.read_s, both.bytes_moved)
    assert sums == (2.0, 60, 3.0, 200)


def test_switch_is_the_first_step_of_another_expert():
    """Steps are known by their number."""

    def switch_step(experts: str, first: int) -> int | None:
        named = enumerate(experts.split(), first)
        return timeline(*(record(index=at, expert=each) for at, each in named)).switch_step

    switches = {"high high low": 2, "high": None, "low low": None, "high low high": 1}
    assert {experts: switch_step(experts, 0) for experts in switches} == switches
    assert switch_step("high high low", 5) == 7


def test_it_survives_json():
    written = TIMELINE.to_dict()
    assert json.loads(json.dumps(written)) == written, "it has lists and no tuples"
    assert Timeline.from_dict(written) == TIMELINE


def test_old_timeline_without_reads_and_changes_is_read():
    written = TIMELINE.to_dict()
    for name in ("changes", "phases", "memory", "copy_rates", "read_rates"):
        del written[name]
    old = {*USUAL, "stall_s", "bytes_moved", "device_bytes", "rss_bytes"}
    written["steps"] = [{name: step[name] for name in old} for step in written["steps"]]
    found = Timeline.from_dict(written)
    assert (found.decode_s, found.transfers.read_bytes, found.steps[1].start_s) == (0, 0, None)
    assert (found.wall_s, found.bytes_moved, found.first_block_s) == (3.0, 150, 0.25)
    later = (found.changes, found.phases, found.memory, found.copy_rates, found.read_rates)
    assert later == ((),) * 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "guessed"}, "kind is 'guessed'"),
        ({"colour": "red"}, "colour"),
        ({"steps": [{"index": 0}]}, "missing .*expert"),
        ({"steps": 3}, "not iterable"),
        ({"phases": [{"name": "high"}]}, "missing .*start_s"),
        ({"memory": [{"at_s": 1, "colour": "red"}]}, "colour"),
        ({"copy_rates": [{"fetches": 1}]}, "missing .*from_gb_per_s"),
        ({"changes": 3}, "not iterable"),
        ({"changes": "fewer buffers"}, "changes is 'fewer buffers', not a list of lines"),
        ({"changes": [1]}, "not a list of lines"),
    ],
)
def test_anything_else_is_refused(change, message):
    with pytest.raises(ValueError, match=f"not a timeline: .*{message}"):
        Timeline.from_dict({**TIMELINE.to_dict(), **change})


# --- rates of fetches -------------------------------------------------------------------------


def test_border_belongs_to_the_range_above():
    cases = [(0, 1.0, 0), (999_999_999, 1.0, 0), (10**9, 1.0, 1), (700 * 10**6, 0.028, 20)]
    cases += [(160 * 10**9, 2.0, 80), (10**15, 1.0, 80), (1, 0.0, 80)]
    for nbytes, seconds, border in cases:
        expected = RateRange(from_gb_per_s=border, fetches=1, nbytes=nbytes, busy_s=seconds)
        assert RateRange.of_fetch(nbytes, seconds) == expected


def test_ranges_are_added_up_and_in_order():
    def of(border: int, fetches: int) -> RateRange:
        sums = {"nbytes": 10 * fetches, "busy_s": 0.5 * fetches}
        return RateRange(from_gb_per_s=border, fetches=fetches, **sums)

    assert together([of(20, 4), of(1, 2), of(20, 6)]) == (of(1, 2), of(20, 10))
    assert together([]) == ()
    many = together(RateRange.of_fetch(number * 10**6, 0.01) for number in range(20_000))
    assert len(many) == len(RATE_BORDERS)
    assert sum(each.fetches for each in many) == 20_000


# --- phases ---------------------------------------------------------------------------------------


def steps_of(*experts, **figures):
    """Return 2 s steps with 0.5 s between them, the first after 1 s."""
    steps = []
    for index, expert in enumerate(experts):
        own = {name: values[index] for name, values in figures.items()}
        times = {"wall_s": 2.0, "start_s": 1.0 + index * 2.5}
        steps.append(record(index=index, expert=expert, **times, **own))
    return steps


def test_run_of_both_experts_has_phases_without_gaps():
    phases = run_phases(steps_of("high", "high", "low", "low"), [1.5, 4.0, 7.25, 9.0])
    assert [(phase.name, phase.start_s, phase.wall_s) for phase in phases] == [
        ("first block", 0.0, 1.5),
        ("high", 1.5, 4.0),
        ("switch", 5.5, 1.75),
        ("low", 7.25, 3.25),
    ]
    assert {phase.name for phase in phases} < set(PHASES)


def test_every_change_of_expert_is_a_switch():
    for experts, names in (
        ("high high", ["high"]),
        ("low low", ["low"]),
        ("high low high", ["high", "switch", "low", "switch", "high"]),
    ):
        run = steps_of(*experts.split())
        phases = run_phases(run, [1.5, 4.0, 6.5][: len(run)])
        assert [phase.name for phase in phases] == ["first block", *names]


def test_memory_is_the_most_of_a_stage_and_ram_its_last():
    used = {"device_bytes": [5, 3, 4], "device_used_bytes": [None, 7, None], "rss_bytes": [9, 8, 7]}
    high, low = run_phases(steps_of("high", "high", "low", **used), [1.0, 3.5, 6.0])[1::2]
    assert (high.device_bytes, high.device_used_bytes, high.rss_bytes) == (5, 7, 8)
    assert (low.device_bytes, low.device_used_bytes, low.rss_bytes) == (4, None, 7)


def test_phases_without_blocks_times_or_steps():
    assert run_phases(steps_of("high"), [None])[0].wall_s == 1.0
    assert run_phases([], []) == ()
    assert run_phases([record()], [0.0]) == ()
