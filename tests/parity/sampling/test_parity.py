"""Whole runs compared with diffusers' Wan pipelines and ComfyUI's euler."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline

from wanstream.sampling import denoise
from wanstream.sampling.inputs import DenoiseRequest
from wanstream.schema import OffloadPolicy
from wanstream.testing.weights import make_vae
from wanstream.tests.support.pipelines import distance, make_pipeline, pipeline_arguments
from wanstream.wan import ExpertPair

TOLERANCE = 1e-5
HEIGHT, WIDTH, FRAMES = 32, 48, 5
BOUNDARY = 0.875
STEPS, SHIFT = 8, 5.0

Request = Callable[..., DenoiseRequest]
OpenPair = Callable[..., ExpertPair]


def _run(pair: ExpertPair, request: DenoiseRequest) -> torch.Tensor:
    return denoise(pair, request, policy=OffloadPolicy.block_swap(2), device="cpu").latents


def _pipeline(kind: Any, models: Any) -> Any:
    experts = {"transformer": models["high"], "transformer_2": models["low"]}
    return make_pipeline(
        kind, flow_shift=SHIFT, vae=make_vae(seed=3), boundary_ratio=BOUNDARY, **experts
    )


def _settings(request: DenoiseRequest) -> dict[str, Any]:
    return {
        **pipeline_arguments(request, height=HEIGHT, width=WIDTH, frames=FRAMES, steps=STEPS),
        "guidance_scale_2": request.guidance[1],
    }


@pytest.fixture
def pipeline_request(make_request: Request) -> Request:
    """A request for both experts, with these pipelines' settings."""

    def make(**changes: Any) -> DenoiseRequest:
        step_plan = {
            "steps": STEPS,
            "flow_shift": SHIFT,
            "switch_step": None,
            "boundary_ratio": BOUNDARY,
        }
        request = make_request(**step_plan, solver="unipc", schedule="wan", **changes)
        assert set(request.step_plan.experts) == {"high", "low"}
        return request

    return make


def test_text_to_video_is_wan_pipeline(
    open_pair: OpenPair, plain_models: Any, pipeline_request: Request
) -> None:
    request = pipeline_request(batch=2)
    expected = _pipeline(WanPipeline, plain_models())(**_settings(request)).frames
    assert distance(_run(open_pair(), request), expected) <= TOLERANCE


def test_image_to_video_is_wan_image_to_video_pipeline(
    open_pair: OpenPair, plain_models: Any, pipeline_request: Request
) -> None:
    pipeline = _pipeline(WanImageToVideoPipeline, plain_models(in_channels=36))
    image = torch.rand(1, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(4))
    plain = pipeline_request()
    expected = pipeline(image=image, **_settings(plain)).frames
    pixels = pipeline.video_processor.preprocess(image, height=HEIGHT, width=WIDTH)
    _, condition = pipeline.prepare_latents(
        pixels,
        1,
        height=HEIGHT,
        width=WIDTH,
        num_frames=FRAMES,
        dtype=torch.float32,
        latents=plain.noise,
    )
    request = pipeline_request(image_condition=condition.detach())
    assert distance(_run(open_pair(in_channels=36), request), expected) <= TOLERANCE


@pytest.mark.parametrize("guidance", [(1.0, 1.0), (4.0, 3.0)])
@pytest.mark.parametrize(("steps", "shift"), [(4, 5.0), (8, 8.0), (6, 12.0)])
def test_simple_and_euler_are_comfyuis_loop(
    steps: int,
    shift: float,
    guidance: tuple[float, float],
    open_pair: OpenPair,
    plain_models: Any,
    make_request: Request,
) -> None:
    """ComfyUI steps with the denoised estimate, we with the velocity: equal up to rounding."""
    request = make_request(
        steps=steps,
        flow_shift=shift,
        schedule="simple",
        solver="euler",
        switch_step=2,
        guidance=guidance,
    )
    sigmas, models = request.step_plan.schedule.sigmas, plain_models()
    latents = request.noise * sigmas[0]
    with torch.inference_mode():
        for i, (sigma, after) in enumerate(pairwise(sigmas)):
            model, scale = (models["high"], guidance[0]) if i < 2 else (models["low"], guidance[1])
            ends = [
                latents
                - sigma * model(latents, torch.tensor([sigma * 1000]), text, return_dict=False)[0]
                for text in (request.positive, request.negative)
            ]
            end = ends[1] + scale * (ends[0] - ends[1])
            latents = latents + (latents - end) / sigma * (after - sigma)
    assert distance(_run(open_pair(), request), latents) <= TOLERANCE
