"""The chosen policy is the fastest that fits, another one if a budget or a rate changes that.

Policies are chosen for runs, and from a measured model call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wanstream.plan import DoesNotFitError, Machine, memory_budget, memory_needs, predict
from wanstream.plan.candidates import Candidates, device_policies, last_step_bound_s, lower_bound_s
from wanstream.plan.costs import BlockCosts, Budgets, measured_costs
from wanstream.plan.describe import plan_reason
from wanstream.plan.planner import OffloadPlan, PassPlan, plan_offload, plan_passes
from wanstream.plan.programs import BlockSize
from wanstream.schema import OffloadPolicy
from wanstream.schema.records import StepRecord
from wanstream.shapes import RunShape, StepShape
from wanstream.tests.support.plan_fixtures import needs_of, predicted, rated, rated_cpu, run_shape
from wanstream.tests.support.sampling.steps import changed_step

BUS_BOUND = {"copy": 1.5, "read": 3.0}
"""Streaming all blocks keeps bus and disk busier than the device."""
DISK_BOUND = {"copy": 0.1, "read": 2.0}
"""Streaming all blocks from the file takes twice as long as computing."""
RATES = st.floats(0.05, 4.0)
RATES_OF_BLOCKS = st.fixed_dictionaries({"read": RATES, "copy": RATES})
LAYERWISE = OffloadPolicy.layerwise(1)
ALONE = {"steps": [StepShape(expert="low")] * 8, "sides": {"low": 1}}
"""A run of one expert."""


def _all_policies(run: RunShape) -> list[OffloadPolicy]:
    """Return all policies, except variants in `chunk_tokens`."""
    blocks = run.blocks.blocks
    found = []
    for policy in device_policies(blocks):
        pinned = replace(policy, source="pinned")
        found += [policy, pinned]
        found += [replace(pinned, ram_blocks=ram_blocks) for ram_blocks in range(1, 2 * blocks)]
    return found


def _budget(run, machine, *, device, ram=None) -> Budgets:
    """Just enough for `device` on the device and for `ram` (default: the same) in RAM."""
    host_bytes = needs_of(run, machine, ram or device).host_bytes
    return Budgets(vram_bytes=needs_of(run, machine, device).device_bytes, ram_bytes=host_bytes)


def _residents(chosen: OffloadPlan, blocks: int = 8) -> int:
    swapped = blocks - chosen.policy.blocks_to_swap
    return {"layerwise": 0, "block_swap": swapped, "resident": 2 * blocks}[chosen.policy.kind]


def _ram_blocks(chosen: OffloadPlan) -> int:
    policy = chosen.policy
    if policy.source == "file":
        return 0
    return 16 if policy.ram_blocks is None else policy.ram_blocks


def test_nothing_that_fits_is_much_faster_than_the_chosen_one():
    run = run_shape(3, 3)
    policy = OffloadPolicy.block_swap(5, 1)
    for rates, ram_blocks in product((BUS_BOUND, DISK_BOUND, {"copy": 0.4, "read": 0.9}), (0, 5)):
        machine = rated(**rates)
        ram = replace(policy, source="pinned", ram_blocks=ram_blocks) if ram_blocks else policy
        budgets = _budget(run, machine, device=policy, ram=ram)
        chosen = plan_offload(run, machine, budgets)
        assert chosen.candidates[0].policy == chosen.policy
        assert chosen.total_s == min(candidate.total_s for candidate in chosen.candidates)
        assert chosen.timeline.wall_s == pytest.approx(chosen.total_s, abs=1e-3)
        shortage = memory_budget(machine, budgets).shortage
        every = _all_policies(run)
        fitting = [other for other in every if shortage(needs_of(run, machine, other)) is None]
        assert chosen.policy in fitting
        # Not every smaller RAM block count is tried, and a larger one may be a little slower.
        fastest_s = min(predicted(run, machine, other).total_s for other in fitting)
        assert chosen.total_s <= 1.005 * fastest_s
        for candidate in chosen.candidates:
            needs = needs_of(run, machine, candidate.policy)
            timeline = predicted(run, machine, candidate.policy).timeline
            assert shortage(needs) is None
            assert candidate.device_bytes == needs.device_bytes
            assert candidate.host_bytes == needs.host_bytes
            assert candidate.total_s == round(timeline.wall_s, 3)
            assert candidate.stall_s == timeline.stall_s
        ranks = [candidate.rank for candidate in chosen.candidates]
        assert ranks == sorted(ranks)
        assert len(ranks) > 1


def test_where_nothing_waits_the_smallest_memory_is_chosen():
    chosen = plan_offload(run_shape(), rated(), Budgets())
    assert chosen.policy == LAYERWISE
    # 64 visits take 1 s each. The first block is read, then copied.
    assert chosen.total_s == 64.6


def test_more_memory_is_used_where_bus_or_disk_are_slow():
    """Half the transfers hide behind compute. The rest happens before the switch."""
    pinned = replace(LAYERWISE, source="pinned")
    device = [LAYERWISE, *(OffloadPolicy.block_swap(left, 1) for left in (6, 4, 2))]
    in_ram = [LAYERWISE, *(replace(pinned, ram_blocks=blocks) for blocks in (3, 6))]
    run = run_shape()
    for rates, fits, count, expected in (
        (BUS_BOUND, [(policy, pinned) for policy in device], _residents, [0, 2, 4, 4]),
        (DISK_BOUND, [(LAYERWISE, policy) for policy in in_ram], _ram_blocks, [0, 3, 6]),
    ):
        machine = rated(**rates)
        budgets = (_budget(run, machine, device=device, ram=ram) for device, ram in fits)
        plans = [plan_offload(run, machine, each) for each in budgets]
        assert [count(plan) for plan in plans] == expected
        totals = [plan.total_s for plan in plans]
        assert totals == sorted(set(totals), reverse=True)


def test_no_more_ram_blocks_than_help():
    """At 1.1 s a read and 1 s a visit, most blocks may come from the file.

    Five blocks fit into RAM. One expert has no switch.
    """
    run = run_shape(**ALONE)
    machine = rated(copy=0.1, read=1.1)
    five_in_ram = replace(LAYERWISE, source="pinned", ram_blocks=5)
    chosen = plan_offload(run, machine, _budget(run, machine, device=LAYERWISE, ram=five_in_ram))
    assert 0 < _ram_blocks(chosen) < 5
    assert "switch" not in chosen.reason
    assert predicted(run, machine, five_in_ram).total_s == chosen.total_s
    fewer = replace(five_in_ram, ram_blocks=_ram_blocks(chosen) - 1)
    assert predicted(run, machine, fewer).total_s > chosen.total_s


def test_tokens_are_taken_in_parts_only_where_they_do_not_fit():
    run = run_shape(tokens=100_000)
    machine = rated()
    whole = needs_of(run, machine, LAYERWISE)
    fits = plan_offload(run, machine, Budgets(vram_bytes=whole.device_bytes))
    assert fits.policy.chunk_tokens is None
    parts = plan_offload(run, machine, Budgets(vram_bytes=whole.device_bytes - 1))
    assert parts.policy.chunk_tokens == 32768
    assert parts.device_bytes < whole.device_bytes
    assert parts.total_s > fits.total_s
    assert "32768 of 100000 tokens at once, to fit into memory" in parts.reason


def test_error_for_too_little_memory():
    run = run_shape()
    machine = rated()
    smallest = needs_of(run, machine, LAYERWISE)
    with pytest.raises(DoesNotFitError) as refused:
        plan_offload(run, machine, Budgets(vram_bytes=smallest.device_bytes - 1))
    assert smallest.describe_device() in str(refused.value)
    assert "give more, or make the video smaller or shorter" in str(refused.value)
    with pytest.raises(DoesNotFitError, match="needs 2 slots of"):
        plan_offload(run, machine, Budgets(ram_bytes=smallest.host_bytes - 1))
    budgets = Budgets(vram_bytes=smallest.device_bytes, ram_bytes=smallest.host_bytes)
    chosen = plan_offload(run, machine, budgets)
    kinds = {misfit.policy.kind for misfit in chosen.misfits}
    assert kinds == {"layerwise", "block_swap", "resident"}
    shortage = memory_budget(machine, budgets).shortage
    for misfit in chosen.misfits:
        assert misfit.shortage == shortage(needs_of(run, machine, misfit.policy))


def test_the_reason_lists_streaming_stall_and_the_switch():
    run = run_shape()
    machine = rated(**DISK_BOUND)
    ram = replace(LAYERWISE, source="pinned", ram_blocks=4)
    chosen = plan_offload(run, machine, _budget(run, machine, device=LAYERWISE, ram=ram))
    assert chosen.policy == ram
    block_gb = run.blocks.stored_bytes / 1e9
    stalls = [step.stall_s for step in chosen.timeline.steps]
    switch_s = stalls[4] - median(stalls[5:])
    assert chosen.candidates[0].switch_s == pytest.approx(switch_s)
    assert switch_s > 1
    stall = chosen.timeline.stall_s / chosen.timeline.wall_s
    for words in (
        f"8 of 8 blocks stream: {block_gb:.1f} GB/s needed, ",
        f"the bus delivers {10 * block_gb:.1f}; ",
        f"; {block_gb / 2:.1f} GB/s needed from files, the disk delivers {block_gb / 2:.1f}; ",
        f"{100 * stall:.1f} % stall predicted",
    ):
        assert words in chosen.reason
    assert chosen.reason.endswith(f"switch +{switch_s:.1f} s; multiplied in bf16")


def _reason(run: RunShape, machine: Machine) -> str:
    return plan_reason(run.costs(machine), machine, predicted(run, machine, LAYERWISE))


@pytest.mark.parametrize(
    ("linear_format", "compute_dtype", "int8", "words"),
    [
        ("", "bfloat16", 3.0, "multiplied in bf16"),
        ("", "float32", None, "multiplied in fp32"),
        ("int8", "float16", 2.96, "in int8 at 3.0 x the rate of fp16, linear layers only"),
        ("int8", "bfloat16", None, "in int8 at the rate of bf16, because its own is not known"),
    ],
)
def test_the_reason_ends_with_the_assumed_precision(linear_format, compute_dtype, int8, words):
    run = run_shape(linear_format=linear_format, compute_dtype=compute_dtype)
    assert _reason(run, rated(linear_speedups={"int8": int8} if int8 else {})).endswith(words)


def test_a_gpu_decodes_while_it_computes_and_a_cpu_between():
    run = run_shape(stored_bytes=10**9, file_bytes=10**9)
    for machine, per_block_s in ((rated(), 1.0), (rated_cpu(), 2.0)):
        reason = _reason(run, replace(machine, decode_bytes_per_s=float(run.blocks.computed_bytes)))
        assert f"; {1 / per_block_s:.1f} GB/s needed from files" in reason


def test_a_cpu_plans_within_one_memory():
    run = run_shape()
    for read, uses_more in ((0.5, False), (2.0, True)):
        machine = rated_cpu(read=read)
        least = needs_of(run, machine, LAYERWISE).device_bytes
        room = least + 5 * run.blocks.stored_bytes
        chosen = plan_offload(run, machine, Budgets(ram_bytes=room))
        used = chosen.device_bytes + chosen.host_bytes
        assert used <= room
        assert (used > least) == uses_more
        assert "the bus delivers" not in chosen.reason


MORE_RAM = {"buffers": 4, "more": "ram", "factor": 2.0, "lanes": 1}


@settings(deadline=None, max_examples=30)
@given(
    steps=st.tuples(st.integers(0, 3), st.integers(1, 3)),
    rates=RATES_OF_BLOCKS,
    buffers=st.integers(2, 17),
    slots=st.integers(2, 18),
    more=st.sampled_from(["vram", "ram", "disk_bytes_per_s", "h2d_bytes_per_s", "flops_per_s"]),
    factor=st.floats(1.01, 4.0),
    lanes=st.integers(1, 2),
)
# 7 blocks in RAM are faster than 8.
@example(steps=(1, 2), rates={"read": 3.0, "copy": 2.0}, slots=9, **MORE_RAM)
# 5 blocks in RAM and two ahead are 0.3 % faster than 6.
@example(steps=(1, 3), rates={"read": 1.5, "copy": 1.0625}, slots=7, **MORE_RAM)
def test_more_of_anything_never_makes_it_slower(steps, rates, buffers, slots, more, factor, lanes):
    """With more RAM it is at most a little slower.

    Fewer RAM blocks than fit are tried only with the best policy. Another one may be faster with
    them.
    """
    run = run_shape(*steps, sides={"high": lanes, "low": 1})
    machine = rated(**rates)
    streaming = (buffers - 2) * run.blocks.computed_bytes
    vram = needs_of(run, machine, LAYERWISE).device_bytes + streaming
    budgets = Budgets(vram_bytes=vram, ram_bytes=slots * run.blocks.stored_bytes)
    richer = budgets
    faster = machine
    if more == "vram":
        richer = replace(budgets, vram_bytes=int(vram * factor))
    elif more == "ram":
        richer = replace(budgets, ram_bytes=(slots + 1) * run.blocks.stored_bytes)
    else:
        faster = machine.with_figures(**{more: machine.to_dict()[more] * factor})
    before = plan_offload(run, machine, budgets)
    after = plan_offload(run, faster, richer)
    assert after.total_s <= (1.005 if more == "ram" else 1.0) * before.total_s


@settings(deadline=None, max_examples=25)
@given(
    steps=st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(any),
    rates=RATES_OF_BLOCKS,
    visit=RATES,
    pick=st.randoms(),
    gpu=st.booleans(),
)
def test_no_policy_is_faster_than_its_bounds(steps, rates, visit, pick, gpu):
    block = run_shape().blocks.stored_bytes
    machine = rated(**rates, visit=visit)
    if not gpu:
        machine = rated_cpu(read=rates["read"], visit=visit, copy_bytes_per_s=block / rates["copy"])
    for stored in (block, block // 2):
        run = run_shape(*steps, stored_bytes=stored, file_bytes=stored, sides={"high": 2, "low": 1})
        for policy in pick.sample(_all_policies(run), 12):
            costs = run.costs(machine, policy.chunk_tokens)
            timeline = predicted(run, machine, policy).timeline
            assert lower_bound_s(costs, policy) <= timeline.wall_s + 1e-6
            assert last_step_bound_s(costs, policy) <= timeline.steps[-1].wall_s + 1e-6


# --- policies from a measured call ----------------------------------------------------------------

MB = 10**6
GB = 10**9
BLOCK_BYTES = ("file_bytes", "stored_bytes", "computed_bytes")


def call(nbytes: int, compute_s: float, bus: float, disk: float, **figures: Any) -> StepRecord:
    """Return the record of a call that reads and copies all blocks."""
    moved = dict.fromkeys(("bytes_moved", "read_bytes", "copied_bytes"), nbytes)
    seconds = {"wall_s": compute_s, "stall_s": 0.0, "copy_s": nbytes / bus, "read_s": nbytes / disk}
    given = {**moved, **seconds, "compute_s": compute_s, **figures}
    return StepRecord.of(index=0, expert="model", sigma=1.0, **given)


def choose(costs, record, *, vram=None, ram=None, **changes) -> PassPlan | None:
    """Plan calls like `record`. None means no limit."""
    given = {"passes": 1, "present": LAYERWISE, "has_bus": True, **changes}
    return plan_passes(costs, record, budgets=Budgets(vram_bytes=vram, ram_bytes=ram), **given)


# --- twenty blocks, a measured call ---------------------------------------------------------------

SIZES = dict.fromkeys(BLOCK_BYTES, 100 * MB)
BLOCKS = BlockCosts(stacks=("model",), blocks=20, outside_bytes=50 * MB, **SIZES)


def visits(visit_s: float, *, bus: float = 20e9, passes: int = 1) -> StepRecord:
    """Return the record of a call with 20 visits per pass."""
    return call(passes * BLOCKS.blocks * BLOCKS.stored_bytes, passes * 20 * visit_s, bus, 2e9)


plan = partial(choose, BLOCKS)


def test_the_smallest_policy_stays_where_transfers_are_hidden():
    assert plan(visits(0.2)).policy == LAYERWISE
    assert plan(changed_step(visits(0.02), bytes_moved=0)) is None


def test_one_pass_for_both_conditions_halves_a_call_of_transfers():
    """A call takes the measured time where nothing waits."""
    for visit_s, share in ((0.001, 0.5), (0.5, 1.0)):
        record = visits(visit_s, passes=2)
        small = {"vram": 350 * MB, "ram": 0}
        apart, together = (plan(record, passes=passes, **small).call_s for passes in (2, 1))
        assert together == pytest.approx(share * apart, rel=0.06)
    assert together == pytest.approx(record.compute_s)


def test_present_policy_that_does_not_fit_is_replaced():
    present = OffloadPolicy.block_swap(10)
    given = {"present": present, "ram": 0, "keep_present": False}
    assert plan(visits(0.001, passes=2), vram=600 * MB, **given).device_bytes <= 600 * MB
    assert memory_needs(BLOCKS, present, has_bus=True).device_bytes > 600 * MB
    assert plan(visits(0.001, passes=2), vram=60 * MB, **given) is None


def test_slow_disk_fills_ram_and_slow_bus_the_device():
    slow_disk = plan(visits(0.02), vram=500 * MB)
    assert (slow_disk.policy.source, slow_disk.policy.ram_blocks) == ("pinned", None)
    assert slow_disk.host_bytes == 20 * BLOCKS.stored_bytes
    slow_bus = plan(visits(0.02, bus=2.5e9), ram=0)
    assert slow_bus.policy.source == "file"
    assert slow_bus.device_bytes > 12 * BLOCKS.computed_bytes


def test_on_a_cpu_both_share_the_ram():
    record = changed_step(visits(0.02), copied_bytes=0, copy_s=0.0)
    chosen = plan(record, ram=800 * MB, has_bus=False)
    assert chosen.policy.source == "file", "the rate out of RAM was not measured"
    assert chosen.device_bytes + chosen.host_bytes <= 800 * MB


# --- image models with several block sizes --------------------------------------------------------

ACTIVATIONS = 3 * GB
DISK = 5e9
BUS = 24e9


@dataclass(frozen=True, kw_only=True)
class Model:
    """Model in bf16: megabytes in blocks and outside, and FLOPs for a 4,000-token call."""

    blocks: list[int]
    outside: int
    flops: float

    def costs(self, scale: float) -> BlockCosts:
        sizes = [int(scale * each * MB) for each in self.blocks]
        given = {"outside_bytes": self.outside * MB, **dict.fromkeys(BLOCK_BYTES, max(sizes))}
        each = tuple(BlockSize(size, size, size) for size in sizes)
        return BlockCosts(stacks=("model",), blocks=len(sizes), sizes=each, **given)


def disk_call(nbytes: int, compute_s: float) -> StepRecord:
    """Return the record of a call that waits where the disk takes longer than computing."""
    wall_s = max(compute_s, nbytes / DISK)
    return call(nbytes, compute_s, BUS, DISK, wall_s=wall_s, stall_s=wall_s - compute_s)


MODELS = {
    "Qwen-Image": Model(blocks=[679] * 60, outside=90, flops=1.05e14),
    "Z-Image": Model(blocks=[362] * 2 + [354] * 2 + [362] * 30, outside=20, flops=5.7e13),
    "Krea 2": Model(blocks=[172] * 4 + [868] * 28, outside=640, flops=1.15e14),
    "FLUX.2 dev": Model(blocks=[1963] * 8 + [981] * 48, outside=1610, flops=2.6e14),
    "Klein 9B": Model(blocks=[872] * 8 + [436] * 24, outside=700, flops=7.5e13),
    "Klein 4B": Model(blocks=[491] * 5 + [245] * 20, outside=390, flops=3.2e13),
    "Flux dev": Model(blocks=[679] * 19 + [283] * 38, outside=140, flops=8.5e13),
    "Chroma": Model(blocks=[105] * 5 + [453] * 19 + [226] * 38, outside=60, flops=7e13),
    "HiDream": Model(blocks=[21] * 49 + [848] * 16 + [611] * 32, outside=70, flops=1.2e14),
}


CARDS = {"12 GB bf16": (12 * GB, 55e12, 1.0), "12 GB int8": (12 * GB, 100e12, 0.5)}
CARDS |= {"24 GB bf16": (24 * GB, 150e12, 1.0), "24 GB int8": (24 * GB, 280e12, 0.5)}
"""Bytes of memory, FLOPs per second, and bytes per byte in bf16."""
# Every model with and without RAM, and every card with both.
CASES = pytest.mark.parametrize(
    ("name", "card", "ram"),
    [
        (name, [*CARDS][(at + 2 * with_ram) % 4], with_ram * 28 * GB)
        for at, name in enumerate(MODELS)
        for with_ram in (0, 1)
    ],
)


@CASES
def test_a_call_takes_the_time_of_its_slowest_part(name, card, ram):
    """Computing, or moving bytes without room on the device or in RAM, over bus or disk.

    Bytes that do not fit into RAM count at the rate of the disk. An ideal with all of them in RAM
    is the same where they fit, and cannot be reached elsewhere.
    """
    vram, flops_per_s, scale = CARDS[card]
    costs = MODELS[name].costs(scale)
    compute_s = MODELS[name].flops / flops_per_s
    nbytes = sum(size.stored for size in costs.sizes)
    chosen = choose(costs, disk_call(nbytes, compute_s), vram=vram - ACTIVATIONS, ram=ram)
    two_blocks = 2 * costs.stored_bytes
    room = vram - ACTIVATIONS - costs.outside_bytes
    streamed = 0 if nbytes <= room else nbytes - max(0, room - two_blocks)
    in_ram = ram if streamed <= ram else max(0, ram - two_blocks)
    assert chosen.call_s <= 1.1 * max(compute_s, streamed / BUS, max(0, streamed - in_ram) / DISK)
    assert chosen.device_bytes <= vram - ACTIVATIONS
    assert chosen.host_bytes <= max(ram, two_blocks)


@CASES
@pytest.mark.parametrize("images", [1, 12])
def test_a_first_call_takes_the_time_of_its_slowest_part(name, card, ram, images):
    """Computing, or moving all bytes: no policy saves any, so no rate could improve the first one.

    Reading takes longer than one image, and less time than twelve in a batch.
    """
    _, flops_per_s, scale = CARDS[card]
    costs = MODELS[name].costs(scale)
    compute_s = images * MODELS[name].flops / flops_per_s
    nbytes = sum(size.stored for size in costs.sizes)
    disk_s = nbytes / DISK
    assert (disk_s < compute_s) == (images > 1)
    run = measured_costs(costs, disk_call(nbytes, compute_s), 1, has_bus=True)
    first, *_, later = predict(run, Candidates.first_policy(costs, ram)).timeline.steps
    assert first.wall_s <= 1.2 * max(compute_s, disk_s, nbytes / BUS)
    assert first.wall_s <= 1.2 * max(later.wall_s, disk_s)


@pytest.mark.parametrize("name", MODELS)
def test_memory_is_that_of_the_blocks(name):
    """All blocks on the device, or in RAM with two of the largest on the device."""
    costs = MODELS[name].costs(1.0)
    nbytes = sum(size.stored for size in costs.sizes)
    assert sum(memory_needs(costs, OffloadPolicy.resident(), has_bus=True).buffers) <= 1.05 * nbytes
    streamed = memory_needs(costs, OffloadPolicy.layerwise(1, source="pinned"), has_bus=True)
    assert streamed.buffers == (costs.computed_bytes,) * 2
    assert streamed.host_bytes == nbytes
