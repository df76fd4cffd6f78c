"""Kernel launches for decoding on the checked device, and values from the shorter way."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from wanstream.offload.formats import NVFP4, chunk_size
from wanstream.offload.formats.decode import FP8_DTYPES, decode_tensor, decode_work_bytes
from wanstream.offload.formats.packing import MXFP8, QUANT_FORMATS, Constants, EightBit, Packing
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.testing import TinyShape, make_expert, make_lora, save_expert_file, save_lora
from wanstream.testing.quantised import q4_k_m, save_expert_gguf
from wanstream.tests.support.accelerator import Accelerator
from wanstream.tests.support.sampling.runs import LAYERWISE
from wanstream.tests.support.wan.number_formats import ENCODERS, MixedLayout
from wanstream.tests.support.wan.quantised_files import Fp8Layout
from wanstream.wan import open_experts, open_lora

PAGE = (Path(__file__).parents[3] / "docs" / "number-formats.md").read_text(encoding="utf-8")
BF16 = torch.bfloat16
COMPUTED = pytest.mark.parametrize("computed", [torch.float32, torch.float16, BF16], ids=str)

Write = Callable[[WanTransformer3DModel, Path], object]


def launches(gpu: Accelerator) -> int:
    """Return the launches so far, which only the checked device counts."""
    return 0 if gpu.machine is None else gpu.machine.launches


@COMPUTED
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("by_row", [False, True], ids=["scalar", "per row"])
def test_fp8_takes_two_launches_and_no_memory(gpu, dtype, computed, by_row):
    random = torch.Generator().manual_seed(0)
    stored = torch.randint(0, 256, (64, 40), dtype=torch.uint8, generator=random).view(dtype)
    scale = torch.rand((64, 1) if by_row else (), generator=random) * 0.01
    into = torch.empty(stored.shape, dtype=computed, device=gpu.device)
    on_device = stored.to(gpu.device)
    factor = scale.to(gpu.device)
    decode_tensor(on_device, into, scale=factor)  # kernels are compiled on their first use
    gpu.runtime.reset_peaks()
    before = gpu.runtime.allocated_bytes()
    launched = launches(gpu)
    decode_tensor(on_device, into, scale=factor)
    assert gpu.runtime.allocated_bytes(peak=True) == before
    assert gpu.machine is None or launches(gpu) - launched == 2
    expected = (stored.float() * scale).to(computed)
    assert torch.equal(into.cpu().nan_to_num(7.0), expected.nan_to_num(7.0))


def test_a_scaled_vector_is_decoded(gpu):
    stored = torch.arange(1, 7, dtype=torch.float32).to(torch.float8_e4m3fn)
    into = torch.empty(6, dtype=BF16, device=gpu.device)
    decode_tensor(stored.to(gpu.device), into, scale=torch.tensor(0.5, device=gpu.device))
    assert torch.equal(into.cpu(), (stored.float() * 0.5).bfloat16())


def test_a_long_matrix_takes_no_more(gpu):
    gpu.need_fake("it counts launches")
    rows = chunk_size.CHUNK_VALUES // 1024 + 5
    stored = torch.zeros(rows, 1024, dtype=torch.float8_e4m3fn, device=gpu.device)
    into = torch.empty(stored.shape, dtype=BF16, device=gpu.device)
    launched = launches(gpu)
    decode_tensor(stored, into, scale=torch.ones((), device=gpu.device))
    assert launches(gpu) - launched == 3, "and one that makes the factor"


PIECE = {"Q4_0": 6, "Q4_1": 8, "Q5_0": 10, "Q5_1": 12, "Q8_0": 2, "IQ4_NL": 7}
PIECE |= {"Q2_K": 11, "Q3_K": 19, "Q4_K": 14, "Q5_K": 18, "Q6_K": 11, "IQ4_XS": 16}
"""Launches for one piece of a quantised tensor, also the figures in the table in
docs/number-formats.md."""


@pytest.mark.parametrize("name", QUANT_FORMATS)
def test_a_quantised_piece(gpu, name):
    gpu.need_fake("it counts launches")
    packing = QUANT_FORMATS[name]
    groups = torch.zeros(64, packing.nbytes, dtype=torch.uint8).to(gpu.device)
    into = torch.empty(64, packing.values, dtype=BF16, device=gpu.device)
    gpu.runtime.reset_peaks()
    before = gpu.runtime.allocated_bytes()
    launched = launches(gpu)
    decode_tensor(groups, into, packing=packing)
    assert launches(gpu) - launched == PIECE[name]
    taken = gpu.runtime.allocated_bytes(peak=True) - before
    assert taken <= decode_work_bytes(into.numel(), gpu.device)


MATRIX: dict[str, tuple[Packing, int]] = {
    "int8": (EightBit(by_row=False), 1),
    "int8 rows": (EightBit(), 1),
    "int8 ConvRot": (EightBit(group=256), 5),
    "mxfp8": (MXFP8, 5),
    "nvfp4": (NVFP4, 6),
}
"""Launches for a matrix decoded in one piece."""


@COMPUTED
@pytest.mark.parametrize("name", MATRIX)
def test_a_marked_matrix_has_the_values_of_its_definition(gpu, name, computed):
    encoded = ENCODERS[name](torch.randn(64, 512, generator=torch.Generator().manual_seed(1)))
    stored, scale = (None if each is None else each.to(gpu.device) for each in encoded.in_memory)
    into = torch.empty(64, 512, dtype=computed, device=gpu.device)
    launched = launches(gpu)
    decode_tensor(stored, into, packing=MATRIX[name][0], scale=scale)
    assert gpu.machine is None or launches(gpu) - launched == MATRIX[name][1]
    assert torch.equal(into.cpu(), encoded.values.to(computed))


def test_pieces_grow_with_the_memory_of_the_device(gpu, monkeypatch):
    gpu.need_fake("it counts launches")
    packing = QUANT_FORMATS["Q8_0"]
    groups = torch.zeros(2**20 // packing.values, packing.nbytes, dtype=torch.uint8).to(gpu.device)
    into = torch.empty(2**20, dtype=BF16, device=gpu.device)
    monkeypatch.setattr(chunk_size, "CHUNK_VALUES", 2**17)
    for vram, pieces in ((0, 8), (2**19 * chunk_size.VRAM_PER_VALUE, 2), (2**40, 1)):
        monkeypatch.setattr(chunk_size, "_vram_bytes", lambda device, vram=vram: vram)
        launched = launches(gpu)
        decode_tensor(groups, into, packing=packing)
        assert launches(gpu) - launched == pieces * PIECE["Q8_0"]


def _file(layout: Fp8Layout | MixedLayout | None = None) -> Write:
    return lambda model, path: save_expert_file(model, path, dtype=BF16, quantised=layout)


def _marked(name: str) -> Write:
    return _file(MixedLayout(format_of=lambda _: name))


def _q4_k_m(model: WanTransformer3DModel, path: Path) -> None:
    save_expert_gguf(model, path.with_suffix(".gguf"), types=q4_k_m)


FILES: dict[str, tuple[Write, str, int]] = {
    "bf16": (_file(), "as stored", 0),
    "fp8": (_file(Fp8Layout()), "as stored", 20),
    "fp8 in RAM": (_file(), "fp8", 20),
    "Q4_K_M": (_q4_k_m, "as stored", 50),
    "int8 ConvRot": (_marked("int8 ConvRot"), "as stored", 40),
    "nvfp4": (_marked("nvfp4"), "as stored", 60),
}
"""A file's form, the storage, and the launches for a visit."""


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "LoRA"])
@pytest.mark.parametrize(("write", "storage", "expected"), FILES.values(), ids=FILES)
def test_a_visit(gpu, tmp_path, write, storage, expected, lora):
    """One copy, one more for a LoRA's factors and a launch for each matrix.

    The compute thread does not wait.
    """
    machine = gpu.need_fake("it counts")
    model = make_expert(TinyShape(layers=4, ffn_dim=256), seed=1)
    write(model, tmp_path / "expert")
    [path] = tmp_path.iterdir()
    with open_experts(path, path, compute_dtype=BF16, storage=storage) as pair:
        if lora:
            save_lora(make_lora(model, seed=2), tmp_path / "lora", dtype=BF16)
            pair.set_loras([(open_lora(tmp_path / "lora"), 1.0)], [])
        engine = pair.engine(OffloadPolicy.layerwise(1, source="pinned"), gpu.device)
        for _ in range(2):  # RAM is filled in the first run
            before = machine.launches, machine.copies
            with engine.run(step_visits(["high"], engine.block_counts)) as run:
                for block in range(4):
                    with run.visit(0, "high", block):
                        pass
        counted = ((machine.launches - before[0]) / 4, (machine.copies - before[1]) / 4)
        assert counted == (expected + 10 * lora, 1 + lora)
        del run, engine


