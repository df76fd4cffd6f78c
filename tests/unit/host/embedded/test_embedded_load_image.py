"""LoadImage without ComfyUI."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from wanstream.host import io
from wanstream.host.embedded import load_image
from wanstream.host.embedded.run import History, NodeFailedError
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.sampling.steps import errors
from wanstream.tests.support.embedded import embedded_host

Load = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Sink(io.ComfyNode):
    """Output node, to load an image."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="Sink", inputs=[io.Image.Input("image")], is_output_node=True)

    @classmethod
    def execute(cls, image: torch.Tensor) -> io.NodeOutput:
        return io.NodeOutput()


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
        assert torch.equal(
            image, torch.from_numpy(pixels[None, ..., :3].astype(np.float32) / 255.0)
        )
        assert torch.equal(mask, torch.zeros(1, 64, 64))


def test_alpha_becomes_an_inverted_mask(load: Load, tmp_path: Path, pixels: Any) -> None:
    Image.fromarray(pixels).save(tmp_path / "input" / "a.png")
    image, mask = load("a.png")
    assert image.shape == (1, 6, 10, 3)
    assert torch.equal(
        mask, 1.0 - torch.from_numpy(pixels[None, ..., 3].astype(np.float32) / 255.0)
    )


def test_a_rotated_photo_is_turned_upright(load: Load, tmp_path: Path, pixels: Any) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels[..., :3]).save(tmp_path / "input" / "a.png", exif=exif)
    image, _ = load("a.png")
    assert torch.equal(
        image[0], torch.from_numpy(np.rot90(pixels[..., :3], -1).astype(np.float32) / 255.0)
    )


def test_deep_grey_and_palettes(load: Load, tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 255 * 128, dtype=np.int32)).save(
        tmp_path / "input" / "grey.tif"
    )
    assert load("grey.tif")[0].unique().tolist() == pytest.approx([128 / 255])
    Image.new("P", (4, 4)).save(tmp_path / "input" / "palette.png", transparency=0)
    assert torch.equal(load("palette.png")[1], torch.ones(1, 4, 4))


def _png16(values: np.ndarray[Any, Any]) -> bytes:
    """Return a PNG with 16 bits per channel. Pillow writes only grey ones."""
    height, width, channels = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_16_bits_per_channel_are_read_in_full(load: Load, tmp_path: Path, channels: int) -> None:
    values = np.random.default_rng(1).integers(0, 65536, (6, 10, channels), dtype=np.uint16)
    (tmp_path / "input" / "deep.png").write_bytes(_png16(values))
    image, mask = load("deep.png")
    exact = torch.from_numpy(values.astype(np.float32) / np.float32(65535))
    assert torch.equal(
        image[0], exact[..., :3] if channels > 2 else exact[..., :1].expand(-1, -1, 3)
    )
    if channels in {2, 4}:
        assert torch.equal(mask[0], 1.0 - exact[..., -1])
    else:
        assert torch.equal(mask, torch.zeros(1, 64, 64))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_deep_colors_are_turned_upright_as_others(
    load: Load, tmp_path: Path, orientation: int, pixels: Any
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels[..., :3]).save(tmp_path / "input" / "a.png", exif=exif)
    deep = _png16(pixels[..., :3].astype(np.uint16) * 257)
    end, data = deep.index(b"IDAT") - 4, exif.tobytes().removeprefix(b"Exif\0\0")
    chunk = (
        struct.pack(">I", len(data))
        + b"eXIf"
        + data
        + struct.pack(">I", zlib.crc32(b"eXIf" + data))
    )
    (tmp_path / "input" / "deep.png").write_bytes(deep[:end] + chunk + deep[end:])
    assert torch.allclose(load("deep.png")[0], load("a.png")[0], atol=1e-6)


def test_a_grey_png_has_16_bits_in_pillow_10_1_too(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PngImagePlugin._MODES, (16, 0), ("I", "I;16B"))
    values = np.arange(60, dtype=np.uint16).reshape(6, 10, 1) * 1092
    (tmp_path / "input" / "deep.png").write_bytes(_png16(values))
    with Image.open(tmp_path / "input" / "deep.png") as opened:
        assert opened.mode == "I"
    assert torch.equal(
        load("deep.png")[0][0, ..., :1], torch.from_numpy(values / np.float32(65535))
    )


