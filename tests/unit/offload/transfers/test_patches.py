"""Streamed blocks are bit-equal to plain ones, with patches as `torch.addmm` adds them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from wanstream.offload import ComputedPatch, Hadamard, Kronecker, Product, Rescaled, WeightPatch
from wanstream.offload.core.pages import in_pages
from wanstream.offload.formats.layout import block_format
from wanstream.offload.formats.packing import QUANT_FORMATS
from wanstream.offload.formats.safetensors_header import FileTensor, read_header
from wanstream.offload.sources.base import BlockSource
from wanstream.offload.sources.file import FileSource
from wanstream.offload.sources.module import ModuleSource
from wanstream.offload.transfers.patches import BlockPatch, StagedPatches
from wanstream.plan.programs import BlockKey
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.offload.fixtures import LimitedPageLock, SlowSource
from wanstream.tests.support.offload.streaming import (
    BLOCK_BYTES,
    BLOCKS,
    IN_RAM,
    LAYERWISE,
    WIDTH,
    attach,
    fetched,
    keys,
    patched,
    plainly,
    stream,
)

STEPS = ["high", "high", "low", "low", "high"]
RESIDENT = OffloadPolicy.resident()
FP8 = torch.float8_e4m3fn
ALL = sorted(keys("high", *range(BLOCKS)) | keys("low", *range(BLOCKS)))
UP = (3 * WIDTH, WIDTH)
DOWN = (WIDTH, 3 * WIDTH)

Patches = dict[BlockKey, BlockPatch]


def patch(identity: object, **weights: WeightPatch) -> BlockPatch:
    named = {f"{name}.weight": weight for name, weight in weights.items()}
    return BlockPatch(identity=identity, weights=named)


def some_patches(strength: float, *, expert: str = "high", rank: int = 4) -> Patches:
    """Patches for one matrix, for both, with a full difference in addition, and for none."""
    random = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) * 0.1

    def factors(rows: int, columns: int) -> WeightPatch:
        return WeightPatch(up=strength * draw(rows, rank), down=draw(rank, columns))

    of_block = {
        0: {"up": factors(*UP)},
        1: {"up": factors(*UP), "down": factors(*DOWN)},
        3: {"down": WeightPatch(full=strength * draw(*DOWN))},
        4: {"down": replace(factors(*DOWN), full=strength * draw(*DOWN))},
    }
    name = ("drawn", rank, strength)
    return {BlockKey(expert, at): patch(name, **weights) for at, weights in of_block.items()}


ONCE = some_patches(1.0)


Q8_0 = QUANT_FORMATS["Q8_0"]
SHAPES = {"up.weight": UP, "down.weight": DOWN}


def encode(kind, name, index, weight) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return stored tensors by name ending, and their values.

    fp8 has scales, one per `up` matrix and one per `down` row.
    """
    if kind == "raw":
        return {"": weight.detach()}, weight
    if kind == "fp8":
        scale = torch.tensor(0.03 + index / 100)
        if name == "down.weight":
            scale = torch.linspace(0.02, 0.05, WIDTH)[:, None].contiguous()
        codes = (weight.float() / scale).to(FP8)
        return {"": codes, ".scale": scale}, codes.float() * scale
    packs = quantize(weight.float().numpy(), GGMLQuantizationType.Q8_0)
    values = torch.from_numpy(dequantize(packs, GGMLQuantizationType.Q8_0))
    return {"": torch.from_numpy(packs).view(-1, Q8_0.nbytes)}, values


def stored_source(kind: str, stacks, path: Path, dtype: torch.dtype) -> BlockSource:
    """Store the weights in a file, and change them to the file's values."""
    if kind == "module":
        return ModuleSource(stacks)
    blocks = {key: stacks[key.expert][key.block] for key in ALL}
    tensors = {}
    for key, block in blocks.items():
        for name in SHAPES:
            weight = block.get_parameter(name)
            stored, values = encode(kind, name, key.block, weight)
            weight.copy_(values.to(dtype))
            tensors |= {f"{key}.{name}{end}": each for end, each in stored.items()}
    save_file(tensors, path)
    file = read_header(path).tensors

    def places(ending: str = "") -> dict[BlockKey, dict[str, FileTensor]]:
        return {key: {name: file[f"{key}.{name}{ending}"] for name in SHAPES} for key in blocks}

    weights = places()
    if kind == "packed":
        for tensors_of in weights.values():
            for name, place in tensors_of.items():
                tensors_of[name] = replace(place, shape=SHAPES[name], packing=Q8_0)
    scales = places(".scale") if kind == "fp8" else {}
    return FileSource(weights, computed_dtypes=dtype, scales=scales)


