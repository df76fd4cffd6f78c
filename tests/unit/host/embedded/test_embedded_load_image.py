"""LoadImage without ComfyUI."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from wanstream.host import io
from wanstream.host.embedded.run import History
from wanstream.host.embedded.validate import InvalidWorkflowError

Load = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Sink(io.ComfyNode):
    """Reads an image, so that it is loaded."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="Sink", inputs=[io.Image.Input("image")], is_output_node=True)

    @classmethod
    def execute(cls, image: torch.Tensor) -> None:
        return None


@pytest.fixture
def load(run: Callable[..., History]) -> Load:
    def load(name: Any) -> tuple[Any, ...]:
        prompt = {
            "1": {"class_type": "LoadImage", "inputs": {"image": name}},
            "2": {"class_type": "Sink", "inputs": {"image": ["1", 0]}},
        }
        return run(prompt, nodes=[Sink], keep=["1"]).results["1"]

    return load  # type: ignore[return-value]


@pytest.fixture
def pixels() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (6, 10, 4), dtype=np.uint8)


def test_a_plain_image(load: Load, tmp_path: Path, pixels: Any) -> None:
    (tmp_path / "input" / "sub").mkdir()
    Image.fromarray(pixels[..., :3]).save(tmp_path / "input" / "sub" / "a.png")
    for name in ("sub/a.png", "sub/a.png [input]"):
        image, mask = load(name)
        assert torch.equal(image, torch.from_numpy(pixels[None, ..., :3].astype(np.float32) / 255.0))
        assert torch.equal(mask, torch.zeros(1, 64, 64))


def test_alpha_becomes_an_inverted_mask(load: Load, tmp_path: Path, pixels: Any) -> None:
    Image.fromarray(pixels).save(tmp_path / "input" / "a.png")
    image, mask = load("a.png")
    assert image.shape == (1, 6, 10, 3)
    assert torch.equal(mask, 1.0 - torch.from_numpy(pixels[None, ..., 3].astype(np.float32) / 255.0))


def test_a_rotated_photo_is_turned_upright(load: Load, tmp_path: Path, pixels: Any) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels[..., :3]).save(tmp_path / "input" / "a.png", exif=exif)
    image, _ = load("a.png")
    assert torch.equal(image[0], torch.from_numpy(np.rot90(pixels[..., :3], -1).astype(np.float32) / 255.0))


def test_deep_grey_and_palettes(load: Load, tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 255 * 128, dtype=np.int32)).save(tmp_path / "input" / "grey.tif")
    assert load("grey.tif")[0].unique().tolist() == pytest.approx([128 / 255])
    Image.new("P", (4, 4)).save(tmp_path / "input" / "palette.png", transparency=0)
    assert torch.equal(load("palette.png")[1], torch.ones(1, 4, 4))


def test_every_frame_of_an_animation_is_loaded(load: Load, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 4), color) for color in ("red", "lime", "blue")]
    frames[0].save(tmp_path / "input" / "a.webp", save_all=True, append_images=frames[1:], lossless=True)
    image, mask = load("a.webp")
    assert image.shape == (3, 4, 8, 3)
    assert mask.shape == (3, 64, 64)


@pytest.mark.parametrize("name", ["none.png", "../secret.png", "/etc/hostname", "sub"])
def test_a_missing_file_or_one_outside_is_refused(load: Load, tmp_path: Path, name: str) -> None:
    (tmp_path / "input" / "sub").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "secret.png")
    with pytest.raises(InvalidWorkflowError, match="Invalid image file") as raised:
        load(name)
    (fault,) = raised.value.verdict.node_errors["1"]["errors"]
    assert fault["type"] == "custom_validation_failed"
