"""Tasks for tiny experts, and their results without workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from wanstream.distributed.messages import RunTask
from wanstream.sampling import DenoiseRequest, denoise
from wanstream.schema import OffloadPolicy
from wanstream.schema.refs import ExpertsRef
from wanstream.tests.support.distributed.processes import Processes
from wanstream.tests.support.distributed.split_jobs import SplitProcesses
from wanstream.wan.experts.open import ExpertsRegistry

SHAPE = (1, 16, 2, 4, 6)
STEPS, SWITCH_STEP = 4, 2


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def experts_ref(tiny_expert_folder: Callable[..., Path]) -> Callable[..., ExpertsRef]:
    """`experts_ref(high=1, low=2)`: the tiny experts with these seeds."""

    def make(*, high: int = 1, low: int = 2) -> ExpertsRef:
        folders = {"high_noise": tiny_expert_folder(seed=high)}
        folders["low_noise"] = tiny_expert_folder(seed=low)
        return ExpertsRef(**folders, compute_dtype="float32")

    return make


@pytest.fixture(scope="session")
def make_task(experts_ref: Callable[..., ExpertsRef]) -> Callable[..., RunTask]:
    """`make_task(seed=10, experts=..., request={}, **changes)`: 4 small steps, 2 at high noise."""
    numbers = itertools.count()

    def make(*, seed: int = 10, request: dict[str, Any] | None = None, **changes: Any) -> RunTask:
        steps = {"steps": STEPS, "switch_step": SWITCH_STEP, "flow_shift": 5.0}
        texts = {"positive": normal(1, 7, 4096, seed=11), "negative": normal(1, 5, 4096, seed=12)}
        defaults = {"noise": normal(*SHAPE, seed=seed), "guidance": (4.0, 3.0), **texts, **steps}
        asked = DenoiseRequest(**{**defaults, **(request or {})})
        given = {"run_id": f"run {next(numbers)}", "experts": experts_ref(), "request": asked}
        return RunTask(**{**given, "policy": OffloadPolicy.layerwise(1), **changes})

    return make


@pytest.fixture(scope="session")
def alone() -> Callable[[RunTask], torch.Tensor]:
    """`alone(task)`: latents [1, 16, 2, 4, 6] float32, computed in this process without workers."""

    def run(task: RunTask) -> torch.Tensor:
        registry = ExpertsRegistry()
        try:
            pair = registry.get(task.experts)
            return denoise(pair, task.request, policy=task.policy, device="cpu").latents
        finally:
            registry.free()

    return run


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """Processes for the whole session: call `at_least` with the number a test needs."""
    started = Processes()
    yield started
    started.close()


@pytest.fixture
def split(processes: Processes) -> Iterator[SplitProcesses]:
    """Processes that join as the ranks of a mesh, and leave after the test."""
    made = SplitProcesses(processes)
    yield made
    made.leave()


@pytest.fixture
def tile_pools() -> Iterator[Callable[..., Any]]:
    """`tile_pools(count, before=...)` makes a `ThreadPool` from `tile_pool.py`."""
    from wanstream.tests.support.distributed.tile_pool import ThreadPool

    made: list[Any] = []

    def make(count: int, before: Any = lambda worker, task: None) -> Any:
        made.append(ThreadPool(count, before))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def process_pools() -> ModuleType:
    """`ProcessPool` from `process_pool.py`."""
    from wanstream.tests.support.distributed import process_pool

    return process_pool
