"""Tiny Wan VAEs (TAEHV's layout): decoders with 2-D convolutions, for drafts and previews.

Three memory blocks in each of three stages mix a frame with the same block's input for the previous
frame. Nothing else links frames in time, so a video is decoded frame by frame without tiles. The
files `taew2_1`, `taew2_2`, `lighttaew2_1` and `lighttaew2_2` have one layout, with layer indices as
tensor names. Their encoder is not read.

Only training differs, and no tensor shows it: `taew*` decode normalised latents (README of
madebyollin/taehv), `lighttae*` raw ones (LightX2V denormalises latents for them).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ...offload.formats import FileTensor
from ...shapes import FRAMES_PER_LATENT
from ..checkpoint.components import ComponentFile, build_on_meta, convolution_width, match_weights
from ..checkpoint.files import CheckpointError
from ..latents.space import SPACES, WAN21, WAN22, LatentSpace, normalise
from .memory import TensorMemoryTracker
from .tiles import MIN_TILE_LATENT

BY_FILE_NAME = "by file name"
RAW = "raw"
NORMALISED = "normalised"
LATENT_SCALES = (BY_FILE_NAME, RAW, NORMALISED)
"""Choices for a tiny VAE's training latents."""

# "lighttaew2_1" contains "taew" too, so "lighttae" is compared first.
SCALE_OF_NAMES = (("lighttae", RAW), ("taew", NORMALISED))
"""Latent scale by a part of the file name. The first match decides."""

FILES = {
    WAN21: ("lighttaew2_1.safetensors", "taew2_1.safetensors"),
    WAN22: ("lighttaew2_2.safetensors", "taew2_2.safetensors"),
}

MARK = "decoder.7.conv.weight"
MARKS = ("decoder.1.weight", MARK, "decoder.22.bias")
"""Tensors found together only in files with this layout."""

MEMORY_BLOCKS = 3
"""Memory blocks per stage."""
LATENT_LIMIT = 3.0
"""Latents are limited smoothly to about this value."""
PATCH_OF = {WAN21: 1, WAN22: 2}
"""Side of the last layer's output patches, in pixels."""


class _Stage(NamedTuple):
    """Layer indices of a stage. A stage doubles height and width."""

    memory: int
    """First memory block."""
    grow: int
    """1x1 convolution that makes `frames` frames out of one."""
    narrow: int
    """Convolution to the next stage's width."""
    frames: int


FIRST = 1
LAST = 22
STAGES = (
    _Stage(memory=3, grow=7, narrow=8, frames=1),
    _Stage(memory=9, grow=13, narrow=14, frames=2),
    _Stage(memory=15, grow=19, narrow=20, frames=2),
)


class TinyVaeError(ValueError):
    """Latent scale that does not follow from a tiny VAE's file name.

    The message has the choices.
    """


def latent_scale(path: Path, setting: str = BY_FILE_NAME) -> str:
    """Return `RAW` or `NORMALISED`: the setting itself, or the scale in the file name.

    Raises:
        TinyVaeError: the name contains neither `lighttae` nor `taew`.
    """
    if setting != BY_FILE_NAME:
        return setting
    for part, scale in SCALE_OF_NAMES:
        if part in path.name.lower():
            return scale
    known = ", ".join(f"{scale} for {part}*" for part, scale in SCALE_OF_NAMES)
    raise TinyVaeError(
        f"the name of {path} does not show which latents it was trained on ({known}): set "
        f"latent_scale to {RAW} or {NORMALISED}"
    )


