"""Start and end images as frames of a video, and their masks."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import interpolate

from wanstream.sampling.inputs.first_frame import (
    GREY,
    latent_with_first_frames,
    start_end_mask,
    start_frames,
    start_mask,
    video_with_start_end,
)
from wanstream.shapes.latent_grid import VideoShape
from wanstream.wan.latents.space import normalise

SQUARE = VideoShape(width=32, height=32, frames=9)


@pytest.mark.parametrize(
    ("height", "width", "rows", "columns"),
    [
        (50, 100, slice(0, 50), slice(25, 75)),
        (100, 50, slice(25, 75), slice(0, 50)),
        # A 2.5 pixel margin: rounded to even, as ComfyUI does.
        (40, 45, slice(0, 40), slice(2, 43)),
        (64, 64, slice(0, 64), slice(0, 64)),
    ],
)
def test_images_are_cropped_around_the_centre_then_scaled(height, width, rows, columns):
    image = torch.rand(1, height, width, 3)
    cropped = image[:, rows, columns].movedim(-1, 1)
    expected = interpolate(cropped, size=(32, 32), mode="bilinear").movedim(1, -1)
    assert torch.equal(video_with_start_end(image, None, SQUARE)[:1], expected)


def test_start_images_end_images_and_grey_between():
    start = torch.rand(2, 50, 100, 3)
    end = torch.rand(3, 40, 45, 4)
    alone, video = (video_with_start_end(start, last, SQUARE) for last in (None, end))
    assert alone.shape == video.shape == (9, 32, 32, 3)
    assert torch.equal(video[:2], alone[:2])
    assert (alone[2:] == GREY).all()
    assert (video[2:6] == GREY).all()
    assert torch.equal(video[6:], video_with_start_end(end, None, SQUARE)[:3])
    images = torch.rand(9, 32, 32, 4)
    for whole in ((images, None), (images[:4], images[4:])):
        assert torch.equal(video_with_start_end(*whole, SQUARE), images[..., :3]), "without alpha"


def _images(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, 8, 8, 3)


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [
        (_images(10), None, "10 start images do not fit into 9 frames"),
        (_images(8), _images(2), "8 start images and 2 end images do not fit into 9 frames"),
        (_images(), None, "start image is"),
        (_images(1)[..., :1], None, "start image is"),
        (_images(1), _images(), "end image is"),
    ],
)
def test_images_that_do_not_fit_are_refused(start, end, message):
    with pytest.raises(ValueError, match=message):
        video_with_start_end(start, end, SQUARE)


@pytest.mark.parametrize(("known", "latents"), [(1, 1), (2, 1), (4, 1), (5, 2), (9, 3), (12, 3)])
def test_the_mask_frees_the_frames_that_are_not_given(known, latents):
    mask = start_mask(known, SQUARE)
    assert mask.shape == (1, 1, 3, 4, 4)
    assert (mask[:, :, :latents] == 0).all()
    assert (mask[:, :, latents:] == 1).all()


@pytest.mark.parametrize(
    ("start", "end", "free"),
    [
        # Latent frame 0 holds frame 0 alone, frame 1 holds 1 to 4, frame 2 holds 5 to 8.
        (1, 1, [[0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]),
        (2, 3, [[0, 0, 0, 0], [0, 1, 1, 1], [1, 0, 0, 0]]),
        (5, 4, [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]),
    ],
)
def test_the_mask_of_both_ends_has_four_places_per_latent_frame(start, end, free):
    expected = torch.tensor(free).float().T[None, :, :, None, None].expand(1, 4, 3, 4, 4)
    assert torch.equal(start_end_mask(start, end, SQUARE).float(), expected)


def test_wan22_5b_is_given_the_start_frames_alone():
    images = torch.rand(5, 50, 100, 4)
    assert torch.equal(start_frames(images, SQUARE), video_with_start_end(images, None, SQUARE)[:5])


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (_images(3), r"3 start images: Wan2\.2 5B takes 4n \+ 1, give the first 1"),
        (_images(8), "give the first 5"),
        (_images(13), "13 start images do not fit into 9 frames"),
        (_images(), r"the start image is \[8, 8, 3\]"),
    ],
)
def test_start_frames_that_wan22_5b_cannot_take(images, message):
    with pytest.raises(ValueError, match=message):
        start_frames(images, SQUARE)


def test_a_begun_latent_is_empty_behind_the_given_frames():
    shape = VideoShape(width=64, height=32, frames=13, per_latent=16)
    encoded = torch.randn(1, 48, 2, 2, 4)
    latent = latent_with_first_frames(lambda _: encoded, torch.rand(5, 8, 8, 3), shape, batch=3)
    assert latent["samples"].shape == (3, 48, 4, 2, 4)
    assert torch.equal(latent["samples"][:, :, :2], encoded.repeat(3, 1, 1, 1, 1))
    assert normalise(latent["samples"][:, :, 2:]).abs().max() < 1e-6
    assert latent["noise_mask"][0, 0, :, 0, 0].tolist() == [0, 0, 1, 1]
