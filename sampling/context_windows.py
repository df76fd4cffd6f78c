"""A step of a long video in context windows: each is a lane of its own, and the weights pass once for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..schema import ContextWindows, Windows


def computed_shape(shape: Sequence[int], windows: ContextWindows | None, steps: Sequence[int]) -> tuple[int, ...]:
    """What lanes of one side are, all together, for latents of `shape` [B, C, T, h, w], in the step with most of them.

    Without windows that is `shape`: a lane for each sample.
    """
    batch, channels, frames, height, width = shape
    if windows is None:
        return batch, channels, frames, height, width
    return batch * windows.most(steps, frames), channels, windows.frames, height, width


class StepWindows:
    """The windows of one step of a video of `frames` latent frames.

    Every window is told to the expert as a video that begins at frame 0, which is what it was trained on.
    """

    def __init__(self, settings: ContextWindows, step: int, frames: int) -> None:
        self._frames, self._repeat_image = frames, settings.repeat_image
        self._windows = settings.at(step, frames)
        self._weights = settings.weights(self._windows, frames)

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def frames(self) -> Windows:
        """The frames of the video that each window holds."""
        return self._windows

    def cut(self, state: torch.Tensor, latent_channels: int) -> list[torch.Tensor]:
        """The part of `state` [1, C, T, h, w] in each window; channels behind those of the latent tell of the image."""
        parts = [state[:, :, list(window)] for window in self._windows]
        if self._repeat_image:
            for part in parts:
                part[:, latent_channels:, 0] = state[:, latent_channels:, 0]
        return parts

    def cut_freedom(self, freedom: tuple[float, ...] | None) -> list[tuple[float, ...] | None]:
        """How free the frames in each window are; None where all of them are so throughout."""
        if freedom is None:
            return [None] * len(self)
        cut = [tuple(freedom[frame] for frame in window) for window in self._windows]
        return [None if set(own) == {1.0} else own for own in cut]

    def whole(self, velocities: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Velocities of windows, all of a video before those of the next -> that of each video, float32."""
        count = len(self)
        return [self._merged(velocities[first : first + count]) for first in range(0, len(velocities), count)]

    def _merged(self, velocities: Sequence[torch.Tensor]) -> torch.Tensor:
        _, channels, _, *size = velocities[0].shape
        merged = torch.zeros(1, channels, self._frames, *size, device=velocities[0].device)
        for velocity, window, weights in zip(velocities, self._windows, self._weights, strict=True):
            counted = torch.tensor(weights, device=merged.device).reshape(1, 1, -1, 1, 1)
            merged[:, :, list(window)] += velocity * counted
        return merged
