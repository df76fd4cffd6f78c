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
from wanstream.sampling import denoise, predicted_timeline
from wanstream.sampling.cache import EasyCache, FirstBlockCache
from wanstream.sampling.cache.base import LaneName, Stage
from wanstream.sampling.cache.easycache import computed_steps
from wanstream.sampling.cache.mag_table import MagTable
from wanstream.sampling.cache.settings import CacheSettings, MagCache
from wanstream.sampling.estimate import request_run_shape
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.steps import RequestError, RunSlice, RunState
from wanstream.schema import OffloadPolicy, StepRange, StepStrengths
from wanstream.tests.support.plan_fixtures import CPU_MACHINE
from wanstream.tests.support.sampling_fixtures import WatchedPair
from wanstream.wan import ExpertPair
from wanstream.wan.lora.file import LoraFile, open_lora

CPU = torch.device("cpu")
LAYERS = 4
POLICIES = {
    "resident": OffloadPolicy.resident(),
    "layerwise": OffloadPolicy.layerwise(1),
    "layerwise pinned": OffloadPolicy.layerwise(2, source="pinned"),
    "block swap": OffloadPolicy.block_swap(2, 1),
    "block swap, some in RAM": replace(
        OffloadPolicy.block_swap(2, 1, source="pinned"), ram_blocks=3
    ),
}
# 1 - sigma is a power of two where a stage ends, so the hand-over to the next sampler rounds
# nothing.
SIGMAS = (1.0, 0.9, 0.75, 0.6, 0.5, 0.25, 0.0)
ENDS = (0, 2, 4, 6)
"""Stage ends: the high-noise expert without a LoRA, with it, and the low-noise expert."""
STAGES = {
    "steps": None,
    "sigmas": SIGMAS,
    "switch_step": 4,
    "guidance_steps": (4.0, 4.0, 1.0),
    "solver": "euler",
}
WITHOUT_AT_FIRST = StepStrengths(usual=0.8, ranges=(StepRange(0, 1, 0.0),))

Request, OpenPair = Callable[..., DenoiseRequest], Callable[..., ExpertPair]


@pytest.fixture
def loras(
    lora_file: Callable[..., Path], lightning: Callable[..., dict[str, torch.Tensor]]
) -> list[LoraFile]:
    """A LoRA for each expert, with blocks, a bias and the time embedder.

    Time embedder rows are computed ahead.
    """
    found = []
    for seed in (3, 4):
        tensors, generator = lightning(seed=seed), torch.Generator().manual_seed(seed)
        for name, shape in (("down", (4, 256)), ("up", (6 * 256, 4))):
            factor = 0.1 * torch.randn(*shape, generator=generator)
            tensors[f"diffusion_model.time_projection.1.lora_{name}.weight"] = factor
        tensors["diffusion_model.blocks.0.cross_attn.o.diff_b"] = 0.1 * torch.randn(
            256, generator=generator
        )
        # A DoRA and a LoKr, computed in other ways, in blocks with equal bytes.
        for layer in (f"diffusion_model.blocks.{block}.self_attn" for block in range(LAYERS)):
            tensors[f"{layer}.q.dora_scale"] = 1 + torch.rand(256, 1, generator=generator)
            for part in ("lora_down.weight", "lora_up.weight"):
                del tensors[f"{layer}.k.{part}"]
            tensors[f"{layer}.k.lokr_w1"] = 0.2 * torch.randn(8, 4, generator=generator)
            tensors[f"{layer}.k.lokr_w2"] = 0.2 * torch.randn(32, 64, generator=generator)
        found.append(open_lora(lora_file(tensors)))
    return found


def run(
    pair: ExpertPair,
    request: DenoiseRequest,
    policy: OffloadPolicy = POLICIES["layerwise"],
    **given: Any,
) -> Any:
    return denoise(pair, request, **given, policy=policy, device=CPU)


def set_both(pair: ExpertPair, loras: Sequence[LoraFile], strengths: StepStrengths | float) -> None:
    pair.set_loras(*([(lora, strengths)] for lora in loras))


def in_three_samplers(
    pair: ExpertPair, loras: Sequence[LoraFile], request: Request
) -> torch.Tensor:
    """Return the latents after three samplers. Each hands on a latent with noise.

    Each sampler has fixed strengths.
    """
    given: dict[str, Any] = {}
    for (start, end), strength in zip(pairwise(ENDS), (0.0, 0.8, 0.8), strict=True):
        set_both(pair, loras, strength)
        result = run(
            pair, request(**STAGES, start_step=start, end_step=end, leftover_noise=True, **given)
        )
        given = {
            "latent": result.latents / (1 - result.sigma),
            "latent_sigma": result.sigma,
            "add_noise": False,
        }
    return result.latents


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_one_run_of_three_stages_is_three_samplers_in_sequence(
    policy: OffloadPolicy, open_pair: OpenPair, make_request: Request, loras: list[LoraFile]
) -> None:
    pair = open_pair()
    expected = in_three_samplers(open_pair(), loras, make_request)
    set_both(pair, loras, WITHOUT_AT_FIRST)
    for _ in range(2):  # the second run starts from the first one's blocks and strengths
        assert torch.equal(run(pair, make_request(**STAGES), policy).latents, expected)
    set_both(pair, loras, 0.8)
    assert not torch.allclose(
        run(pair, make_request(**STAGES), policy).latents, expected, atol=1e-3
    )


