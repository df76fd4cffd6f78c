"""Tiny VAEs of Wan (TAEHV's layout): decoders of 2-D convolutions, for drafts and previews.

Three memory blocks in each of three stages mix a frame with their own input of the frame before, and nothing else
links frames in time, so a video is decoded frame by frame without tiles. The files `taew2_1`, `taew2_2`, `lighttaew2_1`
and `lighttaew2_2` have one layout; the names of their tensors are the indices of layers. Their encoder is not read.

Only the training differs, and no tensor shows it: `taew*` decode normalised latents (README of madebyollin/taehv),
`lighttae*` raw ones (LightX2V denormalises latents for them).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ...offload import FileTensor
from ...schema import FRAMES_PER_LATENT
from ..checkpoint.components import (
    CONVERTED_DTYPES,
    STORED_DTYPES,
    ComponentFile,
    build_on_meta,
    match_weights,
    precision_warnings,
)
from ..checkpoint.files import CheckpointError
from ..latent_space import SPACES, WAN21, WAN22, LatentSpace, normalise
from .memory import TensorMemoryTracker
from .tiles import MIN_TILE_LATENT

BY_FILE_NAME, RAW, NORMALISED = "by file name", "raw", "normalised"
LATENT_SCALES = (BY_FILE_NAME, RAW, NORMALISED)
"""Choices for the latents that a tiny VAE was trained on."""

SCALE_OF_NAMES = (("lighttae", RAW), ("taew", NORMALISED))
"""Scale of the latents by a part of the file's name; the first that matches decides."""

FILES = {WAN21: ("lighttaew2_1.safetensors", "taew2_1.safetensors")}
FILES |= {WAN22: ("lighttaew2_2.safetensors", "taew2_2.safetensors")}

MARK = "decoder.7.conv.weight"
MARKS = ("decoder.1.weight", MARK, "decoder.22.bias")
"""Tensors that together only files of this layout have."""

MEMORY_BLOCKS = 3
"""Memory blocks of a stage."""
LATENT_LIMIT = 3.0
"""Latents are limited to about this value, smoothly."""
PATCH_OF = {WAN21: 1, WAN22: 2}
"""Side of the patches that the last layer returns, in pixels."""


class _Stage(NamedTuple):
    """Indices of a stage's layers; it doubles height and width."""

    memory: int
    """The first memory block."""
    grow: int
    """The 1x1 convolution that makes `frames` frames out of one."""
    narrow: int
    """The convolution to the width of the next stage."""
    frames: int


FIRST, LAST = 1, 22
STAGES = (
    _Stage(memory=3, grow=7, narrow=8, frames=1),
    _Stage(memory=9, grow=13, narrow=14, frames=2),
    _Stage(memory=15, grow=19, narrow=20, frames=2),
)


class TinyVaeError(ValueError):
    """Scale of the latents that does not follow from the name of a tiny VAE's file; the message has the choices."""


def latent_scale(path: Path, setting: str = BY_FILE_NAME) -> str:
    """Return `RAW` or `NORMALISED`: the setting itself, or what the file's name says.

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
        f"the name of {path} does not show which latents it was trained on ({known}): set latent_scale to {RAW} or "
        f"{NORMALISED}"
    )


@dataclass(frozen=True, kw_only=True)
class TinyVaeConfig:
    """Sizes of a decoder."""

    space: LatentSpace
    widths: tuple[int, ...]
    """Channels of the three stages and of the last layer's input; 256, 128, 64, 64 in the published files."""


