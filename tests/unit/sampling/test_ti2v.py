"""Wan2.2 TI2V-5B: diffusers' pipelines with a timestep per token, and given frames."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel

from wanstream.sampling.cache.settings import FirstBlockCache
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.sampling.loop.lanes import LaneInputs, windows_at
from wanstream.sampling.steps import RequestError
from wanstream.sampling.steps.context_windows import StepWindows
from wanstream.schema import OffloadPolicy
from wanstream.shapes.context_windows import ContextWindows
from wanstream.testing.weights import make_wan22_vae
from wanstream.tests.support.sampling.one_expert import SETTINGS, STEPS, pipeline_of
from wanstream.tests.support.sampling.runs import (
    CPU,
    LAYERWISE,
    MakeRequest,
    OpenPair,
    latents_of,
    normal,
    run,
)
from wanstream.tests.support.wan.pipelines import distance, pipeline_arguments
from wanstream.wan import ExpertPair

TOLERANCE = 1e-5
SIZE = {"height": 64, "width": 96}
LENGTH = {"frames": 9, "steps": STEPS}
SHAPE = (1, 48, 3, 4, 6)
OF_5B = {"vae": make_wan22_vae(seed=3), "expand_timesteps": True}
CHUNKED = replace(LAYERWISE, chunk_tokens=4)
POLICIES = {"whole": LAYERWISE, "chunked": CHUNKED, "block swap": OffloadPolicy.block_swap(2)}


@pytest.fixture
def pair(open_one: OpenPair) -> ExpertPair:
    return open_one(in_channels=48, layers=3)


@pytest.fixture
def text_request(make_request: MakeRequest) -> MakeRequest:
    """Text-to-video request with the settings of the pipelines here."""

    def make(*, batch: int = 1, **changes: Any) -> DenoiseRequest:
        noise = normal(batch, *SHAPE[1:], seed=1)
        return make_request(batch=batch, **{**SETTINGS, "noise": noise, **changes})

    return make


def _given(latent: torch.Tensor, *, frames: int = 1) -> dict[str, torch.Tensor]:
    """Return a latent with given first frames, and the mask."""
    mask = torch.ones(1, 1, *SHAPE[2:])
    mask[:, :, :frames] = 0
    return {"latent": latent * (1 - mask), "mask": mask}


@pytest.fixture
def image_request(text_request: MakeRequest) -> MakeRequest:
    """Request with a given first frame."""
    return lambda **changes: text_request(**{**_given(normal(*SHAPE, seed=2)), **changes})


def test_text_to_video_is_wan_pipeline(pair, text_request):
    request = text_request(batch=2)
    pipeline = pipeline_of(WanPipeline, pair, **OF_5B)
    expected = pipeline(**pipeline_arguments(request, **SIZE, **LENGTH)).frames
    assert distance(latents_of(pair, request), expected) <= TOLERANCE


@pytest.mark.parity
@pytest.mark.slow  # several loop runs
def test_image_to_video_is_wan_image_to_video_pipeline(pair, text_request):
    """Both sides start from the image, encoded by the pipeline's VAE."""
    pipeline = pipeline_of(WanImageToVideoPipeline, pair, **OF_5B)
    plain = text_request()
    image = torch.rand(1, 3, *SIZE.values(), generator=torch.Generator().manual_seed(4))
    expected = pipeline(image=image, **pipeline_arguments(plain, **SIZE, **LENGTH)).frames
    pixels = pipeline.video_processor.preprocess(image, **SIZE)
    given = {"num_channels_latents": 48, "num_frames": LENGTH["frames"], "latents": plain.noise}
    _, frame, _ = pipeline.prepare_latents(pixels, 1, **SIZE, **given)
    latent = torch.zeros(SHAPE)
    latent[:, :, :1] = frame.detach()
    request = text_request(**_given(latent))
    for name, policy in POLICIES.items():
        found = latents_of(pair, request, policy)
        assert distance(found, expected) <= TOLERANCE, name
        assert distance(found[:, :, :1], latent[:, :, :1]) <= TOLERANCE, name
    assert distance(latents_of(pair, plain), expected) > 1e-2, "the first frame counts"


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize(
    ("samples", "kept"),
    [(1, np.s_[:, :, 1, :, :3]), (1, np.s_[:, :, :2]), (2, np.s_[1, :, 0])],
    ids=["half a frame", "two frames", "one of two samples"],
)
def test_masks_of_any_kind_are_timesteps_of_frames(samples, kept, pair, text_request):
    """Compared with a plain loop: the whole model, and a timestep for every token."""
    mask = torch.ones(samples, 1, *SHAPE[2:])
    mask[kept] = 0
    given = {"latent": normal(*SHAPE, seed=5).expand(samples, *SHAPE[1:]), "solver": "euler"}
    request = text_request(batch=samples, mask=mask, guidance=(3.0, 3.0), **given)
    expected = _plain(WanTransformer3DModel.from_pretrained(pair.high.path), request)
    for name, policy in POLICIES.items():
        assert distance(latents_of(pair, request, policy), expected) <= TOLERANCE, name


