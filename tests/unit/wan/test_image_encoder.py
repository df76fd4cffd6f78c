"""CLIP vision encoder: transformers' values, ComfyUI's pixels, both file forms, refused files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPImageProcessor, CLIPVisionModel

from wanstream.testing.model import make_image_encoder, save_image_encoder
from wanstream.testing.quantised import quantise
from wanstream.wan.checkpoint.files import CheckpointError
from wanstream.wan.image_encoder import PIXEL_MEAN, PIXEL_STD, clip_pixels, open_image_encoder

SIZE = 28
"""Side of the tiny encoder's images in pixels: four patches in all."""


@pytest.fixture(scope="module")
def encoder() -> CLIPVisionModel:
    return make_image_encoder(seed=1, image_size=SIZE)


@pytest.fixture(scope="module")
def file(encoder: CLIPVisionModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clip") / "clip_vision_h.safetensors"
    save_image_encoder(encoder, path, dtype=torch.float32)
    return path


@pytest.fixture(scope="module")
def folder(encoder: CLIPVisionModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline")
    encoder.save_pretrained(path / "image_encoder")
    return path


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(2, 40, 56, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("crop", [False, True])
def test_it_sees_what_transformers_sees(
    crop: bool, encoder: CLIPVisionModel, file: Path, folder: Path, images: torch.Tensor
) -> None:
    """Bit-equal from a file, a pipeline folder and an `image_encoder` folder."""
    with torch.no_grad():
        pixels = clip_pixels(images, SIZE, crop=crop)
        expected = encoder(pixel_values=pixels, output_hidden_states=True).hidden_states[-2]
    assert expected.shape == (2, 5, 1280)
    for path in (file, folder, folder / "image_encoder"):
        seen = (
            open_image_encoder(path)
            .encode(images, device="cpu", crop=crop)
            .penultimate_hidden_states
        )
        assert torch.equal(seen, expected)


def test_two_calls_give_the_same(file: Path, images: torch.Tensor) -> None:
    """A call in inference mode does not affect a later one outside it."""
    opened = open_image_encoder(file)
    with torch.inference_mode():
        first = opened.encode(images, device="cpu").penultimate_hidden_states
    assert torch.equal(first, opened.encode(images, device="cpu").penultimate_hidden_states)


def test_fp16_files_compute_in_fp32(
    encoder: CLIPVisionModel, images: torch.Tensor, file: Path, tmp_path: Path
) -> None:
    save_image_encoder(encoder, tmp_path / "half.safetensors", dtype=torch.float16)
    whole = open_image_encoder(file).encode(images, device="cpu").penultimate_hidden_states
    half = (
        open_image_encoder(tmp_path / "half.safetensors")
        .encode(images, device="cpu")
        .penultimate_hidden_states
    )
    assert half.dtype == torch.float32
    assert 0 < (half - whole).norm() / whole.norm() < 2e-3


EXTRA: dict[str, torch.Tensor] = {
    "visual_projection.weight": torch.zeros(1024, 1280),
    "embeddings.position_ids": torch.arange(5)[None],
    "logit_scale": torch.zeros(()),
    "text_model.encoder.layers.0.mlp.fc1.weight": torch.zeros(2, 2),
    "text_projection.weight": torch.zeros(2, 2),
    "epoch": torch.zeros(1),
}
"""File tensors next to the vision model's."""


@pytest.mark.parametrize(
    "prefix",
    [
        "vision_model.",
        "visual.",
        "",
        "visual.vision_model.",
        "clip_vision.",
        "_orig_mod.vision_model.",
        "model.",
    ],
)
def test_prefixes_and_tensors_of_other_models_are_passed_over(
    prefix: str, file: Path, images: torch.Tensor, tmp_path: Path
) -> None:
    tensors = {
        prefix + key.removeprefix("vision_model."): tensor
        for key, tensor in load_file(file).items()
    }
    extra = {(prefix if "position" in key else "") + key: tensor for key, tensor in EXTRA.items()}
    save_file(tensors | extra, tmp_path / "other.safetensors")
    opened = open_image_encoder(tmp_path / "other.safetensors")
    (note,) = opened.notes
    assert "6 tensors that this model does not use are ignored" in note
    found, expected = (
        each.encode(images, device="cpu") for each in (opened, open_image_encoder(file))
    )
    assert torch.equal(found.penultimate_hidden_states, expected.penultimate_hidden_states)


OPENCLIP = {
    "embeddings.class_embedding": "class_embedding",
    "embeddings.patch_embedding.": "conv1.",
    "embeddings.position_embedding.weight": "positional_embedding",
    "pre_layrnorm.": "ln_pre.",
    "post_layernorm.": "ln_post.",
    "encoder.layers.": "transformer.resblocks.",
    "layer_norm1.": "ln_1.",
    "layer_norm2.": "ln_2.",
    "self_attn.out_proj.": "attn.out_proj.",
    "mlp.fc1.": "mlp.c_fc.",
    "mlp.fc2.": "mlp.c_proj.",
    "self_attn.qkv.": "attn.in_proj_",
}
OWN = {
    "embeddings.class_embedding": "cls_embedding",
    "embeddings.patch_embedding.": "patch_embedding.",
    "embeddings.position_embedding.weight": "pos_embedding",
    "pre_layrnorm.": "pre_norm.",
    "post_layernorm.": "post_norm.",
    "encoder.layers.": "transformer.",
    "layer_norm1.": "norm1.",
    "layer_norm2.": "norm2.",
    "self_attn.out_proj.": "attn.proj.",
    "mlp.fc1.": "mlp.0.",
    "mlp.fc2.": "mlp.2.",
    "self_attn.qkv.": "attn.to_qkv.",
}
TEXT_MODEL = {
    "OpenCLIP": (
        "transformer.resblocks.0.ln_1.weight",
        "ln_final.weight",
        "positional_embedding",
        "visual.proj",
    ),
    "Wan": (
        "textual.blocks.0.norm1.weight",
        "textual.pos_embedding.weight",
        "log_scale",
        "visual.head",
    ),
}


@pytest.mark.parametrize(
    ("names", "prefix"),
    [(OPENCLIP, "visual."), (OWN, "visual."), (OWN, "model.visual."), (OWN, "")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn], ids=str)
def test_names_of_openclip_and_of_wans_own_release(
    names: dict[str, str],
    prefix: str,
    dtype: torch.dtype,
    file: Path,
    images: torch.Tensor,
    tmp_path: Path,
) -> None:
    plain = {
        key.removeprefix("vision_model."): tensor.to(dtype)
        for key, tensor in load_file(file).items()
    }
    save_file(
        {f"vision_model.{key}": tensor for key, tensor in plain.items()},
        tmp_path / "plain.safetensors",
    )
    for query in [key for key in plain if ".self_attn.q_proj." in key]:
        parts = [plain.pop(query.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        plain[query.replace("q_proj", "qkv")] = torch.cat(parts)
    if names is OWN:
        plain["embeddings.class_embedding"] = plain["embeddings.class_embedding"][None, None]
        plain["embeddings.position_embedding.weight"] = plain[
            "embeddings.position_embedding.weight"
        ][None]
    others = TEXT_MODEL["OpenCLIP" if names is OPENCLIP else "Wan"]
    stored = {key: torch.zeros(3, 2) for key in others}
    for key, tensor in plain.items():
        for theirs, own in names.items():
            key = key.replace(theirs, own)
        stored[prefix + key] = tensor
    save_file(stored, tmp_path / "other.safetensors")
    opened, expected = (
        open_image_encoder(tmp_path / f"{name}.safetensors") for name in ("other", "plain")
    )
    assert f"{len(others)} tensors that this model does not use are ignored" in opened.notes[0]
    seen = [
        each.encode(images, device="cpu").penultimate_hidden_states for each in (opened, expected)
    ]
    assert torch.equal(*seen)


@pytest.mark.parametrize(
    ("which", "dtype"),
    [
        ("all", torch.float8_e4m3fn),
        ("matrices", torch.float8_e5m2),
        ("scaled", torch.float64),
        ("scaled", torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_other_precisions_are_converted_with_a_warning(
    dtype: torch.dtype, which: str, file: Path, images: torch.Tensor, tmp_path: Path
) -> None:
    stored, plain = {}, {}
    for key, tensor in load_file(file).items():
        scaled = which == "scaled" and dtype.itemsize == 1 and tensor.ndim == 2
        values, scale = quantise(tensor, dtype) if scaled else (tensor.to(dtype), torch.tensor(1.0))
        values = tensor if which != "all" and tensor.ndim != 2 else values
        stored[key], plain[key] = values, values.float() * scale if values is not tensor else tensor
        if scaled:
            stored[key.replace(".weight", ".scale_weight")] = scale
    if which == "scaled":
        stored["scaled_fp8"] = torch.zeros(1, dtype=dtype)
    save_file(stored, tmp_path / "other.safetensors")
    save_file(plain, tmp_path / "plain.safetensors")
    opened = open_image_encoder(tmp_path / "other.safetensors")
    (warning,) = opened.warnings
    assert str(dtype).removeprefix("torch.") in warning
    found, expected = (
        each.encode(images, device="cpu")
        for each in (opened, open_image_encoder(tmp_path / "plain.safetensors"))
    )
    assert torch.equal(found.penultimate_hidden_states, expected.penultimate_hidden_states)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3 * 1280,), (3 * 1280, 1)], ids=str)
def test_scales_of_joined_queries_keys_and_values(
    shape: tuple[int, ...], file: Path, tmp_path: Path
) -> None:
    plain: dict[str, torch.Tensor] = {}
    scaled = {"scaled_fp8": torch.zeros(1, dtype=torch.float8_e4m3fn)}
    for key, tensor in load_file(file).items():
        key = key.removeprefix("vision_model.").replace("q_proj", "qkv")
        if "k_proj" in key or "v_proj" in key:
            continue
        for theirs, own in OWN.items():
            key = key.replace(theirs, own)
        plain[key] = scaled[key] = torch.cat([tensor] * 3) if "to_qkv" in key else tensor
        if key.endswith("to_qkv.weight"):
            scaled[key] = plain[key].to(torch.float8_e4m3fn)
            plain[key] = scaled[key].float() * 0.5
            scaled[key.replace("weight", "scale_weight")] = torch.full(shape, 0.5)
    images = torch.rand(1, SIZE, SIZE, 3)
    seen = []
    for stored in (plain, scaled):
        save_file(stored, tmp_path / "joined.safetensors")
        encoder = open_image_encoder(tmp_path / "joined.safetensors")
        seen.append(encoder.encode(images, device="cpu").penultimate_hidden_states)
    assert torch.equal(*seen)


def test_the_middle_of_a_picture_is_what_clips_own_processor_takes() -> None:
    """CLIPImageProcessor resizes with PIL, so the last bits of a smooth image differ."""
    rows, columns = torch.meshgrid(
        torch.linspace(0, 1, 300), torch.linspace(0, 1, 448), indexing="ij"
    )
    image = torch.stack([rows, columns, rows * columns], dim=-1)
    pixels = (image * 255).round().to(torch.uint8)
    theirs = CLIPImageProcessor()(images=pixels.numpy(), return_tensors="pt")["pixel_values"]
    ours = clip_pixels(pixels[None] / 255, 224, crop=True)
    assert ours.shape == theirs.shape == (1, 3, 224, 224)
    assert (ours - theirs).abs().max() < 0.031  # two 8-bit steps
    assert (clip_pixels(pixels[None] / 255, 224) - theirs).abs().max() > 0.3


def test_a_picture_of_the_right_size_is_not_scaled() -> None:
    image = torch.rand(1, SIZE, SIZE, 4)
    assert torch.equal(clip_pixels(image, SIZE), clip_pixels(image, SIZE, crop=True))
    assert torch.equal(clip_pixels(image, SIZE), clip_pixels(image[..., :3], SIZE))


@pytest.mark.parametrize(("value", "level"), [(0.5003, 128), (1.2, 255), (-0.1, 0)])
def test_pixels_are_those_of_a_picture_with_8_bits(value: float, level: int) -> None:
    found = clip_pixels(torch.full((1, SIZE, SIZE, 3), value), SIZE)
    expected = [(level / 255 - mean) / std for mean, std in zip(PIXEL_MEAN, PIXEL_STD, strict=True)]
    assert found.amin(dim=(0, 2, 3)).tolist() == pytest.approx(expected, abs=1e-5)
    assert torch.equal(found, found[:, :, :1, :1].expand_as(found))


@pytest.mark.parametrize("shape", [(40, 56, 3), (1, 40, 56, 1), (0, 40, 56, 3)])
def test_what_is_no_picture_is_refused(shape: tuple[int, ...], file: Path) -> None:
    with pytest.raises(ValueError, match=r"the images are .*: give images \[N, H, W, 3\]"):
        open_image_encoder(file).encode(torch.zeros(shape), device="cpu")


def _with_positions(count: int) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update(
        {"vision_model.embeddings.position_embedding.weight": torch.zeros(count, 1280)}
    )


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "nothing": (
        lambda tensors: tensors.clear() or tensors.update(x=torch.zeros(1)),
        r"is not a CLIP vision model: .*\(first: x\)",
    ),
    "ViT-L": (
        lambda tensors: tensors.update(
            {"vision_model.embeddings.patch_embedding.weight": torch.zeros(1024, 3, 14, 14)}
        ),
        "is 1024 wide; Wan2.1 I2V takes CLIP ViT-H",
    ),
    "flat": (
        lambda tensors: tensors.update(
            {"vision_model.embeddings.patch_embedding.weight": torch.zeros(1280, 588)}
        ),
        r"vision_model.embeddings.patch_embedding.weight is \[1280, 588\]; 4 sizes",
    ),
    "positions": (_with_positions(8), "has 8 positions; one more than a square number"),
    "a layer's tensor": (
        lambda tensors: tensors.pop("vision_model.encoder.layers.1.mlp.fc2.bias"),
        r"vision_model.encoder.layers.1.mlp.fc2.bias \[1280\] is missing",
    ),
    "another tensor": (
        lambda tensors: tensors.update({"vision_model.encoder.more": torch.zeros(1)}),
        r"encoder\.more does not belong to the model",
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_other_files_are_refused(change: Any, message: str, file: Path, tmp_path: Path) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=message):
        open_image_encoder(tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"hidden_size": 1024},
            "hidden_size is 1024, 1280 is expected: give the image encoder of a Wan2.1 I2V",
        ),
        ({"model_type": "siglip_vision_model"}, "model_type is 'siglip_vision_model'"),
        ({"patch_size": 0}, "patch_size is 0; a whole number above 0"),
    ],
)
def test_other_folders_are_refused(
    change: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    config = json.loads((folder / "image_encoder" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        open_image_encoder(tmp_path)
    with pytest.raises(
        CheckpointError, match="is neither a diffusers pipeline folder with image_encoder"
    ):
        open_image_encoder(tmp_path / "nothing")
