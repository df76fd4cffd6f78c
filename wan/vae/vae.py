"""VAE of Wan: encoding and decoding, whole or in tiles, with smaller tiles after an out-of-memory error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import torch

from ...devices import forget, is_out_of_memory
from ...offload import read_tensors
from ...schema import FP32_BYTES, FRAMES_PER_LATENT
from ..checkpoint.components import component_folder
from ..checkpoint.meta_model import set_parameters
from ..latent_space import SPACES, LatentSpace, space_of
from .blend import TileBlender, as_pixels, stored_as
from .memory import decode_pixel_bytes, encode_pixel_bytes
from .tile_size import DecodeNeeds, VaeRoomError, smaller_tiling
from .tiles import Tiling, crop, decode_tile, decoded_frames, empty_frames
from .weights import VaeWeights, family_of, open_vae_file, open_vae_folder

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan


class VaeInputError(ValueError):
    """Images or latents that the VAE cannot take; the message names their shape and the one to give."""


def open_vae(path: Path | str, dtype: torch.dtype = torch.float32) -> WanVae:
    """Open the VAE of a diffusers pipeline folder, its `vae` folder, or a single file; reads headers and the config.

    It computes in `dtype`.

    Raises:
        CheckpointFileError: a file is missing, truncated, a pickle, or no safetensors file; the config or the tensors
            are not those of a VAE of Wan.
    """
    path = Path(path)
    opened = open_vae_file(path) if path.is_file() else open_vae_folder(component_folder(path, "vae"))
    return WanVae(opened, dtype)


class WanVae:
    """An opened VAE. Weights are read when they are first needed and compute in `dtype`; `close()` frees them."""

    def __init__(self, opened: VaeWeights, dtype: torch.dtype) -> None:
        self._opened, self._dtype = opened, dtype
        self._loaded: AutoencoderKLWan | None = None

    @property
    def space(self) -> LatentSpace:
        """Of its latents."""
        return self._opened.family.space

    def encode_needs(self, video: torch.Tensor) -> DecodeNeeds:
        """What encoding frames [F, H, W, 3] takes beside the weights; all of them lie on the device meanwhile.

        Raises:
            VaeInputError: the video has another shape.
        """
        self._check_video(video)
        frames, height, width, _ = video.shape
        # A VAE that works in patches makes them of the whole video first.
        copies = 1 if self._opened.config.get("patch_size") is None else 2
        return DecodeNeeds(
            height=height // self.space.pixels,
            width=width // self.space.pixels,
            frames=frames,
            pixel_bytes=encode_pixel_bytes(self._opened.config, (frames - 1) // FRAMES_PER_LATENT + 1, self._dtype),
            value_bytes=copies * FP32_BYTES,
            keeps_frames=True,
            per_latent=self.space.pixels,
            doing="encoding",
        )

    def encode(self, video: torch.Tensor, *, device: torch.device | str, tiling: Tiling | None = None) -> torch.Tensor:
        """Encode frames [F, H, W, 3] in 0..1, F = 4n + 1, H and W multiples of P; whole, or in tiles as diffusers does.

        Returns the most likely raw latents, fp32 [1, C, (F - 1) / 4 + 1, H / P, W / P], on the CPU.

        Raises:
            VaeInputError: the video has another shape.
        """
        self._check_video(video)
        vae = self._on(torch.device(device))
        pixels = video.to(device, self._dtype).movedim(-1, 0)[None] * 2 - 1
        height, width = (size // self.space.pixels for size in video.shape[1:3])
        cut = tiling if tiling is not None and tiling.cuts(height, width) else None
        with torch.no_grad(), _tiled(vae, cut):
            raw: torch.Tensor = vae.encode(pixels).latent_dist.mode()
        return raw.cpu().float()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the device that all weights take."""
        return self._dtype.itemsize * sum(prod(tensor.shape) for tensor in self._opened.weights.values())

    def decode_needs(self, latents: torch.Tensor, *, to_file: bool = False) -> DecodeNeeds:
        """What decoding raw latents [B, C, T, h, w] takes beside the weights: as `decode`, or as `stream` (`to_file`).

        Raises:
            VaeInputError: the latents have another shape, or are those of another VAE.
        """
        self._check_latents(latents)
        batch, _, count, height, width = latents.shape
        frames = FRAMES_PER_LATENT * (count - 1) + 1
        return DecodeNeeds(
            height=height,
            width=width,
            # Of a batch all videos stay; on the way into a file one after the other.
            frames=frames if to_file else batch * frames,
            pixel_bytes=decode_pixel_bytes(self._opened.config, count, self._dtype),
            value_bytes=1 if to_file else FP32_BYTES,
            keeps_frames=not to_file,
            per_latent=self.space.pixels,
        )

    def decode(
        self,
        latents: torch.Tensor,
        *,
        device: torch.device | str,
        tiling: Tiling | None = None,
        check: Check = lambda: None,
    ) -> torch.Tensor:
        """Decode raw latents [B, C, T, h, w], one video at a time; whole, or tile by tile.

        `check` is called before every latent frame of every tile, and ends the decode by raising.

        Returns frames in 0..1, fp32 [B, 4 * (T - 1) + 1, P * h, P * w, 3], on the CPU.

        Raises:
            VaeInputError: the latents have another shape, or are those of another VAE.
        """
        self._check_latents(latents)
        videos = empty_frames(latents)
        for one, frames in zip(latents.split(1), videos, strict=True):
            done = 0
            for part in self._decoded(one, torch.device(device), tiling, frames, check):
                frames[done : done + len(part)] = part
                done += len(part)
        return videos

    def stream(
        self,
        latents: torch.Tensor,
        *,
        device: torch.device | str,
        tiling: Tiling | None = None,
        check: Check = lambda: None,
    ) -> Iterator[torch.Tensor]:
        """The frames of `decode` as a video file stores them, [n, P * h, P * w, 3] uint8 on the CPU, as they are made.

        Of a batch, one video after the other. Whole frames come out with every latent frame and are kept nowhere; of
        tiles all frames of a video come out together.

        Raises:
            VaeInputError: the latents have another shape, or are those of another VAE.
        """
        self._check_latents(latents)
        for one in latents.split(1):
            yield from self._decoded(one, torch.device(device), tiling, None, check)

    def _decoded(
        self,
        one: torch.Tensor,
        device: torch.device,
        tiling: Tiling | None,
        into: torch.Tensor | None,
        check: Check,
    ) -> Iterator[torch.Tensor]:
        """Frames of one video that are not yet in `into`: fp32, or uint8 where they go into no tensor."""
        assert tiling is None or tiling.per_latent == self.space.pixels, "tiles of another VAE"
        vae, there = self._on(device), one.to(device, self._dtype)
        if tiling is None or not tiling.cuts(*one.shape[3:]):
            yield from whole_frames(vae, there, torch.float32 if into is not None else torch.uint8, check)
            return
        room = empty_frames(one, torch.uint8)[0] if into is None else into
        tiled_frames(vae, there, tiling, room, check)
        if into is None:
            yield room

    def decode_tile(
        self, latents: torch.Tensor, *, device: torch.device | str, check: Callable[[], None] = lambda: None
    ) -> torch.Tensor:
        """Decode one tile [1, C, T, h, w] for a `TileBlender`; see `vae_tiles.decode_tile`.

        Raises:
            VaeInputError: the latents have another shape, or are those of another VAE.
        """
        self._check_latents(latents)
        return decode_tile(self._on(torch.device(device)), latents.to(device, self._dtype), check)

    def close(self) -> None:
        """Free the weights. Closing twice is allowed, and so is using the VAE again."""
        self._loaded = None

    def _on(self, device: torch.device) -> AutoencoderKLWan:
        if self._loaded is None:
            vae = self._opened.build()
            stored = read_tensors(self._opened.weights)
            set_parameters(vae, {name: tensor.to(self._dtype) for name, tensor in stored.items()})
            self._loaded = vae
        return self._loaded.to(device)

    def _check_video(self, video: torch.Tensor) -> None:
        shape, pixels = list(video.shape), self.space.pixels
        if video.ndim != 4 or shape[-1] != 3 or 0 in shape:
            raise VaeInputError(f"the video is {shape}: give frames [F, H, W, 3]")
        if (shape[0] - 1) % FRAMES_PER_LATENT:
            raise VaeInputError(f"the video has {shape[0]} frames: give {FRAMES_PER_LATENT}n + 1")
        if shape[1] % pixels or shape[2] % pixels:
            raise VaeInputError(f"the frames are {shape[2]}x{shape[1]}: give multiples of {pixels}")

    def _check_latents(self, latents: torch.Tensor) -> None:
        check_latents(latents)
        found, own = space_of(latents.shape[1]), self.space
        if found != own:
            raise VaeInputError(
                f"the latents are {list(latents.shape)}, of {found.models}, and {self._opened.path} is the VAE of "
                f"{own.models}, for {own.channels} channels: take {family_of(found).file} for these latents"
            )

    def __enter__(self) -> WanVae:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def _tiled(vae: AutoencoderKLWan, tiling: Tiling | None) -> Iterator[None]:
    """Diffusers' own tiles inside the `with`; it counts what it encodes in patches where the VAE works in them."""
    if tiling is None:
        yield
        return
    size, stride = tiling.pixels // tiling.patch, tiling.stride // tiling.patch
    vae.enable_tiling(size, size, stride, stride)
    try:
        yield
    finally:
        vae.disable_tiling()


