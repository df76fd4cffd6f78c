"""Wan2.2 TI2V-5B: diffusers' pipelines with a timestep per token, and given frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel

from wanstream.sampling import denoise
from wanstream.sampling.cache.settings import FirstBlockCache
from wanstream.sampling.inputs import DenoiseRequest, merge_requests
from wanstream.sampling.steps import RequestError, SamplingCancelled
from wanstream.sampling.steps.context_windows import StepWindows
from wanstream.schema import OffloadPolicy
from wanstream.shapes.context_windows import ContextWindows
from wanstream.testing.weights import make_wan22_vae
from wanstream.tests.support.pipelines import distance, make_pipeline, pipeline_arguments
from wanstream.tests.support.sampling_fixtures import changed_request
from wanstream.wan import ExpertPair, Nag

TOLERANCE = 1e-5
HEIGHT, WIDTH, FRAMES = 64, 96, 9
SHAPE = (1, 48, 3, 4, 6)
STEPS, SHIFT = 6, 5.0
TI2V = {"in_channels": 48, "layers": 3}
WHOLE = OffloadPolicy.layerwise(1)
CHUNKED = replace(WHOLE, chunk_tokens=4)
POLICIES = {"whole": WHOLE, "chunked": CHUNKED, "block swap": OffloadPolicy.block_swap(2)}

Request = Callable[..., DenoiseRequest]


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _run(pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy = WHOLE) -> torch.Tensor:
    return denoise(pair, request, policy=policy, device="cpu").latents


@pytest.fixture
def pair(open_one: Callable[..., ExpertPair]) -> ExpertPair:
    return open_one(**TI2V)


@pytest.fixture
def text_request(make_request: Request) -> Request:
    """Text-to-video request with the settings of the pipelines here."""

    def make(*, batch: int = 1, **changes: Any) -> DenoiseRequest:
        step_plan = {
            "steps": STEPS,
            "flow_shift": SHIFT,
            "switch_step": None,
            "boundary_ratio": 0.0,
        }
        given = {
            "noise": _normal(batch, *SHAPE[1:], seed=1),
            "guidance": (5.0, 5.0),
            "solver": "unipc",
        }
        return make_request(batch=batch, **{**step_plan, **given, "schedule": "wan", **changes})

    return make


def _given(latent: torch.Tensor, *, frames: int = 1) -> dict[str, torch.Tensor]:
    """Return a latent with given first frames, and the mask."""
    mask = torch.ones(1, 1, *SHAPE[2:])
    mask[:, :, :frames] = 0
    return {"latent": latent * (1 - mask), "mask": mask}


@pytest.fixture
def image_request(text_request: Request) -> Request:
    """Request with a given first frame."""
    return lambda **changes: text_request(**{**_given(_normal(*SHAPE, seed=2)), **changes})


def _pipeline(kind: Any, pair: ExpertPair) -> Any:
    transformer = WanTransformer3DModel.from_pretrained(pair.high.path).requires_grad_(False)
    parts = {"transformer": transformer, "vae": make_wan22_vae(seed=3)}
    return make_pipeline(kind, flow_shift=SHIFT, expand_timesteps=True, **parts)


def _settings(request: DenoiseRequest) -> dict[str, Any]:
    return pipeline_arguments(request, height=HEIGHT, width=WIDTH, frames=FRAMES, steps=STEPS)


def test_text_to_video_is_wan_pipeline(pair: ExpertPair, text_request: Request) -> None:
    request = text_request(batch=2)
    expected = _pipeline(WanPipeline, pair)(**_settings(request)).frames
    assert distance(_run(pair, request), expected) <= TOLERANCE


@pytest.mark.slow  # several loop runs
def test_image_to_video_is_wan_image_to_video_pipeline(
    pair: ExpertPair, text_request: Request
) -> None:
    """Both sides start from the image, encoded by the pipeline's VAE."""
    pipeline = _pipeline(WanImageToVideoPipeline, pair)
    image = torch.rand(1, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(4))
    plain = text_request()
    expected = pipeline(image=image, **_settings(plain)).frames
    pixels = pipeline.video_processor.preprocess(image, height=HEIGHT, width=WIDTH)
    _, frame, _ = pipeline.prepare_latents(
        pixels,
        1,
        num_channels_latents=48,
        height=HEIGHT,
        width=WIDTH,
        num_frames=FRAMES,
        latents=plain.noise,
    )
    latent = torch.zeros(SHAPE)
    latent[:, :, :1] = frame.detach()
    request = text_request(**_given(latent))
    for name, policy in POLICIES.items():
        found = _run(pair, request, policy)
        assert distance(found, expected) <= TOLERANCE, name
        assert distance(found[:, :, :1], latent[:, :, :1]) <= TOLERANCE, (
            "the first frame is the given one"
        )
    assert distance(_run(pair, plain), expected) > 1e-2, "the first frame counts"


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize("given", ["half a frame", "two frames", "one of two samples"])
def test_masks_of_any_kind_are_timesteps_of_frames(
    given: str, pair: ExpertPair, text_request: Request
) -> None:
    """Compared with a plain loop: the whole model, and a timestep for every token."""
    latent, mask = _normal(*SHAPE, seed=5), torch.ones(1, 1, *SHAPE[2:])
    if given == "half a frame":
        mask[:, :, 1, :, :3] = 0
    elif given == "two frames":
        mask[:, :, :2] = 0
    else:
        latent, mask = latent.repeat(2, 1, 1, 1, 1), torch.stack([mask[0], mask[0].clone()])
        mask[1, :, 0] = 0
    request = text_request(
        batch=len(latent), latent=latent, mask=mask, solver="euler", guidance=(3.0, 3.0)
    )
    expected = _plain(WanTransformer3DModel.from_pretrained(pair.high.path), request)
    for name, policy in POLICIES.items():
        assert distance(_run(pair, request, policy), expected) <= TOLERANCE, name


