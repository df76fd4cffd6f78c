"""Tiny VAEs: definition in float64, frame counts, portions, latent scale, refused files."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from wanstream.offload.formats import CheckpointFileError
from wanstream.testing.weights import TINY_VAE_WIDTHS, make_tiny_vae
from wanstream.tests.support.offload.edited_files import rewrite, zeros
from wanstream.tests.support.wan.tiny_vae_reference import reference_frames
from wanstream.wan.latents import WAN21, WAN22, LatentSpace, normalise
from wanstream.wan.vae import Tiling, TinyDecoder, crop, open_vae
from wanstream.wan.vae.memory import TensorMemoryTracker
from wanstream.wan.vae.tiny import TinyVaeError, tiny_frames
from wanstream.wan.vae.vae import VaeInputError, open_tiny_vae


@pytest.fixture(params=[WAN21, WAN22], ids=["wan21", "wan22"])
def space(request):
    return request.param


@pytest.fixture
def tensors(space):
    return make_tiny_vae(space, seed=3)


@pytest.fixture
def file(tensors, tmp_path):
    return saved(tmp_path, tensors)


@pytest.fixture
def wan21_file(tmp_path):
    return saved(tmp_path, make_tiny_vae(WAN21, seed=3))


def saved(folder, tensors, name="lighttaew2_1"):
    path = folder / f"{name}.safetensors"
    save_file(dict(tensors), path)
    return path


def latents_of(space: LatentSpace, frames: int, *size: int, videos: int = 1) -> torch.Tensor:
    shape = (videos, space.channels, frames, *(size or (5, 6)))
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0))


def decoder_of(space, tensors):
    decoder = TinyDecoder(space, (16, 12, 8, 8)).requires_grad_(False)
    decoder.load_state_dict({k: v for k, v in tensors.items() if k.startswith("decoder.")})
    return decoder


def peak_of(decoder: TinyDecoder, latents: torch.Tensor) -> int:
    with TensorMemoryTracker() as tracker:
        for part in tiny_frames(decoder, latents):
            del part
    return tracker.convolution_peak


def test_sizes_are_those_of_the_published_files():
    counts = []
    for space in (WAN21, WAN22):
        made = make_tiny_vae(space, seed=0, widths=TINY_VAE_WIDTHS)
        assert len(made) == 128
        counts.append(sum(tensor.numel() for tensor in made.values()))
    assert counts == [11_315_539, 11_418_108]


@pytest.mark.parametrize("frames", [1, 3])
def test_frames_are_those_of_the_definition(space, tensors, file, frames):
    latents = latents_of(space, frames, videos=2)
    with open_vae(file) as vae:
        videos = vae.decode(latents, device="cpu")
        shown = [*vae.stream(latents[:1], device="cpu")]
    assert videos.shape == (2, 4 * frames - 3, space.pixels * 5, space.pixels * 6, 3)
    for video, one in zip(videos, latents, strict=True):
        expected = reference_frames(tensors, one)
        assert expected.std() > 0.1, "the comparison needs a picture"
        assert (video - expected).abs().max() <= 1e-5
    assert [len(part) for part in shown] == [1, *[4] * (frames - 1)]
    assert torch.equal(torch.cat(shown), (videos[0] * 255).round().to(torch.uint8))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_half_precision_is_close(wan21_file, dtype, limit):
    tensors = make_tiny_vae(WAN21, seed=3)
    latents = latents_of(WAN21, 2, 4, 4)
    with open_vae(wan21_file, dtype) as vae:
        error = vae.decode(latents, device="cpu")[0] - reference_frames(tensors, latents[0])
    assert 0 < error.abs().max() <= limit
    assert error.abs().mean() <= limit / 10


def test_state_is_the_only_link_between_frames(space, tensors):
    decoder = decoder_of(space, tensors)
    latents = latents_of(space, 4)
    start, whole, alone = (
        torch.cat([*tiny_frames(decoder, latents[:, :, part])], 1)
        for part in (slice(2), slice(None), slice(1, 2))
    )
    assert torch.equal(whole[:, : start.shape[1]], start), "causal"
    assert not torch.equal(whole[:, 4:5], alone), "the memory changes a frame"
    # In float64, where the frame count in one convolution does not change the seventh digit.
    frames = torch.cat([*decoder.double()(latents[0].double().movedim(1, 0))])
    assert len(frames) == 13
    assert (frames.movedim(1, -1) - reference_frames(tensors, latents[0])).abs().max() <= 1e-12


def test_memory_is_the_estimate_for_any_length(space, tensors, file):
    decoder = decoder_of(space, tensors)
    peaks = [peak_of(decoder, latents_of(space, frames, 9, 11)) for frames in (3, 5)]
    assert peaks[0] == peaks[1]
    needs = open_vae(file).decode_needs(latents_of(space, 5, 9, 11))
    assert needs.device_bytes(None) == pytest.approx(peaks[0], rel=0.01)


def test_tiles_are_blended(wan21_file):
    latents = latents_of(WAN21, 2, 12, 20)
    tiling = Tiling.of(64)
    with open_vae(wan21_file) as vae:
        whole = vae.decode(latents, device="cpu")[0]
        tiled = vae.decode(latents, device="cpu", tiling=tiling)[0]
        first = crop(latents, tiling.tiles(12, 20)[0])
        corner = (vae.decode_tile(first, device="cpu") + 1).movedim(0, -1) / 2
    # The first tile, up to its overlap.
    assert torch.equal(tiled[:, :48, :48], corner[:, :48, :48].clamp(0, 1))
    assert 0 < (tiled - whole).abs().mean() < 0.1


@pytest.mark.parametrize(
    ("name", "setting", "normalised", "stored"),
    [
        ("lighttaew2_1", "by file name", False, torch.float16),
        ("Wan2_1_TAEW_fp16", "by file name", True, torch.float32),
        ("lighttaew2_1", "normalised", True, torch.float16),
        ("my_vae", "raw", False, torch.float32),
    ],
)
def test_scale_follows_the_name_or_the_setting(tmp_path, name, setting, normalised, stored):
    tensors = {key: tensor.to(stored) for key, tensor in make_tiny_vae(WAN21, seed=3).items()}
    raw = latents_of(WAN21, 2)
    with open_vae(saved(tmp_path, tensors, name), latent_scale=setting) as vae:
        video = vae.decode(raw, device="cpu")[0]
    expected = reference_frames(tensors, (normalise(raw) if normalised else raw)[0])
    assert (video - expected).abs().max() <= 1e-5


def test_name_without_a_scale_is_refused(wan21_file):
    path = wan21_file.rename(wan21_file.with_stem("taehv"))
    said = r"taehv\.safetensors .*raw for lighttae\*, normalised for taew\*"
    with pytest.raises(TinyVaeError, match=said):
        open_vae(path)


def test_latents_of_the_other_space_are_refused(file, space):
    other = WAN22 if space == WAN21 else WAN21
    take = "lighttaew2_2" if space == WAN21 else "lighttaew2_1"
    said = rf"\[1, {other.channels}, 2, 5, 6\], of {other.models}, .* {space.channels} "
    with pytest.raises(VaeInputError, match=f"{said}channels: take {take}"):
        open_vae(file).decode(latents_of(other, 2), device="cpu")


@pytest.mark.parametrize(
    "name", ["vae/wan_2.1_vae", "loras/wan2.2_i2v_lightx2v_4steps_lora_v1_low_noise"]
)
def test_another_file_is_refused(sample_models, name):
    said = r"is not a tiny VAE of Wan: it has \d+ tensors \(first: "
    with pytest.raises(CheckpointFileError, match=said):
        open_tiny_vae(sample_models / f"{name}.safetensors")


def test_truncated_file_is_refused(wan21_file):
    wan21_file.write_bytes(wan21_file.read_bytes()[:-1])
    for opener in (open_vae, open_tiny_vae):
        with pytest.raises(CheckpointFileError, match=f"{wan21_file.name}: is truncated"):
            opener(wan21_file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder.1.weight": zeros(16, 32, 3, 3)}, "tiny VAE for 32 latent channels, not of"),
        ({"decoder.22.weight": zeros(12, 8, 3, 3)}, r"\[12, 8, 3, 3\]; .* \[3, 8, 3, 3\]"),
        ({"decoder.8.weight": zeros(12)}, r"\[12\]; \[out, in, 3, 3\] is expected"),
        ({"decoder.8.weight": None}, "decoder.8.weight is missing"),
        ({"decoder.23.weight": zeros(1)}, "decoder.23.weight does not belong to the model"),
        ({"decoder.22.bias": zeros(3, dtype=torch.int8)}, "decoder.22.bias is torch.int8"),
    ],
)
def test_wrong_tensors_are_refused(wan21_file, change, message):
    with pytest.raises(CheckpointFileError, match=message):
        open_vae(rewrite(wan21_file, wan21_file, change))


def test_encoding_is_refused(wan21_file):
    vae = open_vae(wan21_file)
    said = r"only decodes: take wan_2\.1_vae\.safetensors to encode"
    for use in (vae.encode_needs, lambda frames: vae.encode(frames, device="cpu")):
        with pytest.raises(VaeInputError, match=said):
            use(torch.zeros(1, 16, 16, 3))


def test_fp16_with_the_full_vae_is_refused(sample_models):
    with pytest.raises(VaeInputError, match="set compute_dtype to fp32 or bf16"):
        open_vae(sample_models / "vae" / "wan_2.1_vae.safetensors", torch.float16)