@torch.no_grad()
def _plain(model: WanTransformer3DModel, request: DenoiseRequest) -> torch.Tensor:
    schedule = request.step_plan.schedule
    free = request.inputs.mask
    kept = request.latent * (1 - free)
    first = schedule.sigmas[0]
    latents = first * request.noise + (1 - first) * request.latent
    tokens = request.noise.shape[3] * request.noise.shape[4] // 4
    texts = [text.expand(request.batch, -1, -1) for text in (request.positive, request.negative)]
    for step, (sigma, after) in enumerate(pairwise(schedule.sigmas)):
        shown = latents * free + kept
        times = free.mean(dim=(1, 3, 4)) * schedule.timesteps[step]
        times = times.repeat_interleave(tokens, dim=1)
        positive, negative = (model(shown, times, text, return_dict=False)[0] for text in texts)
        velocity = negative + request.guidance[0] * (positive - negative)
        ends = (shown - sigma * velocity) * free + kept
        latents = latents + (after - sigma) * (latents - ends) / sigma
    return latents


def test_a_mask_that_keeps_nothing_is_no_mask(pair, text_request):
    request = text_request(mask=torch.ones(1, 1, *SHAPE[2:]))
    assert request.inputs.timestep_scales == (None,)
    assert distance(latents_of(pair, request), latents_of(pair, text_request())) <= TOLERANCE


def test_the_embedder_comes_once_for_all_timesteps(pair, image_request):
    """Given frames need timestep 0 in every step. It is embedded with the others in advance."""
    run(pair, image_request())
    models = pair.engine(LAYERWISE, "cpu").models
    before = models.non_block_bytes
    expected = models.bare["high"].condition_embedder._expected
    assert 0.0 in expected["time"]
    assert len(expected["time"]) == STEPS + 1
    run(pair, image_request())
    assert models.non_block_bytes == before, "a second queue reads nothing of it again"


def test_cache_skips_only_above_threshold_0(pair, image_request):
    nothing, much = (image_request(cache=FirstBlockCache(threshold=each)) for each in (0.0, 10.0))
    assert torch.equal(latents_of(pair, nothing), latents_of(pair, image_request()))
    result = run(pair, much)
    assert sum(step.skipped_lanes for step in result.timeline.steps) > 0
    assert torch.isfinite(result.latents).all()
    assert distance(result.latents[:, :, :1], much.latent[:, :, :1]) <= TOLERANCE


def test_windows_have_the_timestep_scales_of_their_frames(image_request):
    settings = ContextWindows(frames=2, overlap=1, shift_windows=False)
    windows = StepWindows(settings, 0, 3)
    assert windows.cut_timestep_scales((0.0, 1.0, 0.5)) == [(0.0, 1.0), (1.0, 0.5)]
    assert windows.cut_timestep_scales((0.0, 1.0, 1.0)) == [(0.0, 1.0), None]
    assert windows.cut_timestep_scales(None) == [None, None]
    request = image_request(windows=settings)
    lanes = LaneInputs(request, CPU).lanes(request.noise, (0,), windows=windows_at(request, 0))
    assert [lane.timestep_scales for lane in lanes] == [(0.0, 1.0), None]


def test_requests_of_other_models_are_refused(pair, open_one, text_request, make_request):
    of_a14b = make_request(switch_step=None, boundary_ratio=0.0)
    with pytest.raises(RequestError, match=r"16 channels, as Wan2.1 and Wan2.2 A14B have, .* 48"):
        run(pair, of_a14b)
    with pytest.raises(RequestError, match=r"has 48 channels, as Wan2.2 5B have, .* with 16"):
        run(open_one(), text_request())
    with pytest.raises(RequestError, match=r"is \[1, 16, 3, 4, 6\]: give \[1, 1 or 48, 3, 4, 6\]"):
        text_request(mask=torch.ones(1, 16, 3, 4, 6))
