"""merge_requests and split_request: samples are bit-equal to single runs, others are refused."""

from __future__ import annotations

import pytest
import torch

from wanstream.sampling import EasyCache, FirstBlockCache, run_digest
from wanstream.sampling.inputs import DenoiseRequest, ExtraTokens, merge_requests, split_request
from wanstream.sampling.steps import RequestError
from wanstream.shapes import ContextWindows
from wanstream.tests.support.sampling.runs import SHAPE, changed_request, latents_of, normal
from wanstream.wan import ExpertPair, Nag

FRAMES = SHAPE[2:]
EMPTY = torch.zeros(SHAPE)
WINDOWS = ContextWindows(frames=2, overlap=1)
LATE = {"sigmas": [0.75, 0.5, 0.0], "steps": 2, "switch_step": 1}


def lanes_of(make_request, count, **changes):
    """Return requests with different noise, texts and text lengths."""
    return [
        make_request(
            noise=normal(*SHAPE, seed=20 + number),
            positive=normal(1, 3 + number, 4096, seed=30 + number),
            negative=normal(1, 9 - number, 4096, seed=40 + number),
            **changes,
        )
        for number in range(count)
    ]


def check_apart(pair: ExpertPair, requests: list[DenoiseRequest]) -> None:
    together = latents_of(pair, merge_requests(requests))
    samples = together.split([request.batch for request in requests])
    for request, latents in zip(requests, samples, strict=True):
        assert torch.equal(latents, latents_of(pair, request))
    for latents in samples[1:]:
        assert not torch.equal(latents[:1], samples[0][:1])


@pytest.mark.parametrize(("solver", "guidance"), [("unipc", (1.0, 3.0)), ("lcm", (1.0, 1.0))])
def test_lanes_are_single_runs_to_the_bit(solver, guidance, open_short, make_request):
    given = {"steps": 3, "switch_step": 1, "solver": solver, "guidance": guidance}
    check_apart(open_short(), lanes_of(make_request, 3, **given))


def test_latents_and_masks_are_each_lanes_own(open_short, make_request):
    masks = [torch.ones(1, 1, *FRAMES), torch.ones(1, 16, *FRAMES)]
    masks[0][:, :, :1] = 0
    masks[1][:, 3, :, 2:] = 0.25
    lanes = lanes_of(make_request, 2, start_step=1)
    given = zip(lanes, [normal(*SHAPE, seed=seed) for seed in (60, 61)], masks, strict=True)
    requests = [changed_request(lane, latent=latent, mask=mask) for lane, latent, mask in given]
    check_apart(open_short(), requests)


def test_a_latent_with_leftover_noise_goes_on(open_short, make_request):
    left = {"latent": normal(*SHAPE, seed=60), "add_noise": False}
    first, second = lanes_of(make_request, 2, **LATE)
    marked = changed_request(first, **left, latent_sigma=0.75)
    check_apart(open_short(), [marked, changed_request(second, **left)])


def test_merging_one_request_or_merged_ones(make_request):
    first, second, third = lanes_of(make_request, 3)
    assert merge_requests([first]) is first
    nested = merge_requests([merge_requests([first, second]), third])
    flat = merge_requests([first, second, third])
    assert torch.equal(nested.noise, flat.noise)
    for name in ("positive", "negative"):
        assert [*map(id, getattr(nested, name))] == [*map(id, getattr(flat, name))]
    batch = changed_request(third, noise=normal(3, *SHAPE[1:], seed=70))
    texts = merge_requests([first, batch]).positive
    assert texts[1] is texts[2] is texts[3], "a text of several samples is embedded once"
    with pytest.raises(RequestError, match="no lanes: give at least one"):
        merge_requests([])


def test_an_unread_negative_may_be_missing_in_one(make_request):
    first, second = lanes_of(make_request, 2, guidance=(1.0, 1.0))
    assert merge_requests([first, changed_request(second, negative=None)]).negative is None


