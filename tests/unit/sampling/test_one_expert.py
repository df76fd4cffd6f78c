"""Single models: diffusers' Wan2.1 pipelines, image embeddings, and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from PIL import Image
from transformers import CLIPImageProcessor

from wanstream.sampling.steps import RequestError
from wanstream.schema import OffloadPolicy
from wanstream.testing.model import make_image_encoder, save_image_encoder
from wanstream.testing.weights import make_vae
from wanstream.tests.support.sampling.one_expert import SETTINGS, STEPS, pipeline_of
from wanstream.tests.support.sampling.runs import (
    LAYERWISE,
    MakeRequest,
    changed_request,
    latents_of,
    normal,
    run,
)
from wanstream.tests.support.wan.pipelines import distance, pipeline_arguments
from wanstream.wan.image_encoder import WIDTH as WIDTH_OF_CLIP
from wanstream.wan.image_encoder import open_image_encoder

TOLERANCE = 1e-5
SIZE = {"height": 32, "width": 48, "frames": 5, "steps": STEPS}
SWAP = OffloadPolicy.block_swap(2)


@pytest.fixture
def one_request(make_request: MakeRequest) -> MakeRequest:
    """Request for a single model, with the settings of the pipelines here."""
    return lambda **changes: make_request(**{**SETTINGS, **changes})


@pytest.fixture
def image_request(one_request: MakeRequest) -> MakeRequest:
    """A request with a start image, for an image-to-video model with an image branch."""
    given = {
        "positive": normal(1, 512, 4096, seed=11),
        "negative": normal(1, 512, 4096, seed=12),
        "image_condition": normal(1, 20, 2, 4, 6, seed=20),
        "image_embedding": normal(1, 17, 80, seed=21),
    }
    return lambda **changes: one_request(**{**given, **changes})


def test_text_to_video_is_wan_pipeline(open_one, one_request):
    request, pair = one_request(batch=2), open_one()
    pipeline = pipeline_of(WanPipeline, pair, vae=make_vae(seed=3))
    expected = pipeline(**pipeline_arguments(request, **SIZE)).frames
    assert distance(latents_of(pair, request, SWAP), expected) <= TOLERANCE


@pytest.mark.parity
@pytest.mark.slow  # several loop runs
def test_image_to_video_is_wan_image_to_video_pipeline(open_one, image_request, tmp_path):
    """Both sides compute the CLIP embedding from the same image and the same file."""
    pair, encoder = open_one(in_channels=36, image_dim=WIDTH_OF_CLIP), make_image_encoder(seed=5)
    save_image_encoder(encoder, tmp_path / "clip.safetensors", dtype=torch.float32)
    pixels = np.random.default_rng(4).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    clip = {"image_encoder": encoder, "image_processor": CLIPImageProcessor()}
    pipeline = pipeline_of(WanImageToVideoPipeline, pair, vae=make_vae(seed=3), **clip)
    plain = image_request()
    expected = pipeline(image=image, **pipeline_arguments(plain, **SIZE)).frames
    size = {"height": SIZE["height"], "width": SIZE["width"]}
    given = {"num_frames": SIZE["frames"], "dtype": torch.float32, "latents": plain.noise}
    prepared = pipeline.video_processor.preprocess(image, **size)
    _, condition = pipeline.prepare_latents(prepared, 1, **size, **given)
    opened = open_image_encoder(tmp_path / "clip.safetensors")
    seen = opened.encode(torch.from_numpy(pixels)[None] / 255, device="cpu")
    states = seen.penultimate_hidden_states
    request = image_request(image_condition=condition.detach(), image_embedding=states)
    for policy in (SWAP, replace(LAYERWISE, chunk_tokens=4)):
        assert distance(latents_of(pair, request, policy), expected) <= TOLERANCE
    other = changed_request(request, image_embedding=states.flip(2))
    assert distance(latents_of(pair, other), expected) > 1e-3, "what CLIP sees counts"


def test_an_expert_is_fetched_once_per_step(open_one, one_request):
    """There is one set of weights and buffers."""
    pair = open_one()
    steps = run(pair, one_request()).timeline.steps
    assert [step.expert for step in steps] == ["high"] * STEPS
    assert {step.bytes_moved for step in steps} == {4 * pair.block_bytes.stored}
    assert pair.block_counts == {"high": 4}


def test_an_expert_without_an_image_branch_ignores_an_image(open_one, one_request):
    pair = open_one()
    image = normal(1, 17, 80, seed=1)
    found = latents_of(pair, one_request(image_embedding=image))
    assert torch.equal(found, latents_of(pair, one_request()))


SHORT, LONG = (torch.zeros(1, tokens, 4096) for tokens in (226, 600))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boundary_ratio": 0.9}, "is one of the low-noise expert, and this is a single model"),
        ({"image_embedding": None}, "has an image branch .* and the request has no image embed"),
        ({"image_embedding": torch.zeros(1, 17, 64)}, r"\[1, 17, 64\], the model takes .* 80\]"),
        ({"positive": SHORT}, "positive has 226 tokens, .* needs 512"),
        ({"negative": [LONG]}, "negative has 600 tokens, .* needs 512"),
    ],
)
def test_requests_that_do_not_fit_are_refused(changes, message, open_one, image_request):
    with pytest.raises(RequestError, match=message):
        run(open_one(in_channels=36, image_dim=80), image_request(**changes))


@pytest.mark.parametrize(
    "image", [torch.zeros(17, 80), torch.zeros(2, 17, 80), torch.zeros(1, 17, 80).int()]
)
def test_bad_image_embeddings_are_refused(image, one_request):
    with pytest.raises(
        RequestError, match=r"image_embedding is .*: give the hidden states of CLIP"
    ):
        one_request(image_embedding=image)
