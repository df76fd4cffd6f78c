"""Fixtures: tiny pairs, requests, and a reference loop without streaming."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from wanstream.block_kernels import EXACT
from wanstream.offload.engine.run import EngineRun
from wanstream.plan.programs import Visit
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps.schedules import step_seeds
from wanstream.sampling.steps.solvers import Solver
from wanstream.schema import OffloadPolicy
from wanstream.telemetry import Recorder
from wanstream.tests.support.sampling.runs import SHAPE, Models, changed_request, normal
from wanstream.wan import ExpertPair
from wanstream.wan.experts import engine
from wanstream.wan.experts.engine import ExpertEngine
from wanstream.wan.experts.open import open_experts, open_single_model

__all__ = ["changed_request"]

HIGH, LOW = 1, 2
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

    @torch.inference_mode()
    def denoise(models: Models, request: DenoiseRequest) -> torch.Tensor:
        step_plan = request.step_plan
        first = step_plan.schedule.sigmas[request.start_step]
        latents = request.noise
        if request.latent is not None:
            latents = first * request.noise + (1 - first) * request.latent
        seeds = step_seeds(request.noise, request.latent)
        solver = Solver(request.solver, step_plan.schedule, request.start_step, seeds=seeds)
        for step in step_plan.steps:
            expert, time = step_plan.experts[step], step_plan.schedule.timesteps[step]
            velocity = plain_velocity(models[expert], request, latents, time, request.positive)
            scale = step_plan.guidance[step]
            if scale != 1:
                negative = plain_velocity(models[expert], request, latents, time, request.negative)
                velocity = negative + scale * (velocity - negative)
            latents = solver.step(velocity, latents)
        return latents

    return denoise


def plain_velocity(
    model: WanTransformer3DModel,
    request: DenoiseRequest,
    latents: torch.Tensor,
    timestep: float,
    text: torch.Tensor,
) -> torch.Tensor:
    if request.inputs.image_condition is not None:
        latents = torch.cat(
            [latents, request.inputs.image_condition.expand(request.batch, -1, -1, -1, -1)], dim=1
        )
    texts = text.expand(request.batch, -1, -1)
    time = torch.tensor([timestep])
    forwards = [
        model(sample[None].to(model.dtype), time, own[None].to(model.dtype), return_dict=False)[0]
        for sample, own in zip(latents, texts, strict=True)
    ]
    return torch.cat(forwards).float()


class WatchedPair:
    """Wrapper around a pair that collects engine runs, for tests that read their fetches."""

    def __init__(self, pair: ExpertPair) -> None:
        self.pair = pair
        self.runs: list[EngineRun] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pair, name)

    def engine(self, policy: OffloadPolicy, device: torch.device) -> WatchedEngine:
        return WatchedEngine(self.pair.engine(policy, device), self.runs)


class WatchedEngine:
    """Engine wrapper for `WatchedPair`."""

    def __init__(self, engine: ExpertEngine, runs: list[EngineRun]) -> None:
        self._engine = engine
        self._runs = runs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, visits: Sequence[Visit], recorder: Recorder | None = None) -> EngineRun:
        self._runs.append(self._engine.run(visits, recorder=recorder))
        return self._runs[-1]


@pytest.fixture
def watched(open_pair: Callable[..., ExpertPair]) -> WatchedPair:
    return WatchedPair(open_pair())


@pytest.fixture
def exact_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute blocks in diffusers' order and dtypes, bit by bit like its models."""
    monkeypatch.setattr(engine, "choose_math", lambda *_: EXACT)
