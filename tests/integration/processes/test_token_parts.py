"""Lanes with tokens next to the video, shared by workers.

The tokens are Bernini's contexts or the Fun Control reference.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from wanstream.plan.programs.visits import SkipRule
from wanstream.sampling import FirstBlockCache, MagCache, calibrate, denoise
from wanstream.sampling.inputs import ExtraTokens
from wanstream.schema import Mesh, MeshError
from wanstream.shapes import ContextWindows
from wanstream.tests.support.distributed import split_jobs
from wanstream.tests.support.rounding import ROUNDING, difference
from wanstream.tests.support.sampling.runs import LAYERWISE, normal
from wanstream.wan import ExpertsRegistry, Nag

CHUNKED = replace(LAYERWISE, chunk_tokens=8)
SHAPE = (1, 16, 3, 4, 8)
"""8 tokens in each of 3 frames."""


SOURCE = normal(*SHAPE, seed=1)
IMAGE = normal(1, 16, 1, 4, 4, seed=2)
BERNINI = {"tokens": ExtraTokens(context=(SOURCE, IMAGE))}
CONTROL = {
    "image_condition": normal(1, 36, *SHAPE[2:], seed=3),
    "tokens": ExtraTokens(reference=normal(1, 16, 1, 4, 8, seed=4)),
}
SIDES = {"negative_tokens": ExtraTokens()}
"""Lanes with 27 and 24 tokens, with `ODD`."""
CACHE = {"cache": FirstBlockCache(threshold=0.05)}
WINDOWS = {"windows": ContextWindows(frames=2, overlap=1)}
STEPS = {"guidance_steps": (4.0, 1.0, 3.0)}
NAG = {"nag": Nag(), "guidance": (4.0, 1.0)}
TWO_VIDEOS = {
    "noise": normal(2, *SHAPE[1:], seed=20),
    "tokens": ExtraTokens(context=(torch.cat([SOURCE, -SOURCE]), IMAGE)),
}


@pytest.fixture
def given(make_task, experts_ref):
    """`given(**changes)`: experts with four heads, and a request."""

    def make(**changes):
        control = {"in_channels": 52, "reference": True} if "image_condition" in changes else {}
        request = {"noise": normal(*SHAPE, seed=20), **changes}
        return experts_ref(heads=4, **control), make_task(request=request).request

    return make


THREE_SIDES = {**BERNINI, "context_guidance": 1.5}
"""Lanes with 52, 24 and 52 tokens. With cfg 2 both ranks compute the middle one, or half of it."""
ODD = {"tokens": ExtraTokens(context=(normal(1, 16, 1, 2, 6, seed=5),))}
"""A lane with 27 tokens."""


JOBS = {
    "Bernini": (BERNINI, ({}, WINDOWS, CACHE)),
    "Fun Control": (CONTROL, ({}, WINDOWS, CACHE)),
    "three sides": (THREE_SIDES, ({}, CACHE, STEPS, TWO_VIDEOS)),
    "odd": (ODD, ({}, CACHE, SIDES, NAG)),
}
"""Changes of the request, and further ones to run one after the other."""


@pytest.mark.parametrize(
    ("name", "mesh", "policy"),
    [
        ("Bernini", Mesh(ulysses=2), CHUNKED),
        ("Bernini", Mesh(cfg=2), LAYERWISE),
        ("Fun Control", Mesh(ulysses=2), LAYERWISE),
        ("Fun Control", Mesh(cfg=2), CHUNKED),
        ("three sides", Mesh(ulysses=2), CHUNKED),
        ("three sides", Mesh(cfg=2), LAYERWISE),
        ("three sides", Mesh(cfg=2, ulysses=2), CHUNKED),
        ("odd", Mesh(ulysses=2), LAYERWISE),
        ("odd", Mesh(ulysses=4), CHUNKED),
        ("odd", Mesh(cfg=2, ulysses=2), LAYERWISE),
    ],
    ids=split_jobs.row_id,
)
def test_workers_give_what_one_gives(name, mesh, policy, split, given, check_split):
    changes, every = JOBS[name]
    split.join(mesh)
    for more in every:
        check_split(*given(**{**changes, **more}), policy)


def test_a_cache_skips_alike_with_unequal_shares(split, given, check_split):
    split.join(Mesh(ulysses=4))
    plain = split.alone(*given(**ODD), LAYERWISE)
    job = *given(**ODD, cache=FirstBlockCache(threshold=1e9)), LAYERWISE
    assert difference(check_split(*job)[0], plain) > ROUNDING


def test_steps_without_blocks_have_any_number_of_tokens(split, given, check_split):
    split.join(Mesh(ulysses=2))
    experts, request = given(**ODD)
    run = partial(denoise, ExpertsRegistry().get(experts), policy=LAYERWISE, device="cpu")
    table = calibrate(request, run, source="a test")
    cache = MagCache(table=table, rule=SkipRule(threshold=1e9, retention=0.0))
    alone, _ = check_split(*given(**ODD, cache=cache), LAYERWISE)
    assert difference(alone, split.alone(experts, request, LAYERWISE)) > ROUNDING


def test_int8_attention_gets_any_number_of_tokens(split, given):
    split.join(Mesh(ulysses=2))
    experts, request = given(**ODD)
    alone = split.alone(experts, request, LAYERWISE)
    with split.int8_attention():
        for worker in split.run(replace(experts, attention="int8"), request, LAYERWISE):
            assert difference(worker["latents"], alone) <= ROUNDING
        assert split.all(split_jobs.job_seen) == [(1, 2, 27, 128)] * 2


def test_compiled_blocks_with_any_number_of_tokens(split, given):
    split.join(Mesh(ulysses=2))
    for plain, compiled, again in split.all(split_jobs.job_run_compiled, *given(**ODD), LAYERWISE):
        assert torch.equal(compiled["latents"], plain["latents"])
        assert torch.equal(again["latents"], plain["latents"])


def test_sizes_are_exchanged_only_for_totals_that_do_not_divide(split, given):
    split.join(Mesh(ulysses=2))
    first, odd, last = (split.run(*given(**changes), LAYERWISE) for changes in ({}, ODD, {}))
    for before, between, after in zip(first, odd, last, strict=True):
        assert torch.equal(before["latents"], after["latents"])
        assert before["gathered"] == before["crossed"] == after["gathered"] == after["crossed"]
        assert between["gathered"] == pytest.approx(between["crossed"], rel=0.1)


def test_a_ring_refuses_tokens_that_it_cannot_split(split, given):
    split.join(Mesh(ring=2))
    message = "ring 2 x ulysses 1 cannot split 27 tokens evenly: choose ring 1, .* its references"
    job = *given(**ODD), LAYERWISE
    with split.attention_with_lse():
        for answer in [process.start(split_jobs.job_run, *job) for process in split.processes[:2]]:
            with pytest.raises(MeshError, match=message):
                answer.result(60)
