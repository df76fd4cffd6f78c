"""Wan2.2 5B VAE: equality with diffusers in full frames and tiles, refused Wan2.1 latents."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan

from wanstream.wan.vae.tiles import TileBlender, Tiling, crop
from wanstream.wan.vae.vae import VaeInputError, WanVae, open_vae

TILING = Tiling.of(128, 16)


@pytest.fixture(scope="module")
def own_vae(wan22_vae: Path) -> AutoencoderKLWan:
    return AutoencoderKLWan.from_pretrained(wan22_vae / "vae").eval()


@pytest.fixture(scope="module")
def vae(wan22_vae: Path) -> Iterator[WanVae]:
    with open_vae(wan22_vae / "wan2.2_vae.safetensors") as opened:
        yield opened


def noise(*shape: int) -> torch.Tensor:
    # Large values reach beyond -1 to 1, where clamping before blending would show.
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))


def decoded(
    own_vae: AutoencoderKLWan, latents: torch.Tensor, tiling: Tiling | None = None
) -> torch.Tensor:
    """Decode with diffusers, one video at a time."""
    if tiling is not None:
        own_vae.enable_tiling(tiling.pixels, tiling.pixels, tiling.stride, tiling.stride)
    try:
        with torch.no_grad():
            videos = [own_vae.decode(one).sample[0].movedim(0, -1) for one in latents.split(1)]
    finally:
        own_vae.disable_tiling()
    return (torch.stack(videos) + 1) / 2


class TestDecode:
    def test_whole_frames_are_those_of_diffusers(
        self, vae: WanVae, own_vae: AutoencoderKLWan
    ) -> None:
        latents = noise(2, 48, 3, 2, 3)

        videos = vae.decode(latents, device="cpu")

        assert videos.shape == (2, 9, 32, 48, 3)
        assert torch.equal(videos, decoded(own_vae, latents))

    def test_tiles_are_those_of_diffusers(self, vae: WanVae, own_vae: AutoencoderKLWan) -> None:
        latents = noise(1, 48, 2, 9, 7)

        tiled = vae.decode(latents, device="cpu", tiling=TILING)

        assert torch.equal(tiled, decoded(own_vae, latents, TILING))
        assert not torch.equal(tiled, decoded(own_vae, latents)), (
            "tiles of an untrained VAE differ from the whole"
        )

    def test_tiles_in_any_order_are_the_same(self, vae: WanVae) -> None:
        latents = noise(1, 48, 1, 9, 9)
        tiles = list(TILING.tiles(9, 9))
        random.Random(1).shuffle(tiles)
        frames = torch.empty(1, 144, 144, 3)
        mosaic = TileBlender(TILING, into=frames)
        for tile in tiles:
            mosaic.put(tile, vae.decode_tile(crop(latents, tile), device="cpu"))

        assert torch.equal(frames, vae.decode(latents, device="cpu", tiling=TILING)[0])

    def test_frames_leave_as_they_are_made(self, vae: WanVae) -> None:
        latents, checks = noise(1, 48, 3, 2, 2), itertools.count()

        parts = vae.stream(latents, device="cpu", check=lambda: next(checks))

        first = next(parts)
        assert (first.shape, first.dtype, next(checks)) == ((1, 32, 32, 3), torch.uint8, 1)
        assert [part.shape for part in parts] == [(4, 32, 32, 3)] * 2


class TestEncode:
    @pytest.mark.parametrize("frames", [1, 5])
    def test_the_mode_of_the_latents_of_diffusers(
        self, vae: WanVae, own_vae: AutoencoderKLWan, frames: int
    ) -> None:
        video = noise(frames, 32, 48, 3).sigmoid()

        raw = vae.encode(video, device="cpu")

        with torch.no_grad():
            expected = own_vae.encode(video.permute(3, 0, 1, 2)[None] * 2 - 1).latent_dist.mode()
        assert raw.shape == (1, 48, (frames - 1) // 4 + 1, 2, 3)
        assert torch.equal(raw, expected)

    def test_tiles_are_those_of_diffusers_which_counts_them_in_patches(
        self, vae: WanVae, own_vae: AutoencoderKLWan
    ) -> None:
        video = noise(1, 144, 160, 3).sigmoid()

        tiled, small = (
            vae.encode(given, device="cpu", tiling=TILING)
            for given in (video, video[:, :128, :128])
        )

        pixels = video.permute(3, 0, 1, 2)[None] * 2 - 1
        with torch.no_grad():
            whole, one = (
                own_vae.encode(given).latent_dist.mode()
                for given in (pixels, pixels[..., :128, :128])
            )
            own_vae.enable_tiling(64, 64, 48, 48)
            try:
                assert torch.equal(tiled, own_vae.encode(pixels).latent_dist.mode())
            finally:
                own_vae.disable_tiling()
        assert not torch.equal(tiled, whole)
        assert torch.equal(small, one), "what is no larger than a tile is not cut"

    def test_sizes_are_multiples_of_16(self, vae: WanVae) -> None:
        with pytest.raises(VaeInputError, match="40x32: give multiples of 16"):
            vae.encode(torch.zeros(1, 32, 40, 3), device="cpu")


class TestTheWrongPair:
    def test_latents_of_wan21(self, vae: WanVae) -> None:
        said = (
            r"\[1, 16, 1, 2, 2\], of Wan2\.1 and Wan2\.2 A14B.*of Wan2\.2 5B, for 48 channels: "
            r"take wan_2\.1_vae"
        )
        for use in (
            vae.decode,
            vae.decode_tile,
            lambda given, device: list(vae.stream(given, device=device)),
        ):
            with pytest.raises(VaeInputError, match=said):
                use(noise(1, 16, 1, 2, 2), device="cpu")
        with pytest.raises(VaeInputError, match=said):
            vae.decode_needs(noise(1, 16, 1, 2, 2))

    def test_the_vae_of_wan21(self, tiny_pipeline) -> None:
        with (
            open_vae(tiny_pipeline()) as other,
            pytest.raises(VaeInputError, match=r"for 16 channels: take wan2\.2_vae"),
        ):
            other.decode(noise(1, 48, 1, 2, 2), device="cpu")

    def test_latents_of_neither(self, vae: WanVae) -> None:
        with pytest.raises(
            VaeInputError, match=r"\[1, 4, 1, 2, 2\]: give \[B, 16 or 48, T, h, w\]"
        ):
            vae.decode(noise(1, 4, 1, 2, 2), device="cpu")


def test_a_decode_says_its_sizes_in_pixels_of_16(vae: WanVae) -> None:
    needs = vae.decode_needs(noise(1, 48, 2, 3, 4), to_file=True)

    assert (needs.height, needs.width, needs.per_latent, needs.frames) == (3, 4, 16, 5)
    assert needs.host_bytes(None) == 4 * 3 * 48 * 64 * 5, (
        "a latent frame in fp32, and as it is stored"
    )


def test_a_start_image_is_there_twice_as_pixels_and_as_patches(vae: WanVae, tiny_pipeline) -> None:
    video = noise(5, 64, 48, 3).sigmoid()
    needs = vae.encode_needs(video)

    assert (needs.height, needs.width, needs.frames, needs.per_latent) == (4, 3, 5, 16)
    with open_vae(tiny_pipeline()) as other:
        assert needs.value_bytes == 2 * other.encode_needs(video).value_bytes
