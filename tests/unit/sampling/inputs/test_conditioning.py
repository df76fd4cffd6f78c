"""Conversion of native CONDITIONING and LATENT, and refusals by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wanstream.sampling.inputs import native_inputs, native_latent
from wanstream.sampling.inputs.conditioning import LEFTOVER_KEY, image_condition
from wanstream.sampling.steps import seeded_noise
from wanstream.sampling.steps.errors import ConditioningError
from wanstream.wan.latents.space import denormalise, normalise

TEXT = torch.randn(1, 512, 4096, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(1, 16, 3, 4, 6, generator=torch.Generator().manual_seed(1))
CONTROL = torch.cat([IMAGE.flip(2), IMAGE], dim=1)
EMPTY = {"samples": torch.zeros(1, 16, 3, 4, 6)}


def _start_mask() -> torch.Tensor:
    """Return ComfyUI's start image mask: 0 where it is known."""
    mask = torch.ones(1, 1, 3, 4, 6)
    mask[:, :, :1] = 0
    return mask


def _cond(**options: Any) -> list[list[Any]]:
    return [[TEXT, {"pooled_output": None, **options}]]


def test_text_and_an_empty_latent() -> None:
    inputs = native_inputs(_cond(), _cond(), {**EMPTY, "downscale_ratio_spacial": 8}, seed=5)
    assert inputs.positive is TEXT
    assert inputs.negative is TEXT
    assert inputs.image_condition is None
    assert inputs.latent is None, "zeros mean nothing yet, not a grey video"
    assert torch.equal(inputs.noise, seeded_noise((1, 16, 3, 4, 6), 5))


def test_negative_may_be_left_out() -> None:
    assert native_inputs(_cond(), None, EMPTY).negative is None


def test_a_given_latent_is_normalised_and_comes_back_raw() -> None:
    latent = {"samples": IMAGE, "batch_index": [3], "downscale_ratio_spacial": 8, "type": "video"}
    inputs = native_inputs(_cond(), None, latent)
    assert inputs.latent is not None
    assert torch.equal(inputs.latent, normalise(IMAGE))
    assert (inputs.add_noise, inputs.noise.count_nonzero()) == (False, 0)
    noise = native_inputs(_cond(), None, latent, seed=5).noise
    assert torch.equal(noise, seeded_noise((1, 16, 3, 4, 6), 5, batch_index=[3]))
    back = native_latent(inputs.latent, latent)
    assert torch.equal(back.pop("samples"), denormalise(inputs.latent))
    assert back.pop(LEFTOVER_KEY)["sigma"] == 0.0
    assert back == {"batch_index": [3], "type": "video"}
    assert latent["samples"] is IMAGE


def test_a_start_image_becomes_mask_and_normalised_latent() -> None:
    options = {"concat_latent_image": IMAGE, "concat_mask": _start_mask()}
    condition = native_inputs(_cond(**options), _cond(**options), EMPTY).image_condition
    assert condition is not None
    assert condition.shape == (1, 20, 3, 4, 6)
    assert (condition[:, :4, 0] == 1).all(), "1 is known, where ComfyUI's mask says 0"
    assert (condition[:, :4, 1:] == 0).all()
    assert torch.equal(condition[:, 4:], normalise(IMAGE))


def test_masks_of_every_width_and_length() -> None:
    one = _start_mask()
    four = one.repeat(1, 4, 1, 1, 1)
    expected = image_condition(IMAGE, one)
    assert torch.equal(image_condition(IMAGE, four), expected)
    assert torch.equal(image_condition(IMAGE, one.repeat(1, 3, 1, 1, 1)), expected), (
        "other widths are averaged"
    )
    assert torch.equal(image_condition(IMAGE, one[:, :, :2]), expected), (
        "frames beyond the mask are free"
    )
    assert (image_condition(IMAGE, None)[:, :4] == 0).all()
    assert image_condition(IMAGE.to("meta"), one).device.type == "meta", "the image says where"
    differs = four.clone()
    differs[:, 2, 1] = 0
    assert (
        image_condition(IMAGE, differs)[0, :4, 1, 0, 0] == torch.tensor([0.0, 0.0, 1.0, 0.0])
    ).all()


