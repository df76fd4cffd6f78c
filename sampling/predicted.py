"""What is foretold of a run: its simulated timeline, to be shown beside the measured one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from ..metrics import compute_device
from ..plan import Machine, OffloadJob, OffloadPolicy, StepRecord, Timeline
from ..plan.predict import predict
from ..wan import ExpertPair
from .cache_settings import MagCache, cached_policy
from .lanes import names_at
from .mag_cache import MagSteps
from .offload_job import request_job
from .request import DenoiseRequest
from .split import ALONE


def predicted_timeline(
    pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy, *, machine: Machine, device: torch.device
) -> Timeline:
    """Simulate the run of `request` under `policy`, with the steps' own numbers and noise levels.

    Steps that a cache by magnitudes is known to take over need no block; what a first-block cache will find is not
    known, and nothing is foretold of it. The run starts from what the engine of `pair` holds for that policy, and from
    nothing where there is no such engine: ask before the run. Raises ValueError where the policy does not fit.
    """
    course, job = request.course(), request_job(pair, request, device)
    policy = cached_policy(policy, request.cache)
    if isinstance(request.cache, MagCache):
        stages = {step: (course.experts[step], names_at(request, step)) for step in course.steps}
        skips = MagSteps(request.cache, ALONE).known_skips(stages)
        job = replace(job, skipped_steps=frozenset(step - course.start_step for step in skips))
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
    simulated = predict(job, machine, policy, programs=programs, by_step=True).timeline
    found = {step.index: step for step in simulated.steps}
    whole = [found.get(number) or _without_blocks(job, number) for number in range(len(job.experts_of_steps))]
    numbered = zip(places, whole, strict=True)
    steps = tuple(replace(step, index=index, sigma=sigma) for (index, sigma), step in numbered)
    return replace(simulated, steps=steps)


def _without_blocks(job: OffloadJob, number: int) -> StepRecord:
    """A step that a cache takes over; what is outside the blocks is not simulated."""
    assert number in job.skipped_steps, f"step {number} was not simulated"
    expert = job.experts_of_steps[number]
    return StepRecord(
        index=number,
        expert=expert,
        sigma=None,
        wall_s=0.0,
        compute_s=0.0,
        stall_s=0.0,
        bytes_moved=0,
        cached_lanes=job.lanes_of_steps[number] if job.lanes_of_steps else job.lanes[expert],
        skipped_visits=job.block_counts[expert],
    )
