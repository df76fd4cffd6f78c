"""Runs with LoRA strengths that differ between step ranges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.plan.programs import SkipRule
from wanstream.sampling import predicted_timeline
from wanstream.sampling.cache import EasyCache, FirstBlockCache
from wanstream.sampling.cache.base import LaneName, Stage
from wanstream.sampling.cache.easycache import computed_steps
from wanstream.sampling.cache.mag_table import MagTable
from wanstream.sampling.cache.settings import MagCache
from wanstream.sampling.estimate import request_run_shape
from wanstream.sampling.steps import RequestError, RunSlice, RunState
from wanstream.schema import OffloadPolicy, StepRange, StepStrengths
from wanstream.tests.support.plan_fixtures import CPU_MACHINE
from wanstream.tests.support.sampling.runs import CPU, latents_of, run
from wanstream.wan import ExpertPair
from wanstream.wan.lora.file import LoraFile, open_lora

LAYERS = 4
RESIDENT = OffloadPolicy.resident()
POLICIES = {
    "resident": RESIDENT,
    "layerwise pinned": OffloadPolicy.layerwise(2, source="pinned"),
    "block swap": OffloadPolicy.block_swap(2, 1),
    "some in RAM": replace(OffloadPolicy.block_swap(2, 1, source="pinned"), ram_blocks=3),
}
# 1 - sigma is a power of two where a stage ends, so the hand-over to the next sampler rounds
# nothing.
SIGMAS = (1.0, 0.9, 0.75, 0.6, 0.5, 0.25, 0.0)
ENDS = (0, 2, 4, 6)
"""Stage ends: the high-noise expert without a LoRA, with it, and the low-noise expert."""
PARTS = [*zip(pairwise(ENDS), (0.0, 0.8, 0.8), strict=True)]
STAGES: dict[str, Any] = {
    "steps": None,
    "sigmas": SIGMAS,
    "switch_step": 4,
    "guidance_steps": (4.0, 4.0, 1.0),
    "solver": "euler",
}


def strengths(usual: float, *ranges: tuple[int, int, float]) -> StepStrengths:
    return StepStrengths(usual=usual, ranges=tuple(StepRange(*each) for each in ranges))


WITHOUT_AT_FIRST = strengths(0.8, (0, 1, 0.0))


@pytest.fixture
def loras(lora_file: Callable[..., Path], lightning: Callable[..., Any]) -> list[LoraFile]:
    """A LoRA for each expert, with blocks, a bias and the time embedder.

    Time embedder rows are computed ahead.
    """
    found = []
    for seed in (3, 4):
        tensors, generator = lightning(seed=seed), torch.Generator().manual_seed(seed)

        def draw(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return 0.1 * torch.randn(*shape, generator=generator)

        for name, shape in (("down", (4, 256)), ("up", (6 * 256, 4))):
            tensors[f"diffusion_model.time_projection.1.lora_{name}.weight"] = draw(*shape)
        tensors["diffusion_model.blocks.0.cross_attn.o.diff_b"] = draw(256)
        # A DoRA and a LoKr, computed in other ways, in blocks with equal bytes.
        for layer in (f"diffusion_model.blocks.{block}.self_attn" for block in range(LAYERS)):
            tensors[f"{layer}.q.dora_scale"] = 1 + torch.rand(256, 1, generator=generator)
            for part in ("lora_down.weight", "lora_up.weight"):
                del tensors[f"{layer}.k.{part}"]
            tensors[f"{layer}.k.lokr_w1"] = 2 * draw(8, 4)
            tensors[f"{layer}.k.lokr_w2"] = 2 * draw(32, 64)
        found.append(open_lora(lora_file(tensors)))
    return found


def set_both(pair: ExpertPair, loras: Sequence[LoraFile], strengths: StepStrengths | float) -> None:
    pair.set_loras(*([(lora, strengths)] for lora in loras))


def test_a_run_of_three_stages_is_three_samplers_in_sequence(open_pair, make_request, loras):
    """Each sampler has fixed strengths, and hands on a latent with noise."""
    samplers = open_pair()
    pair = open_pair()
    given = dict[str, Any]()
    for (start, end), strength in PARTS:
        set_both(samplers, loras, strength)
        stage = {**STAGES, "start_step": start, "end_step": end, "leftover_noise": True}
        result = run(samplers, make_request(**stage, **given))
        latent = result.latents / (1 - result.sigma)
        given = {"latent": latent, "latent_sigma": result.sigma, "add_noise": False}
    set_both(pair, loras, WITHOUT_AT_FIRST)
    request = make_request(**STAGES)
    last = POLICIES["some in RAM"]
    # The last run starts from the blocks and strengths of the same policy.
    for policy in (*POLICIES.values(), last):
        assert torch.equal(latents_of(pair, request, policy), result.latents), policy
    set_both(pair, loras, 0.8)
    unchanged = latents_of(pair, request, last)
    assert not torch.allclose(unchanged, result.latents, atol=1e-3)


def test_the_solver_keeps_its_history_across_a_change(open_pair, make_request, loras):
    """The reference continues from the previous part's state, with other strengths.

    A run is also resumed with the strengths of its steps.
    """
    pair = open_pair()
    request = make_request(**{**STAGES, "solver": "unipc"})
    set_both(pair, loras, WITHOUT_AT_FIRST)
    states: list[RunState] = []
    whole = run(pair, request, on_step=lambda progress: states.append(progress.state()))
    for state in (states[0], states[2]):
        rest = run(pair, request, part=RunSlice(resume=state))
        assert [step.index for step in rest.timeline.steps] == list(range(state.next_step, 6))
        assert torch.equal(rest.latents, whole.latents)
    kept: list[RunState] = []
    for (_, end), strength in PARTS:
        set_both(pair, loras, strength)
        part = RunSlice(resume=kept[-1] if kept else None, until=end)
        run(pair, request, part=part, on_step=lambda progress: kept.append(progress.state()))
        assert torch.equal(kept[-1].latents, states[end - 1].latents)
    assert [state.next_step for state in kept] == list(range(1, 7))


def factor_bytes(pair: ExpertPair, policy: OffloadPolicy, step: int) -> int:
    """Return the bytes of the factors of all high-noise blocks in a step."""
    engine = pair.current_engine(policy, CPU)
    patch = pair.patch_at("high", step)
    keys = [key._replace(patch=patch) for key in engine.formats if key.expert == "high"]
    return sum(engine.patches.nbytes(key) for key in keys)


@pytest.mark.parametrize("policy", [RESIDENT, POLICIES["some in RAM"]], ids=["resident", "RAM"])
def test_fetches_at_a_change_are_as_predicted(policy, open_pair, engine_runs, make_request, loras):
    pair = open_pair()
    request = make_request(**{**STAGES, "switch_step": 6})
    set_both(pair, loras, WITHOUT_AT_FIRST)
    for cold in (True, False):
        predicted = predicted_timeline(pair, request, policy, machine=CPU_MACHINE, device=CPU)
        measured = run(pair, request, policy).timeline
        for ours, theirs in zip(predicted.steps, measured.steps, strict=True):
            # The prediction counts the stored bytes, as for every run with a LoRA. Factors come on
            # top.
            fetched = ours.bytes_moved // pair.block_bytes.stored
            factors = fetched * factor_bytes(pair, policy, theirs.index) // LAYERS
            assert theirs.bytes_moved == ours.bytes_moved + factors
            assert theirs.transfers.read_bytes == ours.transfers.read_bytes
        program = engine_runs[-1].program
        assert engine_runs[-1].fetched == list(program.fetches)
        if cold:
            fetched_for = [program.visits[fetch.needed_by].step for fetch in program.fetches]
            streamed = policy.blocks_to_swap
            # All blocks before the first step and where the strength changes, otherwise the
            # streamed ones.
            expected = [4, streamed, 4, streamed, streamed, streamed]
            assert [fetched_for.count(step) for step in range(6)] == expected


def test_a_resident_run_hands_its_buffers_on_at_a_change(
    open_pair, engine_runs, make_request, loras
):
    """A block is fetched again once its last visit with the old strength has ended.

    It does not wait for the step's end.
    """
    pair = open_pair()
    set_both(pair, loras, WITHOUT_AT_FIRST)
    run(pair, make_request(**STAGES), RESIDENT)
    [engine_run] = engine_runs
    fetches = [each for each in engine_run.program.fetches if each.block.expert == "high"]
    again = [fetch.start_after for fetch in fetches if fetch.block.patch == 1]
    assert len(again) == LAYERS
    assert max(again) < 2 * LAYERS


def test_equal_strengths_share_their_blocks_and_factors(open_pair, make_request, loras):
    pair = open_pair()
    request = make_request(**STAGES)
    high = loras[0]
    pair.set_loras([(high, 0.8)], [])
    plain = latents_of(pair, request, RESIDENT)
    factors = pair.host_bytes
    pair.set_loras([(high, strengths(0.8, (0, 1, 0.8)))], [])
    assert not pair.strengths_vary
    again = run(pair, request, RESIDENT)
    assert again.timeline.bytes_moved == 0
    assert torch.equal(again.latents, plain)
    pair.set_loras([(high, strengths(0.8, (1, 1, 0.0), (3, 3, 0.0)))], [])
    assert [pair.patch_at("high", step) for step in range(5)] == [0, 1, 0, 1, 0]
    run(pair, request, RESIDENT)
    assert pair.host_bytes == factors


def test_the_planner_counts_factors_of_all_strengths(open_pair, make_request, loras):
    pair = open_pair()
    high = loras[0]
    without = pair.host_resident_bytes

    def factors(strength: StepStrengths | float) -> int:
        pair.set_loras([(high, strength)], [])
        return pair.host_resident_bytes - without

    one = factors(0.8)
    assert factors(WITHOUT_AT_FIRST) == one, "a strength of 0 needs no factors"
    stored = sum(tensor.nbytes for tensor in high.tensors.values())
    assert factors(strengths(0.8, (0, 1, 0.3))) == 2 * one - stored
    steps = request_run_shape(pair, make_request(**STAGES), CPU).steps
    assert [step.patch for step in steps] == [0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    "cache", [FirstBlockCache(threshold=1e3), EasyCache(threshold=1e3, retention=0.0)], ids=str
)
def test_a_cache_reuses_nothing_across_a_change(cache, open_pair, make_request, loras):
    changes = {"guidance_steps": (1.0,), "switch_step": 6, "cache": cache}
    pair = open_pair()
    request = make_request(**{**STAGES, **changes})
    found = []
    for strength in (WITHOUT_AT_FIRST, 0.8):
        set_both(pair, loras, strength)
        steps = run(pair, request).timeline.steps
        found.append([step.skipped_visits > 0 for step in steps])
    assert found[1][2], "the same strength: the cache skips the step"
    assert not found[0][2], "another strength: the step is computed"
    assert any(found[0])


def test_known_skips_start_again_at_a_change():
    names = (LaneName(0, 0),)
    steps = {step: (Stage("high"), names) for step in range(8)}
    changing = {step: (Stage("high", int(step >= 4)), names) for step in range(8)}
    sigmas = tuple(1 - step / 8 for step in range(9))
    table = MagTable(sigmas=sigmas, experts=("high",) * 8, ratios=((1.0,) * 8,), marks={})
    rule = SkipRule(threshold=0.5, max_consecutive_skips=7, retention=0.0)
    cache = MagCache(table=table, rule=rule)
    assert cache.start(steps).skipped == frozenset(range(1, 8))
    exact = MagCache(table=table, rule=replace(rule, threshold=0.0))
    assert exact.start(steps).skipped == frozenset()
    assert cache.start(changing).skipped == {1, 2, 3, 5, 6, 7}
    assert computed_steps(changing, 0.0) == {0, 1, 3, 4, 5, 7}


def test_ranges_must_lie_in_the_schedule(open_pair, make_request, loras):
    pair = open_pair()
    six_steps = make_request(**STAGES, end_step=2)
    set_both(pair, loras, strengths(1.0, (0, 5, 0.0)))
    assert len(run(pair, six_steps).timeline.steps) == 2, "a range may lie behind an early end"
    name = loras[0].path.name
    message = f"{name} has a strength for steps '0-5: 0', and the run has 5 steps"
    with pytest.raises(RequestError, match=message):
        run(pair, make_request())


def test_a_strength_that_is_not_a_number_is_refused(open_pair, loras):
    pair = open_pair()
    with pytest.raises(ValueError, match="is nan: give a finite number"):
        set_both(pair, loras, strengths(1.0, (0, 1, float("nan"))))
    assert not pair.strengths_vary