@pytest.mark.parametrize("name", ["bf16", "fp8", "Q4_K_M"])
def test_the_resident_parameters_are_copied_together(gpu, tmp_path, name):
    machine = gpu.need_fake("it counts copies")
    FILES[name][0](make_expert(TinyShape(layers=4, ffn_dim=256), seed=1), tmp_path / "expert")
    [path] = tmp_path.iterdir()
    with open_experts(path, path, compute_dtype=BF16) as pair:
        engine = pair.engine(LAYERWISE, gpu.device)
        before = machine.copies
        for expert in ("high", "low"):
            assert len(list(engine.models[expert].parameters())) > 60
        assert machine.copies - before == 2 * 3, "the parameters, and two position tables"
        del engine


SHAPES = [(80, 5120)] * 8 + [(216, 5120), (80, 13824)]
"""Ten Wan2.2 A14B matrices, with a 64th of their rows."""


@pytest.mark.parametrize("name", [name for name in MATRIX if name != "int8 rows"])
def test_the_table_of_launches_has_those_of_a_block(gpu, monkeypatch, name):
    gpu.need_fake("it counts launches")
    monkeypatch.setattr(chunk_size, "CHUNK_VALUES", 1)
    constants: Constants = {}
    counted = []
    for gib in (24, 24, 141):  # the first time also makes the constants
        monkeypatch.setattr(chunk_size, "_vram_bytes", lambda _, gib=gib: gib * 2**30 // 64)
        before = launches(gpu)
        for shape in SHAPES:
            encoded = ENCODERS[name](torch.ones(shape)).in_memory
            stored, scale = (None if each is None else each.to(gpu.device) for each in encoded)
            how = {"packing": MATRIX[name][0], "scale": scale, "constants": constants}
            decode_tensor(stored, torch.empty(shape, dtype=BF16, device=gpu.device), **how)
        counted.append(launches(gpu) - before)
    rows = re.findall(rf"^\| {name} \| \d \| (\d+) \| (\d+) \|", PAGE, re.MULTILINE)
    assert rows == [(str(counted[1]), str(counted[2]))]
