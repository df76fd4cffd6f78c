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
from wanstream.tests.support.wan.pipelines import distance, make_pipeline, pipeline_arguments
from wanstream.wan import ExpertPair

TOLERANCE = 1e-5
SIZE = {"height": 32, "width": 48}
FRAMES = 5
BOUNDARY = 0.875
STEPS = 6
SHIFT = 5.0


def _run(pair: ExpertPair, request: DenoiseRequest) -> torch.Tensor:
    return denoise(pair, request, policy=OffloadPolicy.block_swap(2), device="cpu").latents


def _pipeline(kind: Any, models: Any) -> Any:
    experts = {"transformer": models["high"], "transformer_2": models["low"]}
    return make_pipeline(
        kind, flow_shift=SHIFT, vae=make_vae(seed=3), boundary_ratio=BOUNDARY, **experts
    )


def _settings(request: DenoiseRequest) -> dict[str, Any]:
    settings = pipeline_arguments(request, frames=FRAMES, steps=STEPS, **SIZE)
    return {**settings, "guidance_scale_2": request.guidance[1]}


@pytest.fixture
def pipeline_request(make_request) -> Callable[..., DenoiseRequest]:
    """A request for both experts, with these pipelines' settings."""
    plan = {"steps": STEPS, "flow_shift": SHIFT, "switch_step": None, "boundary_ratio": BOUNDARY}

    def make(**changes: Any) -> DenoiseRequest:
        request = make_request(**plan, solver="unipc", schedule="wan", **changes)
        assert set(request.step_plan.experts) == {"high", "low"}
        return request

    return make


def test_text_to_video_is_wan_pipeline(open_pair, plain_models, pipeline_request):
    request = pipeline_request(batch=2)
    expected = _pipeline(WanPipeline, plain_models())(**_settings(request)).frames
    assert distance(_run(open_pair(), request), expected) <= TOLERANCE


def test_image_to_video_is_wan_image_to_video_pipeline(open_pair, plain_models, pipeline_request):
    pipeline = _pipeline(WanImageToVideoPipeline, plain_models(in_channels=36))
    image = torch.rand(1, 3, *SIZE.values(), generator=torch.Generator().manual_seed(4))
    plain = pipeline_request()
    expected = pipeline(image=image, **_settings(plain)).frames
    pixels = pipeline.video_processor.preprocess(image, **SIZE)
    how = {"num_frames": FRAMES, "dtype": torch.float32, "latents": plain.noise}
    _, condition = pipeline.prepare_latents(pixels, 1, **SIZE, **how)
    request = pipeline_request(image_condition=condition.detach())
    assert distance(_run(open_pair(in_channels=36), request), expected) <= TOLERANCE


@pytest.mark.parametrize(
    ("steps", "shift", "guidance"), [(4, 5.0, (4.0, 3.0)), (6, 12.0, (1.0, 1.0))]
)
def test_simple_and_euler_are_comfyuis_loop(
    steps, shift, guidance, open_pair, plain_models, make_request
):
    """ComfyUI steps with the denoised estimate, we with the velocity: equal up to rounding."""
    plan = {"schedule": "simple", "solver": "euler", "switch_step": 2, "guidance": guidance}
    request = make_request(steps=steps, flow_shift=shift, **plan)
    sigmas, models = request.step_plan.schedule.sigmas, plain_models()
    latents = request.noise * sigmas[0]
    with torch.inference_mode():
        for i, (sigma, after) in enumerate(pairwise(sigmas)):
            model, scale = (models["high"], guidance[0]) if i < 2 else (models["low"], guidance[1])
            time = torch.tensor([sigma * 1000])
            ends = [
                latents - sigma * model(latents, time, text, return_dict=False)[0]
                for text in (request.positive, request.negative)
            ]
            end = ends[1] + scale * (ends[0] - ends[1])
            latents = latents + (latents - end) / sigma * (after - sigma)
    assert distance(_run(open_pair(), request), latents) <= TOLERANCE
