"""A cache's effects on memory, planner run, prediction, merged requests and reports."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from wanstream.block_kernels.block_math import TorchMath
from wanstream.nodes.runs.benchmark import describe_request
from wanstream.plan.programs.visits import SkipRule
from wanstream.sampling import request_run_shape, run_digest, working_bytes
from wanstream.sampling.cache.base import PassStart, Stage
from wanstream.sampling.cache.first_block import FirstBlockSteps
from wanstream.sampling.cache.mag_table import MagTable
from wanstream.sampling.cache.settings import PRESETS, FirstBlockCache, MagCache, policy_with_cache
from wanstream.sampling.estimate import predicted_timeline
from wanstream.sampling.inputs import DenoiseRequest, merge_requests
from wanstream.sampling.loop.lanes import lane_names
from wanstream.sampling.steps import RequestError
from wanstream.sampling.steps.parallel import LOCAL_FORWARD
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.plan_fixtures import CPU_MACHINE
from wanstream.tests.support.wan_blocks import with_our_blocks
from wanstream.wan import ExpertPair, Lane, forward_lanes
from wanstream.wan.vae.memory import TensorMemoryTracker

STEPS, SWITCH, LAYERS = 8, 4, 4
CPU = torch.device("cpu")
LAYERWISE = OffloadPolicy.layerwise(1)


Request = Callable[..., DenoiseRequest]
OpenPair = Callable[..., ExpertPair]


@pytest.fixture
def magnitudes(make_eight_steps: Request) -> MagCache:
    """Settings that skip two in three steps, but never an expert's first step."""
    step_plan = make_eight_steps().step_plan
    table = MagTable(
        sigmas=tuple(step_plan.schedule.sigmas),
        experts=step_plan.experts,
        ratios=((0.999,) * STEPS,) * 2,
        marks={},
        source="x",
    )
    return MagCache(table=table, rule=SkipRule(threshold=1.0, retention=0.0))


@pytest.mark.parametrize("guided", [False, True])
def test_memory_counts_what_a_cache_keeps(
    guided: bool, open_pair: OpenPair, magnitudes: MagCache
) -> None:
    pair, shape = open_pair(), (3, 16, 2, 40, 60)
    state = 3 * (2 if guided else 1) * 2 * 20 * 30 * 256 * 4  # lanes x tokens x width x fp32

    def needed(cache: Any) -> int:
        return working_bytes(pair, shape, sides=(0, 0) if guided else (0,), cache=cache)

    assert needed(FirstBlockCache()) - needed(None) == 3 * state
    assert needed(magnitudes) - needed(None) == state


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize(("lanes", "chunk"), [(1, None), (2, 64)])
def test_what_is_counted_is_what_two_steps_really_hold(
    lanes: int, chunk: int | None, make_tiny_expert: Any
) -> None:
    model = with_our_blocks(make_tiny_expert(layers=2), math=TorchMath(), chunk_tokens=chunk)
    latents = torch.randn(2, 1, 16, 3, 32, 24)
    names, text = lane_names(lanes, (0,)), torch.zeros(1, 8, 4096)

    def peak(steps: FirstBlockSteps | None) -> int:
        with torch.no_grad(), TensorMemoryTracker() as counted:
            for step, state in enumerate(latents):
                given = [Lane(latents=state, text=text, name=name) for name in names]
                shortcut = None
                if steps is not None:
                    shortcut = steps.begin(PassStart(step, Stage("high"), names, names, model))
                forward_lanes(
                    model, given, torch.tensor([900.0]), lambda block: nullcontext(), shortcut
                )
        return counted.peak

    state = 3 * 16 * 12 * 256 * 4  # tokens x width x fp32
    more = [
        peak(FirstBlockSteps(threshold, LOCAL_FORWARD)) - peak(None) for threshold in (0.0, 1e9)
    ]
    estimated = FirstBlockCache().cached_states * lanes * state
    assert estimated - 1.01 * state <= max(more) <= estimated


def test_the_planner_is_told_what_stays(
    open_pair: OpenPair, make_eight_steps: Request, magnitudes: MagCache
) -> None:
    pair = open_pair()
    plain, first, known = (
        request_run_shape(pair, make_eight_steps(cache=cache), CPU)
        for cache in (None, FirstBlockCache(), magnitudes)
    )
    assert (plain.cached_states, first.cached_states, known.cached_states) == (0, 3, 1)
    assert first.blocks.outside_bytes - plain.blocks.outside_bytes == pair.block_bytes.computed
    assert known.blocks.outside_bytes == plain.blocks.outside_bytes
    assert plain.steps == first.steps == known.steps, (
        "what is left out is no reason to plan for less"
    )


