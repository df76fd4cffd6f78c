"""The chosen policy is the fastest that fits, another one if a budget or a rate changes that."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from statistics import median

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wanstream.plan import Budgets, DoesNotFitError, Machine, OffloadPlan, plan_offload
from wanstream.plan.candidates import device_policies, last_step_bound_s, lower_bound_s
from wanstream.plan.describe import plan_reason
from wanstream.plan.memory import memory_budget
from wanstream.schema import OffloadPolicy
from wanstream.shapes import RunShape, StepShape
from wanstream.tests.support.plan_fixtures import needs_of, predicted, rated, rated_cpu, run_shape

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
    return Budgets(
        vram_bytes=needs_of(run, machine, device).device_bytes,
        ram_bytes=needs_of(run, machine, ram or device).host_bytes,
    )


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
    richer, faster = budgets, machine
    if more == "vram":
        richer = replace(budgets, vram_bytes=int(vram * factor))
    elif more == "ram":
        richer = replace(budgets, ram_bytes=(slots + 1) * run.blocks.stored_bytes)
    else:
        faster = machine.with_figures(**{more: machine.to_dict()[more] * factor})
    before, after = plan_offload(run, machine, budgets), plan_offload(run, faster, richer)
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
