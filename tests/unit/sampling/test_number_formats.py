"""Runs of pairs in every number format, bit-equal to plain models with the decoded weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.utils import counters

from wanstream.offload import Sharded
from wanstream.sampling import denoise, offload_job, working_bytes
from wanstream.schema import OffloadPolicy, Storage
from wanstream.testing.experts import dequantised, make_lora, native_layer, save_expert_file, save_lora
from wanstream.testing.number_formats import ENCODERS, MixedLayout, mixture
from wanstream.testing.quantised import TypeOf, matrices, q4_k_m, save_expert_gguf
from wanstream.tests.support.offload_fixtures import ThreadGroup
from wanstream.wan import ExpertPair
from wanstream.wan.checkpoint.open import open_expert
from wanstream.wan.experts.open import ARITHMETIC_CHOICES, open_experts
from wanstream.wan.experts.storage import int8_layers
from wanstream.wan.lora.file import open_lora
from wanstream.wan.transformer.int8_linear import prepare_layers, replace_linears
from wanstream.wan.transformer.kernels import Kernels

LAYERWISE = OffloadPolicy.layerwise(1)
POLICIES = {
    "one buffer": OffloadPolicy.layerwise(0),
    "layerwise": LAYERWISE,
    "block swap": OffloadPolicy.block_swap(1, source="pinned"),
    "resident": OffloadPolicy.resident(),
}


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


LAYOUTS = {name: MixedLayout(format_of=lambda _, name=name: name) for name in ENCODERS}
LAYOUTS["mixed"] = MixedLayout(format_of=mixture)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_of_marked_layers_is_the_textbook_loop_to_the_bit(
    layout: str, make_tiny_expert: Callable[..., Any], plain_denoise: Any, make_request: Any, tmp_path: Path
) -> None:
    files, models = save_pair(tmp_path, make_tiny_expert, LAYOUTS[layout])
    request = make_request()
    expected = plain_denoise(models, request)
    for name, policy in POLICIES.items():
        with open_experts(*files.values(), compute_dtype=torch.float32) as pair:
            latents = denoise(pair, request, policy=policy, device="cpu").latents
        assert torch.equal(latents, expected), name


@pytest.mark.parametrize("storage", ["as stored", "fp8"])
def test_mixed_blocks_have_one_result_whatever_keeps_them(
    storage: Storage, make_tiny_expert: Callable[..., Any], make_request: Any, tmp_path: Path
) -> None:
    """With fp8 storage, only the matrix that is not quantised in the file changes."""
    files, _ = save_pair(tmp_path, make_tiny_expert, LAYOUTS["mixed"])
    request, every = make_request(), []
    for policy in POLICIES.values():
        with open_experts(*files.values(), compute_dtype=torch.float32, storage=storage) as pair:
            every.append(denoise(pair, request, policy=policy, device="cpu").latents)
    assert all(torch.equal(latents, every[0]) for latents in every)


def save_pair(
    folder: Path, make_tiny_expert: Callable[..., Any], layout: MixedLayout
) -> tuple[Mapping[str, Path], Mapping[str, Any]]:
    """Write both experts, and return their files and the models with the values in them."""
    files, models = {}, {}
    for seed, name in enumerate(("high", "low")):
        model = make_tiny_expert(seed=seed, layers=2)
        files[name] = folder / f"{name}.safetensors"
        save_expert_file(model, files[name], dtype=torch.float32, fp8=layout)
        models[name] = dequantised(model, dtype=torch.float32, fp8=layout)
    return files, models


def int8_pair(
    folder: Path, make_tiny_expert: Callable[..., Any], layout: MixedLayout
) -> tuple[Mapping[str, Path], Mapping[str, Any]]:
    """Write both experts, and return their files and plain models that compute in int8 with the values in them."""
    files, models = save_pair(folder, make_tiny_expert, layout)
    for name, file in files.items():
        layers, blocks = int8_layers(open_expert(file)), models[name].blocks
        stored = load_file(file)
        replaced = replace_linears(dict(blocks.named_children()), layers)
        for layer, (index, own) in zip(
            replaced, ((index, own) for index, each in layers.items() for own in each), strict=True
        ):
            native = native_layer(f"blocks.{index}.{own}")
            layer.weight = nn.Parameter(stored[f"{native}.weight"], requires_grad=False)
            layer.weight_scale = stored[f"{native}.weight_scale"].view(-1, 1).expand(layer.out_features, 1)
        prepare_layers(replaced, torch.device("cpu"), None)
    return files, models


@pytest.mark.parametrize("layout", ["int8", "int8 rows", "int8 ConvRot", "mixed"])
def test_a_run_in_int8_is_the_textbook_loop_with_int8_layers_to_the_bit(
    layout: str, make_tiny_expert: Callable[..., Any], plain_denoise: Any, make_request: Any, tmp_path: Path
) -> None:
    files, models = int8_pair(tmp_path, make_tiny_expert, LAYOUTS[layout])
    request = make_request()
    expected = plain_denoise(models, request)
    for name, policy in POLICIES.items():
        with open_experts(*files.values(), compute_dtype=torch.float32, arithmetic="as stored") as pair:
            latents = denoise(pair, request, policy=policy, device="cpu").latents
        assert torch.equal(latents, expected), name


def test_blocks_in_int8_have_one_graph(make_tiny_expert: Callable[..., Any], make_request: Any, tmp_path: Path) -> None:
    files, _ = save_pair(tmp_path, make_tiny_expert, LAYOUTS["int8 ConvRot"])
    request = make_request()
    torch._dynamo.reset()
    counters.clear()
    with open_experts(*files.values(), compute_dtype=torch.float32, arithmetic="as stored") as pair:
        plain = denoise(pair, request, policy=LAYERWISE, device="cpu").latents
        pair.kernels = Kernels(compiler="aot_eager")
        assert torch.equal(denoise(pair, request, policy=LAYERWISE, device="cpu").latents, plain)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    torch._dynamo.reset()


def test_int8_halves_the_buffers(make_tiny_expert: Callable[..., Any], tmp_path: Path) -> None:
    files, _ = save_pair(tmp_path, make_tiny_expert, LAYOUTS["int8 ConvRot"])
    decoded, int8 = (
        open_experts(*files.values(), compute_dtype=torch.bfloat16, arithmetic=each) for each in ARITHMETIC_CHOICES
    )
    assert 0.5 < int8.computed_bytes / decoded.computed_bytes < 0.51
    assert int8.computed_bytes == int8.stored_bytes == decoded.stored_bytes
    assert decoded.decodes
    assert not int8.decodes
    half = decoded.computed_bytes - int8.computed_bytes
    assert decoded.device_bytes(LAYERWISE, device="cpu") - int8.device_bytes(LAYERWISE, device="cpu") == 2 * half
    assert decoded.identity != int8.identity
    shape = (1, 16, 5, 40, 56)
    job, usual = (
        offload_job(pair, shape, torch.device("cpu"), experts_of_steps=["high"], guided={"high": False, "low": False})
        for pair in (int8, decoded)
    )
    assert (job.linear_format, usual.linear_format, job.compute_dtype) == ("int8", "", "bfloat16")
    # Three fp32 copies of the inner state of a feed-forward layer are more than a norm takes.
    assert working_bytes(int8, shape, guided=False) > working_bytes(decoded, shape, guided=False)


@pytest.mark.parametrize("layout", ["int8 ConvRot", "mixed"])
def test_a_lora_beside_int8_layers(
    layout: str, make_tiny_expert: Callable[..., Any], make_request: Any, tmp_path: Path
) -> None:
    files, _ = save_pair(tmp_path, make_tiny_expert, LAYOUTS[layout])
    save_lora(make_lora(make_tiny_expert(layers=2), seed=3), tmp_path / "lora.safetensors", dtype=torch.float32)
    lora, request = open_lora(tmp_path / "lora.safetensors"), make_request()

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
        with open_experts(*files.values(), compute_dtype=torch.float32, arithmetic="as stored") as pair:
            found.append(runs(pair, policy))
    for every in found:
        for one, first in zip(every, found[0], strict=True):
            assert torch.equal(one, first)
    plain, full, weak, again, without = found[0]
    assert torch.equal(full, again)
    assert torch.equal(plain, without)
    error = (full - decoded[1]).norm()
    assert error < 0.2 * (decoded[1] - decoded[0]).norm(), "the LoRA is another one"
    assert (weak - plain).norm() < 0.6 * (full - plain).norm()


def test_a_change_of_all_values_of_an_int8_matrix_is_refused_in_words(
    make_tiny_expert: Callable[..., Any], tmp_path: Path
) -> None:
    files, _ = save_pair(tmp_path, make_tiny_expert, LAYOUTS["int8 ConvRot"])
    matrix = make_tiny_expert(layers=2).blocks[0].attn1.to_q.weight
    change = {"diffusion_model.blocks.0.self_attn.q.diff": torch.full_like(matrix, 0.1)}
    save_lora(change, tmp_path / "lora.safetensors", dtype=torch.float32)
    with open_experts(*files.values(), compute_dtype=torch.float32, arithmetic="as stored") as pair:
        pair.set_loras([(open_lora(tmp_path / "lora.safetensors"), 1.0)], [])
        with pytest.raises(ValueError, match=r'computed in int8, .* two factors only: .* arithmetic "decoded"'):
            pair.engine(LAYERWISE, "cpu")


def test_the_arithmetic_has_two_choices(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="arithmetic is 'int4'; choose 'decoded' or 'as stored'"):
        open_experts(tmp_path, tmp_path, arithmetic="int4")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "how", [{}, {"storage": "fp8"}, {"arithmetic": "as stored"}], ids=["decoded", "fp8 storage", "in int8"]
)
def test_two_ranks_gather_shards_of_mixed_blocks(
    how: dict[str, Any], make_tiny_expert: Callable[..., Any], make_request: Any, tmp_path: Path
) -> None:
    files, _ = save_pair(tmp_path, make_tiny_expert, LAYOUTS["mixed"])
    save_lora(make_lora(make_tiny_expert(layers=2), seed=3), tmp_path / "lora.safetensors", dtype=torch.float32)
    lora, request = open_lora(tmp_path / "lora.safetensors"), make_request()

    def run(sharded: Sharded | None) -> torch.Tensor:
        with open_experts(*files.values(), compute_dtype=torch.float32, **how) as pair:
            pair.set_loras([(lora, 1.0)], [(lora, 0.5)])
            pair.shard(sharded)
            return denoise(pair, request, policy=LAYERWISE, device="cpu").latents

    expected = run(None)
    with ThreadPoolExecutor(2) as pool:
        for latents in pool.map(run, ThreadGroup(2).ranks()):
            assert torch.equal(latents, expected)
