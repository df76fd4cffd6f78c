"""Wan VAE: encoding and decoding, full frames or tiles, and smaller tiles if memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ...devices import dtype_name, forget, is_out_of_memory
from ...shapes import FP32_BYTES, FRAMES_PER_LATENT
from ..checkpoint.components import ComponentFile, component_file, component_folder
from ..checkpoint.files import read_checkpoint
from ..checkpoint.meta_model import called_before, set_parameters
from ..latents.space import SPACES, space_of
from .memory import DecodeNeeds, VaeMemoryError, encode_pixel_bytes, smaller_tiling
from .tiles import TileBlender, Tiling, as_pixels, convert_pixels, crop, empty_frames, gather_tile
from .tiny import BY_FILE_NAME, TinyVaeWeights, is_tiny_vae, open_tiny_vae_file
from .tiny import MARK as TINY_MARK
from .weights import MARKS, ROOTS, VaeWeights, family_of, open_vae_file, open_vae_folder

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan


VAE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""VAE compute dtypes by name in nodes and messages. Only a tiny VAE takes fp16."""


Check = Callable[[], None]
"""Function called before every latent frame. It may raise to end the work."""


class VaeInputError(ValueError):
    """The VAE does not accept the shape of images or latents.

    The message has this shape and a valid one.
    """


def open_vae(
    path: Path | str, dtype: torch.dtype = torch.float32, latent_scale: str = BY_FILE_NAME
) -> WanVae:
    """Open the VAE in a diffusers pipeline, a `vae` folder, a single file, or a tiny VAE file.

    Reads only headers and the config. The VAE computes in `dtype`.

    Args:
        latent_scale: one of `LATENT_SCALES`, for a tiny VAE.

    Raises:
        CheckpointFileError: a file is missing, truncated, a pickle, or not a safetensors file. The
            config or the tensors do not belong to a Wan VAE.
        TinyVaeError: neither the name of a tiny VAE nor `latent_scale` shows the scale.
        VaeInputError: the VAE does not compute in `dtype`.
    """
    path = Path(path)
    if path.is_file():
        stored = _vae_file(path)
        if is_tiny_vae(stored.weights):
            return WanVae(open_tiny_vae_file(path, stored, latent_scale), dtype)
        return WanVae(open_vae_file(path, stored), dtype)
    return WanVae(open_vae_folder(component_folder(path, "vae")), dtype)


def open_tiny_vae(
    path: Path, dtype: torch.dtype = torch.float32, latent_scale: str = BY_FILE_NAME
) -> WanVae:
    """Open a tiny VAE file. See `open_vae`.

    Raises:
        CheckpointFileError: the file is missing, truncated, a pickle, or not a tiny Wan VAE.
        Exception: other errors from `open_vae`.
    """
    return WanVae(open_tiny_vae_file(path, _vae_file(path), latent_scale), dtype)


def _vae_file(path: Path) -> ComponentFile:
    return component_file(read_checkpoint(path), marks=(*MARKS, TINY_MARK), roots=ROOTS)


