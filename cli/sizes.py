"""`1280x720x81` on a command line."""

from __future__ import annotations

import re

from ..plan import VideoShape
from ..plan.shapes import PIXELS_PER_LATENT


class SizeError(ValueError):
    """An argument that cannot be understood; nothing was done."""


def video_shape(text: str, *, per_latent: int = PIXELS_PER_LATENT) -> VideoShape:
    """`WIDTHxHEIGHTxFRAMES`. Raises SizeError for anything else, and for sizes that the models cannot make.

    `per_latent` are the pixels for each latent pixel of these models, along either side.
    """
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text.strip().lower())
    if found is None:
        raise SizeError(f"--size {text}: write WIDTHxHEIGHTxFRAMES, for example 1280x720x81")
    width, height, frames = map(int, found.groups())
    try:
        return VideoShape(width=width, height=height, frames=frames, per_latent=per_latent)
    except ValueError as err:
        raise SizeError(f"--size {text}: {err}") from err
