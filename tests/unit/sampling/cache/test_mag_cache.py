"""MagCache: ratios and results equal to diffusers', and refused tables from another run."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import MagCacheConfig, WanTransformer3DModel

from wanstream.plan.programs.visits import SkipRule
from wanstream.sampling import denoise, request_run_shape, working_bytes
from wanstream.sampling.cache.base import LaneName, PassStart, Stage
from wanstream.sampling.cache.mag_table import MagTable
from wanstream.sampling.cache.magcache import Calibration
from wanstream.sampling.cache.settings import MagCache
from wanstream.sampling.calibrate import calibrate
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import DenoiseResult, RequestError, RunSlice, SamplingCancelled
from wanstream.sampling.steps.solvers import Solver
from wanstream.schema import OffloadPolicy
from wanstream.wan import ExpertPair

pytestmark = pytest.mark.usefixtures("exact_blocks")

LAYERS, STEPS, SWITCH = 4, 8, 4
LAYERWISE = OffloadPolicy.layerwise(1)
RULE = SkipRule(threshold=0.3, max_consecutive_skips=2, retention=0.0)

Request = Callable[..., DenoiseRequest]
OpenPair = Callable[..., ExpertPair]
Models = Mapping[str, WanTransformer3DModel]


@pytest.fixture(scope="module")
def tables() -> list[MagTable]:
    return []


@pytest.fixture
def table(open_pair: OpenPair, make_eight_steps: Request, tables: list[MagTable]) -> MagTable:
    """Calibration table, measured by the first test to need it."""
    if not tables:
        tables.append(measured(open_pair(), make_eight_steps()))
    return tables[0]


@pytest.fixture
def made_up(make_eight_steps: Request) -> MagTable:
    """Table for such a request, with marks that fit no model."""
    step_plan = make_eight_steps().step_plan
    ratios = tuple(1 - 0.01 * step for step in range(STEPS))
    marks = {"high": (0.1, 0.2), "low": (0.3, 0.4)}
    sigmas = tuple(step_plan.schedule.sigmas)
    return MagTable(
        sigmas=sigmas,
        experts=step_plan.experts,
        ratios=(ratios, ratios),
        marks=marks,
        source="nothing",
    )


def measured(pair: ExpertPair, request: DenoiseRequest) -> MagTable:
    return calibrate(request, partial(run, pair), source="a test")


def run(
    pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy = LAYERWISE, **options: Any
) -> Any:
    return denoise(pair, request, policy=policy, device="cpu", **options)


def skipped(result: Any) -> list[int]:
    return [step.index for step in result.timeline.steps if step.skipped_visits]


@torch.inference_mode()
def with_diffusers_cache(
    models: Models, request: DenoiseRequest, configs: Mapping[str, MagCacheConfig]
) -> torch.Tensor:
    """Reference loop for one lane on whole models, with diffusers' cache around each."""
    for name, model in models.items():
        model.enable_cache(configs[name])
    step_plan, latents = request.step_plan, request.noise
    solver = Solver(request.solver, step_plan.schedule, request.start_step)
    for step in step_plan.steps:
        model, time = (
            models[step_plan.experts[step]],
            torch.tensor([step_plan.schedule.timesteps[step]]),
        )
        with model.cache_context("cond"):
            velocity = model(latents, time, request.positive, return_dict=False)[0].float()
        latents = solver.step(velocity, latents)
    return latents


def test_ratios_are_those_that_diffusers_measures(
    open_pair: OpenPair, plain_models: Any, make_eight_steps: Request, capsys: Any
) -> None:
    """diffusers prints ratios after a model's last step."""
    request = make_eight_steps(guidance=(1.0, 1.0), negative=None)
    steps = {"high": SWITCH, "low": STEPS - SWITCH}
    configs = {
        name: MagCacheConfig(calibrate=True, num_inference_steps=count)
        for name, count in steps.items()
    }
    with_diffusers_cache(plain_models(), request, configs)
    lists = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("[") and line.endswith("]")
    ]
    high, low = map(json.loads, lists)
    [ratios] = measured(open_pair(), request).ratios
    assert ratios == pytest.approx([*high, *low], rel=1e-5)


def test_what_is_taken_over_is_what_diffusers_takes_over(
    open_pair: OpenPair, plain_models: Any, make_eight_steps: Request
) -> None:
    request = make_eight_steps(guidance=(1.0, 1.0), negative=None)
    table = measured(open_pair(), request)
    [ratios] = table.ratios
    configs = {
        name: MagCacheConfig(
            threshold=RULE.threshold,
            max_skip_steps=RULE.max_consecutive_skips,
            retention_ratio=RULE.retention,
            num_inference_steps=len(own),
            mag_ratios=torch.tensor(own, dtype=torch.float64),
        )
        for name, own in (("high", ratios[:SWITCH]), ("low", ratios[SWITCH:]))
    }
    found = run(
        open_pair(),
        make_eight_steps(
            guidance=(1.0, 1.0), negative=None, cache=MagCache(table=table, rule=RULE)
        ),
    )
    assert len(skipped(found)) > 1
    assert torch.equal(found.latents, with_diffusers_cache(plain_models(), request, configs))


