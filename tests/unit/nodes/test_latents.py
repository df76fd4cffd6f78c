"""Nodes for latents and texts: sizes, start and end images, files and pipeline folders."""

import pytest
import torch

from wanstream.nodes import latents
from wanstream.nodes.decode import WanStreamVAEDecode
from wanstream.nodes.runs.decode import encode_here
from wanstream.nodes.text import WanStreamTextEncode
from wanstream.sampling.steps import InsufficientMemoryError
from wanstream.tests.support.host.embedded import embedded_host
from wanstream.tests.support.host.given_nodes import CLIP, UMT5, VAE
from wanstream.wan import open_image_encoder, open_text_encoder, open_vae
from wanstream.wan.latents.space import WAN22, denormalise
from wanstream.wan.vae.memory import too_little

FOLDER = "Wan2.2-I2V-A14B-Diffusers"
VAE_5B = "wan2.2_vae.safetensors"
SIZE = {"width": 64, "height": 32, "frames": 9}
HUGE = {"width": 4096, "height": 4096, "frames": 1025}
TEXT = [[torch.zeros(1, 512, 4096), {"pooled_output": None}]]
DOT = torch.zeros(1, 8, 8, 3)

pytestmark = pytest.mark.usefixtures("opened_test_model")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def test_folders_and_files_are_listed():
    for node, socket, file in (
        (WanStreamTextEncode, "text_encoder", UMT5),
        (latents.WanStreamImageToVideo, "vae", VAE),
    ):
        (combo,) = (one for one in node.define_schema().inputs if one.id == socket)
        assert {FOLDER, file} <= set(combo.as_dict()["options"])
        assert not [name for name in combo.as_dict()["options"] if "tae" in name], "no tiny VAE"


def test_file_encodes_and_decodes_as_the_folder(sample_models):
    positive, negative = WanStreamTextEncode.execute(UMT5, "a cat", "rain").args
    with open_text_encoder(sample_models / "text_encoders" / UMT5) as encoder:
        expected = encoder.encode(["a cat", "rain"], device="cpu")
    assert torch.equal(positive[0][0], expected[0])
    assert torch.equal(negative[0][0], expected[1])
    latent = {"samples": noise(2, 16, 2, 2, 4)}
    images, same = (WanStreamVAEDecode.execute(name, latent).args[0] for name in (VAE, FOLDER))
    assert images.shape == (10, 16, 32, 3)
    assert torch.equal(images, same)


def test_empty_latent_has_the_channels_of_its_model():
    for more, shape in (({}, (2, 16, 3, 4, 8)), ({"model": WAN22.models}, (2, 48, 3, 2, 4))):
        (latent,) = latents.WanStreamEmptyLatent.execute(**SIZE, batch_size=2, **more).args
        assert latent["samples"].shape == shape
        assert not latent["samples"].any()
    size = {"width": 1280, "height": 720, "frames": 121}
    assert latents.WanStreamEmptyLatent.validate_inputs(**size) is True
    assert latents.WanStreamEmptyLatent.validate_inputs(**size, model=None) is True, "linked"
    with pytest.raises(ValueError, match="height is 720, it must be a multiple of 32: use 736"):
        latents.WanStreamEmptyLatent.validate_inputs(**size, model=WAN22.models)


def test_too_little_ram_is_refused_before_anything_is_made(asked_ram):
    message = r"the latent takes 4\.31 GB of RAM, and 2\.00 GB are free"
    with pytest.raises(InsufficientMemoryError, match=message):
        latents.WanStreamEmptyLatent.execute(**HUGE, batch_size=1)
    message = r"the video with the start image takes 206\.36 GB of RAM"
    with pytest.raises(InsufficientMemoryError, match=message):
        latents.WanStreamImageToVideo.execute([], [], VAE, DOT, 1, **HUGE)
    assert asked_ram == [16 * 257 * 512 * 512 * 4, 4096 * 4096 * 1025 * 3 * 4]


