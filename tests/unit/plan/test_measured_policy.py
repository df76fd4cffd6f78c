"""Policies chosen from a measured model call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from wanstream.plan import BlockCosts, Budgets, PassPlan, memory_needs, plan_passes
from wanstream.schema import OffloadPolicy
from wanstream.schema.records import StepRecord
from wanstream.tests.support.steps import changed_step

MB = 10**6
BLOCKS = BlockCosts(
    stacks=("model",),
    blocks=20,
    file_bytes=100 * MB,
    stored_bytes=100 * MB,
    computed_bytes=100 * MB,
    outside_bytes=50 * MB,
)
LAYERWISE = OffloadPolicy.layerwise(1)


def call(*, visit_s: float, copy_gb_per_s: float = 20, disk_gb_per_s: float = 2) -> StepRecord:
    """Return the record of a call with 20 visits, every block read and copied."""
    nbytes = BLOCKS.blocks * BLOCKS.stored_bytes
    return StepRecord.of(
        index=0,
        expert="model",
        sigma=1.0,
        wall_s=20 * visit_s,
        compute_s=20 * visit_s,
        stall_s=0.0,
        bytes_moved=nbytes,
        read_bytes=nbytes,
        copied_bytes=nbytes,
        copy_s=nbytes / copy_gb_per_s / 1e9,
        read_s=nbytes / disk_gb_per_s / 1e9,
    )


def plan(
    record: StepRecord, *, vram: int | None = None, ram: int | None = None, **changes: Any
) -> PassPlan | None:
    """Plan calls like `record`. None means no limit."""
    budgets = Budgets(vram_bytes=vram, ram_bytes=ram)
    given = {"passes": 1, "present": LAYERWISE, "has_bus": True, **changes}
    return plan_passes(BLOCKS, record, budgets=budgets, **given)


def choose(record: StepRecord, **given: Any) -> PassPlan:
    chosen = plan(record, **given)
    assert chosen is not None
    return chosen


def test_the_smallest_policy_stays_where_transfers_are_hidden() -> None:
    assert choose(call(visit_s=0.2)).policy == LAYERWISE


def two_passes(record: StepRecord) -> StepRecord:
    """Return the record of a call with two passes like `record`'s."""
    doubled = (
        "wall_s",
        "compute_s",
        "bytes_moved",
        "read_bytes",
        "copied_bytes",
        "copy_s",
        "read_s",
    )
    return changed_step(record, **{name: 2 * record.to_dict()[name] for name in doubled})


@pytest.mark.parametrize(("visit_s", "share"), [(0.001, 0.5), (0.5, 1.0)])
def test_a_pass_for_both_conditions_halves_a_call_where_transfers_take_the_time(
    visit_s: float, share: float
) -> None:
    record = two_passes(call(visit_s=visit_s))
    apart, together = (choose(record, passes=passes, vram=350 * MB, ram=0) for passes in (2, 1))
    assert together.call_s == pytest.approx(share * apart.call_s, rel=0.06)


def test_a_call_takes_the_measured_time_where_nothing_waits() -> None:
    record = two_passes(call(visit_s=0.5))
    for passes in (1, 2, 3):
        assert choose(record, passes=passes, vram=350 * MB, ram=0).call_s == pytest.approx(
            record.compute_s
        )


def test_a_present_policy_that_does_not_fit_is_replaced_by_a_smaller_one_or_by_none() -> None:
    record, present = two_passes(call(visit_s=0.001)), OffloadPolicy.block_swap(10)
    given = {"present": present, "ram": 0, "keep_present": False}
    assert choose(record, vram=600 * MB, **given).device_bytes <= 600 * MB
    assert memory_needs(BLOCKS, present, has_bus=True).device_bytes > 600 * MB
    assert plan(record, vram=60 * MB, **given) is None


def test_blocks_go_to_ram_where_the_disk_is_slow_and_to_the_device_where_the_bus_is() -> None:
    slow_disk = choose(call(visit_s=0.02), vram=500 * MB)
    assert (slow_disk.policy.source, slow_disk.policy.ram_blocks) == ("pinned", None)
    assert slow_disk.host_bytes == 20 * BLOCKS.stored_bytes
    slow_bus = choose(call(visit_s=0.02, copy_gb_per_s=2.5), ram=0)
    assert slow_bus.policy.source == "file"
    assert slow_bus.device_bytes > 12 * BLOCKS.computed_bytes


@pytest.mark.parametrize("vram", [350 * MB, 900 * MB, 2000 * MB])
@pytest.mark.parametrize("ram", [0, 700 * MB])
def test_policies_stay_within_both_budgets(vram: int, ram: int) -> None:
    chosen = choose(call(visit_s=0.02), vram=vram, ram=ram)
    assert chosen.device_bytes <= vram
    assert chosen.host_bytes <= max(ram, 2 * BLOCKS.stored_bytes)


def test_on_a_cpu_both_share_the_ram() -> None:
    record = changed_step(call(visit_s=0.02), copied_bytes=0, copy_s=0.0)
    chosen = choose(record, ram=800 * MB, has_bus=False)
    assert chosen.policy.source == "file", "the rate out of RAM was not measured"
    assert chosen.device_bytes + chosen.host_bytes <= 800 * MB


def test_a_call_that_moved_nothing_says_nothing() -> None:
    assert plan(changed_step(call(visit_s=0.02), bytes_moved=0)) is None


def test_blocks_without_a_size_are_refused() -> None:
    with pytest.raises(ValueError, match="stored_bytes is 0"):
        replace(BLOCKS, stored_bytes=0)
