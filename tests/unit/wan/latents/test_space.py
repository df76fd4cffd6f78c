"""The two latent spaces: statistics, and conversion between raw and normalised latents."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKLWan

from wanstream.wan.latents.space import (
    SPACES,
    WAN21,
    WAN22,
    LatentSpaceError,
    denormalise,
    normalise,
    space_of,
)


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_the_numbers_of_wan21_are_those_of_diffusers():
    with torch.device("meta"):
        config = AutoencoderKLWan().config

    assert tuple(config.latents_mean) == WAN21.mean
    assert tuple(config.latents_std) == WAN21.std
    assert (config.z_dim, config.scale_factor_spatial) == (WAN21.channels, WAN21.pixels)


def test_a_space_is_found_by_its_channels():
    assert (space_of(16), space_of(48)) == (WAN21, WAN22)
    with pytest.raises(
        LatentSpaceError, match=r"17 channels.*16 \(Wan2.1 and Wan2.2 A14B\), or 48 \(Wan2.2 5B\)"
    ):
        space_of(17)


@pytest.mark.parametrize("space", SPACES)
class TestNormalising:
    def test_it_works_per_channel(self, space):
        raw = torch.tensor(space.mean).view(1, -1, 1, 1, 1).expand(2, -1, 3, 4, 5).clone()
        raw[:, 7] += space.std[7]

        latents = normalise(raw)

        assert torch.allclose(latents[:, 7], torch.ones(()))
        assert torch.count_nonzero(latents) == latents[:, 7].numel()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_there_and_back(self, space, dtype):
        raw = noise(1, space.channels, 2, 3, 4).to(dtype)

        back = denormalise(normalise(raw))

        assert back.dtype == dtype
        assert torch.allclose(back, raw, atol=1e-6 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("convert", [normalise, denormalise])
def test_other_latents_are_refused(convert):
    with pytest.raises(LatentSpaceError, match="4 channels"):
        convert(noise(1, 4, 1, 2, 2))
