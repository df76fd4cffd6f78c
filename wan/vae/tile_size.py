"""How large the tiles of a decode may be in the memory that is given.

Whole frames where they fit: they are the VAE's own picture, and each leaves as it is made. Else tiles that are not much
smaller than the largest that fit; of these, those that compute least, because a few pixels decide whether the last row
and column are mostly overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isqrt

from ...schema import FP32_BYTES, PIXELS_PER_LATENT, need_text
from .tiles import LEAST_LATENT, OVERLAP, Tiling

CHANNELS = 3
FRAMES_AT_ONCE = 4
"""Frames that one latent frame makes, and that are on their way to their reader together."""
NEARLY_LARGEST = 0.75
"""A tile of that part of the largest that fits is as good, if it computes less."""
HEAP_BYTES = 500_000_000
"""Where the device computes in RAM: what the C library keeps of tensors that have ended; up to 0.34 GB in glibc."""
GB = 1e9


class VaeRoomError(ValueError):
    """Too little memory for even the smallest tile; the message says how much there is and how much it takes."""


@dataclass(frozen=True, kw_only=True)
class DecodeNeeds:
    """What decoding one video takes beside the VAE's weights, all sizes in latent pixels."""

    height: int
    width: int
    frames: int
    """Of the decoded video."""
    pixel_bytes: int
    """Of the device, for each latent pixel that is decoded at once."""
    value_bytes: int
    """Of each value of a frame in RAM: 4 for images, 1 on the way into a video file."""
    keeps_frames: bool
    """Whether all frames stay in RAM. Tiles keep them in any case: a frame is done with its last tile only."""
    per_latent: int = PIXELS_PER_LATENT
    doing: str = "decoding"
    """For messages."""

    def device_bytes(self, tiling: Tiling | None) -> int:
        """What is computed at once: a tile, or the whole frame."""
        return self.pixel_bytes * self._area(tiling)

    def host_bytes(self, tiling: Tiling | None) -> int:
        """Frames in RAM, and the edges of tiles that wait for their neighbours."""
        pixel = CHANNELS * self.per_latent**2
        picture = pixel * self.height * self.width
        tiled = tiling is not None and tiling.cuts(self.height, self.width)
        kept = self.frames if tiled or self.keeps_frames else 0
        # One latent frame passes as it was computed, and once more as it is stored.
        passing = FRAMES_AT_ONCE * pixel * self._area(tiling) * (FP32_BYTES + self.value_bytes)
        return kept * picture * self.value_bytes + passing + (self._edges(tiling) if tiled and tiling else 0)

    def fit(self, tiling: Tiling | None, budget: int, *, shared: bool) -> bool:
        """Whether `budget` bytes are enough for the device, or for both where that computes in RAM (`shared`)."""
        return self.device_bytes(tiling) + (self.host_bytes(tiling) + HEAP_BYTES if shared else 0) <= budget

    def _area(self, tiling: Tiling | None) -> int:
        side = max(self.height, self.width) if tiling is None else tiling.pixels // self.per_latent
        return min(side, self.height) * min(side, self.width)

    def _edges(self, tiling: Tiling) -> int:
        """Of a row of tiles the lower edges, of one tile the right one; all frames of them, in fp32."""
        row, *_ = self._rows(tiling)
        below = tiling.blended * sum(row) * self.per_latent
        right = tiling.blended * min(tiling.pixels, self.height * self.per_latent)
        return (below + right) * CHANNELS * FP32_BYTES * self.frames

    def _rows(self, tiling: Tiling) -> list[list[int]]:
        """Widths of the tiles, row by row."""
        rows: dict[int, list[int]] = {}
        for tile in tiling.tiles(self.height, self.width):
            rows.setdefault(tile.row, []).append(len(tile.columns))
        return list(rows.values())


def fitting_tiling(needs: DecodeNeeds, budget: int, *, shared: bool) -> Tiling | None:
    """The tiles to decode in within `budget` bytes, None for whole frames.

    Args:
        shared: whether the device computes in RAM, where frames lie too.

    Raises VaeRoomError where no tile of 8 latent pixels or more fits.
    """
    if needs.fit(None, budget, shared=shared):
        return None
    fitting = [tiling for tiling in _tilings(needs) if needs.fit(tiling, budget, shared=shared)]
    if not fitting:
        raise VaeRoomError(too_little(needs, budget, shared=shared))
    large = [tiling for tiling in fitting if tiling.pixels >= NEARLY_LARGEST * fitting[-1].pixels]
    return min(large, key=lambda tiling: (tiling.computed(needs.height, needs.width), -tiling.pixels))


def shared_tiling(needs: DecodeNeeds, budget: int, *, shared: bool, workers: int, videos: int) -> Tiling:
    """The tiles in which that many workers decode that many videos together, each in `budget` bytes.

    Of tiles that are not much smaller than the largest of which every worker gets one, those of which the busiest
    computes least; a whole picture is one tile here. `needs` and `shared` are as of `fitting_tiling`.

    Raises VaeRoomError where no tile of 8 latent pixels or more fits.
    """
    picture = max(LEAST_LATENT, needs.height, needs.width) * needs.per_latent
    every = [*_tilings(needs), Tiling.of(picture, needs.per_latent)]
    fitting = [tiling for tiling in every if needs.fit(tiling, budget, shared=shared)]
    if not fitting:
        raise VaeRoomError(too_little(needs, budget, shared=shared))

    def count(tiling: Tiling) -> int:
        return videos * len(tiling.tiles(needs.height, needs.width))

    enough = [tiling for tiling in fitting if count(tiling) >= workers] or fitting[:1]
    large = [tiling for tiling in enough if tiling.pixels >= NEARLY_LARGEST * enough[-1].pixels]
    return min(large, key=lambda tiling: (ceil(count(tiling) / workers) * needs.device_bytes(tiling), -tiling.pixels))


def smaller_tiling(needs: DecodeNeeds, tiling: Tiling | None) -> Tiling | None:
    """Tiles of about half the area of those that did not fit, None where these were the smallest already."""
    least = LEAST_LATENT * needs.per_latent
    whole = max(needs.height, needs.width) * needs.per_latent
    side = whole if tiling is None else tiling.pixels
    area = min(side, needs.height * needs.per_latent) * min(side, needs.width * needs.per_latent)
    smaller = max(least, isqrt(area // 2) // needs.per_latent * needs.per_latent)
    return Tiling.of(smaller, needs.per_latent) if smaller < side and whole > least else None


def too_little(needs: DecodeNeeds, budget: int, *, shared: bool) -> str:
    """Why no tile fits into `budget` bytes, in words with numbers."""
    least = Tiling.of(LEAST_LATENT * needs.per_latent, needs.per_latent)
    width, height = needs.width * needs.per_latent, needs.height * needs.per_latent
    beside = (
        f" and {need_text(needs.host_bytes(least) + HEAP_BYTES)} around its {needs.frames} frames" if shared else ""
    )
    return (
        f"{needs.doing} {width}x{height} frames in tiles of {least.pixels} pixels, the smallest, takes "
        f"{need_text(needs.device_bytes(least))} to compute in{beside}; {need_text(budget)} given: "
        "give it more memory, or unload other models"
    )


def _tilings(needs: DecodeNeeds) -> list[Tiling]:
    """All tiles that cut the picture and overlap by a whole quarter, the smallest first."""
    sizes = range(LEAST_LATENT, max(needs.height, needs.width), OVERLAP)
    return [Tiling.of(size * needs.per_latent, needs.per_latent) for size in sizes]