class _MemoryBlock(nn.Module):
    """Residual block over a frame and its own input of the frame before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [_convolution(2 * width, width), nn.ReLU(inplace=True), _convolution(width, width)]
        self.conv = nn.Sequential(*layers, nn.ReLU(inplace=True), _convolution(width, width))

    def forward(self, frames: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.conv(torch.cat((frames, past), dim=1))
        return mixed.add_(frames).relu_()


class _Grow(nn.Module):
    """1x1 convolution that returns `frames` frames for each."""

    def __init__(self, width: int, frames: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width * frames, 1, bias=False)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        grown: torch.Tensor = self.conv(frames)
        return grown.reshape(-1, *frames.shape[1:])


def _convolution(inputs: int, outputs: int, *, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias)


class TinyDecoder(nn.Module):
    """Decoder with the parameter names of the files."""

    def __init__(self, config: TinyVaeConfig) -> None:
        super().__init__()
        self.patch = PATCH_OF[config.space]
        layers: dict[int, nn.Module] = {FIRST: _convolution(config.space.channels, config.widths[0])}
        for stage, (width, after) in zip(STAGES, pairwise(config.widths), strict=True):
            layers |= {stage.memory + index: _MemoryBlock(width) for index in range(MEMORY_BLOCKS)}
            layers[stage.grow] = _Grow(width, stage.frames)
            layers[stage.narrow] = _convolution(width, after, bias=False)
        layers[LAST] = _convolution(config.widths[-1], 3 * self.patch**2)
        self.decoder = nn.ModuleDict({str(index): layer for index, layer in layers.items()})

    def forward(self, latents: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the 4T - 3 frames of latents [T, C, h, w], each [1, 3, Ph, Pw] in 0..1.

        The three frames before the first one are not computed to their end.
        """
        frames: Iterable[torch.Tensor] = (self._first(part) for part in latents.split(1))
        for stage in STAGES[:-1]:
            frames = self._through(stage, frames)
        for states in self._through(STAGES[-1], frames, dropped=FRAMES_PER_LATENT - 1):
            pixels = self.decoder[str(LAST)](states.relu_())
            yield F.pixel_shuffle(pixels, self.patch).clamp_(0, 1)

    def _first(self, latents: torch.Tensor) -> torch.Tensor:
        limited = (latents / LATENT_LIMIT).tanh_().mul_(LATENT_LIMIT)
        states: torch.Tensor = self.decoder[str(FIRST)](limited)
        return states.relu_()

    def _through(self, stage: _Stage, frames: Iterable[torch.Tensor], *, dropped: int = 0) -> Iterator[torch.Tensor]:
        """Yield the frames of a stage without the first `dropped` ones. Nothing is computed before it is requested."""
        past: list[torch.Tensor | None] = [None] * MEMORY_BLOCKS
        for states in frames:
            for index in range(MEMORY_BLOCKS):
                before = past[index]
                past[index] = states
                before = torch.zeros_like(states) if before is None else before
                states = self.decoder[str(stage.memory + index)](states, before)
            # In the files' own order the frame is doubled first. A 1x1 convolution of the small frame gives the same
            # values with a fourth of the work and memory.
            grown = self.decoder[str(stage.grow)](states).split(1)
            for frame in grown[dropped:]:
                yield self.decoder[str(stage.narrow)](F.interpolate(frame, scale_factor=2, mode="nearest"))
            dropped = max(0, dropped - len(grown))


@dataclass(frozen=True, kw_only=True, eq=False)
class TinyVaeWeights:
    """Sizes and weight locations of an opened tiny VAE."""

    path: Path
    config: TinyVaeConfig
    weights: Mapping[str, FileTensor]
    """Location of each parameter of the decoder."""
    scale: str
    """`RAW` or `NORMALISED`."""
    scales: Mapping[str, FileTensor] = field(default_factory=dict)
    """Scale location of each scaled parameter."""
    notes: tuple[str, ...] = ()
    """Sentences about unused file tensors."""
    warnings: tuple[str, ...] = ()
    """Sentences about a loss of precision."""

    encodes = False
    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    @property
    def space(self) -> LatentSpace:
        return self.config.space

    def build(self) -> TinyDecoder:
        """Return the decoder on `meta`, without its weights."""
        return build_on_meta(self.path, lambda: TinyDecoder(self.config))

    def decode_pixel_bytes(self, latent_frames: int, dtype: torch.dtype) -> int:
        """Return the bytes for each latent pixel; the length of the video does not matter."""
        return _count_bytes(self.config.space.channels, self.config.widths, dtype)

    def decoder_input(self, latents: torch.Tensor) -> torch.Tensor:
        """Return raw latents [B, C, T, h, w] in the scale that the decoder was trained on."""
        return normalise(latents) if self.scale == NORMALISED else latents

    def decoded_frames(self, vae: nn.Module, latents: torch.Tensor, *, whole: bool) -> Iterator[torch.Tensor]:
        """Return the iterator of `tiny_frames`; full frames (`whole`) are computed like tiles, frame by frame."""
        return tiny_frames(vae, latents)

    def remedy(self, space: LatentSpace) -> str:
        """Return the names of the files for latents of that space."""
        return " or ".join(FILES[space])


