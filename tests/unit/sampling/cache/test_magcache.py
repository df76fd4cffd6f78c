"""MagCache: ratios and results equal to diffusers', and refused tables from another run."""

import json
import math
import pickle
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import MagCacheConfig

from wanstream.plan.programs.visits import SkipRule
from wanstream.sampling import MagCache, calibrate, request_run_shape, working_bytes
from wanstream.sampling.cache.base import LaneName, PassStart, Stage
from wanstream.sampling.cache.mag_table import MagTable
from wanstream.sampling.cache.magcache import Calibration
from wanstream.sampling.steps import DenoiseResult, RequestError, RunSlice
from wanstream.schema import OffloadPolicy
from wanstream.tests.support.sampling.plain_loop import windowed_loop
from wanstream.tests.support.sampling.runs import CPU, changed_request, latents_of, run, skipped

pytestmark = pytest.mark.usefixtures("exact_blocks")

LAYERS = 4
STEPS = 8
SWITCH = 4
RULE = SkipRule(threshold=0.3, max_consecutive_skips=2, retention=0.0)
ALWAYS = SkipRule(threshold=1e9, retention=0.0)
UNGUIDED = {"guidance": (1.0, 1.0), "negative": None}


@pytest.fixture
def table(open_pair, make_eight_steps):
    return measured(open_pair(), make_eight_steps())


@pytest.fixture
def made_up(make_eight_steps):
    """Table for such a request, with marks that fit no model."""
    plan = make_eight_steps().step_plan
    ratios = (tuple(1 - 0.01 * step for step in range(STEPS)),) * 2
    given = {"marks": {"high": (0.1, 0.2), "low": (0.3, 0.4)}, "source": "nothing"}
    sigmas = tuple(plan.schedule.sigmas)
    return MagTable(sigmas=sigmas, experts=plan.experts, ratios=ratios, **given)


def measured(pair, request):
    return calibrate(request, partial(run, pair), source="a test")


def test_ratios_and_results_are_diffusers(open_pair, plain_models, make_eight_steps, capsys):
    """diffusers prints ratios after a model's last step."""
    request = make_eight_steps(**UNGUIDED)
    measures = MagCacheConfig(calibrate=True, num_inference_steps=SWITCH)
    windowed_loop(plain_models(), request, {"high": measures, "low": measures})
    printed = capsys.readouterr().out.splitlines()
    high, low = (json.loads(line) for line in printed if line.startswith("[") and line[-1] == "]")
    table = measured(open_pair(), request)
    [ratios] = table.ratios
    assert ratios == pytest.approx([*high, *low], rel=1e-5)
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
    cached = make_eight_steps(**UNGUIDED, cache=MagCache(table=table, rule=RULE))
    found = run(open_pair(), cached)
    assert len(skipped(found)) > 1
    assert torch.equal(found.latents, windowed_loop(plain_models(), request, configs))


def test_measuring_changes_no_bit(pair, make_eight_steps):
    results = list[DenoiseResult]()
    table = calibrate(make_eight_steps(), lambda each: results.append(run(pair, each)), source="x")
    assert torch.equal(results[0].latents, latents_of(pair, make_eight_steps()))
    assert len(table.ratios) == 2
    assert all(each[0] == each[SWITCH] == 1.0 and len(each) == STEPS for each in table.ratios)
    assert table.experts == ("high",) * SWITCH + ("low",) * (STEPS - SWITCH)
    assert table.marks.keys() == {"high", "low"}


@pytest.mark.parametrize("of_others", [1e6, torch.inf])
def test_ratios_are_those_of_the_video_alone(of_others):
    """The video's residuals halve, next to tokens with any residuals."""
    calibration = Calibration()
    name = LaneName(0, 0)
    video = slice(2, 6)
    model = torch.nn.Module()
    model.register_parameter("scale_shift_table", torch.nn.Parameter(torch.zeros(1, 2, 4)))
    for step, of_video in enumerate((1.0, 0.5)):
        hidden = torch.full((1, 9, 4), of_others)
        hidden[:, video] = of_video
        measured = calibration.begin(PassStart(step, Stage("high"), [name], [name], model))
        measured.entered(0, torch.zeros_like(hidden), hidden, video)
        measured.ended(0, hidden)
    assert calibration.ratios({0: "high", 1: "high"}) == ((1.0, pytest.approx(0.5)),)