RAMP = np.arange(4096).reshape(64, 64) * 16
GREYS: dict[str, tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any]]] = {
    "16-bit PNG": ("a.png", RAMP.astype("u2"), RAMP / 65535),
    "16-bit TIFF": ("a.tiff", RAMP.astype("u2"), RAMP / 65535),
    "16-bit TIFF, big-endian": ("a.tif", RAMP.astype(">u2"), RAMP / 65535),
    "32-bit TIFF with 16-bit values": ("a.tiff", RAMP.astype("i4"), (RAMP / 65025).clip(0, 1)),
    "32-bit TIFF": ("a.tiff", (RAMP * 30000).astype("i4"), RAMP * 30000 / (2**31 - 1)),
    "negative": ("a.tiff", (RAMP - 65000).astype("i4"), ((RAMP - 65000) / 65025).clip(0, 1)),
    "float": ("a.tiff", (RAMP / 65535).astype("f4"), RAMP / 65535),
    "float out of range": (
        "a.tiff",
        (RAMP / 32768 - 0.5).astype("f4"),
        (RAMP / 32768 - 0.5).clip(0, 1),
    ),
}


@pytest.mark.parametrize(("name", "stored", "exact"), GREYS.values(), ids=GREYS)
def test_deep_grey_keeps_its_levels(
    load: Load, tmp_path: Path, name: str, stored: Any, exact: Any
) -> None:
    mode = {"<u2": "I;16", "|u2": "I;16", ">u2": "I;16B", "<i4": "I", "<f4": "F"}[stored.dtype.str]
    Image.frombytes(mode, (64, 64), stored.tobytes()).save(tmp_path / "input" / name)
    image = load(name)[0]
    assert torch.allclose(
        image[0].double(), torch.from_numpy(exact)[..., None].expand(-1, -1, 3), atol=1e-6
    )
    assert len(image.unique()) == len(np.unique(exact.astype(np.float32)))


def test_16_bit_colors_of_a_tiff(load: Load, tmp_path: Path) -> None:
    values = np.random.default_rng(1).integers(0, 65536, (6, 10, 3), dtype=np.uint16)
    with av.open(str(tmp_path / "input" / "deep.tiff"), "w", format="image2") as file:
        stream = file.add_stream("tiff", rate=1)
        stream.width, stream.height, stream.pix_fmt = 10, 6, "rgb48le"
        for packet in [
            *stream.encode(av.VideoFrame.from_ndarray(values, format="rgb48le")),
            *stream.encode(),
        ]:
            file.mux(packet)
    assert torch.equal(
        load("deep.tiff")[0][0], torch.from_numpy(values.astype(np.float32) / np.float32(65535))
    )


def _no_number(path: Path) -> None:
    Image.fromarray(np.full((4, 4), np.nan, np.float32)).save(path.with_suffix(".tiff"))
    path.with_suffix(".tiff").rename(path)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (
        lambda path: path.write_text("not an image"),
        "cannot be read as an image: convert it to PNG",
    ),
    "EXR": (
        lambda path: path.write_bytes(b"v/1\x01" + bytes(100)),
        "cannot be read as an image: convert it to PNG",
    ),
    "empty": (lambda path: path.write_bytes(b""), "cannot be read as an image"),
    "cut": (
        lambda path: path.write_bytes(_png16(np.ones((60, 60, 1), np.uint16))[:70]),
        "cannot be read as an image",
    ),
    "cut, deep": (
        lambda path: path.write_bytes(_png16(np.ones((9, 9, 3), np.uint16))[:60]),
        "cannot be read as",
    ),
    "NaN": (_no_number, "has pixels that are NaN"),
}