def check_latents(latents: torch.Tensor) -> None:
    """Refuse what is no raw latents [B, 16 or 48, T, h, w] by a VaeInputError."""
    known = [space.channels for space in SPACES]
    if latents.ndim != 5 or latents.shape[1] not in known or 0 in latents.shape:
        raise VaeInputError(f"the latents are {list(latents.shape)}: give [B, {' or '.join(map(str, known))}, T, h, w]")


Check = Callable[[], None]
"""Called before every latent frame; ends the decode by raising."""


def whole_frames(
    vae: AutoencoderKLWan, latents: torch.Tensor, dtype: torch.dtype, check: Check
) -> Iterator[torch.Tensor]:
    """Raw latents [1, C, T, h, w] on the VAE's device -> [1, Ph, Pw, 3], then T - 1 times [4, Ph, Pw, 3], on the CPU.

    fp32 in 0..1, or uint8 in 0..255. C, P: as in `vae_tiles`.
    """
    check()
    for part in decoded_frames(vae, latents, whole=True):
        yield stored_as(as_pixels(part.float()), dtype).cpu()
        check()


def tiled_frames(
    vae: AutoencoderKLWan, latents: torch.Tensor, tiling: Tiling, into: torch.Tensor, check: Check
) -> None:
    """Decode raw latents [1, C, T, h, w] tile by tile into frames [4(T - 1) + 1, Ph, Pw, 3], fp32 or uint8 on the CPU.

    Every tile goes over as it is made: beside the frames RAM holds the edges that meet other tiles.
    """
    mosaic = TileBlender(tiling, into=into)
    for tile in tiling.tiles(*latents.shape[3:]):
        check()
        for part in decoded_frames(vae, crop(latents, tile)):
            mosaic.put_frames(tile, part.cpu().float())
            check()