def test_the_first_block_stays_for_a_cache_that_asks_it(magnitudes: MagCache) -> None:
    assert policy_with_cache(LAYERWISE, FirstBlockCache()) == replace(
        LAYERWISE, pin_first_block=True
    )
    assert (
        policy_with_cache(LAYERWISE, magnitudes) == policy_with_cache(LAYERWISE, None) == LAYERWISE
    )


@pytest.mark.parametrize("start", [0, 1])
def test_the_prediction_knows_the_steps_that_are_left_out(
    start: int, open_pair: OpenPair, make_eight_steps: Request, magnitudes: MagCache
) -> None:
    pair = open_pair()
    latent = torch.zeros(1, 16, 2, 4, 6)
    request = make_eight_steps(cache=magnitudes, start_step=start, latent=latent)
    found = predicted_timeline(pair, request, LAYERWISE, machine=CPU_MACHINE, device=CPU)
    left_out = [step.index for step in found.steps if step.skipped_visits]
    assert left_out == ([1, 2, 5, 6] if start == 0 else [2, 3, 5, 6])
    assert [step.index for step in found.steps] == list(range(start, STEPS))
    assert [step.expert for step in found.steps] == ["high"] * (SWITCH - start) + ["low"] * (
        STEPS - SWITCH
    )
    for step in found.steps:
        assert (step.bytes_moved == step.wall_s == 0) == (step.skipped_visits == LAYERS)


def test_lanes_of_tables_with_the_same_words_are_not_joined(
    make_eight_steps: Request, magnitudes: MagCache
) -> None:
    table = replace(magnitudes.table, ratios=((0.9,) * STEPS,) * 2)
    other = make_eight_steps(cache=replace(magnitudes, table=table))
    with pytest.raises(
        RequestError, match="lane 2 does not fit lane 1: every number of the cache, as a digest,"
    ):
        merge_requests([make_eight_steps(cache=magnitudes), other])


def test_the_prediction_knows_that_other_lanes_are_another_beginning(
    open_pair: OpenPair, make_eight_steps: Request, magnitudes: MagCache
) -> None:
    pair, request = open_pair(), make_eight_steps(cache=magnitudes, guidance_steps=(4.0, 4.0, 1.0))
    found = predicted_timeline(pair, request, LAYERWISE, machine=CPU_MACHINE, device=CPU).steps
    lanes = [2, 2, 1, 1, 1, 1, 1, 1]
    assert [step.skipped_lanes for step in found] == [
        n if at in (1, 3, 5, 6) else 0 for at, n in enumerate(lanes)
    ]
    assert [step.skipped_visits > 0 for step in found] == [step.skipped_lanes > 0 for step in found]


def test_lanes_of_other_caches_are_not_joined(make_eight_steps: Request) -> None:
    same = make_eight_steps(cache=FirstBlockCache())
    assert merge_requests([same, same]).options.cache == FirstBlockCache()
    with pytest.raises(
        RequestError, match="lane 2 does not fit lane 1: cache none, in lane 1 first block"
    ):
        merge_requests([same, make_eight_steps()])
    with pytest.raises(
        RequestError, match=r"threshold 0\.1, in lane 1 first block, threshold 0\.05"
    ):
        merge_requests([same, make_eight_steps(cache=FirstBlockCache(threshold=0.1))])


def test_reports_tell_the_cache_and_know_it_apart(
    make_eight_steps: Request, magnitudes: MagCache
) -> None:
    every = [
        make_eight_steps(),
        make_eight_steps(cache=FirstBlockCache()),
        make_eight_steps(cache=FirstBlockCache(threshold=0.1)),
        make_eight_steps(cache=magnitudes),
    ]
    assert len({run_digest(request, "experts") for request in every}) == len(every)
    assert "Cache" not in describe_request(every[0])
    assert describe_request(every[2])["Cache"] == "first block, threshold 0.1"
    assert describe_request(every[3])["Cache"].startswith(
        "magnitudes, threshold 1, at most 2 in a row"
    )


def test_presets_rise() -> None:
    assert list(PRESETS.values()) == sorted(PRESETS.values())
    assert PRESETS["usual"] == FirstBlockCache().threshold
