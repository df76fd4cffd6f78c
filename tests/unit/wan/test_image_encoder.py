"""CLIP vision encoder: transformers' values, ComfyUI's pixels, both file forms, refused files."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import CLIPImageProcessor

from wanstream.testing.model import make_image_encoder, save_image_encoder
from wanstream.testing.quantised import quantise
from wanstream.tests.support.offload.edited_files import Edits, Tensors, rewrite, zeros
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.image_encoder import PIXEL_MEAN, PIXEL_STD, clip_pixels, open_image_encoder

SIZE = 28
"""Side of the tiny encoder's images in pixels: four patches in all."""
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def encoder():
    return make_image_encoder(seed=1, image_size=SIZE)


@pytest.fixture(scope="module")
def file(encoder, tmp_path_factory):
    path = tmp_path_factory.mktemp("clip") / "clip_vision_h.safetensors"
    save_image_encoder(encoder, path, dtype=torch.float32)
    return path


@pytest.fixture(scope="module")
def folder(encoder, tmp_path_factory):
    path = tmp_path_factory.mktemp("pipeline")
    encoder.save_pretrained(path / "image_encoder")
    return path


@pytest.fixture
def changed(file, tmp_path):
    """`changed(change)`: a changed copy."""
    return lambda change: rewrite(file, tmp_path / "changed.safetensors", change)


@pytest.fixture(scope="module")
def expected(file):
    """Hidden states of `file`."""
    return seen(file)


def seen(path, *, crop=False):
    """Return the hidden states of two images."""
    images = torch.rand(2, 40, 56, 3, generator=torch.Generator().manual_seed(0))
    encoded = open_image_encoder(path).encode(images, device="cpu", crop=crop)
    return encoded.penultimate_hidden_states


@pytest.mark.parametrize("crop", [False, True])
def test_equals_transformers(crop, encoder, file, folder):
    """Bit-equal from a file, a pipeline folder and an `image_encoder` folder."""
    images = torch.rand(2, 40, 56, 3, generator=torch.Generator().manual_seed(0))
    pixels = clip_pixels(images, SIZE, crop=crop)
    with torch.no_grad():
        expected = encoder(pixel_values=pixels, output_hidden_states=True).hidden_states[-2]
    assert expected.shape == (2, 5, 1280)
    for path in (file, folder, folder / "image_encoder"):
        assert torch.equal(seen(path, crop=crop), expected)


def test_inference_mode_does_not_affect_later_calls(file):
    opened = open_image_encoder(file)
    images = torch.rand(1, SIZE, SIZE, 3)
    with torch.inference_mode():
        first = opened.encode(images, device="cpu").penultimate_hidden_states
    assert torch.equal(first, opened.encode(images, device="cpu").penultimate_hidden_states)


def test_fp16_files_compute_in_fp32(encoder, expected, tmp_path):
    save_image_encoder(encoder, tmp_path / "half.safetensors", dtype=torch.float16)
    half = seen(tmp_path / "half.safetensors")
    assert half.dtype == torch.float32
    assert 0 < (half - expected).norm() / expected.norm() < 2e-3


EXTRA = [
    *("visual_projection.weight", "logit_scale", "text_model.encoder.layers.0.mlp.fc1.weight"),
    *("text_projection.weight", "epoch"),
]
"""File tensors next to the vision model's."""


@pytest.mark.parametrize("prefix", ["vision_model.", "", "_orig_mod.vision_model."])
def test_prefixes_and_other_tensors_are_passed_over(prefix, expected, changed):
    def rename(tensors: Tensors) -> Edits:
        named = {prefix + k.removeprefix("vision_model."): v for k, v in tensors.items()}
        extra = {key: zeros(2, 2) for key in (*EXTRA, f"{prefix}embeddings.position_ids")}
        return {**dict.fromkeys(tensors), **named, **extra}

    path = changed(rename)
    (note,) = open_image_encoder(path).notes
    assert "6 tensors that this model does not use are ignored" in note
    assert torch.equal(seen(path), expected)


