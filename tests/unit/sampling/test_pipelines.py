"""Runs compared with diffusers' Wan pipelines, and runs of single models: frames, refusals."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from diffusers import (
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from PIL import Image
from transformers import CLIPImageProcessor

from wanstream.sampling.cache.settings import FirstBlockCache
from wanstream.sampling.loop.lanes import LaneInputs, windows_at
from wanstream.sampling.steps import RequestError, StepWindows
from wanstream.schema import OffloadPolicy
from wanstream.shapes.context_windows import ContextWindows
from wanstream.testing.model import make_image_encoder, save_image_encoder
from wanstream.testing.weights import make_vae, make_wan22_vae
from wanstream.tests.support.rounding import distance
from wanstream.tests.support.sampling.runs import (
    CPU,
    LAYERWISE,
    changed_request,
    latents_of,
    normal,
    run,
)
from wanstream.wan.image_encoder import WIDTH, open_image_encoder

TOLERANCE = 1e-5
STEPS = 3
SETTINGS = {"steps": STEPS, "flow_shift": 3.0, "switch_step": None, "boundary_ratio": 0.0}
SETTINGS |= {"guidance": (5.0, 5.0), "solver": "unipc", "schedule": "wan"}
"""Settings of the pipelines, as keywords of a request."""
OF_A14B = {**SETTINGS, "steps": 6, "flow_shift": 5.0, "boundary_ratio": 0.875}
OF_A14B["guidance"] = (4.0, 3.0)
SIZE = {"height": 32, "width": 48, "num_frames": 5}
SIZE_5B = {"height": 64, "width": 96, "num_frames": 9}
SHAPE = (1, 48, 3, 4, 6)
"""Latents of Wan2.2 5B."""
SHAPE_OF_5B = {"in_channels": 48, "layers": 3}
OF_5B = {"vae": make_wan22_vae(seed=3), "expand_timesteps": True}
SWAP = OffloadPolicy.block_swap(2)
SEEN = torch.zeros(1, 17, 80)
POLICIES = {"whole": LAYERWISE, "chunks": replace(LAYERWISE, chunk_tokens=4), "block swap": SWAP}


@pytest.fixture
def one_request(make_request):
    """Request for a single model, with the settings of the pipelines here."""
    return lambda **changes: make_request(**{**SETTINGS, **changes})


@pytest.fixture
def image_request(one_request):
    """A request with a start image, for an image-to-video model with an image branch."""
    given = {"positive": normal(1, 512, 4096, seed=11), "negative": normal(1, 512, 4096, seed=12)}
    given["image_condition"] = normal(1, 20, 2, 4, 6, seed=20)
    given["image_embedding"] = normal(1, 17, 80, seed=21)
    return lambda **changes: one_request(**{**given, **changes})


@pytest.fixture
def pair_5b(open_one):
    return open_one(**SHAPE_OF_5B)


@pytest.fixture
def request_5b(one_request):
    """`request_5b(batch=1, **changes)`: a text-to-video request for Wan2.2 5B."""
    return lambda batch=1, **changes: one_request(
        batch=batch, **{"noise": normal(batch, *SHAPE[1:], seed=1), **changes}
    )


@pytest.fixture
def frame_request(request_5b):
    """The same with a given first frame."""
    return lambda **changes: request_5b(**{**_given(normal(*SHAPE, seed=2)), **changes})


def _given(latent: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a latent with a given first frame, and the mask."""
    mask = torch.ones(1, 1, *SHAPE[2:])
    mask[:, :, :1] = 0
    return {"latent": latent * (1 - mask), "mask": mask}


