"""Noise level stored in a LATENT: valid only for the samples it was made for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from wanstream.sampling.inputs.conditioning import leftover_sigma, marked_latent

SAMPLES = torch.randn(2, 16, 3, 8, 6, generator=torch.Generator().manual_seed(0))
MARKED = marked_latent(SAMPLES, 0.75)


def test_a_marked_latent_says_where_it_was_left() -> None:
    assert leftover_sigma(MARKED) == 0.75
    assert (
        leftover_sigma({**MARKED, "samples": SAMPLES.clone(), "noise_mask": torch.ones(1)}) == 0.75
    )
    assert leftover_sigma({"samples": SAMPLES}) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda samples: samples * 1.001,
        lambda samples: samples[:1],
        lambda samples: samples[:, :, :2],
        lambda samples: samples.flip(0),
        lambda samples: samples.flip(-1),
        lambda samples: samples.view(1, 16, 6, 8, 6),
        torch.zeros_like,
    ],
)
def test_other_samples_under_the_same_mark_say_nothing(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    assert leftover_sigma({**MARKED, "samples": change(SAMPLES)}) is None
