"""Workers share the tokens of every lane through diffusers' context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.plan import ExpertsRef, OffloadPolicy
from wanstream.plan.mesh import Mesh
from wanstream.sampling import DenoiseRequest

LAYERWISE, SWAP = OffloadPolicy.layerwise(1), OffloadPolicy.block_swap(2)
CHUNKED = replace(LAYERWISE, chunk_tokens=8)
SAME = 1e-6
"""Relative: the largest difference by the largest value."""


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@pytest.fixture
def meet(processes: Any, split_jobs: Any) -> Any:
    """`meet(mesh, **changes)`: as many processes as it takes have met; they leave after the test."""
    count = 0

    def make(mesh: Mesh, **changes: Any) -> list[int]:
        nonlocal count
        count = mesh.size
        return processes.all(split_jobs.job_meet, split_jobs.meetings(mesh, **changes), count=count)

    yield make
    if count:
        processes.all(split_jobs.job_leave, count=count)


@pytest.fixture(scope="session")
def wide(tiny_expert_folder: Callable[..., Path]) -> Callable[..., ExpertsRef]:
    """`wide(dtype=float32, **shape)`: experts with four heads."""

    def make(*, dtype: torch.dtype = torch.float32, **shape: int) -> ExpertsRef:
        folders = (tiny_expert_folder(seed=seed, dtype=dtype, heads=4, **shape) for seed in (1, 2))
        word = str(dtype).removeprefix("torch.")
        return ExpertsRef(high_noise=next(folders), low_noise=next(folders), compute_dtype=word)

    return make


@pytest.fixture
def ask(make_task: Callable[..., Any]) -> Callable[..., DenoiseRequest]:
    """`ask(shape=..., **changes)`: a request of 4 steps, 2 of them high-noise, for lanes of 48 tokens."""

    def make(*, shape: tuple[int, ...] = (1, 16, 2, 8, 12), **changes: Any) -> DenoiseRequest:
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(20))
        return make_task(request={"noise": noise, **changes}).request

    return make


@pytest.mark.parametrize("mesh", [Mesh(ulysses=2), Mesh(ulysses=4), Mesh(cfg=2, ulysses=2)], ids=str)
@pytest.mark.parametrize("policy", [LAYERWISE, SWAP, CHUNKED], ids=["layerwise", "block swap", "chunked"])
def test_ulysses_gives_what_one_worker_gives(
    mesh: Mesh,
    policy: OffloadPolicy,
    processes: Any,
    split_jobs: Any,
    meet: Any,
    wide: Callable[..., ExpertsRef],
    ask: Callable[..., DenoiseRequest],
    record_property: Callable[[str, object], None],
) -> None:
    meet(mesh)
    given = wide(), ask(), policy
    alone = processes[0].start(split_jobs.job_run_alone, *given).result()
    told = processes.all(split_jobs.job_run, *given, count=mesh.size)
    figure = difference(told[0]["latents"], alone)
    record_property("difference", figure)
    assert figure <= SAME
    for worker in told:
        assert torch.equal(worker["latents"], told[0]["latents"])
        assert worker["gathered"] == worker["crossed"] > 0
    again = processes[0].start(split_jobs.job_run_alone, *given).result()
    assert torch.equal(again, alone)