OPENCLIP = 1
OWN = 2
SPELLINGS = (
    ("embeddings.class_embedding", "class_embedding", "cls_embedding"),
    ("embeddings.patch_embedding.", "conv1.", "patch_embedding."),
    ("embeddings.position_embedding.weight", "positional_embedding", "pos_embedding"),
    ("pre_layrnorm.", "ln_pre.", "pre_norm."),
    ("post_layernorm.", "ln_post.", "post_norm."),
    ("encoder.layers.", "transformer.resblocks.", "transformer."),
    ("layer_norm1.", "ln_1.", "norm1."),
    ("layer_norm2.", "ln_2.", "norm2."),
    ("self_attn.out_proj.", "attn.out_proj.", "attn.proj."),
    ("mlp.fc1.", "mlp.c_fc.", "mlp.0."),
    ("mlp.fc2.", "mlp.c_proj.", "mlp.2."),
    ("self_attn.qkv.", "attn.in_proj_", "attn.to_qkv."),
)
"""Parts of names in transformers, in OpenCLIP and in Wan's own release."""
OPENCLIP_TEXT = ("transformer.resblocks.0.ln_1.weight", "ln_final.weight", "positional_embedding")
OPENCLIP_TEXT += ("visual.proj",)
OWN_TEXT = ("textual.blocks.0.norm1.weight", "textual.pos_embedding.weight", "log_scale")
OWN_TEXT += ("visual.head",)