def test_skipped_steps_move_nothing_under_any_policy(pair, make_eight_steps, table):
    request = make_eight_steps(cache=MagCache(table=table, rule=ALWAYS))
    layerwise = run(pair, request)
    swapped = run(pair, request, OffloadPolicy.block_swap(2, 1))
    assert torch.equal(layerwise.latents, swapped.latents)
    for step in (*layerwise.timeline.steps, *swapped.timeline.steps):
        skips = step.index in (1, 2, 5, 6)
        assert (step.skipped_visits, step.skipped_lanes) == ((LAYERS, 2) if skips else (0, 0))
        assert not (skips and step.bytes_moved)
    assert layerwise.timeline.bytes_moved == (STEPS - 4) * LAYERS * pair.block_bytes.stored


def test_a_run_resumed_in_a_skipped_step_computes_it(pair, make_eight_steps, table):
    states = list[Any]()
    request = make_eight_steps(cache=MagCache(table=table, rule=ALWAYS))
    run(pair, request, on_step=lambda step: states.append(step.state()))
    assert skipped(run(pair, request, part=RunSlice(resume=states[0]))) == [2, 3, 5, 6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": STEPS + 1}, "calibrated for 8 steps, this run has 9"),
        ({"flow_shift": 3.0}, "another schedule or flow shift"),
        ({"switch_step": SWITCH - 1}, "high-noise expert in step 3, this run takes the low-noise"),
        ({"end_step": 5}, None),
        ({"start_step": 3}, None),
    ],
)
def test_a_table_is_for_its_run_and_parts_of_it(changes, message, make_eight_steps, made_up):
    cache = MagCache(table=made_up, rule=RULE)
    if message is None:
        assert make_eight_steps(cache=cache, **changes).options.cache == cache
        return
    with pytest.raises(RequestError, match=message):
        make_eight_steps(cache=cache, **changes)


def test_guidance_needs_measured_negative_lanes(open_pair, make_eight_steps, table):
    partly = (4.0,) * 3 + (1.0, 4.0)
    for scales, message in (
        ((1.0,), "without guidance around step 1, and this run has it there"),
        (partly, "without guidance around step 3"),
    ):
        request = make_eight_steps(guidance_steps=scales)
        cache = MagCache(table=measured(open_pair(layers=2), request), rule=RULE)
        assert changed_request(request, cache=cache).options.cache is cache
        with pytest.raises(RequestError, match=message):
            make_eight_steps(cache=cache, guidance_steps=(4.0,))
    make_eight_steps(cache=MagCache(table=table, rule=RULE), guidance_steps=(1.0,))


def test_a_table_is_for_its_model_in_any_dtype(open_pair, make_eight_steps, table):
    request = make_eight_steps(cache=MagCache(table=table, rule=RULE))
    for seeds in ({"high": 3}, {"low": 3}):
        with pytest.raises(RequestError, match="calibrated for another model"):
            run(open_pair(**seeds), request)
    assert skipped(run(open_pair(dtype=torch.bfloat16), request))


def test_the_states_of_measuring_are_counted(pair, make_eight_steps):
    noise = torch.zeros(1, 16, 2, 40, 60)
    request, plain = (make_eight_steps(noise=noise, cache=each) for each in (Calibration(), None))
    shape = request_run_shape(pair, request, CPU)
    assert shape == replace(request_run_shape(pair, plain, CPU), cached_states=1)
    state = 2 * (2 * 20 * 30) * 256 * 4  # lanes x tokens x width x fp32
    with_states, usual = (
        working_bytes(pair, noise.shape, sides=(0, 0), cache=each.options.cache)
        for each in (request, plain)
    )
    assert with_states - usual == state


def test_a_part_of_a_schedule_is_not_measured(pair, make_eight_steps):
    for part in ({"start_step": 1}, {"end_step": 7}):
        with pytest.raises(RequestError, match="all steps"):
            measured(pair, make_eight_steps(**part))


def test_a_table_travels_and_is_written(made_up):
    assert MagTable.from_dict(json.loads(json.dumps(made_up.to_dict()))) == made_up
    assert pickle.loads(pickle.dumps(made_up)) == made_up  # noqa: S301 - our own


def test_a_damaged_table_is_refused(made_up):
    damages = [("format", "another"), ("ratios", [[1.0]]), ("ratios", []), ("ratios", "abc")]
    damages += [("ratios", [[1.0, bad] + [1.0] * 6]) for bad in (math.nan, -1.0)]
    damages += [("marks", [1.0]), ("marks", {"high": [math.nan]}), ("sigmas", None)]
    damages += [("sigmas", [math.nan] * (STEPS + 1))]
    damaged = [{**made_up.to_dict(), name: value} for name, value in damages]
    for data in (None, [], {}, *damaged):
        with pytest.raises(RequestError, match=r"calibrate|Calibration"):
            MagTable.from_dict(data)
