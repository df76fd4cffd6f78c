"""Fixtures: tiny pairs, requests, and a reference loop without streaming."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from wanstream.block_kernels import EXACT
from wanstream.offload.engine.run import EngineRun
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.tests.support.sampling.plain_loop import plain_loop
from wanstream.tests.support.sampling.runs import SHAPE, Models, changed_request, normal
from wanstream.wan import ExpertPair
from wanstream.wan.experts import engine
from wanstream.wan.experts.engine import ExpertEngine
from wanstream.wan.experts.open import open_experts, open_single_model

__all__ = ["changed_request"]

HIGH = 1
LOW = 2
"""Seeds for the two experts."""


@pytest.fixture
def make_request() -> Callable[..., DenoiseRequest]:
    """A small request with 5 steps, 2 of them high-noise.

    Each of the `batch` samples has different texts.
    """

    def make(*, batch: int = 1, **changes: Any) -> DenoiseRequest:
        given = {
            "noise": normal(batch, *SHAPE[1:], seed=10),
            "positive": normal(batch, 7, 4096, seed=11),
            "negative": normal(batch, 5, 4096, seed=12),
            "steps": 5,
            "flow_shift": 5.0,
            "switch_step": 2,
            "guidance": (4.0, 3.0),
        }
        return DenoiseRequest(**{**given, **changes})

    return make


@pytest.fixture
def open_pair(tiny_expert_folder: Callable[..., Path]) -> Iterator[Callable[..., ExpertPair]]:
    """`open_pair(high=1, low=2, dtype=float32, **shape)`: a pair with these seeds.

    The pair is closed after the test.
    """
    opened: list[ExpertPair] = []

    def make(
        *, high: int = HIGH, low: int = LOW, dtype: torch.dtype = torch.float32, **shape: int
    ) -> ExpertPair:
        folders = [tiny_expert_folder(seed=seed, dtype=dtype, **shape) for seed in (high, low)]
        opened.append(open_experts(*folders, compute_dtype=dtype))
        return opened[-1]

    yield make
    for pair in opened:
        pair.close()


@pytest.fixture
def open_short(open_pair: Callable[..., ExpertPair]) -> Callable[..., ExpertPair]:
    """`open_pair`, with two blocks per expert."""
    return partial(open_pair, layers=2)


@pytest.fixture
def open_one(tiny_expert_folder: Callable[..., Path]) -> Iterator[Callable[..., ExpertPair]]:
    """`open_one(seed=1, **shape)`: one expert, closed after the test."""
    opened: list[ExpertPair] = []

    def make(*, seed: int = HIGH, **shape: int) -> ExpertPair:
        opened.append(
            open_single_model(tiny_expert_folder(seed=seed, **shape), compute_dtype=torch.float32)
        )
        return opened[-1]

    yield make
    for pair in opened:
        pair.close()


@pytest.fixture
def plain_models(tiny_expert_folder: Callable[..., Path]) -> Callable[..., Models]:
    """The same experts, loaded by diffusers as a whole and copied to torch memory.

    `from_pretrained` maps the file's pages. Another alignment alone changes last bits.
    """

    def load(*, dtype: torch.dtype = torch.float32, **shape: int) -> Models:
        models = {}
        for name, seed in (("high", HIGH), ("low", LOW)):
            folder = tiny_expert_folder(seed=seed, dtype=dtype, **shape)
            model = WanTransformer3DModel.from_pretrained(folder, torch_dtype=dtype)
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
            models[name] = model.requires_grad_(False)
        return models

    return load


@pytest.fixture
def plain_denoise() -> Callable[[Models, DenoiseRequest], torch.Tensor]:
    """Reference loop: whole models, one forward pass per sample and prompt."""
    return lambda models, request: plain_loop(models, request, partial(plain_velocity, request))


def plain_velocity(
    request: DenoiseRequest,
    model: WanTransformer3DModel,
    step: int,
    latents: torch.Tensor,
    time: torch.Tensor,
    text: torch.Tensor,
) -> torch.Tensor:
    if request.inputs.image_condition is not None:
        latents = torch.cat(
            [latents, request.inputs.image_condition.expand(request.batch, -1, -1, -1, -1)], dim=1
        )
    texts = text.expand(request.batch, -1, -1)
    forwards = [
        model(sample[None].to(model.dtype), time, own[None].to(model.dtype), return_dict=False)[0]
        for sample, own in zip(latents, texts, strict=True)
    ]
    return torch.cat(forwards).float()


@pytest.fixture
def engine_runs(monkeypatch: pytest.MonkeyPatch) -> list[EngineRun]:
    """Engine runs of all pairs in order, for tests that read their fetches."""
    runs: list[EngineRun] = []
    start = ExpertEngine.run

    def run(engine: ExpertEngine, *given: Any, **how: Any) -> EngineRun:
        runs.append(start(engine, *given, **how))
        return runs[-1]

    monkeypatch.setattr(ExpertEngine, "run", run)
    return runs


@pytest.fixture
def exact_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute blocks in diffusers' order and dtypes, bit by bit like its models."""
    monkeypatch.setattr(engine, "choose_math", lambda *_: EXACT)