class _MemoryBlock(nn.Module):
    """Residual block over a frame and the block's input for the previous frame."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [_convolution(2 * width, width), nn.ReLU(inplace=True), _convolution(width, width)]
        self.conv = nn.Sequential(*layers, nn.ReLU(inplace=True), _convolution(width, width))

    def forward(self, frames: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.conv(torch.cat((frames, past), dim=1))
        return mixed.add_(frames).relu_()


class _Grow(nn.Module):
    """1x1 convolution that returns `frames` frames per frame."""

    def __init__(self, width: int, frames: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width * frames, 1, bias=False)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        grown: torch.Tensor = self.conv(frames)
        return grown.reshape(-1, *frames.shape[1:])  # [frames, width, h, w]


def _convolution(inputs: int, outputs: int, *, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias)


class TinyDecoder(nn.Module):
    """Decoder with the parameter names in the files.

    Args:
        space: latent space.
        widths: channels of the three stages and of the last layer's input. 256, 128, 64, 64 in
            the published files.
    """

    def __init__(self, space: LatentSpace, widths: Sequence[int]) -> None:
        super().__init__()
        self.patch = PATCH_OF[space]
        layers: dict[int, nn.Module] = {FIRST: _convolution(space.channels, widths[0])}
        for stage, (width, after) in zip(STAGES, pairwise(widths), strict=True):
            layers |= {stage.memory + index: _MemoryBlock(width) for index in range(MEMORY_BLOCKS)}
            layers[stage.grow] = _Grow(width, stage.frames)
            layers[stage.narrow] = _convolution(width, after, bias=False)
        layers[LAST] = _convolution(widths[-1], 3 * self.patch**2)
        self.decoder = nn.ModuleDict({str(index): layer for index, layer in layers.items()})

    def forward(self, latents: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the 4T - 3 frames for latents [T, C, h, w], each [1, 3, Ph, Pw] in 0..1.

        The three frames before the first one are not computed to the end.
        """
        frames: Iterable[torch.Tensor] = (self._first(part) for part in latents.split(1))
        for stage in STAGES[:-1]:
            frames = self._through(stage, frames)
        # Dropped after the memory blocks, because these mix each frame into the next.
        for states in self._through(STAGES[-1], frames, dropped=FRAMES_PER_LATENT - 1):
            pixels = self.decoder[str(LAST)](states.relu_())
            yield F.pixel_shuffle(pixels, self.patch).clamp_(0, 1)

    def _first(self, latents: torch.Tensor) -> torch.Tensor:
        limited = (latents / LATENT_LIMIT).tanh_().mul_(LATENT_LIMIT)
        states: torch.Tensor = self.decoder[str(FIRST)](limited)
        return states.relu_()

    def _through(
        self, stage: _Stage, frames: Iterable[torch.Tensor], *, dropped: int = 0
    ) -> Iterator[torch.Tensor]:
        """Yield a stage's frames without the first `dropped` ones.

        Nothing is computed before it is requested.
        """
        past: list[torch.Tensor | None] = [None] * MEMORY_BLOCKS
        for states in frames:
            for index in range(MEMORY_BLOCKS):
                before = past[index]
                # The files were trained with the block's input as past, not with the result.
                past[index] = states
                if before is None:
                    before = torch.zeros_like(states)
                states = self.decoder[str(stage.memory + index)](states, before)
            # The files' own order doubles the frame first. A 1x1 convolution on the small frame
            # gives the same values with a fourth of the work and memory.
            grown = self.decoder[str(stage.grow)](states).split(1)
            for frame in grown[dropped:]:
                yield self.decoder[str(stage.narrow)](
                    F.interpolate(frame, scale_factor=2, mode="nearest")
                )
            dropped = max(0, dropped - len(grown))


@dataclass(frozen=True, kw_only=True, eq=False)
class TinyVaeWeights:
    """Sizes and weight locations of an opened tiny VAE."""

    path: Path
    space: LatentSpace
    widths: tuple[int, ...]
    """Widths as in `TinyDecoder`."""
    file: ComponentFile
    """Weights and scales by decoder parameter."""
    scale: str
    """`RAW` or `NORMALISED`."""

    encodes = False
    lacking = "is a tiny VAE"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def build(self) -> TinyDecoder:
        """Return the decoder on `meta`, without its weights."""
        return build_on_meta(self.path, lambda: TinyDecoder(self.space, self.widths))

    def decode_pixel_bytes(self, latent_frames: int, dtype: torch.dtype) -> int:
        """Return the bytes per latent pixel. Video length does not matter."""
        return _count_bytes(self.space, self.widths, dtype)

    def decoder_input(self, latents: torch.Tensor) -> torch.Tensor:
        """Return raw latents [B, C, T, h, w] in the decoder's training scale."""
        if self.scale == NORMALISED:
            return normalise(latents)
        return latents

    def decoded_frames(
        self, vae: nn.Module, latents: torch.Tensor, *, whole: bool
    ) -> Iterator[torch.Tensor]:
        """Return the iterator of `tiny_frames`.

        Full frames (`whole`) are computed like tiles, frame by frame.
        """
        return tiny_frames(vae, latents)

    def remedy(self, space: LatentSpace) -> str:
        """Return the file names for latents in this space."""
        return " or ".join(FILES[space])


