"""First-block cache: equality with diffusers' own, bytes saved, and failing runs."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, WanTransformer3DModel

from wanstream.sampling import denoise
from wanstream.sampling.cache.base import LaneName, PassStart, Stage
from wanstream.sampling.cache.first_block import FirstBlockSteps, _abs_distance
from wanstream.sampling.cache.settings import FirstBlockCache
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import RequestError, RunSlice, SamplingCancelled
from wanstream.sampling.steps.parallel import LOCAL_FORWARD
from wanstream.sampling.steps.solvers import Solver
from wanstream.schema import OffloadPolicy
from wanstream.testing.experts import make_lora, save_lora
from wanstream.tests.support.sampling_fixtures import changed_request
from wanstream.tests.support.short_memory import ShortOnce
from wanstream.wan import ExpertPair
from wanstream.wan.experts.open import open_experts
from wanstream.wan.lora.file import open_lora

pytestmark = pytest.mark.usefixtures("exact_blocks")

LAYERS, STEPS, SWITCH = 4, 8, 4
LAYERWISE = OffloadPolicy.layerwise(1)
POLICIES = [
    OffloadPolicy.resident(),
    LAYERWISE,
    OffloadPolicy.layerwise(0),
    OffloadPolicy.block_swap(2, 1, source="pinned"),
]
ALWAYS = FirstBlockCache(threshold=1e9)
SOME = FirstBlockCache(threshold=0.55)
"""Hits in some steps, and in some steps for one lane only."""

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
def with_diffusers_cache(models: Models, request: DenoiseRequest, threshold: float) -> torch.Tensor:
    """Reference loop on whole models, with diffusers' cache around each."""
    for model in models.values():
        model.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    step_plan, latents = request.step_plan, request.noise
    solver = Solver(request.solver, step_plan.schedule, request.start_step)
    for step in step_plan.steps:
        model, time = (
            models[step_plan.experts[step]],
            torch.tensor([step_plan.schedule.timesteps[step]]),
        )
        found = []
        for branch, text in (("cond", request.positive), ("uncond", request.negative)):
            with model.cache_context(branch):
                found.append(
                    model(latents.to(model.dtype), time, text.to(model.dtype), return_dict=False)[
                        0
                    ].float()
                )
        positive, negative = found
        latents = solver.step(negative + step_plan.guidance[step] * (positive - negative), latents)
    return latents


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_threshold_of_0_changes_no_bit(
    policy: OffloadPolicy, open_pair: OpenPair, make_eight_steps: Request
) -> None:
    pair = open_pair()
    plain, cached = (
        run(pair, make_eight_steps(), policy),
        run(pair, make_eight_steps(cache=FirstBlockCache(threshold=0.0)), policy),
    )
    assert torch.equal(cached.latents, plain.latents)
    assert skipped(cached) == []


@pytest.mark.parametrize("threshold", [0.3, 0.45, 0.55, 1e9])
def test_what_is_taken_over_is_what_diffusers_takes_over(
    threshold: float, open_pair: OpenPair, plain_models: Any, make_eight_steps: Request
) -> None:
    request = make_eight_steps(cache=FirstBlockCache(threshold=threshold))
    assert torch.equal(
        run(open_pair(), request).latents, with_diffusers_cache(plain_models(), request, threshold)
    )


def test_these_thresholds_hit_all_lanes_one_lane_and_none(
    open_pair: OpenPair, make_eight_steps: Request
) -> None:
    steps = run(open_pair(), make_eight_steps(cache=SOME)).timeline.steps
    assert {step.skipped_lanes for step in steps} == {0, 1, 2}
    assert all((step.skipped_visits == LAYERS - 1) == (step.skipped_lanes == 2) for step in steps)


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_no_policy_changes_a_bit_of_what_a_cache_makes(
    policy: OffloadPolicy, open_pair: OpenPair, make_eight_steps: Request
) -> None:
    pair, request = open_pair(), make_eight_steps(cache=SOME)
    expected = run(open_pair(), request)
    for _ in range(2):
        found = run(pair, request, policy)
        assert torch.equal(found.latents, expected.latents)
        assert skipped(found) == skipped(expected) != []


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