@torch.no_grad()
def _plain(model: WanTransformer3DModel, request: DenoiseRequest) -> torch.Tensor:
    assert request.latent is not None
    assert request.inputs.mask is not None
    schedule = request.step_plan.schedule
    free = request.inputs.mask.expand(request.batch, *request.inputs.mask.shape[1:])
    kept = request.latent * (1 - free)
    first = schedule.sigmas[0]
    latents = first * request.noise + (1 - first) * request.latent
    height, width = request.noise.shape[3] // 2, request.noise.shape[4] // 2
    for step, (sigma, after) in enumerate(zip(schedule.sigmas, schedule.sigmas[1:], strict=False)):
        shown = latents * free + kept
        times = (free.mean(dim=(1, 3, 4)) * schedule.timesteps[step]).repeat_interleave(
            height * width, dim=1
        )
        sides = [
            model(shown, times, text.expand(request.batch, -1, -1), return_dict=False)[0]
            for text in (request.positive, request.negative)
        ]
        velocity = sides[1] + request.guidance[0] * (sides[0] - sides[1])
        ends = (shown - sigma * velocity) * free + kept
        latents = latents + (after - sigma) * (latents - ends) / sigma
    return latents


def test_a_mask_that_keeps_nothing_is_no_mask(pair: ExpertPair, text_request: Request) -> None:
    request = text_request(mask=torch.ones(1, 1, *SHAPE[2:]))
    assert request.inputs.timestep_scales == (None,)
    assert distance(_run(pair, request), _run(pair, text_request())) <= TOLERANCE


def test_the_embedder_comes_once_for_all_timesteps(
    pair: ExpertPair, image_request: Request
) -> None:
    """Given frames need timestep 0 in every step. It is embedded with the others in advance."""
    request = image_request()
    _run(pair, request)
    engine = pair.engine(WHOLE, "cpu")
    before = engine.models.non_block_bytes
    embedder = engine.models.bare["high"].condition_embedder
    expected = embedder._expected["time"]
    assert 0.0 in expected
    assert len(expected) == STEPS + 1
    _run(pair, request)
    assert engine.models.non_block_bytes == before, "a second queue reads nothing of it again"


def test_policies_differ_in_nothing_but_last_bits(pair: ExpertPair, image_request: Request) -> None:
    request = image_request()
    expected = _run(pair, request)
    assert torch.equal(_run(pair, request, OffloadPolicy.block_swap(2)), expected)
    assert torch.equal(_run(pair, request, OffloadPolicy.resident()), expected)
    assert distance(_run(pair, request, CHUNKED), expected) <= TOLERANCE