def pipeline_of(kind, pair, flow_shift, **parts):
    """Return a `kind` pipeline with UniPC and the models of `pair`, without a text encoder."""
    names = ("transformer", "transformer_2")
    for name, expert in zip(names, pair.experts.values(), strict=False):
        parts[name] = WanTransformer3DModel.from_pretrained(expert.path).requires_grad_(False)
    how = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    scheduler = UniPCMultistepScheduler(**how, flow_shift=flow_shift)
    pipeline = kind(tokenizer=None, text_encoder=None, scheduler=scheduler, **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def arguments_of(request, **size):
    """Return the arguments that a pipeline needs to compute the latents for `request`."""
    low = {"guidance_scale_2": request.guidance[1]} if "low" in request.step_plan.experts else {}
    texts = {"prompt_embeds": request.positive, "negative_prompt_embeds": request.negative}
    how = {"num_inference_steps": request.steps, "guidance_scale": request.guidance[0]}
    return {**size, **low, **texts, **how, "latents": request.noise, "output_type": "latent"}


@pytest.fixture
def open_model(open_one, open_pair):
    """`open_model(is_a14b, **shape)`: both experts of Wan2.2 A14B, or a single model."""
    return lambda is_a14b, **shape: (open_pair if is_a14b else open_one)(**shape)


@pytest.mark.parametrize(
    ("shape", "noise", "size", "settings", "parts"),
    [
        ({}, (16, 2, 4, 6), SIZE, OF_A14B, {"vae": make_vae(seed=3), "boundary_ratio": 0.875}),
        ({}, (16, 2, 4, 6), SIZE, SETTINGS, {"vae": make_vae(seed=3)}),
        (SHAPE_OF_5B, SHAPE[1:], SIZE_5B, SETTINGS, OF_5B),
    ],
    ids=["Wan2.2 A14B", "Wan2.1", "Wan2.2 5B"],
)
def test_text_to_video_is_diffusers(shape, noise, size, settings, parts, open_model, make_request):
    pair = open_model(settings is OF_A14B, **shape)
    request = make_request(batch=2, noise=normal(2, *noise, seed=1), **settings)
    assert set(request.step_plan.experts) == set(pair.experts)
    pipeline = pipeline_of(WanPipeline, pair, settings["flow_shift"], **parts)
    expected = pipeline(**arguments_of(request, **size)).frames
    assert distance(latents_of(pair, request, SWAP), expected) <= TOLERANCE


def image_to_video(pair, plain, image, flow_shift, **parts):
    """Return the request with the image as condition, and the latents of the pipeline."""
    pipeline = pipeline_of(WanImageToVideoPipeline, pair, flow_shift, vae=make_vae(seed=3), **parts)
    expected = pipeline(image=image, **arguments_of(plain, **SIZE)).frames
    prepared = pipeline.video_processor.preprocess(image, height=32, width=48)
    given = {**SIZE, "dtype": torch.float32, "latents": plain.noise}
    _, condition = pipeline.prepare_latents(prepared, 1, **given)
    return changed_request(plain, image_condition=condition.detach()), expected


def check_policies(pair, request, expected):
    for policy in (SWAP, POLICIES["chunks"]):
        assert distance(latents_of(pair, request, policy), expected) <= TOLERANCE


def random_pixels() -> np.ndarray:
    return np.random.default_rng(4).integers(0, 256, (224, 224, 3), dtype=np.uint8)


@pytest.mark.parity
def test_image_to_video_is_the_pipeline_of_wan22_a14b(open_pair, make_request):
    pair = open_pair(in_channels=36)
    image = Image.fromarray(random_pixels())
    parts = {"flow_shift": OF_A14B["flow_shift"], "boundary_ratio": OF_A14B["boundary_ratio"]}
    check_policies(pair, *image_to_video(pair, make_request(**OF_A14B), image, **parts))


@pytest.mark.parity
@pytest.mark.slow  # several loop runs
def test_image_to_video_is_the_pipeline_of_wan21(open_one, image_request, tmp_path):
    """Both sides compute the CLIP embedding from the same image and the same file."""
    pair = open_one(in_channels=36, image_dim=WIDTH)
    encoder = make_image_encoder(seed=5)
    pixels = random_pixels()
    clip = {"image_encoder": encoder, "image_processor": CLIPImageProcessor()}
    parts = {"flow_shift": SETTINGS["flow_shift"], **clip}
    request, expected = image_to_video(pair, image_request(), Image.fromarray(pixels), **parts)
    save_image_encoder(encoder, tmp_path / "clip.safetensors", dtype=torch.float32)
    opened = open_image_encoder(tmp_path / "clip.safetensors")
    seen = opened.encode(torch.from_numpy(pixels)[None] / 255, device="cpu")
    states = seen.penultimate_hidden_states
    check_policies(pair, changed_request(request, image_embedding=states), expected)
    other = changed_request(request, image_embedding=states.flip(2))
    assert distance(latents_of(pair, other), expected) > 1e-3, "what CLIP sees counts"


@pytest.mark.parity
@pytest.mark.slow  # several loop runs
def test_image_to_video_is_the_pipeline_of_wan22_5b(pair_5b, request_5b):
    """Both sides start from the image, encoded by the pipeline's VAE."""
    pipeline = pipeline_of(WanImageToVideoPipeline, pair_5b, SETTINGS["flow_shift"], **OF_5B)
    plain = request_5b()
    image = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(4))
    expected = pipeline(image=image, **arguments_of(plain, **SIZE_5B)).frames
    pixels = pipeline.video_processor.preprocess(image, height=64, width=96)
    given = {**SIZE_5B, "num_channels_latents": 48, "latents": plain.noise}
    _, frame, _ = pipeline.prepare_latents(pixels, 1, **given)
    latent = torch.zeros(SHAPE)
    latent[:, :, :1] = frame.detach()
    request = request_5b(**_given(latent))
    for name, policy in POLICIES.items():
        found = latents_of(pair_5b, request, policy)
        assert distance(found, expected) <= TOLERANCE, name
        assert distance(found[:, :, :1], latent[:, :, :1]) <= TOLERANCE, name
    assert distance(latents_of(pair_5b, plain), expected) > 1e-2, "the first frame counts"


