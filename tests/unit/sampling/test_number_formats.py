"""Runs of pairs in every number format, bit-equal to plain models with the decoded weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.sampling import denoise
from wanstream.schema import OffloadPolicy, Storage
from wanstream.testing.experts import dequantised, save_expert_file
from wanstream.testing.number_formats import ENCODERS, MixedLayout, mixture
from wanstream.testing.quantised import TypeOf, matrices, q4_k_m, save_expert_gguf
from wanstream.wan.experts.open import open_experts

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
