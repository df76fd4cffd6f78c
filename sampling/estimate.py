"""Estimates of a run: the planner's input, and the predicted timeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from ..devices import compute_device
from ..plan import RAW_SLOTS, Machine, OffloadJob, predict
from ..schema import HEAD_DIM, ExpertShape, OffloadPolicy, StepRecord, Timeline
from ..wan import ExpertPair
from .cache.settings import CacheSettings, FirstBlockCache, policy_with_cache
from .inputs.request import DenoiseRequest
from .loop.lanes import names_at
from .memory import tokens_of


def request_job(pair: ExpertPair, request: DenoiseRequest, device: torch.device) -> OffloadJob:
    """Return the planner's job for `request` on `device`."""
    step_plan = request.step_plan
    experts = [step_plan.experts[step] for step in step_plan.steps]
    guided = {expert: _guided(request, expert) for expert in ("high", "low")}
    job = offload_job(pair, request.computed_shape, device, experts_of_steps=experts, guided=guided)
    lanes = tuple(request.batch * request.lanes_at(step) for step in step_plan.steps)
    if any(job.lanes[expert] != count for expert, count in zip(experts, lanes, strict=True)):
        job = replace(job, lanes_of_steps=lanes)
    return cached_job(job, pair, request.cache)


def cached_job(job: OffloadJob, pair: ExpertPair, cache: CacheSettings | None) -> OffloadJob:
    """Add the device memory of a step cache to a job."""
    if cache is None:
        return job
    # The first block is resident with this cache. Under a policy with residents this counts one buffer too many.
    first = pair.computed_bytes if isinstance(cache, FirstBlockCache) else 0
    return replace(job, cached_states=cache.cached_states, resident_bytes=job.resident_bytes + first)


def _guided(request: DenoiseRequest, expert: str) -> bool:
    """Return True if a step of this expert may have negative lanes."""
    if request.guidance_steps is None:
        return request.guidance_of(expert) != 1
    step_plan = request.step_plan
    return any(step_plan.guidance[step] != 1 for step in step_plan.steps if step_plan.experts[step] == expert)


def offload_job(
    pair: ExpertPair,
    shape: Sequence[int],
    device: torch.device,
    *,
    experts_of_steps: Sequence[str],
    guided: Mapping[str, bool],
) -> OffloadJob:
    """Return the planner's job for steps on latents of `shape` [B, C, T, h, w]; no file is read.

    Args:
        experts_of_steps: expert of each step, in order.
        guided: for each expert, True if it has negative lanes.

    Raises:
        ValueError: there are no steps.
    """
    config = pair.high.config
    return OffloadJob(
        expert=ExpertShape(
            width=config.num_attention_heads * HEAD_DIM,
            ffn_width=config.ffn_dim,
            blocks=config.num_layers,
            in_channels=config.in_channels,
            out_channels=config.out_channels,
            image_width=config.image_dim,
        ),
        tokens=tokens_of(shape),
        lanes={expert: shape[0] * (2 if guided[expert] else 1) for expert in pair.block_counts},
        experts_of_steps=tuple(experts_of_steps),
        stored_bytes=pair.stored_bytes,
        file_bytes=pair.file_bytes,
        computed_bytes=pair.computed_bytes,
        resident_bytes=_resident_bytes(pair, device),
        value_bytes=pair.compute_dtype.itemsize,
        host_resident_bytes=pair.host_resident_bytes,
        converts=pair.decodes,
    )


def _resident_bytes(pair: ExpertPair, device: torch.device) -> int:
    """Return device bytes other than buffers and stored forms of blocks that are being decoded."""
    # layerwise(0) has one buffer and layerwise(1) has two: their difference is a buffer, which leaves the rest.
    one, two = (pair.device_bytes(OffloadPolicy.layerwise(ahead), device=device) for ahead in (0, 1))
    decoding = RAW_SLOTS * pair.stored_bytes if device.type == "cuda" and pair.decodes else 0
    return 2 * one - two - decoding


def predicted_timeline(
    pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy, *, machine: Machine, device: torch.device
) -> Timeline:
    """Simulate the run of `request` under `policy`, with the request's step numbers and noise levels.

    Steps that MagCache is known to skip need no block; hits of a first-block cache cannot be predicted, and none are
    assumed. The simulation starts from the present buffers if the pair has an engine for that policy, otherwise from
    empty ones, so call it before the run.

    Raises:
        ValueError: the policy does not fit the experts.
    """
    step_plan, job = request.step_plan, request_job(pair, request, device)
    policy = policy_with_cache(policy, request.cache)
    if request.cache is not None:
        stages = {step: (step_plan.experts[step], names_at(request, step)) for step in step_plan.steps}
        skips = request.cache.start(stages).skipped
        job = replace(job, skipped_steps=frozenset(step - step_plan.start_step for step in skips))
    steps = ((index, step_plan.schedule.sigmas[index]) for index in step_plan.steps)
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
    """Simulate the calls of `job`, numbered from 0 and with noise levels `sigmas`; see `predicted_timeline`."""
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
    """Simulate `job`; `places` has the number and the noise level of each step."""
    engine = pair.current_engine(policy, compute_device(device))
    programs = None if engine is None else engine.programs(job.visits)
    simulated = predict(job, machine, policy, programs=programs, by_step=True).timeline
    found = {step.index: step for step in simulated.steps}
    whole = [found.get(number) or _without_blocks(job, number) for number in range(len(job.experts_of_steps))]
    numbered = zip(places, whole, strict=True)
    steps = tuple(replace(step, index=index, sigma=sigma) for (index, sigma), step in numbered)
    return replace(simulated, steps=steps)


def _without_blocks(job: OffloadJob, number: int) -> StepRecord:
    """Return the record of a skipped step: zeros, because compute outside the blocks is not simulated."""
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
        skipped_lanes=job.lanes_of_steps[number] if job.lanes_of_steps else job.lanes[expert],
        skipped_visits=job.block_counts[expert],
    )
