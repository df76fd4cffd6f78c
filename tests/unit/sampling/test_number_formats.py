"""Runs in every number format and kernel set.

They are bit-equal to plain models with the decoded weights, wherever a block lives.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from wanstream.block_kernels import Kernels, math_choice, multiplications, replace_linears
from wanstream.offload.formats import EightBit
from wanstream.offload.formats.decode import decode_block
from wanstream.offload.formats.layout import tensor_views
from wanstream.sampling import lane_names, run_shape, working_bytes
from wanstream.sampling.cache import Stage
from wanstream.sampling.steps import DenoiseResult, Side
from wanstream.schema import OffloadPolicy
from wanstream.testing.experts import make_lora, save_expert_file, save_lora
from wanstream.tests.support.offload.fixtures import ThreadGroup
from wanstream.tests.support.sampling.runs import CPU, LAYERWISE, latents_of, run
from wanstream.tests.support.wan.number_formats import ENCODERS, MixedLayout, mixture
from wanstream.tests.support.wan.quantised_files import (
    Fp8Layout,
    dequantised,
    in_dtype,
    round_to_fp8_rows,
)
from wanstream.wan.checkpoint.open import open_expert
from wanstream.wan.experts.open import open_experts
from wanstream.wan.experts.storage import Precision, block_source, multiplied_layers
from wanstream.wan.lora.file import LoraFile, open_lora

PINNED = OffloadPolicy.layerwise(1, source="pinned")
POLICIES = {
    "one buffer": OffloadPolicy.layerwise(0),
    "layerwise": LAYERWISE,
    "block swap": OffloadPolicy.block_swap(1, source="pinned"),
    "resident": OffloadPolicy.resident(),
}
SHORT = {"steps": 3, "switch_step": 1}
"""Request settings with one high-noise step and two low-noise steps."""
LANES = {0: (Stage("high"), lane_names(1, (Side.POSITIVE,)))}
SHAPE_RUN = {"lanes": LANES, "sides": {"high": (0,), "low": (0,)}}
LAYOUTS: dict[str, MixedLayout | Fp8Layout] = {
    **{name: MixedLayout(format_of=lambda _, name=name: name) for name in ENCODERS},
    "mixed": MixedLayout(format_of=mixture),
    "fp8_scaled": Fp8Layout(),
    "fp8_e5m2": Fp8Layout(kind="comfy_quant", dtype=torch.float8_e5m2),
}
exact = pytest.mark.usefixtures("exact_blocks")


@pytest.fixture
def save_pair(make_tiny_expert, tmp_path):
    """`save_pair(layout, dtype)`: the files of both experts, and models with the same values."""

    def save(layout, dtype=torch.float32):
        files = {}
        models = {}
        values = layout.dtype if isinstance(layout, Fp8Layout) else layout
        for seed, name in enumerate(("high", "low")):
            model = make_tiny_expert(seed=seed, layers=2)
            files[name] = tmp_path / f"{name}.st"
            save_expert_file(model, files[name], dtype=dtype, quantised=layout)
            models[name] = (
                in_dtype(model, dtype).float()
                if layout is None
                else dequantised(model, dtype=dtype, fp8=values)
            )
        return files, models

    return save


@pytest.fixture
def save_factors(make_tiny_expert, tmp_path):
    """`save_factors(**shape)`: a LoRA for these experts."""

    def save(**shape: int) -> LoraFile:
        path = tmp_path / f"lora {shape}"
        save_lora(make_lora(make_tiny_expert(layers=2), seed=3, **shape), path, dtype=torch.float32)
        return open_lora(path)

    return save


def opened(files, **how):
    return open_experts(*files.values(), **{"compute_dtype": torch.float32, **how})


@exact
@pytest.mark.parametrize(
    ("layout", "policy"),
    [("mixed", "block swap"), ("nvfp4 LightX2V", "one buffer"), ("fp8_e5m2", "layerwise")],
)
def test_marked_layers_equal_plain_models(layout, policy, save_pair, plain_denoise, make_request):
    files, models = save_pair(LAYOUTS[layout])
    request = make_request(**SHORT)
    with opened(files) as pair:
        latents = latents_of(pair, request, POLICIES[policy])
    assert torch.equal(latents, plain_denoise(models, request))


def with_codes(files, models, storage):
    """Replace layers in plain models by layers that multiply codes.

    Their bytes come from whole block reads.
    """
    experts = {name: open_expert(file) for name, file in files.items()}
    precision = Precision(compute_dtype=torch.float32, storage=storage, arithmetic="as stored")
    source = block_source(experts, precision, direct=False)
    layers = multiplied_layers(source.formats)
    assert layers
    for name, packings in layers.items():
        replaced = replace_linears(models[name].blocks, packings)
        multiplications(["int8", "fp8"], CPU, torch.float32).prepare(replaced)
    for key, fmt in source.formats.items():
        sizes = (fmt.stored.nbytes, fmt.computed.nbytes)
        stored, block = (torch.empty(nbytes, dtype=torch.uint8) for nbytes in sizes)
        source.read_block(key, stored)
        decode_block(stored, block, fmt, source.scales(key))
        views = tensor_views(block, fmt.computed).values()
        for tensor, weight in zip(fmt.computed.tensors, views, strict=True):
            name = tensor.name.removesuffix(".weight")
            layer = models[key.expert].blocks[key.block].get_submodule(name)
            if isinstance(tensor.packing, EightBit):
                weight, scale = tensor.packing.split(weight, tensor.shape)
                layer.weight_scale = scale.clone()
            layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    source.close()
    return models


CODES = {
    "mixed": (LAYOUTS["mixed"], "as stored"),
    "fp8_scaled": (Fp8Layout(), "as stored"),
    "fp8, a plain cast": (None, "as stored"),
    "fp8 in RAM": (None, "fp8"),
    "int8 ConvRot in RAM": (None, "int8 ConvRot"),
    "int8 ConvRot, others mixed": (LAYOUTS["mixed"], "int8 ConvRot"),
}
"""File layout and storage."""
DECODED = ("mixed", "fp8, a plain cast", "int8 ConvRot, others mixed")
"""Codes next to matrices that are decoded."""


@exact
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("mixed", "one buffer"),
        ("fp8_scaled", "layerwise"),
        ("fp8, a plain cast", "resident"),
        ("fp8 in RAM", "block swap"),  # keeps blocks in RAM
        ("int8 ConvRot, others mixed", "layerwise"),
    ],
)
def test_codes_equal_plain_models_of_codes(name, policy, save_pair, plain_denoise, make_request):
    layout, storage = CODES[name]
    files, models = save_pair(layout, torch.float8_e4m3fn if "cast" in name else torch.float32)
    request = make_request(**SHORT)
    with opened(files, arithmetic="as stored", storage=storage) as pair:
        latents = latents_of(pair, request, POLICIES[policy])
        assert (pair.block_bytes.decoded > 0) == (name in DECODED)
    assert torch.equal(latents, plain_denoise(with_codes(files, models, storage), request))


@pytest.mark.parametrize("name", ["fp8_scaled", "int8 ConvRot in RAM"])
def test_codes_halve_the_buffers(name, save_pair):
    layout, storage = CODES[name]
    how = {"compute_dtype": torch.bfloat16, "storage": storage}
    files = save_pair(layout)[0]
    shape = (1, 16, 5, 40, 56)
    decoded, codes = (opened(files, **how, arithmetic=each) for each in ("decoded", "as stored"))
    small = codes.block_bytes
    large = decoded.block_bytes
    assert 0.5 < small.computed / large.computed < 0.51
    assert small.computed == small.stored
    # Decoding keeps an fp8_scaled matrix's only scale outside the block.
    assert 0 <= small.stored - large.stored <= 10 * 256
    assert large.decoded
    assert not small.decoded
    on_device = [pair.device_bytes(LAYERWISE, device="cpu") for pair in (decoded, codes)]
    assert on_device[0] - on_device[1] == 2 * (large.computed - small.computed)
    planned, usual = (run_shape(pair, shape, CPU, **SHAPE_RUN) for pair in (codes, decoded))
    assert planned.kernels.linear_format == ("fp8" if "fp8" in name else "int8")
    assert (usual.kernels.linear_format, planned.compute_dtype) == ("", "bfloat16")
    # Three fp32 copies of a feed-forward layer's inner state take more than a norm.
    assert working_bytes(codes, shape, sides=(0,)) > working_bytes(decoded, shape, sides=(0,))


@pytest.mark.slow  # several loop runs
@exact
@pytest.mark.parametrize(
    ("layout", "noise"),
    [(LAYOUTS["int8 ConvRot"], 0.2), (LAYOUTS["mixed"], 0.2), (Fp8Layout(), 0.4)],
    ids=["int8", "mixed", "fp8"],
)
def test_a_lora_beside_codes(layout, noise, save_pair, save_factors, make_request):
    files = save_pair(layout)[0]
    lora = save_factors()
    request = make_request(**SHORT)

    def runs(policy: OffloadPolicy = LAYERWISE, **how: str) -> list[torch.Tensor]:
        every = []
        with opened(files, **how) as pair:
            for strength in (0.0, 1.0, 0.3, 1.0, 0.0):
                pair.set_loras([(lora, strength)], [(lora, -strength)])
                every.append(latents_of(pair, request, policy))
        return every

    decoded = runs()
    found = [runs(policy, arithmetic="as stored") for policy in POLICIES.values()]
    for every in found:
        assert all(map(torch.equal, every, found[0]))
    plain, full, weak, again, without = found[0]
    assert torch.equal(full, again)
    assert torch.equal(plain, without)
    error = ((full - plain) - (decoded[1] - decoded[0])).norm()
    assert error < noise * (decoded[1] - decoded[0]).norm(), "the LoRA is another one"
    assert (weak - plain).norm() < 0.6 * (full - plain).norm()
    with opened(files, arithmetic="as stored") as pair:
        pair.set_loras([(lora, 1.0), (lora, 0.5)], [(lora, 1.0)])
        predicted = pair.device_bytes(LAYERWISE, device="cpu")
        run(pair, request)
        # Each factor starts at a multiple of 256 bytes.
        assert 0 <= pair.loaded_bytes - predicted <= 2 * 2 * len(LAYOUTS) * 256
        planned = run_shape(pair, request.computed_shape, CPU, **SHAPE_RUN)
        assert planned.blocks.patch_bytes == pair.patch_bytes > 0


@pytest.mark.slow  # several loop runs
@exact
@pytest.mark.parametrize("storage", ["as stored", "int8 ConvRot"])
def test_two_ranks_gather_mixed_blocks(storage, save_pair, save_factors, make_request):
    files = save_pair(LAYOUTS["mixed"])[0]
    lora = save_factors()

    def of_rank(sharded):
        with opened(files, storage=storage, arithmetic="as stored") as pair:
            pair.set_loras([(lora, 1.0)], [(lora, 0.5)])
            pair.shard(sharded)
            return latents_of(pair, make_request(**SHORT))

    expected = of_rank(None)
    with ThreadPoolExecutor(2) as pool:
        for latents in pool.map(of_rank, ThreadGroup(2).ranks()):
            assert torch.equal(latents, expected)


@exact
def test_fp8_storage_is_quantised_rows_in_half_the_bytes(
    tiny_expert_folder, make_request, plain_models, plain_denoise
):
    request = make_request(**SHORT, guidance=(1.0, 1.0))
    folders = [tiny_expert_folder(seed=seed, dtype=torch.bfloat16) for seed in (1, 2)]
    models = plain_models(dtype=torch.bfloat16)
    expected = plain_denoise({name: round_to_fp8_rows(models[name]) for name in models}, request)
    threads = torch.get_num_threads()

    def result(storage: str) -> DenoiseResult:
        with open_experts(*folders, compute_dtype=torch.bfloat16, storage=storage) as pair:
            return run(pair, request, PINNED)

    plain, kept = map(result, ("as stored", "fp8"))
    assert torch.get_num_threads() == threads, "the thread that computes keeps its threads"
    assert torch.equal(kept.latents, expected)
    assert 0 < (expected - plain.latents).norm() / plain.latents.norm() < 0.2
    for before, after in zip(plain.timeline.steps, kept.timeline.steps, strict=True):
        assert 1 <= after.bytes_moved * 2 / before.bytes_moved < 1.02  # row scales
        assert before.decode_s == 0 < after.decode_s
        assert after.transfers.read_bytes == before.transfers.read_bytes, "the file is the same"
    assert kept.timeline.steps[0].transfers.read_bytes == plain.timeline.steps[0].bytes_moved


@pytest.fixture(
    # Triton is interpreted, which takes 7 s.
    params=["torch", "comfy-kitchen", pytest.param("triton", marks=pytest.mark.slow)]
)
def kernels(request, monkeypatch):
    math_choice.choose_math.cache_clear()
    if request.param == "triton":
        made = request.getfixturevalue("triton_math").TritonMath()
        monkeypatch.setattr(math_choice, "_triton_math", lambda device: made)
    if request.param == "comfy-kitchen":
        pytest.importorskip("comfy_kitchen")
    yield request.param
    math_choice.choose_math.cache_clear()


def test_streamed_blocks_are_resident_ones_under_each_kernel_set(kernels, open_pair, make_request):
    request = make_request(steps=2, switch_step=1, guidance=(1.0, 1.0))
    every = []
    for policy in POLICIES.values():
        with open_pair() as pair:
            pair.kernels = Kernels(math=kernels)
            every.append(latents_of(pair, request, policy))
            assert pair.engine(policy, CPU).models["high"].blocks[0].settings.math.name == kernels
    assert all(torch.equal(latents, every[0]) for latents in every)
