"""Conversion of native CONDITIONING and LATENT, and refusals by name."""

from types import SimpleNamespace

import pytest
import torch

from wanstream.sampling.inputs import native_inputs, native_latent
from wanstream.sampling.inputs.conditioning import (
    LEFTOVER_KEY,
    image_condition,
    leftover_sigma,
    marked_latent,
)
from wanstream.sampling.steps import seeded_noise
from wanstream.sampling.steps.errors import ConditioningError
from wanstream.tests.support.sampling.runs import normal
from wanstream.wan.latents.space import denormalise, normalise

TEXT = normal(1, 512, 4096, seed=0)
IMAGE = normal(1, 16, 3, 4, 6, seed=1)
CONTROL = torch.cat([IMAGE.flip(2), IMAGE], dim=1)
SEEN = normal(1, 17, 80, seed=9)


def _empty(*shape):
    return {"samples": torch.zeros(shape)}


EMPTY = _empty(1, 16, 3, 4, 6)
START = torch.ones(1, 1, 3, 4, 6)
"""ComfyUI's start image mask: 0 where it is known."""
START[:, :, :1] = 0


def _cond(**options):
    return [[TEXT, {"pooled_output": None, **options}]]


def _image(image, mask=None, **options):
    given = {} if mask is None else {"concat_mask": mask}
    return _cond(concat_latent_image=image, **given, **options)


def _clip(states):
    """Return a conditioning with CLIP_VISION_OUTPUT, of which only one attribute is read."""
    output = SimpleNamespace(penultimate_hidden_states=states, image_embeds=None)
    return _cond(clip_vision_output=output)


def test_text_and_an_empty_latent():
    inputs = native_inputs(_cond(), _cond(), {**EMPTY, "downscale_ratio_spacial": 8}, seed=5)
    assert inputs.positive is inputs.negative is TEXT
    assert inputs.image_condition is inputs.image_embedding is inputs.latent_sigma is None
    assert inputs.latent is None, "zeros mean nothing yet, not a grey video"
    assert torch.equal(inputs.noise, seeded_noise((1, 16, 3, 4, 6), 5))
    assert native_inputs(_cond(), None, EMPTY).negative is None


def test_a_given_latent_is_normalised_and_comes_back_raw():
    latent = {"samples": IMAGE, "batch_index": [3], "downscale_ratio_spacial": 8, "type": "video"}
    inputs = native_inputs(_cond(), None, latent)
    assert torch.equal(inputs.latent, normalise(IMAGE))
    assert (inputs.add_noise, inputs.noise.count_nonzero()) == (False, 0)
    noise = native_inputs(_cond(), None, latent, seed=5).noise
    assert torch.equal(noise, seeded_noise((1, 16, 3, 4, 6), 5, batch_index=[3]))
    back = native_latent(inputs.latent, latent)
    assert torch.equal(back.pop("samples"), denormalise(inputs.latent))
    assert back.pop(LEFTOVER_KEY)["sigma"] == 0.0
    assert back == {"batch_index": [3], "type": "video"}
    assert latent["samples"] is IMAGE


def test_a_start_image_becomes_mask_and_normalised_latent():
    condition = native_inputs(_image(IMAGE, START), _image(IMAGE, START), EMPTY).image_condition
    assert condition.shape == (1, 20, 3, 4, 6)
    assert (condition[:, :4, 0] == 1).all(), "1 is known, where ComfyUI's mask says 0"
    assert (condition[:, :4, 1:] == 0).all()
    assert torch.equal(condition[:, 4:], normalise(IMAGE))


def test_masks_of_every_width_and_length():
    four = START.repeat(1, 4, 1, 1, 1)
    expected = image_condition(IMAGE, START)
    averaged = START * torch.tensor([0.0, 1.0, 2.0]).view(1, 3, 1, 1, 1)
    shorter = START[:, :, :2]
    for mask in (four, averaged, shorter):  # frames beyond a mask are free
        assert torch.equal(image_condition(IMAGE, mask), expected)
    both = image_condition(IMAGE.repeat(2, 1, 1, 1, 1), START)
    assert torch.equal(both, expected.repeat(2, 1, 1, 1, 1)), "images of a batch share a mask"
    assert (image_condition(IMAGE, None)[:, :4] == 0).all()
    assert image_condition(IMAGE.to("meta"), START).device.type == "meta", "the image says where"
    four[:, 2, 1] = 0.25
    assert image_condition(IMAGE, four)[0, :4, 1, 0, 0].tolist() == [0.0, 0.0, 0.75, 0.0]


@pytest.mark.parametrize(
    ("latent", "shape"),
    [
        (_empty(2, 4, 8, 6), (2, 16, 1, 8, 6)),
        ({**_empty(2, 16, 8, 6), "downscale_ratio_spacial": 8}, (2, 16, 1, 8, 6)),
        ({**_empty(1, 128, 4, 3), "downscale_ratio_spacial": 16}, (1, 16, 1, 8, 6)),
        ({"samples": torch.ones(1, 16, 8, 6)}, (1, 16, 1, 8, 6)),
    ],
)
def test_an_image_latent_is_a_video_of_one_frame(latent, shape):
    inputs = native_inputs(_cond(), None, latent)
    assert inputs.noise.shape == shape
    assert (inputs.latent is None) == (not latent["samples"].any())


