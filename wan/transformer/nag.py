"""Normalized attention guidance (NAG): a negative prompt without a second lane.

In a lane without CFG, tokens attend to the positive and to the negative text. The positive result
is pushed away from the negative one, limited in size and mixed with the original (Chen et al. 2025,
arXiv 2505.21179):

    guided = scale x positive - (scale - 1) x negative
    guided = guided x min(1, tau x |positive| / |guided|)   absolute sums over a token's features
    result = alpha x guided + (1 - alpha) x positive
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Texts = tuple[torch.Tensor, torch.Tensor]
"""A lane's positive text [1, L, D] and negative text [1, M, D]."""

PARTS = 8
"""Number of token parts for the negative text. Its result and the fp32 copies for the guidance then
take less memory than one value for all tokens."""


@dataclass(frozen=True, kw_only=True)
class Nag:
    """Strength of the guidance. The defaults are usual for Wan.

    Raises:
        ValueError: a number is out of range.
    """

    scale: float = 11.0
    """1 changes nothing. Higher values push further away from the negative text."""
    tau: float = 2.5
    """Maximum size of the guided result, as a multiple of the positive one."""
    alpha: float = 0.25
    """Share of the guided result in the mix: 0 changes nothing, 1 replaces the original."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale >= 1):
            raise ValueError(
                f"NAG scale {self.scale:g}: give 1 (changes nothing) or more, 11 is usual"
            )
        if not (math.isfinite(self.tau) and self.tau > 0):
            raise ValueError(f"NAG tau {self.tau:g}: give a number above 0, 2.5 is usual")
        if not 0 <= self.alpha <= 1:
            raise ValueError(
                f"NAG alpha {self.alpha:g}: give 0 (changes nothing) to 1, 0.25 is usual"
            )


def guide(positive: torch.Tensor, negative: torch.Tensor, nag: Nag) -> torch.Tensor:
    """Combine both texts' attention results, [1, S, D] each, in fp32.

    Returns the dtype of `positive`.
    """
    exact = positive.float()
    guided = (negative.float() * (1 - nag.scale)).add_(exact, alpha=nag.scale)
    size = torch.linalg.vector_norm(guided, ord=1, dim=-1, keepdim=True)
    limit = nag.tau * torch.linalg.vector_norm(exact, ord=1, dim=-1, keepdim=True)
    # `where` instead of a clamped ratio: a token of zeros gives 0 / 0, which is NaN.
    guided *= torch.where(size > limit, limit / size, 1.0)
    return guided.mul_(nag.alpha).add_(exact, alpha=1 - nag.alpha).type_as(positive)
