"""EasyCache: equality with a plain loop by definition, bytes saved, and failing runs."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from wanstream.sampling import denoise
from wanstream.sampling.cache import EasyCache
from wanstream.sampling.cache.base import LaneName, Stage
from wanstream.sampling.cache.easycache import _distance as distance
from wanstream.sampling.cache.easycache import computed_steps
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import RequestError, RunSlice
from wanstream.sampling.steps.solvers import Solver
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.sampling_fixtures import changed_request
from wanstream.tests.support.short_memory import ShortOnce
from wanstream.wan import ExpertPair

pytestmark = pytest.mark.usefixtures("exact_blocks")

LAYERS, STEPS, SWITCH = 4, 8, 4
LAYERWISE = OffloadPolicy.layerwise(1)
POLICIES = [
    OffloadPolicy.resident(),
    LAYERWISE,
    OffloadPolicy.layerwise(0),
    OffloadPolicy.block_swap(2, 1, source="pinned"),
]
ALWAYS = EasyCache(threshold=1e9)
SOME = EasyCache(threshold=0.8)
THRESHOLDS = [0.5, 0.67, 0.8, 1e9]
"""Large, because these experts' outputs change a lot when the input changes little."""

Request = Callable[..., DenoiseRequest]
OpenPair = Callable[..., ExpertPair]
Models = Mapping[str, WanTransformer3DModel]


def run(
    pair: Any, request: DenoiseRequest, policy: OffloadPolicy = LAYERWISE, **options: Any
) -> Any:
    return denoise(pair, request, policy=policy, device="cpu", **options)


def skipped(result: Any) -> list[int]:
    return [step.index for step in result.timeline.steps if step.skipped_visits]


@torch.inference_mode()
def defined(
    models: Models, request: DenoiseRequest, threshold: float
) -> tuple[torch.Tensor, list[int]]:
    """Return the definition's latents and skipped steps, for whole models and one sample."""
    plan, latents, left_out = request.step_plan, request.noise, []
    solver = Solver(request.solver, plan.schedule, request.start_step)
    expert, factor, total, history, before = "", math.nan, 0.0, [], latents
    for step in plan.steps:
        if plan.experts[step] != expert:
            expert, factor, total, history = plan.experts[step], math.nan, 0.0, []
        if history:
            total += factor * float(
                (latents.double() - before.double()).abs().sum()
                / history[-1][1].double().abs().mean()
            )
        before = latents
        skip = len(history) >= 2 and step != STEPS - 1 and total / latents.numel() < threshold
        if skip:
            left_out.append(step)
            found = [latents + (output - history[-1][0]) for output in history[-1][1]]
        else:
            time, total = torch.tensor([plan.schedule.timesteps[step]]), 0.0
            texts = request.positive, request.negative
            model = models[expert]
            outputs = [
                model(latents, time, text.to(model.dtype), return_dict=False)[0] for text in texts
            ]
            found = outputs
            if history:
                old_input, old = history[-1]
                changed = (torch.stack(outputs).double() - old.double()).abs().mean()
                factor = float(changed / (latents.double() - old_input.double()).abs().mean())
            history.append((latents, torch.stack(outputs)))
        positive, negative = found
        latents = solver.step(negative + plan.guidance[step] * (positive - negative), latents)
    return latents, left_out


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_a_run_is_that_of_the_definition(
    threshold: float, open_pair: OpenPair, plain_models: Any, make_eight_steps: Request
) -> None:
    request = make_eight_steps(cache=EasyCache(threshold=threshold))
    latents, left_out = defined(plain_models(), request, threshold)
    result = run(open_pair(), request)
    assert skipped(result) == left_out
    assert torch.equal(result.latents, latents)


@pytest.mark.slow  # several loop runs
def test_these_thresholds_differ(plain_models: Any, make_eight_steps: Request) -> None:
    found = [defined(plain_models(), make_eight_steps(), threshold)[1] for threshold in THRESHOLDS]
    assert found == [[], [6], [2, 6], [2, 3, 6]]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_no_policy_changes_a_bit(
    policy: OffloadPolicy, open_pair: OpenPair, make_eight_steps: Request
) -> None:
    pair, request = open_pair(), make_eight_steps(cache=ALWAYS)
    expected = run(open_pair(), request)
    for _ in range(2):
        found = run(pair, request, policy)
        assert torch.equal(found.latents, expected.latents)
        assert skipped(found) == [2, 3, 6]


@pytest.mark.parametrize(
    "cache", [EasyCache(threshold=0), EasyCache(retention=1.0)], ids=["threshold", "retention"]
)
def test_a_cache_that_skips_nothing_changes_no_bit(
    cache: EasyCache, open_pair: OpenPair, make_eight_steps: Request
) -> None:
    pair = open_pair()
    plain, cached = run(pair, make_eight_steps()), run(pair, make_eight_steps(cache=cache))
    assert torch.equal(cached.latents, plain.latents)
    assert skipped(cached) == []


