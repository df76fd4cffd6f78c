"""Lanes in a forward pass, and an interface for caches that let lanes skip blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ...shapes import patch_grid
from .token_parts import FROM_ORIGIN, Placed, Positions, TokenPart


class SkipDecision(NamedTuple):
    """Lanes that continue after the first block."""

    lanes: Sequence[int]
    """Indices of lanes that pass through the remaining blocks too."""
    visits: bool
    """True if the remaining blocks are visited, for these lanes or for another worker's."""


class BlockCache(Protocol):
    """Source of predicted block outputs in one forward pass. Tokens are [1, S, dim].

    Where workers share a lane's tokens, a worker has only its own part after the first block.
    """

    @property
    def whole(self) -> bool:
        """True if no lane needs any block."""

    def skip_all(self, lane: int, tokens: torch.Tensor) -> torch.Tensor:
        """Predict the last block's output from all tokens of a lane.

        Return this worker's part.
        """

    def entered(self, lane: int, tokens: torch.Tensor, hidden: torch.Tensor, video: slice) -> None:
        """Record `hidden`, the first block's output for `tokens`.

        `tokens` may include other workers' tokens.

        `video` selects the video tokens in `hidden`. A change is measured in them alone.
        """

    def choose(self) -> SkipDecision:
        """Return the lanes that continue, once the first block has computed all lanes."""

    def skip_rest(self, lane: int, hidden: torch.Tensor) -> torch.Tensor:
        """Predict the last block's output from the first's, for a lane that does not continue."""

    def ended(self, lane: int, hidden: torch.Tensor) -> None:
        """Record `hidden`, the last block's output."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One hidden state in a step: one CFG branch of one sample.

    Tensors have any floating dtype and are cast to the model's compute dtype. A model with an image
    branch needs `image` and a text with 512 tokens. Other models ignore `image`, as in ComfyUI.
    """

    latents: torch.Tensor
    """[1, C, T, h, w] in the model's latent space. C is 16, 36 with the image condition, or 48. Odd
    sides are padded to whole patches."""
    text: torch.Tensor
    """[1, L, 4096]."""
    image: torch.Tensor | None = None
    """Start image's CLIP vision embedding, [1, N, 1280]."""
    negative_text: torch.Tensor | None = None
    """Negative text with any length, for models inside `attach_nag`."""
    timestep_scales: tuple[float, ...] | None = None
    """Multipliers for the step's timestep by latent frame (TI2V-5B): 0 for a given frame, 1 for a
    generated one. None: 1 for all frames."""
    name: object = None
    """Lane key within a run. Caches keep values under it from step to step."""
    front: tuple[TokenPart, ...] = ()
    """Tokens before the video."""
    behind: tuple[TokenPart, ...] = ()
    """Tokens after the video."""
    positions: Positions = FROM_ORIGIN
    """Rotary positions of the video."""

    def tokens(self, patch_size: Sequence[int]) -> int:
        """Return the number of tokens in the lane."""
        return sum(math.prod(grid) for grid, _ in self.placed(patch_size))

    def placed(self, patch_size: Sequence[int]) -> tuple[Placed, ...]:
        """Return grid and positions for each part, including the video, in token order."""
        return (
            *((part.grid(patch_size), part.positions) for part in self.front),
            (patch_grid(self.latents.shape[2:], patch_size), self.positions),
            *((part.grid(patch_size), part.positions) for part in self.behind),
        )