def test_measuring_changes_no_bit(open_pair: OpenPair, make_eight_steps: Request) -> None:
    pair = open_pair()
    results: list[DenoiseResult] = []
    table = calibrate(
        make_eight_steps(), lambda request: results.append(run(pair, request)), source="a test"
    )
    assert torch.equal(results[0].latents, run(pair, make_eight_steps()).latents)
    assert len(table.ratios) == 2
    assert all(each[0] == each[SWITCH] == 1.0 and len(each) == STEPS for each in table.ratios)
    assert table.experts == ("high",) * SWITCH + ("low",) * (STEPS - SWITCH)
    assert table.marks.keys() == {"high", "low"}


@pytest.mark.parametrize("of_others", [0.0, 1e6, torch.inf])
def test_ratios_are_those_of_the_video_alone(of_others: float) -> None:
    """The video's residuals halve, next to tokens with any residuals."""
    calibration, name, video = Calibration(), LaneName(0, 0), slice(2, 6)
    model = torch.nn.Module()
    model.register_parameter("scale_shift_table", torch.nn.Parameter(torch.zeros(1, 2, 4)))
    for step, of_video in enumerate((1.0, 0.5)):
        hidden = torch.full((1, 9, 4), of_others)
        hidden[:, video] = of_video
        measured = calibration.begin(PassStart(step, Stage("high"), [name], [name], model))
        measured.entered(0, torch.zeros_like(hidden), hidden, video)
        measured.ended(0, hidden)
    assert calibration.ratios({0: "high", 1: "high"}) == ((1.0, pytest.approx(0.5)),)


@pytest.mark.parametrize("threshold", [0.0, 1e9])
def test_a_threshold_of_0_changes_no_bit_and_a_high_one_skips_what_it_may(
    threshold: float, open_pair: OpenPair, make_eight_steps: Request, table: MagTable
) -> None:
    pair = open_pair()
    found = run(
        pair,
        make_eight_steps(
            cache=MagCache(table=table, rule=SkipRule(threshold=threshold, retention=0.25))
        ),
    )
    if threshold == 0:
        assert torch.equal(found.latents, run(pair, make_eight_steps()).latents)
        assert skipped(found) == []
    else:
        assert skipped(found) == [1, 2, 5, 6]


@pytest.mark.parametrize(
    "policy", [OffloadPolicy.resident(), LAYERWISE, OffloadPolicy.block_swap(2, 1)], ids=str
)
def test_skipped_steps_move_nothing_and_no_policy_changes_a_bit(
    policy: OffloadPolicy, open_pair: OpenPair, make_eight_steps: Request, table: MagTable
) -> None:
    pair, request = (
        open_pair(),
        make_eight_steps(cache=MagCache(table=table, rule=SkipRule(threshold=1e9, retention=0.0))),
    )
    expected, found = run(pair, request), run(open_pair(), request, policy)
    assert torch.equal(found.latents, expected.latents)
    for step in found.timeline.steps:
        assert step.skipped_visits == (LAYERS if step.index in (1, 2, 5, 6) else 0)
        assert step.skipped_lanes == (2 if step.skipped_visits else 0)
        assert not (step.skipped_visits and step.bytes_moved)
    if policy == LAYERWISE:
        assert found.timeline.bytes_moved == (STEPS - 4) * LAYERS * pair.block_bytes.stored


def test_a_run_that_goes_on_in_a_skipped_step_computes_it(
    open_pair: OpenPair, make_eight_steps: Request, table: MagTable
) -> None:
    pair, states = open_pair(), list[Any]()
    request = make_eight_steps(
        cache=MagCache(table=table, rule=SkipRule(threshold=1e9, retention=0.0))
    )
    run(pair, request, on_step=lambda step: states.append(step.state()))
    rest = denoise(pair, request, RunSlice(resume=states[0]), policy=LAYERWISE, device="cpu")
    assert skipped(rest) == [2, 3, 5, 6]


def test_a_run_that_is_stopped_leaves_the_pair_usable(
    open_pair: OpenPair, make_eight_steps: Request, table: MagTable
) -> None:
    pair, request = open_pair(), make_eight_steps(cache=MagCache(table=table, rule=RULE))
    expected = run(open_pair(), request)
    with pytest.raises(SamplingCancelled):
        run(pair, request, should_stop=lambda: True)
    assert torch.equal(run(pair, request).latents, expected.latents)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": STEPS + 1}, "calibrated for 8 steps, this run has 9"),
        ({"flow_shift": 3.0}, "another schedule or flow shift"),
        (
            {"switch_step": SWITCH - 1},
            "high-noise expert in step 3, this run takes the low-noise expert",
        ),
    ],
)
def test_a_table_for_another_run_is_refused(
    changes: dict[str, Any], said: str, make_eight_steps: Request, made_up: MagTable
) -> None:
    with pytest.raises(RequestError, match=said):
        make_eight_steps(cache=MagCache(table=made_up, rule=RULE), **changes)


