"""Context windows: a video longer than what an expert was trained on, looked at in overlapping pieces.

Every step computes each window as a video of its own and puts the pieces together by weights. The windows begin at
other frames from step to step, so that seams do not lie where they lay before, unless they are told to stay.

The rule is the one that AnimateDiff-Evolved calls uniform (standard): windows of one size at even distances, shifted
from step to step by a sequence that halves what is left (0, 1/2, 1/4, 3/4, 1/8, ...), none beyond the ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from .shapes import FRAMES_PER_LATENT

Windows = tuple[tuple[int, ...], ...]
"""The latent frames of each window, in their order."""


def _flat(size: int, overlap: int) -> list[Fraction]:
    return [Fraction(1)] * size


def _linear(size: int, overlap: int) -> list[Fraction]:
    """Rising over the frames that two neighbours share, and falling over them at the end."""
    ramp = overlap + 1
    return [Fraction(min(place + 1, size - place, ramp), ramp) for place in range(size)]


def _pyramid(size: int, overlap: int) -> list[Fraction]:
    """Rising to the middle."""
    return [Fraction(min(place + 1, size - place)) for place in range(size)]


BLENDS: Mapping[str, Callable[[int, int], list[Fraction]]] = {"linear": _linear, "pyramid": _pyramid, "flat": _flat}
"""How much each frame of a window counts where windows overlap: (frames, overlap) -> a weight above 0 for each."""


@dataclass(frozen=True, kw_only=True)
class ContextWindows:
    """How a long video is cut into windows. Frames are those of the latent, each of which stands for 4 of the video.

    Raises ValueError for numbers that make no windows.
    """

    frames: int = 21
    """Of each window, 2 or more; 21 are 81 of the video, what Wan was trained on."""
    overlap: int = 4
    """Frames that neighbours share, at least; less than `frames`."""
    stride: int = 1
    """The widest distance between frames of a window: 1, 2, 4, ... Above 1, windows of every 2nd, 4th, ... frame come
    on top of those of neighbouring frames, as far as the video has room for them."""
    blend: str = "linear"
    """One of `BLENDS`."""
    repeat_image: bool = True
    """Whether every window begins with the start image, as the first one does."""
    shift_windows: bool = True
    """Whether the windows begin elsewhere from step to step; otherwise every step has those of step 0."""

    def __post_init__(self) -> None:
        if self.frames < 2:
            raise ValueError(f"windows of {self.frames} latent frames: give at least 2, one alone has no motion")
        if not 0 <= self.overlap < self.frames:
            raise ValueError(
                f"windows of {self.frames} latent frames cannot overlap by {self.overlap}: give 0 to {self.frames - 1}"
            )
        if self.stride < 1 or self.stride & (self.stride - 1):
            raise ValueError(f"a stride of {self.stride} latent frames: give 1, 2, 4 or another power of two")
        if self.blend not in BLENDS:
            raise ValueError(f"unknown blend {self.blend!r}: choose one of {', '.join(BLENDS)}")

    def check_video(self, frames: int) -> None:
        """Refuse a video of that many latent frames that is shorter than one window."""
        if self.frames > frames:
            raise ValueError(
                f"windows of {_of_video(self.frames)} frames ({self.frames} latent) are longer than the video of "
                f"{_of_video(frames)} ({frames} latent): give windows of at most {_of_video(frames)} frames, or none"
            )

    def at(self, step: int, frames: int) -> Windows:
        """The windows of one step, 0-based, of a video of that many latent frames; together they hold every frame."""
        self.check_video(frames)
        hop, shift = self.frames - self.overlap, halving(step) if self.shift_windows else Fraction(0)
        windows: list[tuple[int, ...]] = []
        for apart in self._distances():
            span = (self.frames - 1) * apart + 1
            if span <= frames:
                starts = _starts(frames - span, hop * apart, int(shift * hop * apart))
                windows += [tuple(range(start, start + span, apart)) for start in starts]
        return tuple(windows)

    def most(self, steps: Sequence[int], frames: int) -> int:
        """How many windows there are in that of these steps which has most."""
        return max(len(self.at(step, frames)) for step in steps)

    def weights(self, windows: Windows, frames: int) -> list[list[float]]:
        """How much each frame of each window counts in the whole; what a frame's windows count for adds up to 1."""
        own = BLENDS[self.blend](self.frames, self.overlap)
        total = [Fraction(0)] * frames
        for window in windows:
            for place, frame in enumerate(window):
                total[frame] += own[place]
        return [[float(own[place] / total[frame]) for place, frame in enumerate(window)] for window in windows]

    def _distances(self) -> Iterator[int]:
        apart = 1
        while apart <= self.stride:
            yield apart
            apart *= 2


def halving(step: int) -> Fraction:
    """0, 1/2, 1/4, 3/4, 1/8, 5/8, ...: the bits of the number, mirrored behind the point (van der Corput)."""
    value, part = Fraction(0), Fraction(1, 2)
    while step:
        value += part * (step & 1)
        step, part = step >> 1, part / 2
    return value


def _starts(last: int, hop: int, first: int) -> list[int]:
    """Where windows begin: at 0, from `first` on every `hop`, at `last`; without those that no gap needs."""
    wanted = sorted({0, last, *range(min(first, last), last, hop)})
    starts = [0]
    for start, following in pairwise(wanted[1:]):
        if following - starts[-1] > hop:
            starts.append(start)
    return [*starts, last] if last else starts


def _of_video(latent_frames: int) -> int:
    return (latent_frames - 1) * FRAMES_PER_LATENT + 1
