"""`wanstream plan FILE`: a model file's blocks and costs, from the header."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import product

import pytest

from wanstream.cli import main
from wanstream.cli.model_file import FileRun, read_model_file, tokens_of
from wanstream.plan import Budgets, memory_needs, plan_offload
from wanstream.plan.machine import expected_machine

BYTES = {"BF16": 2, "F32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}
RTX_4070 = expected_machine("RTX 4070", ram_bytes=32 << 30, disk_bytes_per_s=5e9)
MACHINE = ["--gpu", "RTX 4070", "--ram", "32", "--ssd", "5"]


def write_header(path, shapes):
    """Write a sparse file with the real size but no values."""
    header = {}
    end = 0
    for name, (dtype, shape) in shapes.items():
        nbytes = math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path


def flux2(prefix: str = "", dtype: str = "BF16", double: int = 8, single: int = 48) -> dict:
    """Return the matrices in FLUX.2 dev's blocks, and one outside them."""
    wide = 6144
    hidden = 18432
    shapes = {f"{prefix}img_in.weight": ("BF16", (wide, 128))}
    stream = {"attn.qkv": (3 * wide, wide), "attn.proj": (wide, wide)}
    stream |= {"mlp.0": (2 * hidden, wide), "mlp.2": (wide, hidden)}
    double_block = {f"{name}_{key}": stream[key] for name in ("img", "txt") for key in stream}
    single_block = {"linear1": (3 * wide + 2 * hidden, wide), "linear2": (wide, wide + hidden)}
    for kind, count, block in (("double", double, double_block), ("single", single, single_block)):
        for at, (layer, shape) in product(range(count), block.items()):
            shapes[f"{prefix}{kind}_blocks.{at}.{layer}.weight"] = (dtype, shape)
    for at in range(double):
        shapes[f"{prefix}double_blocks.{at}.img_attn.norm.query_norm.scale"] = ("BF16", (128,))
    return shapes


@pytest.fixture
def read(tmp_path):
    return lambda shapes: read_model_file(write_header(tmp_path / "a.safetensors", shapes))


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_blocks_have_the_sizes_of_the_header(read, prefix):
    """The sizes equal the ones for FLUX.2 dev in `docs/native-families.md`."""
    shapes = flux2(prefix)
    if prefix:
        shapes["text_encoders.t5xxl.encoder.block.0.layer.weight"] = ("BF16", (4096, 4096))
    model = read(shapes)
    assert [round(block.sizes.file / 1e6) for block in model.blocks] == [1963] * 8 + [981] * 48
    assert {block.width for block in model.blocks} == {6144}
    assert model.describe().startswith("a.safetensors: 62.8 GB, 100.0% in blocks that stream")


def test_sequences_are_no_lists_and_large_layers_are_blocks(read):
    """Wan 14B has such layers, and so has a model with a stack of experts."""
    shapes = {
        "text_embedding.0.weight": (5120, 4096),
        "time_projection.1.weight": (30720, 5120),
        "blocks.0.ffn.0.weight": (13824, 5120),
        "blocks.0.experts.weight": (8, 1024, 1024),
    }
    model = read({name: ("BF16", shape) for name, shape in shapes.items()})
    sizes = [2 * (13824 * 5120 + 8 * 1024**2), 2 * 30720 * 5120]
    assert [block.sizes.file for block in model.blocks] == sizes
    assert model.outside_bytes == 2 * 5120 * 4096


@pytest.mark.parametrize(
    ("dtype", "computed", "parameters"),
    [("BF16", 2, 1), ("F32", 2, 1), ("I8", 1, 1), ("F8_E4M3", 1, 1), ("U8", 1, 2)],
)
def test_bytes_to_compute_with(read, dtype, computed, parameters):
    [block] = read({"layers.0.ffn.weight": (dtype, (4096, 4096))}).blocks
    stored = 4096**2 * BYTES[dtype]
    assert block.sizes == (stored, stored, 4096**2 * computed)
    assert block.parameters == 4096**2 * parameters


