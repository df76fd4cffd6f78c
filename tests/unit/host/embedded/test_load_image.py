"""LoadImage without ComfyUI."""

from __future__ import annotations

import io
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

from wanstream.host.embedded import History, NodeFailedError, load_image
from wanstream.host.embedded.workflow.validate import InvalidWorkflowError
from wanstream.sampling.steps import errors
from wanstream.tests.support.host.embedded import embedded_host
from wanstream.tests.support.host.given_nodes import Shown
from wanstream.tests.support.host.shipped import node

Array = np.ndarray[Any, Any]

NO_MASK = torch.zeros(1, 64, 64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "input"


@pytest.fixture
def load(run: Callable[..., History]):
    """`load(name)` returns image and mask of a file in the input folder."""

    def load(name: str):
        prompt = {"1": node("LoadImage", image=name), "2": node("Shown", value=["1", 0])}
        return run(prompt, nodes=[Shown], keep=["1"]).results["1"]

    return load


@pytest.fixture
def pixels() -> Array:
    return np.random.default_rng(0).integers(0, 256, (6, 10, 4), dtype=np.uint8)


def exact(values: Array, white: int) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).astype(np.float32) / np.float32(white))


def test_image_and_alpha(load, folder, pixels):
    (folder / "sub").mkdir()
    Image.fromarray(pixels[..., :3]).save(folder / "sub" / "a.png")
    for name in ("sub/a.png", "sub/a.png [input]"):
        image, mask = load(name)
        assert torch.equal(image[0], exact(pixels[..., :3], 255))
        assert torch.equal(mask, NO_MASK)
    Image.fromarray(pixels).save(folder / "a.png")
    image, mask = load("a.png")
    assert torch.equal(image[0], exact(pixels[..., :3], 255))
    assert torch.equal(mask[0], 1.0 - exact(pixels[..., 3], 255))
    palette = Image.new("P", (4, 4))
    palette.putpalette((255, 0, 0))
    palette.save(folder / "palette.png", transparency=0)
    image, mask = load("palette.png")
    assert torch.equal(image, torch.tensor([1.0, 0.0, 0.0]).expand(1, 4, 4, 3))
    assert torch.equal(mask, torch.ones(1, 4, 4))


