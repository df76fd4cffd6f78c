"""Run estimates: planner input and predicted timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..devices import auto_dtype, compute_device, dtype_name, runtime_for
from ..plan import BlockCosts, Machine, predict
from ..plan.programs import RAW_SLOTS
from ..schema import OffloadPolicy
from ..schema.records import StepRecord, Timeline, Transfers
from ..shapes import RunShape, StepShape
from ..wan import ExpertPair
from .cache.base import StepLanes
from .cache.settings import CacheSettings, FirstBlockCache, policy_with_cache
from .inputs.request import DenoiseRequest
from .loop.lanes import step_lanes
from .loop.memory import extra_tokens_of, kernel_needs, tokens_of


def request_run_shape(pair: ExpertPair, request: DenoiseRequest, device: torch.device) -> RunShape:
    """Return the run shape of `request` on `device`, for the planner."""
    return run_shape(
        pair,
        request.computed_shape,
        device,
        lanes=step_lanes(pair, request, request.step_plan.steps),
        sides={expert: extra_tokens_of(pair, request, expert) for expert in ("high", "low")},
        cache=request.options.cache,
    )


def run_shape(
    pair: ExpertPair,
    shape: Sequence[int],
    device: torch.device,
    *,
    lanes: StepLanes,
    sides: Mapping[str, Sequence[int]],
    cache: CacheSettings | None = None,
) -> RunShape:
    """Return the shape of a `pair` run on latents with `shape` [B, C, T, h, w], for the planner.

    No file is read.

    Args:
        lanes: stage and lanes by step, in order.
        sides: by expert and CFG side, a lane's tokens next to its video, as from
            `extra_tokens_of`.
        cache: step cache. The device memory for it is included.

    Raises:
        ValueError: there are no steps.
    """
    steps = []
    for (expert, patch), names in lanes.values():
        # With context windows, each window counts as a sample.
        count = len({name.side for name in names})
        samples = len(names) // count
        steps.append(StepShape(expert=expert, samples=samples, sides=count, patch=patch))
    numbers = {expert: len(sides[expert]) for expert in pair.block_counts}
    block = pair.block_bytes
    outside_bytes = _resident_bytes(pair, device)
    if isinstance(cache, FirstBlockCache):
        # This cache makes the first block resident. Under a policy with residents this counts one
        # buffer too many.
        outside_bytes += block.computed
    blocks = BlockCosts(
        stacks=tuple(numbers),
        blocks=pair.high.config.shape.blocks,
        stored_bytes=block.stored,
        file_bytes=block.file,
        computed_bytes=block.computed,
        decoded_bytes=block.stored * (block.decoded > 0 or block.stored != block.computed),
        quantised_to=block.quantised_to,
        patch_bytes=pair.patch_bytes,
        outside_bytes=outside_bytes,
        host_outside_bytes=pair.host_resident_bytes,
        sizes=block.sizes,
    )
    return RunShape(
        expert=pair.high.config.shape,
        blocks=blocks,
        steps=tuple(steps),
        video_tokens=tokens_of(shape),
        # The expert with more sides decides, because the memory must suffice for both.
        extra_tokens=max((tuple(sides[expert]) for expert in numbers), key=len),
        samples=shape[0],
        sides=numbers,
        value_bytes=pair.compute_dtype.itemsize,
        compute_dtype=dtype_name(pair.compute_dtype),
        kernels=kernel_needs(pair),
        cached_states=0 if cache is None else cache.cached_states,
    )


def _resident_bytes(pair: ExpertPair, device: torch.device) -> int:
    """Return device bytes other than buffers and blocks in stored form during decoding."""
    # layerwise(0) has one buffer.
    outside = pair.device_bytes(OffloadPolicy.layerwise(0), device=device)
    outside -= pair.block_bytes.computed + pair.patch_bytes
    if runtime_for(device) is not None and pair.block_bytes.decoded:
        outside -= RAW_SLOTS * pair.block_bytes.stored
    return outside


def predicted_timeline(
    pair: ExpertPair,
    request: DenoiseRequest,
    policy: OffloadPolicy,
    *,
    machine: Machine,
    device: torch.device,
) -> Timeline:
    """Simulate the run of `request` under `policy`, with step numbers and noise levels.

    Steps that MagCache is known to skip need no block. Hits in a first-block cache cannot be
    predicted, and none are assumed. The simulation starts from the present buffers if the pair has
    an engine for this policy, otherwise from empty ones, so call it before the run.

    Raises:
        ValueError: the policy does not fit the experts.
    """
    step_plan = request.step_plan
    run = request_run_shape(pair, request, device)
    cache = request.options.cache
    policy = policy_with_cache(policy, cache)
    if cache is not None:
        skipped = cache.start(step_lanes(pair, request, step_plan.steps)).skipped
        # `run` numbers steps from the first one computed.
        run = run.skipping([step - step_plan.start_step for step in skipped])
    sigmas = [step_plan.schedule.sigmas[step] for step in step_plan.steps]
    return predicted_calls(
        pair, run, sigmas, policy, machine=machine, device=device, first_step=step_plan.start_step
    )


def predicted_calls(
    pair: ExpertPair,
    run: RunShape,
    sigmas: Sequence[float],
    policy: OffloadPolicy,
    *,
    machine: Machine,
    device: torch.device,
    first_step: int = 0,
) -> Timeline:
    """Simulate the steps in `run`, numbered from `first_step` and with noise levels `sigmas`.

    See `predicted_timeline`.
    """
    costs = run.costs(machine, policy.chunk_tokens).by_step
    engine = pair.current_engine(policy, compute_device(device))
    programs = None if engine is None else engine.programs(costs.visits)
    simulated = predict(costs, policy, programs=programs).timeline
    found = {step.index: step for step in simulated.steps}
    # Rates are known for the usual dtype and attention.
    usual = pair.compute_dtype == auto_dtype(device) and pair.kernels.attention == "default"
    steps = []
    for number, sigma in enumerate(sigmas):
        limit_s = run.limit_s(machine, number) if usual else None
        # Skipped steps have no visits, so the simulation has no record for them.
        step = found.get(number) or _without_blocks(run, number)
        steps.append(replace(step, index=first_step + number, sigma=sigma, limit_s=limit_s))
    return replace(simulated, steps=tuple(steps))


def _without_blocks(run: RunShape, number: int) -> StepRecord:
    """Return a skipped step's record: zeros, as compute outside the blocks is not simulated."""
    assert run.steps[number].is_skipped, f"step {number} was not simulated"
    return StepRecord(
        index=number,
        expert=run.steps[number].expert,
        sigma=None,
        wall_s=0.0,
        compute_s=0.0,
        transfers=Transfers(stall_s=0.0, bytes_moved=0),
        skipped_lanes=len(run.lane_tokens_of_step(number)),
        skipped_visits=run.blocks.blocks,
    )