@pytest.mark.parametrize(
    ("change", "going"), [(0.25, ()), (0.75, (0,))], ids=["skipped", "computed"]
)
def test_a_change_is_measured_in_the_video_alone(change: float, going: tuple[int, ...]) -> None:
    """The video's residuals change by less and by more than the threshold.

    The residuals next to the video are huge.
    """
    cache, name, video = FirstBlockSteps(0.5, LOCAL_FORWARD), LaneName(0, 0), slice(2, 6)

    def decided(step: int, of_video: float, of_others: float) -> Sequence[int]:
        hidden = torch.full((1, 9, 4), of_others)
        hidden[:, video] = of_video
        start = PassStart(step, Stage("high"), [name], [name], torch.nn.Identity())
        steps = cache.begin(start)
        steps.entered(0, torch.zeros_like(hidden), hidden, video)
        decision = steps.choose()
        for lane in decision.lanes:
            steps.ended(lane, hidden)
        return decision.lanes

    assert tuple(decided(0, 1.0, 1e6)) == (0,), "nothing to compare with"
    # In all tokens, the first change would be far above the threshold, the second far below.
    assert tuple(decided(1, 1.0 + change, 1e6 if going else -1e6)) == going


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_skipped_step_moves_no_more_than_lay_ahead_and_the_next_one_uses_it(
    ahead: int, open_pair: OpenPair, make_eight_steps: Request
) -> None:
    pair = open_pair()
    steps = run(pair, make_eight_steps(cache=ALWAYS), OffloadPolicy.layerwise(ahead)).timeline.steps
    blocks = [step.bytes_moved / pair.block_bytes.stored for step in steps]
    assert blocks[0] == LAYERS
    for first, last in ((0, SWITCH), (SWITCH, STEPS)):
        # In an expert's last step, the buffers are refilled for the next expert.
        assert sum(blocks[first + 1 : last - 1]) <= ahead + 1, (
            "all skipped steps of an expert together"
        )


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_every_block_that_was_fetched_is_used(
    ahead: int, watched: Any, make_eight_steps: Request
) -> None:
    """Exception: blocks prefetched at an expert's end.

    A fetch issued for a skipped step serves the next one.
    """
    policy = OffloadPolicy.layerwise(ahead)
    timeline = run(watched, make_eight_steps(cache=SOME), policy).timeline
    computed = [step for step in timeline.steps if not step.skipped_visits]
    assert 2 < len(computed) < STEPS
    fetched = sum(len(each.fetched) for each in watched.runs)
    needed = len(computed) * (LAYERS - 1) + 2  # each expert's first block is resident
    # A run ended before the next fetch is issued leaves the step's last block. The next run
    # keeps it.
    kept = sum(len(each.program.initial) for each in watched.runs)
    assert needed - kept <= fetched <= needed + 2 * (ahead + 1)
    assert timeline.bytes_moved == fetched * watched.pair.block_bytes.stored
    assert len(watched.runs) == 1 + timeline.skipped_steps - (timeline.steps[-1].skipped_visits > 0)


@pytest.mark.slow  # several loop runs
def test_blocks_that_are_decoded_and_patched_on_arrival_are_whole_when_they_are_kept(
    tiny_expert_file: Any, make_tiny_expert: Any, tmp_path: Path, make_eight_steps: Request
) -> None:
    files = [tiny_expert_file(seed=seed, dtype=torch.float32, fp8="scaled_fp8") for seed in (1, 2)]
    save_lora(
        make_lora(make_tiny_expert(), seed=3), tmp_path / "lora.safetensors", dtype=torch.float32
    )
    lora = [(open_lora(tmp_path / "lora.safetensors"), 1.0)]
    request, found = make_eight_steps(cache=SOME), []
    for policy in (OffloadPolicy.resident(), LAYERWISE, OffloadPolicy.layerwise(2)):
        with open_experts(*files, compute_dtype=torch.float32) as pair:
            pair.set_loras(lora, lora)
            found.append(run(pair, request, policy))
    assert skipped(found[0])
    assert all(torch.equal(each.latents, found[0].latents) for each in found)


