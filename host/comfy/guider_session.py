"""Settings of a guider, and the step, expert and lanes of each model call of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...plan import TRAIN_TIMESTEPS, OffloadJob, expert_at
from ...sampling import (
    NEAR_SIGMA,
    CacheSettings,
    ExtraTokens,
    Guidance,
    MagCache,
    RequestError,
    StepLanes,
    StepWindows,
    check_guidance,
    check_nag,
    check_windows,
    computed_shape,
    lane_names,
    offload_job,
    sides_at,
)
from ...schema import ContextWindows
from ...wan import ExpertPair


@dataclass(frozen=True, kw_only=True)
class GuiderSettings:
    """Boundary, guidance, step cache and context windows. Raises RequestError for a ratio outside 0 to 1."""

    boundary_ratio: float
    guidance: tuple[float, float]
    """CFG scale of the (high, low) expert; 1 computes no negative lane."""
    more_guidance: Guidance = field(default_factory=Guidance)
    """NAG, and a scale for each step, which takes precedence over `guidance`."""
    cache: CacheSettings | None = None
    """Reuse of results of earlier model calls."""
    windows: ContextWindows | None = None
    """Context windows for a video that is too long for the experts."""

    def __post_init__(self) -> None:
        if self.more_guidance.context != 1:
            raise RequestError(
                f"context_guidance is {self.more_guidance.context:g}, which Wan Guider does not apply, because ComfyUI "
                "combines two predictions there: use Wan Sampler (streamed), or set it to 1 in Wan Guidance"
            )
        if not 0 <= self.boundary_ratio <= 1:
            raise RequestError(
                f"boundary ratio {self.boundary_ratio:g}: give 0 to 1 (Wan2.2: 0.875 for text, 0.9 for images)"
            )

    def expert(self, sigma: float) -> str:
        """Return the expert of a call at noise level `sigma`."""
        return expert_at(sigma * TRAIN_TIMESTEPS, self.boundary_ratio)


SIGMA_TOLERANCE = 1e-5
"""Noise levels closer than this differ only by rounding."""


@dataclass(frozen=True, kw_only=True)
class GuiderSteps:
    """The steps of one run under `settings`. Raises RequestError for settings that do not fit these steps."""

    settings: GuiderSettings
    sigmas: tuple[float, ...]
    """Steps + 1 noise levels."""
    shape: tuple[int, ...]
    """Shape of the latents, [B, C, T, h, w]."""
    levels: Sequence[float]
    """Predicted noise level of each model call."""
    tokens: tuple[ExtraTokens, ...] = ()
    """Tokens next to those of the video, of each CFG side."""

    def __post_init__(self) -> None:
        guidance, steps = self.settings.more_guidance, self.steps
        if steps < 1:
            return
        check_guidance(self.settings.guidance, guidance.steps, steps=steps)
        levels = self.sigmas[:-1]
        scales = [self.scale(level) for level in levels]
        if guidance.nag is not None:
            check_nag(scales, has_negative=True)
        windows, cache = self.settings.windows, self.settings.cache
        if windows is not None:
            mag_steps = range(steps) if isinstance(cache, MagCache) else ()
            check_windows(windows, self.shape[2], mag_steps=mag_steps)
        if isinstance(cache, MagCache):
            experts = [self.settings.expert(level) for level in levels]
            cache.table.check_steps(self.sigmas, experts, [sides_at(scale) for scale in scales])

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    def step(self, sigma: float) -> int:
        """Return the 0-based step of a call at noise level `sigma`; sigmas may also rise, for unsampling."""
        descending = self.sigmas[0] >= self.sigmas[-1]
        started = [
            step
            for step, level in enumerate(self.sigmas[:-1])
            if (level >= sigma - SIGMA_TOLERANCE if descending else level <= sigma + SIGMA_TOLERANCE)
        ]
        return started[-1] if started else 0

    def scale(self, sigma: float) -> float:
        """Return the CFG scale of a call at `sigma`."""
        settings, scales = self.settings, self.settings.more_guidance.steps
        if scales is None:
            return settings.guidance[0 if settings.expert(sigma) == "high" else 1]
        return scales[min(self.step(sigma), len(scales) - 1)]

    @property
    def sides(self) -> dict[str, tuple[int, ...]]:
        """For each expert, the CFG sides of that of its calls with most of them."""
        sides = dict.fromkeys(("high", "low"), sides_at(1))
        for level in self.levels:
            expert = self.settings.expert(level)
            sides[expert] = max(sides[expert], sides_at(self.scale(level)), key=len)
        return sides

    @property
    def needs_negative(self) -> dict[str, bool]:
        """For each expert, True if some of its calls read the negative text."""
        nag = self.settings.more_guidance.nag is not None
        return {expert: nag or len(sides) > 1 for expert, sides in self.sides.items()}

    def windows(self, sigma: float) -> StepWindows | None:
        """Return the context windows of a call."""
        settings = self.settings.windows
        return None if settings is None else StepWindows(settings, self.step(sigma), self.shape[2])

    @property
    def calls(self) -> StepLanes:
        """Expert and lanes of each call, by its number; a sampler may still read the negative at guidance 1."""
        return {
            call: (
                self.settings.expert(level),
                lane_names(self.shape[0], sides_at(self.scale(level)), self.windows(level)),
            )
            for call, level in enumerate(self.levels)
        }

    @property
    def computed_shape(self) -> tuple[int, ...]:
        """Largest shape that a call computes; see `sampling.computed_shape`."""
        return computed_shape(self.shape, self.settings.windows, range(max(1, self.steps)))

    def job(self, pair: ExpertPair, device: torch.device) -> OffloadJob:
        """Return the planner's job of the calls, of which there is at least one."""
        calls = self.calls.values()
        return offload_job(
            pair,
            self.computed_shape,
            device,
            experts_of_steps=[expert for expert, _ in calls],
            lanes_of_steps=[len(names) for _, names in calls],
            sides_of_steps=[len({name.side for name in names}) for _, names in calls],
            sides={expert: self.extra_tokens(pair, sides) for expert, sides in self.sides.items()},
            cache=self.settings.cache,
        )

    def extra_tokens(self, pair: ExpertPair, sides: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of a lane next to those of its video for each of the CFG `sides`."""
        frames, windows = self.shape[2], self.settings.windows
        window = frames if windows is None else windows.frames
        counts = [
            side.count(reads_reference=pair.reads_reference, frames=frames, window=window) for side in self.tokens
        ]
        return tuple(counts[side] if counts else 0 for side in sides)

    def check_calls(self, levels: Sequence[float] | None, sampler: str) -> None:
        """Refuse MagCache unless the sampler calls the model once per step at the step's sigma; None: unknown calls."""
        if not isinstance(self.settings.cache, MagCache):
            return
        if levels is not None and len(levels) == self.steps and all(map(_near, levels, self.sigmas)):
            return
        calls = "has unknown model calls" if levels is None else f"makes {len(levels)} model calls"
        raise RequestError(
            f"magcache was calibrated with one model call in each of {self.steps} steps, but the sampler {sampler} "
            f"{calls}, or calls at other noise levels: choose euler or another sampler with one call per step, or the "
            "first-block cache"
        )

    def check_call(self, call: int, sigma: float) -> None:
        """Refuse a call that MagCache was not calibrated for."""
        if isinstance(self.settings.cache, MagCache) and not (call < self.steps and _near(sigma, self.sigmas[call])):
            raise RequestError(
                f"model call {call} is at noise level {sigma:.4f}, but magcache was calibrated with one call for each "
                f"of {self.steps} steps: use the first-block cache"
            )


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= NEAR_SIGMA