def _chunk(kind: bytes, data: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + check


def _png16(values: Array, *chunks: bytes) -> bytes:
    """Return a PNG with 16 bits per channel. Pillow writes only grey ones."""
    height, width, channels = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    parts = [_chunk(b"IHDR", header), *chunks, _chunk(b"IDAT", zlib.compress(rows))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + _chunk(b"IEND", b"")


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_16_bits_per_channel_are_read_in_full(load, folder, channels):
    values = np.random.default_rng(1).integers(0, 65536, (6, 10, channels), dtype=np.uint16)
    (folder / "deep.png").write_bytes(_png16(values))
    image, mask = load("deep.png")
    expected = exact(values, 65535)
    colours = expected[..., :3] if channels > 2 else expected[..., :1].expand(-1, -1, 3)
    assert torch.equal(image[0], colours)
    assert torch.equal(mask, 1.0 - expected[None, ..., -1] if channels in {2, 4} else NO_MASK)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_upright(load, folder, orientation, pixels):
    exif = Image.Exif()
    colours = pixels[..., :3]
    exif[0x0112] = orientation
    Image.fromarray(colours).save(folder / "a.png", exif=exif)
    chunk = _chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0"))
    (folder / "deep.png").write_bytes(_png16(colours.astype(np.uint16) * 257, chunk))
    image, _ = load("a.png")
    assert torch.allclose(load("deep.png")[0], image, atol=1e-6)
    if orientation == 6:
        assert torch.equal(image[0], exact(np.rot90(colours, -1), 255))


def test_grey_png_has_16_bits_in_pillow_10_1(load, folder, monkeypatch):
    monkeypatch.setitem(PngImagePlugin._MODES, (16, 0), ("I", "I;16B"))
    values = np.arange(60, dtype=np.uint16).reshape(6, 10, 1) * 1092
    (folder / "deep.png").write_bytes(_png16(values))
    with Image.open(folder / "deep.png") as opened:
        assert opened.mode == "I"
    assert torch.equal(load("deep.png")[0][0, ..., :1], exact(values, 65535))


RAMP = np.arange(4096).reshape(64, 64) * 16
LONG = RAMP * 30000
SHIFTED = RAMP / 32768 - 0.5
GREYS: dict[str, tuple[str, Array, Array]] = {
    "16-bit PNG": ("a.png", RAMP.astype("u2"), RAMP / 65535),
    "16-bit TIFF": ("a.tiff", RAMP.astype("u2"), RAMP / 65535),
    "16-bit TIFF, big-endian": ("a.tif", RAMP.astype(">u2"), RAMP / 65535),
    "32-bit TIFF with 16-bit values": ("a.tiff", RAMP.astype("i4"), (RAMP / 65025).clip(0, 1)),
    "32-bit TIFF": ("a.tiff", LONG.astype("i4"), LONG / (2**31 - 1)),
    "negative": ("a.tiff", (RAMP - 65000).astype("i4"), ((RAMP - 65000) / 65025).clip(0, 1)),
    "float": ("a.tiff", (RAMP / 65535).astype("f4"), RAMP / 65535),
    "float out of range": ("a.tiff", SHIFTED.astype("f4"), SHIFTED.clip(0, 1)),
}


@pytest.mark.parametrize(("name", "stored", "expected"), GREYS.values(), ids=GREYS)
def test_deep_grey_keeps_its_levels(load, folder, name, stored, expected):
    mode = {"<u2": "I;16", "|u2": "I;16", ">u2": "I;16B", "<i4": "I", "<f4": "F"}[stored.dtype.str]
    Image.frombytes(mode, (64, 64), stored.tobytes()).save(folder / name)
    image = load(name)[0]
    levels = torch.from_numpy(expected)[..., None].expand(-1, -1, 3)
    assert torch.allclose(image[0].double(), levels, atol=1e-6)
    assert len(image.unique()) == len(np.unique(expected.astype(np.float32)))


def test_16_bit_colours_of_a_tiff(load, folder):
    values = np.random.default_rng(1).integers(0, 65536, (6, 10, 3), dtype=np.uint16)
    with av.open(str(folder / "deep.tiff"), "w", format="image2") as file:
        stream = file.add_stream("tiff", rate=1)
        stream.width = 10
        stream.height = 6
        stream.pix_fmt = "rgb48le"
        frame = av.VideoFrame.from_ndarray(values, format="rgb48le")
        file.mux([*stream.encode(frame), *stream.encode()])
    assert torch.equal(load("deep.tiff")[0][0], exact(values, 65535))


def _nan_tiff() -> bytes:
    image = Image.fromarray(np.full((4, 4), np.nan, np.float32))
    file = io.BytesIO()
    image.save(file, "TIFF")
    return file.getvalue()


BROKEN: dict[str, tuple[bytes, str]] = {
    "text": (b"not an image", "cannot be read as an image: convert it to PNG"),
    "EXR": (b"v/1\x01" + bytes(100), "cannot be read as an image: convert it to PNG"),
    "empty": (b"", "cannot be read as an image"),
    "cut": (_png16(np.ones((60, 60, 1), np.uint16))[:70], "cannot be read as an image"),
    "cut, deep": (_png16(np.ones((9, 9, 3), np.uint16))[:60], "cannot be read as"),
    "NaN": (_nan_tiff(), "has pixels that are NaN"),
}


@pytest.mark.parametrize(("content", "reason"), BROKEN.values(), ids=BROKEN)
def test_unreadable_file_is_refused_by_name(load, folder, content, reason):
    (folder / "a.png").write_bytes(content)
    with pytest.raises(NodeFailedError, match=rf"a\.png {reason}"):
        load("a.png")


def test_frames_are_loaded_unless_there_is_too_little_ram(load, folder, monkeypatch):
    frames = [Image.new("RGB", (8, 4), colour) for colour in ("red", "lime", "blue")]
    more = {"save_all": True, "append_images": frames[1:]}
    frames[0].save(folder / "a.webp", lossless=True, **more)
    image, mask = load("a.webp")
    assert torch.equal(image, torch.eye(3).view(3, 1, 1, 3).expand(3, 4, 8, 3))
    assert torch.equal(mask, NO_MASK.expand(3, 64, 64))
    frames[0].save(folder / "a.gif", **more)
    asked: list[int] = []
    monkeypatch.setattr(errors, "insufficient_ram", lambda nbytes: asked.append(nbytes) or 1000)
    monkeypatch.setattr(load_image, "_frame", lambda image: pytest.fail("a frame was decoded"))
    message = r"a\.gif \(3 frames of 8x4\) takes 0.00 GB of RAM"
    with pytest.raises(NodeFailedError, match=message):
        load("a.gif")
    assert asked == [3 * 8 * 4 * 16]


def test_frames_with_and_without_alpha(load, folder):
    others = [Image.new("RGBA", (8, 4), (255, 0, 0, 0)), Image.new("RGB", (4, 4))]
    opaque = Image.new("RGB", (8, 4), "blue")
    opaque.save(folder / "a.tiff", save_all=True, append_images=others)
    image, mask = load("a.tiff")
    assert image.shape == (2, 4, 8, 3)
    assert mask.mean(dim=(1, 2)).tolist() == [0.0, 1.0]


def test_name_may_have_the_mark_of_its_folder(load, tmp_path):
    temp = embedded_host.files.temp_folder()
    folders = {"input": tmp_path / "input", "output": tmp_path / "output", "temp": temp}
    for grey, folder in enumerate(folders.values()):
        (folder / "sub").mkdir(parents=True, exist_ok=True)
        for path in (folder / "a.png", folder / "sub" / "a.png"):
            Image.new("L", (4, 4), grey).save(path)
    for place, names in {
        "input": ("a.png", "a.png [input]", "a.png[input]", "sub\\a.png"),
        "output": ("a.png [output]", "sub/a.png [output]", "sub\\a.png [output]"),
        "temp": ("a.png [temp]",),
    }.items():
        for name in names:
            grey = [*folders].index(place) / 255
            assert load(name)[0].unique().tolist() == pytest.approx([grey]), name


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("bird.png", "did you mean Birds.png"),
        ("bird.png [output]", "is not in the output folder: put it there"),
        ("bird.png [temp]", "is not in the temp folder, which is empty without ComfyUI"),
        ("../secret.png", ""),
        ("sub", ""),
    ],
)
def test_missing_file_or_one_outside_is_refused(load, folder, name, hint):
    (folder / "sub").mkdir()
    for path in (folder / "Birds.png", folder.parent / "secret.png"):
        Image.new("L", (4, 4)).save(path)
    with pytest.raises(InvalidWorkflowError, match="Invalid image file") as raised:
        load(name)
    (fault,) = raised.value.verdict.node_errors["1"]["errors"]
    assert fault["type"] == "custom_validation_failed"
    first = fault["details"].partition("\n")[0]
    assert hint in first
    assert not hint or str(folder.parent) not in first
