"""Nodes with Wan2.2 5B's VAE: sizes, decoding, a start image, refused combinations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from safetensors.torch import load_file

from wanstream.host.embedded.files import Folders
from wanstream.nodes.latents import (
    UnsupportedImageError,
    WanStreamEmptyLatent,
    WanStreamImageToVideo,
)
from wanstream.nodes.runs.decode import DecodeSettings, decode_images, decode_to_file
from wanstream.nodes.runs.latent_backup import VideoRefusedError
from wanstream.nodes.runs.video_file import VideoEncoding
from wanstream.schema.refs import WorkersRef
from wanstream.schema.refs.workers import IN_PROCESS
from wanstream.tests.support.embedded import embedded_host
from wanstream.wan.latents.space import WAN22, denormalise
from wanstream.wan.vae.memory import HEAP_BYTES
from wanstream.wan.vae.tiles import Tiling, TilingError
from wanstream.wan.vae.vae import VaeInputError, WanVae, open_vae

VAE, OTHER_VAE = "wan2.2_vae.safetensors", "wan_2.1_vae.safetensors"
PROMPT: list[list[Any]] = [[torch.zeros(1, 512, 4096), {"pooled_output": None}]]
SIZE = {"width": 64, "height": 32, "frames": 9}
LATENT = torch.randn(1, 48, 2, 5, 9, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def output(sample_models: Path, tmp_path: Path) -> Iterator[Path]:
    """Open a host with the test model."""
    folders = Folders(models=sample_models, output=tmp_path, input=tmp_path)
    with embedded_host.opened(folders, device=torch.device("cpu")):
        yield tmp_path


@pytest.fixture
def opened(sample_models: Path) -> Iterator[WanVae]:
    with open_vae(sample_models / "vae" / VAE) as vae:
        yield vae


def decoded(
    latents: torch.Tensor,
    *,
    vae: str = VAE,
    tile: int = 0,
    gb: float = 0,
    workers: WorkersRef | None = None,
):
    settings = DecodeSettings.of(embedded_host, vae, latents, tile_size=tile, memory_gb=gb)
    return decode_images(embedded_host, settings, latents, workers, node_id=None)


class TestSizes:
    def test_an_empty_latent_is_of_either_kind(self) -> None:
        for more, shape in (({}, (2, 16, 3, 4, 8)), ({"model": WAN22.models}, (2, 48, 3, 2, 4))):
            (latent,) = WanStreamEmptyLatent.execute(**SIZE, batch_size=2, **more).args
            assert latent["samples"].shape == shape
            assert not latent["samples"].any()

    def test_a_size_is_refused_before_anything_runs(self) -> None:
        size = {"width": 1280, "height": 720, "frames": 121}
        assert WanStreamEmptyLatent.validate_inputs(**size) is True
        with pytest.raises(ValueError, match="height is 720, it must be a multiple of 32: use 736"):
            WanStreamEmptyLatent.validate_inputs(**size, model=WAN22.models)

    def test_a_link_is_known_at_the_run_only(self) -> None:
        assert (
            WanStreamEmptyLatent.validate_inputs(width=1280, height=720, frames=121, model=None)
            is True
        )


class TestDecode:
    @pytest.mark.slow  # runs whole workflows
    def test_images_are_16_times_as_large(self, opened: WanVae) -> None:
        videos, told = decoded(LATENT)
        assert torch.equal(videos, opened.decode(LATENT, device="cpu"))
        assert (videos.shape, told) == ((1, 5, 80, 144, 3), [])

    def test_the_tiles_that_the_given_memory_allows(self, opened: WanVae) -> None:
        needs, tiling = opened.decode_needs(LATENT), Tiling.of(128, 16)
        budget = needs.device_bytes(tiling) + needs.host_bytes(tiling) + HEAP_BYTES + 1000
        videos, told = decoded(LATENT, gb=budget / 1e9)
        assert torch.equal(videos, opened.decode(LATENT, device="cpu", tiling=tiling))
        (said,) = told
        assert said.text.startswith("decoded in tiles of 128 pixels: whole frames take ")

    def test_workers_share_the_tiles(self, opened: WanVae) -> None:
        workers = WorkersRef(count=1, address=IN_PROCESS)
        try:
            shared, _ = decoded(LATENT, tile=128, workers=workers)
        finally:
            embedded_host.free_experts()
        assert torch.equal(shared, opened.decode(LATENT, device="cpu", tiling=Tiling.of(128, 16)))

    def test_a_video_file_has_the_size_of_the_frames(self, output: Path) -> None:
        settings = DecodeSettings.of(embedded_host, VAE, LATENT)
        file, _ = decode_to_file(
            embedded_host,
            settings,
            LATENT,
            "video/%width%x%height%",
            node_id=None,
            video=VideoEncoding(fps=24, crf=18, metadata={}),
        )
        with av.open(str(file.path)) as container:
            (stream,) = container.streams
            assert (stream.width, stream.height, stream.frames, stream.average_rate) == (
                144,
                80,
                5,
                24,
            )
        assert file.path.name.startswith("144x80")

    @pytest.mark.parametrize(
        ("tile", "said"), [(72, "give 128 or more"), (136, "give a multiple of 16")]
    )
    def test_tiles_that_are_no_multiple_of_16(self, tile: int, said: str) -> None:
        with pytest.raises(TilingError, match=said):
            DecodeSettings.of(embedded_host, VAE, LATENT, tile_size=tile)


class TestTheWrongPair:
    def test_latents_of_48_channels_and_the_vae_of_16_keep_the_latent(self, output: Path) -> None:
        with pytest.raises(
            VideoRefusedError, match=r"\[1, 48, 2, 5, 9\], of Wan2\.2 5B, .* take wan2\.2_vae"
        ):
            decoded(LATENT, vae=OTHER_VAE)
        (kept,) = output.rglob("*.latent")
        assert torch.equal(load_file(kept)["latent_tensor"], LATENT), "all its channels"

    def test_latents_of_16_channels_and_the_vae_of_48(self) -> None:
        with pytest.raises(
            VideoRefusedError, match=r"for 48 channels: take wan_2\.1_vae\.safetensors for"
        ):
            decoded(LATENT[:, :16])

    def test_workers_refuse_it_too(self) -> None:
        workers = WorkersRef(count=1, address=IN_PROCESS)
        try:
            with pytest.raises(VideoRefusedError, match=r"take wan2\.2_vae\.safetensors"):
                decoded(LATENT, vae=OTHER_VAE, tile=128, workers=workers)
        finally:
            embedded_host.free_experts()

    def test_latents_of_an_image_model(self) -> None:
        with pytest.raises(VaeInputError, match=r"give \[B, 16 or 48, T, h, w\]"):
            DecodeSettings.of(embedded_host, VAE, torch.zeros(1, 4, 8, 8))


class TestAStartImage:
    def test_the_latent_begins_with_it(self, opened: WanVae) -> None:
        image = torch.rand(1, 32, 64, 3, generator=torch.Generator().manual_seed(0))
        positive, negative, latent = WanStreamImageToVideo.execute(
            PROMPT, PROMPT, VAE, image, 2, **SIZE
        ).args
        assert positive is negative is PROMPT
        samples, mask = latent["samples"], latent["noise_mask"]
        assert (samples.shape, mask.shape) == ((2, 48, 3, 2, 4), (1, 1, 3, 2, 4))
        for one in samples:
            assert torch.equal(one[:, :1], opened.encode(image, device="cpu")[0])
        assert torch.equal(samples[:, :, 1:], denormalise(torch.zeros(2, 48, 2, 2, 4))), (
            "empty where nothing is given"
        )
        assert mask[:, :, 0].count_nonzero() == 0
        assert (mask[:, :, 1:] == 1).all()

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            ({"end_image": torch.zeros(1, 8, 8, 3)}, "^end_image given with the VAE of Wan2.2 5B"),
            ({"clip_vision": "clip_vision_h.safetensors"}, "^clip_vision given .* disconnect it"),
        ],
        ids=["end", "clip"],
    )
    def test_nothing_else_is_taken(self, more: dict[str, Any], said: str) -> None:
        with pytest.raises(UnsupportedImageError, match=said):
            WanStreamImageToVideo.execute(
                PROMPT, PROMPT, VAE, torch.zeros(1, 8, 8, 3), 1, **SIZE, **more
            )

    def test_sizes_are_multiples_of_32(self) -> None:
        size = SIZE | {"height": 48}
        with pytest.raises(ValueError, match="height is 48, it must be a multiple of 32: use 64"):
            WanStreamImageToVideo.execute(PROMPT, PROMPT, VAE, torch.zeros(1, 8, 8, 3), 1, **size)
