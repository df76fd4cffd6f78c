"""LoRA changes that fit an expert, are left out with a note, or are refused with both shapes."""

import logging
from dataclasses import replace

import pytest
import torch

from wanstream.tests.support.wan.opened_experts import wan_config
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.lora.file import open_lora
from wanstream.wan.lora.fit import fit_lora

from .test_file import Q, differences, layer, products

PATCHES = "patch_embedding"


@pytest.fixture
def config():
    """Return the tiny experts' config."""
    return wan_config(heads=2, layers=4, ffn_dim=512)


def test_image_branch_is_left_out_where_there_is_none(lora_file, lightning, config, caplog):
    image = layer(name="diffusion_model.blocks.0.cross_attn.k_img")
    bias = {"diffusion_model.img_emb.proj.4.diff_b": torch.ones(256)}
    lora = open_lora(lora_file(lightning() | image | bias))
    assert len(products(lora)) == 4 * 10 + 1
    with caplog.at_level(logging.INFO, logger="wanstream.lora"):
        left = fit_lora(lora, config)
    assert len(products(left)) == 4 * 10
    assert not any("image" in name or "add_" in name for name in left.changes)
    assert "2 parameters of an image branch (Wan2.1 I2V) are not used" in caplog.text
    assert ([caplog.text.count(note) for note in left.notes], left.warnings) == ([1], ())
    alone = open_lora(lora_file(image))
    assert products(fit_lora(alone, replace(config, in_channels=36, image_dim=80)))
    with pytest.raises(CheckpointError, match=r"changes the image branch of Wan2\.1 I2V alone"):
        fit_lora(alone, config)


def test_tiny_lora_fits(lora_file, config):
    lora = open_lora(lora_file())
    assert fit_lora(lora, config) is lora
    convolution = {
        f"{PATCHES}.lora_down.weight": torch.ones(4, 16, 1, 2, 2),
        f"{PATCHES}.lora_up.weight": torch.ones(256, 4, 1, 1, 1),
    }
    assert "patch_embedding.weight" in products(fit_lora(open_lora(lora_file(convolution)), config))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            layer(1536, 1536),
            rf"{Q}.lora_up.weight and {Q}.lora_down.weight change a weight of \[1536, 1536\]; "
            r"blocks.1.attn1.to_q.weight \(natively blocks.1.self_attn.q.weight\) "
            r"of the expert is \[256, 256\]: this LoRA is for Wan2.1 1.3B",
        ),
        (layer(5120, 5120), r"\[5120, 5120\].*this LoRA is for a 14B model"),
        (layer(256, 255), r"\[256, 255\]; .* \[256, 256\]$"),
        ({f"{Q}.diff_b": torch.ones(3072)}, r"\[3072\]; .* is \[256\]: this LoRA is for Wan2.2 5B"),
        ({"head.modulation.diff": torch.ones(2, 256)}, r"\[2, 256\]; .* is \[1, 2, 256\]$"),
        (
            layer(name="diffusion_model.blocks.4.self_attn.q"),
            r"changes blocks.4.attn1.to_q.weight .*; the expert has 4 blocks, from 0 on",
        ),
        (layer(255, 36 * 4, name=PATCHES), r"\[255, 144\]; .* of the expert is \[256, 64\]"),
        (layer(256, 48 * 4, name=PATCHES), r"\[256, 192\]; .* of the expert is \[256, 64\]"),
    ],
)
def test_other_shapes_are_refused(lora_file, config, tensors, message):
    with pytest.raises(CheckpointError, match=message):
        fit_lora(open_lora(lora_file(tensors)), config)


@pytest.mark.parametrize("channels", [16, 36])
@pytest.mark.parametrize("kind", ["product", "difference", "both"])
def test_latents_of_the_other_family_are_left_out(lora_file, config, caplog, channels, kind):
    """A text-to-video LoRA works with image to video, as in ComfyUI."""
    other = 52 - channels
    tensors = layer()
    if kind != "difference":
        tensors |= layer(256, other * 4, name=PATCHES)
    if kind != "product":
        tensors[f"{PATCHES}.diff"] = torch.ones(256, other, 1, 2, 2)
    tensors[f"{PATCHES}.diff_b"] = torch.ones(256)
    lora = open_lora(lora_file(tensors))
    caplog.set_level(logging.INFO, logger="wanstream.lora")
    found = fit_lora(lora, replace(config, in_channels=channels))
    assert set(products(found)) == {"blocks.1.attn1.to_q.weight"}
    assert set(differences(found)) == {"patch_embedding.bias"}
    [record] = caplog.records
    assert "its change of patch_embedding.weight is not used" in record.getMessage()
    assert fit_lora(lora, replace(config, in_channels=other)) is lora
    assert len(caplog.records) == 1
