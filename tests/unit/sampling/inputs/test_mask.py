"""Noise masks: accepted shapes, refusals, and a run's kept part."""

from __future__ import annotations

import pytest
import torch

from wanstream.sampling.inputs.mask import MaskedPart, latent_mask
from wanstream.sampling.steps.errors import ConditioningError

SHAPE = torch.Size((4, 16, 3, 4, 6))


def _left_half(*shape: int) -> torch.Tensor:
    """Return a mask with 1 in each frame's left half."""
    mask = torch.zeros(shape)
    mask[..., : shape[-1] // 2] = 1
    return mask


@pytest.mark.parametrize(
    "shape",
    [
        *((4, 6), (1, 4, 6), (3, 4, 6), (8, 12), (3, 32, 48)),
        *((1, 1, 4, 6), (3, 1, 4, 6), (1, 1, 3, 4, 6), (1, 1, 1, 4, 6)),
    ],
)
def test_a_mask_of_any_form_serves_the_whole_batch(shape):
    mask = latent_mask(_left_half(*shape), SHAPE)
    assert mask.shape == (1, 1, 3, 4, 6)
    assert torch.equal(mask.round(), _left_half(1, 1, 3, 4, 6))


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("channels", [1, 16])
def test_a_mask_for_each_video(batch, channels):
    given = torch.rand(batch, channels, 3, 4, 6)
    mask = latent_mask(given, SHAPE)
    assert mask.shape == (1 if batch == 1 else 4, channels, 3, 4, 6)
    for i in range(4):
        assert torch.equal(mask[i % len(mask)], given[i % batch]), "ComfyUI repeats masks in turn"


def test_dimensions_before_height_and_width_are_frames():
    frames = torch.stack([torch.zeros(4, 6), torch.ones(4, 6), torch.zeros(4, 6)])
    for mask in (frames, frames[:, None], frames[None]):
        assert torch.equal(latent_mask(mask, SHAPE)[0, 0], frames)
    # ComfyUI scales a mask for all video frames linearly to the fewer latent frames.
    assert latent_mask(frames[:2], SHAPE)[0, 0, :, 0, 0].tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_whole_numbers_and_booleans_are_masks(dtype):
    mask = latent_mask(_left_half(4, 6).to(dtype), SHAPE)
    assert torch.equal(mask, latent_mask(_left_half(4, 6), SHAPE))
    assert mask.dtype == torch.float32


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(6), r"noise mask is \[6\]: give \[height, width\]"),
        (torch.ones(1, 1, 1, 3, 4, 6), r"noise mask is \[1, 1, 1, 3, 4, 6\]"),
        (torch.ones(0, 4, 6), r"noise mask is \[0, 4, 6\]"),
        (torch.ones(2, 3, 4, 6), r"is \[2, 3, 4, 6\]: give \[frames, 1, height, width\]"),
        (torch.ones(1, 4, 3, 4, 6), r"\[1, 4, 3, 4, 6\] has 4 channels: give 1, or 16"),
        (torch.ones(3, 1, 3, 4, 6), r"is for 3 videos, the latent \[4, 16, 3, 4, 6\] has 4"),
        (torch.full((4, 6), float("nan")), "contains NaN or infinity"),
    ],
)
def test_masks_that_fit_no_latent(mask, message):
    with pytest.raises(ConditioningError, match=message):
        latent_mask(mask, SHAPE)


def test_the_kept_part_has_the_noise_level_of_the_step():
    run, latent, noise = (torch.full((1, 16, 1, 1, 6), value) for value in (10.0, 2.0, -4.0))
    kept = MaskedPart.of(_left_half(1, 1, 1, 1, 6), latent, noise)
    assert kept.model_input(run, 0.25)[0, 0, 0, 0].tolist() == [10.0] * 3 + [0.5] * 3
    assert kept.merge_kept(run)[0, 0, 0, 0].tolist() == [10.0] * 3 + [2.0] * 3
    mixed = MaskedPart.of(torch.full((1, 1, 1, 1, 1), 0.25), torch.tensor(8.0), torch.tensor(0.0))
    assert mixed.merge_kept(torch.tensor(4.0)).item() == 0.25 * 4 + 0.75 * 8
