"""Policies for image models with several block sizes, on two imagined cards."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from wanstream.plan import BlockCosts, Budgets, memory_needs, plan_passes
from wanstream.plan.programs import BlockSize
from wanstream.schema import OffloadPolicy
from wanstream.schema.records import StepRecord

MB, GB = 10**6, 10**9
ACTIVATIONS = 3 * GB
DISK, BUS = 5e9, 24e9


@dataclass(frozen=True, kw_only=True)
class Model:
    """Model in bf16: megabytes in blocks and outside, and FLOPs for a 4,000-token call."""

    blocks: list[int]
    outside: int
    flops: float

    def costs(self, scale: float) -> BlockCosts:
        sizes = tuple(BlockSize(*[int(scale * each * MB)] * 3) for each in self.blocks)
        largest = max(sizes)
        return BlockCosts(
            stacks=("model",),
            blocks=len(sizes),
            file_bytes=largest.file,
            stored_bytes=largest.stored,
            computed_bytes=largest.computed,
            outside_bytes=self.outside * MB,
            sizes=sizes,
        )


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


@pytest.mark.parametrize("ram", [28 * GB, 0], ids=["32 GB RAM", "disk only"])
@pytest.mark.parametrize(
    ("vram", "flops_per_s", "scale"),
    [(12 * GB, 55e12, 1.0), (12 * GB, 100e12, 0.5), (24 * GB, 150e12, 1.0), (24 * GB, 280e12, 0.5)],
    ids=["12 GB bf16", "12 GB int8", "24 GB bf16", "24 GB int8"],
)
@pytest.mark.parametrize("name", MODELS)
def test_a_call_takes_the_time_of_its_slowest_part(
    name: str, vram: int, flops_per_s: float, scale: float, ram: int
) -> None:
    """Computing, or moving bytes without room on the device or in RAM, over bus or disk."""
    costs = MODELS[name].costs(scale)
    nbytes = sum(size.stored for size in costs.sizes)
    compute_s = MODELS[name].flops / flops_per_s
    first = StepRecord.of(
        index=0,
        expert="model",
        sigma=1.0,
        wall_s=max(compute_s, nbytes / DISK),
        compute_s=compute_s,
        stall_s=max(0.0, nbytes / DISK - compute_s),
        bytes_moved=nbytes,
        read_bytes=nbytes,
        copied_bytes=nbytes,
        copy_s=nbytes / BUS,
        read_s=nbytes / DISK,
    )
    chosen = plan_passes(
        costs,
        first,
        passes=1,
        present=OffloadPolicy.layerwise(1),
        budgets=Budgets(vram_bytes=vram - ACTIVATIONS, ram_bytes=ram),
        has_bus=True,
    )
    assert chosen is not None
    two_blocks = 2 * costs.stored_bytes
    room = vram - ACTIVATIONS - costs.outside_bytes
    streamed = 0 if nbytes <= room else nbytes - max(0, room - two_blocks)
    in_ram = ram if streamed <= ram else max(0, ram - two_blocks)
    ideal_s = max(compute_s, streamed / BUS, max(0, streamed - in_ram) / DISK)
    assert chosen.call_s <= 1.1 * ideal_s
    assert chosen.device_bytes <= vram - ACTIVATIONS


@pytest.mark.parametrize("name", MODELS)
def test_memory_is_that_of_the_blocks(name: str) -> None:
    """All blocks on the device, or in RAM with two of the largest on the device."""
    costs = MODELS[name].costs(1.0)
    nbytes = sum(size.stored for size in costs.sizes)
    resident = memory_needs(costs, OffloadPolicy.resident(), has_bus=True)
    assert sum(resident.buffers) <= 1.05 * nbytes
    streamed = memory_needs(costs, OffloadPolicy.layerwise(1, source="pinned"), has_bus=True)
    assert streamed.buffers == (costs.computed_bytes,) * 2
    assert streamed.host_bytes == nbytes
