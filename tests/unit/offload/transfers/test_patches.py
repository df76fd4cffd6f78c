"""Patches on arrival are bit-equal to `torch.addmm` on the plain weights, and can be removed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from wanstream.offload import (
    BlockPatch,
    ComputedPatch,
    Hadamard,
    Kronecker,
    OffloadEngine,
    Product,
    Rescaled,
    WeightPatch,
    attach_offload,
)
from wanstream.offload.formats.layout import allocate_flat, block_format
from wanstream.offload.formats.packing import QUANT_FORMATS
from wanstream.offload.formats.safetensors_header import FileTensor, read_header
from wanstream.offload.sources.base import BlockSource
from wanstream.offload.sources.file import FileSource
from wanstream.offload.sources.module import ModuleSource
from wanstream.offload.transfers.base import BlockCopy, PendingBlock
from wanstream.offload.transfers.cpu import CpuBackend
from wanstream.offload.transfers.patches import StagedPatches
from wanstream.plan.programs import BlockKey, step_visits
from wanstream.schema import OffloadPolicy
from wanstream.telemetry import Recorder

CPU = torch.device("cpu")
BLOCKS, WIDTH = 6, 32
STEPS = ["high", "high", "low", "low", "high"]
POLICIES = [
    OffloadPolicy.resident(),
    OffloadPolicy.layerwise(0),
    OffloadPolicy.layerwise(1),
    OffloadPolicy.layerwise(2),
    OffloadPolicy.block_swap(3, 1),
    OffloadPolicy.block_swap(0, 1),
]
FP8 = torch.float8_e4m3fn

Stacks = dict[str, nn.ModuleList]
Patches = dict[BlockKey, BlockPatch]
MakeStack = Callable[..., nn.ModuleList]


def named(policy: OffloadPolicy) -> str:
    return f"{policy.kind}-{policy.blocks_to_swap}-{policy.prefetch_blocks}"


def some_patches(strength: float, *, expert: str = "high", rank: int = 4) -> Patches:
    """Patches for one matrix, for both, with a full difference in addition, and for none."""
    random = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) * 0.1

    def factors(rows: int, columns: int) -> WeightPatch:
        return WeightPatch(up=strength * draw(rows, rank), down=draw(rank, columns))

    def both(rows: int, columns: int) -> WeightPatch:
        return replace(factors(rows, columns), full=strength * draw(rows, columns))

    of_block = {
        0: {"up.weight": factors(3 * WIDTH, WIDTH)},
        1: {"up.weight": factors(3 * WIDTH, WIDTH), "down.weight": factors(WIDTH, 3 * WIDTH)},
        3: {"down.weight": WeightPatch(full=strength * draw(WIDTH, 3 * WIDTH))},
        4: {"down.weight": both(WIDTH, 3 * WIDTH)},
    }
    return {
        BlockKey(expert, block): BlockPatch(identity=("drawn", rank, strength), weights=weights)
        for block, weights in of_block.items()
    }


def add_plainly(
    stacks: Mapping[str, nn.ModuleList], patches: Mapping[BlockKey, BlockPatch]
) -> None:
    for key, patch in patches.items():
        for name, weight in patch.weights.items():
            matrix = stacks[key.expert][key.block].get_parameter(name)
            with torch.no_grad():
                if weight.full is not None:
                    matrix.copy_(matrix + weight.full.to(matrix.dtype))
                if weight.up is not None:
                    matrix.copy_(
                        torch.addmm(
                            matrix, weight.up.to(matrix.dtype), weight.down.to(matrix.dtype)
                        )
                    )


def run_plain(stacks: Stacks, hidden: torch.Tensor) -> torch.Tensor:
    for name in STEPS:
        for block in stacks[name]:
            hidden = block(hidden)
    return hidden


def run_streamed(handle: OffloadEngine, stacks: Stacks, hidden: torch.Tensor) -> torch.Tensor:
    with handle.run(step_visits(STEPS, handle.block_counts)) as run:
        for visit in run.program.visits:
            with run.visit(*visit):
                hidden = stacks[visit.expert][visit.block](hidden)
    assert tuple(run.fetched) == run.program.fetches
    return hidden


def fetched_by_a_run(handle: OffloadEngine) -> list[BlockKey]:
    with handle.run(step_visits(STEPS, handle.block_counts)) as run:
        for visit in run.program.visits:
            with run.visit(*visit):
                pass
    return [fetch.block for fetch in run.fetched]


def write_raw(stacks: Stacks, path: Path, dtype: torch.dtype) -> FileSource:
    """Write a file with the weights unchanged."""
    tensors = {
        f"{n}.{i}.{w}": block.get_parameter(w).detach() for n, i, block, w in weights_of(stacks)
    }
    save_file(tensors, path)
    places = read_header(path).tensors
    blocks = {
        BlockKey(n, i): {w: places[f"{n}.{i}.{w}"] for w in ("up.weight", "down.weight")}
        for n in stacks
        for i in range(BLOCKS)
    }
    return FileSource(blocks, computed_dtypes=dtype)


def write_fp8(stacks: Stacks, path: Path, dtype: torch.dtype) -> FileSource:
    """Write a file in fp8 with scales, one per `up` matrix and one per `down` row.

    Change the weights to the file's values.
    """
    tensors = {}
    for n, i, block, w in weights_of(stacks):
        weight = block.get_parameter(w)
        scale = (
            torch.full((), 0.03 + i / 100)
            if w == "up.weight"
            else torch.linspace(0.02, 0.05, WIDTH)[:, None]
        )
        stored = (weight.float() / scale).to(FP8)
        tensors |= {f"{n}.{i}.{w}": stored, f"{n}.{i}.{w}.scale": scale.contiguous()}
        weight.copy_((stored.float() * scale).to(dtype))
    save_file(tensors, path)
    places = read_header(path).tensors

    def table(suffix: str) -> dict[BlockKey, dict[str, object]]:
        return {
            BlockKey(n, i): {
                w: places[f"{n}.{i}.{w}{suffix}"] for w in ("up.weight", "down.weight")
            }
            for n in stacks
            for i in range(BLOCKS)
        }

    return FileSource(table(""), computed_dtypes=dtype, scales=table(".scale"))


def write_packed(stacks: Stacks, path: Path, dtype: torch.dtype) -> FileSource:
    """Write a file in Q8_0 (32 signed bytes after a scale).

    Change the weights to the file's values.
    """
    packing, whole = QUANT_FORMATS["Q8_0"], b""
    blocks: dict[BlockKey, dict[str, FileTensor]] = {}
    for n, i, block, w in weights_of(stacks):
        weight = block.get_parameter(w)
        values = weight.float().view(-1, packing.values)
        scale = (values.abs().amax(dim=1, keepdim=True) / 127).half()
        stored = (values / scale.float()).round().to(torch.int8)
        weight.copy_((scale.float() * stored.float()).view(weight.shape).to(dtype))
        packs = torch.cat([scale.view(torch.uint8), stored.view(torch.uint8)], dim=1)
        blocks.setdefault(BlockKey(n, i), {})[w] = FileTensor(
            path=path,
            offset=len(whole),
            nbytes=packs.numel(),
            dtype=torch.uint8,
            shape=tuple(weight.shape),
            packing=packing,
        )
        whole += packs.numpy().tobytes()
    path.write_bytes(whole)
    return FileSource(blocks, computed_dtypes=dtype)


def weights_of(stacks: Stacks) -> Iterator[tuple[str, int, nn.Module, str]]:
    for name, stack in stacks.items():
        for index, block in enumerate(stack):
            for weight in ("up.weight", "down.weight"):
                yield name, index, block, weight


SOURCES: dict[str, Callable[[Stacks, Path, torch.dtype], BlockSource]] = {
    "module": lambda stacks, path, dtype: ModuleSource(stacks),
    "raw file": write_raw,
    "fp8 file": write_fp8,
    "packed file": write_packed,
}


@pytest.fixture
def make_stacks(make_stack: MakeStack) -> Callable[[torch.dtype], Stacks]:
    def make(dtype: torch.dtype = torch.float32) -> Stacks:
        return {
            "high": make_stack(BLOCKS, seed=1, dtype=dtype),
            "low": make_stack(BLOCKS, seed=2, dtype=dtype),
        }

    return make


@pytest.fixture
def stacks(make_stacks: Callable[..., Stacks]) -> Stacks:
    return make_stacks()


@pytest.mark.parametrize(
    ("stored", "kept", "policy", "dtype"),
    # Every policy with two storage formats. Every format with three policies, from the file as well
    # as from RAM.
    [
        *(
            (stored, ("file", "pinned")[(at + number // 2) % 2], policy, torch.float32)
            for at, stored in enumerate(SOURCES)
            for number, policy in enumerate(POLICIES)
            if (at + number) % 2 == 0
        ),
        *((stored, "file", POLICIES[0], torch.bfloat16) for stored in SOURCES),
    ],
    ids=lambda value: named(value) if isinstance(value, OffloadPolicy) else str(value),
)
def test_patched_on_arrival_equals_patched_before(
    make_stacks,
    slow_source,
    tmp_path: Path,
    dtype: torch.dtype,
    policy: OffloadPolicy,
    stored: str,
    kept: str,
):
    stacks = make_stacks(dtype)
    source = SOURCES[stored](stacks, tmp_path / "blocks.safetensors", dtype)
    source = slow_source(source, seed=len(named(policy)), longest_s=0.001)
    plain, patched, other = (copy.deepcopy(stacks) for _ in range(3))
    both = {**some_patches(1.0), **some_patches(0.5, expert="low")}
    high_only = some_patches(-0.75, rank=5)
    add_plainly(patched, both)
    add_plainly(other, high_only)
    hidden = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = [run_plain(each, hidden) for each in (plain, patched, other)]
    assert not torch.equal(wanted[0], wanted[1])
    assert not torch.equal(wanted[1], wanted[2])

    how = {"policy": replace(policy, source=kept), "device": CPU, "follow_forward": False}
    with attach_offload(stacks, source=source, **how) as handle:
        for patches, expected in [
            (both, wanted[1]),
            (high_only, wanted[2]),
            ({}, wanted[0]),
            (both, wanted[1]),
        ]:
            handle.set_patches(patches)
            for _ in range(2):
                assert torch.equal(run_streamed(handle, stacks, hidden), expected)


def test_fp16_is_patched_too(make_stacks):
    stacks = make_stacks(torch.float16)
    patched = copy.deepcopy(stacks)
    add_plainly(patched, some_patches(1.0))
    hidden = torch.ones(2, WIDTH, dtype=torch.float16)
    with attach_offload(
        stacks, policy=OffloadPolicy.layerwise(), device=CPU, follow_forward=False
    ) as handle:
        handle.set_patches(some_patches(1.0))
        assert torch.equal(run_streamed(handle, stacks, hidden), run_plain(patched, hidden))


def test_a_models_own_forward_computes_with_patched_blocks(make_stack, run_plain):
    stack = make_stack(BLOCKS)
    plain, patched = copy.deepcopy(stack), copy.deepcopy(stack)
    patches = some_patches(1.0, expert="blocks")
    add_plainly({"blocks": patched}, patches)
    hidden = torch.ones(1, WIDTH)
    with (
        torch.inference_mode(),
        attach_offload(stack, policy=OffloadPolicy.layerwise(), device=CPU) as handle,
    ):
        handle.set_patches(patches)
        assert torch.equal(run_plain(stack, hidden), run_plain(patched, hidden))
    assert torch.equal(run_plain(stack, hidden), run_plain(plain, hidden))


@pytest.mark.parametrize("kept", ["file", "pinned"])
def test_only_blocks_whose_identity_changed_are_fetched_again(stacks, slow_source, kept):
    source = slow_source(ModuleSource(stacks), seed=0)
    policy = OffloadPolicy.resident(source=kept)
    every = {BlockKey(name, index) for name in stacks for index in range(BLOCKS)}
    with attach_offload(
        stacks, policy=policy, device=CPU, source=source, follow_forward=False
    ) as handle:
        handle.set_patches(some_patches(1.0))
        assert set(fetched_by_a_run(handle)) == every
        handle.set_patches(some_patches(1.0))
        assert fetched_by_a_run(handle) == []

        stronger = some_patches(2.0)
        one_changed = {**some_patches(1.0), BlockKey("high", 3): stronger[BlockKey("high", 3)]}
        handle.set_patches(one_changed)
        assert fetched_by_a_run(handle) == [BlockKey("high", 3)]

        handle.set_patches({key: patch for key, patch in one_changed.items() if key.block != 4})
        assert fetched_by_a_run(handle) == [BlockKey("high", 4)]
        handle.set_patches({})
        assert fetched_by_a_run(handle) == [BlockKey("high", block) for block in (0, 1, 3)]
        handle.set_patches({})
        assert fetched_by_a_run(handle) == []
    if kept == "pinned":
        assert sorted(source.reads) == sorted(every), (
            "stored bytes are read once, however often patches change"
        )


def test_residents_that_changed_are_fetched_once_more_and_streamed_blocks_as_ever(stacks):
    policy = OffloadPolicy.block_swap(3, 1)
    with attach_offload(stacks, policy=policy, device=CPU, follow_forward=False) as handle:
        fetched_by_a_run(handle)
        as_ever = fetched_by_a_run(handle)
        handle.set_patches(some_patches(1.0))
        again = fetched_by_a_run(handle)
        kept = set(handle.contents().values())
        assert set(again) - set(as_ever) <= some_patches(1.0).keys()
        assert fetched_by_a_run(handle) == as_ever
        assert kept == set(handle.contents().values())


def test_a_patch_that_is_set_is_not_looked_at_again(stacks):
    class Unread(dict):
        def items(self):
            raise AssertionError("read again")

    patches = some_patches(1.0)
    with attach_offload(
        stacks, policy=OffloadPolicy.layerwise(), device=CPU, follow_forward=False
    ) as handle:
        handle.set_patches(patches)
        handle.set_patches(
            {key: replace(patch, weights=Unread(patch.weights)) for key, patch in patches.items()}
        )
        with pytest.raises(AssertionError, match="read again"):
            handle.set_patches(
                {
                    k: BlockPatch(identity="new", weights=Unread(p.weights))
                    for k, p in patches.items()
                }
            )


def test_factors_are_copies(stacks):
    patched = copy.deepcopy(stacks)
    patches = some_patches(1.0)
    add_plainly(patched, patches)
    hidden = torch.ones(1, WIDTH)
    with attach_offload(
        stacks, policy=OffloadPolicy.layerwise(), device=CPU, follow_forward=False
    ) as handle:
        handle.set_patches(patches)
        for patch in patches.values():
            for weight in patch.weights.values():
                for factor in (weight.up, weight.down, weight.full):
                    if factor is not None:
                        factor.zero_()
        assert torch.equal(run_streamed(handle, stacks, hidden), run_plain(patched, hidden))


def test_bytes_of_factors_count_with_their_fetch(stacks):
    recorder = Recorder(CPU)
    key = BlockKey("high", 2)
    up, down = torch.zeros(3 * WIDTH, 8), torch.zeros(8, WIDTH)
    patch = BlockPatch(identity=1, weights={"up.weight": WeightPatch(up=up, down=down)})
    block_bytes = 2 * 3 * WIDTH * WIDTH * 4
    with attach_offload(
        stacks, policy=OffloadPolicy.layerwise(1), device=CPU, follow_forward=False
    ) as handle:
        handle.set_patches({key: patch})
        with handle.run(
            step_visits(["high", "low"], handle.block_counts), recorder=recorder
        ) as run:
            for step, expert in enumerate(["high", "low"]):
                with recorder.step(step, expert):
                    for block in range(BLOCKS):
                        with run.visit(step, expert, block):
                            pass
    moved = [step.bytes_moved for step in recorder.timeline().steps]
    assert moved == [BLOCKS * block_bytes + up.nbytes + down.nbytes, BLOCKS * block_bytes]


def test_a_block_without_a_patch_leaves_nothing_to_do(stacks):
    source = ModuleSource(stacks)
    formats = {key: source.formats[key] for key in source.formats}
    patches = StagedPatches(formats)
    backend = CpuBackend(source, patches)
    into = allocate_flat(formats[BlockKey("high", 0)].computed.nbytes, CPU)
    patches.replace(patches.prepare(some_patches(1.0)))
    keys = [BlockKey("high", number) for number in (2, 1)]
    blocks = [
        BlockCopy(key, None, into, 0.0, lambda drained=None: None, patches.get(key)) for key in keys
    ]
    assert backend.copy_in(blocks[0]) == PendingBlock()
    assert backend.copy_in(blocks[1]) != PendingBlock()


def pair(rows: int, up_rank: int, down_rank: int, columns: int) -> WeightPatch:
    return WeightPatch(up=torch.zeros(rows, up_rank), down=torch.zeros(down_rank, columns))


def product(rows: int, rank: int, columns: int) -> Product:
    return Product(up=torch.zeros(rows, rank), down=torch.zeros(rank, columns))


UP_KEY = BlockKey("high", 0)
REFUSED = {
    "another block": (
        BlockKey("high", 6),
        "up.weight",
        pair(96, 4, 4, 32),
        r"block 6 of 'high'.*only blocks 0 to 5",
    ),
    "another expert": (
        BlockKey("mid", 0),
        "up.weight",
        pair(96, 4, 4, 32),
        r"of 'mid'.*only those of 'high', 'low'",
    ),
    "a name that stays": (
        UP_KEY,
        "up.bias",
        pair(96, 4, 4, 1),
        r"up\.bias is not streamed; only up\.weight, down\.wei",
    ),
    "too many rows": (
        UP_KEY,
        "up.weight",
        pair(97, 4, 4, 32),
        r"up is \[97, 4\], which should be \[96, 4\]; the matrix is \[96, 32\]",
    ),
    "too few columns": (
        UP_KEY,
        "up.weight",
        pair(96, 4, 4, 31),
        r"down is \[4, 31\], which should be \[4, 32\]",
    ),
    "two ranks": (
        UP_KEY,
        "up.weight",
        pair(96, 4, 5, 32),
        r"down is \[5, 32\], which should be \[4, 32\]",
    ),
    "whole and small": (
        UP_KEY,
        "up.weight",
        WeightPatch(full=torch.zeros(32, 96)),
        r"full is \[32, 96\]; the matrix is \[96, 32\]",
    ),
    "four dimensions": (
        UP_KEY,
        "up.weight",
        WeightPatch(up=torch.zeros(96, 4, 1, 1), down=torch.zeros(4, 32)),
        r"up is \[96, 4, 1, 1\]",
    ),
    "no rank": (
        UP_KEY,
        "up.weight",
        pair(96, 0, 0, 32),
        r"up is \[96, 0\]; a matrix with a rank above 0",
    ),
    "no dimensions": (
        UP_KEY,
        "up.weight",
        WeightPatch(up=torch.zeros(()), down=torch.zeros(())),
        r"up is \[\]; a matrix with a rank above 0",
    ),
    "a LoKr of another size": (
        UP_KEY,
        "up.weight",
        WeightPatch(kronecker=(Kronecker(first=torch.zeros(4, 4), second=torch.zeros(24, 7)),)),
        r"Kronecker product of \[4, 4\] and \[24, 7\]; the matrix is \[96, 32\]",
    ),
    "a LoHa of another size": (
        UP_KEY,
        "up.weight",
        WeightPatch(hadamard=(Hadamard(one=product(96, 4, 32), other=product(96, 4, 31)),)),
        r"hadamard 0 other down is \[4, 31\], which should be \[4, 32\]",
    ),
    "a magnitude of another size": (
        UP_KEY,
        "up.weight",
        WeightPatch(
            rescaled=(
                Rescaled(change=pair(96, 4, 4, 32), magnitude=torch.ones(95, 1), strength=1.0),
            )
        ),
        r"magnitude is \[95, 1\]; the matrix is \[96, 32\]",
    ),
    "up alone": (
        UP_KEY,
        "up.weight",
        WeightPatch(up=torch.zeros(96, 4)),
        "has up; give up and down",
    ),
    "nothing": (UP_KEY, "up.weight", WeightPatch(), "has nothing; give up and down"),
    "integers": (
        UP_KEY,
        "up.weight",
        WeightPatch(full=torch.zeros(96, 32, dtype=torch.int32)),
        r"torch\.int32 on cpu",
    ),
    "no data": (
        UP_KEY,
        "up.weight",
        WeightPatch(full=torch.zeros(96, 32, device="meta")),
        "on meta",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_and_the_patches_stay_as_they_were(stacks, case):
    key, name, weight, message = REFUSED[case]
    patched = copy.deepcopy(stacks)
    add_plainly(patched, some_patches(1.0))
    hidden = torch.ones(1, WIDTH)
    with attach_offload(
        stacks, policy=OffloadPolicy.resident(), device=CPU, follow_forward=False
    ) as handle:
        handle.set_patches(some_patches(1.0))
        run_streamed(handle, stacks, hidden)
        wrong = {**some_patches(2.0), key: BlockPatch(identity="wrong", weights={name: weight})}
        with pytest.raises(ValueError, match=message):
            handle.set_patches(wrong)
        assert fetched_by_a_run(handle) == []
        assert torch.equal(run_streamed(handle, stacks, hidden), run_plain(patched, hidden))


def test_factors_that_no_memory_is_there_for_are_refused(stacks):
    endless = WeightPatch(
        up=torch.zeros(1).expand(3 * WIDTH, 10**12), down=torch.zeros(1).expand(10**12, WIDTH)
    )
    patched = copy.deepcopy(stacks)
    add_plainly(patched, some_patches(1.0))
    hidden = torch.ones(1, WIDTH)
    with attach_offload(
        stacks, policy=OffloadPolicy.resident(), device=CPU, follow_forward=False
    ) as handle:
        handle.set_patches(some_patches(1.0))
        with pytest.raises(
            OSError,
            match=r"block 0 of 'high': 512000000\.0 MB of RAM cannot be allocated .*fewer LoRAs",
        ):
            handle.set_patches(
                {UP_KEY: BlockPatch(identity="endless", weights={"up.weight": endless})}
            )
        assert torch.equal(run_streamed(handle, stacks, hidden), run_plain(patched, hidden))


def test_patches_are_not_changed_under_a_run(stacks):
    patched = copy.deepcopy(stacks)
    add_plainly(patched, some_patches(1.0))
    hidden = expected = torch.ones(1, WIDTH)
    for block in patched["high"]:
        expected = block(expected)
    handle = attach_offload(
        stacks, policy=OffloadPolicy.layerwise(1), device=CPU, follow_forward=False
    )
    handle.set_patches(some_patches(1.0))
    with handle.run(step_visits(["high"], handle.block_counts)) as run:
        for visit in run.program.visits:
            with run.visit(*visit):
                with pytest.raises(RuntimeError, match="already running"):
                    handle.set_patches({})
                hidden = stacks["high"][visit.block](hidden)
    assert torch.equal(hidden, expected)
    handle.detach()
    with pytest.raises(RuntimeError, match="detached"):
        handle.set_patches({})


@pytest.mark.parametrize("stop_at", range(4))
def test_a_run_cut_short_leaves_no_block_patched_twice_or_not_at_all(stacks, slow_source, stop_at):
    patched = copy.deepcopy(stacks)
    add_plainly(patched, some_patches(1.0))
    hidden = torch.ones(1, WIDTH)
    source = slow_source(ModuleSource(stacks), seed=stop_at)
    policy = OffloadPolicy.block_swap(2, 1)
    with attach_offload(
        stacks, policy=policy, device=CPU, source=source, follow_forward=False
    ) as handle:
        handle.set_patches(some_patches(1.0))
        with (
            pytest.raises(KeyboardInterrupt),
            handle.run(step_visits(STEPS, handle.block_counts)) as run,
        ):
            for number, visit in enumerate(run.program.visits):
                with run.visit(*visit):
                    if number == stop_at:
                        raise KeyboardInterrupt
        assert torch.equal(run_streamed(handle, stacks, hidden), run_plain(patched, hidden))


def test_a_slot_that_was_partly_written_is_read_again(
    stacks, slow_source, tmp_path: Path, monkeypatch
):
    """An interrupt in the copy of a patched block to its slot, whose bytes are then of no use."""
    copies: list[str] = []
    threads: list[int] = []
    copyto = np.copyto

    def cut_off(into: np.ndarray, source: np.ndarray) -> None:
        # Other threads copy other blocks meanwhile.
        if copies == ["patched"] and threads == [threading.get_ident()]:
            copies.append("cut off")
            into[: len(into) // 2] = 255
            raise KeyboardInterrupt
        copyto(into, source)

    def compute(matrix: Mapping[str, torch.Tensor], parts: Mapping[str, torch.Tensor]):
        matrix[""].add_(parts["full"])
        threads.append(threading.get_ident())
        copies.append("patched")
        return {}

    key, full = BlockKey("high", 1), torch.ones(3 * WIDTH, WIDTH)
    computed = ComputedPatch(parts={"full": full}, compute=compute)
    patched = copy.deepcopy(stacks)
    with torch.no_grad():
        patched["high"][1].up.weight.add_(full)
    hidden = torch.ones(1, WIDTH)
    source = slow_source(write_raw(stacks, tmp_path / "blocks.safetensors", torch.float32), seed=0)
    policy = OffloadPolicy.layerwise(1, source="pinned")
    monkeypatch.setattr("wanstream.offload.transfers.cpu.np.copyto", cut_off)
    with attach_offload(
        stacks, policy=policy, device=CPU, source=source, follow_forward=False
    ) as handle:
        handle.set_patches({key: BlockPatch(identity=1, weights={"up.weight": computed})})
        with pytest.raises(KeyboardInterrupt):
            run_streamed(handle, stacks, hidden)
        for _ in range(2):
            assert torch.equal(run_streamed(handle, stacks, hidden), run_plain(patched, hidden))
    assert copies == ["patched", "cut off", "patched"]
    assert source.reads.count(key) == 2


def test_a_computed_patch_is_the_only_one_of_its_block(stacks):
    computed = ComputedPatch(parts={}, compute=lambda matrix, parts: {})
    patches = {BlockKey("high", 0, 1): BlockPatch(identity=1, weights={"up.weight": computed})}
    with (
        attach_offload(
            stacks, policy=OffloadPolicy.layerwise(1), device=CPU, follow_forward=False
        ) as handle,
        pytest.raises(ValueError, match="is computed, so the block has no other patch"),
    ):
        handle.set_patches(patches)


def staged_patches(lock: object) -> StagedPatches:
    fmt = block_format(
        {"up.weight": ((96, 32), FP8), "down.weight": ((32, 96), FP8)}, torch.bfloat16
    )
    return StagedPatches({BlockKey("high", index): fmt for index in range(BLOCKS)}, lock=lock)


def test_factors_are_locked_where_they_lie_and_only_while_they_are_set(limited_page_lock):
    driver = limited_page_lock()
    patches = staged_patches(driver)
    patches.replace(patches.prepare(some_patches(1.0)))
    locked = sorted(driver.locked)
    assert len(locked) == 4
    assert (
        patches.locked.nbytes
        == sum(nbytes for _, nbytes in locked)
        == sum(patches.nbytes(k) for k in some_patches(1))
    )
    assert patches.largest_bytes == patches.nbytes(BlockKey("high", 4))

    changed = {**some_patches(1.0), BlockKey("high", 3): some_patches(2.0)[BlockKey("high", 3)]}
    patches.replace(patches.prepare(changed))
    assert len(set(driver.locked) & set(locked)) == 3
    assert len(driver.locked) == 4
    patches.replace({})
    assert driver.locked == []
    assert (patches.locked.nbytes, patches.largest_bytes, patches.nbytes(BlockKey("high", 0))) == (
        0,
        0,
        0,
    )


def test_factors_that_could_not_be_locked_only_cost_time(limited_page_lock):
    driver = limited_page_lock(limit=2)
    patches = staged_patches(driver)
    patches.replace(patches.prepare(some_patches(1.0)))
    assert all(patches.get(key) is not None for key in some_patches(1.0))
    assert len(driver.locked) == 2
    patches.replace({})
    assert driver.locked == []


def test_factors_are_kept_in_the_dtype_that_is_computed_with():
    patches = staged_patches(None)
    patches.replace(patches.prepare(some_patches(1.0, rank=4)))
    held = patches.get(BlockKey("high", 0))
    assert {tensor.dtype for tensor in held.layout.tensors} == {torch.bfloat16}
    assert patches.nbytes(BlockKey("high", 0)) == 2 * (96 * 4 + 4 * 32)
    assert patches.locked.nbytes == 0
