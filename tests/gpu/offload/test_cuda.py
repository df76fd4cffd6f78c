"""The engine on a CUDA device: copying and computing in any order gives the plain result's bits.

Blocks are large enough (25 MB) for a copy to take about a millisecond, and some visits delay the
device for longer: a missing wait shows in the result.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from wanstream.block_kernels import Kernels
from wanstream.devices import DeviceRuntime, PageLockError
from wanstream.offload import (
    BlockPatch,
    Hadamard,
    Kronecker,
    OffloadEngine,
    Product,
    Rescaled,
    WeightPatch,
    attach_offload,
)
from wanstream.offload.engine.run import PACE
from wanstream.offload.formats.safetensors_header import read_header
from wanstream.offload.sources.file import FileSource
from wanstream.offload.sources.module import ModuleSource
from wanstream.offload.transfers.weight_patch import add_patch
from wanstream.plan.programs import BlockKey, step_visits
from wanstream.schema import OffloadPolicy
from wanstream.telemetry import Recorder
from wanstream.tests.support.accelerator import HAS_REAL, Accelerator
from wanstream.wan import Lane, forward_lanes
from wanstream.wan.experts.open import open_experts

BLOCKS, WIDTH = 6, 1024 if HAS_REAL else 128
BLOCK_BYTES = 2 * 3 * WIDTH * WIDTH * 4
STEPS = ["high", "high", "low", "low", "high"]
POLICIES = {
    "resident": OffloadPolicy.resident(),
    "layerwise 0": OffloadPolicy.layerwise(0),
    "layerwise 1": OffloadPolicy.layerwise(1),
    "layerwise 3": OffloadPolicy.layerwise(3),
    "block swap": OffloadPolicy.block_swap(3, 1),
    "block swap deep": OffloadPolicy.block_swap(4, 2),
    "layerwise pinned": OffloadPolicy.layerwise(1, source="pinned"),
    "block swap pinned": OffloadPolicy.block_swap(3, 2, source="pinned"),
    "some at home": replace(OffloadPolicy.layerwise(1, source="pinned"), ram_blocks=5),
    "some residents at home": replace(
        OffloadPolicy.block_swap(4, 2, source="pinned"), ram_blocks=3
    ),
}

Stacks = dict[str, nn.ModuleList]


@pytest.fixture
def stacks(make_stack: Callable[..., nn.ModuleList]) -> Stacks:
    return {
        "high": make_stack(BLOCKS, seed=1, width=WIDTH),
        "low": make_stack(BLOCKS, seed=2, width=WIDTH),
    }


@pytest.fixture
def hidden(gpu: Accelerator) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).to(gpu.device)


@pytest.fixture
def plain(
    gpu: Accelerator, stacks: Stacks, hidden: torch.Tensor
) -> Iterator[Callable[[Sequence[str]], torch.Tensor]]:
    """Return `plain(steps)`: the outputs of the same blocks, all on the device."""
    resident = {name: copy.deepcopy(stack).to(gpu.device) for name, stack in stacks.items()}

    def run(steps: Sequence[str]) -> torch.Tensor:
        value = hidden
        for name in steps:
            for block in resident[name]:
                value = block(value)
        return value

    yield run
    resident.clear()


def streamed(
    gpu: Accelerator,
    handle: OffloadEngine,
    stacks: Stacks,
    value: torch.Tensor,
    steps: Sequence[str] = STEPS,
    *,
    slow: int = 3,
) -> torch.Tensor:
    """Stream one run. Every `slow`-th visit delays the device before it reads the block."""
    with torch.inference_mode(), handle.run(step_visits(steps, handle.block_counts)) as run:
        for number, visit in enumerate(run.program.visits):
            with run.visit(*visit):
                if number % slow == 0:
                    gpu.delay()
                value = stacks[visit.expert][visit.block](value)
        assert tuple(run.fetched) == run.program.fetches
    return value


def attach(gpu: Accelerator, stacks: Stacks, policy: OffloadPolicy, **how: object) -> OffloadEngine:
    return attach_offload(stacks, policy=policy, device=gpu.device, follow_forward=False, **how)


def some_patches(strength: float, *, rank: int = 16) -> dict[BlockKey, BlockPatch]:
    """Patches for every second block in one expert and every third in the other.

    One has a full difference.
    """
    random = torch.Generator().manual_seed(rank)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) * 0.05

    patches = {}
    for name, stride in (("high", 2), ("low", 3)):
        for block in range(0, BLOCKS, stride):
            weights = {
                "up.weight": WeightPatch(
                    up=strength * draw(3 * WIDTH, rank), down=draw(rank, WIDTH)
                ),
                "down.weight": WeightPatch(
                    up=strength * draw(WIDTH, rank + block), down=draw(rank + block, 3 * WIDTH)
                ),
            }
            if block == 0:
                weights["up.weight"] = replace(
                    weights["up.weight"], full=strength * draw(3 * WIDTH, WIDTH)
                )
            if block == 3:
                weights["up.weight"] = replace(weights["up.weight"], **other_kinds(draw, strength))
                kronecker = Kronecker(
                    first=strength * draw(4, 2), second=draw(WIDTH // 4, 3 * WIDTH // 2)
                )
                weights["down.weight"] = replace(weights["down.weight"], kronecker=(kronecker,))
            patches[BlockKey(name, block)] = BlockPatch(identity=(rank, strength), weights=weights)
    return patches


def other_kinds(draw: Callable[..., torch.Tensor], strength: float) -> dict[str, object]:
    """A LoKr with factors, a LoHa, and a DoRA in each direction for `up.weight`."""
    pairs = [Product(up=draw(3 * WIDTH, 4), down=draw(4, WIDTH)) for _ in range(3)]
    second = Product(up=draw(WIDTH, 4), down=draw(4, WIDTH // 2))
    change = WeightPatch(up=pairs[2].up, down=pairs[2].down)
    magnitudes = [1 + draw(3 * WIDTH, 1), 1 + draw(1, WIDTH)]
    return {
        "kronecker": (Kronecker(first=strength * draw(3, 2), second=second),),
        "hadamard": (Hadamard(one=pairs[0], other=pairs[1]),),
        "rescaled": tuple(
            Rescaled(change=change, magnitude=each, strength=strength) for each in magnitudes
        ),
    }


def add_plainly(matrix: torch.Tensor, weight: WeightPatch) -> None:
    """Add a patch to a matrix on the device, as on arrival."""
    if weight.hadamard or weight.rescaled or weight.kronecker:
        moved = {name: part.to(matrix) for name, part in weight.parts.items()}
        add_patch(matrix.data, weight.map(lambda name, _: moved[name]))
        return
    if weight.full is not None:
        matrix.add_(weight.full.to(matrix))
    if weight.up is not None:
        matrix.copy_(torch.addmm(matrix, weight.up.to(matrix), weight.down.to(matrix)))


@pytest.fixture
def patched(
    gpu: Accelerator, stacks: Stacks, hidden: torch.Tensor
) -> Callable[[dict[BlockKey, BlockPatch]], torch.Tensor]:
    """Return `patched(patches)`: outputs of blocks on the device with patched weights."""
    originals = copy.deepcopy(stacks)

    def run(patches: dict[BlockKey, BlockPatch]) -> torch.Tensor:
        resident = {name: copy.deepcopy(stack).to(gpu.device) for name, stack in originals.items()}
        for key, patch in patches.items():
            for name, weight in patch.weights.items():
                add_plainly(resident[key.expert][key.block].get_parameter(name), weight)
        value = hidden
        for name in STEPS:
            for block in resident[name]:
                value = block(value)
        return value

    return run


@pytest.mark.parametrize("slow", [1, 3, 1000], ids=["device slow", "in turns", "bus slow"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_streamed_equals_plain(gpu, stacks, hidden, plain, slow_source, policy, slow):
    expected = plain(STEPS)
    source = slow_source(ModuleSource(stacks), seed=slow)
    with attach(gpu, stacks, policy, source=source) as handle:
        for _ in range(
            2
        ):  # the second run starts from the first one's buffers, possibly still in use
            value = streamed(gpu, handle, stacks, hidden, slow=slow)
        assert torch.equal(value, expected)


@pytest.mark.parametrize("policy", ["layerwise 1", "block swap", "resident"])
def test_every_run_may_compute_on_a_stream_of_its_own(gpu, stacks, hidden, plain, policy):
    expected = plain(STEPS)
    gpu.runtime.current_stream().synchronize()
    streams = [gpu.runtime.stream() for _ in range(3)]
    values = []
    with attach(gpu, stacks, POLICIES[policy]) as handle:
        for stream in (
            streams
        ):  # no synchronisation in between: a run starts while the one before still computes
            with gpu.runtime.on_stream(stream):
                values.append(streamed(gpu, handle, stacks, hidden))
    for stream, value in zip(streams, values, strict=True):
        stream.synchronize()
        assert torch.equal(value, expected)


@pytest.mark.parametrize("stop_at", [0, 2, 11])
@pytest.mark.parametrize("policy", ["layerwise 3", "block swap pinned"])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "slots"])
def test_a_run_cut_short_with_copies_under_way_leaves_the_engine_usable(
    gpu, stacks, hidden, plain, slow_source, in_place, policy, stop_at
):
    expected = plain(STEPS)
    gpu.runtime.current_stream().synchronize()
    source = ModuleSource(stacks) if in_place else slow_source(ModuleSource(stacks), seed=stop_at)
    with attach(gpu, stacks, POLICIES[policy], source=source) as handle:
        with (
            pytest.raises(KeyboardInterrupt),
            handle.run(step_visits(STEPS, handle.block_counts)) as run,
        ):
            for number, visit in enumerate(run.program.visits):
                with run.visit(*visit):
                    gpu.delay()
                    stacks[visit.expert][visit.block](hidden)
                    if number == stop_at:
                        raise KeyboardInterrupt
        stream = gpu.runtime.stream()
        with gpu.runtime.on_stream(stream):
            value = streamed(gpu, handle, stacks, hidden)
        stream.synchronize()
        assert torch.equal(value, expected)


def test_the_host_is_never_further_ahead_than_a_cancel_can_wait(gpu, stacks, hidden):
    done = []
    with attach(gpu, stacks, OffloadPolicy.resident()) as handle:
        streamed(
            gpu, handle, stacks, hidden
        )  # every block is resident: only the pace limit makes the host wait
        with handle.run(step_visits(["high"], handle.block_counts)) as run:
            for number, visit in enumerate(run.program.visits):
                with run.visit(*visit):
                    assert number < PACE or done[number - PACE].query()
                    gpu.delay(10)
                    done.append(gpu.runtime.event())
                    done[-1].record(gpu.runtime.current_stream())
        assert not done[-1].query(), "the device was too fast for this test to see anything"


@pytest.mark.parametrize("policy", ["resident", "layerwise 0", "layerwise pinned"])
def test_what_was_recorded_is_what_happened(gpu, stacks, hidden, policy):
    recorder = Recorder(gpu.device)
    with attach(gpu, stacks, POLICIES[policy]) as handle:
        with (
            torch.inference_mode(),
            handle.run(step_visits(["high"] * 2, handle.block_counts), recorder=recorder) as run,
        ):
            value = hidden
            for step in range(2):
                with recorder.step(step, "high", sigma=0.5):
                    for block in range(BLOCKS):
                        with run.visit(step, "high", block):
                            gpu.delay()
                            value = stacks["high"][block](value)
        loaded_bytes = handle.loaded_bytes
    timeline = recorder.timeline()
    moved = [BLOCKS * BLOCK_BYTES, 0 if policy == "resident" else BLOCKS * BLOCK_BYTES]
    assert [step.bytes_moved for step in timeline.steps] == moved
    assert timeline.first_block_s > 0
    for step in timeline.steps:
        assert step.compute_s > 0
        assert step.stall_s >= 0
        assert step.compute_s + step.stall_s <= step.wall_s + 1e-3  # tolerance between two clocks
        assert step.memory.device_bytes >= loaded_bytes
    if policy == "layerwise 0":  # one buffer: every visit waits for a copy
        assert all(step.stall_s > 0 for step in timeline.steps)
        assert all(
            step.transfers.overlap is not None and step.transfers.overlap < 1
            for step in timeline.steps
        )
    for step in timeline.steps:
        assert step.transfers.copied_bytes == step.bytes_moved, "everything comes out of RAM"
        assert (step.transfers.copy_s > 0) == (step.bytes_moved > 0)
        assert 0 <= step.transfers.stall_on_read_s <= step.stall_s + 1e-3
        assert (
            step.memory.device_bytes <= step.memory.reserved_bytes <= step.memory.device_used_bytes
        )
    assert timeline.transfers.copy_s <= timeline.wall_s + 1e-3, (
        "one stream copies, one block after the other"
    )
    assert timeline.steps[0].memory.pinned_bytes > 0, "staging at least"


class Model(nn.Module):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@pytest.mark.parametrize("inference", [False, True])
def test_a_models_own_forward_is_streamed_and_detached(gpu, stacks, hidden, plain, inference):
    model = Model(stacks["high"])
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    on_cpu = model(hidden.cpu())
    with torch.inference_mode(inference):
        handle = attach_offload(model.blocks, policy=OffloadPolicy.layerwise(1), device=gpu.device)
        with handle.passes(2):
            assert torch.equal(model(hidden), plain(["high"]))
            assert torch.equal(model(model(hidden)[:0]), hidden[:0])
    assert torch.equal(model(hidden), plain(["high"]))
    handle.detach()
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert after.keys() == tensors.keys()
    assert all(after[name] is tensor for name, tensor in tensors.items())
    assert torch.equal(model(hidden.cpu()), on_cpu)


def test_memory_follows_the_policy_and_is_given_back(gpu, stacks, hidden, plain):
    plain(STEPS)  # makes the libraries allocate their workspaces now
    gpu.runtime.reset_peaks()
    before = gpu.runtime.allocated_bytes()
    plain(STEPS)
    without_weights = gpu.runtime.allocated_bytes(peak=True) - before
    order = {
        "layerwise 0": 1,
        "layerwise 1": 2,
        "layerwise 3": 4,
        "block swap": 5,
        "resident": 2 * BLOCKS,
    }
    for name, buffers in order.items():
        gc.collect()
        gpu.runtime.reset_peaks()
        before = gpu.runtime.allocated_bytes()
        with attach(gpu, stacks, POLICIES[name]) as handle:
            streamed(gpu, handle, stacks, hidden)
        peak = gpu.runtime.allocated_bytes(peak=True) - before - without_weights
        assert abs(peak - buffers * BLOCK_BYTES) < BLOCK_BYTES / 2, name
        assert gpu.runtime.allocated_bytes() == before, name


def test_pinned_blocks_are_locked_where_they_lie_and_each_is_read_once(
    gpu, stacks, hidden, plain, slow_source
):
    source = slow_source(ModuleSource(stacks), seed=0)
    with attach(gpu, stacks, OffloadPolicy.layerwise(1, source="pinned"), source=source) as handle:
        for _ in range(2):
            assert torch.equal(streamed(gpu, handle, stacks, hidden), plain(STEPS))
        slots = handle.ram
        assert all(gpu.is_locked(slots[index].memory) for index in slots.contents())
        assert sorted(source.reads) == sorted(source.formats)
        assert handle.pinned_bytes == 2 * BLOCKS * BLOCK_BYTES


@pytest.mark.parametrize("in_place", [True, False])
def test_memory_that_could_not_be_locked_only_costs_time(
    gpu, stacks, hidden, plain, slow_source, monkeypatch, in_place
):
    def refuse(self: DeviceRuntime, memory: torch.Tensor) -> None:
        raise PageLockError("no more pages")

    monkeypatch.setattr(type(gpu.runtime), "lock_pages", refuse)
    source = ModuleSource(stacks) if in_place else slow_source(ModuleSource(stacks), seed=0)
    with attach(gpu, stacks, OffloadPolicy.layerwise(2, source="pinned"), source=source) as handle:
        for _ in range(2):
            assert torch.equal(streamed(gpu, handle, stacks, hidden), plain(STEPS))
        assert handle.pinned_bytes == 0
        assert handle.host_bytes == (0 if in_place else 2 * BLOCKS * BLOCK_BYTES)


@pytest.mark.parametrize("pinned", ["file", "pinned"])
@pytest.mark.parametrize("shape", [(), (1,), (WIDTH, 1)], ids=["scalar", "one value", "per row"])
def test_fp8_is_decoded_on_arrival(
    gpu: Accelerator, tmp_path: Path, pinned: str, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    stored = {
        f"{i}.w": torch.randn(WIDTH, WIDTH, generator=generator).to(torch.float8_e4m3fn)
        for i in range(BLOCKS)
    }
    scales = {f"{i}.s": torch.rand(shape, generator=generator) + 0.5 for i in range(BLOCKS)}
    save_file({**stored, **scales}, tmp_path / "fp8.safetensors")
    places = read_header(tmp_path / "fp8.safetensors").tensors
    keys = [BlockKey("high", i) for i in range(BLOCKS)]
    source = FileSource(
        {key: {"weight": places[f"{key.block}.w"]} for key in keys},
        computed_dtypes=torch.bfloat16,
        scales={key: {"weight": places[f"{key.block}.s"]} for key in keys},
    )
    blocks = [nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in keys]
    policy = OffloadPolicy.layerwise(1, source=pinned)
    with attach(gpu, {"high": blocks}, policy, source=source) as handle:
        for _ in range(2):
            seen = []
            with (
                torch.inference_mode(),
                handle.run(step_visits(["high"] * 2, handle.block_counts)) as run,
            ):
                for visit in run.program.visits:
                    with run.visit(*visit):
                        gpu.delay(int(visit.block % 2))
                        seen.append(blocks[visit.block].weight.clone())
            for number, weight in enumerate(seen):
                block = number % BLOCKS
                expected = (stored[f"{block}.w"].float() * scales[f"{block}.s"]).to(torch.bfloat16)
                assert torch.equal(weight.cpu(), expected), number


def test_a_streamed_fp8_expert_equals_the_dequantised_model(
    gpu, tiny_expert_file, make_tiny_expert, fp8_layout
):
    generator = torch.Generator().manual_seed(0)
    lane = Lane(
        latents=torch.randn(1, 16, 2, 4, 6, generator=generator).to(gpu.device),
        text=torch.randn(1, 5, 4096, generator=generator).to(gpu.device),
    )
    path, timestep = (
        tiny_expert_file(fp8=fp8_layout, dtype=torch.float16),
        torch.tensor([990.0]).to(gpu.device),
    )
    model = make_tiny_expert(dequantised_from=torch.float16).to(gpu.device)
    with torch.inference_mode(), open_experts(path, path, compute_dtype=torch.float32) as pair:
        pair.kernels = Kernels(math="exact")
        expected = model(lane.latents, timestep, lane.text, return_dict=False)[0]
        engine = pair.engine(OffloadPolicy.layerwise(), gpu.device)
        with engine.run(step_visits(["low"], engine.block_counts)) as run:
            [velocity] = forward_lanes(
                engine.models["low"], [lane], timestep, lambda i: run.visit(0, "low", i)
            )
        assert torch.equal(velocity, expected)


@pytest.mark.parametrize("slow", [1, 3, 1000], ids=["device slow", "in turns", "bus slow"])
@pytest.mark.parametrize(
    "policy", ["resident", "layerwise 0", "layerwise 3", "block swap deep", "block swap pinned"]
)
def test_patched_on_arrival_equals_patched_before(
    gpu, stacks, hidden, plain, patched, slow_source, policy, slow
):
    """One slot holds all fetches' factors: a copy that does not wait changes the result."""
    source = slow_source(ModuleSource(stacks), seed=slow)
    wanted = [
        (each, patched(each))
        for each in (some_patches(1.0), some_patches(-0.5, rank=8), some_patches(-0.5))
    ]
    with attach(gpu, stacks, POLICIES[policy], source=source) as handle:
        for patches, expected in [*wanted, ({}, plain(STEPS)), wanted[0]]:
            handle.set_patches(patches)
            for _ in range(2):
                assert torch.equal(streamed(gpu, handle, stacks, hidden, slow=slow), expected)