@pytest.mark.parametrize(
    ("calibrated", "requested", "said"),
    [
        ((1.0,), (4.0,), "without guidance around step 1, and this run has it there"),
        ((4.0,) * 6 + (1.0,), (4.0,), "without guidance around step 6"),
        ((4.0,) * 3 + (1.0, 4.0), (4.0,), "without guidance around step 3"),
        ((4.0,), (1.0,), None),
        ((4.0,) * 3 + (1.0, 4.0), (4.0,) * 3 + (1.0, 4.0), None),
    ],
)
def test_what_was_measured_without_negative_lanes_is_nothing_to_guidance(
    calibrated: tuple[float, ...],
    requested: tuple[float, ...],
    said: str | None,
    open_pair: OpenPair,
    make_eight_steps: Request,
) -> None:
    table = measured(open_pair(), make_eight_steps(guidance_steps=calibrated))
    cache = MagCache(table=table, rule=RULE)
    if said is None:
        assert make_eight_steps(cache=cache, guidance_steps=requested).options.cache is cache
    else:
        with pytest.raises(RequestError, match=said):
            make_eight_steps(cache=cache, guidance_steps=requested)


def test_a_part_of_the_run_is_that_run(make_eight_steps: Request, made_up: MagTable) -> None:
    cache = MagCache(table=made_up, rule=RULE)
    assert (
        make_eight_steps(cache=cache, end_step=5).options.cache
        == make_eight_steps(cache=cache, start_step=3).options.cache
        == cache
    )


def test_a_table_for_another_model_is_refused(
    open_pair: OpenPair, make_eight_steps: Request, table: MagTable
) -> None:
    cache = MagCache(table=table, rule=RULE)
    for seeds in ({"high": 3}, {"low": 3}):
        with pytest.raises(RequestError, match="calibrated for another model"):
            run(open_pair(**seeds), make_eight_steps(cache=cache))


def test_the_same_model_in_bf16_is_known_again(
    open_pair: OpenPair, make_eight_steps: Request, table: MagTable
) -> None:
    assert skipped(
        run(
            open_pair(dtype=torch.bfloat16),
            make_eight_steps(cache=MagCache(table=table, rule=RULE)),
        )
    )


def test_what_measuring_keeps_is_counted_and_what_a_cache_would_keep_is_not(
    open_pair: OpenPair, make_eight_steps: Request
) -> None:
    pair, cpu, noise = open_pair(), torch.device("cpu"), torch.zeros(1, 16, 2, 40, 60)
    request, plain = (
        make_eight_steps(noise=noise, cache=Calibration()),
        make_eight_steps(noise=noise),
    )
    assert request_run_shape(pair, request, cpu) == replace(
        request_run_shape(pair, plain, cpu), cached_states=1
    )
    state = 2 * (2 * 20 * 30) * 256 * 4  # lanes x tokens x width x fp32
    usual = working_bytes(pair, noise.shape, sides=(0, 0))
    assert (
        working_bytes(pair, noise.shape, sides=(0, 0), cache=request.options.cache) - usual == state
    )


def test_a_part_of_a_schedule_is_not_measured(
    open_pair: OpenPair, make_eight_steps: Request
) -> None:
    for part in ({"start_step": 1}, {"end_step": 7}):
        with pytest.raises(RequestError, match="all steps"):
            measured(open_pair(), make_eight_steps(**part))


def test_a_table_travels_and_is_written(made_up: MagTable) -> None:
    assert MagTable.from_dict(json.loads(json.dumps(made_up.to_dict()))) == made_up
    assert pickle.loads(pickle.dumps(made_up)) == made_up  # noqa: S301 - our own


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"format": "another"},
        {"ratios": [[1.0]]},
        {"ratios": []},
        {"ratios": "abc"},
        {"ratios": [[1.0, math.nan] + [1.0] * 6]},
        {"ratios": [[1.0, -1.0] + [1.0] * 6]},
        {"marks": [1.0]},
        {"sigmas": None},
        {"sigmas": [math.nan] * (STEPS + 1)},
        {"marks": {"high": [math.nan]}},
    ],
    ids=str,
)
def test_what_is_no_table_is_refused(data: Any, made_up: MagTable) -> None:
    given = (
        data
        if not isinstance(data, dict) or "format" in data or not data
        else {**made_up.to_dict(), **data}
    )
    with pytest.raises(RequestError, match=r"calibrate|Calibration"):
        MagTable.from_dict(given)
