"""CFG sides of a step: lanes, and the velocity combined from theirs."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch


class Side(IntEnum):
    """CFG side: a lane's text, and the presence of context tokens.

    Tables of sides are indexed by this value.
    """

    POSITIVE = 0
    NEGATIVE = 1
    NO_CONTEXT = 2
    """Negative text without context tokens."""


def sides_at(guidance: float, context_guidance: float = 1.0) -> tuple[Side, ...]:
    """Return the CFG sides in a step with these scales, in lane order.

    All have equally many lanes.
    """
    if guidance == 1:
        return (Side.POSITIVE,)
    if context_guidance == 1:
        return (Side.POSITIVE, Side.NEGATIVE)
    # The short lanes in the middle: each of two cfg ranks then computes one side's long lanes, and
    # half of the short ones.
    return (Side.POSITIVE, Side.NO_CONTEXT, Side.NEGATIVE)


def guided_velocity(
    velocities: Sequence[torch.Tensor],
    sides: Sequence[Side],
    guidance: float,
    context_guidance: float = 1.0,
) -> torch.Tensor:
    """Apply guidance to the velocities [1, C, T, h, w] of all lanes in a step, in order.

    It is none + context_guidance (negative - none) + guidance (positive - negative), where none is
    the negative text's velocity without context.

    Returns:
        [B, C, T, h, w] float32.
    """
    # In fp32 before the sum: the guidance scale multiplies rounding errors too.
    stacked = torch.cat(list(velocities)).float()
    of_side = dict(zip(sides, stacked.chunk(len(sides)), strict=True))
    positive = of_side[Side.POSITIVE]
    if Side.NEGATIVE not in of_side:
        return positive
    negative = of_side[Side.NEGATIVE]
    guided = negative + guidance * (positive - negative)
    if Side.NO_CONTEXT not in of_side:
        return guided
    return guided + (context_guidance - 1) * (negative - of_side[Side.NO_CONTEXT])