def spelt(tensors: Tensors, spelling: int) -> Tensors:
    """Return the vision model with joined queries, keys and values under other names."""
    joined = {key.removeprefix("vision_model."): tensor for key, tensor in tensors.items()}
    for query in [key for key in joined if ".self_attn.q_proj." in key]:
        parts = [joined.pop(query.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        joined[query.replace("q_proj", "qkv")] = torch.cat(parts)
    if spelling == OWN:
        for key in ("embeddings.class_embedding", "embeddings.position_embedding.weight"):
            joined[key] = joined[key][(None,) * (3 - joined[key].ndim)]
    return {
        functools.reduce(
            lambda text, row: text.replace(row[0], row[spelling]), SPELLINGS, key
        ): tensor
        for key, tensor in joined.items()
    }


@pytest.mark.parametrize(
    ("names", "prefix", "others"),
    [(OPENCLIP, "visual.", OPENCLIP_TEXT), (OWN, "model.visual.", OWN_TEXT), (OWN, "", OWN_TEXT)],
)
def test_names_of_openclip_and_of_wans_own_release(names, prefix, others, expected, changed):
    def rename(tensors: Tensors) -> Edits:
        named = {prefix + key: each for key, each in spelt(tensors, names).items()}
        return {**dict.fromkeys(tensors), **{key: zeros(3, 2) for key in others}, **named}

    path = changed(rename)
    [note] = open_image_encoder(path).notes
    assert "4 tensors that this model does not use are ignored" in note
    assert torch.equal(seen(path), expected)


@pytest.mark.parametrize(("which", "dtype"), [("all", FP8), ("matrices", torch.float64)], ids=str)
def test_other_precisions_are_converted_with_a_warning(which, dtype, file, changed, tmp_path):
    def stored(tensors: Tensors) -> Edits:
        return {k: v.to(dtype) for k, v in tensors.items() if which == "all" or v.ndim == 2}

    path = changed(stored)
    (warning,) = open_image_encoder(path).warnings
    assert str(dtype).removeprefix("torch.") in warning
    plain = tmp_path / "plain.safetensors"
    rewrite(path, plain, lambda tensors: {key: each.float() for key, each in tensors.items()})
    assert torch.equal(seen(path), seen(plain))


def test_fp8_with_scales_is_converted_with_a_warning(file, changed, tmp_path):
    def plain(tensors: Tensors) -> Edits:
        scales = {key: f"{key.removesuffix('.weight')}.scale_weight" for key in edits}
        return {k: edits[k].float() * edits[scales[k]] for k in edits if scales[k] in edits}

    edits: Tensors = {"scaled_fp8": zeros(1, dtype=FP8)}
    for key, tensor in load_file(file).items():
        if tensor.ndim == 2:
            edits[key], edits[key.replace(".weight", ".scale_weight")] = quantise(tensor, FP8)
    path = changed(edits)
    (warning,) = open_image_encoder(path).warnings
    assert "float8_e4m3fn" in warning
    assert torch.equal(seen(path), seen(rewrite(file, tmp_path / "plain.safetensors", plain)))


@pytest.mark.parametrize("shape", [(1, 1), (3 * 1280, 1)], ids=str)
def test_scales_of_joined_queries_keys_and_values(shape, changed):
    found = []
    for is_scaled in (False, True):

        def stored(tensors: Tensors, is_scaled: bool = is_scaled) -> Edits:
            named = spelt(tensors, OWN)
            for key in [key for key in named if key.endswith("to_qkv.weight")]:
                codes = named[key].to(FP8)
                named[key] = codes if is_scaled else codes.float() * 0.5
                if is_scaled:
                    named[key.replace("weight", "scale_weight")] = torch.full(shape, 0.5)
            marker = {"scaled_fp8": zeros(1, dtype=FP8)} if is_scaled else {}
            return {**dict.fromkeys(tensors), **named, **marker}

        found.append(seen(changed(stored)))
    assert torch.equal(*found)


def test_middle_of_a_picture_is_what_clips_own_processor_takes():
    """CLIPImageProcessor resizes with PIL, so the last bits of a smooth image differ."""
    axes = (torch.linspace(0, 1, 300), torch.linspace(0, 1, 448))
    rows, columns = torch.meshgrid(*axes, indexing="ij")
    image = torch.stack([rows, columns, rows * columns], dim=-1)
    pixels = (image * 255).round().to(torch.uint8)
    theirs = CLIPImageProcessor()(images=pixels.numpy(), return_tensors="pt")["pixel_values"]
    ours = clip_pixels(pixels[None] / 255, 224, crop=True)
    assert ours.shape == theirs.shape == (1, 3, 224, 224)
    assert (ours - theirs).abs().max() < 0.031  # two 8-bit steps
    assert (clip_pixels(pixels[None] / 255, 224) - theirs).abs().max() > 0.3


def test_picture_of_the_right_size_is_not_scaled():
    image = torch.rand(1, SIZE, SIZE, 4)
    assert torch.equal(clip_pixels(image, SIZE), clip_pixels(image, SIZE, crop=True))
    assert torch.equal(clip_pixels(image, SIZE), clip_pixels(image[..., :3], SIZE))


@pytest.mark.parametrize(("value", "level"), [(0.5003, 128), (1.2, 255), (-0.1, 0)])
def test_pixels_are_those_of_a_picture_with_8_bits(value, level):
    found = clip_pixels(torch.full((1, SIZE, SIZE, 3), value), SIZE)
    expected = [(level / 255 - mean) / std for mean, std in zip(PIXEL_MEAN, PIXEL_STD, strict=True)]
    assert found.amin(dim=(0, 2, 3)).tolist() == pytest.approx(expected, abs=1e-5)
    assert torch.equal(found, found[:, :, :1, :1].expand_as(found))


@pytest.mark.parametrize("shape", [(40, 56, 3), (1, 40, 56, 1), (0, 40, 56, 3)])
def test_other_pictures_are_refused(shape, file):
    with pytest.raises(ValueError, match=r"the images are .*: give images \[N, H, W, 3\]"):
        open_image_encoder(file).encode(torch.zeros(shape), device="cpu")


PATCHES = "vision_model.embeddings.patch_embedding.weight"
BIAS = "vision_model.encoder.layers.1.mlp.fc2.bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda all: {**dict.fromkeys(all), "x": zeros(1)}, r"CLIP vision model: .*\(first: x\)"),
        ({PATCHES: zeros(1024, 3, 14, 14)}, "is 1024 wide; Wan2.1 I2V takes CLIP ViT-H"),
        ({PATCHES: zeros(1280, 588)}, rf"{PATCHES} is \[1280, 588\]; 4 sizes"),
        (
            {"vision_model.embeddings.position_embedding.weight": zeros(8, 1280)},
            "has 8 positions; one more than a square number",
        ),
        ({BIAS: None}, rf"{BIAS} \[1280\] is missing"),
        ({"vision_model.encoder.more": zeros(1)}, r"encoder\.more does not belong to the model"),
    ],
)
def test_other_files_are_refused(change, message, changed):
    with pytest.raises(CheckpointError, match=message):
        open_image_encoder(changed(change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 1024}, "1280 is expected: give the image encoder of a Wan2.1 I2V"),
        ({"model_type": "siglip_vision_model"}, "model_type is 'siglip_vision_model'"),
        ({"patch_size": 0}, "patch_size is 0; a whole number above 0"),
    ],
)
def test_other_folders_are_refused(change, message, folder, tmp_path):
    config = json.loads((folder / "image_encoder" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        open_image_encoder(tmp_path)
    said = "is neither a diffusers pipeline folder with image_encoder"
    with pytest.raises(CheckpointError, match=said):
        open_image_encoder(tmp_path / "nothing")