@pytest.mark.parametrize(
    ("kind", "kept", "policy", "dtype"),
    # Every storage format from the file and from RAM, in fp32 and in half precision.
    [
        ("module", "file", RESIDENT, torch.bfloat16),
        ("raw", "pinned", OffloadPolicy.layerwise(0), torch.float32),
        ("fp8", "file", LAYERWISE, torch.bfloat16),
        ("packed", "pinned", OffloadPolicy.layerwise(2), torch.float32),
        ("module", "pinned", OffloadPolicy.layerwise(3), torch.float32),
        ("raw", "file", OffloadPolicy.block_swap(3, 1), torch.float16),
        ("fp8", "pinned", OffloadPolicy.block_swap(5, 3), torch.float32),
        ("packed", "file", OffloadPolicy.block_swap(0, 1), torch.bfloat16),
    ],
    ids=str,
)
def test_streamed_and_patched_is_plain_and_patched(make_stack, tmp_path, dtype, policy, kind, kept):
    seeds = {"high": 1, "low": 2}
    stacks = {name: make_stack(BLOCKS, seed=seed, dtype=dtype) for name, seed in seeds.items()}
    source = stored_source(kind, stacks, tmp_path / "blocks.safetensors", dtype)
    source = SlowSource(source, seed=0, longest_s=0.001)
    both = {**ONCE, **some_patches(0.5, expert="low")}
    high_only = some_patches(-0.75, rank=5)
    hidden = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    different = (patched(stacks, each) for each in ({}, both, high_only))
    plain, with_both, other = (plainly(each, STEPS, hidden) for each in different)
    assert not torch.equal(plain, with_both)
    assert not torch.equal(with_both, other)
    with attach(stacks, replace(policy, source=kept), source=source) as engine:
        given = ((both, with_both), (high_only, other), ({}, plain), (both, with_both))
        for patches, expected in given:
            engine.set_patches(patches)
            for _ in range(2):
                value, run = stream(engine, stacks, STEPS, hidden)
                assert torch.equal(value, expected)
                assert tuple(run.fetched) == run.program.fetches


@pytest.mark.parametrize("kept", ["file", "pinned"])
def test_only_blocks_with_another_identity_are_fetched_again(stacks, slow, kept):
    three = BlockKey("high", 3)
    changed = {**ONCE, three: some_patches(2.0)[three]}
    without = {key: each for key, each in changed.items() if key.block != 4}
    with attach(stacks, OffloadPolicy.resident(source=kept), source=slow) as engine:
        cases = [(ONCE, set(slow.formats)), (some_patches(1.0), set()), (changed, {three})]
        cases += [(without, keys("high", 4)), ({}, keys("high", 0, 1, 3)), ({}, set())]
        for patches, again in cases:
            engine.set_patches(patches)
            if kept == "pinned":
                memory = sum(in_pages(engine.patches.nbytes(key)) for key in patches)
                slots = in_pages(BLOCK_BYTES) * len(engine.ram.contents())
                assert engine.host_bytes == slots + memory
            blocks = fetched(stream(engine, stacks, STEPS)[1])
            assert (len(blocks), set(blocks)) == (len(again), again)
    if kept == "pinned":
        assert sorted(slow.reads) == sorted(slow.formats), "stored bytes are read once"


def test_factors_are_copied_once(stacks):
    class Unread(dict):
        def items(self):
            raise AssertionError("read again")

    patches = some_patches(1.0)
    expected = plainly(patched(stacks, ONCE))
    with attach(stacks) as engine:
        engine.set_patches(patches)
        unread = {key: replace(each, weights=Unread(each.weights)) for key, each in patches.items()}
        engine.set_patches(unread)
        with pytest.raises(AssertionError, match="read again"):
            engine.set_patches({key: replace(each, identity="new") for key, each in unread.items()})
        for weight in (weight for each in patches.values() for weight in each.weights.values()):
            for factor in (weight.up, weight.down, weight.full):
                if factor is not None:
                    factor.zero_()
        assert torch.equal(stream(engine, stacks)[0], expected)


def pair(rows: int, up_rank: int, down_rank: int, columns: int) -> WeightPatch:
    return WeightPatch(up=torch.zeros(rows, up_rank), down=torch.zeros(down_rank, columns))


def full(*shape: int, **how: object) -> WeightPatch:
    return WeightPatch(full=torch.zeros(shape, **how))


def product(rows: int, rank: int, columns: int) -> Product:
    return Product(up=torch.zeros(rows, rank), down=torch.zeros(rank, columns))