class WanVae(AbstractContextManager["WanVae"]):
    """Opened VAE that computes in `dtype`. The first use loads the weights, `close()` frees them.

    In shapes, C is the latent channel count and P the pixel count per latent pixel, along either
    side.

    Raises:
        VaeInputError: the VAE does not compute in `dtype`.
    """

    def __init__(self, opened: VaeWeights | TinyVaeWeights, dtype: torch.dtype) -> None:
        if dtype not in opened.dtypes:
            names = {each: name for name, each in VAE_DTYPES.items()}
            allowed = " or ".join(names[each] for each in opened.dtypes)
            raise VaeInputError(
                f"{opened.path} in {names.get(dtype, dtype_name(dtype))}: its activations may "
                f"exceed the largest number of that dtype; set compute_dtype to {allowed} (only "
                "tiny VAEs compute in fp16)"
            )
        self._opened = opened
        self.space = opened.space
        self.notes = opened.file.notes
        """Sentences about unused file tensors."""
        self.warnings = opened.file.warnings
        """Sentences about a loss of precision in the file."""
        self._dtype = dtype
        self._loaded: Any = None

    def check_encodes(self) -> None:
        """Check that the VAE encodes.

        Raises:
            VaeInputError: it is a tiny VAE, or the file has a decoder only.
        """
        if not self._opened.encodes:
            raise VaeInputError(
                f"{self._opened.path} {self._opened.lacking}, so it only decodes: take "
                f"{family_of(self.space).file} to encode"
            )

    def encode_needs(self, video: torch.Tensor) -> DecodeNeeds:
        """Return the memory requirements for encoding frames [F, H, W, 3], all on the device.

        Raises:
            VaeInputError: the video has another shape, or the VAE only decodes.
        """
        config = self._encoder_config()
        self._check_video(video)
        frames, height, width, _ = video.shape
        # A VAE with patches copies the whole video into patches first.
        copies = 1 if config.get("patch_size") is None else 2
        return DecodeNeeds(
            height=height // self.space.pixels,
            width=width // self.space.pixels,
            frames=frames,
            pixel_bytes=encode_pixel_bytes(
                config, (frames - 1) // FRAMES_PER_LATENT + 1, self._dtype
            ),
            value_bytes=copies * FP32_BYTES,
            keeps_frames=True,
            per_latent=self.space.pixels,
            task="encoding",
        )

    def encode(
        self,
        video: torch.Tensor,
        *,
        device: torch.device | str,
        tiling: Tiling | None = None,
        check: Check = lambda: None,
    ) -> torch.Tensor:
        """Encode frames [F, H, W, 3] in 0..1, where F = 4n + 1, and H and W are multiples of P.

        `check` is called before every encoder block, for each latent frame in every tile, and may
        raise to end the encoding.

        Returns the mode of the raw latents, fp32 [1, C, (F - 1) / 4 + 1, H / P, W / P], on the CPU.
        diffusers blends the tiles.

        Raises:
            VaeInputError: the video has another shape, or the VAE only decodes.
        """
        self._encoder_config()
        self._check_video(video)
        vae = self._load(torch.device(device))
        # [1, 3, F, H, W] in -1..1.
        pixels = video.to(device, self._dtype).movedim(-1, 0)[None] * 2 - 1
        height, width = (size // self.space.pixels for size in video.shape[1:3])
        if tiling is not None and not tiling.cuts(height, width):
            tiling = None
        # diffusers calls the encoder once per latent frame in a tile, which takes a CPU ten seconds
        # at 480x272.
        with (
            torch.no_grad(),
            _tiled(vae, tiling),
            called_before([vae.encoder, *vae.encoder.down_blocks], check),
        ):
            raw: torch.Tensor = vae.encode(pixels).latent_dist.mode()
        return raw.cpu().float()

    @property
    def weight_bytes(self) -> int:
        """Device memory for all weights."""
        return self._dtype.itemsize * sum(
            prod(tensor.shape) for tensor in self._opened.file.weights.values()
        )

    def check_latents(self, latents: torch.Tensor) -> None:
        """Check that the VAE can decode latents [B, C, T, h, w].

        Raises:
            VaeInputError: the latents have another shape, or belong to another VAE.
        """
        check_latents(latents)
        found = space_of(latents.shape[1])
        expected = self.space
        if found != expected:
            file = self._opened.remedy(found)
            raise VaeInputError(
                f"the latents are {list(latents.shape)}, of {found.models}, and "
                f"{self._opened.path} is the VAE of {expected.models}, for {expected.channels} "
                f"channels: take {file} for these latents"
            )

    def decode_needs(self, latents: torch.Tensor, *, to_file: bool = False) -> DecodeNeeds:
        """Return memory needs of `decode`, or `stream` (`to_file`), for latents [B, C, T, h, w].

        Raises:
            VaeInputError: the latents have another shape, or belong to another VAE.
        """
        self.check_latents(latents)
        batch, _, count, height, width = latents.shape
        frames = FRAMES_PER_LATENT * (count - 1) + 1
        return DecodeNeeds(
            height=height,
            width=width,
            # `decode` keeps the frames for all videos, `stream` only for one video at a time.
            frames=frames if to_file else batch * frames,
            pixel_bytes=self._opened.decode_pixel_bytes(count, self._dtype),
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
        """Decode raw latents [B, C, T, h, w], one video at a time, in full frames or tile by tile.

        `check` is called before every latent frame in every tile and may raise to end the decode.

        Returns frames in 0..1, fp32 [B, 4 * (T - 1) + 1, P * h, P * w, 3], on the CPU.

        Raises:
            VaeInputError: the latents have another shape, or belong to another VAE.
        """
        self.check_latents(latents)
        videos = empty_frames(latents)
        for video, frames in zip(latents.split(1), videos, strict=True):
            done = 0
            for part in self._decode_video(video, torch.device(device), tiling, frames, check):
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
        """Yield the frames of `decode` as [n, P * h, P * w, 3] uint8 on the CPU, for a video file.

        The videos in a batch follow one another. Full frames are yielded with each latent frame and
        are not kept. With tiles, all frames of a video are yielded together.

        Raises:
            VaeInputError: the latents have another shape, or belong to another VAE.
        """
        self.check_latents(latents)
        for video in latents.split(1):
            yield from self._decode_video(video, torch.device(device), tiling, None, check)

    def _decode_video(
        self,
        latents: torch.Tensor,
        device: torch.device,
        tiling: Tiling | None,
        into: torch.Tensor | None,
        check: Check,
    ) -> Iterator[torch.Tensor]:
        """Yield one video's frames not yet in `into`: fp32, or uint8 if `into` is None."""
        assert tiling is None or tiling.per_latent == self.space.pixels, "tiles of another VAE"
        vae = self._load(device)
        # Scaled before the cast, because the VAE may compute in 16 bits.
        moved = self._opened.decoder_input(latents).to(device, self._dtype)
        dtype = torch.uint8 if into is None else torch.float32
        if tiling is None or not tiling.cuts(*latents.shape[3:]):
            check()
            for part in self._opened.decoded_frames(vae, moved, whole=True):
                yield convert_pixels(as_pixels(part.float()), dtype).cpu()
                check()
            return
        frames = empty_frames(latents, dtype)[0] if into is None else into
        # Tile frames are blended as soon as they are decoded. In addition to them, RAM holds only
        # tile edges.
        blender = TileBlender(tiling, into=frames)
        for tile in tiling.tiles(*latents.shape[3:]):
            check()
            for part in self._opened.decoded_frames(vae, crop(moved, tile), whole=False):
                blender.add_frames(tile, part.cpu().float())
                check()
        del blender, part  # the caller may write the video before it resumes this generator
        if into is None:
            yield frames

    def decode_tile(
        self, latents: torch.Tensor, *, device: torch.device | str, check: Check = lambda: None
    ) -> torch.Tensor:
        """Decode one tile [1, C, T, h, w] for a `TileBlender`. See `tiles.gather_tile`.

        Raises:
            VaeInputError: the latents have another shape, or belong to another VAE.
        """
        self.check_latents(latents)
        vae = self._load(torch.device(device))
        moved = self._opened.decoder_input(latents).to(device, self._dtype)
        return gather_tile(self._opened.decoded_frames(vae, moved, whole=False), moved, check)

    def close(self) -> None:
        """Free the weights. Closing twice is allowed. A later use loads them again."""
        self._loaded = None

    def _load(self, device: torch.device) -> Any:
        if self._loaded is None:
            vae = self._opened.build()
            file = self._opened.file
            set_parameters(vae, file.read(file.weights, lambda _: self._dtype))
            self._loaded = vae
        return self._loaded.to(device)

    def _encoder_config(self) -> Mapping[str, Any]:
        self.check_encodes()
        assert isinstance(self._opened, VaeWeights), "tiny VAEs do not encode"
        return self._opened.config

    def _check_video(self, video: torch.Tensor) -> None:
        shape = list(video.shape)
        pixels = self.space.pixels
        if video.ndim != 4 or shape[-1] != 3 or 0 in shape:
            raise VaeInputError(f"the video is {shape}: give frames [F, H, W, 3]")
        if (shape[0] - 1) % FRAMES_PER_LATENT:
            raise VaeInputError(f"the video has {shape[0]} frames: give {FRAMES_PER_LATENT}n + 1")
        if shape[1] % pixels or shape[2] % pixels:
            raise VaeInputError(f"the frames are {shape[2]}x{shape[1]}: give multiples of {pixels}")

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _tiled(vae: AutoencoderKLWan, tiling: Tiling | None) -> Iterator[None]:
    """Enable diffusers' tiling inside the `with`. The sizes are in patches, if the VAE has them."""
    if tiling is None:
        yield
        return
    size = tiling.pixels // tiling.patch
    stride = tiling.stride // tiling.patch
    vae.enable_tiling(size, size, stride, stride)
    try:
        yield
    finally:
        vae.disable_tiling()


def check_latents(latents: torch.Tensor) -> None:
    """Check that latents are [B, 16 or 48, T, h, w].

    Raises:
        VaeInputError: they have another shape.
    """
    channels = [space.channels for space in SPACES]
    if latents.ndim != 5 or latents.shape[1] not in channels or 0 in latents.shape:
        raise VaeInputError(
            f"the latents are {list(latents.shape)}: give [B, {' or '.join(map(str, channels))}, "
            "T, h, w]"
        )


Result = TypeVar("Result")


class DecodeOutOfMemoryError(VaeMemoryError, torch.OutOfMemoryError):
    """Memory ran out even with the smallest tiles.

    Also a `torch.OutOfMemoryError`, so that hosts unload other models after it.
    """


def retry_with_smaller_tiles(
    decode: Callable[[Tiling | None], Result],
    needs: DecodeNeeds,
    first: Tiling | None,
    on_change: Callable[[str], None] = lambda change: None,
) -> Result:
    """Call `decode` with smaller and smaller tiles until memory suffices. Return the result.

    Args:
        decode: called with a tiling, or with None for full frames.
        needs: memory needs of the decode, for smaller tile sizes.
        first: tiling for the first attempt. Each further attempt halves the tile area.
        on_change: called with a message before each further attempt.

    Raises:
        DecodeOutOfMemoryError: memory ran out with the smallest tiles.
    """
    tiling = first
    while True:
        try:
            return decode(tiling)
        except RuntimeError as err:
            if not is_out_of_memory(err):
                raise
            # The traceback references tensors from the failed attempt. Keep only its text, and
            # retry outside this `except` block, which keeps the exception alive.
            error = forget(err)
        smaller = smaller_tiling(needs, tiling)
        if smaller is None:
            raise DecodeOutOfMemoryError(
                f"no memory for {needs.task} {describe_tiling(tiling)}, the smallest size: {error}"
            )
        on_change(
            f"no memory for {needs.task} {describe_tiling(tiling)}: retrying with "
            f"{describe_tiling(smaller)}"
        )
        tiling = smaller


def describe_tiling(tiling: Tiling | None) -> str:
    """Return "tiles of 256 pixels" or "whole frames", for messages."""
    if tiling is None:
        return "whole frames"
    return f"tiles of {tiling.pixels} pixels"
