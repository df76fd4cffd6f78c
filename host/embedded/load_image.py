"""LoadImage for image-to-video workflows."""

from __future__ import annotations

import struct
import zlib
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias

import av
import numpy as np
import torch
from PIL import Image, ImageOps, ImageSequence

from ...sampling.steps import check_ram
from ...shapes import FP32_BYTES
from .input_node import InputFileNode
from .workflow import io

_NO_MASK = (64, 64)
"""Mask size for images without alpha, as in ComfyUI."""
_COLORS = 3
_WHITE_16 = np.float32(65535.0)
_ORIENTATION = 0x0112
"""EXIF tag."""
_DEEP_MODES = ("LA", "RGB", "RGBA")
_UNREADABLE = (
    OSError,
    SyntaxError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
"""Pillow's exceptions for damaged or oversized files, and for files that are not images."""

_Pixels: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class ImageInputError(ValueError):
    """The file cannot be used as an image. The message has the file name and a remedy."""


class LoadImage(InputFileNode):
    """Load an image from the input folder as ComfyUI does, with every frame, upright.

    Alpha becomes an inverted mask.
    """

    KIND = "image"
    ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LoadImage",
            display_name="Load Image",
            category="image",
            inputs=[io.Combo.Input("image", options=cls.input_names(), upload=io.UploadType.image)],
            outputs=[io.Image.Output(), io.Mask.Output()],
        )

    @classmethod
    def validate_inputs(cls, image: str) -> bool | str:
        # The parameter `image` replaces the list check, so that a file in a subfolder passes, as in
        # ComfyUI.
        return cls.check(image)

    @classmethod
    def execute(cls, image: str) -> io.NodeOutput:
        """Return IMAGE [frames, H, W, 3] and MASK [frames, H, W], float32 in 0..1.

        The mask is 64 x 64 zeros without alpha.

        Raises:
            ImageInputError: the file cannot be decoded, or has NaN.
            InsufficientMemoryError: the frames do not fit into RAM.
        """
        path = cls.files().input_path(image)
        try:
            return io.NodeOutput(*_loaded(path))
        except _UNREADABLE as err:
            if isinstance(err, OSError) and err.errno is not None:  # from the disk, not the content
                raise
            raise ImageInputError(
                f"{path.name} cannot be read as an image: convert it to PNG\n{err}"
            ) from err


def _loaded(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    with Image.open(path) as file:
        # The other images in an MPO file are the second eye or a thumbnail.
        count = 1 if file.format == "MPO" else getattr(file, "n_frames", 1)
        width, height = file.size
        check_ram(
            count * width * height * (_COLORS + 1) * FP32_BYTES,
            subject=f"{path.name} ({count} frames of {width}x{height}) takes",
            remedy="cut or scale it down",
        )
        if count == 1 and _loses_bits(file):
            frames = iter([_upright(_deep_frame(path), file.getexif().get(_ORIENTATION, 1))])
        else:
            each_frame = islice(ImageSequence.Iterator(file), count)
            frames = (
                _frame(ImageOps.exif_transpose(each), is_png=file.format == "PNG")
                for each in each_frame
            )
        first = next(frames)
        images = torch.empty(count, *first.shape[:2], 3)
        masks: list[torch.Tensor] = []
        blank = torch.zeros(_NO_MASK)
        for frame in chain([first], frames):
            if frame.shape[:2] != first.shape[:2]:
                continue  # as in ComfyUI: a TIFF may contain images with other sizes
            if np.isnan(frame).any():
                raise ImageInputError(
                    f"{path.name} has pixels that are NaN: replace them, or save it as 16-bit PNG"
                )
            images[len(masks)] = torch.from_numpy(
                np.ascontiguousarray(frame[..., :3]).clip(0.0, 1.0)
            )
            mask = blank
            if frame.shape[2] > _COLORS:
                # In a MASK, 1 is transparent. The copy is contiguous, because `from_numpy` refuses
                # the negative strides of turned images.
                mask = 1.0 - torch.from_numpy(np.ascontiguousarray(frame[..., _COLORS]))
            masks.append(mask)
    if any(mask is not blank for mask in masks):
        # Masks with different sizes cannot be stacked.
        opaque = torch.zeros(first.shape[:2])
        masks = [opaque if mask is blank else mask for mask in masks]
    return images[: len(masks)], torch.stack(masks)


def _frame(image: Image.Image, *, is_png: bool) -> _Pixels:
    """Return [H, W, 3 or 4] in 0..1, the last channel alpha if there is one."""
    # Pillow 10.1 and 10.2 return a 16-bit PNG as mode "I".
    if image.mode.startswith("I;16") or (is_png and image.mode == "I"):
        return _grey(np.asarray(image, dtype=np.float32) / _WHITE_16)
    if image.mode == "I":
        grey = np.asarray(image, dtype=np.float64)
        # ComfyUI's scale for 16-bit values in 32 bits. Larger values use the whole range.
        white = 255 * 255 if grey.max() <= _WHITE_16 else 2**31 - 1
        return _grey((grey / white).astype(np.float32))
    if image.mode == "F":
        return _grey(np.asarray(image, dtype=np.float32))
    alpha = "A" in image.getbands() or (image.mode == "P" and "transparency" in image.info)
    colors: _Pixels = np.asarray(
        image.convert("RGBA" if alpha else "RGB"), dtype=np.float32
    ) / np.float32(255.0)
    return colors


def _grey(values: _Pixels) -> _Pixels:
    return np.repeat(values[..., None], _COLORS, axis=2)


def _loses_bits(file: Image.Image) -> bool:
    """Return True for several 16-bit channels. Pillow keeps only eight bits each."""
    # The raw mode, such as "RGB;16B", is the last decoder argument, or the first of several.
    args = [tile[-1] for tile in getattr(file, "tile", ())[:1]]
    raw = [each[0] if isinstance(each, tuple) else each for each in args]
    return file.mode in _DEEP_MODES and any(";16" in str(mode) for mode in raw)


def _deep_frame(path: Path) -> _Pixels:
    """Return [H, W, 3 or 4] in 0..1 for an image with 16 bits per channel."""
    try:
        with av.open(str(path)) as container:
            frame = next(container.decode(video=0))
            alpha = any(component.is_alpha for component in frame.format.components)
            values: _Pixels = frame.to_ndarray(format="rgba64le" if alpha else "rgb48le")
    except (av.FFmpegError, StopIteration, IndexError) as err:
        raise ImageInputError(
            f"{path.name} cannot be read as a 16-bit image: convert it to PNG\n{err}"
        ) from err
    scaled: _Pixels = values.astype(np.float32) / _WHITE_16
    return scaled


def _upright(pixels: _Pixels, orientation: int) -> _Pixels:
    """Return pixels [H, W, C] turned by an EXIF orientation (1 to 8)."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels
