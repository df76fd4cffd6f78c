"""Tasks for tiny experts, and their results without workers."""

import itertools

import pytest
import torch

from wanstream.devices import dtype_name
from wanstream.distributed.messages import RunTask
from wanstream.sampling import DenoiseRequest, denoise
from wanstream.schema import OffloadPolicy
from wanstream.schema.refs import ExpertsRef
from wanstream.tests.support.distributed.processes import Processes
from wanstream.tests.support.distributed.split_jobs import SplitProcesses
from wanstream.tests.support.sampling.runs import SHAPE, normal
from wanstream.wan.experts.open import ExpertsRegistry


@pytest.fixture(scope="session")
def experts_ref(tiny_expert_folder):
    """`experts_ref(high=1, low=2, dtype=torch.float32, **shape)`: tiny experts with these seeds."""

    def make(*, high=1, low=2, dtype=torch.float32, **shape):
        folders = (tiny_expert_folder(seed=seed, dtype=dtype, **shape) for seed in (high, low))
        pair = dict(zip(("high_noise", "low_noise"), folders, strict=True))
        return ExpertsRef(**pair, compute_dtype=dtype_name(dtype))

    return make


@pytest.fixture(scope="session")
def make_task(experts_ref):
    """`make_task(seed=10, experts=..., request={}, **changes)`: 4 small steps, 2 at high noise."""
    numbers = itertools.count()

    def make(*, seed=10, request=None, **changes):
        steps = {"steps": 4, "switch_step": 2, "flow_shift": 5.0}
        texts = {"positive": normal(1, 7, 4096, seed=11), "negative": normal(1, 5, 4096, seed=12)}
        defaults = {"noise": normal(*SHAPE, seed=seed), "guidance": (4.0, 3.0), **texts, **steps}
        asked = DenoiseRequest(**{**defaults, **(request or {})})
        given = {"run_id": f"run {next(numbers)}", "experts": experts_ref(), "request": asked}
        return RunTask(**{**given, "policy": OffloadPolicy.layerwise(1), **changes})

    return make


@pytest.fixture(scope="session")
def alone():
    """`alone(task, device="cpu")`: latents computed in this process without workers."""

    def run(task, *, device="cpu"):
        registry = ExpertsRegistry()
        try:
            pair = registry.get(task.experts)
            return denoise(pair, task.request, policy=task.policy, device=device).latents
        finally:
            registry.free()

    return run


@pytest.fixture(scope="session")
def processes():
    """Processes for the whole session: call `at_least` with the number a test needs."""
    started = Processes()
    yield started
    started.close()


@pytest.fixture
def split(processes):
    """Processes that join as the ranks of a mesh, and leave after the test."""
    made = SplitProcesses(processes)
    yield made
    made.leave()