GOOD = pair(96, 4, 4, 32)
LOKR = Kronecker(first=torch.zeros(4, 4), second=torch.zeros(24, 7))
LOHA = Hadamard(one=product(96, 4, 32), other=product(96, 4, 31))
DORA = Rescaled(change=GOOD, magnitude=torch.ones(95, 1), strength=1.0)
COMPUTED = ComputedPatch(parts={}, compute=lambda matrix, parts: {})
NO_DIMENSIONS = WeightPatch(up=torch.zeros(()), down=torch.zeros(()))
FIRST = BlockKey("high", 0)
UP_REFUSED = {
    "too many rows": (pair(97, 4, 4, 32), r"up is \[97, 4\], which should be \[96, 4\]; the mat"),
    "two ranks": (pair(96, 4, 5, 32), r"down is \[5, 32\], which should be \[4, 32\]"),
    "full transposed": (full(32, 96), r"full is \[32, 96\]; the matrix is \[96, 32\]"),
    "no rank": (pair(96, 0, 0, 32), r"up is \[96, 0\]; a matrix with a rank above 0"),
    "no dimensions": (NO_DIMENSIONS, r"up is \[\]; a matrix with a rank above 0"),
    "LoKr": (WeightPatch(kronecker=(LOKR,)), r"product of \[4, 4\] and \[24, 7\]; the matrix is"),
    "LoHa": (WeightPatch(hadamard=(LOHA,)), r"hadamard 0 other down is \[4, 31\], which should"),
    "magnitude": (WeightPatch(rescaled=(DORA,)), r"magnitude is \[95, 1\]; the matrix is \[96, 32"),
    "up alone": (WeightPatch(up=torch.zeros(96, 4)), "has up; give up and down"),
    "nothing": (WeightPatch(), "has nothing; give up and down"),
    "integers": (full(96, 32, dtype=torch.int32), r"torch\.int32 on cpu"),
    "no data": (full(96, 32, device="meta"), "on meta"),
}
REFUSED = {case: (FIRST, "up.weight", *row) for case, row in UP_REFUSED.items()} | {
    "block": (BlockKey("high", 6), "up.weight", GOOD, r"block 6 of 'high'.*only blocks 0 to 5"),
    "expert": (BlockKey("mid", 0), "up.weight", GOOD, r"of 'mid'.*only those of 'high', 'low'"),
    "name": (FIRST, "up.bias", GOOD, r"up\.bias is not streamed; only up\.weight, down\.wei"),
    "computed": (BlockKey("high", 0, 1), "up.weight", COMPUTED, "so the block has no other patch"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unfit_patches_are_refused_and_the_others_stay(stacks, case):
    key, name, weight, message = REFUSED[case]
    expected = plainly(patched(stacks, ONCE))
    with attach(stacks, RESIDENT) as engine:
        engine.set_patches(ONCE)
        stream(engine, stacks)
        wrong = BlockPatch(identity="wrong", weights={name: weight})
        with pytest.raises(ValueError, match=message):
            engine.set_patches({**some_patches(2.0), key: wrong})
        value, run = stream(engine, stacks)
        assert run.fetched == []
        assert torch.equal(value, expected)


def test_factors_without_room_in_memory_are_refused(stacks):
    one = torch.zeros(1)
    rank = 10**12
    endless = WeightPatch(up=one.expand(3 * WIDTH, rank), down=one.expand(rank, WIDTH))
    expected = plainly(patched(stacks, ONCE))
    with attach(stacks, RESIDENT) as engine:
        engine.set_patches(ONCE)
        words = r"block 0 of 'high': 512000000\.0 MB of RAM cannot be allocated .*fewer LoRAs"
        with pytest.raises(OSError, match=words):
            engine.set_patches({FIRST: patch("endless", up=endless)})
        assert torch.equal(stream(engine, stacks)[0], expected)


def test_a_partly_written_slot_is_read_again(stacks, tmp_path, monkeypatch):
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

    key = BlockKey("high", 1)
    change = torch.ones(UP)
    expected = plainly(patched(stacks, {key: patch(1, up=WeightPatch(full=change))}))
    path = tmp_path / "blocks.safetensors"
    source = SlowSource(stored_source("raw", stacks, path, torch.float32), seed=0)
    monkeypatch.setattr("wanstream.offload.transfers.cpu.np.copyto", cut_off)
    with attach(stacks, IN_RAM, source=source) as engine:
        computed = ComputedPatch(parts={"full": change}, compute=compute)
        engine.set_patches({key: patch(1, up=computed)})
        with pytest.raises(KeyboardInterrupt):
            stream(engine, stacks)
        for _ in range(2):
            assert torch.equal(stream(engine, stacks)[0], expected)
    assert copies == ["patched", "cut off", "patched"]
    assert source.reads.count(key) == 2


def test_factors_in_the_compute_dtype_are_locked_only_while_they_are_set():
    driver = LimitedPageLock()
    fmt = block_format({"up.weight": (UP, FP8), "down.weight": (DOWN, FP8)}, torch.bfloat16)
    patches = StagedPatches(dict.fromkeys(keys("high", *range(BLOCKS)), fmt), lock=driver)
    patches.replace(patches.prepare(ONCE))
    assert {tensor.dtype for tensor in patches.get(FIRST).layout.tensors} == {torch.bfloat16}
    assert patches.nbytes(FIRST) == 2 * (96 * 4 + 4 * 32)
    locked = set(driver.locked)
    nbytes = sum(patches.nbytes(key) for key in ONCE)
    assert len(locked) == 4
    assert patches.locked.nbytes == sum(nbytes for _, nbytes in locked) == nbytes
    assert patches.largest_bytes == patches.nbytes(BlockKey("high", 4))
    three = BlockKey("high", 3)
    patches.replace(patches.prepare({**ONCE, three: some_patches(2.0)[three]}))
    assert len(set(driver.locked) & locked) == 3
    assert len(driver.locked) == 4
    patches.replace({})
    assert driver.locked == []
    assert (patches.locked.nbytes, patches.largest_bytes, patches.nbytes(FIRST)) == (0, 0, 0)