@pytest.mark.parametrize(("write", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_image_is_refused_by_name(
    load: Load, tmp_path: Path, write: Callable[[Path], object], reason: str
) -> None:
    write(tmp_path / "input" / "a.png")
    with pytest.raises(NodeFailedError, match=rf"a\.png {reason}"):
        load("a.png")


def test_frames_that_do_not_fit_into_ram_are_refused_before_they_are_decoded(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = [Image.new("RGB", (50, 40), (index * 8, 0, 0)) for index in range(30)]
    frames[0].save(tmp_path / "input" / "a.gif", save_all=True, append_images=frames[1:])
    asked: list[int] = []
    monkeypatch.setattr(errors, "insufficient_ram", lambda nbytes: asked.append(nbytes) or 1000)
    monkeypatch.setattr(load_image, "_frame", lambda image: pytest.fail("a frame was decoded"))
    with pytest.raises(
        NodeFailedError, match=r"a\.gif \(30 frames of 50x40\) takes 0.00 GB of RAM"
    ):
        load("a.gif")
    assert asked == [30 * 50 * 40 * 16]


def test_frames_with_and_without_alpha(load: Load, tmp_path: Path) -> None:
    clear = Image.new("RGBA", (8, 4), (255, 0, 0, 0))
    opaque = Image.new("RGB", (8, 4), "blue")
    opaque.save(
        tmp_path / "input" / "a.tiff",
        save_all=True,
        append_images=[clear, Image.new("RGB", (4, 4))],
    )
    image, mask = load("a.tiff")
    assert image.shape == (2, 4, 8, 3)
    assert mask.mean(dim=(1, 2)).tolist() == [0.0, 1.0]


def test_every_frame_of_an_animation_is_loaded(load: Load, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 4), color) for color in ("red", "lime", "blue")]
    frames[0].save(
        tmp_path / "input" / "a.webp", save_all=True, append_images=frames[1:], lossless=True
    )
    image, mask = load("a.webp")
    assert image.shape == (3, 4, 8, 3)
    assert mask.shape == (3, 64, 64)


PLACES = {
    "a.png": "input", "a.png [input]": "input", "a.png[input]": "input", "a.png [output]": "output",
    "sub/a.png [output]": "output", "a.png [temp]": "temp", "sub\\a.png": "input",
    "sub\\a.png [output]": "output",
}  # fmt: skip


@pytest.mark.parametrize(("name", "place"), PLACES.items())
def test_a_name_may_have_the_mark_of_its_folder(
    load: Load, tmp_path: Path, name: str, place: str
) -> None:
    folders = {
        "input": tmp_path / "input",
        "output": tmp_path / "output",
        "temp": embedded_host.files.temp_folder(),
    }
    for grey, folder in enumerate(folders.values()):
        (folder / "sub").mkdir(parents=True, exist_ok=True)
        for path in (folder / "a.png", folder / "sub" / "a.png"):
            Image.new("L", (4, 4), grey).save(path)
    assert load(name)[0].unique().tolist() == pytest.approx([[*folders].index(place) / 255])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("bird.png", "did you mean Birds.png"),
        ("birds", "did you mean Birds.png"),
        ("bird.png [output]", "is not in the output folder: put it there"),
        ("bird.png [temp]", "is not in the temp folder, which is empty without ComfyUI"),
    ],
)
def test_a_missing_file_gets_the_near_name_and_the_folder_last(
    load: Load, tmp_path: Path, name: str, hint: str
) -> None:
    Image.new("L", (4, 4)).save(tmp_path / "input" / "Birds.png")
    with pytest.raises(InvalidWorkflowError) as raised:
        load(name)
    (fault,) = raised.value.verdict.node_errors["1"]["errors"]
    assert hint in fault["details"].partition("\n")[0]
    assert str(tmp_path) not in fault["details"].partition("\n")[0]


@pytest.mark.parametrize("name", ["none.png", "../secret.png", "/etc/hostname", "sub"])
def test_a_missing_file_or_one_outside_is_refused(load: Load, tmp_path: Path, name: str) -> None:
    (tmp_path / "input" / "sub").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "secret.png")
    with pytest.raises(InvalidWorkflowError, match="Invalid image file") as raised:
        load(name)
    (fault,) = raised.value.verdict.node_errors["1"]["errors"]
    assert fault["type"] == "custom_validation_failed"
