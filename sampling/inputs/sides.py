"""CFG sides of a step: their lanes, and the velocity that their velocities make."""

from __future__ import annotations

from collections.abc import Sequence

import torch

POSITIVE, NEGATIVE, NO_CONTEXT = range(3)
"""CFG sides: positive text, negative text, negative text without context tokens."""


def sides_at(guidance: float, context_guidance: float = 1.0) -> tuple[int, ...]:
    """Return the CFG sides of a step with these scales, in the order of its lanes; all have equally many lanes."""
    if guidance == 1:
        return (POSITIVE,)
    if context_guidance == 1:
        return (POSITIVE, NEGATIVE)
    # The short lanes in the middle: each of two cfg ranks then computes long lanes of one side, and half of the short.
    return (POSITIVE, NO_CONTEXT, NEGATIVE)


def guided_velocity(
    velocities: Sequence[torch.Tensor], sides: Sequence[int], guidance: float, context_guidance: float = 1.0
) -> torch.Tensor:
    """Apply guidance to the velocities [1, C, T, h, w] of all lanes of a step, in their order.

    It is none + context_guidance (negative - none) + guidance (positive - negative), where none is the velocity of the
    negative text without context.

    Returns:
        [B, C, T, h, w] float32.
    """
    stacked = torch.cat(list(velocities)).float()
    of_side = dict(zip(sides, stacked.chunk(len(sides)), strict=True))
    positive = of_side[POSITIVE]
    if NEGATIVE not in of_side:
        return positive
    negative = of_side[NEGATIVE]
    guided = negative + guidance * (positive - negative)
    if NO_CONTEXT not in of_side:
        return guided
    return guided + (context_guidance - 1) * (negative - of_side[NO_CONTEXT])
