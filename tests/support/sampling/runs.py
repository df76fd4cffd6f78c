"""Runs of tiny experts on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import WanTransformer3DModel

from wanstream.sampling import DenoiseRequest, denoise
from wanstream.sampling.steps import DenoiseResult
from wanstream.schema import OffloadPolicy
from wanstream.wan import ExpertPair

SHAPE = (1, 16, 2, 4, 6)
CPU = torch.device("cpu")
LAYERWISE = OffloadPolicy.layerwise(1)

Models = Mapping[str, WanTransformer3DModel]


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(pair, request, policy=LAYERWISE, **options):
    """Compute a run on the CPU."""
    return denoise(pair, request, policy=policy, device="cpu", **options)


def latents_of(pair, request, policy=LAYERWISE):
    return run(pair, request, policy).latents


def skipped(result: DenoiseResult) -> list[int]:
    """Return the steps in which a cache skipped blocks."""
    return [step.index for step in result.timeline.steps if step.skipped_visits]


def block_calls(pair: ExpertPair, policy: OffloadPolicy = LAYERWISE) -> list[str]:
    """Return a list that gets an expert's name whenever its first block computes a lane."""
    calls: list[str] = []
    models = pair.engine(policy, CPU).models
    for name in pair.block_counts:
        models[name].blocks[0].register_forward_hook(lambda *_, name=name: calls.append(name))
    return calls


def changed_request(request: DenoiseRequest, **changes: Any) -> DenoiseRequest:
    """Return a request with other values for these constructor keywords."""
    return DenoiseRequest(**{**request.keywords(), **changes})
