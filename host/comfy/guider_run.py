"""State and prediction of one run of a ComfyUI sampler through the guider."""

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

ChoosePolicy: TypeAlias = Callable[[OffloadJob], PolicyChoice]
"""Chooses the policy of a run; called before each run."""

KnownMachine: TypeAlias = Callable[[ExpertShape], "Machine | None"]
"""Returns the stored profile of this machine, None without one."""

MakeEvents: TypeAlias = Callable[[Sequence[str], "Timeline | None", OffloadPolicy, Sequence[int]], RunEvents]
"""Creates the events of a run from its experts by call, its prediction, its policy and the shape of its latents."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GuiderRunState:
    """State of one run, shared by its model calls."""

    inputs: LaneInputs
    model_calls: ModelCalls
    policy: RunPolicy
    recorder: Recorder
    events: RunEvents
    shape: torch.Size
    """Shape of the latents, [B, C, T, h, w]."""
    guider_steps: GuiderSteps
    sampler: str
    """Name of the sampler."""


def guider_job(
    pair: ExpertPair, guider_steps: GuiderSteps, levels: Sequence[float], shape: Sequence[int], device: torch.device
) -> OffloadJob:
    """Return the job of calls at `levels`, at least one, on latents of `shape` [B, C, T, h, w]."""
    calls = guider_steps.calls(levels, shape[0]).values()
    experts, lanes = [expert for expert, _ in calls], tuple(len(names) for _, names in calls)
    job = offload_job(
        pair, guider_steps.computed_shape(shape), device, experts_of_steps=experts, guided=guider_steps.guided(levels)
    )
    if any(job.lanes[expert] != count for expert, count in zip(experts, lanes, strict=True)):
        job = replace(job, lanes_of_steps=lanes)
    return cached_job(job, pair, guider_steps.settings.cache)


def predicted_run(
    pair: ExpertPair,
    policy: OffloadPolicy,
    guider_steps: GuiderSteps,
    levels: Sequence[float],
    *,
    known_machine: KnownMachine,
    engine: ExpertEngine,
    shape: Sequence[int],
    cached: CachedCalls | None,
) -> Timeline | None:
    """Simulate calls at `levels` on latents of `shape`; None without calls or without a profile of this machine."""
    if not levels:
        return None
    device = engine.device
    job = guider_job(pair, guider_steps, levels, shape, device)
    if cached is not None:
        job = replace(job, skipped_steps=cached.skipped)
    machine = known_machine(job.expert)
    return None if machine is None else predicted_calls(pair, job, levels, policy, machine=machine, device=device)