@pytest.mark.slow  # several loop runs
@pytest.mark.parametrize(
    ("samples", "kept"), [(1, np.s_[:, :, 1, :, :3]), (1, np.s_[:, :, :2]), (2, np.s_[1, :, 0])]
)
def test_masks_of_any_kind_are_timesteps_of_frames(samples, kept, pair_5b, request_5b):
    """Half a frame, two frames, and the frame of one of two samples are kept.

    Compared with a plain loop: the whole model, and a timestep for every token.
    """
    mask = torch.ones(samples, 1, *SHAPE[2:])
    mask[kept] = 0
    given = {"latent": normal(*SHAPE, seed=5).expand(samples, *SHAPE[1:]), "solver": "euler"}
    request = request_5b(batch=samples, mask=mask, guidance=(3.0, 3.0), **given)
    expected = _plain(WanTransformer3DModel.from_pretrained(pair_5b.high.path), request)
    for name, policy in POLICIES.items():
        assert distance(latents_of(pair_5b, request, policy), expected) <= TOLERANCE, name


@torch.no_grad()
def _plain(model, request):
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


def test_a_mask_that_keeps_nothing_is_no_mask(pair_5b, request_5b):
    request = request_5b(mask=torch.ones(1, 1, *SHAPE[2:]))
    assert request.inputs.timestep_scales == (None,)
    plain = latents_of(pair_5b, request_5b())
    assert distance(latents_of(pair_5b, request), plain) <= TOLERANCE


def test_the_embedder_comes_once_for_all_timesteps(pair_5b, frame_request):
    """Given frames need timestep 0 in every step. It is embedded with the others in advance."""
    run(pair_5b, frame_request())
    models = pair_5b.engine(LAYERWISE, "cpu").models
    before = models.non_block_bytes
    expected = models.bare["high"].condition_embedder._expected
    assert 0.0 in expected["time"]
    assert len(expected["time"]) == STEPS + 1
    run(pair_5b, frame_request())
    assert models.non_block_bytes == before, "a second queue reads nothing of it again"