def test_a_cache_at_threshold_0_changes_nothing_and_a_high_one_skips(
    pair: ExpertPair, image_request: Request
) -> None:
    plain = _run(pair, image_request())
    assert torch.equal(_run(pair, image_request(cache=FirstBlockCache(threshold=0.0))), plain)
    result = denoise(
        pair, image_request(cache=FirstBlockCache(threshold=10.0)), policy=WHOLE, device="cpu"
    )
    assert sum(step.skipped_lanes for step in result.timeline.steps) > 0
    assert torch.isfinite(result.latents).all()
    frame = image_request().latent[:, :, :1]
    assert distance(result.latents[:, :, :1], frame) <= TOLERANCE


@pytest.mark.slow  # several loop runs
def test_one_window_is_none_and_several_know_their_own_frames(
    pair: ExpertPair, image_request: Request
) -> None:
    plain = _run(pair, image_request())
    assert torch.equal(
        _run(pair, image_request(windows=ContextWindows(frames=3, overlap=1))), plain
    )
    request = image_request(windows=ContextWindows(frames=2, overlap=1, shift_windows=False))
    found = _run(pair, request)
    assert torch.isfinite(found).all()
    assert distance(found[:, :, :1], plain[:, :, :1]) <= TOLERANCE, (
        "the first frame stays what was given"
    )
    other = image_request(
        windows=request.options.windows, latent=_normal(*SHAPE, seed=9) * (1 - request.inputs.mask)
    )
    assert distance(_run(pair, other)[:, :, 1:], found[:, :, 1:]) > 1e-3


def test_windows_know_how_free_their_own_frames_are() -> None:
    windows = StepWindows(ContextWindows(frames=2, overlap=1, shift_windows=False), 0, 3)
    assert windows.cut_timestep_scales((0.0, 1.0, 0.5)) == [(0.0, 1.0), (1.0, 0.5)]
    assert windows.cut_timestep_scales((0.0, 1.0, 1.0)) == [(0.0, 1.0), None]
    assert windows.cut_timestep_scales(None) == [None, None]


def test_nag_holds_the_negative_text_against_it(pair: ExpertPair, image_request: Request) -> None:
    plain = image_request(guidance=(1.0, 1.0))
    held = changed_request(plain, nag=Nag(scale=5.0))
    found = _run(pair, held)
    assert distance(found, _run(pair, plain)) > 1e-4
    assert distance(_run(pair, held, CHUNKED), found) <= TOLERANCE


def test_lanes_come_out_as_alone(pair: ExpertPair, image_request: Request) -> None:
    requests = [
        image_request(**_given(_normal(*SHAPE, seed=seed), frames=seed - 5)) for seed in (6, 7)
    ]
    both = _run(pair, merge_requests(requests))
    for own, request in zip(both.split(1), requests, strict=True):
        assert torch.equal(own, _run(pair, request))


def test_a_cancelled_run_leaves_the_model_usable(pair: ExpertPair, image_request: Request) -> None:
    expected, polls = _run(pair, image_request()), iter(range(100))
    with pytest.raises(SamplingCancelled):
        denoise(
            pair, image_request(), policy=WHOLE, device="cpu", should_stop=lambda: next(polls) == 4
        )
    assert torch.equal(_run(pair, image_request()), expected)


def test_what_does_not_fit_is_refused(
    pair: ExpertPair,
    open_one: Callable[..., ExpertPair],
    text_request: Request,
    make_request: Request,
) -> None:
    plain = {"switch_step": None, "boundary_ratio": 0.0}
    with pytest.raises(
        RequestError,
        match=r"has 16 channels, as Wan2.1 and Wan2.2 A14B have, .* Wan2.2 5B, with 48",
    ):
        _run(pair, make_request(**plain))
    with pytest.raises(RequestError, match=r"has 48 channels, as Wan2.2 5B have, .* with 16"):
        _run(open_one(), text_request())
    with pytest.raises(
        RequestError,
        match=r"as the first frame .* choose the VAE of Wan2\.2 5B in WanStream Image",
    ):
        _run(pair, text_request(image_condition=torch.zeros(1, 20, *SHAPE[2:])))
    with pytest.raises(RequestError, match=r"give \[B, 16 or 48, T, h, w\]"):
        text_request(noise=_normal(1, 32, 3, 4, 6, seed=1))
    with pytest.raises(
        RequestError, match=r"mask is \[1, 16, 3, 4, 6\]: give \[1, 1 or 48, 3, 4, 6\]"
    ):
        text_request(mask=torch.ones(1, 16, 3, 4, 6))
