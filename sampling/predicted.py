"""What is foretold of a run: its simulated timeline, to be shown beside the measured one."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..metrics import compute_device
from ..plan import Machine, OffloadPolicy, Timeline
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
    course = request.course()
    job = request_job(pair, request, device)
    engine = pair.present_engine(policy, compute_device(device))
    programs = None if engine is None else engine.programs(job.visits)
    simulated = predict(job, machine, policy, programs=programs).timeline
    numbered = zip(course.steps, simulated.steps, strict=True)
    steps = tuple(replace(step, index=index, sigma=course.schedule.sigmas[index]) for index, step in numbered)
    return replace(simulated, steps=steps)