LONG = torch.zeros(1, 16, 3, 4, 6)
TALL = torch.zeros(1, 16, 2, 6, 4)
BESIDE = ExtraTokens(context=(EMPTY,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise": LONG}, "lane 3 does not fit lane 1: size 48 x 32 .* 9 frames, .* and 5 frames"),
        ({"noise": TALL}, "size 32 x 48 pixels and 5 frames, in lane 1 48 x 32"),
        ({"steps": 6}, "steps 6, in lane 1 5. Lanes of one run .* run it separately"),
        ({"end_step": 4}, "steps 4, in lane 1 5"),
        ({"start_step": 1, "steps": 6, "latent": EMPTY}, "start step 1, in lane 1 0"),
        ({"switch_step": 3}, "expert of step 2 high, in lane 1 low"),
        ({"flow_shift": 8.0}, r"sigma before step 1 0\.\d+, in lane 1 0\.\d+"),
        ({"solver": "euler"}, "solver euler, in lane 1 unipc"),
        ({"guidance": (4.0, 1.0)}, r"guidance \(4.0, 1.0\), in lane 1 \(4.0, 3.0\)"),
        ({"guidance_steps": (4.0, 2.0)}, r"guidance of step 1 2\.0, in lane 1 4\.0"),
        ({"latent": EMPTY}, "latent given, in lane 1 none"),
        ({"mask": torch.ones(1, 1, *FRAMES)}, "noise mask given, in lane 1 none"),
        ({"image_condition": torch.zeros(1, 20, *FRAMES)}, "start image given, in lane 1 none"),
        ({"image_embedding": normal(1, 9, 80, seed=3)}, "image embedding 9 x 80, in lane 1 none"),
        ({"windows": WINDOWS}, "context windows ContextWindows.*, in lane 1 None"),
        ({"nag": Nag(), "guidance_steps": (4.0, 4.0, 3.0, 3.0, 1.0)}, "NAG Nag.*, in lane 1 None"),
        ({"tokens": BESIDE, "context_guidance": 2.0}, r"context guidance 2\.0, in lane 1 1\.0"),
    ],
)
def test_a_lane_that_does_not_fit_is_named_with_both_values(changes, message, make_request):
    first, second, third = lanes_of(make_request, 3)
    with pytest.raises(RequestError, match=message):
        merge_requests([first, second, changed_request(third, **changes)])


def test_leftover_noise_does_not_join_added_noise(make_request):
    first, second = lanes_of(make_request, 2, **LATE, latent=EMPTY)
    with pytest.raises(RequestError, match="noise not added, in lane 1 added"):
        merge_requests([first, changed_request(second, add_noise=False)])


def test_equal_sigmas_with_other_timesteps_are_refused(make_request):
    """The wan schedule truncates timesteps to integers. Explicit sigmas keep fractions."""
    first, second = lanes_of(make_request, 2)
    by_hand = changed_request(second, sigmas=first.step_plan.schedule.sigmas, steps=None)
    with pytest.raises(RequestError, match="timestep of step"):
        merge_requests([first, by_hand])


TEXT = torch.zeros(1, 5, 4096)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([TEXT], "positive has 1 texts for 2 samples: give one for each"),
        ([TEXT] * 3, "positive has 3 texts for 2 samples"),
        ([TEXT, TEXT[..., :768]], r"positive 2 of 2 is \[1, 5, 768\]"),
        ([TEXT, TEXT.repeat(2, 1, 1)], "positive 2 of 2 has 2 texts for 1 samples"),
        ([TEXT[:, :0], TEXT], "positive 1 of 2 is .* no tokens"),
    ],
)
def test_texts_for_each_sample_are_checked_each(texts, message, make_request):
    with pytest.raises(RequestError, match=message):
        make_request(batch=2, positive=texts)


def texts_of_own_lengths(seed: int) -> list[torch.Tensor]:
    return [normal(1, 3 + number, 4096, seed=seed + number) for number in range(3)]


