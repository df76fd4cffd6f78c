"""Token parts next to a lane's video, and rotary tables for all parts.

A lane's tokens are [front, video, behind]. Every part has separate positions. All pass through the
same blocks, and only the video tokens become the velocity. Angles are computed in fp64 per axis, as
in diffusers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn import functional as F

from ...shapes import HEAD_DIM, patch_grid

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel
    from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

THETA = 10000.0
"""Base of the rotary frequencies, in diffusers and in the published models."""

Grid: TypeAlias = "tuple[int, int, int]"
Rotary: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""Cosines and sines, [1, S, 1, 128] float32 each, as in diffusers' `WanRotaryPosEmbed`."""


@dataclass(frozen=True, kw_only=True)
class Positions:
    """Rotary positions in a part: patch i along an axis has the position `start + i`."""

    start: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Along time, height and width."""
    source: int = 0
    """Source number: a constant rotation of all tokens by `source` positions in a 1-D table over
    the whole head, added to the axes' rotation (Bernini). 0: none."""


FROM_ORIGIN = Positions()


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenPart:
    """Tokens next to a lane's video."""

    latents: torch.Tensor
    """[1, C, t, h, w] in the model's latent space. C fits the model's input, or the input of
    `ref_conv`."""
    positions: Positions = FROM_ORIGIN
    through_ref_conv: bool = False
    """Embed the only frame with the model's `ref_conv` (Fun Control) instead of the patch
    embedding."""

    def grid(self, patch_size: Sequence[int]) -> Grid:
        """Return the patches along time, height and width."""
        return patch_grid(self.latents.shape[2:], patch_size)

    def embed(self, model: WanTransformer3DModel) -> torch.Tensor:
        """Return the tokens [1, S, dim]."""
        latents = padded(self.latents, model.config.patch_size)
        if self.through_ref_conv:
            convolution = model.ref_conv
            tokens: torch.Tensor = convolution(latents[:, :, 0].to(convolution.weight.dtype))
        else:
            tokens = model.patch_embedding(latents.to(model.patch_embedding.weight.dtype))
        return tokens.flatten(2).transpose(1, 2)


def padded(latents: torch.Tensor, patch_size: Sequence[int]) -> torch.Tensor:
    """Return latents [1, C, T, h, w] with whole patches: odd sides repeat the first row or column.

    ComfyUI also pads like this (`pad_to_patch_size`). Latents with whole patches are returned
    unchanged.
    """
    sizes = latents.shape[2:]
    missing = [-size % patch for size, patch in zip(sizes, patch_size, strict=True)]
    if not any(missing):
        return latents
    frames, rows, columns = missing
    # `F.pad` counts from the last dimension.
    return F.pad(latents, (0, columns, 0, rows, 0, frames), mode="circular")


Placed: TypeAlias = "tuple[Grid, Positions]"
"""Grid and positions of a part."""


class AxisTables:
    """Rotary tables for single axes on a model's device, kept as long as the model.

    A copy from pageable memory makes the host wait for the device, so there is one copy per size,
    not one per step. A table with 80 positions has 40 kB.
    """

    def __init__(self) -> None:
        # A cache per model: one for the process would keep tables of closed models on the device.
        self.of_axis = functools.lru_cache(maxsize=KEPT_TABLES)(_axis_tables)


KEPT_TABLES = 96


def layout_tables(model: WanTransformer3DModel, parts: Sequence[Placed]) -> Rotary:
    """Return the rotary tables for all tokens in these parts, in order, on the model's device."""
    rope: WanRotaryPosEmbed = model.rope
    # Models opened by this package have one. Others compute their tables again.
    of_axis = getattr(model, "axis_tables", AxisTables()).of_axis
    cosines, sines = zip(
        *(_part_tables(rope, grid, positions, of_axis) for grid, positions in parts), strict=True
    )
    return torch.cat(cosines, dim=1), torch.cat(sines, dim=1)


def _part_tables(
    rope: WanRotaryPosEmbed, grid: Grid, positions: Positions, of_axis: Callable[..., Rotary]
) -> Rotary:
    cosines = []
    sines = []
    first = 0
    device = rope.freqs_cos.device
    for axis, (count, width) in enumerate(
        zip(grid, (rope.t_dim, rope.h_dim, rope.w_dim), strict=True)
    ):
        cosine, sine = of_axis(count, positions.start[axis], positions.source, first, width, device)
        shape = [1, 1, 1, width]
        shape[axis] = count
        cosines.append(cosine.view(shape).expand(*grid, width))
        sines.append(sine.view(shape).expand(*grid, width))
        first += width // 2
    tokens = math.prod(grid)
    return torch.cat(cosines, dim=-1).reshape(1, tokens, 1, -1), torch.cat(sines, dim=-1).reshape(
        1, tokens, 1, -1
    )


def _axis_tables(
    count: int, start: float, source: int, first: int, width: int, device: torch.device
) -> Rotary:
    """Return cosines and sines [count, width] for one axis, for a head's pairs from `first` on."""
    # The tables outlive the run that first needs them, and a later run may be outside inference
    # mode.
    with torch.inference_mode(False), torch.no_grad():
        # On the CPU, because not every device has fp64.
        pairs = torch.arange(0, width, 2, dtype=torch.float64)
        frequencies = 1.0 / (THETA ** (pairs / width))
        angles = torch.outer(start + torch.arange(count, dtype=torch.float64), frequencies)
        if source:
            # Pair j = first + pairs / 2 of the head turns by source x THETA^(-2 j / 128) more.
            angles += source / (THETA ** ((2 * first + pairs) / HEAD_DIM))
        tables = [
            table.repeat_interleave(2, dim=1).float().to(device)
            for table in (angles.cos(), angles.sin())
        ]
    return tables[0], tables[1]
