"""Policies chosen from a measured model call, and for image models on two imagined cards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from wanstream.plan import Candidates, PassPlan, memory_needs, plan_passes, predict
from wanstream.plan.costs import BlockCosts, Budgets, measured_costs
from wanstream.plan.programs import BlockSize
from wanstream.schema import OffloadPolicy
from wanstream.schema.records import StepRecord
from wanstream.tests.support.sampling.steps import changed_step

MB = 10**6
GB = 10**9
LAYERWISE = OffloadPolicy.layerwise(1)
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
    with pytest.raises(ValueError, match="stored_bytes is 0"):
        replace(BLOCKS, stored_bytes=0)


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


CARDS = {
    "12 GB bf16": (12 * GB, 55e12, 1.0),
    "12 GB int8": (12 * GB, 100e12, 0.5),
    "24 GB bf16": (24 * GB, 150e12, 1.0),
    "24 GB int8": (24 * GB, 280e12, 0.5),
}
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
