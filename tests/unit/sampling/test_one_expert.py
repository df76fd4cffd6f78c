"""Single models: diffusers' Wan2.1 pipelines, image embeddings, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from PIL import Image
from transformers import CLIPImageProcessor

from wanstream.sampling import denoise
from wanstream.sampling.inputs import DenoiseRequest, merge_requests
from wanstream.sampling.steps import RequestError
from wanstream.schema import OffloadPolicy
from wanstream.testing.model import make_image_encoder, save_image_encoder
from wanstream.testing.weights import make_vae
from wanstream.tests.support.pipelines import distance, make_pipeline, pipeline_arguments
from wanstream.tests.support.sampling_fixtures import changed_request
from wanstream.wan import ExpertPair
from wanstream.wan.image_encoder import WIDTH as WIDTH_OF_CLIP
from wanstream.wan.image_encoder import open_image_encoder

TOLERANCE = 1e-5
HEIGHT, WIDTH, FRAMES = 32, 48, 5
STEPS, SHIFT = 6, 3.0
IMAGE = {"in_channels": 36, "image_dim": 80}
CHUNKED = replace(OffloadPolicy.layerwise(1), chunk_tokens=4)

Request = Callable[..., DenoiseRequest]
OpenOne = Callable[..., ExpertPair]


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _run(
    pair: ExpertPair, request: DenoiseRequest, policy: OffloadPolicy | None = None
) -> torch.Tensor:
    return denoise(
        pair, request, policy=policy or OffloadPolicy.block_swap(2), device="cpu"
    ).latents


def _pipeline(kind: Any, pair: ExpertPair, **more: Any) -> Any:
    transformer = WanTransformer3DModel.from_pretrained(pair.high.path).requires_grad_(False)
    return make_pipeline(
        kind, flow_shift=SHIFT, transformer=transformer, vae=make_vae(seed=3), **more
    )


def _settings(request: DenoiseRequest) -> dict[str, Any]:
    return pipeline_arguments(request, height=HEIGHT, width=WIDTH, frames=FRAMES, steps=STEPS)


@pytest.fixture
def one_request(make_request: Request) -> Request:
    """Request for a single model, with the settings of the pipelines here."""

    def make(**changes: Any) -> DenoiseRequest:
        step_plan = {
            "steps": STEPS,
            "flow_shift": SHIFT,
            "switch_step": None,
            "boundary_ratio": 0.0,
        }
        given = {
            **step_plan,
            "guidance": (5.0, 5.0),
            "solver": "unipc",
            "schedule": "wan",
            **changes,
        }
        request = make_request(**given)
        assert set(request.step_plan.experts) == {"high"}
        return request

    return make


@pytest.fixture
def image_request(one_request: Request) -> Request:
    """A request with a start image, for an image-to-video model with an image branch."""

    def make(*, seed: int = 20, **changes: Any) -> DenoiseRequest:
        given = {
            "positive": _normal(1, 512, 4096, seed=11),
            "negative": _normal(1, 512, 4096, seed=12),
            "image_condition": _normal(1, 20, 2, 4, 6, seed=seed),
            "image_embedding": _normal(1, 17, 80, seed=seed + 1),
        }
        return one_request(**{**given, **changes})

    return make


def test_text_to_video_is_wan_pipeline(open_one: OpenOne, one_request: Request) -> None:
    request, pair = one_request(batch=2), open_one()
    expected = _pipeline(WanPipeline, pair)(**_settings(request)).frames
    assert distance(_run(pair, request), expected) <= TOLERANCE


@pytest.mark.slow  # several loop runs
def test_image_to_video_is_wan_image_to_video_pipeline(
    open_one: OpenOne, image_request: Request, tmp_path: Path
) -> None:
    """Both sides compute the CLIP embedding from the same image and the same file."""
    pair, encoder = open_one(in_channels=36, image_dim=WIDTH_OF_CLIP), make_image_encoder(seed=5)
    save_image_encoder(encoder, tmp_path / "clip.safetensors", dtype=torch.float32)
    draw = np.random.default_rng(4)
    image = Image.fromarray(draw.integers(0, 256, (224, 224, 3), dtype=np.uint8))
    pipeline = _pipeline(
        WanImageToVideoPipeline, pair, image_encoder=encoder, image_processor=CLIPImageProcessor()
    )
    plain = image_request()
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
    images = torch.from_numpy(np.asarray(image).copy())[None] / 255
    seen = (
        open_image_encoder(tmp_path / "clip.safetensors")
        .encode(images, device="cpu")
        .penultimate_hidden_states
    )
    given = {"image_condition": condition.detach(), "image_embedding": seen}
    for policy in (None, CHUNKED):
        assert distance(_run(pair, image_request(**given), policy), expected) <= TOLERANCE
    other = image_request(**{**given, "image_embedding": seen.flip(2)})
    assert distance(_run(pair, other), expected) > 1e-3, "what CLIP sees counts"


@pytest.mark.slow  # several loop runs
def test_lanes_with_images_of_their_own_come_out_as_alone(
    open_one: OpenOne, image_request: Request
) -> None:
    pair = open_one(**IMAGE)
    requests = [image_request(seed=seed) for seed in (20, 30)]
    together = _run(pair, merge_requests(requests))
    for at, request in enumerate(requests):
        assert torch.equal(together[at : at + 1], _run(pair, request))
    assert not torch.equal(together[0], together[1])


def test_an_expert_is_fetched_once_per_step(open_one: OpenOne, one_request: Request) -> None:
    """There is one set of weights and buffers."""
    pair = open_one()
    result = denoise(pair, one_request(), policy=OffloadPolicy.layerwise(1), device="cpu")
    assert [step.expert for step in result.timeline.steps] == ["high"] * STEPS
    assert {step.bytes_moved for step in result.timeline.steps} == {4 * pair.block_bytes.stored}
    assert pair.block_counts == {"high": 4}


def test_images_of_lanes_must_be_alike(image_request: Request) -> None:
    other = image_request(image_embedding=_normal(1, 9, 80, seed=3))
    with pytest.raises(RequestError, match="image embedding 9 x 80, in lane 1 17 x 80"):
        merge_requests([image_request(), other])


def test_an_expert_without_an_image_branch_does_not_look_at_it(
    open_one: OpenOne, one_request: Request
) -> None:
    pair, image = open_one(), _normal(1, 17, 80, seed=1)
    assert torch.equal(_run(pair, one_request(image_embedding=image)), _run(pair, one_request()))


REFUSED = {
    "a low step": (
        {"boundary_ratio": 0.9},
        "is one of the low-noise expert, and this is a single model",
    ),
    "no image embedding": (
        {"image_embedding": None},
        "has an image branch .* and the request has no image embedding",
    ),
    "another encoder": (
        {"image_embedding": torch.zeros(1, 17, 64)},
        r"\[1, 17, 64\], the model takes .* 80\]",
    ),
    "short text": (
        {"positive": torch.zeros(1, 226, 4096)},
        "positive has 226 tokens, .* needs 512",
    ),
    "long text": (
        {"negative": [torch.zeros(1, 600, 4096)]},
        "negative has 600 tokens, .* needs 512",
    ),
    "no condition": (
        {"image_condition": None},
        "these are image-to-video experts, and no start image is connected",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], message: str, open_one: OpenOne, image_request: Request
) -> None:
    request = changed_request(image_request(), **changes)
    with pytest.raises(RequestError, match=message):
        _run(open_one(**IMAGE), request)


@pytest.mark.parametrize(
    "image", [torch.zeros(17, 80), torch.zeros(2, 17, 80), torch.zeros(1, 17, 80).int()], ids=str
)
def test_what_is_no_image_embedding_is_refused(image: torch.Tensor, one_request: Request) -> None:
    with pytest.raises(
        RequestError, match=r"image_embedding is .*: give the hidden states of CLIP"
    ):
        one_request(image_embedding=image)
