"""VAE parameter names in ComfyUI's single files."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

from wanstream.wan.vae.weights import FAMILIES, VaeFamily

WAN21, WAN22 = FAMILIES

# From Wan-AI/Wan2.2-TI2V-5B-Diffusers, as diffusers has no single-file converter for it.
WAN22_CONFIG = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}


def test_names_of_wan21_are_the_inverse_of_diffusers_converter() -> None:
    with torch.device("meta"):
        names = list(AutoencoderKLWan().state_dict())

    there_and_back = convert_wan_vae_to_diffusers({WAN21.native_name(name): name for name in names})

    assert there_and_back == {name: name for name in names}


def test_no_two_names_of_wan22_are_the_same() -> None:
    with torch.device("meta"):
        names = list(AutoencoderKLWan(**WAN22_CONFIG).state_dict())

    assert len({WAN22.native_name(name) for name in names}) == len(names)


@pytest.mark.parametrize(
    ("name", "native"),
    [
        (
            "encoder.down_blocks.1.resnets.0.conv_shortcut.bias",
            "encoder.downsamples.1.downsamples.0.shortcut.bias",
        ),
        (
            "encoder.down_blocks.2.downsampler.time_conv.weight",
            "encoder.downsamples.2.downsamples.2.time_conv.weight",
        ),
        (
            "decoder.up_blocks.0.resnets.2.conv2.weight",
            "decoder.upsamples.0.upsamples.2.residual.6.weight",
        ),
        (
            "decoder.up_blocks.2.upsampler.resample.1.bias",
            "decoder.upsamples.2.upsamples.3.resample.1.bias",
        ),
        ("decoder.mid_block.attentions.0.to_qkv.weight", "decoder.middle.1.to_qkv.weight"),
    ],
)
def test_names_of_wan22_that_are_easy_to_get_wrong(name: str, native: str) -> None:
    assert WAN22.native_name(name) == native


@pytest.mark.parametrize(
    "name", ["blocks.0.norm3.weight", "decoder.up_blocks.x.resnets.0.norm1.gamma", ""]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_name_outside_the_vae_is_refused(family: VaeFamily, name: str) -> None:
    with pytest.raises(ValueError, match="not a parameter"):
        family.native_name(name)
