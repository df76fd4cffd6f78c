"""The chosen policy is the fastest that fits, another one if a budget or a rate changes that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from statistics import median

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from wanstream.plan import Budgets, DoesNotFitError, Machine, OffloadPlan, plan_offload
from wanstream.plan.candidates import device_policies, lower_bound_s
from wanstream.plan.describe import plan_reason
from wanstream.plan.memory import memory_budget
from wanstream.schema import OffloadPolicy
from wanstream.shapes import RunShape, StepShape
from wanstream.tests.support.plan_fixtures import needs_of, predicted, run_shape

Rated = Callable[..., Machine]

BUS_BOUND = {"copy": 1.5, "read": 3.0}
"""Streaming all blocks keeps bus and disk busier than the device."""
DISK_BOUND = {"copy": 0.1, "read": 2.0}
"""Streaming all blocks from the file takes twice as long as computing."""
RATES = st.floats(0.05, 4.0)


def _all_policies(run: RunShape) -> list[OffloadPolicy]:
    """Return all policies, except variants in `chunk_tokens`."""
    blocks = run.blocks.blocks
    found = []
    for policy in device_policies(blocks):
        pinned = replace(policy, source="pinned")
        found += [policy, pinned]
        found += [replace(pinned, ram_blocks=ram_blocks) for ram_blocks in range(1, 2 * blocks)]
    return found


def _budget(
    run: RunShape, machine: Machine, *, device: OffloadPolicy, ram: OffloadPolicy | None = None
) -> Budgets:
    """Just enough for `device` on the device and for `ram` (default: the same) in RAM."""
    return Budgets(
        vram_bytes=needs_of(run, machine, device).device_bytes,
        ram_bytes=needs_of(run, machine, ram or device).host_bytes,
    )


def _residents(chosen: OffloadPlan, blocks: int = 8) -> int:
    policy = chosen.policy
    return {"layerwise": 0, "block_swap": blocks - policy.blocks_to_swap, "resident": 2 * blocks}[
        policy.kind
    ]


def _ram_blocks(chosen: OffloadPlan) -> int:
    policy = chosen.policy
    if policy.source == "file":
        return 0
    return 16 if policy.ram_blocks is None else policy.ram_blocks


def test_the_chosen_one_is_the_fastest_candidate_and_nothing_that_fits_is_much_faster(
    rate_machine: Rated,
) -> None:
    run = run_shape(3, 3)
    policy = OffloadPolicy.block_swap(5, 1)
    for rates, ram_blocks in product((BUS_BOUND, DISK_BOUND, {"copy": 0.4, "read": 0.9}), (0, 5)):
        machine = rate_machine(**rates)
        ram = replace(policy, source="pinned", ram_blocks=ram_blocks) if ram_blocks else policy
        budgets = _budget(run, machine, device=policy, ram=ram)
        chosen = plan_offload(run, machine, budgets)
        assert chosen.candidates[0].policy == chosen.policy
        assert chosen.total_s == min(candidate.total_s for candidate in chosen.candidates)
        assert chosen.timeline.wall_s == pytest.approx(chosen.total_s, abs=1e-3)
        five_in_ram = memory_budget(machine, budgets)
        fitting = [
            other
            for other in _all_policies(run)
            if five_in_ram.shortage(needs_of(run, machine, other)) is None
        ]
        assert chosen.policy in fitting
        # Not every smaller RAM block count is tried, and a larger one may be a little slower.
        assert chosen.total_s <= 1.005 * min(
            predicted(run, machine, other).total_s for other in fitting
        )


def test_every_candidate_fits_and_has_its_own_simulated_total(rate_machine: Rated) -> None:
    run, machine = run_shape(), rate_machine(**BUS_BOUND)
    half = replace(OffloadPolicy.layerwise(1), source="pinned", ram_blocks=8)
    budgets = _budget(run, machine, device=OffloadPolicy.block_swap(3, 1), ram=half)
    chosen = plan_offload(run, machine, budgets)
    assert len(chosen.candidates) > 5
    for candidate in chosen.candidates:
        needs, prediction = (
            needs_of(run, machine, candidate.policy),
            predicted(run, machine, candidate.policy),
        )
        assert memory_budget(machine, budgets).shortage(needs) is None
        assert (candidate.device_bytes, candidate.host_bytes) == (
            needs.device_bytes,
            needs.host_bytes,
        )
        assert candidate.total_s == round(prediction.timeline.wall_s, 3)
        assert candidate.stall_s == prediction.timeline.stall_s
    assert list(chosen.candidates) == sorted(
        chosen.candidates, key=lambda candidate: candidate.rank
    )


def test_where_nothing_waits_the_smallest_memory_is_chosen(rate_machine: Rated) -> None:
    chosen = plan_offload(run_shape(), rate_machine(), Budgets())
    assert chosen.policy == OffloadPolicy.layerwise(1)
    # 64 visits take 1 s each. The first block is read, then copied.
    assert chosen.total_s == 64.6


def test_more_device_memory_is_used_where_the_bus_is_slow(rate_machine: Rated) -> None:
    run, machine = run_shape(), rate_machine(**BUS_BOUND)
    everything = replace(OffloadPolicy.layerwise(1), source="pinned")
    choices = [
        OffloadPolicy.layerwise(1),
        *(OffloadPolicy.block_swap(left, 1) for left in (6, 4, 2)),
    ]
    plans = [
        plan_offload(run, machine, _budget(run, machine, device=fits, ram=everything))
        for fits in choices
    ]
    # Half the transfers hide behind compute. The rest happens before the switch.
    assert [_residents(plan) for plan in plans] == [0, 2, 4, 4]
    assert plans[3].policy.prefetch_blocks > plans[2].policy.prefetch_blocks
    assert [plan.total_s for plan in plans] == sorted(
        {plan.total_s for plan in plans}, reverse=True
    )


def test_more_ram_is_used_where_the_disk_is_slow(rate_machine: Rated) -> None:
    run, machine = run_shape(), rate_machine(**DISK_BOUND)
    small = OffloadPolicy.layerwise(1)
    pinned = replace(small, source="pinned")
    plans = [
        plan_offload(run, machine, _budget(run, machine, device=small, ram=ram))
        for ram in (small, replace(pinned, ram_blocks=3), replace(pinned, ram_blocks=6))
    ]
    assert [_ram_blocks(plan) for plan in plans] == [0, 3, 6]
    assert [plan.total_s for plan in plans] == sorted(
        {plan.total_s for plan in plans}, reverse=True
    )


@pytest.mark.parametrize(
    ("slow", "fast", "memory"),
    [
        ({"copy": 2.5, "read": 0.5}, {"copy": 0.2, "read": 0.5}, "residents"),
        ({"copy": 0.1, "read": 2.0}, {"copy": 0.1, "read": 0.5}, "ram_blocks"),
        (
            {"copy": 0.1, "read": 2.0, "visit": 1.0},
            {"copy": 0.1, "read": 2.0, "visit": 9.0},
            "ram_blocks",
        ),
    ],
    ids=["bus", "disk", "compute"],
)
def test_a_rate_changes_the_choice(
    rate_machine: Rated, slow: dict[str, float], fast: dict[str, float], memory: str
) -> None:
    run = run_shape()
    budgets = _budget(
        run, rate_machine(), device=OffloadPolicy.block_swap(4, 1), ram=OffloadPolicy.resident()
    )
    budgets = replace(budgets, ram_bytes=8 * run.blocks.stored_bytes)
    before, after = (plan_offload(run, rate_machine(**rates), budgets) for rates in (slow, fast))
    count = _residents if memory == "residents" else _ram_blocks
    assert count(before) > count(after) == 0


def test_no_more_ram_blocks_than_help(rate_machine: Rated) -> None:
    """At 1.1 s a read and 1 s a visit, most blocks may come from the file.

    Five blocks fit into RAM.
    """
    run = run_shape(steps=[StepShape(expert="low")] * 8, sides={"low": 1})
    machine, small = rate_machine(copy=0.1, read=1.1), OffloadPolicy.layerwise(1)
    five_in_ram = replace(small, source="pinned", ram_blocks=5)
    chosen = plan_offload(run, machine, _budget(run, machine, device=small, ram=five_in_ram))
    assert 0 < _ram_blocks(chosen) < 5
    assert predicted(run, machine, five_in_ram).total_s == chosen.total_s
    fewer = replace(five_in_ram, ram_blocks=_ram_blocks(chosen) - 1)
    assert predicted(run, machine, fewer).total_s > chosen.total_s


def test_tokens_are_taken_in_parts_only_where_they_do_not_fit(rate_machine: Rated) -> None:
    run = run_shape(tokens=100_000)
    machine = rate_machine()
    whole = needs_of(run, machine, OffloadPolicy.layerwise(1))
    fits = plan_offload(run, machine, Budgets(vram_bytes=whole.device_bytes))
    assert fits.policy.chunk_tokens is None
    parts = plan_offload(run, machine, Budgets(vram_bytes=whole.device_bytes - 1))
    assert parts.policy.chunk_tokens == 32768
    assert parts.device_bytes < whole.device_bytes
    assert parts.total_s > fits.total_s
    assert "32768 of 100000 tokens at once, to fit into memory" in parts.reason


def test_the_error_for_too_little_memory_has_numbers_and_a_remedy(rate_machine: Rated) -> None:
    run, machine = run_shape(), rate_machine()
    smallest = needs_of(run, machine, OffloadPolicy.layerwise(1))
    with pytest.raises(DoesNotFitError) as refused:
        plan_offload(run, machine, Budgets(vram_bytes=smallest.device_bytes - 1))
    assert smallest.describe_device() in str(refused.value)
    assert "give more, or make the video smaller or shorter" in str(refused.value)
    with pytest.raises(DoesNotFitError, match="needs 2 slots of"):
        plan_offload(run, machine, Budgets(ram_bytes=smallest.host_bytes - 1))
    chosen = plan_offload(
        run, machine, Budgets(vram_bytes=smallest.device_bytes, ram_bytes=smallest.host_bytes)
    )
    assert {misfit.policy.kind for misfit in chosen.misfits} == {
        "layerwise",
        "block_swap",
        "resident",
    }
    for misfit in chosen.misfits:
        assert misfit.shortage == memory_budget(
            machine, Budgets(vram_bytes=smallest.device_bytes, ram_bytes=smallest.host_bytes)
        ).shortage(needs_of(run, machine, misfit.policy))


def test_the_reason_lists_streaming_stall_and_the_switch(rate_machine: Rated) -> None:
    run, machine = run_shape(), rate_machine(**DISK_BOUND)
    small = OffloadPolicy.layerwise(1)
    ram = replace(small, source="pinned", ram_blocks=4)
    chosen = plan_offload(run, machine, _budget(run, machine, device=small, ram=ram))
    assert chosen.policy == ram
    block_gb = run.blocks.stored_bytes / 1e9
    assert (
        f"8 of 8 blocks stream: {block_gb:.1f} GB/s needed, the bus delivers {10 * block_gb:.1f}; "
        in chosen.reason
    )
    assert (
        f"; {block_gb / 2:.1f} GB/s needed from files, the disk delivers {block_gb / 2:.1f}; "
        in chosen.reason
    )
    assert (
        f"{100 * chosen.timeline.stall_s / chosen.timeline.wall_s:.1f} % stall predicted"
        in chosen.reason
    )
    stalls = [step.stall_s for step in chosen.timeline.steps]
    switch_s = stalls[4] - median(stalls[5:])
    assert chosen.candidates[0].switch_s == pytest.approx(switch_s)
    assert switch_s > 1
    assert chosen.reason.endswith(f"switch +{switch_s:.1f} s; multiplied in bf16")


@pytest.mark.parametrize(
    ("linear_format", "compute_dtype", "speedups", "words"),
    [
        ("", "bfloat16", {"int8": 3.0}, "multiplied in bf16"),
        ("", "float32", {}, "multiplied in fp32"),
        (
            "int8",
            "float16",
            {"int8": 2.96},
            "multiplied in int8 at 3.0 x the rate of fp16, linear layers only",
        ),
        (
            "int8",
            "bfloat16",
            {},
            "multiplied in int8 at the rate of bf16, because its own is not known",
        ),
    ],
)
def test_the_reason_ends_with_the_assumed_precision(
    linear_format: str,
    compute_dtype: str,
    speedups: dict[str, float],
    words: str,
    rate_machine: Rated,
) -> None:
    run = run_shape(linear_format=linear_format, compute_dtype=compute_dtype)
    machine = rate_machine(linear_speedups=speedups)
    assert plan_reason(
        run.costs(machine), machine, predicted(run, machine, OffloadPolicy.layerwise(1))
    ).endswith(f"; {words}")


def test_a_gpu_decodes_while_it_computes_and_a_cpu_between(
    rate_machine: Rated, rate_cpu: Rated
) -> None:
    run = run_shape(stored_bytes=10**9, file_bytes=10**9)
    for machine, per_block_s in ((rate_machine(), 1.0), (rate_cpu(), 2.0)):
        slow = replace(
            machine, decode_bytes_per_s=float(run.blocks.computed_bytes)
        )  # 1 s per block
        reason = plan_reason(
            run.costs(slow), slow, predicted(run, slow, OffloadPolicy.layerwise(1))
        )
        assert f"; {1 / per_block_s:.1f} GB/s needed from files" in reason


def test_one_expert_has_no_switch(rate_machine: Rated) -> None:
    run = run_shape(steps=[StepShape(expert="low")] * 3, sides={"low": 1})
    chosen = plan_offload(run, rate_machine(**DISK_BOUND), Budgets())
    assert "switch" not in chosen.reason
    assert _ram_blocks(chosen) == 8 or chosen.policy.ram_blocks is None


def test_a_cpu_plans_within_one_memory(rate_cpu: Rated) -> None:
    run = run_shape()
    for changes in ({"read": 0.5}, {"read": 2.0}):
        machine = rate_cpu(**changes)
        small = needs_of(run, machine, OffloadPolicy.layerwise(1))
        budgets = Budgets(ram_bytes=small.device_bytes + 5 * run.blocks.stored_bytes)
        chosen = plan_offload(run, machine, budgets)
        assert (
            chosen.device_bytes + chosen.host_bytes
            <= small.device_bytes + 5 * run.blocks.stored_bytes
        )
        used = chosen.device_bytes + chosen.host_bytes - small.device_bytes
        assert (used > 0) == (changes["read"] > 1)
        assert "the bus delivers" not in chosen.reason


@settings(deadline=None, max_examples=40)
@given(
    high=st.integers(0, 3),
    low=st.integers(1, 3),
    read=RATES,
    copy=RATES,
    buffers=st.integers(2, 17),
    slots=st.integers(2, 18),
    more=st.sampled_from(["vram", "disk", "bus", "compute"]),
    factor=st.floats(1.01, 4.0),
    guided=st.booleans(),
)
def test_more_of_anything_never_makes_it_slower(
    rate_machine: Rated,
    high: int,
    low: int,
    read: float,
    copy: float,
    buffers: int,
    slots: int,
    more: str,
    factor: float,
    guided: bool,
) -> None:
    run = run_shape(high, low, sides={"high": 2 if guided else 1, "low": 1})
    machine = rate_machine(read=read, copy=copy)
    needs = needs_of(run, machine, OffloadPolicy.layerwise(1))
    vram = needs.device_bytes + (buffers - 2) * run.blocks.computed_bytes
    budgets = Budgets(vram_bytes=vram, ram_bytes=slots * run.blocks.stored_bytes)
    richer, faster = budgets, machine
    if more == "vram":
        richer = replace(budgets, vram_bytes=int(vram * factor))
    elif more == "disk":
        faster = replace(machine, disk_bytes_per_s=machine.disk_bytes_per_s * factor)
    elif more == "bus":
        faster = machine.with_figures(h2d_bytes_per_s=machine.load_bytes_per_s * factor)
    else:
        faster = replace(machine, flops_per_s=machine.flops_per_s * factor)
    before, after = plan_offload(run, machine, budgets), plan_offload(run, faster, richer)
    assert after.total_s <= before.total_s


@settings(deadline=None, max_examples=30)
@given(
    high=st.integers(1, 3), low=st.integers(1, 3), read=RATES, copy=RATES, slots=st.integers(2, 17)
)
@example(high=1, low=2, read=3.0, copy=2.0, slots=9)  # 7 blocks in RAM are faster than 8
@example(
    high=1, low=3, read=1.5, copy=1.0625, slots=7
)  # 5 blocks in RAM and two ahead are 0.3 % faster than 6
def test_more_ram_makes_it_at_most_a_little_slower(
    rate_machine: Rated, high: int, low: int, read: float, copy: float, slots: int
) -> None:
    run, machine = run_shape(high, low), rate_machine(read=read, copy=copy)
    needs = needs_of(run, machine, OffloadPolicy.block_swap(6, 1))
    before, after = (
        plan_offload(
            run,
            machine,
            Budgets(vram_bytes=needs.device_bytes, ram_bytes=count * run.blocks.stored_bytes),
        )
        for count in (slots, slots + 1)
    )
    # Fewer RAM blocks than fit are tried only with the best policy. Another one may be faster
    # with them.
    assert after.total_s <= 1.005 * before.total_s


@settings(deadline=None, max_examples=60)
@given(
    high=st.integers(0, 3),
    low=st.integers(0, 3),
    read=RATES,
    copy=RATES,
    visit=RATES,
    pick=st.randoms(),
    gpu=st.booleans(),
)
def test_no_policy_is_faster_than_its_bound(
    rate_machine: Rated,
    rate_cpu: Rated,
    high: int,
    low: int,
    read: float,
    copy: float,
    visit: float,
    pick: object,
    gpu: bool,
) -> None:
    assume(high + low)
    block = run_shape().blocks.stored_bytes
    machine = (
        rate_machine(read=read, copy=copy, visit=visit)
        if gpu
        else rate_cpu(read=read, visit=visit, copy_bytes_per_s=block / copy)
    )
    for stored in (block, block // 2):
        run = run_shape(
            high, low, stored_bytes=stored, file_bytes=stored, sides={"high": 2, "low": 1}
        )
        for policy in pick.sample(_all_policies(run), 12):  # type: ignore[attr-defined]
            assert (
                lower_bound_s(run.costs(machine, policy.chunk_tokens), policy)
                <= predicted(run, machine, policy).timeline.wall_s + 1e-6
            )
