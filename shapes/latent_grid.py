"""Latent grid of a video: pixels, latent frames and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

PIXELS_PER_LATENT = 8
"""Pixels per latent pixel along each side, for the Wan2.1 and Wan2.2 A14B VAE."""
WAN22_PIXELS_PER_LATENT = 16
"""Pixels per latent pixel along each side, for the Wan2.2 5B VAE."""
FRAMES_PER_LATENT = 4
PATCH = (1, 2, 2)
"""Latent frames, rows and columns per token."""


def patch_grid(latent: Sequence[int], patch: Sequence[int] = PATCH) -> tuple[int, int, int]:
    """Return the patches along time, height and width for this latent size.

    Patches at an edge may be padded.
    """
    frames, height, width = (
        -(-size // of_patch) for size, of_patch in zip(latent, patch, strict=True)
    )
    return frames, height, width


@dataclass(frozen=True, kw_only=True)
class VideoShape:
    """Video size that the experts and their VAE can generate.

    Raises ValueError unless width and height are multiples of 16 (Wan2.2 5B: 32) and frames are 4n
    + 1.
    """

    width: int
    height: int
    frames: int
    per_latent: int = PIXELS_PER_LATENT
    """Pixels per latent pixel along each side: 8, or 16 for Wan2.2 5B."""

    def __post_init__(self) -> None:
        # A video side must divide into whole tokens, 2 latent pixels wide.
        per_token = self.per_latent * PATCH[1]
        for side, pixels in (("width", self.width), ("height", self.height)):
            if pixels < per_token or pixels % per_token:
                raise ValueError(
                    f"{side} is {pixels}, it must be a multiple of {per_token}: "
                    f"use {_nearest(pixels, per_token, first=per_token)}"
                )
        if self.frames < 1 or self.frames % FRAMES_PER_LATENT != 1:
            raise ValueError(
                f"frames is {self.frames}, it must be a multiple of {FRAMES_PER_LATENT} plus 1: "
                f"use {_nearest(self.frames, FRAMES_PER_LATENT, first=1)}"
            )

    @property
    def latent(self) -> tuple[int, int, int]:
        """Latent shape (frames, height, width)."""
        return (
            # The VAE encodes the first frame alone, then 4 frames per latent frame.
            (self.frames - 1) // FRAMES_PER_LATENT + 1,
            self.height // self.per_latent,
            self.width // self.per_latent,
        )

    @property
    def tokens(self) -> int:
        """Sequence length per lane in the blocks."""
        return prod(patch_grid(self.latent))


def _nearest(value: int, step: int, *, first: int) -> int:
    """Return the member nearest to `value` among first, first + step, first + 2 step, ..."""
    return first + max(0, (value - first + step // 2) // step) * step