@pytest.mark.parametrize("solver", ["unipc", "dpm++"])
def test_the_solver_keeps_its_history_across_a_change(
    solver: str, open_pair: OpenPair, make_request: Request, loras: list[LoraFile]
) -> None:
    """The reference continues from the previous part's state, with other strengths."""
    pair, request = open_pair(), make_request(**{**STAGES, "solver": solver})
    set_both(pair, loras, WITHOUT_AT_FIRST)
    states: list[RunState] = []
    whole = run(pair, request, on_step=lambda progress: states.append(progress.state()))
    parts: RunState | None = None
    for (start, end), strength in zip(pairwise(ENDS), (0.0, 0.8, 0.8), strict=True):
        set_both(pair, loras, strength)
        kept: list[RunState] = []
        run(
            pair,
            request,
            part=RunSlice(resume=parts, until=end),
            on_step=lambda progress, kept=kept: kept.append(progress.state()),
        )
        assert [state.next_step for state in kept] == list(range(start + 1, end + 1))
        parts = kept[-1]
        assert torch.equal(parts.latents, states[end - 1].latents)
    assert torch.equal(parts.latents, whole.latents)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_run_is_resumed_with_the_strengths_of_its_steps(
    cut: int, open_pair: OpenPair, make_request: Request, loras: list[LoraFile]
) -> None:
    request, states = make_request(**STAGES), list[RunState]()
    for pair in (first := open_pair(), second := open_pair()):
        set_both(pair, loras, WITHOUT_AT_FIRST)
    whole = run(first, request, on_step=lambda progress: states.append(progress.state()))
    rest = run(second, request, part=RunSlice(resume=states[cut - 1]))
    assert [step.index for step in rest.timeline.steps] == list(range(cut, 6))
    assert torch.equal(rest.latents, whole.latents)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_fetches_at_a_change_are_those_of_residents_and_as_predicted(
    policy: OffloadPolicy, watched: WatchedPair, make_request: Request, loras: list[LoraFile]
) -> None:
    pair, request = watched.pair, make_request(**{**STAGES, "switch_step": 6})
    set_both(pair, loras, WITHOUT_AT_FIRST)
    for cold in (True, False):
        predicted = predicted_timeline(pair, request, policy, machine=CPU_MACHINE, device=CPU)
        measured = run(watched, request, policy).timeline
        for ours, theirs in zip(predicted.steps, measured.steps, strict=True):
            patches = sum(engine_bytes(pair, policy, theirs.index))
            fetched = ours.bytes_moved // pair.block_bytes.stored
            # The prediction counts the stored bytes, as for every run with a LoRA. Factors come on
            # top.
            assert theirs.bytes_moved == ours.bytes_moved + fetched * patches // LAYERS
            assert theirs.transfers.read_bytes == ours.transfers.read_bytes
        program = watched.runs[-1].program
        assert watched.runs[-1].fetched == list(program.fetches)
        if cold:
            fetched_for = [program.visits[fetch.needed_by].step for fetch in program.fetches]
            residents = {"resident": LAYERS, "layerwise": 0}.get(
                policy.kind, LAYERS - policy.blocks_to_swap
            )
            streamed = LAYERS - residents
            # All blocks before the first step and where the strength changes, otherwise the
            # streamed ones.
            assert [fetched_for.count(step) for step in range(6)] == [
                4,
                streamed,
                4,
                streamed,
                streamed,
                streamed,
            ]


def engine_bytes(pair: ExpertPair, policy: OffloadPolicy, step: int) -> list[int]:
    """Return factor bytes in a step, for each block in the high-noise expert."""
    engine, patch = pair.current_engine(policy, CPU), pair.patch_at("high", step)
    assert engine is not None
    keys = [key._replace(patch=patch) for key in engine.formats if key.expert == "high"]
    return [engine.patches.nbytes(key) for key in keys]


def test_a_resident_run_hands_its_buffers_on_at_a_change(
    watched: WatchedPair, make_request: Request, loras: list[LoraFile]
) -> None:
    """A block is fetched again once its last visit with the old strength has ended.

    It does not wait for the step's end.
    """
    set_both(watched.pair, loras, WITHOUT_AT_FIRST)
    run(watched, make_request(**STAGES), POLICIES["resident"])
    [engine_run] = watched.runs
    again = [
        fetch
        for fetch in engine_run.program.fetches
        if fetch.block.patch == 1 and fetch.block.expert == "high"
    ]
    assert len(again) == LAYERS
    assert all(fetch.start_after < 2 * LAYERS for fetch in again)


