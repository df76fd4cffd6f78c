"""VAE folders: equality with diffusers' VAE, refused files."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from diffusers import AutoencoderKLWan

from wanstream.offload.formats.safetensors_header import CheckpointFileError
from wanstream.wan.vae.tiles import Tiling
from wanstream.wan.vae.vae import VaeInputError, open_vae

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def own_vae(tiny_pipeline):
    return AutoencoderKLWan.from_pretrained(tiny_pipeline() / "vae").eval()


@pytest.fixture
def vae_copy(tiny_pipeline, tmp_path):
    """Return a `vae` folder for the test to damage."""
    return shutil.copytree(tiny_pipeline() / "vae", tmp_path / "vae")


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


class TestAgainstDiffusers:
    @pytest.mark.parametrize("frames", [1, 5])
    def test_encode_gives_the_mode_of_the_raw_latents(self, tiny_pipeline, own_vae, frames):
        video = noise(frames, 16, 24, 3).sigmoid()

        with open_vae(tiny_pipeline()) as vae:
            raw = vae.encode(video, device="cpu")

        with torch.no_grad():
            expected = own_vae.encode(video.permute(3, 0, 1, 2)[None] * 2 - 1).latent_dist.mode()
        assert raw.shape == (1, 16, (frames - 1) // 4 + 1, 2, 3)
        assert torch.equal(raw, expected)

    @pytest.mark.slow  # decodes whole videos
    def test_an_encode_in_tiles_is_that_of_diffusers_and_the_next_one_is_whole_again(
        self, tiny_pipeline, own_vae
    ):
        video = noise(5, 72, 96, 3).sigmoid()

        with open_vae(tiny_pipeline()) as vae:
            tiled, whole = (
                vae.encode(video, device="cpu", tiling=tiling) for tiling in (Tiling.of(64), None)
            )

        pixels = video.permute(3, 0, 1, 2)[None] * 2 - 1
        with torch.no_grad():
            assert torch.equal(whole, own_vae.encode(pixels).latent_dist.mode())
            own_vae.enable_tiling(64, 64, 48, 48)
            assert torch.equal(tiled, own_vae.encode(pixels).latent_dist.mode())
        assert not torch.equal(tiled, whole)

    @pytest.mark.parametrize("batch", [1, 2])
    def test_decode_gives_frames_between_0_and_1(self, tiny_pipeline, own_vae, batch):
        latents = noise(batch, 16, 2, 2, 3)

        with open_vae(tiny_pipeline() / "vae") as vae:
            videos = vae.decode(latents, device="cpu")

        with torch.no_grad():
            expected = torch.cat([own_vae.decode(one).sample for one in latents.split(1)])
        assert videos.shape == (batch, 5, 16, 24, 3)
        assert torch.equal(videos, (expected.permute(0, 2, 3, 4, 1) + 1) / 2)
        assert 0 <= videos.min() < videos.max() <= 1

    def test_it_can_be_used_again_after_it_was_closed(self, tiny_pipeline):
        vae = open_vae(tiny_pipeline())
        first = vae.decode(noise(1, 16, 1, 2, 2), device="cpu")
        vae.close()

        assert torch.equal(vae.decode(noise(1, 16, 1, 2, 2), device="cpu"), first)

    def test_it_works_inside_inference_mode_and_outside_again(self, tiny_pipeline):
        vae = open_vae(tiny_pipeline())
        with torch.inference_mode():
            inside = vae.decode(noise(1, 16, 1, 2, 2), device="cpu")

        assert torch.equal(vae.decode(noise(1, 16, 1, 2, 2), device="cpu"), inside)


class TestInputs:
    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            ((4, 16, 16, 3), "4 frames"),
            ((1, 16, 12, 3), "12x16"),
            ((1, 16, 16, 4), "give frames"),
            ((16, 16, 3), "give frames"),
            ((0, 16, 16, 3), "give frames"),
        ],
    )
    def test_videos_it_cannot_take(self, tiny_pipeline, shape, message):
        with pytest.raises(VaeInputError, match=message):
            open_vae(tiny_pipeline()).encode(torch.zeros(shape), device="cpu")

    @pytest.mark.parametrize("shape", [(1, 47, 1, 2, 2), (16, 1, 2, 2), (1, 16, 0, 2, 2)])
    def test_latents_it_cannot_take(self, tiny_pipeline, shape):
        with pytest.raises(VaeInputError, match=r"give \[B, 16 or 48, T, h, w\]"):
            open_vae(tiny_pipeline()).decode(torch.zeros(shape), device="cpu")


class TestBadFiles:
    def test_nothing_there(self, tmp_path):
        with pytest.raises(CheckpointFileError, match="neither a diffusers pipeline folder"):
            open_vae(tmp_path)

    @pytest.mark.parametrize("text", ["", "[]", '{"_class_name": '])
    def test_a_config_that_is_not_a_json_object(self, vae_copy, text):
        (vae_copy / "config.json").write_text(text)

        with pytest.raises(CheckpointFileError, match="JSON"):
            open_vae(vae_copy)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"_class_name": "AutoencoderKL"}, "_class_name is 'AutoencoderKL'"),
            (
                {"z_dim": 32},
                "z_dim is 32, 16 is expected: give the VAE of Wan2.1 and Wan2.2 A14B or of Wan2.2 "
                "5B",
            ),
            ({"z_dim": 48}, "is_residual is False, True is expected"),
            ({"base_dim": 32}, r"encoder\.conv_in\.weight is \[8, 3, 3, 3, 3\]"),
            ({"base_dim": "wide"}, "base_dim is 'wide'; a whole number"),
            ({"dim_mult": []}, r"dim_mult is \[\], \[1, 2, 4, 4\] is expected"),
            ({"attn_scales": 1}, "no model that can be built"),
            ({"is_residual": True}, "is missing"),
        ],
        ids=str,
    )
    def test_a_config_of_something_else(self, vae_copy, change, message):
        edit_config(vae_copy, **change)

        with pytest.raises(CheckpointFileError, match=message):
            open_vae(vae_copy)

    def test_a_truncated_file(self, vae_copy):
        weights = vae_copy / WEIGHTS
        weights.write_bytes(weights.read_bytes()[:-100])

        with pytest.raises(CheckpointFileError, match="truncated"):
            open_vae(vae_copy)

    def test_a_missing_file(self, vae_copy):
        (vae_copy / WEIGHTS).unlink()

        with pytest.raises(CheckpointFileError, match=f"neither {WEIGHTS} nor"):
            open_vae(vae_copy)

    def test_a_pickle_in_its_place(self, vae_copy):
        (vae_copy / WEIGHTS).rename(vae_copy / "diffusion_pytorch_model.bin")

        with pytest.raises(CheckpointFileError, match="pickles"):
            open_vae(vae_copy)
