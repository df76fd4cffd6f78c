"""The two latent spaces: statistics, and conversion between raw and normalised latents."""

import pytest
import torch
from diffusers import AutoencoderKLWan

from wanstream.tests.support.sampling.runs import normal
from wanstream.wan.latents.space import (
    SPACES,
    WAN21,
    WAN22,
    LatentSpaceError,
    denormalise,
    normalise,
    space_of,
)


def test_the_numbers_of_wan21_are_those_of_diffusers():
    with torch.device("meta"):
        config = AutoencoderKLWan().config

    assert tuple(config.latents_mean) == WAN21.mean
    assert tuple(config.latents_std) == WAN21.std
    assert (config.z_dim, config.scale_factor_spatial) == (WAN21.channels, WAN21.pixels)


def test_space_is_found_by_channels():
    assert (space_of(16), space_of(48)) == (WAN21, WAN22)
    said = r"17 channels.*16 \(Wan2.1 and Wan2.2 A14B\), or 48 \(Wan2.2 5B\)"
    with pytest.raises(LatentSpaceError, match=said):
        space_of(17)
    for convert in (normalise, denormalise):
        with pytest.raises(LatentSpaceError, match="4 channels"):
            convert(normal(1, 4, 1, 2, 2, seed=0))


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalising_works_per_channel_and_back(space, dtype):
    raw = torch.tensor(space.mean).view(1, -1, 1, 1, 1).expand(2, -1, 3, 4, 5).clone()
    raw[:, 7] += space.std[7]
    latents = normalise(raw)
    assert torch.allclose(latents[:, 7], torch.ones(()))
    assert torch.count_nonzero(latents) == latents[:, 7].numel()
    raw = normal(1, space.channels, 2, 3, 4, seed=0).to(dtype)
    back = denormalise(normalise(raw))
    assert back.dtype == dtype
    assert torch.allclose(back, raw, atol=1e-6 if dtype == torch.float32 else 3e-2)