def test_equal_strengths_share_their_blocks_and_factors(
    open_pair: OpenPair, make_request: Request, loras: list[LoraFile]
) -> None:
    pair, high = open_pair(), loras[0]
    pair.set_loras([(high, 0.8)], [])
    plain = run(pair, make_request(**STAGES), POLICIES["resident"])
    factors = pair.host_bytes
    same = StepStrengths(usual=0.8, ranges=(StepRange(0, 1, 0.8),))
    pair.set_loras([(high, same)], [])
    assert not pair.strengths_vary
    again = run(pair, make_request(**STAGES), POLICIES["resident"])
    assert again.timeline.bytes_moved == 0
    assert torch.equal(again.latents, plain.latents)
    there_and_back = StepStrengths(usual=0.8, ranges=(StepRange(1, 1, 0.0), StepRange(3, 3, 0.0)))
    pair.set_loras([(high, there_and_back)], [])
    assert [pair.patch_at("high", step) for step in range(5)] == [0, 1, 0, 1, 0]
    run(pair, make_request(**STAGES), POLICIES["resident"])
    assert pair.host_bytes == factors


def test_the_planner_counts_factors_of_all_strengths(
    open_pair: OpenPair, make_request: Request, loras: list[LoraFile]
) -> None:
    pair = open_pair()
    without = pair.host_resident_bytes
    pair.set_loras([(loras[0], 0.8)], [])
    one = pair.host_resident_bytes - without
    pair.set_loras([(loras[0], WITHOUT_AT_FIRST)], [])
    assert pair.host_resident_bytes - without == one, "a strength of 0 needs no factors"
    pair.set_loras([(loras[0], StepStrengths(usual=0.8, ranges=(StepRange(0, 1, 0.3),)))], [])
    stored = sum(tensor.nbytes for tensor in loras[0].tensors.values())
    assert pair.host_resident_bytes - without == 2 * one - stored
    steps = request_run_shape(pair, make_request(**STAGES), CPU).steps
    assert [step.patch for step in steps] == [0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    "cache", [FirstBlockCache(threshold=1e3), EasyCache(threshold=1e3, retention=0.0)], ids=str
)
def test_a_cache_reuses_nothing_across_a_change(
    cache: CacheSettings, open_pair: OpenPair, make_request: Request, loras: list[LoraFile]
) -> None:
    settings = {**STAGES, "guidance_steps": (1.0,), "switch_step": 6, "cache": cache}
    pair = open_pair()
    set_both(pair, loras, WITHOUT_AT_FIRST)
    steps = run(pair, make_request(**settings)).timeline.steps
    set_both(pair, loras, 0.8)
    unchanged = run(pair, make_request(**settings)).timeline.steps
    assert unchanged[2].skipped_visits, "the same strength: the cache skips the step"
    assert not steps[2].skipped_visits, "another strength: the step is computed"
    assert any(step.skipped_visits for step in steps)


def test_known_skips_start_again_at_a_change() -> None:
    names = (LaneName(0, 0),)
    steps = {step: (Stage("high"), names) for step in range(8)}
    changing = {step: (Stage("high", int(step >= 4)), names) for step in range(8)}
    sigmas = tuple(1 - step / 8 for step in range(9))
    table = MagTable(sigmas=sigmas, experts=("high",) * 8, ratios=((1.0,) * 8,), marks={})
    cache = MagCache(
        table=table, rule=SkipRule(threshold=0.5, max_consecutive_skips=7, retention=0.0)
    )
    assert cache.start(steps).skipped == frozenset(range(1, 8))
    assert cache.start(changing).skipped == {1, 2, 3, 5, 6, 7}
    assert computed_steps(changing, 0.0) == {0, 1, 3, 4, 5, 7}


class TestRefusals:
    def test_a_range_that_leaves_the_run(
        self, open_pair: OpenPair, make_request: Request, loras: list[LoraFile]
    ) -> None:
        pair = open_pair()
        set_both(pair, loras, StepStrengths(usual=1.0, ranges=(StepRange(0, 5, 0.0),)))
        run(pair, make_request(**STAGES))
        name = loras[0].path.name
        with pytest.raises(
            RequestError, match=f"{name} has a strength for steps '0-5: 0', and the run has 5 steps"
        ):
            run(pair, make_request())

    def test_a_run_that_ends_early_may_have_ranges_after_its_end(
        self, open_pair: OpenPair, make_request: Request, loras: list[LoraFile]
    ) -> None:
        pair = open_pair()
        set_both(pair, loras, StepStrengths(usual=1.0, ranges=(StepRange(4, 5, 0.0),)))
        assert len(run(pair, make_request(**STAGES, end_step=2)).timeline.steps) == 2

    def test_a_strength_that_is_not_a_number(
        self, open_pair: OpenPair, loras: list[LoraFile]
    ) -> None:
        pair = open_pair()
        with pytest.raises(ValueError, match="is nan: give a finite number"):
            set_both(pair, loras, StepStrengths(usual=1.0, ranges=(StepRange(0, 1, float("nan")),)))
        assert not pair.strengths_vary
