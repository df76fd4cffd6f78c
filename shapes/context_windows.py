"""Context windows: overlapping pieces of a video longer than an expert's training clips.

Every step computes each window as a separate video and blends the results. By default windows start
at different frames in each step, so seams do not accumulate in one place.

AnimateDiff-Evolved calls this rule uniform (standard): windows with equal size at equal distances,
shifted from step to step by the van der Corput sequence (0, 1/2, 1/4, 3/4, 1/8, ...), and none
beyond the ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from .latent_grid import FRAMES_PER_LATENT

Windows = tuple[tuple[int, ...], ...]
"""Latent frame indices per window, in order."""


def _flat(size: int, overlap: int) -> list[Fraction]:
    return [Fraction(1)] * size


def _linear(size: int, overlap: int) -> list[Fraction]:
    """Weights that rise over the overlap at the start and fall over the overlap at the end."""
    # Two ramps with `overlap + 1` steps add up to 1 in every frame. The first weight is above 0,
    # because the first and last frame of a video lie in one window only.
    ramp = overlap + 1
    return [Fraction(min(place + 1, size - place, ramp), ramp) for place in range(size)]


def _pyramid(size: int, overlap: int) -> list[Fraction]:
    """Weights that rise to the middle."""
    return [Fraction(min(place + 1, size - place)) for place in range(size)]


BLENDS: Mapping[str, Callable[[int, int], list[Fraction]]] = {
    "linear": _linear,
    "pyramid": _pyramid,
    "flat": _flat,
}
"""Blend weights for a window's frames: (frames, overlap) -> one weight above 0 per frame.

Fractions normalise overlapping windows without rounding errors.
"""


@dataclass(frozen=True, kw_only=True)
class ContextWindows:
    """Settings that divide a long video into windows.

    Frames are latent frames. Each stands for 4 video frames.

    Raises ValueError for values out of range.
    """

    frames: int = 21
    """Frames per window, 2 or more. 21 latent frames are 81 video frames, Wan's training length."""
    overlap: int = 4
    """Minimum number of frames shared by neighbouring windows. Less than `frames`."""
    stride: int = 1
    """Largest distance between frames in a window: a power of two. Above 1, windows with every 2nd,
    4th, ... frame are added to the windows with consecutive frames, if the video is long enough."""
    blend: str = "linear"
    """Blend weights, a key in `BLENDS`."""
    repeat_image: bool = True
    """Start every window with the start image, not only the first one."""
    shift_windows: bool = True
    """Shift the windows from step to step. Otherwise every step uses the windows for step 0."""

    def __post_init__(self) -> None:
        if self.frames < 2:
            raise ValueError(
                f"windows of {self.frames} latent frames: give at least 2, one alone has no motion"
            )
        if not 0 <= self.overlap < self.frames:
            raise ValueError(
                f"windows of {self.frames} latent frames cannot overlap by {self.overlap}: give 0 "
                f"to {self.frames - 1}"
            )
        if self.stride < 1 or self.stride & (self.stride - 1):
            raise ValueError(
                f"a stride of {self.stride} latent frames: give 1, 2, 4 or another power of two"
            )
        if self.blend not in BLENDS:
            raise ValueError(f"unknown blend {self.blend!r}: choose one of {', '.join(BLENDS)}")

    def check_video(self, frames: int) -> None:
        """Raise ValueError if a video with `frames` latent frames is shorter than one window."""
        if self.frames > frames:
            raise ValueError(
                f"windows of {_of_video(self.frames)} frames ({self.frames} latent) are longer "
                f"than the video of {_of_video(frames)} ({frames} latent): give windows of at most "
                f"{_of_video(frames)} frames, or none"
            )

    def at(self, step: int, frames: int) -> Windows:
        """Return the windows in step `step` (from 0) for a video with `frames` latent frames.

        They cover every frame.
        """
        self.check_video(frames)
        hop = self.frames - self.overlap
        shift = van_der_corput(step * self.shift_windows)
        windows: list[tuple[int, ...]] = []
        # Windows with stride 1 cover every frame, so wider strides may be left out.
        for stride in (2**power for power in range(self.stride.bit_length())):
            span = (self.frames - 1) * stride + 1
            if span <= frames:
                # The shift is rounded down, so it is less than one hop.
                starts = _starts(frames - span, hop * stride, int(shift * hop * stride))
                windows += [tuple(range(start, start + span, stride)) for start in starts]
        return tuple(windows)

    def weights(self, windows: Windows, frames: int) -> list[list[float]]:
        """Return blend weights for each window, frame by frame.

        The weights for one frame add up to 1.
        """
        profile = BLENDS[self.blend](self.frames, self.overlap)
        total = [Fraction(0)] * frames
        for window in windows:
            for place, frame in enumerate(window):
                total[frame] += profile[place]
        return [
            [float(profile[place] / total[frame]) for place, frame in enumerate(window)]
            for window in windows
        ]


def van_der_corput(step: int) -> Fraction:
    """Return element `step` of 0, 1/2, 1/4, 3/4, ...: the bits of `step`, mirrored at the point."""
    value = Fraction(0)
    bit_value = Fraction(1, 2)
    while step:
        value += bit_value * (step & 1)
        step = step >> 1
        bit_value = bit_value / 2
    return value


def _starts(last: int, hop: int, first: int) -> list[int]:
    """Return the windows' first frames: 0, every `hop` from `first` on, and `last`.

    Redundant ones are omitted.
    """
    wanted = sorted({0, last, *range(first, last, hop)})
    starts = [0]
    for start, following in pairwise(wanted[1:]):
        # Without `start`, the windows on both sides would lie more than a hop apart.
        if following - starts[-1] > hop:
            starts.append(start)
    # If `last` is 0, the window is as long as the video, and `starts` has 0 already.
    return [*starts, last] if last else starts


def _of_video(latent_frames: int) -> int:
    return (latent_frames - 1) * FRAMES_PER_LATENT + 1
