"""RAM slots, decoding during copies, and policy changes on a CUDA device.

See `test_cuda.py` for the other cases.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from wanstream.offload import BlockPatch, OffloadEngine, WeightPatch, attach_offload
from wanstream.offload.engine.run import EngineRun
from wanstream.offload.formats import read_header
from wanstream.offload.sources import FileSource
from wanstream.offload.sources.module import ModuleSource
from wanstream.plan.programs import BlockKey, step_visits
from wanstream.schema import OffloadPolicy
from wanstream.telemetry import Recorder
from wanstream.tests.support.accelerator import HAS_REAL, Accelerator

BLOCKS, WIDTH = 6, 1024 if HAS_REAL else 128
BLOCK_BYTES = 2 * 3 * WIDTH * WIDTH * 4
STEPS = ["high", "high", "low", "low", "high"]
PINNED = OffloadPolicy.layerwise(1, source="pinned")

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
def expected(gpu: Accelerator, stacks: Stacks, hidden: torch.Tensor) -> torch.Tensor:
    value = hidden
    for name in STEPS:
        for block in copy.deepcopy(stacks[name]).to(gpu.device):
            value = block(value)
    return value


def attach(gpu: Accelerator, stacks: Stacks, policy: OffloadPolicy, **how: object) -> OffloadEngine:
    return attach_offload(stacks, policy=policy, device=gpu.device, follow_forward=False, **how)


def streamed(
    gpu: Accelerator,
    handle: OffloadEngine,
    stacks: Stacks,
    value: torch.Tensor,
    steps: Sequence[str] = STEPS,
    *,
    slow: int = 3,
) -> tuple[torch.Tensor, EngineRun]:
    """Stream one run. Every `slow`-th visit delays the device before it reads the block."""
    visits = step_visits(steps, handle.block_counts)
    with torch.inference_mode(), handle.run(visits) as run:
        for number, visit in enumerate(visits):
            with run.visit(*visit):
                if number % slow == 0:
                    gpu.delay()
                value = stacks[visit.expert][visit.block](value)
    assert tuple(run.fetched) == run.program.fetches
    return value, run


@pytest.mark.parametrize("slow", [1, 1000], ids=["device slow", "bus slow"])
def test_a_slot_is_refilled_only_when_its_copy_has_left_it(
    gpu, stacks, hidden, expected, slow_source, slow
):
    """Two slots serve all fetches, and only copies hold the read thread: a missing wait shows."""
    source = slow_source(ModuleSource(stacks), seed=0, longest_s=0.0)
    with attach(gpu, stacks, OffloadPolicy.layerwise(3), source=source) as handle:
        for _ in range(3):
            value, run = streamed(gpu, handle, stacks, hidden, slow=slow)
            assert torch.equal(value, expected)
            assert len({fetch.buffer for fetch in run.programs.ram.program.fetches}) == 2
        assert handle.host_bytes == handle.pinned_bytes == 2 * BLOCK_BYTES


@pytest.mark.parametrize("stop_at", [0, 3, 8])
def test_slots_of_a_run_cut_short_are_not_overwritten_under_a_copy(
    gpu, stacks, hidden, expected, stop_at
):
    with attach(gpu, stacks, replace(PINNED, ram_blocks=3)) as handle:
        visits = step_visits(STEPS, handle.block_counts)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt), handle.run(visits) as run:
                for number, visit in enumerate(visits):
                    with run.visit(*visit):
                        gpu.delay()
                        if number == stop_at:
                            raise KeyboardInterrupt
            assert torch.equal(streamed(gpu, handle, stacks, hidden)[0], expected)


CHANGES = [
    OffloadPolicy.resident(),
    OffloadPolicy.layerwise(0, source="pinned"),
    OffloadPolicy.block_swap(3, 2),
    replace(PINNED, ram_blocks=4),
    PINNED,
]


def test_the_policy_changes_while_the_device_still_computes(gpu, stacks, hidden, expected):
    gpu.runtime.current_stream().synchronize()
    values, taken = [], {}
    with attach(gpu, stacks, CHANGES[0]) as handle:
        for number, policy in enumerate(CHANGES * 3):
            handle.set_policy(policy)
            values.append(
                streamed(gpu, handle, stacks, hidden, slow=1)[0]
            )  # without a synchronisation
            figures = (handle.loaded_bytes, handle.pinned_bytes, handle.host_bytes)
            assert taken.setdefault(number % len(CHANGES), figures) == figures
            assert handle.pinned_bytes <= 2 * BLOCKS * BLOCK_BYTES
    for value in values:
        assert torch.equal(value, expected)


def test_blocks_that_both_policies_keep_are_neither_copied_nor_read_again(
    gpu, stacks, hidden, expected, slow_source
):
    source = slow_source(ModuleSource(stacks), seed=0)
    with attach(gpu, stacks, OffloadPolicy.resident(source="pinned"), source=source) as handle:
        streamed(gpu, handle, stacks, hidden)
        before = gpu.runtime.allocated_bytes()
        handle.set_policy(OffloadPolicy.block_swap(3, 1, source="pinned"))
        assert before - gpu.runtime.allocated_bytes() == (2 * BLOCKS - 5) * BLOCK_BYTES
        kept = {key for key in handle.contents().values() if key.expert == "high"}
        assert {BlockKey("high", number) for number in (0, 2, 4)} <= kept
        value, run = streamed(gpu, handle, stacks, hidden)
        assert torch.equal(value, expected)
        assert not kept & {fetch.block for fetch in run.fetched if fetch.needed_by < BLOCKS}
        assert len(source.reads) == 2 * BLOCKS


class Fp8:
    """Blocks with one scaled fp8 matrix, decoded to bf16, and patched if wanted."""

    def __init__(self, gpu: Accelerator, path: Path) -> None:
        random = torch.Generator().manual_seed(0)
        self.keys = [BlockKey("high", i) for i in range(BLOCKS)]
        stored = {
            f"{i}.w": torch.randn(4096, WIDTH, generator=random).to(torch.float8_e4m3fn)
            for i in range(BLOCKS)
        }
        scales = {f"{i}.s": torch.rand((), generator=random) + 0.5 for i in range(BLOCKS)}
        save_file({**stored, **scales}, path / "fp8.safetensors")
        places = read_header(path / "fp8.safetensors").tensors
        self.source = lambda: FileSource(
            {key: {"weight": places[f"{key.block}.w"]} for key in self.keys},
            computed_dtypes=torch.bfloat16,
            scales={key: {"weight": places[f"{key.block}.s"]} for key in self.keys},
        )
        factors = WeightPatch(
            up=torch.randn(4096, 24, generator=random),
            down=torch.randn(24, WIDTH, generator=random),
        )
        self.patches = {
            key: BlockPatch(identity="factors", weights={"weight": factors})
            for key in self.keys[::2]
        }
        self.decoded = [
            (stored[f"{i}.w"].float() * scales[f"{i}.s"]).bfloat16().to(gpu.device)
            for i in range(BLOCKS)
        ]
        self.patched = [matrix.clone() for matrix in self.decoded]
        for matrix in self.patched[::2]:
            up, down = factors.up.to(matrix), factors.down.to(matrix)
            matrix.copy_(torch.addmm(matrix, up, down))


@pytest.fixture
def fp8(gpu: Accelerator, tmp_path: Path) -> Fp8:
    return Fp8(gpu, tmp_path)


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("slow", [1, 2, 1000], ids=["device slow", "in turns", "bus slow"])
@pytest.mark.parametrize(
    "policy",
    [
        OffloadPolicy.layerwise(0),
        OffloadPolicy.layerwise(3),
        replace(PINNED, prefetch_blocks=4),
        OffloadPolicy.resident(),
    ],
    ids=str,
)
def test_copies_run_ahead_of_decoding(gpu, fp8, policy, slow, patched):
    """Two raw slots serve all fetches: a copy into one during its decoding shows in a weight."""
    blocks = [nn.Linear(WIDTH, 4096, bias=False, device="meta") for _ in fp8.keys]
    wanted = fp8.patched if patched else fp8.decoded
    with attach(gpu, {"high": blocks}, policy, source=fp8.source()) as handle:
        handle.set_patches(fp8.patches if patched else {})
        for _ in range(3):
            seen = []
            with (
                torch.inference_mode(),
                handle.run(step_visits(["high"] * 2, handle.block_counts)) as run,
            ):
                for number, visit in enumerate(run.program.visits):
                    with run.visit(*visit):
                        gpu.delay(int(number % slow == 0))
                        seen.append(blocks[visit.block].weight.clone())
            for number, weight in enumerate(seen):
                assert torch.equal(weight, wanted[number % BLOCKS]), number


def test_decoding_is_timed_by_the_device_and_takes_no_part_of_computing(gpu, fp8):
    blocks = [nn.Linear(WIDTH, 4096, bias=False, device="meta") for _ in fp8.keys]
    recorder = Recorder(gpu.device)
    with attach(
        gpu, {"high": blocks}, replace(PINNED, ram_blocks=2), source=fp8.source()
    ) as handle:
        raw = 2 * 4096 * WIDTH
        with (
            torch.inference_mode(),
            handle.run(step_visits(["high"] * 2, handle.block_counts), recorder=recorder) as run,
        ):
            for step in range(2):
                with recorder.step(step, "high"):
                    for block in range(BLOCKS):
                        with run.visit(step, "high", block):
                            blocks[block].weight.sum()
        assert handle.loaded_bytes == 2 * 2 * 4096 * WIDTH + raw + BLOCKS * 4, (
            "two buffers, two raw slots, scales"
        )
    first, second = recorder.timeline().steps
    assert first.decode_s > 0 < second.decode_s
    assert (first.transfers.read_bytes, second.transfers.read_bytes) == (
        BLOCKS * 4096 * WIDTH,
        (BLOCKS - 2) * 4096 * WIDTH,
    )
    assert first.bytes_moved == second.bytes_moved == BLOCKS * 4096 * WIDTH
    for step in (first, second):
        assert step.compute_s + step.stall_s <= step.wall_s + 1e-3  # two clocks
        assert step.transfers.copied_bytes == step.bytes_moved
        assert step.transfers.copy_s > 0


def test_a_run_cut_short_while_it_decodes_leaves_the_engine_usable(gpu, fp8):
    blocks = [nn.Linear(WIDTH, 4096, bias=False, device="meta") for _ in fp8.keys]
    with attach(gpu, {"high": blocks}, OffloadPolicy.layerwise(3), source=fp8.source()) as handle:
        handle.set_patches(fp8.patches)
        visits = step_visits(["high"] * 2, handle.block_counts)
        for stop_at in (0, 1, 5, 8):
            with pytest.raises(KeyboardInterrupt), handle.run(visits) as run:
                for number, visit in enumerate(visits):
                    with run.visit(*visit):
                        gpu.delay()
                        if number == stop_at:
                            raise KeyboardInterrupt
            seen = []
            with gpu.runtime.on_stream(gpu.runtime.stream()), handle.run(visits) as run:
                for visit in visits:
                    with run.visit(*visit):
                        seen.append(blocks[visit.block].weight.detach().clone())
                gpu.runtime.current_stream().synchronize()
            assert all(
                torch.equal(weight, fp8.patched[number % BLOCKS])
                for number, weight in enumerate(seen)
            )