def tiny_frames(decoder: nn.Module, latents: torch.Tensor) -> Iterator[torch.Tensor]:
    """Decode latents [1, C, T, h, w]; yield frames [3, 1, Ph, Pw], then T - 1 times [3, 4, Ph, Pw], in -1..1, fp32.

    `latents` are in the scale and dtype of the decoder, and on its device.
    """
    frames = decoder(latents[0].movedim(1, 0))
    for at in range(latents.shape[2]):
        portion = [*islice(frames, FRAMES_PER_LATENT if at else 1)]
        yield torch.cat(portion).float().mul_(2).sub_(1).movedim(1, 0)


@functools.cache
def _count_bytes(channels: int, widths: tuple[int, ...], dtype: torch.dtype) -> int:
    space = next(space for space in SPACES if space.channels == channels)
    with torch.inference_mode(False), torch.device("meta"), torch.no_grad():
        decoder = TinyDecoder(TinyVaeConfig(space=space, widths=widths)).to(dtype)
        # The third latent frame is the second with all memories; from there on, every frame takes the same memory.
        latents = torch.empty(1, channels, 3, MIN_TILE_LATENT, MIN_TILE_LATENT, dtype=dtype)
        tracker = TensorMemoryTracker()
        with tracker:
            for frames in tiny_frames(decoder, latents):
                del frames
    return -(-tracker.convolution_peak // MIN_TILE_LATENT**2)


def is_tiny_vae(tensors: Mapping[str, FileTensor]) -> bool:
    """Return True for the tensors of a tiny VAE for videos, of Wan or of another model."""
    return all(mark in tensors for mark in MARKS)


def open_tiny_vae_file(path: Path, file: ComponentFile, setting: str = BY_FILE_NAME) -> TinyVaeWeights:
    """Open the file of a tiny VAE.

    Args:
        file: all file tensors.
        setting: one of `LATENT_SCALES`.

    Raises:
        CheckpointError: the file is damaged, or not a tiny VAE of Wan.
        TinyVaeError: see `latent_scale`.
    """
    stored = file.weights
    remedy = "use " + ", or ".join(f"{' or '.join(files)} ({space.models})" for space, files in FILES.items())
    if not is_tiny_vae(stored):
        first = next((f"{key} {list(tensor.shape)}" for key, tensor in stored.items()), "none")
        raise CheckpointError(
            path, f"is not a tiny VAE of Wan: it has {len(stored)} tensors (first: {first}); {remedy}"
        )
    channels = _width(path, stored, FIRST, 1)
    space = next((space for space in SPACES if space.channels == channels), None)
    if space is None:
        raise CheckpointError(path, f"is a tiny VAE for {channels} latent channels, not of Wan; {remedy}")
    widths = [_width(path, stored, FIRST, 0), *(_width(path, stored, stage.narrow, 0) for stage in STAGES)]
    config = TinyVaeConfig(space=space, widths=tuple(widths))
    decoder = build_on_meta(path, lambda: TinyDecoder(config))
    tensors = {key: tensor for key, tensor in stored.items() if key.startswith("decoder.")}
    dtypes = (*STORED_DTYPES, *CONVERTED_DTYPES)
    weights = match_weights(path, tensors, decoder, dtypes=dtypes, described_by="the rest of the file")
    return TinyVaeWeights(
        path=path,
        config=config,
        weights=weights,
        scale=latent_scale(path, setting),
        scales={name: scale for name, scale in file.scales.items() if name in weights},
        notes=file.notes,
        warnings=precision_warnings(file.path, weights.values(), f"use {' or '.join(FILES[space])} in fp16"),
    )


def _width(path: Path, tensors: Mapping[str, FileTensor], layer: int, dimension: int) -> int:
    key = f"decoder.{layer}.weight"
    if key not in tensors:
        raise CheckpointError(path, f"{key} is missing")
    shape = tensors[key].shape
    if len(shape) != 4 or 0 in shape:
        raise CheckpointError(path, f"{key} is {list(shape)}; [out, in, 3, 3] is expected")
    return shape[dimension]
