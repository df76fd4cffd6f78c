"""Runs of ComfyUI's samplers through the guider: its settings, its policy, its construction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from ...plan import Machine, OffloadJob
from ...sampling import CachedCalls, LaneInputs, ModelCalls, RunPolicy, cached_job, offload_job, predicted_calls
from ...schema import ExpertShape, OffloadPolicy, Timeline
from ...telemetry import Recorder
from ...wan import ExpertEngine, ExpertPair
from ..auto_policy import PolicyChoice
from ..run_events import RunEvents
from .guider_steps import GuiderSteps

Choose: TypeAlias = Callable[[OffloadJob], PolicyChoice]
"""Asked before each run, for the policy of that run."""

Known: TypeAlias = Callable[[ExpertShape], "Machine | None"]
"""Gives the kept profile of this machine, None where there is none."""

Watch: TypeAlias = Callable[[Sequence[str], "Timeline | None", OffloadPolicy, Sequence[int]], RunEvents]
"""Gives what announces a run: its experts by call, its prediction, its policy and the shape of its latents."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GuiderRun:
    """What a run needs in each call of the model, and what it tells at its end."""

    inputs: LaneInputs
    passes: ModelCalls
    policy: RunPolicy
    recorder: Recorder
    watched: RunEvents
    shape: torch.Size
    guider_steps: GuiderSteps
    sampler: str
    """Its name."""


def guider_job(
    pair: ExpertPair, guider_steps: GuiderSteps, levels: Sequence[float], shape: Sequence[int], device: torch.device
) -> OffloadJob:
    """The job of calls at those noise levels, one or more, on latents of `shape` [B, C, T, h, w]."""
    calls = guider_steps.calls(levels, shape[0]).values()
    experts, lanes = [expert for expert, _ in calls], tuple(len(names) for _, names in calls)
    job = offload_job(
        pair, guider_steps.computed_shape(shape), device, experts_of_steps=experts, guided=guider_steps.guided(levels)
    )
    if any(job.lanes[expert] != count for expert, count in zip(experts, lanes, strict=True)):
        job = replace(job, lanes_of_steps=lanes)
    return cached_job(job, pair, guider_steps.settings.cache)


def foretold(
    pair: ExpertPair,
    policy: OffloadPolicy,
    guider_steps: GuiderSteps,
    levels: Sequence[float],
    *,
    known: Known,
    engine: ExpertEngine,
    shape: Sequence[int],
    cached: CachedCalls | None,
) -> Timeline | None:
    """The simulated run of calls at `levels` on latents of `shape`; None on an unknown machine.

    Also None without calls: what a sampler asks for is not always known.
    """
    if not levels:
        return None
    device = engine.device
    job = guider_job(pair, guider_steps, levels, shape, device)
    if cached is not None:
        job = replace(job, skipped_steps=cached.skipped)
    machine = known(job.expert)
    return None if machine is None else predicted_calls(pair, job, levels, policy, machine=machine, device=device)
