"""Which expert runs in which step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

TRAIN_TIMESTEPS = 1000


def expert_at(timestep: float, boundary_ratio: float) -> str:
    """The expert of a step that starts at `timestep`: "high" while it is at least boundary_ratio * 1000, else "low"."""
    return "high" if timestep >= boundary_ratio * TRAIN_TIMESTEPS else "low"


def split_at_boundary(timesteps: Sequence[float], boundary_ratio: float) -> int:
    """Index of the first low-noise step; `len(timesteps)` if every step is high-noise.

    `timesteps` are the times at which the steps *start*, from 1000 down to 0. A step is high-noise
    while `t >= boundary_ratio * 1000`. Raises ValueError for a ratio outside 0..1 and for timesteps that rise.
    """
    if not 0.0 <= boundary_ratio <= 1.0:
        raise ValueError(f"boundary_ratio is {boundary_ratio}, it must lie in 0..1 (Wan2.2: T2V 0.875, I2V 0.9)")
    for step, (before, start) in enumerate(pairwise(timesteps), start=1):
        if not before >= start:
            raise ValueError(f"timesteps must not rise: step {step - 1} starts at {before}, step {step} at {start}")
    return sum(expert_at(timestep, boundary_ratio) == "high" for timestep in timesteps)
