"""Condition for a clip that continues another one: SVI's filling, and refusals with numbers."""

from __future__ import annotations

import pytest
import torch

from wanstream.sampling.inputs.conditioning import image_condition
from wanstream.sampling.inputs.continuation import continuation, overlap_frames
from wanstream.sampling.steps.errors import ConditioningError
from wanstream.wan.latents.space import normalise

PREVIOUS = torch.randn(1, 16, 6, 4, 8, generator=torch.Generator().manual_seed(1))
ANCHOR = torch.randn(1, 16, 3, 4, 8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("overlap", [0, 1, 2, 6])
def test_the_anchor_comes_first_then_the_last_frames_then_the_mean_of_the_latent_space(
    overlap: int,
) -> None:
    made = continuation(PREVIOUS, anchor=ANCHOR, overlap=overlap, frames=8)
    assert made["concat_latent_image"].shape == (1, 16, 8, 4, 8)
    assert torch.equal(made["concat_latent_image"][:, :, :1], ANCHOR[:, :, :1])
    assert torch.equal(
        made["concat_latent_image"][:, :, 1 : 1 + overlap], PREVIOUS[:, :, 6 - overlap :]
    )
    assert torch.count_nonzero(normalise(made["concat_latent_image"][:, :, 1 + overlap :])) == 0
    assert made["concat_mask"].shape == (1, 1, 8, 4, 8)
    assert (made["concat_mask"][:, :, 0] == 0).all()
    assert (made["concat_mask"][:, :, 1:] == 1).all(), (
        "the latents of the clip before are not marked as known"
    )


def test_without_an_anchor_it_is_the_first_frame_of_the_clip_before() -> None:
    made = continuation(PREVIOUS, anchor=None, overlap=1, frames=3)
    assert torch.equal(made["concat_latent_image"][:, :, 0], PREVIOUS[:, :, 0])
    assert torch.equal(made["concat_latent_image"][:, :, 1], PREVIOUS[:, :, -1])


def test_a_first_clip_has_the_anchor_alone_whatever_the_overlap_is() -> None:
    made = continuation(None, anchor=ANCHOR, overlap=5, frames=3)
    assert torch.equal(
        made["concat_latent_image"],
        continuation(PREVIOUS, anchor=ANCHOR, overlap=0, frames=3)["concat_latent_image"],
    )


def test_one_anchor_serves_all_videos() -> None:
    previous = torch.cat((PREVIOUS, PREVIOUS + 1))
    made = continuation(previous, anchor=ANCHOR, overlap=1, frames=4)
    assert torch.equal(made["concat_latent_image"][:, :, 0], ANCHOR[:, :, 0].expand(2, -1, -1, -1))
    assert torch.equal(made["concat_latent_image"][1, :, 1], previous[1, :, -1])


def test_an_expert_reads_the_anchor_as_known_and_the_rest_as_free() -> None:
    made = continuation(PREVIOUS, anchor=ANCHOR, overlap=1, frames=4)
    channels = image_condition(made["concat_latent_image"], made["concat_mask"])
    assert channels.shape == (1, 20, 4, 4, 8)
    assert (channels[:, :4, 0] == 1).all()
    assert (channels[:, :4, 1:] == 0).all()
    assert torch.equal(channels[:, 4:, 1], normalise(PREVIOUS)[:, :, -1])


def test_the_frames_of_an_overlap() -> None:
    assert [overlap_frames(count) for count in (0, 1, 2, 3)] == [0, 5, 9, 13]


@pytest.mark.parametrize(
    ("previous", "anchor", "overlap", "frames", "reason"),
    [
        (None, None, 1, 8, "nothing to continue and no start image: connect"),
        (
            PREVIOUS,
            None,
            7,
            9,
            "the overlap is 7 latent frames, and the previous clip has 6: lower the overlap to 6",
        ),
        (
            PREVIOUS,
            None,
            4,
            4,
            "take 5 latent frames, and the clip has 4: lower the overlap to 3 .* 17 frames",
        ),
        (
            torch.zeros(1, 48, 6, 4, 8),
            None,
            1,
            8,
            r"the previous latent is \[1, 48, 6, 4, 8\], .* Wan2.2 A14B",
        ),
        (PREVIOUS, torch.zeros(1, 48, 1, 4, 8), 1, 8, r"the anchor latent is \[1, 48, 1, 4, 8\]"),
        (PREVIOUS[:, :, 0], None, 1, 8, r"the previous latent is \[1, 16, 4, 8\]"),
        (
            PREVIOUS,
            ANCHOR[..., :4],
            1,
            8,
            "the previous clip has 64 x 32 pixels, the anchor or start image 32 x 32",
        ),
        (PREVIOUS, ANCHOR.repeat(2, 1, 1, 1, 1), 1, 8, "2 anchors for 1 videos: give 1 or 1"),
    ],
)
def test_what_cannot_be_continued_is_refused_with_numbers(
    previous: torch.Tensor | None,
    anchor: torch.Tensor | None,
    overlap: int,
    frames: int,
    reason: str,
) -> None:
    with pytest.raises(ConditioningError, match=reason):
        continuation(previous, anchor=anchor, overlap=overlap, frames=frames)