@pytest.mark.parametrize(
    ("latent", "shape"),
    [
        ({"samples": torch.zeros(2, 4, 8, 6)}, (2, 16, 1, 8, 6)),
        ({"samples": torch.zeros(2, 16, 8, 6), "downscale_ratio_spacial": 8}, (2, 16, 1, 8, 6)),
        ({"samples": torch.zeros(1, 128, 4, 3), "downscale_ratio_spacial": 16}, (1, 16, 1, 8, 6)),
        ({"samples": torch.ones(1, 16, 8, 6)}, (1, 16, 1, 8, 6)),
    ],
)
def test_an_image_latent_is_a_video_of_one_frame(
    latent: dict[str, Any], shape: tuple[int, ...]
) -> None:
    inputs = native_inputs(_cond(), None, latent)
    assert inputs.noise.shape == shape
    assert (inputs.latent is None) == (not latent["samples"].any())


def test_texts_are_repeated_over_a_batch_in_turn() -> None:
    texts = torch.arange(3 * 2 * 4096, dtype=torch.float32).view(3, 2, 4096)
    five = {"samples": torch.zeros(5, 16, 3, 4, 6)}
    inputs = native_inputs([[texts, {}]], [[texts[:1], {}]], five)
    assert torch.equal(inputs.positive, texts[[0, 1, 2, 0, 1]])
    assert inputs.negative is not None
    assert len(inputs.negative) == 1
    assert torch.equal(
        native_inputs([[texts, {}]], None, {"samples": torch.zeros(2, 16, 3, 4, 6)}).positive,
        texts[:2],
    )


def test_a_noise_mask_says_what_is_known_where_the_image_has_no_mask() -> None:
    noise_mask = _start_mask()[0, 0]
    image = native_inputs(
        _cond(concat_latent_image=IMAGE), None, {**EMPTY, "noise_mask": noise_mask}
    ).image_condition
    assert image is not None
    assert torch.equal(image, image_condition(IMAGE, _start_mask()))
    both = {"concat_latent_image": IMAGE, "concat_mask": 1 - _start_mask()}
    image = native_inputs(_cond(**both), None, {**EMPTY, "noise_mask": noise_mask}).image_condition
    assert image is not None
    assert torch.equal(image, image_condition(IMAGE, 1 - _start_mask())), "its own mask wins"


def test_leftover_noise_is_handed_on_as_comfyui_does() -> None:
    latents = torch.randn(1, 16, 3, 4, 6, generator=torch.Generator().manual_seed(5))
    left = native_latent(latents, EMPTY, sigma=0.75)
    assert torch.equal(left["samples"], denormalise(latents / 0.25))
    inputs = native_inputs(_cond(), None, left)
    assert inputs.latent_sigma == 0.75
    assert inputs.latent is not None
    assert torch.allclose(inputs.latent * 0.25, latents, atol=1e-6)
    assert native_inputs(_cond(), None, EMPTY).latent_sigma is None
    assert native_inputs(_cond(), None, native_latent(latents, left)).latent_sigma == 0.0


def test_images_of_a_batch_share_a_mask() -> None:
    both = image_condition(IMAGE.repeat(2, 1, 1, 1, 1), _start_mask())
    assert torch.equal(both, image_condition(IMAGE, _start_mask()).repeat(2, 1, 1, 1, 1))


