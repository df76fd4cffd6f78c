"""What a GUIDER of both experts is set to."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan.experts import TRAIN_TIMESTEPS, expert_at
from ..sampling import RequestError


@dataclass(frozen=True, kw_only=True)
class GuiderSettings:
    """When each expert runs, and how strongly it follows the prompt. Raises `RequestError` for another ratio."""

    boundary_ratio: float
    guidance: tuple[float, float]
    """CFG scale of the (high, low) expert; 1 computes no negative lane."""

    def __post_init__(self) -> None:
        if not 0 <= self.boundary_ratio <= 1:
            raise RequestError(
                f"boundary ratio {self.boundary_ratio:g}: give 0 to 1 (Wan2.2: 0.875 for text, 0.9 for images)"
            )

    def expert(self, sigma: float) -> str:
        """The expert of a call at noise level `sigma`."""
        return expert_at(sigma * TRAIN_TIMESTEPS, self.boundary_ratio)

    def scale(self, expert: str) -> float:
        return self.guidance[0 if expert == "high" else 1]
