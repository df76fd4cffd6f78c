"""Policies chosen from a measured model call."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wanstream.plan import MeasuredBlocks, choose_measured
from wanstream.schema import OffloadPolicy, StepRecord

MB = 10**6
BLOCKS = MeasuredBlocks(
    stack="model",
    blocks=20,
    stored_bytes=100 * MB,
    buffer_bytes=100 * MB,
    outside_bytes=50 * MB,
    decodes=False,
    has_bus=True,
)
LAYERWISE = OffloadPolicy.layerwise(1)


def call(*, visit_s: float, copy_gb_per_s: float = 20, disk_gb_per_s: float = 2) -> StepRecord:
    """Return the record of a call of 20 visits that has read and copied every block."""
    nbytes = BLOCKS.blocks * BLOCKS.stored_bytes
    return StepRecord(
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


def choose(record: StepRecord, *, vram: float, ram: float, blocks: MeasuredBlocks = BLOCKS) -> OffloadPolicy:
    chosen = choose_measured(blocks, record, passes=1, present=LAYERWISE, device_bytes=vram, host_bytes=ram)
    assert chosen is not None
    assert blocks.device_bytes(chosen.policy) <= vram
    return chosen.policy


def test_the_smallest_policy_stays_where_transfers_are_hidden() -> None:
    assert choose(call(visit_s=0.2), vram=1e12, ram=1e12) == LAYERWISE


def two_passes(record: StepRecord) -> StepRecord:
    """Return the record of a call of two passes like that of `record`."""
    doubled = ("wall_s", "compute_s", "bytes_moved", "read_bytes", "copied_bytes", "copy_s", "read_s")
    return replace(record, **{name: 2 * getattr(record, name) for name in doubled})


@pytest.mark.parametrize(("visit_s", "share"), [(0.001, 0.5), (0.5, 1.0)])
def test_a_pass_for_both_conditions_halves_a_call_where_transfers_take_the_time(visit_s: float, share: float) -> None:
    record = two_passes(call(visit_s=visit_s))
    given = {"present": LAYERWISE, "device_bytes": 350 * MB, "host_bytes": 0}
    apart, together = (choose_measured(BLOCKS, record, passes=passes, **given) for passes in (2, 1))  # type: ignore[arg-type]
    assert apart is not None
    assert together is not None
    assert together.call_s == pytest.approx(share * apart.call_s, rel=0.06)


def test_a_call_takes_the_measured_time_where_nothing_waits() -> None:
    record = two_passes(call(visit_s=0.5))
    for passes in (1, 2, 3):
        chosen = choose_measured(BLOCKS, record, passes=passes, present=LAYERWISE, device_bytes=350 * MB, host_bytes=0)
        assert chosen is not None
        assert chosen.call_s == pytest.approx(record.compute_s)


def test_a_present_policy_that_does_not_fit_is_replaced_by_a_smaller_one_or_by_none() -> None:
    record, present = two_passes(call(visit_s=0.001)), OffloadPolicy.block_swap(10)
    given = {"passes": 1, "present": present, "host_bytes": 0, "keep_present": False}
    chosen = choose_measured(BLOCKS, record, device_bytes=600 * MB, **given)  # type: ignore[arg-type]
    assert chosen is not None
    assert chosen.device_bytes <= 600 * MB < BLOCKS.device_bytes(present)
    assert choose_measured(BLOCKS, record, device_bytes=60 * MB, **given) is None  # type: ignore[arg-type]


def test_blocks_go_to_ram_where_the_disk_is_slow_and_to_the_device_where_the_bus_is() -> None:
    slow_disk = choose(call(visit_s=0.02), vram=500 * MB, ram=1e12)
    assert (slow_disk.source, slow_disk.ram_blocks) == ("pinned", 20)
    slow_bus = choose(call(visit_s=0.02, copy_gb_per_s=2.5), vram=1e12, ram=0)
    assert slow_bus.source == "file"
    assert BLOCKS.device_bytes(slow_bus) > 12 * BLOCKS.buffer_bytes


@pytest.mark.parametrize("vram", [350 * MB, 900 * MB, 2000 * MB])
@pytest.mark.parametrize("ram", [0, 700 * MB])
def test_policies_stay_within_both_budgets(vram: int, ram: int) -> None:
    policy = choose(call(visit_s=0.02), vram=vram, ram=ram)
    assert BLOCKS.host_bytes(policy) <= max(ram, 2 * BLOCKS.stored_bytes)


def test_on_a_cpu_both_share_the_ram() -> None:
    on_cpu = replace(BLOCKS, has_bus=False)
    record = replace(call(visit_s=0.02), copied_bytes=0, copy_s=0.0)
    policy = choose(record, vram=1e12, ram=800 * MB, blocks=on_cpu)
    assert policy.source == "file", "the rate out of RAM was not measured"
    assert on_cpu.device_bytes(policy) <= 800 * MB


def test_a_call_that_moved_nothing_says_nothing() -> None:
    record = replace(call(visit_s=0.02), bytes_moved=0)
    given = {"passes": 1, "present": LAYERWISE, "device_bytes": 1e12, "host_bytes": 1e12}
    assert choose_measured(BLOCKS, record, **given) is None  # type: ignore[arg-type]


def test_blocks_without_a_size_are_refused() -> None:
    with pytest.raises(ValueError, match="stored_bytes is 0"):
        replace(BLOCKS, stored_bytes=0)
