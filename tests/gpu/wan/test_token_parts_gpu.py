"""Lanes with tokens next to the video on a GPU.

Bernini and Fun Control runs are streamed and compared with a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.sampling import denoise
from wanstream.sampling.inputs import DenoiseRequest, ExtraTokens
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.accelerator import Accelerator
from wanstream.wan.experts.open import open_experts


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


BERNINI: dict[str, Any] = {
    "tokens": ExtraTokens(
        context=(_normal(1, 16, 2, 8, 8, seed=1), _normal(1, 16, 1, 4, 12, seed=2))
    )
}
CONTROL: dict[str, Any] = {
    "image_condition": _normal(1, 36, 2, 8, 8, seed=3),
    "tokens": ExtraTokens(reference=_normal(1, 16, 1, 8, 8, seed=4)),
}
VARIANTS = {
    "Bernini": ({}, BERNINI),
    "Fun Control": ({"in_channels": 52, "reference": True}, CONTROL),
}


@pytest.mark.parametrize(
    "policy", [OffloadPolicy.layerwise(1), OffloadPolicy.block_swap(2)], ids=["layerwise", "swap"]
)
@pytest.mark.parametrize(("shape", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_a_streamed_run_is_that_of_the_cpu(
    gpu: Accelerator,
    policy: OffloadPolicy,
    shape: dict[str, Any],
    changes: dict[str, Any],
    tiny_expert_folder: Callable[..., Path],
) -> None:
    request = DenoiseRequest(
        _normal(1, 16, 2, 8, 8, seed=10),
        _normal(1, 7, 4096, seed=11),
        negative=_normal(1, 5, 4096, seed=12),
        steps=4,
        switch_step=2,
        guidance=(4.0, 3.0),
        **changes,
    )
    folders = [tiny_expert_folder(seed=seed, **shape) for seed in (1, 2)]
    with open_experts(*folders, compute_dtype=torch.float32) as pair:
        expected = denoise(pair, request, policy=OffloadPolicy.resident(), device="cpu").latents
        resident = denoise(
            pair, request, policy=OffloadPolicy.resident(), device=gpu.device
        ).latents
        streamed = denoise(pair, request, policy=policy, device=gpu.device).latents
    assert torch.equal(streamed, resident)
    assert (streamed - expected).norm() / expected.norm() < 1e-3
