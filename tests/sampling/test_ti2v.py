"""Wan2.2 TI2V-5B: diffusers' pipelines with a timestep for every token, frames that are given, and all that goes along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel

from wanstream.cli.sample_weights import make_wan22_vae
from wanstream.plan import OffloadPolicy
from wanstream.plan.context_windows import ContextWindows
from wanstream.sampling import Cancelled, DenoiseRequest, RequestError, denoise, joined
from wanstream.sampling.cache_settings import FirstBlockCache
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


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _run(pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy = WHOLE) -> torch.Tensor:
    return denoise(pair, request, policy=policy, device="cpu").latents


@pytest.fixture
def pair(open_one: Callable[..., ExpertPair]) -> ExpertPair:
    return open_one(**TI2V)


@pytest.fixture
def text_request(make_request: Request) -> Request:
    """Text to video as the pipelines are set up here."""

    def make(*, batch: int = 1, **changes: Any) -> DenoiseRequest:
        course = {"steps": STEPS, "flow_shift": SHIFT, "switch_step": None, "boundary_ratio": 0.0}
        given = {"noise": _normal(batch, *SHAPE[1:], seed=1), "guidance": (5.0, 5.0), "solver": "unipc"}
        return make_request(batch=batch, **{**course, **given, "schedule": "wan", **changes})

    return make


def _given(latent: torch.Tensor, *, frames: int = 1) -> dict[str, torch.Tensor]:
    """The first frames of a latent, and the mask that keeps them."""
    mask = torch.ones(1, 1, *SHAPE[2:])
    mask[:, :, :frames] = 0
    return {"latent": latent * (1 - mask), "mask": mask}


@pytest.fixture
def image_request(text_request: Request) -> Request:
    """With a first frame."""
    return lambda **changes: text_request(**{**_given(_normal(*SHAPE, seed=2)), **changes})


def _pipeline(kind: Any, pair: ExpertPair, **more: Any) -> Any:
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT)
    transformer = WanTransformer3DModel.from_pretrained(pair.high.path).requires_grad_(False)
    vae = make_wan22_vae(seed=3)
    pipeline = kind(
        tokenizer=None,
        text_encoder=None,
        transformer=transformer,
        vae=vae,
        scheduler=scheduler,
        expand_timesteps=True,
        **more,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _settings(request: DenoiseRequest) -> dict[str, Any]:
    return {
        "height": HEIGHT,
        "width": WIDTH,
        "num_frames": FRAMES,
        "num_inference_steps": STEPS,
        "guidance_scale": request.guidance[0],
        "prompt_embeds": request.positive,
        "negative_prompt_embeds": request.negative,
        "latents": request.noise,
        "output_type": "latent",
    }


def test_text_to_video_is_wan_pipeline(pair: ExpertPair, text_request: Request) -> None:
    request = text_request(batch=2)
    expected = _pipeline(WanPipeline, pair)(**_settings(request)).frames
    assert _distance(_run(pair, request), expected) <= TOLERANCE


def test_image_to_video_is_wan_image_to_video_pipeline(pair: ExpertPair, text_request: Request) -> None:
    """From the picture on, with the first frame as the pipeline's own VAE encodes it."""
    pipeline = _pipeline(WanImageToVideoPipeline, pair)
    image = torch.rand(1, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(4))
    plain = text_request()
    expected = pipeline(image=image, **_settings(plain)).frames
    pixels = pipeline.video_processor.preprocess(image, height=HEIGHT, width=WIDTH)
    _, frame, _ = pipeline.prepare_latents(
        pixels, 1, num_channels_latents=48, height=HEIGHT, width=WIDTH, num_frames=FRAMES, latents=plain.noise
    )
    latent = torch.zeros(SHAPE)
    latent[:, :, :1] = frame.detach()
    request = text_request(**_given(latent))
    for name, policy in POLICIES.items():
        found = _run(pair, request, policy)
        assert _distance(found, expected) <= TOLERANCE, name
        assert _distance(found[:, :, :1], latent[:, :, :1]) <= TOLERANCE, "the first frame is the given one"
    assert _distance(_run(pair, plain), expected) > 1e-2, "the first frame counts"