def test_operations_are_those_of_the_matrices_and_an_attention(read):
    run = FileRun(model=read(flux2(double=2, single=2)), tokens=4096, lanes=2, steps=(0, 1))
    parameters = sum(block.parameters for block in run.model.blocks)
    operations = 2 * (2 * parameters * 4096 + 4 * 4 * 4096**2 * 6144)
    hardware = run.costs(RTX_4070).hardware
    visits_s = sum(hardware.visit_s["model"] * share for share in hardware.visit_shares)
    assert visits_s * RTX_4070.flops_per_s == pytest.approx(operations)
    measured = run.calibrated(RTX_4070, 2 * visits_s / 4, None)
    assert measured.flops_per_s == pytest.approx(RTX_4070.flops_per_s / 2)


def test_unequal_blocks_are_planned_with_their_own_sizes(read):
    """If all buffers and slots had the largest block's size, FLUX.2 dev would wait for the disk."""
    run = FileRun(model=read(flux2()), tokens=4096, lanes=1, steps=tuple(range(4)))
    plan = plan_offload(run, RTX_4070, Budgets())
    assert plan.device_bytes <= RTX_4070.vram_bytes
    hardware = run.costs(RTX_4070).hardware
    computed_s = hardware.visit_s["model"] * sum(hardware.visit_shares)
    assert plan.last_step_s < 1.05 * computed_s
    alike = memory_needs(replace(run.blocks, sizes=()), plan.policy, has_bus=True)
    assert alike.device_bytes + alike.host_bytes > 1.2 * (plan.device_bytes + plan.host_bytes)


def test_tokens_of_a_size():
    tokens = {"1024x1024": 4096, "1000x1000": 3969, "832x480x81": 32760, "a": None, "0x9": None}
    assert {size: tokens_of(size) for size in tokens} == tokens


def test_command_plans_an_image(tmp_path, capsys):
    path = write_header(tmp_path / "a.safetensors", flux2(dtype="I8", double=2, single=4))
    command = ["plan", str(path), *MACHINE, "--size", "1024x1024", "--steps", "4", "--cfg", "none"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("a.safetensors: 3.9")
    assert "1 x 4096 tokens, multiplied in int8 at" in lines[1]
    assert lines[-2].startswith("best: ")
    figures = r"from Queue: open 0\.0 s .*, first step (.+) s, all 4 (.+) s, latent after (.+) s; "
    first, steps, latent = map(float, re.match(figures, lines[-1]).groups())
    assert first < steps <= latent
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "simulated"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--size", "1024"], "write WIDTHxHEIGHT"),
        (["--size", "banana", "--tokens", "9"], "write WIDTHxHEIGHT"),
        (["--size", "64x64", "--model", "5b"], "--model is for Wan's experts"),
        (["--size", "64x64", "--steps", "0"], "give at least 1 step"),
        (["--size", "64x64", "--workers", "2"], "--workers is for Wan's experts"),
        (["--size", "64x64", "--compare"], "--compare is for Wan's experts"),
        (["--size", "64x64", "--storage", "fp8"], "--storage is for Wan's experts"),
    ],
)
def test_wrong_options_are_refused(tmp_path, more, words, refusal):
    path = write_header(tmp_path / "a.safetensors", flux2(double=1, single=1))
    assert words in refusal("plan", str(path), *MACHINE, *more)


def test_files_that_are_no_models_are_refused(tmp_path, refusal):
    path = tmp_path / "a.safetensors"
    command = ["plan", str(path), *MACHINE, "--size", "64x64"]
    assert "a.safetensors" in refusal(*command), "missing"
    path.write_bytes(b"PK\x03\x04")
    assert "a.safetensors" in refusal(*command)
    write_header(path, {"to_q.weight": ("BF16", (4096, 4096))})
    assert "has no list of blocks" in refusal(*command)
