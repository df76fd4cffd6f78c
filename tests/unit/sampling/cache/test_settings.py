"""A cache's effects on memory, planner run, prediction, merged requests and reports."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from wanstream.block_kernels.block_math import TorchMath
from wanstream.nodes.runs.benchmark import describe_request
from wanstream.plan.programs.visits import SkipRule
from wanstream.sampling import lane_names, request_run_shape, run_digest, working_bytes
from wanstream.sampling.cache.base import PassStart, Stage
from wanstream.sampling.cache.first_block import FirstBlockSteps
from wanstream.sampling.cache.mag_table import MagTable
from wanstream.sampling.cache.settings import FirstBlockCache, MagCache, policy_with_cache
from wanstream.sampling.estimate import predicted_timeline
from wanstream.sampling.inputs import merge_requests
from wanstream.sampling.steps import LOCAL_FORWARD, RequestError
from wanstream.tests.support.plan_fixtures import CPU_MACHINE
from wanstream.tests.support.sampling.runs import CPU, LAYERWISE
from wanstream.tests.support.wan.blocks import with_our_blocks
from wanstream.wan import Lane, forward_lanes
from wanstream.wan.vae.memory import TensorMemoryTracker

STEPS = 8
LAYERS = 4


@pytest.fixture
def magnitudes(make_eight_steps):
    """Settings that skip two in three steps, but never an expert's first step."""
    plan = make_eight_steps().step_plan
    given = {"sigmas": tuple(plan.schedule.sigmas), "experts": plan.experts, "marks": {}}
    table = MagTable(**given, ratios=((0.999,) * STEPS,) * 2, source="x")
    return MagCache(table=table, rule=SkipRule(threshold=1.0, retention=0.0))


@pytest.mark.parametrize("sides", [1, 2])
def test_memory_counts_the_states_of_a_cache(sides, pair, magnitudes):
    shape = (3, 16, 2, 40, 60)
    state = 3 * sides * 2 * 20 * 30 * 256 * 4  # lanes x tokens x width x fp32

    def needed(cache):
        return working_bytes(pair, shape, sides=(0,) * sides, cache=cache)

    assert needed(FirstBlockCache()) - needed(None) == 3 * state
    assert needed(magnitudes) - needed(None) == state


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize(("lanes", "chunk"), [(1, None), (2, 64)])
def test_the_count_is_what_two_steps_really_hold(lanes, chunk, make_tiny_expert):
    model = with_our_blocks(make_tiny_expert(layers=2), math=TorchMath(), chunk_tokens=chunk)
    latents = torch.randn(2, 1, 16, 3, 32, 24)
    names = lane_names(lanes, (0,))
    text = torch.zeros(1, 8, 4096)

    def peak(steps: FirstBlockSteps | None) -> int:
        time = torch.tensor([900.0])
        shortcut = None
        with torch.no_grad(), TensorMemoryTracker() as counted:
            for step, state in enumerate(latents):
                given = [Lane(latents=state, text=text, name=name) for name in names]
                if steps is not None:
                    shortcut = steps.begin(PassStart(step, Stage("high"), names, names, model))
                forward_lanes(model, given, time, lambda block: nullcontext(), shortcut)
        return counted.peak

    state = 3 * 16 * 12 * 256 * 4  # tokens x width x fp32
    peaks = [peak(FirstBlockSteps(threshold, LOCAL_FORWARD)) for threshold in (0.0, 1e9)]
    estimated = FirstBlockCache().cached_states * lanes * state
    assert estimated - 1.01 * state <= max(peaks) - peak(None) <= estimated


def test_the_planner_knows_the_kept_states_and_blocks(pair, make_eight_steps, magnitudes):
    plain, first, known = (
        request_run_shape(pair, make_eight_steps(cache=cache), CPU)
        for cache in (None, FirstBlockCache(), magnitudes)
    )
    assert (plain.cached_states, first.cached_states, known.cached_states) == (0, 3, 1)
    assert first.blocks.outside_bytes - plain.blocks.outside_bytes == pair.block_bytes.computed
    assert known.blocks.outside_bytes == plain.blocks.outside_bytes
    assert plain.steps == first.steps == known.steps, "a plan counts on no skipped step"
    pinned = replace(LAYERWISE, pin_first_block=True)
    assert policy_with_cache(LAYERWISE, FirstBlockCache()) == pinned
    for cache in (magnitudes, None):
        assert policy_with_cache(LAYERWISE, cache) == LAYERWISE


@pytest.mark.parametrize(
    ("changes", "left_out", "lanes"),
    [
        ({}, [1, 2, 5, 6], [2] * 8),
        ({"start_step": 1, "latent": torch.zeros(1, 16, 2, 4, 6)}, [2, 3, 5, 6], [2] * 8),
        # Another number of lanes is another beginning.
        ({"guidance_steps": (4.0, 4.0, 1.0)}, [1, 3, 5, 6], [2, 2, 1, 1, 1, 1, 1, 1]),
    ],
    ids=["whole", "late", "other lanes"],
)
def test_skips_are_predicted(changes, left_out, lanes, pair, make_eight_steps, magnitudes):
    request = make_eight_steps(cache=magnitudes, **changes)
    steps = predicted_timeline(pair, request, LAYERWISE, machine=CPU_MACHINE, device=CPU).steps
    assert [step.index for step in steps] == list(range(request.start_step, STEPS))
    for step in steps:
        skips = step.index in left_out
        assert step.expert == ("high" if step.index < 4 else "low")
        assert step.skipped_visits == (LAYERS if skips else 0)
        assert step.skipped_lanes == (lanes[step.index] if skips else 0)
        assert (step.bytes_moved == step.wall_s == 0) == skips


def test_lanes_of_other_caches_are_not_joined(make_eight_steps, magnitudes):
    def refused(cache, other, message):
        lanes = [make_eight_steps(cache=cache), make_eight_steps(cache=other)]
        with pytest.raises(RequestError, match=f"lane 2 does not fit lane 1: {message}"):
            merge_requests(lanes)

    first = FirstBlockCache()
    same = make_eight_steps(cache=first)
    assert merge_requests([same, same]).options.cache == first
    refused(first, None, "cache none, in lane 1 first block")
    refused(first, FirstBlockCache(threshold=0.1), r".*threshold 0\.1, .* threshold 0\.05")
    other = replace(magnitudes, table=replace(magnitudes.table, ratios=((0.9,) * STEPS,) * 2))
    refused(magnitudes, other, "every number of the cache, as a digest,")


def test_every_number_of_a_cache_is_in_the_digest(make_eight_steps, magnitudes):
    caches = (None, FirstBlockCache(), FirstBlockCache(threshold=0.1), magnitudes)
    requests = [make_eight_steps(cache=cache) for cache in caches]
    assert len({run_digest(request, "experts") for request in requests}) == len(requests)
    assert describe_request(requests[-1])["Cache"].startswith("magnitudes, threshold 1, at most 2")