def test_cache_skips_only_above_threshold_0(pair_5b, frame_request):
    nothing, much = (frame_request(cache=FirstBlockCache(threshold=each)) for each in (0.0, 10.0))
    assert torch.equal(latents_of(pair_5b, nothing), latents_of(pair_5b, frame_request()))
    result = run(pair_5b, much)
    assert sum(step.skipped_lanes for step in result.timeline.steps) > 0
    assert torch.isfinite(result.latents).all()
    assert distance(result.latents[:, :, :1], much.latent[:, :, :1]) <= TOLERANCE


def test_windows_have_the_timestep_scales_of_their_frames(frame_request):
    settings = ContextWindows(frames=2, overlap=1, shift_windows=False)
    windows = StepWindows(settings, 0, 3)
    assert windows.cut_timestep_scales((0.0, 1.0, 0.5)) == [(0.0, 1.0), (1.0, 0.5)]
    assert windows.cut_timestep_scales((0.0, 1.0, 1.0)) == [(0.0, 1.0), None]
    assert windows.cut_timestep_scales(None) == [None, None]
    request = frame_request(windows=settings)
    lanes = LaneInputs(request, CPU).lanes(request.noise, (0,), windows=windows_at(request, 0))
    assert [lane.timestep_scales for lane in lanes] == [(0.0, 1.0), None]


def test_an_expert_is_fetched_once_per_step(open_one, one_request):
    """There is one set of weights and buffers."""
    pair = open_one()
    steps = run(pair, one_request()).timeline.steps
    assert [step.expert for step in steps] == ["high"] * STEPS
    assert {step.bytes_moved for step in steps} == {4 * pair.block_bytes.stored}
    assert pair.block_counts == {"high": 4}


def test_an_expert_without_an_image_branch_ignores_an_image(open_one, one_request):
    pair = open_one()
    found = latents_of(pair, one_request(image_embedding=normal(1, 17, 80, seed=1)))
    assert torch.equal(found, latents_of(pair, one_request()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boundary_ratio": 0.9}, "is one of the low-noise expert, and this is a single model"),
        ({"image_embedding": None}, "has an image branch .* and the request has no image embed"),
        ({"image_embedding": torch.zeros(1, 17, 64)}, r"\[1, 17, 64\], the model takes .* 80\]"),
        ({"positive": torch.zeros(1, 226, 4096)}, "positive has 226 tokens, .* needs 512"),
        ({"negative": [torch.zeros(1, 600, 4096)]}, "negative has 600 tokens, .* needs 512"),
    ],
)
def test_requests_that_do_not_fit_are_refused(changes, message, open_one, image_request):
    with pytest.raises(RequestError, match=message):
        run(open_one(in_channels=36, image_dim=80), image_request(**changes))


def test_requests_of_other_models_are_refused(pair_5b, open_one, request_5b, make_request):
    of_a14b = make_request(switch_step=None, boundary_ratio=0.0)
    with pytest.raises(RequestError, match=r"16 channels, as Wan2.1 and Wan2.2 A14B have, .* 48"):
        run(pair_5b, of_a14b)
    with pytest.raises(RequestError, match=r"has 48 channels, as Wan2.2 5B have, .* with 16"):
        run(open_one(), request_5b())
    with pytest.raises(RequestError, match=r"is \[1, 16, 3, 4, 6\]: give \[1, 1 or 48, 3, 4, 6\]"):
        request_5b(mask=torch.ones(1, 16, 3, 4, 6))


@pytest.mark.parametrize("image", [SEEN[0], SEEN.repeat(2, 1, 1), SEEN.int()])
def test_bad_image_embeddings_are_refused(image, one_request):
    said = r"image_embedding is .*: give the hidden states of CLIP"
    with pytest.raises(RequestError, match=said):
        one_request(image_embedding=image)
