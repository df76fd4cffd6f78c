"""LoadImage for image-to-video workflows."""

from __future__ import annotations

from itertools import islice

import numpy as np
import torch
from PIL import Image, ImageOps, ImageSequence

from ..api import current_host
from ..folders import OutsideFolderError
from . import io
from .adapter import EmbeddedHost

_IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_NO_MASK = (64, 64)


class LoadImage(io.ComfyNode):
    """Load an image of the input folder as ComfyUI does: every frame, upright, alpha as an inverted mask."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        images = [name for name in _host().input_names() if name.lower().endswith(_IMAGES)]
        return io.Schema(
            node_id="LoadImage",
            display_name="Load Image",
            category="image",
            inputs=[io.Combo.Input("image", options=images, upload=io.UploadType.image)],
            outputs=[io.Image.Output(), io.Mask.Output()],
        )

    @classmethod
    def validate_inputs(cls, image: str) -> bool | str:
        # Naming `image` replaces the check against the list, so that a file in a subfolder passes, as in ComfyUI.
        host = _host()
        try:
            if host.input_path(image).is_file():
                return True
        except OutsideFolderError as err:
            return f"Invalid image file: {err}"
        return f"Invalid image file: {image} is not in {host.folders.input}: put it there (or see --input)"

    @classmethod
    def execute(cls, image: str) -> io.NodeOutput:
        """Return IMAGE [frames, H, W, 3] and MASK [frames, H, W] (64 x 64 zeros without alpha), float32 in 0..1."""
        with Image.open(_host().input_path(image)) as file:
            # The other images of an MPO file are the second eye or a thumbnail.
            wanted = islice(ImageSequence.Iterator(file), 1 if file.format == "MPO" else None)
            upright = [ImageOps.exif_transpose(frame) for frame in wanted]
        frames = [frame for frame in upright if frame.size == upright[0].size]
        pixels = torch.stack([_pixels(frame) for frame in frames])
        return io.NodeOutput(pixels, torch.stack([_mask(frame) for frame in frames]))


def _host() -> EmbeddedHost:
    host = current_host()
    assert isinstance(host, EmbeddedHost), f"the embedded LoadImage is running in {host.name()}"
    return host


def _pixels(frame: Image.Image) -> torch.Tensor:
    """Return [H, W, 3] in 0..1."""
    # `convert` clips 32-bit grey at 255, so it is scaled first.
    shown = frame.point(lambda grey: grey * (1 / 255)) if frame.mode == "I" else frame
    return torch.from_numpy(np.asarray(shown.convert("RGB"), dtype=np.float32) / 255.0)


def _mask(frame: Image.Image) -> torch.Tensor:
    """Return [H, W] in 0..1, 1 for transparent pixels."""
    if "A" in frame.getbands():
        alpha = frame.getchannel("A")
    elif frame.mode == "P" and "transparency" in frame.info:
        alpha = frame.convert("RGBA").getchannel("A")
    else:
        return torch.zeros(_NO_MASK)
    return 1.0 - torch.from_numpy(np.asarray(alpha, dtype=np.float32) / 255.0)