Made = TypeVar("Made")


class NoRoomToDecodeError(VaeRoomError, torch.OutOfMemoryError):
    """The device has too little memory for even the smallest tile; the message says what was tried.

    Also an error of torch's kind: hosts know by it that other models should go.
    """


def with_smaller_tiles(
    decode: Callable[[Tiling | None], Made],
    needs: DecodeNeeds,
    first: Tiling | None,
    on_change: Callable[[str], None] = lambda change: None,
    *,
    is_short: Callable[[RuntimeError], bool] = is_out_of_memory,
) -> Made:
    """What `decode` makes in tiles of `first`, None for whole frames, or in smaller ones where memory runs out.

    Each try halves the area; nothing of a try is left when the next one begins. `on_change` is told of each in words.
    `is_short` says which errors mean that memory ran out.

    Raises:
        NoRoomToDecodeError: the smallest tiles are too large; whatever else `decode` raises goes through.
    """
    tiling = first
    while True:
        try:
            return decode(tiling)
        except RuntimeError as err:
            if not is_short(err):
                raise
            said = forget(err)
        smaller = smaller_tiling(needs, tiling)
        if smaller is None:
            raise NoRoomToDecodeError(f"no memory for {needs.doing} {in_words(tiling)}, the least that can be: {said}")
        on_change(f"no memory for {needs.doing} {in_words(tiling)}: goes on with {in_words(smaller)}")
        tiling = smaller


def in_words(tiling: Tiling | None) -> str:
    """`tiles of 256 pixels`, or `whole frames`."""
    return "whole frames" if tiling is None else f"tiles of {tiling.pixels} pixels"
