"""Runs of a GGUF pair, bit-equal to plain models with the dequantised weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.sampling import denoise
from wanstream.schema import OffloadPolicy
from wanstream.testing.quantised import TypeOf, matrices, q4_k_m, save_expert_gguf
from wanstream.wan.experts.open import open_experts


@pytest.mark.parametrize("policy", [OffloadPolicy.layerwise(1), OffloadPolicy.resident(source="pinned")], ids=str)
@pytest.mark.parametrize("types", [q4_k_m, matrices("Q8_0")], ids=["Q4_K_M", "Q8_0"])
def test_a_run_is_the_textbook_loop_to_the_bit(
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
