"""Runs in every number format, bit-equal to plain models with the decoded weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from wanstream.block_kernels import Kernels, multiplications, replace_linears
from wanstream.offload import Sharded
from wanstream.offload.formats import EightBit
from wanstream.offload.formats.decode import decode_block
from wanstream.offload.formats.layout import tensor_views
from wanstream.sampling import denoise, lane_names, run_shape, working_bytes
from wanstream.sampling.cache import Stage
from wanstream.sampling.steps import Side
from wanstream.schema import OffloadPolicy
from wanstream.schema.refs import Storage
from wanstream.testing.experts import make_lora, save_expert_file, save_lora
from wanstream.testing.quantised import TypeOf, q4_k_m, save_expert_gguf
from wanstream.tests.support.number_formats import ENCODERS, MixedLayout, mixture
from wanstream.tests.support.offload_fixtures import ThreadGroup
from wanstream.tests.support.quantised_files import Fp8Layout, dequantised, in_dtype, matrices
from wanstream.wan import ExpertPair
from wanstream.wan.checkpoint.open import open_expert
from wanstream.wan.experts.open import open_experts
from wanstream.wan.experts.storage import Precision, block_source, multiplied_layers
from wanstream.wan.lora.file import open_lora

pytestmark = pytest.mark.usefixtures("exact_blocks")

LAYERWISE = OffloadPolicy.layerwise(1)
POLICIES = {
    "one buffer": OffloadPolicy.layerwise(0),
    "layerwise": LAYERWISE,
    "block swap": OffloadPolicy.block_swap(1, source="pinned"),
    "resident": OffloadPolicy.resident(),
}


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize("policy", [LAYERWISE, OffloadPolicy.resident(source="pinned")], ids=str)
@pytest.mark.parametrize("types", [q4_k_m, matrices("Q8_0")], ids=["Q4_K_M", "Q8_0"])
def test_a_run_of_gguf_is_the_textbook_loop_to_the_bit(
    types: TypeOf,
    policy: OffloadPolicy,
    make_tiny_expert: Callable[..., Any],
    plain_denoise: Any,
    make_request: Any,
    tmp_path: Path,
) -> None:
    files = {name: tmp_path / f"{name}.gguf" for name in ("high", "low")}
    models = {
        name: save_expert_gguf(make_tiny_expert(seed=seed), file, types=types, seed=seed)
        for seed, (name, file) in enumerate(files.items())
    }
    request = make_request()
    with open_experts(*files.values(), compute_dtype=torch.float32) as pair:
        latents = denoise(pair, request, policy=policy, device="cpu").latents
    assert torch.equal(latents, plain_denoise(models, request))


SHORT = {"steps": 3, "switch_step": 1}
"""Request settings with one high-noise step and two low-noise steps."""

LAYOUTS: dict[str, MixedLayout | Fp8Layout] = {
    **{name: MixedLayout(format_of=lambda _, name=name: name) for name in ENCODERS},
    "mixed": MixedLayout(format_of=mixture),
    "fp8_scaled": Fp8Layout(),
    "fp8_e5m2": Fp8Layout(kind="comfy_quant", dtype=torch.float8_e5m2),
}


@pytest.mark.parametrize(("layout", "policy"), [*zip(LAYOUTS, cycle(POLICIES), strict=False)])
def test_a_run_of_marked_layers_is_the_textbook_loop_to_the_bit(
    layout: str,
    policy: str,
    make_tiny_expert: Callable[..., Any],
    plain_denoise: Any,
    make_request: Any,
    tmp_path: Path,
) -> None:
    files, models = save_pair(tmp_path, make_tiny_expert, LAYOUTS[layout])
    request = make_request(**SHORT)
    with open_experts(*files.values(), compute_dtype=torch.float32) as pair:
        latents = denoise(pair, request, policy=POLICIES[policy], device="cpu").latents
    assert torch.equal(latents, plain_denoise(models, request))


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize("storage", ["as stored", "fp8"])
def test_mixed_blocks_have_one_result_whatever_keeps_them(
    storage: Storage, make_tiny_expert: Callable[..., Any], make_request: Any, tmp_path: Path
) -> None:
    """With fp8 storage, only the unquantised matrix in the file changes."""
    files, _ = save_pair(tmp_path, make_tiny_expert, LAYOUTS["mixed"])
    request, every = make_request(**SHORT), []
    for policy in POLICIES.values():
        with open_experts(*files.values(), compute_dtype=torch.float32, storage=storage) as pair:
            every.append(denoise(pair, request, policy=policy, device="cpu").latents)
    assert all(torch.equal(latents, every[0]) for latents in every)


def save_pair(
    folder: Path,
    make_tiny_expert: Callable[..., Any],
    layout: MixedLayout | Fp8Layout | None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Mapping[str, Path], Mapping[str, Any]]:
    """Write both experts, and return the files and models with the same values."""
    files, models = {}, {}
    for seed, name in enumerate(("high", "low")):
        model = make_tiny_expert(seed=seed, layers=2)
        files[name] = folder / f"{name}.safetensors"
        save_expert_file(model, files[name], dtype=dtype, quantised=layout)
        values = layout.dtype if isinstance(layout, Fp8Layout) else layout
        models[name] = (
            in_dtype(model, dtype).float()
            if layout is None
            else dequantised(model, dtype=dtype, fp8=values)
        )
    return files, models


def plain_models(
    files: Mapping[str, Path], models: Mapping[str, Any], storage: Storage = "as stored"
) -> Mapping[str, Any]:
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
        multiplications(["int8", "fp8"], torch.device("cpu"), torch.float32).prepare(replaced)
    for key, fmt in source.formats.items():
        stored, block = (
            torch.empty(layout.nbytes, dtype=torch.uint8) for layout in (fmt.stored, fmt.computed)
        )
        source.read_block(key, stored)
        decode_block(stored, block, fmt, source.scales(key))
        linears = models[key.expert].blocks[key.block]
        for tensor, view in zip(
            fmt.computed.tensors, tensor_views(block, fmt.computed).values(), strict=True
        ):
            layer = linears.get_submodule(tensor.name.removesuffix(".weight"))
            if isinstance(tensor.packing, EightBit):
                weight, scale = tensor.packing.split(view, tensor.shape)
                layer.weight_scale = scale.clone()
            else:
                weight = view
            layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    source.close()
    return models


CODES: Mapping[str, tuple[Any, Storage]] = {
    **{
        name: (LAYOUTS[name], "as stored")
        for name in ("int8", "int8 rows", "int8 ConvRot", "mixed")
    },
    "fp8_scaled": (Fp8Layout(), "as stored"),
    "fp8, a plain cast": (None, "as stored"),
    "fp8 in RAM": (None, "fp8"),
    "int8 ConvRot in RAM": (None, "int8 ConvRot"),
    "int8 ConvRot of fp8_scaled": (Fp8Layout(), "int8 ConvRot"),
    "int8 ConvRot, others mixed": (LAYOUTS["mixed"], "int8 ConvRot"),
}
"""File layout and storage."""


@pytest.mark.parametrize(
    ("name", "policy"),
    # Only "block swap" keeps blocks in RAM.
    [
        (name, "block swap" if name.endswith("in RAM") else policy)
        for name, policy in zip(CODES, cycle(POLICIES), strict=False)
    ],
)
def test_a_run_of_codes_is_the_textbook_loop_with_such_layers_to_the_bit(
    name: str,
    policy: str,
    make_tiny_expert: Callable[..., Any],
    plain_denoise: Any,
    make_request: Any,
    tmp_path: Path,
) -> None:
    layout, storage = CODES[name]
    cast = torch.float8_e4m3fn if "cast" in name else torch.float32
    files, models = save_pair(tmp_path, make_tiny_expert, layout, dtype=cast)
    request = make_request(**SHORT)
    with open_experts(
        *files.values(), compute_dtype=torch.float32, arithmetic="as stored", storage=storage
    ) as pair:
        latents = denoise(pair, request, policy=POLICIES[policy], device="cpu").latents
        assert (pair.block_bytes.decoded > 0) == (
            name in ("int8", "mixed", "fp8, a plain cast", "int8 ConvRot, others mixed")
        )
    assert torch.equal(latents, plain_denoise(plain_models(files, models, storage), request))


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize("layout", [LAYOUTS["int8 ConvRot"], Fp8Layout()], ids=["int8", "fp8"])
def test_blocks_of_codes_have_one_graph(
    layout: Any, make_tiny_expert: Callable[..., Any], make_request: Any, tmp_path: Path
) -> None:
    """Two experts, LoRAs with two ranks, and none."""
    files, _ = save_pair(tmp_path, make_tiny_expert, layout)
    stacks: list[Any] = [[]]
    for rank in (2, 5):
        file = tmp_path / f"lora {rank}.safetensors"
        save_lora(
            make_lora(make_tiny_expert(layers=2), seed=3, rank=rank), file, dtype=torch.float32
        )
        stacks += [[(open_lora(file), strength)] for strength in (1.0, 0.5)]
    request = make_request(**SHORT)
    torch._dynamo.reset()
    counters.clear()
    with open_experts(*files.values(), compute_dtype=torch.float32, arithmetic="as stored") as pair:
        for stack in (*stacks, []):
            pair.set_loras(stack, stack)
            pair.kernels = Kernels()
            plain = denoise(pair, request, policy=LAYERWISE, device="cpu").latents
            pair.kernels = Kernels(compiler="aot_eager")
            assert torch.equal(
                denoise(pair, request, policy=LAYERWISE, device="cpu").latents, plain
            )
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "name", ["int8 ConvRot", "fp8_scaled", "int8 ConvRot in RAM", "fp8 in RAM"]
)
def test_codes_halve_the_buffers(
    name: str, make_tiny_expert: Callable[..., Any], tmp_path: Path
) -> None:
    layout, storage = CODES[name]
    files, _ = save_pair(tmp_path, make_tiny_expert, layout)
    decoded, int8 = (
        open_experts(
            *files.values(), compute_dtype=torch.bfloat16, arithmetic=each, storage=storage
        )
        for each in ("decoded", "as stored")
    )
    assert 0.5 < int8.block_bytes.computed / decoded.block_bytes.computed < 0.51
    assert int8.block_bytes.computed == int8.block_bytes.stored
    # Decoding keeps an fp8_scaled matrix's only scale outside the block.
    assert 0 <= int8.block_bytes.stored - decoded.block_bytes.stored <= 10 * 256
    assert decoded.block_bytes.decoded
    assert not int8.block_bytes.decoded
    half = decoded.block_bytes.computed - int8.block_bytes.computed
    assert (
        decoded.device_bytes(LAYERWISE, device="cpu") - int8.device_bytes(LAYERWISE, device="cpu")
        == 2 * half
    )
    shape = (1, 16, 5, 40, 56)
    run, usual = (
        run_shape(
            pair,
            shape,
            torch.device("cpu"),
            lanes={0: (Stage("high"), lane_names(1, (Side.POSITIVE,)))},
            sides={"high": (0,), "low": (0,)},
        )
        for pair in (int8, decoded)
    )
    assert (run.kernels.linear_format, usual.kernels.linear_format, run.compute_dtype) == (
        "fp8" if "fp8" in name else "int8",
        "",
        "bfloat16",
    )
    # Three fp32 copies of a feed-forward layer's inner state take more than a norm.
    assert working_bytes(int8, shape, sides=(0,)) > working_bytes(decoded, shape, sides=(0,))


@pytest.mark.slow  # several loop runs
def test_a_step_in_int8_moves_half_the_bytes(
    make_tiny_expert: Callable[..., Any], make_request: Any, tmp_path: Path
) -> None:
    int8, _ = save_pair(tmp_path, make_tiny_expert, LAYOUTS["int8 ConvRot"])
    bf16 = [tmp_path / f"{name} bf16.safetensors" for name in ("high", "low")]
    for file in bf16:
        save_expert_file(make_tiny_expert(layers=2), file, dtype=torch.bfloat16)
    moved = []
    for files in (bf16, int8.values()):
        with open_experts(*files, compute_dtype=torch.bfloat16, arithmetic="as stored") as pair:
            steps = denoise(
                pair, make_request(), policy=OffloadPolicy.layerwise(0), device="cpu"
            ).timeline.steps
        moved.append([step.bytes_moved for step in steps])
        assert moved[-1] == [2 * pair.block_bytes.stored] * len(steps)
    assert all(0.5 < after / before < 0.51 for before, after in zip(*moved, strict=True))


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize(
    ("layout", "noise"),
    [(LAYOUTS["int8 ConvRot"], 0.2), (LAYOUTS["mixed"], 0.2), (Fp8Layout(), 0.4)],
    ids=["int8", "mixed", "fp8"],
)
def test_a_lora_beside_codes(
    layout: Any,
    noise: float,
    make_tiny_expert: Callable[..., Any],
    make_request: Any,
    tmp_path: Path,
) -> None:
    files, _ = save_pair(tmp_path, make_tiny_expert, layout)
    save_lora(
        make_lora(make_tiny_expert(layers=2), seed=3),
        tmp_path / "lora.safetensors",
        dtype=torch.float32,
    )
    lora, request = open_lora(tmp_path / "lora.safetensors"), make_request(**SHORT)

    def runs(pair: ExpertPair, policy: OffloadPolicy) -> list[torch.Tensor]:
        every = []
        for strength in (0.0, 1.0, 0.3, 1.0, 0.0):
            pair.set_loras([(lora, strength)], [(lora, -strength)])
            every.append(denoise(pair, request, policy=policy, device="cpu").latents)
        return every

    with open_experts(*files.values(), compute_dtype=torch.float32) as pair:
        decoded = runs(pair, LAYERWISE)
    found = []
    for policy in POLICIES.values():
        with open_experts(
            *files.values(), compute_dtype=torch.float32, arithmetic="as stored"
        ) as pair:
            found.append(runs(pair, policy))
    for every in found:
        for one, first in zip(every, found[0], strict=True):
            assert torch.equal(one, first)
    with open_experts(*files.values(), compute_dtype=torch.float32, arithmetic="as stored") as pair:
        pair.set_loras([(lora, 1.0), (lora, 0.5)], [(lora, 1.0)])
        predicted = pair.device_bytes(LAYERWISE, device="cpu")
        denoise(pair, request, policy=LAYERWISE, device="cpu")
        # Each factor starts at a multiple of 256 bytes.
        assert 0 <= pair.loaded_bytes - predicted <= 2 * 2 * len(LAYOUTS) * 256
        run = run_shape(
            pair,
            request.computed_shape,
            torch.device("cpu"),
            lanes={0: (Stage("high"), lane_names(1, (Side.POSITIVE,)))},
            sides=dict.fromkeys(pair.experts, (0,)),
        )
        assert run.blocks.patch_bytes == pair.patch_bytes > 0
    plain, full, weak, again, without = found[0]
    assert torch.equal(full, again)
    assert torch.equal(plain, without)
    error = ((full - plain) - (decoded[1] - decoded[0])).norm()
    assert error < noise * (decoded[1] - decoded[0]).norm(), "the LoRA is another one"
    assert (weak - plain).norm() < 0.6 * (full - plain).norm()


def test_a_change_of_all_values_of_an_int8_matrix_is_refused_in_words(
    make_tiny_expert: Callable[..., Any], tmp_path: Path
) -> None:
    files, _ = save_pair(tmp_path, make_tiny_expert, LAYOUTS["int8 ConvRot"])
    matrix = make_tiny_expert(layers=2).blocks[0].attn1.to_q.weight
    change = {"diffusion_model.blocks.0.self_attn.q.diff": torch.full_like(matrix, 0.1)}
    save_lora(change, tmp_path / "lora.safetensors", dtype=torch.float32)
    with open_experts(*files.values(), compute_dtype=torch.float32, arithmetic="as stored") as pair:
        lora = open_lora(tmp_path / "lora.safetensors")
        with pytest.raises(
            ValueError, match=r'as it is stored, .* plain LoRAs only: .* arithmetic "decoded"'
        ):
            pair.set_loras([(lora, 1.0)], [])


def test_the_arithmetic_is_checked(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="arithmetic is 'int4'; choose 'decoded' or 'as stored' or 'int8' or 'fp8'"
    ):
        open_experts(tmp_path, tmp_path, arithmetic="int4")  # type: ignore[arg-type]


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"storage": "fp8"},
        {"arithmetic": "as stored"},
        {"storage": "int8 ConvRot", "arithmetic": "as stored"},
    ],
    ids=["decoded", "fp8 storage", "in int8", "int8 storage"],
)
def test_two_ranks_gather_shards_of_mixed_blocks(
    how: dict[str, Any], make_tiny_expert: Callable[..., Any], make_request: Any, tmp_path: Path
) -> None:
    files, _ = save_pair(tmp_path, make_tiny_expert, LAYOUTS["mixed"])
    save_lora(
        make_lora(make_tiny_expert(layers=2), seed=3),
        tmp_path / "lora.safetensors",
        dtype=torch.float32,
    )
    lora, request = open_lora(tmp_path / "lora.safetensors"), make_request(**SHORT)

    def run(sharded: Sharded | None) -> torch.Tensor:
        with open_experts(*files.values(), compute_dtype=torch.float32, **how) as pair:
            pair.set_loras([(lora, 1.0)], [(lora, 0.5)])
            pair.shard(sharded)
            return denoise(pair, request, policy=LAYERWISE, device="cpu").latents

    expected = run(None)
    with ThreadPoolExecutor(2) as pool:
        for latents in pool.map(run, ThreadGroup(2).ranks()):
            assert torch.equal(latents, expected)