@pytest.mark.parametrize("policy", ["resident", "layerwise 3", "block swap pinned"])
def test_patches_may_change_while_the_device_still_runs_with_the_old_ones(
    gpu, stacks, hidden, patched, policy
):
    changes = [some_patches(1.0), some_patches(2.0, rank=32), {}, some_patches(0.5)]
    expected = [patched(patches) for patches in changes]
    values = []
    with attach(gpu, stacks, POLICIES[policy]) as handle:
        for patches in changes:  # no synchronisation in between
            handle.set_patches(patches)
            values.append(streamed(gpu, handle, stacks, hidden, slow=1))
    for value, wanted in zip(values, expected, strict=True):
        assert torch.equal(value, wanted)


def test_factors_are_locked_while_they_are_set(gpu, stacks, hidden):
    with attach(gpu, stacks, OffloadPolicy.layerwise(1)) as handle:
        streamed(gpu, handle, stacks, hidden)
        staging = handle.pinned_bytes
        assert staging == 2 * BLOCKS * BLOCK_BYTES
        patches = some_patches(1.0)
        handle.set_patches(patches)
        factors = handle.pinned_bytes - staging
        sizes = [
            factor.nbytes
            for patch in patches.values()
            for weight in patch.weights.values()
            for factor in weight.parts.values()
        ]
        assert sum(sizes) <= factors < sum(sizes) + 256 * len(sizes), (
            "each starts at a multiple of 256 bytes"
        )
        handle.set_patches({})
        assert handle.pinned_bytes == staging
    assert handle.pinned_bytes == 0


