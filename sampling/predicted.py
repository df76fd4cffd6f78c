"""What is foretold of a run: its simulated timeline, to be shown beside the measured one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from ..metrics import compute_device
from ..plan import Machine, OffloadJob, OffloadPolicy, Timeline
from ..plan.predict import predict
from ..wan import ExpertPair
from .offload_job import request_job
from .request import DenoiseRequest


def predicted_timeline(
    pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy, *, machine: Machine, device: torch.device
) -> Timeline:
    """Simulate the run of `request` under `policy`, with the steps' own numbers and noise levels.

    It starts from what the engine of `pair` holds for that policy, and from nothing where there is no such engine: ask
    before the run. Raises ValueError where the policy does not fit the experts.
    """
    course, job = request.course(), request_job(pair, request, device)
    steps = ((index, course.schedule.sigmas[index]) for index in course.steps)
    return _simulated(pair, job, policy, steps, machine=machine, device=device)


def predicted_calls(
    pair: ExpertPair,
    job: OffloadJob,
    sigmas: Sequence[float],
    policy: OffloadPolicy,
    *,
    machine: Machine,
    device: torch.device,
) -> Timeline:
    """Simulate the calls of `job`, numbered from 0, each at its own noise level; otherwise as `predicted_timeline`."""
    return _simulated(pair, job, policy, enumerate(sigmas), machine=machine, device=device)


def _simulated(
    pair: ExpertPair,
    job: OffloadJob,
    policy: OffloadPolicy,
    places: Iterable[tuple[int, float]],
    *,
    machine: Machine,
    device: torch.device,
) -> Timeline:
    """`places` are number and noise level of each step."""
    engine = pair.present_engine(policy, compute_device(device))
    programs = None if engine is None else engine.programs(job.visits)
    simulated = predict(job, machine, policy, programs=programs).timeline
    numbered = zip(places, simulated.steps, strict=True)
    steps = tuple(replace(step, index=index, sigma=sigma) for (index, sigma), step in numbered)
    return replace(simulated, steps=steps)
