"""Nodes for servers that run tiny native models: checkpoints, conditioning and latents.

It writes the checkpoints before the page requests model names, and lets the pack stream models of
any size.
"""

import pathlib
import sys

import folder_paths
import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from inside.families import FAMILIES

NAMES = ("wan_t2v", "flux")
FOLDER = pathlib.Path(folder_paths.get_folder_paths("diffusion_models")[0])


def allow_small_models():
    """Lower the thresholds of the pack, which this server may load under any name."""
    for name, module in list(sys.modules.items()):
        if name.endswith("host.comfy.native.network.block_lists"):
            module.blocks_to_stream.__kwdefaults__.update(
                smallest_block=30_000, smallest_model=1_000
            )


class TestFamily:
    """CONDITIONING and LATENT for a family's tiny model."""

    RETURN_TYPES = ("CONDITIONING", "CONDITIONING", "LATENT")
    FUNCTION = "make"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        allow_small_models()
        return {"required": {"family": (list(NAMES), {})}}

    def make(self, family):
        chosen = FAMILIES[family]
        positive, negative = chosen.conditioning()
        return positive, negative, {"samples": chosen.latent()}


class TestDigest:
    """A latent's bytes as text."""

    RETURN_TYPES = ()
    FUNCTION = "digest"
    OUTPUT_NODE = True
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"latent": ("LATENT",)}}

    def digest(self, latent):
        return {"ui": {"latent": [latent["samples"].contiguous().view(torch.uint8).sum().item()]}}


FOLDER.mkdir(parents=True, exist_ok=True)
for _name in NAMES:
    FAMILIES[_name].write(FOLDER / f"tiny_{_name}.safetensors", "fp32")

NODE_CLASS_MAPPINGS = {"TestFamily": TestFamily, "TestDigest": TestDigest}
