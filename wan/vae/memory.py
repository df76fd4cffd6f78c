"""VAE memory in addition to weights, and tile sizes for a memory budget.

Full frames are decoded if they fit: they have no blended edges, and each can be passed on as soon
as it is decoded. Otherwise the largest tiles that fit are used, or slightly smaller ones with less
work: a few pixels decide whether the last row and column of tiles are mostly overlap.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isqrt
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ...schema.text import format_need
from ...shapes import FP32_BYTES, FRAMES_PER_LATENT, PIXELS_PER_LATENT
from ..checkpoint.meta_model import set_parameters
from .tiles import MIN_TILE_LATENT, OVERLAP, Tiling, decoded_frames

CONVOLUTIONS = ("aten.convolution.default", "aten._convolution.default")


class TensorMemoryTracker(TorchDispatchMode):
    """Context manager that counts the bytes of living tensors created inside it by this thread.

    It counts storages, so views are free. Tensors from before are free too. Use it outside
    inference mode, which hides the operations inside a composite operation.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes in use."""
        self.peak = 0
        """Maximum of `now`."""
        self.convolution_peak = 0
        """Maximum if a convolution's library also copies input and output into another memory
        layout."""
        self._counted: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            self._add(storage, inputs)
        self.peak = max(self.peak, self.now)
        together = self.now
        if str(func) in CONVOLUTIONS:
            together += args[0].nbytes + result.nbytes
        self.convolution_peak = max(self.convolution_peak, together)
        return result

    def _add(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key = storage._cdata
        if key in self._counted or key in inputs:  # a view of a tensor from before
            return
        self._counted.add(key)
        self.now += storage.nbytes()
        # A storage lives as long as any of its views.
        weakref.finalize(storage, self._drop, key, storage.nbytes())

    def _drop(self, key: int, nbytes: int) -> None:
        self._counted.remove(key)
        self.now -= nbytes


def _storages(values: object) -> list[torch.UntypedStorage]:
    return [each.untyped_storage() for each in tree_iter(values) if isinstance(each, torch.Tensor)]


STEADY_AFTER = 3
"""Number of latent frames after which one more does not raise the peak."""


def decode_pixel_bytes(
    config: Mapping[str, Any], latent_frames: int, dtype: torch.dtype = torch.float32
) -> int:
    """Return the bytes per latent pixel decoded at once in a video with `latent_frames` frames.

    Frames are latent ones. Includes all tensors except the weights, and a copy of a convolution's
    input and output: oneDNN and cuDNN copy both into another memory layout.
    """
    return _count_bytes(_key(config), min(latent_frames, STEADY_AFTER), dtype, decode=True)


def encode_pixel_bytes(
    config: Mapping[str, Any], latent_frames: int, dtype: torch.dtype = torch.float32
) -> int:
    """Return the same for encoding to `latent_frames` latent frames, without the video itself."""
    counted = min(latent_frames, STEADY_AFTER)
    # Finished latents, a mean and a variance per value, stay on the device until the last frame.
    finished: int = 2 * config["z_dim"] * dtype.itemsize * (latent_frames - counted)
    return _count_bytes(_key(config), counted, dtype, decode=False) + finished


def _key(config: Mapping[str, Any]) -> str:
    # A string, because the cache of `_count_bytes` needs hashable arguments.
    # diffusers' notes, such as `_diffusers_version`, differ between files of equal VAEs.
    return json.dumps(
        {name: value for name, value in config.items() if not name.startswith("_")}, sort_keys=True
    )


@functools.cache
def _count_bytes(config: str, latent_frames: int, dtype: torch.dtype, *, decode: bool) -> int:
    from diffusers import AutoencoderKLWan

    # Outside inference mode, which hides operations and their intermediate tensors from the
    # tracker.
    with torch.inference_mode(False), torch.device("meta"), torch.no_grad():
        vae = AutoencoderKLWan.from_config(json.loads(config)).eval()
        set_parameters(vae, {name: tensor.to(dtype) for name, tensor in vae.state_dict().items()})
        side = MIN_TILE_LATENT * vae.spatial_compression_ratio
        tile = (latent_frames, MIN_TILE_LATENT, MIN_TILE_LATENT)
        latents = torch.empty(1, vae.config.z_dim, *tile, dtype=dtype)
        frames = FRAMES_PER_LATENT * (latent_frames - 1) + 1
        video = torch.empty(1, 3, frames, side, side, dtype=dtype)
        # After weights and inputs, because the tracker must not count them.
        tracker = TensorMemoryTracker()
        with tracker:
            if decode:
                # Dropped at once: finished frames are moved to RAM one portion at a time.
                for part in decoded_frames(vae, latents):
                    del part
            else:
                vae.encode(video)
    # The smallest tile is representative, because tensors are proportional to the area. Attention
    # scores are an exception: `meta` has no fused kernel and materialises them. In a small tile
    # they are negligible.
    return -(-tracker.convolution_peak // MIN_TILE_LATENT**2)


CHANNELS = 3
FRAMES_AT_ONCE = 4
"""Number of frames decoded and returned together, from one latent frame."""
NEARLY_LARGEST = 0.75
"""Share of the largest fitting tile size. Tiles from this size on are chosen by work."""
HEAP_BYTES = 500_000_000
"""Allowance on a CPU for freed tensors that the C library keeps: up to 0.34 GB in glibc."""
GB = 1e9


class VaeMemoryError(ValueError):
    """Too little memory for the smallest tile.

    The message has the needed and the given size.
    """


@dataclass(frozen=True, kw_only=True)
class DecodeNeeds:
    """Memory requirements for decoding one video, in addition to the VAE weights."""

    height: int
    """In latent pixels."""
    width: int
    """In latent pixels."""
    frames: int
    """Number of decoded frames."""
    pixel_bytes: int
    """Device memory per latent pixel decoded at once."""
    value_bytes: int
    """Bytes per frame value in RAM: 4 for images, 1 for a video file."""
    keeps_frames: bool
    """True if RAM keeps all frames. With tiles it always does: a frame is complete only with the
    last tile."""
    per_latent: int = PIXELS_PER_LATENT
    """Pixels per latent pixel, along either side."""
    task: str = "decoding"
    """For messages."""

    def device_bytes(self, tiling: Tiling | None) -> int:
        """Return the device memory for one tile, or for a full frame (None)."""
        return self.pixel_bytes * self._area(tiling)

    def host_bytes(self, tiling: Tiling | None) -> int:
        """Return the RAM for frames, and for tile edges that are still to be blended."""
        pixel = CHANNELS * self.per_latent**2
        picture = pixel * self.height * self.width
        # The frames of one latent frame exist twice for a moment: as computed, and converted.
        total = FRAMES_AT_ONCE * pixel * self._area(tiling) * (FP32_BYTES + self.value_bytes)
        tiled = tiling is not None and tiling.cuts(self.height, self.width)
        if tiled or self.keeps_frames:
            total += self.frames * picture * self.value_bytes
        if tiling is not None and tiled:
            total += self._edges(tiling)
        return total

    def fit(self, tiling: Tiling | None, budget: int, *, shared: bool) -> bool:
        """Return True if device memory, plus host memory if `shared`, fits in `budget` bytes."""
        if shared:
            budget -= self.host_bytes(tiling) + HEAP_BYTES
        return self.device_bytes(tiling) <= budget

    def _area(self, tiling: Tiling | None) -> int:
        if tiling is None:
            return self.height * self.width
        side = tiling.pixels // self.per_latent
        return min(side, self.height) * min(side, self.width)

    def _edges(self, tiling: Tiling) -> int:
        """Return the bytes for the lower edges of a tile row and the right edge of one tile.

        Counts all frames, in fp32.
        """
        tiles = tiling.tiles(self.height, self.width)
        row = sum(len(tile.columns) for tile in tiles if tile.row == 0)
        # Pixels: blended lines x the width of a tile row, then x the height of one tile.
        below = tiling.blended * row * self.per_latent
        right = tiling.blended * min(tiling.pixels, self.height * self.per_latent)
        return (below + right) * CHANNELS * FP32_BYTES * self.frames


def choose_tiling(needs: DecodeNeeds, budget: int, *, shared: bool) -> Tiling | None:
    """Return the tiling for a decode within `budget` bytes, None for full frames.

    Args:
        needs: memory requirements for the video.
        budget: device bytes.
        shared: True if the device computes in RAM, so that frames count against the budget too.

    Raises:
        VaeMemoryError: no tile with 8 latent pixels or more fits.
    """
    if needs.fit(None, budget, shared=shared):
        return None
    fitting = _fitting(_tilings(needs), needs, budget, shared=shared)
    return _least(fitting, lambda tiling: tiling.computed(needs.height, needs.width))


def shared_tiling(
    needs: DecodeNeeds, budget: int, *, shared: bool, workers: int, videos: int
) -> Tiling:
    """Return the tiling for `videos` videos decoded by `workers` workers with `budget` bytes each.

    Every worker gets a tile if possible. Among the largest such tilings, the busiest worker's work
    decides. A full frame is one tile here. `needs` and `shared` are as in `choose_tiling`.

    Raises:
        VaeMemoryError: no tile with 8 latent pixels or more fits.
    """
    picture = max(MIN_TILE_LATENT, needs.height, needs.width) * needs.per_latent
    every = [*_tilings(needs), Tiling.of(picture, needs.per_latent)]
    fitting = _fitting(every, needs, budget, shared=shared)

    def count(tiling: Tiling) -> int:
        return videos * len(tiling.tiles(needs.height, needs.width))

    enough = [tiling for tiling in fitting if count(tiling) >= workers] or fitting[:1]
    return _least(enough, lambda tiling: ceil(count(tiling) / workers) * needs.device_bytes(tiling))


def _least(fitting: Sequence[Tiling], work: Callable[[Tiling], int]) -> Tiling:
    """Return the nearly largest tiling with the least work.

    For equal work, larger tiles are chosen because they have fewer seams.
    """
    large = [tiling for tiling in fitting if tiling.pixels >= NEARLY_LARGEST * fitting[-1].pixels]
    return min(large, key=lambda tiling: (work(tiling), -tiling.pixels))


def _fitting(
    tilings: Iterable[Tiling], needs: DecodeNeeds, budget: int, *, shared: bool
) -> list[Tiling]:
    """Return the tilings that fit, at least one.

    Raises:
        VaeMemoryError: no tiling fits.
    """
    fitting = [tiling for tiling in tilings if needs.fit(tiling, budget, shared=shared)]
    if not fitting:
        raise VaeMemoryError(too_little(needs, budget, shared=shared))
    return fitting


def smaller_tiling(needs: DecodeNeeds, tiling: Tiling | None) -> Tiling | None:
    """Return tiles with about half the area of `tiling`, or None if it is the smallest."""
    least = MIN_TILE_LATENT * needs.per_latent
    whole = max(needs.height, needs.width) * needs.per_latent
    side = whole
    if tiling is not None:
        side = tiling.pixels
    area = min(side, needs.height * needs.per_latent) * min(side, needs.width * needs.per_latent)
    smaller = max(least, isqrt(area // 2) // needs.per_latent * needs.per_latent)
    if smaller < side and whole > least:
        return Tiling.of(smaller, needs.per_latent)
    return None


def too_little(needs: DecodeNeeds, budget: int, *, shared: bool) -> str:
    """Return the error message for a budget that is too small even for the smallest tile."""
    smallest = Tiling.of(MIN_TILE_LATENT * needs.per_latent, needs.per_latent)
    width = needs.width * needs.per_latent
    height = needs.height * needs.per_latent
    need = f"{format_need(needs.device_bytes(smallest))} of working memory"
    if shared:
        in_ram = format_need(needs.host_bytes(smallest) + HEAP_BYTES)
        need += f" and {in_ram} for its {needs.frames} frames"
    return (
        f"{needs.task} {width}x{height} frames in tiles of {smallest.pixels} pixels, the smallest, "
        f"takes {need}; {format_need(budget)} given: give it more memory, or unload other models"
    )


def _tilings(needs: DecodeNeeds) -> list[Tiling]:
    """Return all tilings that cut the frame with exactly a quarter overlap, smallest first."""
    # In steps of 4, so that a quarter of the side is a whole latent pixel.
    sizes = range(MIN_TILE_LATENT, max(needs.height, needs.width), OVERLAP)
    return [Tiling.of(size * needs.per_latent, needs.per_latent) for size in sizes]
