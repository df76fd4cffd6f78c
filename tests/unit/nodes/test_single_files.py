"""Text encoder and VAE nodes: single files, pipeline folders, and an end image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from wanstream.host import io
from wanstream.nodes.decode import WanStreamVAEDecode
from wanstream.nodes.latents import WanStreamImageToVideo
from wanstream.nodes.text import WanStreamTextEncode
from wanstream.schema.refs import WorkersRef
from wanstream.schema.refs.workers import IN_PROCESS
from wanstream.tests.support.embedded import embedded_host
from wanstream.wan.text import open_text_encoder
from wanstream.wan.vae import TilingError
from wanstream.wan.vae.tiles import Tiling
from wanstream.wan.vae.vae import open_vae

FOLDER = "Wan2.2-I2V-A14B-Diffusers"
ENCODER, VAE = "umt5_xxl_fp8_e4m3fn_scaled.safetensors", "wan_2.1_vae.safetensors"

SIZE = {"width": 32, "height": 16, "frames": 9}
TEXT: list[list[Any]] = [[torch.zeros(1, 512, 4096), {"pooled_output": None}]]


pytestmark = pytest.mark.usefixtures("opened_test_model")


@pytest.mark.parametrize(
    ("node", "socket", "file"),
    [
        (WanStreamTextEncode, "text_encoder", ENCODER),
        (WanStreamImageToVideo, "vae", VAE),
        (WanStreamVAEDecode, "vae", VAE),
    ],
)
def test_folders_and_files_are_listed(node: type[io.ComfyNode], socket: str, file: str) -> None:
    (combo,) = (one for one in node.define_schema().inputs if one.id == socket)
    assert {FOLDER, file} <= set(combo.as_dict()["options"])


def test_prompts_are_encoded_with_a_file(sample_models: Path) -> None:
    positive, negative = WanStreamTextEncode.execute(ENCODER, "a cat", "rain").args

    with open_text_encoder(sample_models / "text_encoders" / ENCODER) as encoder:
        expected = encoder.encode(["a cat", "rain"], device="cpu")
    assert torch.equal(positive[0][0], expected[0])
    assert torch.equal(negative[0][0], expected[1])


def test_a_file_decodes_what_the_folder_decodes() -> None:
    latent = {"samples": torch.randn(2, 16, 2, 2, 4, generator=torch.Generator().manual_seed(0))}

    (images,) = WanStreamVAEDecode.execute(VAE, latent).args

    assert images.shape == (10, 16, 32, 3)
    assert torch.equal(images, WanStreamVAEDecode.execute(FOLDER, latent).args[0])


@pytest.mark.slow
def test_tiles_are_decoded_by_this_process_or_by_workers() -> None:
    latent = {"samples": torch.randn(2, 16, 2, 9, 12, generator=torch.Generator().manual_seed(0))}
    with open_vae(embedded_host.files.model_path(VAE, "vae")) as vae:
        expected = vae.decode(latent["samples"], device="cpu", tiling=Tiling.of(64)).flatten(0, 1)

    (alone,) = WanStreamVAEDecode.execute(VAE, latent, tile_size=64).args
    assert torch.equal(alone, expected)
    (whole,) = WanStreamVAEDecode.execute(VAE, latent).args
    assert not torch.equal(alone, whole)

    workers = WorkersRef(count=1, address=IN_PROCESS)
    try:
        (shared,) = WanStreamVAEDecode.execute(VAE, latent, tile_size=64, workers=workers).args
        (by_memory,) = WanStreamVAEDecode.execute(VAE, latent, workers=workers).args
    finally:
        embedded_host.memory.worker_registry.close()
    assert torch.equal(shared, expected)
    assert torch.allclose(by_memory, whole, atol=1e-5), (
        "one worker has the memory for whole pictures"
    )


@pytest.mark.parametrize(("tile_size", "said"), [(56, "give 64 or more"), (100, "multiple of 8")])
def test_tiles_that_make_no_picture_are_refused_before_the_run(tile_size: int, said: str) -> None:
    with pytest.raises(TilingError, match=said):
        WanStreamVAEDecode.validate_inputs(tile_size)
    assert all(WanStreamVAEDecode.validate_inputs(fine) is True for fine in (None, 0, 64, 256))


def given(
    vae: str, start: torch.Tensor, end: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Return the values added to the prompts."""
    positive, negative, _ = WanStreamImageToVideo.execute(
        TEXT, TEXT, vae, start, 1, end, **SIZE
    ).args
    added: dict[str, torch.Tensor] = positive[0][1]
    assert all(negative[0][1][name] is value for name, value in added.items())
    return added


@pytest.mark.slow  # runs whole workflows
def test_a_file_encodes_what_the_folder_encodes() -> None:
    image = torch.rand(1, 16, 32, 3)
    from_file, from_folder = given(VAE, image), given(FOLDER, image)
    assert torch.equal(from_file["concat_latent_image"], from_folder["concat_latent_image"])


@pytest.mark.slow  # runs whole workflows
def test_an_end_image_is_a_given_frame() -> None:
    start, end = torch.zeros(1, 16, 32, 3), torch.ones(1, 16, 32, 3)
    first, both = given(VAE, start), given(VAE, start, end)

    assert first["concat_mask"].shape == (1, 1, 3, 2, 4)
    assert both["concat_mask"].shape == (1, 4, 3, 2, 4)
    assert both["concat_mask"][0, :, :, 0, 0].T.tolist() == [
        [0, 0, 0, 0],
        [1, 1, 1, 1],
        [1, 1, 1, 0],
    ]
    changed = (
        (both["concat_latent_image"] - first["concat_latent_image"]).abs().amax(dim=(0, 1, 3, 4))
    )
    assert changed[0] == 0, "the VAE looks back in time only"
    assert changed[2] > 0.01


def test_more_images_than_frames_are_refused() -> None:
    with pytest.raises(
        ValueError, match="8 start images and 2 end images do not fit into 9 frames"
    ):
        given(VAE, torch.rand(8, 16, 32, 3), torch.rand(2, 16, 32, 3))
