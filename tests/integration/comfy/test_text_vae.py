"""Text encoder, VAE and given frames against ComfyUI's own loaders and nodes, on the same files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from wanstream.host.embedded.files import Folders
from wanstream.nodes.latents import WanStreamImageToVideo
from wanstream.testing.components import save_text_encoder_file, save_vae_file
from wanstream.testing.tokenizer import VOCABULARY
from wanstream.testing.weights import make_text_encoder, make_vae, make_wan22_vae
from wanstream.tests.support.embedded import embedded_host
from wanstream.tests.support.quantised_files import FP8_LAYOUTS
from wanstream.wan.text import open_text_encoder
from wanstream.wan.vae import open_vae

pytestmark = pytest.mark.comfy

# None has "(" or ")", which ComfyUI reads as word weights, and all are clean.
PROMPTS = ["a cat walks through the snow", "", "caf\u00e9 \u65e5\u672c, 100 %!", "words " * 60]
ENCODERS = {
    "fp16": None,
    "fp8": "scaled_fp8",
    "fp8, comfy_quant": "comfy_quant",
    "fp8, metadata": "metadata",
}

WAN22_VAE = "wan2.2_vae.safetensors"
WIDTH, HEIGHT, FRAMES = 48, 32, 17
WAN22_WIDTH = 96
GIVEN = {
    "one image": (1, 0),
    "five images": (5, 0),
    "first and last": (1, 1),
    "many of both": (6, 4),
}
"""Start image count and end image count."""

ASK_TEXT = """
import clip_node
from safetensors.torch import save_file

folder_paths.add_model_folder_path("text_encoders", arguments[0], is_default=True)
found = {}
for name in arguments[1]:
    (clip,) = clip_node.TestClip().load(name + ".safetensors", "wan")
    for prompt in arguments[2]:
        ((embedding, _),) = nodes.CLIPTextEncode().encode(clip, prompt)[0]
        found[f"{name} {prompt}"] = embedding.contiguous()
save_file(found, arguments[3])
answer = None
"""

ASK_VAE = """
import comfy.sd, comfy.utils
from comfy_extras import nodes_wan
from safetensors.torch import load_file, save_file

images, found = load_file(arguments[1]), {}
vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(arguments[0]))
found["decoded"] = nodes.VAEDecode().decode(vae, {"samples": images.pop("latent")})[0].contiguous()
for name, (start, end) in arguments[2].items():
    node = nodes_wan.WanFirstLastFrameToVideo if end else nodes_wan.WanImageToVideo
    given = {"end_image": images["end"][:end]} if end else {}
    positive, _, _ = node.execute(
        [[images["start"], {}]],
        [],
        vae,
        *arguments[3],
        1,
        start_image=images["start"][:start],
        **given,
    ).args
    found[f"{name} image"] = positive[0][1]["concat_latent_image"].contiguous()
    found[f"{name} mask"] = positive[0][1]["concat_mask"].contiguous()
save_file(found, arguments[4])
answer = None
"""

# ComfyUI supports only the real file's widths, too large for a test: patch in the test file's.
ASK_WAN22_VAE = """
import comfy.ldm.wan.vae2_2, comfy.sd, comfy.utils
from comfy_extras import nodes_wan
from safetensors.torch import load_file, save_file

wide = comfy.ldm.wan.vae2_2.WanVAE
comfy.ldm.wan.vae2_2.WanVAE = lambda **config: wide(**{**config, "dim": 4, "dec_dim": 8})
images, found = load_file(arguments[1]), {}
vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(arguments[0]))
found["decoded"] = nodes.VAEDecode().decode(
    vae, {"samples": images["wan22 latent"]}
)[0].contiguous()
for count in arguments[2]:
    (latent,) = nodes_wan.Wan22ImageToVideoLatent.execute(
        vae, *arguments[3], 2, start_image=images["start"][:count]
    ).args
    found[f"{count} samples"] = latent["samples"].contiguous()
    found[f"{count} mask"] = latent["noise_mask"].contiguous()
save_file(found, arguments[4])
answer = None
"""


def skip_without(comfyui: Any, file: str, feature: str) -> None:
    """Skip the test if this ComfyUI's source does not contain the feature."""
    if feature not in (comfyui.path / "comfy" / file).read_text(encoding="utf-8"):
        pytest.skip(f"AN OLDER COMFYUI: {file} has no {feature}")


