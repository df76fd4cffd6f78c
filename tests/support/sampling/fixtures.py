"""Fixtures: tiny pairs, requests, and a reference loop without streaming."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch

from wanstream.block_kernels import EXACT
from wanstream.offload.engine.run import EngineRun
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.tests.support.sampling.plain_loop import plain_loop
from wanstream.tests.support.sampling.runs import SHAPE, normal
from wanstream.tests.support.wan.opened_experts import whole_model
from wanstream.wan import ExpertEngine, ExpertPair
from wanstream.wan.experts import engine
from wanstream.wan.experts.open import open_experts, open_single_model

HIGH = 1
LOW = 2
"""Seeds for the two experts."""


@pytest.fixture
def make_request():
    """A small request with 5 steps, 2 of them high-noise.

    Each of the `batch` samples has different texts.
    """

    def make(*, batch: int = 1, **changes: Any) -> DenoiseRequest:
        given = {"noise": normal(batch, *SHAPE[1:], seed=10), "guidance": (4.0, 3.0)}
        given["positive"] = normal(batch, 7, 4096, seed=11)
        given["negative"] = normal(batch, 5, 4096, seed=12)
        given |= {"steps": 5, "flow_shift": 5.0, "switch_step": 2}
        return DenoiseRequest(**{**given, **changes})

    return make


@pytest.fixture
def make_eight_steps(make_request):
    """`make_eight_steps(**changes)`: a request with 8 steps, the first 4 high-noise."""
    return lambda **changes: make_request(**{"steps": 8, "switch_step": 4, **changes})


@pytest.fixture
def closed_after_test():
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def open_pair(tiny_expert_folder, closed_after_test):
    """`open_pair(high=1, low=2, dtype=float32, compute_dtype=dtype, **shape)`: with these seeds.

    The pair is closed after the test.
    """

    def make(*, high=HIGH, low=LOW, dtype=torch.float32, compute_dtype=None, **shape):
        folders = [tiny_expert_folder(seed=seed, dtype=dtype, **shape) for seed in (high, low)]
        opened = open_experts(*folders, compute_dtype=compute_dtype or dtype)
        return closed_after_test.enter_context(opened)

    return make


@pytest.fixture
def open_short(open_pair):
    """`open_pair`, with two blocks per expert."""
    return partial(open_pair, layers=2)


@pytest.fixture
def pair(open_pair):
    """A pair with four blocks per expert."""
    return open_pair()


@pytest.fixture
def short_pair(open_short):
    """A pair with two blocks per expert."""
    return open_short()


@pytest.fixture
def open_one(tiny_expert_folder, closed_after_test):
    """`open_one(seed=1, **shape)`: one expert, closed after the test."""

    def make(*, seed: int = HIGH, **shape: int) -> ExpertPair:
        path = tiny_expert_folder(seed=seed, **shape)
        return closed_after_test.enter_context(open_single_model(path, compute_dtype=torch.float32))

    return make


@pytest.fixture
def plain_models(tiny_expert_folder):
    """The same experts, loaded by diffusers as a whole and copied to torch memory."""
    seeds = {"high": HIGH, "low": LOW}
    return lambda *, dtype=torch.float32, **shape: {
        name: whole_model(tiny_expert_folder(seed=seed, dtype=dtype, **shape), dtype)
        for name, seed in seeds.items()
    }


@pytest.fixture
def plain_denoise():
    """Reference loop: whole models, one forward pass per sample and prompt."""
    return lambda models, request: plain_loop(models, request, partial(plain_velocity, request))


def plain_velocity(request, model, step, latents, time, text) -> torch.Tensor:
    texts = text.expand(request.batch, -1, -1)
    forwards = [
        model(sample[None].to(model.dtype), time, own[None].to(model.dtype), return_dict=False)[0]
        for sample, own in zip(latents, texts, strict=True)
    ]
    return torch.cat(forwards).float()


@pytest.fixture
def engine_runs(monkeypatch):
    """Engine runs of all pairs in order, for tests that read their fetches."""
    runs: list[EngineRun] = []
    start = ExpertEngine.run

    def run(engine: ExpertEngine, *given: Any, **how: Any) -> EngineRun:
        runs.append(start(engine, *given, **how))
        return runs[-1]

    monkeypatch.setattr(ExpertEngine, "run", run)
    return runs


@pytest.fixture
def exact_blocks(monkeypatch):
    """Compute blocks in diffusers' order and dtypes, bit by bit like its models."""
    monkeypatch.setattr(engine, "choose_math", lambda *_: EXACT)