def tiny_frames(decoder: nn.Module, latents: torch.Tensor) -> Iterator[torch.Tensor]:
    """Decode latents [1, C, T, h, w].

    Yield frames [3, 1, Ph, Pw], then T - 1 times [3, 4, Ph, Pw], in -1..1, fp32.

    `latents` have the decoder's scale, dtype and device.
    """
    frames = decoder(latents[0].movedim(1, 0))
    for at in range(latents.shape[2]):
        portion = [*islice(frames, FRAMES_PER_LATENT if at else 1)]
        yield torch.cat(portion).float().mul_(2).sub_(1).movedim(1, 0)


@functools.cache
def _count_bytes(space: LatentSpace, widths: tuple[int, ...], dtype: torch.dtype) -> int:
    with torch.inference_mode(False), torch.device("meta"), torch.no_grad():
        decoder = TinyDecoder(space, widths).to(dtype)
        # The second latent frame is the first with all memories. From the third on, every frame
        # takes the same memory.
        latents = torch.empty(1, space.channels, 3, MIN_TILE_LATENT, MIN_TILE_LATENT, dtype=dtype)
        tracker = TensorMemoryTracker()
        with tracker:
            for frames in tiny_frames(decoder, latents):
                del frames
    return -(-tracker.convolution_peak // MIN_TILE_LATENT**2)


def is_tiny_vae(tensors: Mapping[str, FileTensor]) -> bool:
    """Return True for the tensors of a tiny video VAE, for Wan or another model."""
    return all(mark in tensors for mark in MARKS)


def open_tiny_vae_file(
    path: Path, file: ComponentFile, setting: str = BY_FILE_NAME
) -> TinyVaeWeights:
    """Open a tiny VAE file.

    Args:
        file: all file tensors.
        setting: one of `LATENT_SCALES`.

    Raises:
        CheckpointError: the file is damaged, or not a tiny Wan VAE.
        TinyVaeError: see `latent_scale`.
    """
    stored = file.weights
    remedy = "use " + ", or ".join(
        f"{' or '.join(files)} ({space.models})" for space, files in FILES.items()
    )
    if not is_tiny_vae(stored):
        first = next((f"{key} {list(tensor.shape)}" for key, tensor in stored.items()), "none")
        found = f"it has {len(stored)} tensors (first: {first})"
        raise CheckpointError(path, f"is not a tiny VAE of Wan: {found}; {remedy}")
    channels = convolution_width(path, stored, f"decoder.{FIRST}.weight", 1, kernel=2)
    space = next((space for space in SPACES if space.channels == channels), None)
    if space is None:
        raise CheckpointError(
            path, f"is a tiny VAE for {channels} latent channels, not of Wan; {remedy}"
        )
    layers = (f"decoder.{at}.weight" for at in (FIRST, *(stage.narrow for stage in STAGES)))
    widths = tuple(convolution_width(path, stored, key, 0, kernel=2) for key in layers)
    decoder = build_on_meta(path, lambda: TinyDecoder(space, widths))
    tensors = {key: tensor for key, tensor in stored.items() if key.startswith("decoder.")}
    matched = match_weights(
        path,
        replace(file, weights=tensors),
        decoder,
        remedy=f"use {' or '.join(FILES[space])} in fp16",
        described_by="the rest of the file",
    )
    scale = latent_scale(path, setting)
    return TinyVaeWeights(path=path, space=space, widths=widths, file=matched, scale=scale)
