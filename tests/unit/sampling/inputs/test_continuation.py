"""Condition for a clip that continues another one: SVI's filling, and refusals with numbers."""

import pytest
import torch

from wanstream.sampling.inputs.conditioning import image_condition
from wanstream.sampling.inputs.continuation import continuation, overlap_frames
from wanstream.sampling.steps.errors import ConditioningError
from wanstream.tests.support.sampling.runs import normal
from wanstream.wan.latents.space import normalise

PREVIOUS = normal(1, 16, 6, 4, 8, seed=1)
ANCHOR = normal(1, 16, 3, 4, 8, seed=2)


@pytest.mark.parametrize("overlap", [0, 1, 2, 6])
def test_anchor_then_last_frames_then_the_latent_mean(overlap):
    made = continuation(PREVIOUS, anchor=ANCHOR, overlap=overlap, frames=8)
    image = made["concat_latent_image"]
    mask = made["concat_mask"]
    assert image.shape == (1, 16, 8, 4, 8)
    assert torch.equal(image[:, :, :1], ANCHOR[:, :, :1])
    assert torch.equal(image[:, :, 1 : 1 + overlap], PREVIOUS[:, :, 6 - overlap :])
    assert torch.count_nonzero(normalise(image[:, :, 1 + overlap :])) == 0
    assert mask.shape == (1, 1, 8, 4, 8)
    assert (mask[:, :, 0] == 0).all()
    assert (mask[:, :, 1:] == 1).all(), "the previous clip's latents are not marked as known"
    channels = image_condition(image, mask)
    assert (channels[:, :4, 0] == 1).all(), "an expert reads 1 as known"
    assert (channels[:, :4, 1:] == 0).all()


def test_the_anchor_is_the_first_frame_of_the_previous_clip():
    made = continuation(PREVIOUS, anchor=None, overlap=1, frames=3)["concat_latent_image"]
    assert torch.equal(made[:, :, :2], PREVIOUS[:, :, [0, -1]])


def test_a_first_clip_has_the_anchor_alone():
    made = continuation(None, anchor=ANCHOR, overlap=5, frames=3)["concat_latent_image"]
    without = continuation(PREVIOUS, anchor=ANCHOR, overlap=0, frames=3)["concat_latent_image"]
    assert torch.equal(made, without)


def test_one_anchor_serves_all_videos():
    previous = torch.cat((PREVIOUS, PREVIOUS + 1))
    made = continuation(previous, anchor=ANCHOR, overlap=1, frames=4)["concat_latent_image"]
    assert torch.equal(made[:, :, 0], ANCHOR[:, :, 0].expand(2, -1, -1, -1))
    assert torch.equal(made[1, :, 1], previous[1, :, -1])


def test_the_frames_of_an_overlap():
    assert [overlap_frames(count) for count in (0, 1, 2, 3)] == [0, 5, 9, 13]


OF_5B = torch.zeros(1, 48, 6, 4, 8)


@pytest.mark.parametrize(
    ("previous", "anchor", "overlap", "frames", "reason"),
    [
        (None, None, 1, 8, "nothing to continue and no start image: connect"),
        (PREVIOUS, None, 7, 9, "is 7 latent frames, and the previous clip has 6: lower .* to 6"),
        (PREVIOUS, None, 4, 4, "5 latent frames, and the clip has 4: lower .* to 3 .* 17 frames"),
        (OF_5B, None, 1, 8, r"the previous latent is \[1, 48, 6, 4, 8\], .* Wan2.2 A14B"),
        (PREVIOUS, OF_5B[:, :, :1], 1, 8, r"the anchor latent is \[1, 48, 1, 4, 8\]"),
        (PREVIOUS[:, :, 0], None, 1, 8, r"the previous latent is \[1, 16, 4, 8\]"),
        (PREVIOUS, ANCHOR[..., :4], 1, 8, "64 x 32 pixels, the anchor or start image 32 x 32"),
        (PREVIOUS, ANCHOR.repeat(2, 1, 1, 1, 1), 1, 8, "2 anchors for 1 videos: give 1 or 1"),
    ],
)
def test_refusals_have_numbers(previous, anchor, overlap, frames, reason):
    with pytest.raises(ConditioningError, match=reason):
        continuation(previous, anchor=anchor, overlap=overlap, frames=frames)
