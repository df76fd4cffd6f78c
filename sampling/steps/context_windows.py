"""Context windows in a step. Each is a lane, so the weights are streamed once for all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...shapes import ContextWindows, Windows


def computed_shape(
    shape: Sequence[int], windows: ContextWindows | None, steps: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape [lanes, C, T, h, w] that one CFG side computes in the step with most lanes.

    Args:
        shape: latent shape [B, C, T, h, w], returned unchanged without windows.
    """
    batch, channels, frames, height, width = shape
    if windows is None:
        return batch, channels, frames, height, width
    most = max(len(windows.at(step, frames)) for step in steps)
    return batch * most, channels, windows.frames, height, width


class StepWindows:
    """Context windows in one step of a video with `frames` latent frames.

    The expert computes every window as a video that begins at frame 0, as it was trained.
    """

    def __init__(self, settings: ContextWindows, step: int, frames: int) -> None:
        self._video_frames = frames
        self._repeat_image = settings.repeat_image
        self.frames: Windows = settings.at(step, frames)
        """Latent frames by window."""
        self._weights = settings.weights(self.frames, frames)

    def cut(self, state: torch.Tensor, first_of_image: int) -> list[torch.Tensor]:
        """Cut `state` [1, C, T, h, w] into windows.

        Channels from `first_of_image` on belong to the start image.
        """
        # An index with a list copies, so writing into a part leaves `state` unchanged.
        parts = [state[:, :, list(window)] for window in self.frames]
        if self._repeat_image:
            # Every window starts at frame 0 for the expert, so it gets the start image there.
            for part in parts:
                part[:, first_of_image:, 0] = state[:, first_of_image:, 0]
        return parts

    def cut_timestep_scales(
        self, scales: tuple[float, ...] | None
    ) -> list[tuple[float, ...] | None]:
        """Return the timestep scales by window and frame.

        None for a window in which all are 1.
        """
        if scales is None:
            return [None] * len(self.frames)
        cut = [tuple(scales[frame] for frame in window) for window in self.frames]
        return [None if set(own) == {1.0} else own for own in cut]

    def whole(self, velocities: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Blend window velocities, ordered by video, into a float32 velocity per video."""
        count = len(self.frames)
        return [
            self._merged(velocities[first : first + count])
            for first in range(0, len(velocities), count)
        ]

    def _merged(self, velocities: Sequence[torch.Tensor]) -> torch.Tensor:
        _, channels, _, *size = velocities[0].shape
        merged = torch.zeros(1, channels, self._video_frames, *size, device=velocities[0].device)
        for velocity, window, weights in zip(velocities, self.frames, self._weights, strict=True):
            # In fp32, so that half-precision velocities are summed in fp32.
            counted = torch.tensor(weights, device=merged.device).reshape(1, 1, -1, 1, 1)
            # Correct only without repeated frames in a window: an indexed += counts an index once.
            merged[:, :, list(window)] += velocity * counted
        return merged