def rel_l2(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text_encoders")
    encoder = make_text_encoder(seed=0, vocabulary=len(VOCABULARY))
    for name, fp8 in ENCODERS.items():
        layout = None if fp8 is None else FP8_LAYOUTS[fp8]
        save_text_encoder_file(
            encoder, folder / f"{name}.safetensors", dtype=torch.float16, quantised=layout
        )
    return folder


@pytest.fixture(scope="module")
def their_text(
    in_comfyui: Callable[..., None], comfyui: Any, files: Path
) -> dict[str, torch.Tensor]:
    """ComfyUI's embeddings by file and prompt."""
    skip_without(comfyui, "utils.py", "convert_old_quants")
    in_comfyui(ASK_TEXT, str(files), list(ENCODERS), PROMPTS, str(files / "found"))
    return load_file(files / "found")


@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings(files: Path, their_text: dict[str, torch.Tensor], name: str) -> None:
    with open_text_encoder(files / f"{name}.safetensors", compute_dtype=torch.float32) as encoder:
        ours = encoder.encode(PROMPTS, device="cpu")
    for prompt, found in zip(PROMPTS, ours, strict=True):
        expected = their_text[f"{name} {prompt}"]
        assert torch.equal(found == 0, expected == 0), "another number of tokens"
        assert rel_l2(found, expected) <= 1e-5, prompt


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    save_vae_file(make_vae(seed=0), models / "vae" / "wan_2.1_vae.safetensors")
    save_vae_file(make_wan22_vae(seed=0), models / "vae" / WAN22_VAE)
    return models


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    """Images in two sizes, neither equal to the video's, and a latent."""
    generator = torch.Generator().manual_seed(0)
    return {
        "start": torch.rand(6, 45, 90, 3, generator=generator),
        "end": torch.rand(4, 70, 33, 3, generator=generator),
        "latent": torch.randn(1, 16, 3, 4, 6, generator=generator),
        "wan22 latent": torch.randn(1, 48, 3, 2, 3, generator=generator),
    }


@pytest.fixture(scope="module")
def their_frames(
    in_comfyui: Callable[..., None], comfyui: Any, models: Path, inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    skip_without(comfyui, "sd.py", 'sd["decoder.head.0.gamma"]')
    vae, given, found = (
        models / name for name in ("vae/wan_2.1_vae.safetensors", "given", "found")
    )
    save_file(inputs, given)
    in_comfyui(ASK_VAE, str(vae), str(given), GIVEN, [WIDTH, HEIGHT, FRAMES], str(found))
    return load_file(found)


def test_the_file_decodes_to_the_same_frames(
    models: Path, inputs: dict[str, torch.Tensor], their_frames: dict[str, torch.Tensor]
) -> None:
    with open_vae(models / "vae" / "wan_2.1_vae.safetensors") as vae:
        (frames,) = vae.decode(inputs["latent"], device="cpu")
    assert rel_l2(frames, their_frames["decoded"]) <= 1e-5


@pytest.mark.parametrize("name", GIVEN)
def test_given_frames(
    models: Path, inputs: dict[str, torch.Tensor], their_frames: dict[str, torch.Tensor], name: str
) -> None:
    start, end = GIVEN[name]
    conditioning: list[list[Any]] = [[torch.zeros(1, 512, 4096), {"pooled_output": None}]]
    with embedded_host.opened(
        Folders(models=models, output=models, input=models), device=torch.device("cpu")
    ):
        positive, negative, latent = WanStreamImageToVideo.execute(
            conditioning,
            conditioning,
            "wan_2.1_vae.safetensors",
            inputs["start"][:start],
            batch_size=1,
            end_image=inputs["end"][:end] if end else None,
            width=WIDTH,
            height=HEIGHT,
            frames=FRAMES,
        ).args
    ((_, given),) = positive
    assert torch.equal(given["concat_mask"], their_frames[f"{name} mask"])
    assert rel_l2(given["concat_latent_image"], their_frames[f"{name} image"]) <= 1e-5
    assert torch.equal(negative[0][1]["concat_mask"], given["concat_mask"])
    assert latent["samples"].shape == (1, 16, 5, 4, 6)


@pytest.fixture(scope="module")
def their_wan22(
    in_comfyui: Callable[..., None], comfyui: Any, models: Path, inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    given, found = models / "wan22 given", models / "wan22 found"
    save_file(inputs, given)
    in_comfyui(
        ASK_WAN22_VAE,
        str(models / "vae" / WAN22_VAE),
        str(given),
        [1, 5],
        [WAN22_WIDTH, HEIGHT, FRAMES],
        str(found),
    )
    return load_file(found)


def test_the_vae_of_wan22_decodes_to_the_same_frames(
    models: Path, inputs: dict[str, torch.Tensor], their_wan22: dict[str, torch.Tensor]
) -> None:
    with open_vae(models / "vae" / WAN22_VAE) as vae:
        (frames,) = vae.decode(inputs["wan22 latent"], device="cpu")
    assert rel_l2(frames, their_wan22["decoded"]) <= 1e-5


@pytest.mark.parametrize("count", [1, 5])
def test_a_latent_of_wan22_that_begins_with_images(
    models: Path, inputs: dict[str, torch.Tensor], their_wan22: dict[str, torch.Tensor], count: int
) -> None:
    prompt: list[list[Any]] = [[torch.zeros(1, 512, 4096), {}]]
    size = {"width": WAN22_WIDTH, "height": HEIGHT, "frames": FRAMES}
    with embedded_host.opened(
        Folders(models=models, output=models, input=models), device=torch.device("cpu")
    ):
        positive, negative, latent = WanStreamImageToVideo.execute(
            prompt, prompt, WAN22_VAE, inputs["start"][:count], batch_size=2, **size
        ).args
    assert positive is negative is prompt, "what this model is given is in the latent"
    assert rel_l2(latent["samples"], their_wan22[f"{count} samples"]) <= 1e-5
    assert torch.equal(latent["noise_mask"].expand(2, -1, -1, -1, -1), their_wan22[f"{count} mask"])