@pytest.mark.slow  # several loop runs
def test_a_step_that_memory_was_short_in_decides_as_it_would_have(
    open_pair: OpenPair, make_eight_steps: Request
) -> None:
    request = make_eight_steps(cache=SOME)
    whole = run(open_pair(), request, OffloadPolicy.layerwise(3))
    computed = sum(2 + (2 - step.skipped_lanes) * (LAYERS - 1) for step in whole.timeline.steps)
    for use in range(1, computed, 9):
        pair = ShortOnce(open_pair(), use)
        disturbed = run(pair, request, OffloadPolicy.layerwise(3))
        assert torch.equal(disturbed.latents, whole.latents), use
        assert len(disturbed.timeline.changes) == 1


@pytest.mark.slow  # several loop runs
def test_a_step_that_memory_was_short_in_behind_its_blocks_is_not_its_own_past(
    open_pair: OpenPair, make_eight_steps: Request
) -> None:
    request = make_eight_steps(cache=SOME)
    whole = run(open_pair(), request, OffloadPolicy.layerwise(3))
    for use in (1, 2 * SWITCH + 1):  # the second lane in each expert's first step
        disturbed = run(
            ShortOnce(open_pair(), use, behind=True), request, OffloadPolicy.layerwise(3)
        )
        assert torch.equal(disturbed.latents, whole.latents)
        assert skipped(disturbed) == skipped(whole)


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize("polls", [1, LAYERS + 1, LAYERS + 2, 3 * LAYERS])
def test_a_run_that_is_stopped_leaves_the_pair_usable(
    polls: int, open_pair: OpenPair, make_eight_steps: Request
) -> None:
    pair, request = open_pair(), make_eight_steps(cache=SOME)
    expected, questions = run(open_pair(), request), iter(range(10**6))
    with pytest.raises(SamplingCancelled):
        run(pair, request, should_stop=lambda: next(questions) == polls)
    assert torch.equal(run(pair, request).latents, expected.latents)


def test_a_run_that_goes_on_computes_its_first_step(
    open_pair: OpenPair, make_eight_steps: Request
) -> None:
    pair, request, states = open_pair(), make_eight_steps(cache=ALWAYS), list[Any]()
    run(pair, request, on_step=lambda step: states.append(step.state()))
    rest = denoise(pair, request, RunSlice(resume=states[1]), policy=LAYERWISE, device="cpu")
    assert [step.index for step in rest.timeline.steps if not step.skipped_visits] == [2, SWITCH]


def test_another_number_of_lanes_begins_anew(
    open_pair: OpenPair, make_eight_steps: Request
) -> None:
    scales = (3.0,) * 3 + (1.0,) * (STEPS - 3)
    steps = run(open_pair(), make_eight_steps(cache=ALWAYS, guidance_steps=scales)).timeline.steps
    assert [step.index for step in steps if not step.skipped_visits] == [0, 3, SWITCH]


def test_the_next_block_is_asked_for_only_after_the_first_was_looked_at(
    open_pair: OpenPair, make_eight_steps: Request
) -> None:
    """A run can be stopped in a step that needs one block, as in any other."""
    pair, request, questions = open_pair(), make_eight_steps(cache=ALWAYS), list[int]()
    run(pair, request, should_stop=lambda: bool(questions.append(1)))
    assert len(questions) == 2 * LAYERS + (STEPS - 2)


@pytest.mark.parametrize("threshold", [-0.1, math.nan, math.inf])
def test_a_threshold_that_is_none_is_refused(threshold: float) -> None:
    with pytest.raises(RequestError, match="threshold"):
        FirstBlockCache(threshold=threshold)


def test_a_request_with_a_cache_travels(make_eight_steps: Request) -> None:
    request = pickle.loads(pickle.dumps(make_eight_steps(cache=SOME)))  # noqa: S301 - our own
    assert request.options.cache == SOME
    assert changed_request(request, cache=None).options.cache is None


def test_a_device_needs_no_float64() -> None:
    now = torch.randn(1, 9000, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = _abs_distance(now, torch.zeros_like(now))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(now.double().abs().sum().item(), rel=1e-5)
