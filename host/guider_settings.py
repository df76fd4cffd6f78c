"""What a GUIDER of both experts is set to."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..plan.context_windows import ContextWindows
from ..plan.experts import TRAIN_TIMESTEPS, expert_at
from ..sampling import RequestError
from ..sampling.cache_settings import CacheSettings
from ..sampling.guidance import Guidance


@dataclass(frozen=True, kw_only=True)
class GuiderSettings:
    """When each expert runs, and how strongly it follows the prompt. Raises `RequestError` for another ratio."""

    boundary_ratio: float
    guidance: tuple[float, float]
    """CFG scale of the (high, low) expert; 1 computes no negative lane."""
    more_guidance: Guidance = field(default_factory=Guidance)
    """A scale for each step, which wins over `guidance`, and NAG."""
    cache: CacheSettings | None = None
    """What calls of the model may take over from the ones before."""
    windows: ContextWindows | None = None
    """How a video that is too long for the experts is looked at in pieces."""

    def __post_init__(self) -> None:
        if not 0 <= self.boundary_ratio <= 1:
            raise RequestError(
                f"boundary ratio {self.boundary_ratio:g}: give 0 to 1 (Wan2.2: 0.875 for text, 0.9 for images)"
            )

    def expert(self, sigma: float) -> str:
        """The expert of a call at noise level `sigma`."""
        return expert_at(sigma * TRAIN_TIMESTEPS, self.boundary_ratio)

    def scale(self, expert: str) -> float:
        """The CFG scale of an expert, where no step has one of its own."""
        return self.guidance[0 if expert == "high" else 1]
