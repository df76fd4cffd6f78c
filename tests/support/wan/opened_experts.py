"""Experts: configurations, decoded values, and velocities of streamed runs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from torch import nn

from wanstream.offload.formats import decode_tensor
from wanstream.offload.sources import read_scales, read_tensors
from wanstream.plan.programs import step_visits
from wanstream.schema import OffloadPolicy
from wanstream.wan import ExpertPair, Lane, forward_lanes
from wanstream.wan.checkpoint.detect import WanConfig
from wanstream.wan.checkpoint.open import Expert

FIRST_TIME = 990.0
"""Timestep of the first step in `streamed`. Each further step is 1 lower."""
STEPS = ("high", "high", "low")

LAYERWISE = OffloadPolicy.layerwise(1)
PINNED = OffloadPolicy.layerwise(2, source="pinned")
RESIDENT = OffloadPolicy.resident()
SWAP = OffloadPolicy.block_swap(2, 1)


def wan_config(*, heads: int, layers: int, ffn_dim: int, text_dim: int = 4096) -> WanConfig:
    """Return a text-to-video configuration with Wan's channels, patches and frequencies."""
    sizes = {"ffn_dim": ffn_dim, "text_dim": text_dim, "freq_dim": 256, "patch_size": (1, 2, 2)}
    channels = {"in_channels": 16, "out_channels": 16}
    return WanConfig(num_attention_heads=heads, num_layers=layers, **channels, **sizes)


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


def whole_model(folder: Path, dtype: torch.dtype = torch.float32) -> WanTransformer3DModel:
    """Return the model of `from_pretrained`, copied to torch memory.

    `from_pretrained` maps the file's pages. Another alignment alone changes last bits.
    """
    model = WanTransformer3DModel.from_pretrained(folder, torch_dtype=dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def plain_velocity(model, lane, time=FIRST_TIME):
    """Return the velocity of a whole model, for a time or for the times of all tokens."""
    dtype = model.patch_embedding.weight.dtype
    latents, *others = (each for each in (lane.latents, lane.text, lane.image) if each is not None)
    times = time if isinstance(time, torch.Tensor) else torch.tensor([time])
    given = (latents.to(dtype), times.to(latents.device), *(each.to(dtype) for each in others))
    return model(*given, return_dict=False)[0]


def streamed(pair, policy, *lanes, steps=("high",), device="cpu"):
    """Return the velocities of a run, in order of steps and lanes."""
    engine = pair.engine(policy, device)
    velocities = []
    with torch.inference_mode(), engine.run(step_visits(steps, engine.block_counts)) as run:
        for step, expert in enumerate(steps):
            velocities += run_step(engine, run, step, expert, *lanes)
    return velocities


def run_steps(pair: ExpertPair, lane: Lane, policy: OffloadPolicy = LAYERWISE) -> torch.Tensor:
    """Return the joined velocities of a run with `STEPS`."""
    return torch.cat(streamed(pair, policy, lane, steps=STEPS))


def run_step(engine, run, step, expert, *lanes):
    """Compute one step of a started run."""
    time = torch.tensor([FIRST_TIME - step])
    return forward_lanes(engine.models[expert], lanes, time, partial(run.visit, step, expert))
