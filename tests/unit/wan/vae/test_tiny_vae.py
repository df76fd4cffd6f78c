"""Tiny VAEs: definition in float64, frame counts, portions, latent scale, refused files."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wanstream.offload.formats import CheckpointFileError
from wanstream.testing.weights import TINY_VAE_WIDTHS, make_tiny_vae
from wanstream.tests.support import tiny_vae_reference
from wanstream.tests.support.tiny_vae_reference import reference_frames
from wanstream.wan.latents import WAN21, WAN22, LatentSpace, normalise
from wanstream.wan.vae import TinyDecoder, open_vae
from wanstream.wan.vae.memory import TensorMemoryTracker
from wanstream.wan.vae.tiles import Tiling, crop
from wanstream.wan.vae.tiny import TinyVaeError, tiny_frames
from wanstream.wan.vae.vae import VaeInputError, open_tiny_vae

SPACES = {"wan21": WAN21, "wan22": WAN22}


@pytest.fixture(params=SPACES)
def space(request: pytest.FixtureRequest) -> LatentSpace:
    return SPACES[request.param]


@pytest.fixture
def tensors(space: LatentSpace) -> dict[str, torch.Tensor]:
    return make_tiny_vae(space, seed=3)


def saved(folder: Path, tensors: Mapping[str, torch.Tensor], name: str = "lighttaew2_1") -> Path:
    path = folder / f"{name}.safetensors"
    save_file(dict(tensors), path)
    return path


def latents_of(
    space: LatentSpace, frames: int, height: int = 5, width: int = 6, videos: int = 1
) -> torch.Tensor:
    shape = (videos, space.channels, frames, height, width)
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0))


def decoder_of(space: LatentSpace, tensors: Mapping[str, torch.Tensor]) -> TinyDecoder:
    decoder = TinyDecoder(space, (16, 12, 8, 8)).requires_grad_(False)
    decoder.load_state_dict(
        {name: tensor for name, tensor in tensors.items() if name.startswith("decoder.")}
    )
    return decoder


class TestDefinition:
    def test_sizes_are_those_of_the_published_files(self) -> None:
        counts = {}
        for name, space in SPACES.items():
            made = make_tiny_vae(space, seed=0, widths=TINY_VAE_WIDTHS)
            assert len(made) == 128
            decoder = sum(
                tensor.numel() for key, tensor in made.items() if key.startswith("decoder.")
            )
            counts[name] = (sum(tensor.numel() for tensor in made.values()), decoder)
        assert counts["wan21"] == (11_315_539, 9_844_611)
        assert counts["wan22"][0] == 11_418_108

    @pytest.mark.parametrize("frames", [1, 2, 5])
    def test_frames_are_those_of_the_definition(
        self, space: LatentSpace, tensors: dict[str, torch.Tensor], tmp_path: Path, frames: int
    ) -> None:
        latents = latents_of(space, frames, videos=2)
        with open_vae(saved(tmp_path, tensors)) as vae:
            videos = vae.decode(latents, device="cpu")
        assert videos.shape == (2, 4 * frames - 3, space.pixels * 5, space.pixels * 6, 3)
        for video, one in zip(videos, latents, strict=True):
            expected = reference_frames(tensors, one)
            assert expected.std() > 0.1, "the comparison needs a picture"
            assert (video - expected).abs().max() <= 1e-5

    def test_with_the_published_widths(self, space: LatentSpace, tmp_path: Path) -> None:
        tensors = make_tiny_vae(space, seed=4, widths=TINY_VAE_WIDTHS)
        latents = latents_of(space, 2, 3, 4)
        with open_vae(saved(tmp_path, tensors)) as vae:
            assert (
                vae.decode(latents, device="cpu")[0] - reference_frames(tensors, latents[0])
            ).abs().max() <= 1e-5

    def test_the_reference_shares_no_code_with_the_decoder(self) -> None:
        imported = [
            line for line in inspect.getsource(tiny_vae_reference).splitlines() if "import" in line
        ]
        assert not [line for line in imported if "wanstream" in line]

    @pytest.mark.parametrize(
        ("dtype", "limit"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)], ids=str
    )
    def test_half_precision(
        self,
        space: LatentSpace,
        tensors: dict[str, torch.Tensor],
        tmp_path: Path,
        dtype: torch.dtype,
        limit: float,
    ) -> None:
        latents = latents_of(space, 2, 4, 4)
        with open_vae(saved(tmp_path, tensors), dtype) as vae:
            error = (
                vae.decode(latents, device="cpu")[0] - reference_frames(tensors, latents[0])
            ).abs()
        assert 0 < error.max() <= limit
        assert error.mean() <= limit / 10


class TestPortions:
    def test_single_frames_equal_a_whole_video_per_layer(
        self, space: LatentSpace, tensors: dict[str, torch.Tensor]
    ) -> None:
        latents = latents_of(space, 4)
        # In float64, where the frame count in one convolution does not change the seventh digit.
        frames = torch.cat(
            [*decoder_of(space, tensors).double()(latents[0].double().movedim(1, 0))]
        )
        assert len(frames) == 13
        assert (frames.movedim(1, -1) - reference_frames(tensors, latents[0])).abs().max() <= 1e-12

    def test_the_state_is_the_only_link_between_frames(
        self, space: LatentSpace, tensors: dict[str, torch.Tensor]
    ) -> None:
        decoder, latents = decoder_of(space, tensors), latents_of(space, 4)
        start = torch.cat([*tiny_frames(decoder, latents[:, :, :2])], 1)
        whole = torch.cat([*tiny_frames(decoder, latents)], 1)
        assert torch.equal(whole[:, : start.shape[1]], start), "causal"
        alone = torch.cat([*tiny_frames(decoder, latents[:, :, 1:2])], 1)
        assert not torch.equal(whole[:, 4:5], alone), "the memory changes a frame"

    def test_a_video_is_streamed_as_it_is_decoded(
        self, space: LatentSpace, tensors: dict[str, torch.Tensor], tmp_path: Path
    ) -> None:
        latents = latents_of(space, 3)
        with open_vae(saved(tmp_path, tensors)) as vae:
            images = vae.decode(latents, device="cpu")[0]
            parts = [*vae.stream(latents, device="cpu")]
        assert [len(part) for part in parts] == [1, 4, 4]
        assert torch.equal(torch.cat(parts), (images * 255).round().to(torch.uint8))

    def test_memory_does_not_grow_with_the_length(
        self, space: LatentSpace, tensors: dict[str, torch.Tensor]
    ) -> None:
        decoder, peaks = decoder_of(space, tensors), []
        for frames in (3, 12):
            latents = latents_of(space, frames, 8, 8)
            tracker = TensorMemoryTracker()
            with tracker:
                for part in tiny_frames(decoder, latents):
                    del part
            peaks.append(tracker.convolution_peak)
        assert peaks[0] == peaks[1]

    def test_the_estimate_is_that_of_a_decode(
        self, space: LatentSpace, tensors: dict[str, torch.Tensor], tmp_path: Path
    ) -> None:
        latents = latents_of(space, 4, 9, 11)
        with open_vae(saved(tmp_path, tensors)) as vae:
            needs = vae.decode_needs(latents)
        decoder, tracker = decoder_of(space, tensors), TensorMemoryTracker()
        with tracker:
            for part in tiny_frames(decoder, latents):
                del part
        assert needs.device_bytes(None) == pytest.approx(tracker.convolution_peak, rel=0.01)

    def test_tiles_are_blended(self, tmp_path: Path) -> None:
        tensors, latents = make_tiny_vae(WAN21, seed=3), latents_of(WAN21, 2, 12, 20)
        tiling = Tiling.of(64)
        with open_vae(saved(tmp_path, tensors)) as vae:
            whole = vae.decode(latents, device="cpu")[0]
            tiled = vae.decode(latents, device="cpu", tiling=tiling)[0]
            first = tiling.tiles(12, 20)[0]
            corner = (vae.decode_tile(crop(latents, first), device="cpu") + 1).movedim(0, -1) / 2
        assert torch.equal(tiled[:, :48, :48], corner[:, :48, :48].clamp(0, 1)), (
            "the first tile, up to its overlap"
        )
        assert 0 < (tiled - whole).abs().mean() < 0.1


class TestScale:
    @pytest.mark.parametrize(
        ("name", "setting", "normalised"),
        [
            ("lighttaew2_1", "by file name", False),
            ("taew2_1", "by file name", True),
            ("Wan2_1_TAEW_fp16", "by file name", True),
            ("lighttaew2_1", "normalised", True),
            ("taew2_1", "raw", False),
            ("my_vae", "raw", False),
            ("my_vae", "normalised", True),
        ],
    )
    @pytest.mark.parametrize("stored", [torch.float16, torch.float32], ids=str)
    def test_the_name_or_the_setting_decides_and_not_the_dtype(
        self, tmp_path: Path, name: str, setting: str, normalised: bool, stored: torch.dtype
    ) -> None:
        tensors = {key: tensor.to(stored) for key, tensor in make_tiny_vae(WAN21, seed=3).items()}
        raw = latents_of(WAN21, 2)
        with open_vae(saved(tmp_path, tensors, name), latent_scale=setting) as vae:
            video = vae.decode(raw, device="cpu")[0]
        expected = reference_frames(tensors, (normalise(raw) if normalised else raw)[0])
        assert (video - expected).abs().max() <= 1e-5

    def test_another_name_needs_the_setting(self, tmp_path: Path) -> None:
        path = saved(tmp_path, make_tiny_vae(WAN21, seed=3), "taehv")
        with pytest.raises(
            TinyVaeError, match=r"taehv\.safetensors .*raw for lighttae\*, normalised for taew\*"
        ):
            open_vae(path)


class TestRefused:
    def test_latents_of_the_other_space(self, tmp_path: Path) -> None:
        with (
            open_vae(saved(tmp_path, make_tiny_vae(WAN21, seed=3), "taew2_1")) as of_16,
            open_vae(saved(tmp_path, make_tiny_vae(WAN22, seed=3), "taew2_2")) as of_48,
        ):
            wanted = (
                r"\[1, 48, 2, 5, 6\], of Wan2\.2 5B, .*taew2_1\.safetensors .* 16 channels: take "
                r"lighttaew2_2"
            )
            with pytest.raises(VaeInputError, match=wanted):
                of_16.decode(latents_of(WAN22, 2), device="cpu")
            with pytest.raises(
                VaeInputError, match=r"\[1, 16, 2, 5, 6\].* 48 channels: take lighttaew2_1"
            ):
                of_48.check_latents(latents_of(WAN21, 2))

    def test_a_tiny_vae_of_another_model(self, tmp_path: Path) -> None:
        tensors = make_tiny_vae(WAN21, seed=3)
        tensors["decoder.1.weight"] = torch.zeros(16, 32, 3, 3)
        with pytest.raises(
            CheckpointFileError, match="is a tiny VAE for 32 latent channels, not of Wan; use"
        ):
            open_vae(saved(tmp_path, tensors))

    def test_another_file(self, sample_models: Path) -> None:
        for name in (
            "vae/wan_2.1_vae.safetensors",
            "loras/wan2.2_i2v_lightx2v_4steps_lora_v1_low_noise.safetensors",
        ):
            with pytest.raises(
                CheckpointFileError, match=r"is not a tiny VAE of Wan: it has \d+ tensors \(first: "
            ):
                open_tiny_vae(sample_models / name)

    @pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
    def test_a_truncated_file(self, tmp_path: Path, share: float) -> None:
        path = saved(tmp_path, make_tiny_vae(WAN21, seed=3))
        whole = path.read_bytes()
        path.write_bytes(whole[: int(share * len(whole))])
        for opener in (open_vae, open_tiny_vae):
            with pytest.raises(CheckpointFileError, match=path.name):
                opener(path)

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            (
                "decoder.22.weight",
                torch.zeros(12, 8, 3, 3),
                r"decoder.22.weight is \[12, 8, 3, 3\]; .* \[3, 8, 3, 3\]",
            ),
            (
                "decoder.8.weight",
                torch.zeros(12),
                r"decoder.8.weight is \[12\]; \[out, in, 3, 3\] is expected",
            ),
            ("decoder.8.weight", None, "decoder.8.weight is missing"),
            ("decoder.9.conv.2.bias", None, r"decoder.9.conv.2.bias \[12\] is missing"),
            ("decoder.16.conv.0.weight", torch.zeros(8, 8, 3, 3), "decoder.16.conv.0.weight is"),
            ("decoder.23.weight", torch.zeros(1), "decoder.23.weight does not belong to the model"),
            ("decoder.22.bias", torch.zeros(3, dtype=torch.int8), "decoder.22.bias is torch.int8"),
        ],
    )
    def test_a_damaged_file(
        self, tmp_path: Path, key: str, value: torch.Tensor | None, message: str
    ) -> None:
        tensors = make_tiny_vae(WAN21, seed=3)
        tensors.pop(key, None)
        path = saved(tmp_path, tensors if value is None else {**tensors, key: value})
        with pytest.raises(CheckpointFileError, match=message):
            open_tiny_vae(path)

    def test_encoding(self, tmp_path: Path) -> None:
        video = torch.zeros(1, 16, 16, 3)
        with open_vae(saved(tmp_path, make_tiny_vae(WAN21, seed=3))) as vae:
            for use in (vae.encode_needs, lambda frames: vae.encode(frames, device="cpu")):
                with pytest.raises(
                    VaeInputError, match=r"only decodes: take wan_2\.1_vae\.safetensors to encode"
                ):
                    use(video)

    def test_fp16_with_the_full_vae(self, sample_models: Path) -> None:
        with pytest.raises(VaeInputError, match="set compute_dtype to fp32 or bf16"):
            open_vae(sample_models / "vae" / "wan_2.1_vae.safetensors", torch.float16)
