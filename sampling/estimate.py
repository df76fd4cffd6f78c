"""Estimates of a run: the planner's input, and the predicted timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..devices import auto_dtype, compute_device, dtype_name, runtime_for
from ..plan import RAW_SLOTS, Machine, OffloadJob, limit_seconds, predict
from ..schema import OffloadPolicy, StepRecord, Timeline
from ..wan import ExpertPair
from .cache.settings import CacheSettings, FirstBlockCache, policy_with_cache
from .cache.stages import start_cache
from .inputs.request import DenoiseRequest
from .loop.lanes import names_at, patches_at
from .memory import extra_tokens_of, kernel_needs, tokens_of


def request_job(pair: ExpertPair, request: DenoiseRequest, device: torch.device) -> OffloadJob:
    """Return the planner's job for `request` on `device`."""
    steps = request.step_plan.steps
    return offload_job(
        pair,
        request.computed_shape,
        device,
        experts_of_steps=[request.step_plan.experts[step] for step in steps],
        lanes_of_steps=[request.batch * request.lanes_at(step) for step in steps],
        sides_of_steps=[len(request.sides_at(step)) for step in steps],
        sides={expert: extra_tokens_of(pair, request, expert) for expert in ("high", "low")},
        cache=request.cache,
        patches_of_steps=list(patches_at(pair, request).values()) if pair.strengths_vary else (),
    )


def offload_job(  # noqa: PLR0913 (the planner's description of a run)
    pair: ExpertPair,
    shape: Sequence[int],
    device: torch.device,
    *,
    experts_of_steps: Sequence[str],
    sides: Mapping[str, Sequence[int]],
    lanes_of_steps: Sequence[int] = (),
    sides_of_steps: Sequence[int] = (),
    cache: CacheSettings | None = None,
    patches_of_steps: Sequence[int] = (),
) -> OffloadJob:
    """Return the planner's job for steps on latents of `shape` [B, C, T, h, w]; no file is read.

    Args:
        experts_of_steps: expert of each step, in order.
        sides: for each expert, the tokens of a lane next to those of its video on each CFG side, as of
            `extra_tokens_of`.
        lanes_of_steps: lanes of each step; empty: those that follow from `shape` and `sides`.
        sides_of_steps: number of CFG sides of each step; empty: those of its expert.
        cache: step cache, whose device memory is counted.
        patches_of_steps: `BlockKey.patch` in each step; empty: 0 in all of them.

    Raises:
        ValueError: there are no steps.
    """
    numbers = {expert: len(sides[expert]) for expert in pair.block_counts}
    lanes = {expert: shape[0] * number for expert, number in numbers.items()}
    varying = list(lanes_of_steps) != [lanes[expert] for expert in experts_of_steps]
    extra_tokens = max((tuple(sides[expert]) for expert in numbers), key=len)
    # The first block is resident with this cache. Under a policy with residents this counts one buffer too many.
    first = pair.computed_bytes if isinstance(cache, FirstBlockCache) else 0
    return OffloadJob(
        expert=pair.high.config.shape,
        tokens=tokens_of(shape) + max(extra_tokens),
        extra_tokens=extra_tokens if any(extra_tokens) else (),
        lanes=lanes,
        sides=numbers,
        experts_of_steps=tuple(experts_of_steps),
        stored_bytes=pair.stored_bytes,
        file_bytes=pair.file_bytes,
        computed_bytes=pair.computed_bytes,
        resident_bytes=_resident_bytes(pair, device) + first,
        value_bytes=pair.compute_dtype.itemsize,
        compute_dtype=dtype_name(pair.compute_dtype),
        linear_format=kernel_needs(pair).linear_format,
        attention_bytes=kernel_needs(pair).attention_bytes,
        patch_bytes=pair.patch_bytes,
        quantised_to=pair.quantised_to,
        host_resident_bytes=pair.host_resident_bytes,
        converts=pair.decodes,
        cached_states=0 if cache is None else cache.cached_states,
        lanes_of_steps=tuple(lanes_of_steps) if varying else (),
        sides_of_steps=tuple(sides_of_steps) if varying else (),
        patches_of_steps=tuple(patches_of_steps) if any(patches_of_steps) else (),
    )


def _resident_bytes(pair: ExpertPair, device: torch.device) -> int:
    """Return device bytes other than buffers and stored forms of blocks that are being decoded."""
    # layerwise(0) has one buffer and layerwise(1) has two: their difference is a buffer, which leaves the rest.
    one, two = (pair.device_bytes(OffloadPolicy.layerwise(ahead), device=device) for ahead in (0, 1))
    decoding = RAW_SLOTS * pair.stored_bytes if runtime_for(device) is not None and pair.decodes else 0
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
        skips = start_cache(request.cache, stages, patches_at(pair, request)).skipped
        job = replace(job, skipped_steps=frozenset(step - step_plan.start_step for step in skips))
    sigmas = [step_plan.schedule.sigmas[step] for step in step_plan.steps]
    return predicted_calls(pair, job, sigmas, policy, machine=machine, device=device, first_step=step_plan.start_step)


def predicted_calls(
    pair: ExpertPair,
    job: OffloadJob,
    sigmas: Sequence[float],
    policy: OffloadPolicy,
    *,
    machine: Machine,
    device: torch.device,
    first_step: int = 0,
) -> Timeline:
    """Simulate the steps of `job`, numbered from `first_step` and with noise levels `sigmas`.

    See `predicted_timeline`.
    """
    engine = pair.current_engine(policy, compute_device(device))
    programs = None if engine is None else engine.programs(job.visits)
    # The rates are those of the usual dtype and attention.
    usual = pair.compute_dtype == auto_dtype(device) and pair.kernels.attention == "default"
    simulated = predict(job, machine, policy, programs=programs, by_step=True).timeline
    found = {step.index: step for step in simulated.steps}
    whole = [found.get(number) or _without_blocks(job, number) for number in range(len(job.experts_of_steps))]
    steps = tuple(
        replace(step, index=index, sigma=sigma, limit_s=_limit_s(job, machine, index - first_step) if usual else None)
        for index, (step, sigma) in enumerate(zip(whole, sigmas, strict=True), first_step)
    )
    return replace(simulated, steps=steps)


def _limit_s(job: OffloadJob, machine: Machine, number: int) -> float | None:
    """Return `StepRecord.limit_s` of a step in which no lane is skipped."""
    block_s = limit_seconds(job, machine, job.lane_tokens_of_step(number))
    return None if block_s is None else block_s * job.block_counts[job.experts_of_steps[number]]


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
