"""Tile size of a decode within a memory budget.

Full frames are decoded if they fit: they have no blended edges, and each can be passed on as soon as it is decoded.
Otherwise the largest tiles that fit, or slightly smaller ones that compute less: a few pixels decide whether the last
row and column of tiles are mostly overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isqrt

from ...schema import FP32_BYTES, PIXELS_PER_LATENT, need_text
from .tiles import MIN_TILE_LATENT, OVERLAP, Tiling

CHANNELS = 3
FRAMES_AT_ONCE = 4
"""Frames that are decoded from one latent frame and returned together."""
NEARLY_LARGEST = 0.75
"""Tiles of at least this share of the largest fitting size are preferred if they compute less."""
HEAP_BYTES = 500_000_000
"""Allowance on a CPU for freed tensors that the C library does not return to the system; up to 0.34 GB in glibc."""
GB = 1e9


class VaeRoomError(ValueError):
    """Too little memory for the smallest tile; the message says how much is needed and how much is given."""


@dataclass(frozen=True, kw_only=True)
class DecodeNeeds:
    """Memory requirements of decoding one video, in addition to the VAE's weights."""

    height: int
    """In latent pixels."""
    width: int
    """In latent pixels."""
    frames: int
    """Frames of the decoded video."""
    pixel_bytes: int
    """Device memory for each latent pixel that is decoded at once."""
    value_bytes: int
    """Bytes of each value of a frame in RAM: 4 for images, 1 for a video file."""
    keeps_frames: bool
    """True if all frames are kept in RAM. With tiles they always are: a frame is complete only with its last tile."""
    per_latent: int = PIXELS_PER_LATENT
    """Pixels for each latent pixel, along either side."""
    task: str = "decoding"
    """For messages."""

    def device_bytes(self, tiling: Tiling | None) -> int:
        """Return the device memory of one tile, or of a full frame (None)."""
        return self.pixel_bytes * self._area(tiling)

    def host_bytes(self, tiling: Tiling | None) -> int:
        """Return the RAM of frames and of tile edges that are still to be blended."""
        pixel = CHANNELS * self.per_latent**2
        picture = pixel * self.height * self.width
        tiled = tiling is not None and tiling.cuts(self.height, self.width)
        kept = self.frames if tiled or self.keeps_frames else 0
        # Frames of one latent frame exist twice for a moment: as computed, and converted.
        passing = FRAMES_AT_ONCE * pixel * self._area(tiling) * (FP32_BYTES + self.value_bytes)
        return kept * picture * self.value_bytes + passing + (self._edges(tiling) if tiled and tiling else 0)

    def fit(self, tiling: Tiling | None, budget: int, *, shared: bool) -> bool:
        """Return whether `budget` bytes suffice for the device, or if `shared` for device and host memory together."""
        return self.device_bytes(tiling) + (self.host_bytes(tiling) + HEAP_BYTES if shared else 0) <= budget

    def _area(self, tiling: Tiling | None) -> int:
        side = max(self.height, self.width) if tiling is None else tiling.pixels // self.per_latent
        return min(side, self.height) * min(side, self.width)

    def _edges(self, tiling: Tiling) -> int:
        """Return the bytes of the lower edges of a row of tiles and the right edge of one; all frames, in fp32."""
        row, *_ = self._rows(tiling)
        below = tiling.blended * sum(row) * self.per_latent
        right = tiling.blended * min(tiling.pixels, self.height * self.per_latent)
        return (below + right) * CHANNELS * FP32_BYTES * self.frames

    def _rows(self, tiling: Tiling) -> list[list[int]]:
        """Return the widths of the tiles, row by row."""
        rows: dict[int, list[int]] = {}
        for tile in tiling.tiles(self.height, self.width):
            rows.setdefault(tile.row, []).append(len(tile.columns))
        return list(rows.values())


def fitting_tiling(needs: DecodeNeeds, budget: int, *, shared: bool) -> Tiling | None:
    """Return the tiling for a decode within `budget` bytes, None for full frames.

    Args:
        needs: memory requirements of the video.
        budget: bytes of the device.
        shared: True if the device computes in RAM, so that frames count against the budget too.

    Raises:
        VaeRoomError: no tile of 8 latent pixels or more fits.
    """
    if needs.fit(None, budget, shared=shared):
        return None
    fitting = [tiling for tiling in _tilings(needs) if needs.fit(tiling, budget, shared=shared)]
    if not fitting:
        raise VaeRoomError(too_little(needs, budget, shared=shared))
    # Of equal work, the larger tiles are chosen: they have fewer seams.
    large = [tiling for tiling in fitting if tiling.pixels >= NEARLY_LARGEST * fitting[-1].pixels]
    return min(large, key=lambda tiling: (tiling.computed(needs.height, needs.width), -tiling.pixels))


def shared_tiling(needs: DecodeNeeds, budget: int, *, shared: bool, workers: int, videos: int) -> Tiling:
    """Return the tiling in which `workers` workers decode `videos` videos together, each within `budget` bytes.

    Every worker gets a tile if possible. Among the largest such tilings, the one in which the busiest worker computes
    least is chosen; a full frame is one tile here. `needs` and `shared` are as in `fitting_tiling`.

    Raises:
        VaeRoomError: no tile of 8 latent pixels or more fits.
    """
    picture = max(MIN_TILE_LATENT, needs.height, needs.width) * needs.per_latent
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
    """Return tiles of about half the area of `tiling`, None if that is the smallest one already."""
    least = MIN_TILE_LATENT * needs.per_latent
    whole = max(needs.height, needs.width) * needs.per_latent
    side = whole if tiling is None else tiling.pixels
    area = min(side, needs.height * needs.per_latent) * min(side, needs.width * needs.per_latent)
    smaller = max(least, isqrt(area // 2) // needs.per_latent * needs.per_latent)
    return Tiling.of(smaller, needs.per_latent) if smaller < side and whole > least else None


def too_little(needs: DecodeNeeds, budget: int, *, shared: bool) -> str:
    """Return the message that even the smallest tile does not fit into `budget` bytes."""
    smallest = Tiling.of(MIN_TILE_LATENT * needs.per_latent, needs.per_latent)
    width, height = needs.width * needs.per_latent, needs.height * needs.per_latent
    for_frames = (
        f" and {need_text(needs.host_bytes(smallest) + HEAP_BYTES)} for its {needs.frames} frames" if shared else ""
    )
    return (
        f"{needs.task} {width}x{height} frames in tiles of {smallest.pixels} pixels, the smallest, takes "
        f"{need_text(needs.device_bytes(smallest))} of working memory{for_frames}; {need_text(budget)} given: "
        "give it more memory, or unload other models"
    )


def _tilings(needs: DecodeNeeds) -> list[Tiling]:
    """Return all tilings that cut the frame and overlap by exactly a quarter, the smallest first."""
    sizes = range(MIN_TILE_LATENT, max(needs.height, needs.width), OVERLAP)
    return [Tiling.of(size * needs.per_latent, needs.per_latent) for size in sizes]