@pytest.mark.parametrize(
    ("positive", "negative", "latent", "message"),
    [
        ([], _cond(), EMPTY, "positive has 0 entries"),
        (_cond(), _cond() + _cond(), EMPTY, "negative has 2 entries"),
        (_cond(start_percent=0.5), None, EMPTY, "range of steps"),
        (_cond(end_percent=0.5), None, EMPTY, "range of steps"),
        (_cond(concat_latent_image=IMAGE), _cond(), EMPTY, "different start images"),
        (
            _cond(concat_latent_image=IMAGE),
            _cond(concat_latent_image=-IMAGE),
            EMPTY,
            "different start images",
        ),
        (
            _cond(concat_latent_image=torch.zeros(1, 24, 3, 4, 6)),
            None,
            EMPTY,
            r"is \[1, 24, .* node for another model",
        ),
        (
            _cond(concat_latent_image=IMAGE, concat_mask_index=16),
            None,
            EMPTY,
            "concat_mask_index is 16 for 16",
        ),
        (
            _cond(concat_latent_image=CONTROL, concat_mask_index=8),
            None,
            EMPTY,
            "concat_mask_index is 8 for 32",
        ),
        (
            _cond(context_latents=[torch.zeros(1, 16, 4, 6)]),
            None,
            EMPTY,
            r"\[1, 16, 4, 6\] under 'context_latents', and a",
        ),
        (_cond(context_latents=["a"]), None, EMPTY, "positive carries str under 'context_latents'"),
        (
            _cond(concat_latent_image=IMAGE, concat_mask=torch.ones(1, 1, 3, 8, 8)),
            None,
            EMPTY,
            r"concat_mask is \[1, 1, 3, 8, 8\], its image \[1, 16, 3, 4, 6\]",
        ),
        (
            _cond(concat_latent_image=IMAGE, concat_mask=torch.ones(1, 1, 4, 4, 6)),
            None,
            EMPTY,
            "concat_mask is",
        ),
        (
            _cond(),
            None,
            {"samples": torch.ones(1, 4, 64, 64)},
            r"latent is \[1, 4, 1, 64, 64\].* empty video latent",
        ),
        (_cond(), None, {"samples": torch.zeros(1, 32, 3, 4, 6)}, r"latent is \[1, 32, 3, 4, 6\]"),
        (
            _cond(),
            None,
            {"samples": [torch.zeros(1, 16, 3, 4, 6)]},
            "latent is a list of several parts",
        ),
        (
            _cond(),
            None,
            {**EMPTY, "noise_mask": torch.ones(2, 3, 4, 6)},
            r"noise mask is \[2, 3, 4, 6\]",
        ),
        (
            _cond(concat_latent_image=IMAGE),
            None,
            {"samples": torch.zeros(1, 16, 2, 4, 6)},
            "positive carries a start image for 48 x 32 pixels and 9 frames, the latent is 48 x 32 "
            "pixels and 5 frames",
        ),
        (
            _cond(),
            _cond(concat_latent_image=IMAGE),
            {"samples": torch.zeros(1, 16, 3, 8, 4)},
            "negative carries .* 48 x 32 pixels and 9 frames, .* 32 x 64 pixels and 9 frames: "
            "connect the latent",
        ),
    ],
)
def test_values_that_make_no_request(
    positive: Any, negative: Any, latent: Any, message: str
) -> None:
    with pytest.raises(ConditioningError, match=message):
        native_inputs(positive, negative, latent)


class TestWhatClipSees:
    """ComfyUI's CLIP_VISION_OUTPUT is an object with attributes. Only one is read."""

    STATES = torch.randn(1, 17, 80, generator=torch.Generator().manual_seed(9))

    def test_is_read_from_both_sides(self) -> None:
        output = SimpleNamespace(penultimate_hidden_states=self.STATES, image_embeds=None)
        both = _cond(clip_vision_output=output), _cond(clip_vision_output=output)
        assert torch.equal(native_inputs(*both, EMPTY).image_embedding, self.STATES)
        assert native_inputs(_cond(), _cond(), EMPTY).image_embedding is None

    def test_of_other_images_on_each_side_is_refused(self) -> None:
        seen = [
            SimpleNamespace(penultimate_hidden_states=states)
            for states in (self.STATES, -self.STATES)
        ]
        with pytest.raises(ConditioningError, match="different start images"):
            native_inputs(
                _cond(clip_vision_output=seen[0]), _cond(clip_vision_output=seen[1]), EMPTY
            )
        with pytest.raises(ConditioningError, match="different start images"):
            native_inputs(_cond(clip_vision_output=seen[0]), _cond(), EMPTY)

    def test_without_hidden_states_is_refused(self) -> None:
        with pytest.raises(
            ConditioningError,
            match="clip_vision_output is a object without penultimate_hidden_states",
        ):
            native_inputs(_cond(clip_vision_output=object()), None, EMPTY)
