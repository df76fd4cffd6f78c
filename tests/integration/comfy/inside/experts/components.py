"""Runs in ComfyUI's own Python: text encoder, VAEs and given frames against ComfyUI's own nodes."""

import importlib.util
import inspect
from unittest.mock import patch

import comfy.ldm.wan.vae2_2
import folder_paths
import torch
from comfy import sd, utils
from comfy_extras import nodes_wan
from safetensors.torch import save_file

import nodes
from wanstream.nodes.latents import WanStreamImageToVideo
from wanstream.testing import weights
from wanstream.testing.components import save_text_encoder_file, save_vae_file
from wanstream.testing.tokenizer import VOCABULARY
from wanstream.tests.support.wan.quantised_files import FP8_LAYOUTS
from wanstream.wan import open_text_encoder, open_vae
from wanstream.wan.latents import WAN21, WAN22

from ...custom_nodes.clip import TestClip
from ..checks import for_each, require
from ..families import _difference, _normal

# None has "(" or ")", which ComfyUI reads as word weights, and all are clean.
PROMPTS = ["a cat walks through the snow", "", "caf\u00e9 \u65e5\u672c, 100 %!", "words " * 60]
WAN21_VAE = "wan_2.1_vae.safetensors"
WAN22_VAE = "wan2.2_vae.safetensors"
HEIGHT = 32
FRAMES = 17
START, END = (
    torch.rand(count, *size, 3, generator=torch.Generator().manual_seed(count))
    for count, size in ((6, (45, 90)), (4, (70, 33)))
)
"""Images in two sizes, neither equal to the video's."""


def _loaded(path):
    return sd.VAE(sd=utils.load_torch_file(str(path)))


def _check_frames(path, vae, latent):
    """Compare the decoded frames."""
    (theirs,) = nodes.VAEDecode().decode(vae, {"samples": latent})
    with open_vae(path) as vae:
        (ours,) = vae.decode(latent, device="cpu")
    # ComfyUI leaves the limits to the nodes behind.
    theirs = theirs.reshape(ours.shape).clamp(0, 1)
    assert theirs.std() > 0.03
    assert _difference(ours, theirs) <= 1e-5


def _given_frames(vae, text, start, end, width, batch):
    ends = {"end_image": END[:end]} if end else {}
    size = {"width": width, "height": HEIGHT, "frames": FRAMES, "batch_size": batch}
    return WanStreamImageToVideo.execute(text, text, vae, START[:start], **size, **ends).args


@for_each(None, "comfy_quant")
def check_text_encoder(folder, layout):
    require(hasattr(utils, "convert_old_quants"), "quantised text encoders")
    file = folder / f"{layout}.safetensors"
    encoder = weights.make_text_encoder(seed=0, vocabulary=len(VOCABULARY))
    quantised = None if layout is None else FP8_LAYOUTS[layout]
    save_text_encoder_file(encoder, file, dtype=torch.float16, quantised=quantised)
    (clip,) = TestClip().load(file.name, "wan")
    with open_text_encoder(file, compute_dtype=torch.float32) as encoder:
        ours = encoder.encode(PROMPTS, device="cpu")
    for prompt, found in zip(PROMPTS, ours, strict=True):
        ((expected, _),) = nodes.CLIPTextEncode().encode(clip, prompt)[0]
        assert torch.equal(found == 0, expected == 0), "another number of tokens"
        assert _difference(found, expected) <= 1e-5, prompt


def check_wan21_vae(folder):
    """Frames, and conditions from images: one, five, the first and the last, many of both."""
    require('sd["decoder.head.0.gamma"]' in inspect.getsource(sd), "VAE of another width")
    file = folder / WAN21_VAE
    save_vae_file(weights.make_vae(seed=0), file)
    vae = _loaded(file)
    _check_frames(file, vae, _normal(1, 16, 3, 4, 6, seed=0))
    text = [[torch.zeros(1, 512, 4096), {"pooled_output": None}]]
    for start, end in ((1, 0), (5, 0), (1, 1), (6, 4)):
        native = nodes_wan.WanFirstLastFrameToVideo if end else nodes_wan.WanImageToVideo
        given = {"end_image": END[:end]} if end else {}
        size = 48, HEIGHT, FRAMES, 1
        theirs = native.execute(text, [], vae, *size, start_image=START[:start], **given).args
        expected = theirs[0][0][1]
        positive, negative, latent = _given_frames(file.name, text, start, end, 48, 1)
        assert latent["samples"].shape == (1, 16, 5, 4, 6)
        for ((_, found),) in (positive, negative):
            assert torch.equal(found["concat_mask"], expected["concat_mask"])
            images = found["concat_latent_image"], expected["concat_latent_image"]
            assert _difference(*images) <= 1e-5


def check_wan22_vae(folder):
    """ComfyUI supports only the real file's widths, too large for a test: patch in the file's."""
    file = folder / WAN22_VAE
    wide = comfy.ldm.wan.vae2_2.WanVAE
    save_vae_file(weights.make_wan22_vae(seed=0), file)

    def thin(**config):
        return wide(**{**config, "dim": 4, "dec_dim": 8})

    with patch.object(comfy.ldm.wan.vae2_2, "WanVAE", thin):
        vae = _loaded(file)
    _check_frames(file, vae, _normal(1, 48, 3, 2, 3, seed=0))
    text = [[torch.zeros(1, 512, 4096), {}]]
    native = nodes_wan.Wan22ImageToVideoLatent
    for count in (1, 5):
        (expected,) = native.execute(vae, 96, HEIGHT, FRAMES, 2, start_image=START[:count]).args
        positive, negative, latent = _given_frames(file.name, text, count, 0, 96, 2)
        assert positive is negative is text, "what this model is given is in the latent"
        assert _difference(latent["samples"], expected["samples"]) <= 1e-5
        mask = latent["noise_mask"].expand(2, -1, -1, -1, -1)
        assert torch.equal(mask, expected["noise_mask"])


@for_each(WAN21, WAN22)
def check_tiny_vae(folder, space):
    require(importlib.util.find_spec("comfy.taesd.taehv"), "tiny VAE for videos")
    # ComfyUI takes fp32 files with 16 channels for Wan's. It passes on these latents as they are,
    # so they are raw, as `lighttae*` takes them.
    name = "lighttaew2_1" if space is WAN21 else "lighttaew2_2"
    file = folder / f"{name}.safetensors"
    save_file(weights.make_tiny_vae(space, seed=1, widths=weights.TINY_VAE_WIDTHS), file)
    _check_frames(file, _loaded(file), _normal(1, space.channels, 3, 4, 5, seed=0))


def setup(folder):
    for kind in ("text_encoders", "vae"):
        folder_paths.add_model_folder_path(kind, str(folder), is_default=True)
    return folder
