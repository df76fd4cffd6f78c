"""Memory of a VAE in addition to its weights, and the size of tiles that fits into a budget.

Full frames are decoded if they fit: they have no blended edges, and each can be passed on as soon as it is decoded.
Otherwise the largest tiles that fit, or slightly smaller ones that compute less: a few pixels decide whether the last
row and column of tiles are mostly overlap.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isqrt
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ...schema import FP32_BYTES, FRAMES_PER_LATENT, PIXELS_PER_LATENT, format_need
from ..checkpoint.meta_model import set_parameters
from .tiles import MIN_TILE_LATENT, OVERLAP, Tiling, decoded_frames

CONVOLUTIONS = ("aten.convolution.default", "aten._convolution.default")


class TensorMemoryTracker(TorchDispatchMode):
    """Context manager that counts the bytes of tensors that this thread creates inside it, while they are alive.

    Storages are counted, so views are free; tensors from before are free too. Use it outside inference mode, which
    hides the operations that a composite operation consists of.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes that are alive."""
        self.peak = 0
        """Maximum of `now`."""
        self.convolution_peak = 0
        """Maximum if a convolution's library also copies input and output into another memory layout."""
        self._counted: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {tensor.untyped_storage()._cdata for tensor in tree_iter((args, kwargs)) if _is_tensor(tensor)}
        for tensor in tree_iter(result):
            if _is_tensor(tensor):
                self._add(tensor.untyped_storage(), inputs)
        self.peak = max(self.peak, self.now)
        reordered = _bytes(args[0]) + _bytes(result) if str(func) in CONVOLUTIONS else 0
        self.convolution_peak = max(self.convolution_peak, self.now + reordered)
        return result

    def _add(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key = storage._cdata
        if key in self._counted or key in inputs:  # a view of a tensor from before
            return
        self._counted.add(key)
        self.now += storage.nbytes()
        # A storage is alive as long as any of its views.
        weakref.finalize(storage, self._drop, key, storage.nbytes())

    def _drop(self, key: int, nbytes: int) -> None:
        self._counted.remove(key)
        self.now -= nbytes


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


STEADY_AFTER = 3
"""Latent frames after which a further one does not raise the peak."""


def decode_pixel_bytes(config: Mapping[str, Any], latent_frames: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes for each latent pixel that is decoded at once, in a video of `latent_frames` latent frames.

    Includes all tensors except the weights, and one copy of a convolution's input and output: oneDNN and cuDNN copy
    both into another memory layout.
    """
    return _count_bytes(_key(config), min(latent_frames, STEADY_AFTER), dtype, decode=True)


def encode_pixel_bytes(config: Mapping[str, Any], latent_frames: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the same for encoding a video of `latent_frames` latent frames, without the video itself."""
    return _count_bytes(_key(config), min(latent_frames, STEADY_AFTER), dtype, decode=False)


def _key(config: Mapping[str, Any]) -> str:
    # A string, because the cache of `_count_bytes` needs hashable arguments.
    return json.dumps({name: value for name, value in config.items() if not name.startswith("_")}, sort_keys=True)


@functools.cache
def _count_bytes(config: str, latent_frames: int, dtype: torch.dtype, *, decode: bool) -> int:
    from diffusers import AutoencoderKLWan

    # Outside inference mode, which hides operations and their intermediate tensors from the tracker.
    with torch.inference_mode(False), torch.device("meta"), torch.no_grad():
        vae = AutoencoderKLWan.from_config(json.loads(config)).eval()
        set_parameters(vae, {name: tensor.to(dtype) for name, tensor in vae.state_dict().items()})
        side = MIN_TILE_LATENT * vae.spatial_compression_ratio
        latents = torch.empty(1, vae.config.z_dim, latent_frames, MIN_TILE_LATENT, MIN_TILE_LATENT, dtype=dtype)
        video = torch.empty(1, 3, FRAMES_PER_LATENT * (latent_frames - 1) + 1, side, side, dtype=dtype)
        tracker = TensorMemoryTracker()
        with tracker:
            if decode:
                for frames in decoded_frames(vae, latents):
                    del frames
            else:
                vae.encode(video)
    # The smallest tile is representative: tensors are proportional to the area, except for attention scores, which
    # `meta` materialises because it has no fused kernel; in a small tile they are negligible.
    return -(-tracker.convolution_peak // MIN_TILE_LATENT**2)


CHANNELS = 3
FRAMES_AT_ONCE = 4
"""Frames that are decoded from one latent frame and returned together."""
NEARLY_LARGEST = 0.75
"""Tiles of at least this share of the largest fitting size are preferred if they compute less."""
HEAP_BYTES = 500_000_000
"""Allowance on a CPU for freed tensors that the C library does not return to the system; up to 0.34 GB in glibc."""
GB = 1e9


class VaeMemoryError(ValueError):
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
        row = sum(len(tile.columns) for tile in tiling.tiles(self.height, self.width) if tile.row == 0)
        below = tiling.blended * row * self.per_latent
        right = tiling.blended * min(tiling.pixels, self.height * self.per_latent)
        return (below + right) * CHANNELS * FP32_BYTES * self.frames


def choose_tiling(needs: DecodeNeeds, budget: int, *, shared: bool) -> Tiling | None:
    """Return the tiling for a decode within `budget` bytes, None for full frames.

    Args:
        needs: memory requirements of the video.
        budget: bytes of the device.
        shared: True if the device computes in RAM, so that frames count against the budget too.

    Raises:
        VaeMemoryError: no tile of 8 latent pixels or more fits.
    """
    if needs.fit(None, budget, shared=shared):
        return None
    fitting = _fitting(_tilings(needs), needs, budget, shared=shared)
    # Of equal work, the larger tiles are chosen: they have fewer seams.
    large = [tiling for tiling in fitting if tiling.pixels >= NEARLY_LARGEST * fitting[-1].pixels]
    return min(large, key=lambda tiling: (tiling.computed(needs.height, needs.width), -tiling.pixels))


def shared_tiling(needs: DecodeNeeds, budget: int, *, shared: bool, workers: int, videos: int) -> Tiling:
    """Return the tiling in which `workers` workers decode `videos` videos together, each within `budget` bytes.

    Every worker gets a tile if possible. Among the largest such tilings, the one in which the busiest worker computes
    least is chosen; a full frame is one tile here. `needs` and `shared` are as in `choose_tiling`.

    Raises:
        VaeMemoryError: no tile of 8 latent pixels or more fits.
    """
    picture = max(MIN_TILE_LATENT, needs.height, needs.width) * needs.per_latent
    every = [*_tilings(needs), Tiling.of(picture, needs.per_latent)]
    fitting = _fitting(every, needs, budget, shared=shared)

    def count(tiling: Tiling) -> int:
        return videos * len(tiling.tiles(needs.height, needs.width))

    enough = [tiling for tiling in fitting if count(tiling) >= workers] or fitting[:1]
    large = [tiling for tiling in enough if tiling.pixels >= NEARLY_LARGEST * enough[-1].pixels]
    return min(large, key=lambda tiling: (ceil(count(tiling) / workers) * needs.device_bytes(tiling), -tiling.pixels))


def _fitting(tilings: Iterable[Tiling], needs: DecodeNeeds, budget: int, *, shared: bool) -> list[Tiling]:
    """Return the tilings that fit, at least one.

    Raises:
        VaeMemoryError: none fits.
    """
    fitting = [tiling for tiling in tilings if needs.fit(tiling, budget, shared=shared)]
    if not fitting:
        raise VaeMemoryError(too_little(needs, budget, shared=shared))
    return fitting


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
        f" and {format_need(needs.host_bytes(smallest) + HEAP_BYTES)} for its {needs.frames} frames" if shared else ""
    )
    return (
        f"{needs.task} {width}x{height} frames in tiles of {smallest.pixels} pixels, the smallest, takes "
        f"{format_need(needs.device_bytes(smallest))} of working memory{for_frames}; {format_need(budget)} given: "
        "give it more memory, or unload other models"
    )


def _tilings(needs: DecodeNeeds) -> list[Tiling]:
    """Return all tilings that cut the frame and overlap by exactly a quarter, the smallest first."""
    sizes = range(MIN_TILE_LATENT, max(needs.height, needs.width), OVERLAP)
    return [Tiling.of(size * needs.per_latent, needs.per_latent) for size in sizes]