def test_texts_are_repeated_over_a_batch_in_turn():
    texts = torch.arange(3 * 2 * 4096, dtype=torch.float32).view(3, 2, 4096)
    inputs = native_inputs([[texts, {}]], [[texts[:1], {}]], _empty(5, 16, 3, 4, 6))
    assert torch.equal(inputs.positive, texts[[0, 1, 2, 0, 1]])
    assert len(inputs.negative) == 1
    two = native_inputs([[texts, {}]], None, _empty(2, 16, 3, 4, 6))
    assert torch.equal(two.positive, texts[:2])


@pytest.mark.parametrize("own", [None, 1 - START])
def test_a_noise_mask_serves_an_image_without_a_mask(own):
    latent = {**EMPTY, "noise_mask": START[0, 0]}
    found = native_inputs(_image(IMAGE, own), None, latent).image_condition
    assert torch.equal(found, image_condition(IMAGE, START if own is None else own))


def test_leftover_noise_is_handed_on_as_comfyui_does():
    latents = normal(1, 16, 3, 4, 6, seed=5)
    left = native_latent(latents, EMPTY, sigma=0.75)
    assert torch.equal(left["samples"], denormalise(latents / 0.25))
    inputs = native_inputs(_cond(), None, left)
    assert inputs.latent_sigma == 0.75
    assert torch.allclose(inputs.latent * 0.25, latents, atol=1e-6)
    assert native_inputs(_cond(), None, native_latent(latents, left)).latent_sigma == 0.0


@pytest.mark.parametrize(
    ("change", "sigma"),
    [
        (torch.clone, 0.75),
        (lambda samples: samples * 1.001, None),
        (lambda samples: samples[:1], None),
        (lambda samples: samples[:, :, :2], None),
        (lambda samples: samples.flip(0), None),
        (lambda samples: samples.flip(-1), None),
        (lambda samples: samples.view(1, 16, 6, 8, 6), None),
        (torch.zeros_like, None),
    ],
)
def test_the_noise_level_is_that_of_its_samples_alone(change, sigma):
    samples = normal(2, 16, 3, 8, 6, seed=0)
    marked = {**marked_latent(samples, 0.75), "noise_mask": torch.ones(1)}
    assert leftover_sigma({**marked, "samples": change(samples)}) == sigma
    assert leftover_sigma({"samples": samples}) is None


def test_what_clip_sees_is_read_from_both_sides():
    assert torch.equal(native_inputs(_clip(SEEN), _clip(SEEN), EMPTY).image_embedding, SEEN)


OTHER_MASK = torch.ones(1, 1, 3, 8, 8)
LONG_MASK = torch.ones(1, 1, 4, 4, 6)
TALL = _empty(1, 16, 3, 8, 4)
SHORT = _empty(1, 16, 2, 4, 6)


@pytest.mark.parametrize(
    ("positive", "negative", "latent", "message"),
    [
        ([], _cond(), EMPTY, "positive has 0 entries"),
        (_cond(), _cond() + _cond(), EMPTY, "negative has 2 entries"),
        (_image(IMAGE), _cond(), EMPTY, "different start images"),
        (_image(IMAGE), _image(-IMAGE), EMPTY, "different start images"),
        (_clip(SEEN), _clip(-SEEN), EMPTY, "different start images"),
        (_cond(clip_vision_output=1), None, EMPTY, "is a int without penultimate_hidden_states"),
        (_image(torch.zeros(1, 24, 3, 4, 6)), None, EMPTY, r"is \[1, 24, .* for another model"),
        (_image(IMAGE, concat_mask_index=16), None, EMPTY, "concat_mask_index is 16 for 16"),
        (_image(CONTROL, concat_mask_index=8), None, EMPTY, "concat_mask_index is 8 for 32"),
        (_cond(context_latents=[IMAGE[0]]), None, EMPTY, r"\[16, .*\] under 'context_latents'"),
        (_cond(context_latents=["a"]), None, EMPTY, "positive carries str under 'context_latents'"),
        (_image(IMAGE, OTHER_MASK), None, EMPTY, r"concat_mask is \[1, 1, 3, 8, 8\], its image \["),
        (_image(IMAGE, LONG_MASK), None, EMPTY, "concat_mask is"),
        (_cond(), None, {"samples": torch.ones(1, 4, 64, 64)}, r"latent is \[1, 4, 1, .* empty vi"),
        (_cond(), None, _empty(1, 32, 3, 4, 6), r"latent is \[1, 32, 3, 4, 6\]"),
        (_cond(), None, {"samples": [IMAGE]}, "latent is a list of several parts"),
        (_cond(), None, {**EMPTY, "noise_mask": torch.ones(2, 3, 4, 6)}, r"noise mask is \[2, 3,"),
        (_image(IMAGE), None, SHORT, "positive .* 48 x 32 pixels and 9 frames, .* and 5 frames"),
        (_cond(), _image(IMAGE), TALL, "negative carries .* 48 x 32 .* 32 x 64 .*: connect the la"),
    ],
)
def test_values_that_make_no_request(positive, negative, latent, message):
    with pytest.raises(ConditioningError, match=message):
        native_inputs(positive, negative, latent)