def given(vae: str, *images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the values added to the prompts for start and end images."""
    start, *end = images
    made = latents.WanStreamImageToVideo.execute(TEXT, TEXT, vae, start, 1, *end, **SIZE)
    ((_, added),), ((_, negative),), _ = made.args
    assert all(negative[name] is value for name, value in added.items())
    return added


def test_end_image_is_a_given_frame():
    start = torch.zeros(1, 32, 64, 3)
    end = torch.ones(1, 32, 64, 3)
    first = given(VAE, start)
    both = given(VAE, start, end)
    assert torch.equal(first["concat_latent_image"], given(FOLDER, start)["concat_latent_image"])
    assert first["concat_mask"].shape == (1, 1, 3, 4, 8)
    mask = [[0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]
    assert both["concat_mask"][0, :, :, 0, 0].T.tolist() == mask
    changed = (both["concat_latent_image"] - first["concat_latent_image"]).abs()
    assert changed[:, :, 0].max() == 0, "the VAE looks back in time only"
    assert changed[:, :, 2].max() > 0.01


def test_unsuitable_images_are_refused():
    for more, message in (
        ({"end_image": DOT}, "^end_image given with the VAE of Wan2.2 5B"),
        ({"clip_vision": CLIP}, "^clip_vision given .* disconnect it"),
    ):
        with pytest.raises(latents.UnsupportedImageError, match=message):
            latents.WanStreamImageToVideo.execute(TEXT, TEXT, VAE_5B, DOT, 1, **SIZE, **more)
    with pytest.raises(ValueError, match="height is 48, it must be a multiple of 32: use 64"):
        latents.WanStreamImageToVideo.execute(TEXT, TEXT, VAE_5B, DOT, 1, **{**SIZE, "height": 48})


def test_latent_of_5b_begins_with_the_start_image(sample_models):
    image = noise(1, 32, 64, 3)
    made = latents.WanStreamImageToVideo.execute(TEXT, TEXT, VAE_5B, image, 2, **SIZE)
    positive, negative, latent = made.args
    assert positive is negative is TEXT
    samples = latent["samples"]
    mask = latent["noise_mask"]
    assert (samples.shape, mask.shape) == ((2, 48, 3, 2, 4), (1, 1, 3, 2, 4))
    with open_vae(sample_models / "vae" / VAE_5B) as vae:
        encoded = vae.encode(image, device="cpu")
    assert torch.equal(samples[:, :, :1], encoded.expand(2, -1, -1, -1, -1))
    empty = denormalise(torch.zeros(2, 48, 2, 2, 4))
    assert torch.equal(samples[:, :, 1:], empty), "empty where nothing is given"
    assert mask[0, 0, :, 0, 0].tolist() == [0, 1, 1]
    assert (mask == mask[..., :1, :1]).all()


def test_clip_vision_sees_the_first_image(sample_models):
    images = noise(2, 40, 56, 3)
    encoder = open_image_encoder(sample_models / "clip_vision" / CLIP)
    seen = encoder.encode(images[:1], device="cpu").penultimate_hidden_states
    for crop, is_whole in (("none", True), ("center", False)):
        clip = {"clip_vision": CLIP, "clip_crop": crop}
        made = latents.WanStreamImageToVideo.execute(TEXT, TEXT, VAE, images, 1, **clip, **SIZE)
        for side in made.args[:2]:
            found = side[0][1]["clip_vision_output"].penultimate_hidden_states
            assert torch.equal(found, seen) == is_whole
    assert "clip_vision_output" not in TEXT[0][1], "ComfyUI may hold the original in a cache"


def test_start_image_is_encoded_whole_where_it_fits(sample_models):
    video = noise(5, 72, 96, 3)
    path = sample_models / "vae" / VAE
    with open_vae(path) as vae:
        expected = vae.encode(video, device="cpu")
        assert "encoding 96x72 frames" in too_little(vae.encode_needs(video), 0, shared=True)
    assert torch.equal(encode_here(embedded_host, path, video), expected)
