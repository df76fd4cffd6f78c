"""Experts: configurations, decoded values, and velocities of streamed runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from wanstream.offload.engine.session import EngineRun
from wanstream.offload.formats import decode_tensor
from wanstream.offload.sources import read_scales, read_tensors
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.wan import ExpertEngine, ExpertPair, Lane, forward_lanes
from wanstream.wan.checkpoint.detect import WanConfig
from wanstream.wan.checkpoint.open import Expert

FIRST_TIME = 990.0
"""Timestep of the first step in `streamed`. Each further step is 1 lower."""


def wan_config(*, heads: int, layers: int, ffn_dim: int, text_dim: int = 4096) -> WanConfig:
    """Return a text-to-video configuration with Wan's channels, patches and frequencies."""
    return WanConfig(
        num_attention_heads=heads,
        num_layers=layers,
        ffn_dim=ffn_dim,
        in_channels=16,
        out_channels=16,
        text_dim=text_dim,
        freq_dim=256,
        patch_size=(1, 2, 2),
    )


def decoded(expert: Expert) -> dict[str, torch.Tensor]:
    """Return the parameters in fp32."""
    stored = read_tensors(expert.weights)
    scales = read_scales(expert.scales)
    values = {}
    for name, weight in expert.weights.items():
        values[name] = torch.empty(weight.shape)
        decode_tensor(stored[name], values[name], packing=weight.packing, scale=scales.get(name))
    return values


def assert_holds(expert: Expert, expected: Expert | nn.Module | Mapping[str, torch.Tensor]) -> None:
    """Compare an expert's values with another's or a model's, no more and no fewer."""
    values = decoded(expert)
    if isinstance(expected, nn.Module):
        expected = expected.state_dict()
    if isinstance(expected, Expert):
        expected = decoded(expected)
    assert values.keys() == expected.keys()
    for name, value in values.items():
        assert torch.equal(value, expected[name]), name


def streamed(
    pair: ExpertPair, policy: OffloadPolicy, *lanes: Lane, steps: Sequence[str] = ("high",)
) -> list[torch.Tensor]:
    """Return the velocities of a run on the CPU, in order of steps and lanes."""
    engine = pair.engine(policy, "cpu")
    velocities = []
    with torch.inference_mode(), engine.run(step_visits(steps, engine.block_counts)) as run:
        for step, expert in enumerate(steps):
            velocities += run_step(engine, run, step, expert, *lanes)
    return velocities


def run_step(
    engine: ExpertEngine, run: EngineRun, step: int, expert: str, *lanes: Lane
) -> list[torch.Tensor]:
    """Compute one step of a started run."""
    time = torch.tensor([FIRST_TIME - step])
    visit = partial(run.visit, step, expert)
    return forward_lanes(engine.models[expert], lanes, time, visit)
