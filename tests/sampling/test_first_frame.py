from __future__ import annotations

import pytest
import torch
from torch.nn.functional import interpolate

from wanstream.plan.shapes import VideoShape
from wanstream.sampling.first_frame import GREY, start_mask, start_video

SQUARE = VideoShape(width=32, height=32, frames=9)


def test_the_image_is_the_first_frame_and_the_rest_is_grey() -> None:
    image = torch.rand(1, 32, 32, 3)
    video = start_video(image, SQUARE)
    assert video.shape == (9, 32, 32, 3)
    assert torch.equal(video[:1], image)
    assert (video[1:] == GREY).all()


@pytest.mark.parametrize(
    ("height", "width", "rows", "columns"),
    [
        (50, 100, slice(0, 50), slice(25, 75)),
        (100, 50, slice(25, 75), slice(0, 50)),
        # A margin of 2.5 pixels: rounded to even, as ComfyUI does.
        (40, 45, slice(0, 40), slice(2, 43)),
        (64, 64, slice(0, 64), slice(0, 64)),
    ],
)
def test_it_is_cropped_around_its_centre_then_scaled(height: int, width: int, rows: slice, columns: slice) -> None:
    image = torch.rand(1, height, width, 3)
    cropped = image[:, rows, columns].movedim(-1, 1)
    expected = interpolate(cropped, size=(32, 32), mode="bilinear").movedim(1, -1)
    assert torch.equal(start_video(image, SQUARE)[:1], expected)


def test_alpha_is_dropped_and_late_images_are_left_out() -> None:
    images = torch.rand(12, 32, 32, 4)
    assert torch.equal(start_video(images, SQUARE), images[:9, ..., :3])


@pytest.mark.parametrize("shape", [(32, 32, 3), (0, 32, 32, 3), (1, 32, 32, 1)])
def test_what_is_no_image_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="start image is"):
        start_video(torch.zeros(shape), SQUARE)


@pytest.mark.parametrize(("known", "latent_frames"), [(1, 1), (2, 1), (4, 1), (5, 2), (9, 3), (12, 3)])
def test_the_mask_frees_the_frames_that_are_not_given(known: int, latent_frames: int) -> None:
    mask = start_mask(known, SQUARE)
    assert mask.shape == (1, 1, 3, 4, 4)
    assert (mask[:, :, :latent_frames] == 0).all()
    assert (mask[:, :, latent_frames:] == 1).all()
