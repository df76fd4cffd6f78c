"""Lanes with tokens next to their video, shared by workers: Bernini's contexts, Fun Control's reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.sampling import DenoiseRequest, ExtraTokens
from wanstream.sampling.cache.settings import FirstBlockCache
from wanstream.schema import ContextWindows, ExpertsRef, OffloadPolicy
from wanstream.schema.mesh import Mesh, MeshError
from wanstream.tests.support.rounding import difference
from wanstream.tests.support.split_jobs import SplitProcesses, job_run

LAYERWISE = OffloadPolicy.layerwise(1)
CHUNKED = replace(LAYERWISE, chunk_tokens=8)
SHAPE = (1, 16, 3, 4, 8)
"""8 tokens in each of 3 frames."""
ROUNDING = 1e-6

Given = Callable[..., tuple[ExpertsRef, DenoiseRequest]]


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SOURCE, IMAGE = _normal(*SHAPE, seed=1), _normal(1, 16, 1, 4, 4, seed=2)
BERNINI: dict[str, Any] = {"tokens": ExtraTokens(context=(SOURCE, IMAGE))}
CONTROL: dict[str, Any] = {
    "image_condition": _normal(1, 36, *SHAPE[2:], seed=3),
    "tokens": ExtraTokens(reference=_normal(1, 16, 1, 4, 8, seed=4)),
}
VARIANTS = {"Bernini": ({}, BERNINI), "Fun Control": ({"in_channels": 52, "reference": True}, CONTROL)}


@pytest.fixture
def given(make_task: Callable[..., Any], tiny_expert_folder: Callable[..., Path]) -> Given:
    """`given(shape, **changes)`: experts with four heads, and a request."""

    def make(shape: dict[str, Any], **changes: Any) -> tuple[ExpertsRef, DenoiseRequest]:
        high, low = (tiny_expert_folder(seed=seed, heads=4, **shape) for seed in (1, 2))
        ref = ExpertsRef(high_noise=high, low_noise=low, compute_dtype="float32")
        return ref, make_task(request={"noise": _normal(*SHAPE, seed=20), **changes}).request

    return make


@pytest.mark.parametrize("policy", [LAYERWISE, CHUNKED], ids=["whole", "chunked"])
@pytest.mark.parametrize("mesh", [Mesh(ulysses=2), Mesh(cfg=2)], ids=str)
@pytest.mark.parametrize(("shape", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_two_workers_give_what_one_gives(
    mesh: Mesh, policy: OffloadPolicy, split: SplitProcesses, given: Given, shape: Any, changes: Any
) -> None:
    split.join(mesh)
    for more in ({}, {"windows": ContextWindows(frames=2, overlap=1)}, {"cache": FirstBlockCache(threshold=0.05)}):
        job = *given(shape, **changes, **more), policy
        alone = split.alone(*job)
        for worker in split.run(*job):
            assert difference(worker["latents"], alone) <= ROUNDING


def test_tokens_that_workers_cannot_split_are_refused(split: SplitProcesses, given: Given) -> None:
    split.join(Mesh(ulysses=2))
    odd = ExtraTokens(context=(_normal(1, 16, 1, 2, 6, seed=5),))
    for process in split.processes[:2]:
        process.start(job_run, *given({}, tokens=odd), LAYERWISE)
    message = "cannot split 27 tokens evenly: .* length of the video, or of its references"
    for process in split.processes[:2]:
        with pytest.raises(MeshError, match=message):
            process.receive(60)