@pytest.mark.slow  # several loop runs
def test_a_video_among_others_is_the_video_alone(
    open_pair: OpenPair, make_eight_steps: Request
) -> None:
    pair, whole = open_pair(), make_eight_steps(batch=3, cache=SOME)
    for place, sample in enumerate(run(pair, whole).latents):
        one = {
            name: getattr(whole, name)[place : place + 1].clone()
            for name in ("noise", "positive", "negative")
        }
        assert torch.equal(run(pair, make_eight_steps(cache=SOME, **one)).latents[0], sample)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_skipped_step_moves_no_more_than_lies_ahead_and_the_next_one_uses_it(
    ahead: int, open_pair: OpenPair, make_eight_steps: Request
) -> None:
    pair = open_pair()
    steps = run(pair, make_eight_steps(cache=ALWAYS), OffloadPolicy.layerwise(ahead)).timeline.steps
    blocks = [step.bytes_moved / pair.block_bytes.stored for step in steps]
    assert sum(blocks) <= 5 * LAYERS + 2 * (ahead + 1)
    assert blocks[2] <= ahead + 1
    assert [step.skipped_lanes for step in steps] == [0, 0, 2, 2, 0, 0, 2, 0]
    assert [step.skipped_visits for step in steps] == [0, 0, LAYERS, LAYERS, 0, 0, LAYERS, 0]


@pytest.mark.slow  # several loop runs
def test_a_step_that_memory_was_short_in_decides_as_it_would_have(
    open_pair: OpenPair, make_eight_steps: Request
) -> None:
    request = make_eight_steps(cache=SOME)
    whole = run(open_pair(), request, OffloadPolicy.layerwise(3))
    computed = 2 * LAYERS * (STEPS - len(skipped(whole)))
    for use in range(1, computed, 5):
        disturbed = run(ShortOnce(open_pair(), use), request, OffloadPolicy.layerwise(3))
        assert torch.equal(disturbed.latents, whole.latents), use
        assert len(disturbed.timeline.changes) == 1
    for use in (1, 3, 5):
        disturbed = run(
            ShortOnce(open_pair(), use, behind=True), request, OffloadPolicy.layerwise(3)
        )
        assert torch.equal(disturbed.latents, whole.latents)
        assert skipped(disturbed) == skipped(whole)


def test_a_run_that_goes_on_measures_again(open_pair: OpenPair, make_eight_steps: Request) -> None:
    pair, request, states = open_pair(), make_eight_steps(cache=ALWAYS), list[Any]()
    run(pair, request, on_step=lambda step: states.append(step.state()))
    rest = denoise(pair, request, RunSlice(resume=states[0]), policy=LAYERWISE, device="cpu")
    assert [step.index for step in rest.timeline.steps if not step.skipped_visits] == [
        1,
        2,
        SWITCH,
        SWITCH + 1,
        7,
    ]


def test_a_device_needs_no_float64() -> None:
    now = torch.randn(1, 16, 21, 60, 104, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = distance(now, torch.zeros_like(now))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(now.double().abs().sum().item(), rel=1e-5)


def test_another_number_of_lanes_begins_anew(
    open_pair: OpenPair, make_eight_steps: Request
) -> None:
    scales = (3.0,) * 3 + (1.0,) * (STEPS - 3)
    steps = run(
        open_pair(), make_eight_steps(cache=ALWAYS, guidance_steps=scales, switch_step=0)
    ).timeline.steps
    assert [step.index for step in steps if not step.skipped_visits] == [0, 1, 3, 4, 7]


def test_the_first_steps_of_each_expert_and_the_last_one_are_computed() -> None:
    names = (LaneName(0, 0),)
    steps = {step: (Stage("high" if step < 20 else "low"), names) for step in range(40)}
    assert computed_steps(steps, 0.2) == {0, 1, 2, 3, 20, 21, 22, 23, 39}
    assert computed_steps(steps, 0.0) == {0, 1, 20, 21, 39}
    assert computed_steps({}, 0.2) == frozenset()


@pytest.mark.parametrize("threshold", [-0.1, math.nan, math.inf])
def test_a_threshold_that_is_none_is_refused(threshold: float) -> None:
    with pytest.raises(RequestError, match="threshold"):
        EasyCache(threshold=threshold)


@pytest.mark.parametrize("retention", [-0.1, 1.1, math.nan])
def test_a_retention_that_is_no_share_is_refused(retention: float) -> None:
    with pytest.raises(RequestError, match="retention"):
        EasyCache(retention=retention)


def test_a_request_with_a_cache_travels(make_eight_steps: Request) -> None:
    request = pickle.loads(pickle.dumps(make_eight_steps(cache=SOME)))  # noqa: S301 - our own
    assert request.options.cache == SOME
    assert changed_request(request, cache=None).options.cache is None