OWN_TEXTS = {"positive": texts_of_own_lengths(20), "negative": texts_of_own_lengths(30)}
ONE_TEXT = {"positive": normal(1, 7, 4096, seed=40), "negative": normal(1, 4, 4096, seed=41)}
IMAGES = normal(3, 20, *FRAMES, seed=50)
MASKED = {
    "latent": normal(3, *SHAPE[1:], seed=60),
    "mask": (normal(3, 1, *FRAMES, seed=61) > 0).float(),
    "start_step": 1,
}
SEEN = {
    "image_condition": IMAGES,
    "image_embedding": normal(3, 17, 80, seed=51),
    **{side: normal(3, 512, 4096, seed=52) for side in ("positive", "negative")},
    "switch_step": None,
    "boundary_ratio": 0.0,
}
LONG_VIDEO = {"noise": normal(3, 16, 7, 4, 6, seed=62), "windows": WINDOWS}
CACHED = {"steps": 8, "switch_step": 4}
CONTEXT = ExtraTokens(context=(normal(3, *SHAPE[1:], seed=63), normal(1, 16, 1, 4, 10, seed=64)))
CONTROLLED = {
    "image_condition": normal(1, 36, *FRAMES, seed=65),
    "tokens": ExtraTokens(reference=normal(3, 16, 1, 4, 6, seed=66)),
}
OF_5B = {
    "noise": normal(3, 48, *FRAMES, seed=67),
    "latent": normal(3, 48, *FRAMES, seed=68),
    "mask": torch.cat(
        [torch.arange(2).view(1, 1, 2, 1, 1).expand(1, 1, *FRAMES)] * 2
        + [torch.ones(1, 1, *FRAMES)]
    ).float(),
    "switch_step": None,
    "boundary_ratio": 0.0,
}
CASES = {
    "texts of own lengths": ({}, OWN_TEXTS),
    "a text for all": ({}, {**ONE_TEXT, "solver": "euler"}),
    "an image for each": ({"in_channels": 36}, {"image_condition": IMAGES}),
    "latents and masks": ({}, MASKED),
    "NAG": ({}, {"nag": Nag(scale=5.0), "guidance": (1.0, 1.0)}),
    "windows": ({}, {**LONG_VIDEO, "guidance_steps": (4.0, 1.0, 3.0)}),
    "first block": ({}, {**CACHED, "cache": FirstBlockCache(threshold=0.55)}),
    "EasyCache": ({}, {**CACHED, "cache": EasyCache(threshold=0.8)}),
    "context guidance": ({}, {"tokens": CONTEXT, "context_guidance": 1.75}),
    "Fun Control": ({"in_channels": 52, "reference": True}, CONTROLLED),
    "image branch": ({"in_channels": 36, "image_dim": 80}, SEEN),
    "given frames of 5B": ({"in_channels": 48}, OF_5B),
}
"""Expert shapes and request changes."""


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize(
    ("case", "sizes"), [(case, ((1, 2), (1, 1, 1))[at % 2]) for at, case in enumerate(CASES)]
)
@pytest.mark.usefixtures("exact_blocks")
def test_parts_are_samples_of_the_whole_to_the_bit(case, sizes, open_short, open_one, make_request):
    shape, changes = CASES[case]
    request = make_request(**{"batch": 3, "steps": 3, "switch_step": 2, **changes})
    pair = (open_short if request.step_plan.experts[-1] == "low" else open_one)(**shape)
    whole = latents_of(pair, request)
    parts = split_request(request, sizes)
    assert [part.batch for part in parts] == list(sizes)
    assert torch.equal(torch.cat([latents_of(pair, part) for part in parts]), whole)
    assert torch.equal(latents_of(pair, merge_requests(parts)), whole)


def test_a_part_carries_nothing_of_the_others(make_request):
    without = make_request(batch=2, negative=None, guidance=(1.0, 1.0))
    assert [part.negative for part in split_request(without, (1, 1))] == [None, None]
    one, three = (normal(count, 17, 80, seed=70) for count in (1, 3))
    for seen, expected in ((one, [one, one]), (three, [three[:1], three[1:]])):
        parts = split_request(make_request(batch=3, image_embedding=seen), (1, 2))
        for part, own in zip(parts, expected, strict=True):
            image = part.inputs.image_embedding
            assert torch.equal(image, own)
            for tensor in (part.noise, part.positive, part.negative, image):
                assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_all_samples_are_the_request_itself(make_request):
    request = make_request(batch=3)
    assert split_request(request, (3,)) == [request]
    assert run_digest(request, "") != run_digest(split_request(request, (1, 2))[1], "")


@pytest.mark.parametrize("sizes", [(), (1, 1), (4,), (0, 3), (-1, 4)])
def test_sizes_that_do_not_sum_up_are_refused(sizes, make_request):
    with pytest.raises(RequestError, match="the batch has 3 samples"):
        split_request(make_request(batch=3), sizes)