@pytest.mark.parametrize("pinned", ["file", "pinned"])
def test_fp8_is_decoded_and_patched_and_all_of_it_is_given_back(
    gpu: Accelerator, tmp_path: Path, pinned: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    stored = {
        f"{i}.w": torch.randn(WIDTH, WIDTH, generator=generator).to(torch.float8_e4m3fn)
        for i in range(BLOCKS)
    }
    scales = {f"{i}.s": torch.rand((), generator=generator) + 0.5 for i in range(BLOCKS)}
    save_file({**stored, **scales}, tmp_path / "fp8.safetensors")
    places = read_header(tmp_path / "fp8.safetensors").tensors
    keys = [BlockKey("high", i) for i in range(BLOCKS)]
    source = FileSource(
        {key: {"weight": places[f"{key.block}.w"]} for key in keys},
        computed_dtypes=torch.bfloat16,
        scales={key: {"weight": places[f"{key.block}.s"]} for key in keys},
    )
    factors = WeightPatch(
        up=torch.randn(WIDTH, 24, generator=generator),
        down=torch.randn(24, WIDTH, generator=generator),
    )
    patch = BlockPatch(identity="factors", weights={"weight": factors})
    expected = [
        (stored[f"{i}.w"].float() * scales[f"{i}.s"]).to(torch.bfloat16).to(gpu.device)
        for i in range(BLOCKS)
    ]
    for matrix in expected[1::2]:
        add_plainly(matrix, factors)
    blocks = [nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in keys]
    policy = OffloadPolicy.layerwise(1, source=pinned)
    with attach(gpu, {"high": blocks}, policy, source=source) as handle:
        handle.set_patches(dict.fromkeys(keys[1::2], patch))
        for _ in range(2):
            seen = []
            with (
                torch.inference_mode(),
                handle.run(step_visits(["high"] * 2, handle.block_counts)) as run,
            ):
                for visit in run.program.visits:
                    with run.visit(*visit):
                        gpu.delay(int(visit.block % 2))
                        seen.append(blocks[visit.block].weight.clone())
            loaded = handle.loaded_bytes
            assert loaded > 2 * WIDTH * WIDTH * 2 + WIDTH * WIDTH, (
                "two buffers, undecoded bytes, factors"
            )
            assert handle.release_memory(1 << 60) == loaded
            assert handle.loaded_bytes == 0
            for number, weight in enumerate(seen):
                assert torch.equal(weight, expected[number % BLOCKS]), number


@pytest.mark.parametrize("policy", ["resident", "layerwise 1", "block swap pinned"])
def test_memory_is_given_back_while_the_device_still_computes(gpu, stacks, hidden, plain, policy):
    expected = plain(STEPS)
    stream = gpu.runtime.stream()
    stream.wait_stream(gpu.runtime.current_stream())
    with attach(gpu, stacks, POLICIES[policy]) as handle:
        handle.allocate_buffers()
        loaded = handle.loaded_bytes
        with gpu.runtime.on_stream(stream):
            value = streamed(gpu, handle, stacks, hidden, slow=1)
        allocated = gpu.runtime.allocated_bytes()
        assert handle.release_memory(1 << 60) == loaded
        assert handle.loaded_bytes == 0
        assert allocated - gpu.runtime.allocated_bytes() >= loaded
        # The stream that allocated the buffers did not compute with them. It may write into that
        # memory at once.
        ruins = torch.full((loaded // 4,), float("nan"), device=gpu.device)
        stream.synchronize()
        assert torch.equal(value, expected)
        del ruins
        assert handle.release_memory(1) == 0
        assert torch.equal(streamed(gpu, handle, stacks, hidden), expected)
        assert handle.loaded_bytes == loaded


def test_residents_that_stay_are_not_fetched_again(gpu, stacks, hidden, plain):
    expected = plain(STEPS)
    with attach(gpu, stacks, OffloadPolicy.resident()) as handle:
        streamed(gpu, handle, stacks, hidden)
        assert handle.release_memory(2 * BLOCK_BYTES) == 2 * BLOCK_BYTES
        with handle.run(step_visits(STEPS, handle.block_counts)) as run:
            assert [fetch.block for fetch in run.program.fetches] == [
                BlockKey("low", 4),
                BlockKey("low", 5),
            ]
        assert torch.equal(streamed(gpu, handle, stacks, hidden), expected)


@pytest.mark.parametrize("policy", ["layerwise 1", "layerwise pinned"])
def test_a_device_that_is_not_the_present_one(gpu, stacks, hidden, plain, policy):
    expected = plain(STEPS).cpu()
    with attach_offload(
        stacks, policy=POLICIES[policy], device=gpu.other, follow_forward=False
    ) as handle:
        assert torch.equal(streamed(gpu, handle, stacks, hidden.to(gpu.other)).cpu(), expected)
